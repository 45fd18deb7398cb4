"""What each layout moves and holds, counted, against the formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_par.communication import CommunicationCounter
from tests.dist.models import BLOCK, WIDTH, TinyGPT, token_data
from tests.dist.parity import LAYOUTS, Layout
from tests.dist.ranks import Ranks

FLOAT = 4
BATCH = 4


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
    return {
        "bytes": {axis: sum(by_axis.get(axis, 0) for by_axis in moved) for by_axis in moved for axis in by_axis},
        "reductions": {kind: count.counter.calls(kind) for kind in kinds},
        "state": count.state,
        "expected_state": trainer.strategy.expected_model_state_bytes(),
        "parameters": trainer.strategy.total_num_parameters,
        "local_parameters": sum(p.numel() for p in trainer.strategy.local_parameters()),
    }


def _measure(ranks: Ranks, name: str, window: int = 1, **options: Any) -> dict[str, Any]:
    # Looking for unused parameters costs one more reduction, of four bytes for each.
    layout = replace(LAYOUTS[name], strategy={**LAYOUTS[name].strategy, "find_unused_parameters": False})
    return ranks(layout.world_size, measure, layout, window, options)[0]


@pytest.mark.parametrize(
    ("name", "axis", "factors"),
    [
        ("dp2", "dp_replicate", {1: 2, 3: 2}),
        ("zero1x2", "dp_shard", {1: 2, 3: 2}),
        ("zero2x2", "dp_shard", {1: 2, 3: 1 + 3}),
        ("zero3x2", "dp_shard", {1: 3, 3: 3 * 3}),
    ],
)
def test_data_axis_moves_what_the_paper_says(
    ranks: Ranks, name: str, axis: str, factors: dict[int, int]
) -> None:
    for window, factor in factors.items():
        seen = _measure(ranks, name, window)
        assert seen["bytes"] == {axis: factor * seen["parameters"] * FLOAT}, f"{window} micro-batches"


def test_gradients_are_reduced_once_a_step(ranks: Ranks) -> None:
    units = 3  # two blocks and the root
    assert _measure(ranks, "zero1x2", window=4)["reductions"]["reduce_scatter"] == {"dp_shard": units}
    assert _measure(ranks, "dp2", window=4)["reductions"]["all_reduce"] == {"dp_replicate": 1}


def test_hierarchical_sharding_adds_one_reduction_over_the_replicas(ranks: Ranks) -> None:
    seen = _measure(ranks, "zero3_hsdp2x2", window=2)
    psi = seen["parameters"] * FLOAT
    # Each rank all-reduces its half of the gradients, once a window.
    assert seen["bytes"] == {"dp_shard": 2 * 3 * psi, "dp_replicate": 2 * psi // 2}


def test_tensor_axis_moves_four_all_reduces_a_block(ranks: Ranks) -> None:
    seen = _measure(ranks, "tp2")
    activation = BATCH * BLOCK * WIDTH * FLOAT
    blocks = 2 * 4 * 2 * activation  # two blocks, four all-reduces of 2 n each
    # Embedding and head: one all-reduce of activations each, and the gathered logits.
    assert seen["reductions"]["all_reduce"] == {"tp": 2 * 4 + 2}
    logits = BATCH * BLOCK * 64 * FLOAT
    assert seen["bytes"] == {"tp": blocks + 2 * 2 * activation + logits}


@pytest.mark.parametrize("name", ["zero1x2", "zero2x2", "zero3x2", "zero3x4", "zero3_hsdp2x2"])
def test_sharded_state_is_sixteen_bytes_over_n(ranks: Ranks, name: str) -> None:
    shards = LAYOUTS[name].strategy.get("zero_shard_size", LAYOUTS[name].world_size)
    for precision in ("32-true", "bf16-mixed"):
        seen = _measure(ranks, name, precision=precision)
        steps = FLOAT * len(list(TinyGPT().parameters()))  # Adam's step counts
        assert sum(seen["state"].values()) - steps == 16 * seen["parameters"] // shards == seen["expected_state"]


def test_replicated_state_is_whole(ranks: Ranks) -> None:
    seen = _measure(ranks, "dp2")
    steps = FLOAT * len(list(TinyGPT().parameters()))
    assert sum(seen["state"].values()) - steps == 16 * seen["parameters"] == seen["expected_state"]


def test_bf16_halves_what_is_gathered(ranks: Ranks) -> None:
    seen = _measure(ranks, "zero3x2", precision="bf16-mixed")
    psi = seen["parameters"]
    # Two gathers in two bytes, one reduction in four.
    assert seen["bytes"] == {"dp_shard": 2 * 2 * psi + 4 * psi}
