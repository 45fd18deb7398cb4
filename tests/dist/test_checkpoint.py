"""A checkpoint knows no layout: saved under one, it goes on under any other, and plain Lightning reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from lightning_par.checkpoint import gather_full_state
from tests.dist.models import TinyGPT, token_data
from tests.dist.parity import BATCH, LAYOUTS, SINGLE, Layout, Outcome, RanksTogether, Recorder, differences, report, tensors
from tests.dist.ranks import Ranks
from tests.dist.whole import whole

FIRST, ALL = 1, 2
"""Epochs of three optimizer steps before the checkpoint, and in all."""
PAIRS = [
    ("zero3x2", "tp2"),
    ("tp2", "zero1x2"),
    ("dp2", "zero3x2"),
    ("zero2x2", "dp2"),
    ("zero3x2xtp2", "zero3_hsdp2x2"),
    ("zero3_hsdp2x2", "tp4"),
    ("dp2xtp2", "zero2x2"),
    ("single", "zero3x2xtp2"),
    ("zero3x2xtp2", "single"),
    ("tp4", "single"),
]


def fit(layout: Layout, epochs: int, save_to: str | None = None, resume_from: str | None = None) -> Outcome:
    """Train, perhaps from a checkpoint, perhaps to one; what was seen, as the parity tests see it."""
    torch.manual_seed(0 if resume_from is None else 1)  # a resumed run must not profit from equal initial weights
    data = token_data(3 * BATCH)
    recorder = Recorder()
    saver = Saver(save_to)
    trainer = layout.trainer(max_epochs=epochs, callbacks=[recorder, saver], gradient_clip_val=0.5)
    sampler = RanksTogether(data, 1) if layout.strategy is None else None
    loader = DataLoader(data, BATCH // layout.data_parallel_size, shuffle=sampler is None, sampler=sampler)
    trainer.fit(TinyGPT(tied=True), loader, ckpt_path=resume_from)
    return recorder.outcome


class Saver(Callback):
    """Saves at the end of each epoch."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._path is not None:
            trainer.save_checkpoint(self._path)


@pytest.fixture(scope="module")
def uninterrupted(ranks: Ranks) -> dict[str, Any]:
    """All steps in one process."""
    return _final(ranks(1, fit, SINGLE, ALL))


def _final(outcomes: list[Outcome]) -> dict[str, Any]:
    return {name: value for name, value in tensors(outcomes).items() if name.startswith(("weight", "moment"))}


@pytest.mark.parametrize(("saved_under", "resumed_under"), PAIRS, ids=lambda name: name)
def test_resumes_under_another_layout(
    ranks: Ranks, uninterrupted: dict[str, Any], tmp_path: Path, saved_under: str, resumed_under: str
) -> None:
    by_name = {**LAYOUTS, "single": SINGLE}
    first, second = by_name[saved_under], by_name[resumed_under]
    path = str(tmp_path / "half.ckpt")
    ranks(first.world_size, fit, first, FIRST, save_to=path)
    resumed = ranks(second.world_size, fit, second, ALL, resume_from=path)
    found = differences(_final(resumed), uninterrupted, 1e-5)
    assert not found, report(found)


@pytest.mark.parametrize("name", ["zero3x2", "zero3x2xtp2"])
def test_file_is_ordinary(ranks: Ranks, tmp_path: Path, name: str) -> None:
    layout, path = LAYOUTS[name], tmp_path / "model.ckpt"
    outcome = tensors(ranks(layout.world_size, fit, layout, FIRST, save_to=str(path)))
    content = torch.load(path, weights_only=True)
    module = TinyGPT(tied=True)
    assert list(content["state_dict"]) == list(module.state_dict())
    # Read by plain Lightning, without strategy or process group.
    restored = TinyGPT.load_from_checkpoint(path)
    weights = {name.removeprefix("weight of "): value for name, value in outcome.items() if name.startswith("weight")}
    for parameter_name, parameter in restored.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[parameter_name], rtol=0, atol=0)
    assert restored.net.head.weight is restored.net.tokens.weight
    assert sorted(path.parent.iterdir()) == [path], "nothing temporary is left beside it"


def save_by_callback(layout: Layout, folder: str) -> tuple[list[str], float]:
    """ModelCheckpoint on a monitored loss; its best path's file name and score, and that no rank hangs."""
    torch.manual_seed(0)
    keeper = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True, every_n_train_steps=None)
    trainer = layout.trainer(max_epochs=3, callbacks=[keeper], enable_checkpointing=True)
    data = DataLoader(token_data(BATCH), BATCH // layout.data_parallel_size)
    trainer.fit(TinyGPT(), data, data)
    trainer.test(ckpt_path="best", dataloaders=data, verbose=False)
    return sorted(path.name for path in Path(folder).iterdir()), float(trainer.callback_metrics["test_loss"])


def test_model_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks(1, save_by_callback, SINGLE, str(tmp_path / "one"))[0]
    for name in ("zero3x2", "tp2"):
        seen = ranks(2, save_by_callback, LAYOUTS[name], str(tmp_path / name))
        assert seen[0] == seen[1]
        assert seen[0][0] == expected[0]
        assert seen[0][1] == pytest.approx(expected[1], rel=1e-5)


class WithConfig(TinyGPT):
    """A module that keeps an OmegaConf configuration among its hyperparameters."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(tied=cfg["tied"])
        self.save_hyperparameters()


def save_with_config(layout: Layout, path: str) -> None:
    """Save a module whose hyperparameters are not plain."""
    trainer = layout.trainer(max_steps=1)
    trainer.fit(WithConfig(OmegaConf.create({"tied": True, "paths": ["a"]})), DataLoader(token_data(8), 4))
    trainer.save_checkpoint(path)


def test_hyperparameters_become_plain(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "configured.ckpt"
    ranks(2, save_with_config, LAYOUTS["zero3x2"], str(path))
    content = torch.load(path, weights_only=True)
    assert content["hyper_parameters"]["cfg"] == {"tied": True, "paths": ["a"]}
    assert WithConfig.load_from_checkpoint(path).net.head.weight is not None


class Failing(Callback):
    """Fails on one rank only, in the second step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise RuntimeError("a bad batch")


def fail_and_save(layout: Layout, folder: str) -> list[str]:
    """An exception with a callback that wants to save then: the error comes out, no rank waits for another."""
    trainer = layout.trainer(max_steps=3, callbacks=[Failing(), OnExceptionCheckpoint(folder)], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="a bad batch"):
        trainer.fit(TinyGPT(), DataLoader(token_data(16), 4))
    return [path.name for path in Path(folder).glob("*")]


def test_no_collective_after_an_exception(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, fail_and_save, LAYOUTS["zero3x2"], str(tmp_path)) == [[], []]


def gather_streams(layout: Layout) -> tuple[int, int, int]:
    """Number of names kept, and of those that are whole, on this rank."""
    trainer = layout.trainer(max_steps=1)
    module = TinyGPT()
    trainer.fit(module, DataLoader(token_data(8), 4))
    full = gather_full_state(module.state_dict(), keep=trainer.global_rank == 1)
    shapes = {name: whole(parameter).shape for name, parameter in module.named_parameters()}
    return trainer.global_rank, len(full), sum(full[name].shape == shapes[name] for name in full)


def test_only_the_keeping_rank_has_the_result(ranks: Ranks) -> None:
    num_names = len(TinyGPT().state_dict())
    assert ranks(2, gather_streams, LAYOUTS["zero3x2"]) == [(0, 0, 0), (1, num_names, num_names)]
