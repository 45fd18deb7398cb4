"""What a step sends, by an all-reduce and by a parameter server, counted for growing numbers of ranks.

    python benchmarks/traffic.py                                            a table
    python benchmarks/traffic.py --picture docs/parameter_server.png        and a picture

Each rank counts the bytes that its collectives move, in multiples of the parameters' bytes, during one step of a small
network on CPU ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_par import DPStrategy
from lightning_par.launch import launch, trainer_resources

WIDTH = 64
SYNCS = {"all_reduce": "all-reduce", "parameter_server": "parameter server"}


class Net(pl.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Count(pl.Callback):
    """Counts the second step."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start to count."""
        if batch_idx == 1:
            self._counter = trainer.strategy.count_communication()
            self._counter.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        """Stop."""
        if rest[-1] == 1:
            self._counter.__exit__(None, None, None)
            self.moved = sum(self._counter.bytes_by_axis().values())


def worker(config: dict[str, Any]) -> list[float]:
    """Bytes that each rank moves, in multiples of the parameters' bytes."""
    count, module = Count(), Net()
    size = sum(parameter.nbytes for parameter in module.parameters())
    trainer = pl.Trainer(
        **trainer_resources(),
        accelerator="cpu",
        strategy=DPStrategy(sync=config["sync"]),
        max_steps=2,
        callbacks=[count],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(64, WIDTH)), 4))
    moved: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(moved, count.moved / size)
    return moved


def draw(found: dict[str, dict[int, list[float]]], path: Path) -> None:
    """The busiest rank of each form, over the number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained", dpi=120)
    axes = figure.subplots()
    for sync, by_ranks in found.items():
        axes.plot(list(by_ranks), [max(moved) for moved in by_ranks.values()], marker="o", label=SYNCS[sync])
    axes.set(xlabel="ranks", ylabel="sent by the busiest rank (parameters)", ylim=(0, None), xticks=list(by_ranks))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    """Count, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 6])
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    found = {
        sync: {n: launch(worker, {"sync": sync}, {"devices": n, "accelerator": "cpu"}) for n in options.ranks}
        for sync in SYNCS
    }
    table = Table("ranks", *(f"{name}: each rank (x parameters)" for name in SYNCS.values()))
    for n in options.ranks:
        table.add_row(str(n), *(", ".join(f"{moved:.2f}" for moved in found[sync][n]) for sync in SYNCS))
    Console(width=120).print(table)
    if options.picture:
        draw(found, options.picture)


if __name__ == "__main__":
    main()
