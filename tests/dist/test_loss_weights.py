"""Rows padded to different lengths train as in one process that sees whole batches, under every way to cut them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor

from tests.dist.models import BLOCK, TinyGPT, token_data
from tests.dist.parity import ALL, BATCH, Layout, Recorder, differences, report, tensors, train_loader
from tests.dist.ranks import OneProcess, RankError, Ranks

NOTHING = -100


class Padded(TinyGPT):
    """A mean over the tokens that are there; every sixteenth row has none at all."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4, tied=True)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        index, tokens = batch
        is_padding = torch.arange(BLOCK) >= (index * 7 % BLOCK)[:, None]
        targets = tokens[:, 1:].masked_fill(is_padding, NOTHING).flatten()
        loss = F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), targets, ignore_index=NOTHING)
        count = (targets != NOTHING).sum()
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=int(count))
        self.log("local_loss", loss, batch_size=int(count))
        return self.output(loss, count)

    def output(self, loss: Tensor, count: Tensor) -> Any:
        return {"loss": loss, "num_samples": count}


class Unweighted(Padded):
    """Returns the loss alone."""

    def output(self, loss: Tensor, count: Tensor) -> Any:
        return loss


class KeepOutputs(Callback):
    """What the step returned."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.seen.append({name: float(value) for name, value in outputs.items()})


def fit(
    layout: Layout, kind: type[Padded] = Padded, window: int = 1, num_samples: int = 3 * BATCH, **options: Any
) -> tuple[Any, float, list[dict[str, float]]]:
    """Each global batch whole in one process, in `window` accumulated parts under a layout."""
    torch.manual_seed(0)
    recorder, keeper = Recorder(), KeepOutputs()
    parts = 1 if layout.strategy is None else window
    trainer = layout.trainer(
        max_epochs=2, callbacks=[recorder, keeper], accumulate_grad_batches=parts, gradient_clip_val=0.5, **options
    )
    trainer.fit(kind(), train_loader(layout, token_data(num_samples), BATCH // parts))
    return recorder.outcome, trainer.callback_metrics["train_loss_epoch"].item(), keeper.seen


ONCE = (
    *("dp2", "zero2x2", "zero3x2", "dp2xtp2", "ps2+1", "pp2", "pp2 gpipe", "pp2 zbv", "pp2 interleaved_1f1b"),
    *("pp2xdp2", "pp2xzero1x2", "pp2xzero3x2", "pp2xps2"),
)
IN_PARTS = ("one rank", "dp2", "zero1x2", "zero3x2", "ps2", "zero1x2 optimizer off", "pp2", "pp2xdp2", "pp2xzero3x2 zbv")
CASES = [(name, 1) for name in ONCE] + [(name, 2) for name in IN_PARTS]


@pytest.mark.parametrize(("name", "window"), CASES, ids=[f"{name} in {window}" for name, window in CASES])
def test_padded_rows_train_as_in_one_process(
    ranks: Ranks, one_process: OneProcess, name: str, window: int
) -> None:
    layout = ALL[name]
    expected, loss, _ = one_process(fit)
    results = ranks(layout.world_size, fit, layout, Padded, window)
    whole, wanted = tensors([outcome for outcome, *_ in results]), tensors([expected])
    found = differences(whole, wanted, 1e-5)
    assert not found, report(found)
    for _, seen, _ in results:
        assert seen == pytest.approx(loss, rel=1e-5)


def test_without_weights_they_do_not(ranks: Ranks, one_process: OneProcess) -> None:
    expected, *_ = one_process(fit)
    results = ranks(2, fit, ALL["dp2"], Unweighted)
    assert differences(tensors([outcome for outcome, *_ in results]), tensors([expected]), 1e-3)


def test_a_window_that_is_not_full_is_a_mean_over_its_own_samples(ranks: Ranks, one_process: OneProcess) -> None:
    """Two and a half batches: the last window of two parts is one part, and a whole batch in one process."""
    num_samples = 2 * BATCH + BATCH // 2
    expected, *_ = one_process(fit, Padded, 1, num_samples)
    for name in ("dp2", "pp2"):
        results = ranks(2, fit, ALL[name], Padded, 2, num_samples)
        found = differences(tensors([outcome for outcome, *_ in results]), tensors([expected]), 1e-5)
        assert not found, report(found)


@pytest.mark.parametrize("name", ["pp2", "pp2 zbv"])
def test_what_the_step_returned_is_that_of_the_whole_batch(ranks: Ranks, one_process: OneProcess, name: str) -> None:
    _, _, expected = one_process(fit)
    for _, _, seen in ranks(2, fit, ALL[name]):
        for actual, wanted in zip(seen, expected, strict=True):
            assert actual == pytest.approx(wanted, rel=1e-5)


class SomeBatches(Padded):
    """Says its number of samples on one rank only."""

    def output(self, loss: Tensor, count: Tensor) -> Any:
        return loss if self.trainer.strategy.data_rank else {"loss": loss, "num_samples": count}


class Negative(Padded):
    """Says an impossible number."""

    def output(self, loss: Tensor, count: Tensor) -> Any:
        return {"loss": loss, "num_samples": -1}


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("dp2", SomeBatches, "for some batches and not for others"),
        ("pp2xdp2", SomeBatches, "for some batches and not for others"),
        ("pp2", Negative, "a finite number, or tensor of one element, of at least 0"),
    ],
)
def test_what_can_not_be_weighted_is_refused_on_all_ranks(
    ranks: Ranks, name: str, kind: type[Padded], words: str
) -> None:
    layout = ALL[name]
    with pytest.raises(RankError) as caught:
        ranks(layout.world_size, fit, layout, kind, timeout=30)
    assert len(caught.value.failures) == layout.world_size
    assert all(words in failure.headline for failure in caught.value.failures), caught.value


