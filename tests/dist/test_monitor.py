"""The summary of a run tells what happened, also after a resume and without a planned end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_par.trainer.monitor import RunMonitor
from tests.dist.models import BLOCK, TinyGPT, token_data
from tests.dist.parity import LAYOUTS, Layout, layouts, train_loader
from tests.dist.ranks import Ranks


class StopAfter(Callback):
    """Ends a training that has no end of its own."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.should_stop = trainer.global_step >= self._num_steps


def summaries(layout: Layout, folder: Path) -> list[tuple[dict[str, Any], int]]:
    """A run of six steps, and its resumed continuation to twelve that only a callback ends; with bytes held."""
    loader = train_loader(layout, token_data(48), 8)
    found = []
    for name, options in (
        ("first", {"max_epochs": 1}),
        ("resumed", {"max_epochs": -1, "callbacks": [StopAfter(12)], "ckpt": folder / "first.ckpt"}),
    ):
        callbacks = [RunMonitor(folder / name, "train_loss_step"), *options.pop("callbacks", [])]
        checkpoint = options.pop("ckpt", None)
        trainer = layout.trainer(callbacks=callbacks, **options)
        trainer.fit(TinyGPT(), loader, ckpt_path=checkpoint)
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        found.append((callbacks[0].summary, sum(trainer.strategy.model_state_bytes().values())))
    return found


@layouts("dp2", "zero3x2", "tp2")
def test_summary_of_a_run_and_of_its_continuation(ranks: Ranks, layout: Layout, tmp_path: Path) -> None:
    by_rank = ranks(2, summaries, layout, tmp_path)
    for name, steps, on_ranks in zip(("first", "resumed"), (6, 12), zip(*by_rank, strict=True), strict=True):
        summary = on_ranks[0][0]
        assert summary == json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["steps"] == steps
        assert summary["world_size"] == 2
        assert summary["parameters"] == sum(parameter.numel() for parameter in TinyGPT().parameters())
        # Gradients live only between a backward and the next zero_grad; all else is held for good.
        held = [bytes_held for _, bytes_held in on_ranks]
        assert all(measured >= rest > 0 for measured, rest in zip(summary["model_state_bytes"], held, strict=True))
        assert sum(summary["communication_bytes_per_step"].values()) > 0
        times = summary["step_time_ms"]
        assert 0 < times["median"] <= times["p90"]
        assert summary["tokens_per_second"] > 0
        assert summary["train_loss"]["first"] != summary["train_loss"]["last"]


def summary_of_one_step(layout: Layout) -> dict[str, Any]:
    monitor = RunMonitor(None)
    layout.trainer(max_steps=1, callbacks=[monitor]).fit(TinyGPT(), train_loader(layout, token_data(16), 8))
    assert monitor.summary is not None
    return monitor.summary


def test_a_single_step_is_counted_and_not_timed(ranks: Ranks) -> None:
    summary = ranks(2, summary_of_one_step, LAYOUTS["dp2"])[0]
    assert sum(summary["communication_bytes_per_step"].values()) > 0
    assert summary["step_time_ms"] == {"median": None, "p90": None}
    assert summary["tokens_per_second"] is None


def test_tokens_are_those_of_all_data_ranks(ranks: Ranks) -> None:
    """Time cancels out of the product of rate and time."""
    summary = ranks(2, tokens_in_steps, LAYOUTS["dp2"])[0]
    assert summary == [8 * (BLOCK + 1)] * 4


def tokens_in_steps(layout: Layout) -> list[int]:
    monitor = RunMonitor(None)
    layout.trainer(max_steps=6, callbacks=[monitor]).fit(TinyGPT(), train_loader(layout, token_data(48), 8))
    return monitor._tokens
