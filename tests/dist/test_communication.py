"""What each layout moves and holds, counted, against the formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_par.communication import CommunicationCounter
from tests.dist.models import BLOCK, VOCABULARY, WIDTH, TinyGPT, token_data
from tests.dist.parity import LAYOUTS, Layout
from tests.dist.ranks import Ranks

FLOAT = 4
BATCH = 4
UNITS = 3
"""Two blocks and the root."""
NUM_TENSORS = len(list(TinyGPT().parameters()))


class SilentGPT(TinyGPT):
    """Logs nothing, so that only the layout communicates."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)


class CountSecondStep(Callback):
    """Counts the collectives and reads the state of the second optimizer step."""

    def __init__(self, window: int) -> None:
        self._window = window
        self.counter: CommunicationCounter | None = None
        self.state: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._window:
            self.counter = trainer.strategy.count_communication()
            self.counter.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if args[-1] == 2 * self._window - 1:
            self.counter.__exit__(None, None, None)
            self.state = trainer.strategy.model_state_bytes()


def measure(layout: Layout, window: int, options: dict[str, Any]) -> dict[str, Any]:
    """Bytes and calls of one optimizer step of `window` micro-batches, state bytes, and parameter counts."""
    count = CountSecondStep(window)
    module = SilentGPT(tied=False)
    trainer = layout.trainer(max_steps=2, accumulate_grad_batches=window, callbacks=[count], **options)
    samples = token_data(2 * window * BATCH * layout.data_parallel_size)
    trainer.fit(module, DataLoader(samples, BATCH))
    # Lightning itself broadcasts eight bytes a batch (whether a rank was told to end): not the layout's.
    kinds = ("all_reduce", "reduce_scatter", "all_gather")
    moved = [count.counter.bytes_by_axis(kind) for kind in kinds]
    calls = {kind: count.counter.calls(kind) for kind in kinds}
    return {
        "bytes": {axis: sum(by_axis.get(axis, 0) for by_axis in moved) for by_axis in moved for axis in by_axis},
        "calls": {kind: by_axis for kind, by_axis in calls.items() if by_axis},
        "state": count.state,
        "expected_state": trainer.strategy.expected_model_state_bytes(),
        "parameters": trainer.strategy.total_num_parameters,
        "local_parameters": sum(part.numel() for part in trainer.strategy.local_parameters()),
    }


def _measure(ranks: Ranks, name: str, window: int = 1, find_unused: bool = False, **options: Any) -> dict[str, Any]:
    layout = replace(LAYOUTS[name], strategy={**LAYOUTS[name].strategy, "find_unused_parameters": find_unused})
    return ranks(layout.world_size, measure, layout, window, options)[0]


def _check_state(seen: dict[str, Any], num_shards: int) -> None:
    """Sixteen bytes a parameter, over the ranks that share them."""
    steps = FLOAT * NUM_TENSORS  # Adam's step counts
    assert sum(seen["state"].values()) - steps == 16 * seen["parameters"] // num_shards == seen["expected_state"]
    assert seen["local_parameters"] == seen["parameters"] // num_shards


@pytest.mark.parametrize(
    ("name", "window", "factor", "calls"),
    [
        ("dp2", 1, 2, {"all_reduce": 1}),
        ("dp2", 3, 2, {"all_reduce": 1}),
        ("zero1x2", 1, 2, {"all_gather": UNITS, "reduce_scatter": UNITS}),
        ("zero1x2", 3, 2, {"all_gather": UNITS, "reduce_scatter": UNITS}),
        ("zero2x2", 1, 2, {"all_gather": UNITS, "reduce_scatter": UNITS}),
        ("zero2x2", 3, 1 + 3, {"all_gather": UNITS, "reduce_scatter": 3 * UNITS}),
        ("zero3x2", 1, 3, {"all_gather": 2 * UNITS, "reduce_scatter": UNITS}),
        ("zero3x2", 3, 3 * 3, {"all_gather": 3 * 2 * UNITS, "reduce_scatter": 3 * UNITS}),
        ("zero3x4", 1, 3, {"all_gather": 2 * UNITS, "reduce_scatter": UNITS}),
    ],
)
def test_data_axis_moves_and_holds_what_the_paper_says(
    ranks: Ranks, name: str, window: int, factor: int, calls: dict[str, int]
) -> None:
    axis, num_shards = ("dp_replicate", 1) if name == "dp2" else ("dp_shard", LAYOUTS[name].world_size)
    seen = _measure(ranks, name, window)
    assert seen["bytes"] == {axis: factor * seen["parameters"] * FLOAT}
    assert seen["calls"] == {kind: {axis: number} for kind, number in calls.items()}
    _check_state(seen, num_shards)


@pytest.mark.parametrize("window", [1, 3])
def test_looking_for_unused_parameters_costs_one_small_reduction_a_step(ranks: Ranks, window: int) -> None:
    seen = _measure(ranks, "zero1x2", window, find_unused=True)
    flags = 2 * 4 * NUM_TENSORS  # an all-reduce of one integer each
    assert seen["bytes"] == {"dp_shard": 2 * seen["parameters"] * FLOAT + flags}
    assert seen["calls"]["all_reduce"] == {"dp_shard": 1}


def test_hierarchical_sharding_adds_one_reduction_over_the_replicas(ranks: Ranks) -> None:
    seen = _measure(ranks, "zero3_hsdp2x2", window=2)
    psi = seen["parameters"] * FLOAT
    # Each rank all-reduces its half of the gradients, once a window.
    assert seen["bytes"] == {"dp_shard": 2 * 3 * psi, "dp_replicate": 2 * psi // 2}
    _check_state(seen, 2)


def test_tensor_axis_moves_four_all_reduces_a_block(ranks: Ranks) -> None:
    seen = _measure(ranks, "tp2")
    activation = BATCH * BLOCK * WIDTH * FLOAT
    blocks = 2 * 4 * 2 * activation  # two blocks, four all-reduces of 2 n each
    # Embedding and head: one all-reduce of activations each, and the gathered logits.
    assert seen["calls"] == {"all_reduce": {"tp": 2 * 4 + 2}, "all_gather": {"tp": 1}}
    logits = BATCH * BLOCK * VOCABULARY * FLOAT
    assert seen["bytes"] == {"tp": blocks + 2 * 2 * activation + logits}


def test_bf16_halves_what_is_gathered_and_nothing_that_is_held(ranks: Ranks) -> None:
    seen = _measure(ranks, "zero3x2", precision="bf16-mixed")
    psi = seen["parameters"]
    # Two gathers in two bytes, one reduction in four.
    assert seen["bytes"] == {"dp_shard": 2 * 2 * psi + 4 * psi}
    _check_state(seen, 2)
