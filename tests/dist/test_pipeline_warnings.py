"""What a pipeline does otherwise than one process would, or a ZeRO stage otherwise than its name says, it tells once."""

from __future__ import annotations

import io
import re
import warnings
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_par.engine import engine_of
from lightning_par.trainer.callbacks import Banner
from tests.dist.models import TinyGPT, token_data
from tests.dist.parity import ALL, BATCH, Layout, train_loader
from tests.dist.ranks import Ranks
from tests.dist.test_loss_weights import Padded, Unweighted, fit


def said(layout: Layout, kind: type[TinyGPT], about: str) -> tuple[list[str], float]:
    """The warnings of a fit that contain some words, and its first loss in one process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome, *_ = fit(layout, kind)
    return [text for warning in caught if about in (text := str(warning.message))], outcome.local_losses[0]


class Contrasting(TinyGPT):
    """Compares the samples of a batch with each other."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        first, second = (F.normalize(self(part).mean(1), dim=-1) for part in (batch[1][:, :8], batch[1][:, 8:16]))
        return F.cross_entropy(first @ second.T, torch.arange(len(first)))


class Dropping(TinyGPT):
    """An ordinary mean over samples, with dropout."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.dropout(super().forward(tokens), 0.2, self.training)


@pytest.mark.parametrize("name", ["pp2", "pp2 zbv", "pp2xzero3x2"])
def test_a_loss_that_is_no_mean_over_samples_is_told_once(ranks: Ranks, name: str) -> None:
    layout = ALL[name]
    found = [texts for texts, _ in ranks(layout.world_size, said, layout, Unweighted, "no mean over samples")]
    assert [len(texts) for texts in found] == [1, *[0] * (layout.world_size - 1)]
    whole, mean = (float(number) for number in re.findall(r"(?:is|the mean) ([0-9.]+)[,:]", found[0][0]))
    assert whole != pytest.approx(mean, rel=1e-4)
    if layout.data_parallel_size == 1:
        _, expected = ranks(1, said, ALL["one rank"], Unweighted, "no mean over samples")[0]
        assert whole == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", [Dropping, Padded])
def test_a_mean_over_samples_or_a_weighted_one_is_not(ranks: Ranks, kind: type[TinyGPT]) -> None:
    assert [texts for texts, _ in ranks(2, said, ALL["pp2"], kind, "no mean over samples")] == [[], []]


class Looking(TinyGPT):
    """Looks at its blocks' parameters in each call of its step."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4)
        self.whole_bytes = [0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        blocks = self.trainer.lightning_module.net.blocks
        self.whole_bytes.append(sum(p.nbytes for p in blocks.parameters() if not isinstance(p, DTensor)))
        return self.loss(batch)


def hold(layout: Layout) -> dict[str, Any]:
    module, text = Looking(), io.StringIO()
    trainer = layout.trainer(max_steps=1, callbacks=[Banner()])
    with redirect_stdout(text), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, train_loader(layout, token_data(BATCH), BATCH))
    parameters = list(module.parameters())
    return {
        "whole": max(module.whole_bytes),
        "blocks": sum(4 * parameter.numel() for parameter in module.net.blocks.parameters()),
        "all": sum(4 * parameter.numel() for parameter in parameters),
        "sharded": all(isinstance(parameter, DTensor) for parameter in parameters),
        "step_bytes": engine_of(module).step_bytes(),
        "warnings": [str(warning.message) for warning in caught if "splits the backward" in str(warning.message)],
        "banner": " ".join(text.getvalue().replace("│", " ").split()),
    }


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble"])
def test_a_split_backward_says_what_zero_3_holds(ranks: Ranks, schedule: str) -> None:
    layout = Layout(schedule, 4, {"pipeline_parallel_size": 2, "zero_stage": 3, "schedule": schedule})
    results = ranks(4, hold, layout)
    for seen in results:
        assert seen["whole"] == seen["blocks"]
        assert seen["sharded"], "at rest"
        assert seen["step_bytes"] == 2 * seen["all"]
    assert [len(seen["warnings"]) for seen in results] == [1, 0, 0, 0]
    assert f"{results[0]['step_bytes']:,} bytes of whole parameters and gradients" in results[0]["warnings"][0]
    assert f"parameters and gradients whole, since {schedule} splits the backward" in results[0]["banner"]


def test_other_schedules_hold_what_the_stage_says(ranks: Ranks) -> None:
    results = ranks(4, hold, ALL["pp2xzero3x2 interleaved_1f1b"])
    for seen in results:
        assert seen["whole"] < seen["blocks"]
        assert seen["step_bytes"] == 0
        assert seen["warnings"] == []
    assert "in a step" not in results[0]["banner"]
