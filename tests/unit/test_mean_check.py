"""The check of a loss against those of its micro-batches is not noticed by the modules that it runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_par.pipeline_parallel.mean_check import LossMismatch, compare_losses
from lightning_par.pipeline_parallel.runtime import Call


class Counting(nn.Module):
    """Remembers its calls in every way that a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("spread", torch.zeros(1).expand(3))
        self.rebound, self.listed, self.total = 0, [], torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        self.in_place += 1
        self.rebound += 1
        self.total += x.sum()
        self.listed.append(x)
        self.new = x
        return x


class Model(nn.Module):
    """With a part that counts, below its first level."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(Counting(), nn.Flatten())


def compare(model: Model, reduce: str) -> LossMismatch | None:
    def run(hidden: tuple[Tensor, ...], call: Call) -> Tensor:
        return getattr(model.head(hidden[0]), reduce)()

    parts = [torch.arange(4.0).reshape(2, 2), torch.ones(2, 2)]
    calls = [Call("training_step", (), {}) for _ in parts]
    return compare_losses(run, calls, Call("training_step", (), {}), parts, [model])


def test_a_mean_is_told_from_a_sum() -> None:
    assert compare(Model(), "mean") is None
    assert compare(Model(), "sum") == LossMismatch(whole=10.0, mean=5.0, num_microbatches=2)


def test_modules_do_not_notice() -> None:
    model = Model()
    counting = model.head[0]
    compare(model, "mean")
    assert counting.training
    assert (counting.rebound, counting.listed, float(counting.total), float(counting.in_place)) == (0, [], 0.0, 0.0)
    assert not hasattr(counting, "new")
