"""Life of a laid-out module: other layouts one after another, none again, calls from outside a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_par import HybridStrategy
from lightning_par.engine import engine_of
from lightning_par.process_group import destroy_process_group
from tests.dist.models import HEADS, TinyGPT, token_data
from tests.dist.parity import LAYOUTS, SINGLE, Layout, RanksTogether, layouts, relative_difference
from tests.dist.ranks import OneProcess, Ranks
from tests.dist.whole import whole_weights


def _loader(layout: Layout, num_samples: int) -> DataLoader[Any]:
    """Global batches of 8 in the order that the ranks of any layout see, one process included."""
    data = token_data(num_samples)
    sampler = RanksTogether(data, 1) if layout.strategy is None else None
    return DataLoader(data, 8 // layout.data_parallel_size, sampler=sampler)


def one_after_another(names: list[str]) -> dict[str, torch.Tensor]:
    """Two steps under each layout in turn, on one module in one process; its weights at the end."""
    torch.manual_seed(0)
    module = TinyGPT(tied=True, optimizer="sgd", learning_rate=0.1)
    for name in names:
        layout = {**LAYOUTS, "single": SINGLE}[name]
        data = _loader(layout, 16)
        trainer = layout.trainer(max_steps=2)
        trainer.fit(module, data)
        trainer.validate(module, data, verbose=False)
    return whole_weights(module)


def test_layouts_follow_one_another_on_one_module(ranks: Ranks) -> None:
    names = ["zero3x2", "tp2", "dp2", "zero1x2", "tp2"]
    expected = ranks(1, one_after_another, ["single"] * len(names))[0]
    for weights in ranks(2, one_after_another, names):
        for name, weight in weights.items():
            assert relative_difference(weight, expected[name]) <= 1e-5, name


@dataclass(frozen=True)
class Plainness:
    """What tells a plain module from a laid-out one."""

    types: dict[str, type[nn.Module]]
    num_heads: set[int]
    is_sharded: bool
    is_tied: bool

    @classmethod
    def of(cls, module: TinyGPT) -> Plainness:
        return cls(
            types={name: type(child) for name, child in module.named_modules()},
            num_heads={block.attention.num_heads for block in module.net.blocks},
            is_sharded=any(isinstance(parameter, DTensor) for parameter in module.parameters()),
            is_tied=module.net.head.weight is module.net.tokens.weight,
        )


def take_off(layout: Layout) -> tuple[set[int], bool]:
    """Lay a module out and take the layout off; the heads it had meanwhile, and whether it kept its weights."""
    module = TinyGPT(tied=True)
    plain = Plainness.of(module)
    layout.trainer(max_steps=1).fit(module, DataLoader(token_data(16), 4))
    laid_out, trained = Plainness.of(module), whole_weights(module)
    assert laid_out.is_sharded
    engine_of(module).remove()
    assert Plainness.of(module) == plain
    module.loss((None, torch.zeros(1, 17, dtype=torch.long))).backward()
    kept = [torch.equal(parameter, trained[name]) for name, parameter in module.named_parameters()]
    return laid_out.num_heads, len(kept) == len(trained) and all(kept)


@pytest.mark.parametrize(("name", "num_heads"), [("zero3x2", HEADS), ("tp2", HEADS // 2)])
def test_taking_a_layout_off_leaves_a_plain_module(ranks: Ranks, name: str, num_heads: int) -> None:
    assert ranks(2, take_off, LAYOUTS[name]) == [({num_heads}, True)] * 2


class LookInside(Callback):
    """Calls the model from a hook, outside any step, and between backward and the optimizer's step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def _look(self, module: Any) -> None:
        with torch.no_grad():
            self.losses.append(module.loss((None, torch.arange(34).view(2, 17))).item())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._look(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._look(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(pl_module)


def look_inside(layout: Layout) -> list[float]:
    """Losses seen from hooks on one fixed batch, all through a fit."""
    torch.manual_seed(0)
    look = LookInside()
    trainer = layout.trainer(max_epochs=1, callbacks=[look])
    trainer.fit(TinyGPT(optimizer="sgd"), _loader(layout, 24))
    return look.losses


@layouts("dp2", "zero1x2", "zero2x2", "zero3x2", "tp2", "zero3x2xtp2")
def test_model_can_be_called_from_hooks(ranks: Ranks, one_process: OneProcess, layout: Layout) -> None:
    expected = one_process(look_inside)
    for losses in ranks(layout.world_size, look_inside, layout):
        assert losses == pytest.approx(expected, rel=1e-5)


class Blocks(nn.Module):
    """A block whose weights of three rows cannot be split evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x).tanh()


class Uneven(LightningModule):
    """Regression whose shapes do not divide by the number of ranks; a loose parameter; a metric target in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Blocks(), Blocks())
        self.scale = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        (x,) = batch
        error = self.scale * self.blocks(x) - x.flip(-1)
        return {"loss": error.square().mean(), "error": error.detach()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train_uneven(layout: Layout) -> dict[str, torch.Tensor]:
    """Weights after three steps, clipped."""
    torch.manual_seed(0)
    module, data = Uneven(), torch.utils.data.TensorDataset(torch.randn(24, 3))
    trainer = layout.trainer(max_epochs=1, gradient_clip_val=0.1)
    loader = DataLoader(data, 8 // layout.data_parallel_size)
    if layout.strategy is not None:  # the order that one process sees, dealt out in turn
        loader = DataLoader(
            data, 8 // layout.data_parallel_size, sampler=_InTurn(data, layout.data_parallel_size, trainer)
        )
    trainer.fit(module, loader)
    return whole_weights(module)


class _InTurn(torch.utils.data.DistributedSampler):
    """Sequential samples dealt to the data-parallel ranks."""

    def __init__(self, data: Any, num_ranks: int, trainer: Trainer) -> None:
        assert isinstance(trainer.strategy, HybridStrategy)
        super().__init__(data, num_ranks, trainer.strategy.data_parallel_rank, shuffle=False)


@layouts("dp2", "zero1x2", "zero3x2", "zero3x4", "zero3_hsdp2x2")
def test_shapes_that_do_not_divide(ranks: Ranks, one_process: OneProcess, layout: Layout) -> None:
    expected = one_process(train_uneven)
    for weights in ranks(layout.world_size, train_uneven, layout):
        for name, weight in weights.items():
            assert relative_difference(weight, expected[name]) <= 1e-5, name


def roots_after_a_new_group(layout: Layout) -> list[bool]:
    """Whether parameters and moments of a second run are on its own mesh, though it equals the first run's."""
    for _ in range(2):
        destroy_process_group()
        module = TinyGPT(num_blocks=1)
        trainer = layout.trainer(max_epochs=1)
        trainer.fit(module, _loader(layout, 16))
    moments = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    held = [tensor for tensor in (*module.parameters(), *moments) if isinstance(tensor, DTensor)]
    return [tensor.device_mesh._get_root_mesh() is trainer.strategy.mesh for tensor in held]


@layouts("zero3x2", "tp2")
def test_a_new_group_is_not_taken_for_an_earlier_one(ranks: Ranks, layout: Layout) -> None:
    for on_own_mesh in ranks(2, roots_after_a_new_group, layout):
        assert on_own_mesh and all(on_own_mesh)
