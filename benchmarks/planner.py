"""What the planner predicts beside what layouts of this machine's ranks measure: states, peak memory, step time.

    python -m benchmarks.planner [--steps 6] [--sizes small,large] [--out docs/planner_accuracy.md]

Ranks share the machine's cores, so that times say how well layouts are ranked, not how fast machines are.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.live_bytes import LiveBytes
from examples.gpt.model import GPTConfig
from examples.gpt.module import GPTModule
from lightning_par import HybridStrategy
from lightning_par.layout import ParallelLayout
from lightning_par.planner import Candidate, Cluster, PlannedModel, predict_memory, predict_time, state_bytes
from lightning_par.planner.cluster import Link
from lightning_par.planner.measure import measure_cluster, measure_links
from lightning_par.planner.words import gigabytes, seconds

GLOBAL_BATCH = 16
SIZES = {
    "small": GPTConfig(num_layers=4, num_heads=4, hidden_size=128, block_size=128, positions="rotary"),
    "large": GPTConfig(num_layers=8, num_heads=8, hidden_size=256, block_size=128, tied=False),
}


def _candidate(zero: int = 0, micro: int = 0, **options: Any) -> Candidate:
    degrees = {name: options.pop(name) for name in ("pp", "dp_replicate", "dp_shard", "tp") if name in options}
    layout = ParallelLayout(**degrees)
    per_rank = GLOBAL_BATCH // layout.data_parallel_size
    size = micro or per_rank
    return Candidate(layout, zero, size, per_rank // size, **options)


CANDIDATES: dict[str, Candidate] = {
    "plain": _candidate(),
    "plain, checkpointing": _candidate(activation_checkpointing=True),
    "DP 2": _candidate(dp_replicate=2),
    "ZeRO-1 2": _candidate(1, dp_shard=2),
    "ZeRO-2 2": _candidate(2, dp_shard=2),
    "ZeRO-3 2": _candidate(3, dp_shard=2),
    "ZeRO-2 2, 4 batches": _candidate(2, 2, dp_shard=2),
    "ZeRO-3 2, checkpointing": _candidate(3, dp_shard=2, activation_checkpointing=True),
    "TP 2": _candidate(tp=2),
    "PP 2, 1f1b": _candidate(0, 4, pp=2, schedule="1f1b"),
    "PP 2, interleaved": _candidate(0, 4, pp=2, schedule="interleaved_1f1b", num_virtual_stages=2),
    "DP 4": _candidate(dp_replicate=4),
    "ZeRO-3 4": _candidate(3, dp_shard=4),
    "ZeRO-3 2 x 2 replicas": _candidate(3, dp_replicate=2, dp_shard=2),
    "TP 2 x ZeRO-2 2": _candidate(2, tp=2, dp_shard=2),
    "PP 2 x ZeRO-1 2": _candidate(1, 2, pp=2, dp_shard=2, schedule="1f1b"),
    "PP 2 x TP 2": _candidate(0, 4, pp=2, tp=2, schedule="1f1b"),
    "PP 2 x TP 2 x ZeRO-3 2": _candidate(3, 2, pp=2, tp=2, dp_shard=2, schedule="1f1b"),
}


@dataclass
class Measured:
    """What one rank found."""

    states: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    seconds: float = 0.0
    coordinates: dict[str, int] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)


class _Watch(Callback):
    """Times the first steps, then counts bytes through one more."""

    def __init__(self, steps: int) -> None:
        self.steps, self.times, self.found = steps, [], Measured()
        self._live: LiveBytes | None = None
        self._start = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        mesh, device = trainer.strategy.mesh, trainer.strategy.root_device
        axes = ("pp", "dp_replicate", "dp_shard", "tp")
        self.found.links = measure_links({axis: mesh.get_group(axis) for axis in axes}, device)

    def on_train_batch_start(self, trainer: Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self._is_window_start(trainer, batch_idx):
            self._start = time.perf_counter()
            if trainer.global_step == self.steps and self._live is None:
                self._live = LiveBytes(_held(trainer, batch))
                self._live.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_window_start(trainer, batch_idx + 1):
            return
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self.found.peak = self._live.peak
        else:
            self.times.append(time.perf_counter() - self._start)
        self.found.states = dict(trainer.strategy.model_state_bytes())
        self.found.coordinates = trainer.strategy.coordinates

    def _is_window_start(self, trainer: Trainer, batch_idx: int) -> bool:
        return batch_idx % trainer.accumulate_grad_batches == 0


def _held(trainer: Trainer, batch: Any) -> list[torch.Tensor]:
    module, states = trainer.lightning_module, [s for o in trainer.optimizers for s in o.state.values()]
    return [
        *module.parameters(),
        *(p.grad for p in module.parameters() if p.grad is not None),
        *module.buffers(),
        *(value for state in states for value in state.values() if isinstance(value, torch.Tensor)),
        *batch,
    ]


def measure(size: str, candidate: Candidate, steps: int) -> Measured:
    """Train a few steps; every rank calls this."""
    torch.manual_seed(0)
    config = SIZES[size]
    tokens = torch.randint(0, config.vocab_size, (GLOBAL_BATCH * (steps + 2), config.block_size))
    pipelined = candidate.layout.pp > 1
    accumulate = 1 if pipelined else candidate.num_microbatches
    batch = candidate.batch_size if pipelined else candidate.micro_batch_size
    watch = _Watch(steps)
    trainer = Trainer(
        accelerator="cpu",
        devices=candidate.layout.world_size,
        strategy=HybridStrategy(**candidate.strategy_arguments()),
        max_steps=steps + 1,
        accumulate_grad_batches=accumulate,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = GPTModule(config)
    trainer.fit(module, DataLoader(TensorDataset(tokens, tokens), batch_size=batch))
    watch.found.seconds = statistics.median(watch.times[1:])
    return watch.found


@dataclass(frozen=True)
class Row:
    """One layout: predicted beside measured."""

    size: str
    name: str
    world: int
    states: tuple[int, int]
    peak: tuple[int, int]
    seconds: tuple[float, float]

    @property
    def peak_error(self) -> float:
        """Relative."""
        return self.peak[0] / self.peak[1] - 1


def compare(size: str, name: str, ranks: Callable[..., list[Any]], steps: int) -> Row:
    """Predict one layout, and measure it."""
    candidate = CANDIDATES[name]
    world = candidate.layout.world_size
    found: list[Measured] = ranks(world, measure, size, candidate, steps, timeout=240)
    model = _planned(size)
    cluster = _cluster(world, found[0].links)
    memory = predict_memory(model, cluster, candidate)
    exact = [state_bytes(model, candidate, one.coordinates["pp"], one.coordinates["dp_shard"]) for one in found]
    pairs = [(sum(vars(e).values()), sum(one.states.values())) for e, one in zip(exact, found, strict=True)]
    worst = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    return Row(
        size,
        name,
        world,
        worst,
        (memory.total - memory.reserved, max(one.peak for one in found)),
        (predict_time(model, cluster, candidate).total, max(one.seconds for one in found)),
    )


def _planned(size: str) -> PlannedModel:
    config = SIZES[size]
    tokens = torch.zeros(GLOBAL_BATCH, config.block_size, dtype=torch.long)
    return PlannedModel(GPTModule(config), (tokens, tokens), name=size)


def _cluster(world: int, links: dict[str, Link]) -> Cluster:
    # A rank alone has as many threads as one of two: what the warm processes are started with.
    cluster = measure_cluster(devices_per_node=max(2, world), accelerator="cpu")
    return replace(cluster, devices_per_node=world, links_by_axis=links)


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "Predicted / measured; states are bytes of the rank that is farthest off.\n",
        "| model | layout | ranks | states | peak memory | error | step |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.size} | {row.name} | {row.world} | {row.states[0]:,} / {row.states[1]:,} | "
        f"{gigabytes(row.peak[0])} / {gigabytes(row.peak[1])} | {row.peak_error:+.1%} | "
        f"{seconds(row.seconds[0])} / {seconds(row.seconds[1])} |"
        for row in rows
    ]
    return "\n".join(lines)


def verdict(rows: list[Row]) -> str:
    """How well memory and ranking were predicted."""
    errors = sorted(abs(row.peak_error) for row in rows)
    exact = sum(row.states[0] == row.states[1] for row in rows)
    lines = [
        f"States exact in {exact} of {len(rows)} layouts; peak memory off by {statistics.median(errors):.1%} in the "
        f"median, {errors[-1]:.1%} at worst."
    ]
    for size, world in sorted({(row.size, row.world) for row in rows}):
        group = [row for row in rows if (row.size, row.world) == (size, world)]
        chosen = min(group, key=lambda row: row.seconds[0])
        best = min(group, key=lambda row: row.seconds[1])
        lines.append(
            f"{size} on {world}: the planner's fastest is {chosen.name}, measured "
            f"{chosen.seconds[1] / best.seconds[1] - 1:.0%} above the best ({best.name}), of {len(group)}."
        )
    return "\n".join(f"- {line}" for line in lines)


def main() -> None:
    """Measure all, print and write the table."""
    from tests.dist.ranks import RankPool  # warm processes: importing torch takes longer than a measurement

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    with RankPool() as pool:
        for size in arguments.sizes.split(","):
            for name in CANDIDATES:
                if arguments.only in name:
                    rows.append(compare(size, name, pool.run, arguments.steps))
                    print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(verdict(rows))
    if arguments.out:
        arguments.out.write_text(
            f"# The planner's predictions beside measurements\n\n{table(rows)}\n\n{verdict(rows)}\n"
        )


if __name__ == "__main__":
    main()
