"""Weights of a window's losses, and the loss that micro-batches together have, by hand-made numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_par.loss_weights import LossWeights
from lightning_par.pipeline_parallel.mean_check import compare_losses
from lightning_par.pipeline_parallel.outputs import merge_weighted, num_samples_of
from lightning_par.pipeline_parallel.runtime import Call

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


class Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1


def window(batches: list[list[tuple[float, float]]], num_batches: int, guess: int | None = None) -> float:
    """The gradient that a window ends with, of (gradient of the mean, samples) for each micro-batch of each batch."""
    weights = LossWeights(Alone(), 1, CPU)  # type: ignore[arg-type]
    gradient = 0.0
    for batch in batches:
        outputs = [{"loss": torch.zeros(()), "num_samples": count} for _, count in batch]
        if guess is None:  # the samples of a batch are known before its backward
            weights.add(weights.sum_over_ranks(outputs))
        else:
            weights.guess(guess)
        gradient += sum(mean * weights.factor(count) / num_batches for mean, count in batch)
        if guess is not None:
            weights.add(weights.sum_over_ranks(outputs))
    return gradient * weights.close(num_batches)


@pytest.mark.parametrize("guess", [None, 1, 7])
@pytest.mark.parametrize(
    ("batches", "num_batches", "expected"),
    [
        ([[(3.0, 5)]], 1, 3.0),
        ([[(1.0, 1), (4.0, 2)]], 1, 3.0),
        ([[(1.0, 1)], [(4.0, 2)]], 2, 3.0),
        ([[(9.0, 0)], [(1.0, 1)], [(4.0, 2)]], 3, 3.0),
        ([[(1.0, 1)], [(4.0, 2)]], 4, 3.0),  # a window that is not full
        ([[(9.0, 0)]], 1, 0.0),
    ],
)
def test_a_window_is_one_mean_over_its_samples(
    batches: list[list[tuple[float, float]]], num_batches: int, expected: float, guess: int | None
) -> None:
    assert window(batches, num_batches, guess) == pytest.approx(expected)


def test_without_numbers_nothing_changes() -> None:
    weights = LossWeights(Alone(), 2, CPU)  # type: ignore[arg-type]
    for _ in range(2):
        weights.guess(4)
        assert weights.sum_over_ranks([torch.zeros(())]) is None
        weights.add(None)
        assert (weights.factor(None), weights.close(3)) == (1.0, 1.0)


def test_some_weighted_losses_among_others_are_refused() -> None:
    weights = LossWeights(Alone(), 1, CPU)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="for some batches and not for others"):
        weights.sum_over_ranks([{"loss": 1.0}, {"loss": 1.0, "num_samples": 1}])


@pytest.mark.parametrize("given", [-1, float("nan"), float("inf"), "3", torch.ones(2)])
def test_impossible_numbers_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="a finite number, or tensor of one element, of at least 0"):
        num_samples_of({"loss": torch.zeros(()), "num_samples": given})


def test_the_loss_of_a_batch_leaves_out_parts_without_samples() -> None:
    losses, counts = [1.0, float("nan"), 4.0], [1, 0, 2]
    outputs = [
        {"loss": torch.tensor(loss), "num_samples": torch.tensor(count), "kind": "a"}
        for loss, count in zip(losses, counts, strict=True)
    ]
    merged = merge_weighted(outputs)
    assert (float(merged["loss"]), int(merged["num_samples"]), merged["kind"]) == (3.0, 3, "a")
    assert merge_weighted([]) is None
    assert float(merge_weighted([torch.tensor(1.0), torch.tensor(2.0)])) == 1.5


class Stage(nn.Module):
    """A last stage whose loss is given by a function of what it receives, and that notes each call."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss, self.seen, self.count = loss, [0], 0
        self.dropout = nn.Dropout(0.5)

    def run(self, hidden: tuple[Tensor, ...], call: Call) -> Any:
        self.count += 1
        self.seen.append(self.count)
        self.last = hidden
        return self.loss(self.dropout(hidden[0]))


def compare(loss: Any) -> Any:
    stage = Stage(loss)
    hidden = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]
    found = compare_losses(stage.run, [Call("step", ())] * 2, Call("step", ()), hidden, [stage])
    assert (stage.count, stage.seen, hasattr(stage, "last"), stage.dropout.training) == (0, [0], False, True)
    return found


def test_a_mean_is_told_from_what_is_none_without_a_trace() -> None:
    assert compare(lambda values: values.mean()) is None
    assert compare(lambda values: {"loss": values.max(), "num_samples": len(values)}) is not None
    found = compare(lambda values: values.square().mean().sqrt())
    assert (found.whole, found.mean) == pytest.approx(((39 / 4) ** 0.5, (2.5**0.5 + 17**0.5) / 2))
    big = lambda values: {"loss": values[values > 1].mean(), "num_samples": (values > 1).sum()}  # noqa: E731
    assert compare(big) is None
    assert compare(lambda values: big(values)["loss"]) is not None
    assert compare(lambda values: {}) is None, "no loss in evaluation mode"
