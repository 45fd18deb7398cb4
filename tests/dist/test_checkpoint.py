"""A checkpoint knows no layout: saved under one, it goes on under any other, and plain Lightning reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par.checkpoint import gather_full_state
from tests.dist.models import TinyGPT, token_data
from tests.dist.parity import ALL as EVERY
from tests.dist.parity import (
    BATCH,
    LAYOUTS,
    SINGLE,
    Layout,
    Outcome,
    RanksTogether,
    Recorder,
    differences,
    report,
    tensors,
)
from tests.dist.ranks import OneProcess, RankError, Ranks
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
    ("ps4", "zero1x2"),
    ("tp2", "ps2+1"),
    ("zero2x2 half off", "tp2"),
    ("dp2", "zero3x2 all on disk"),
    ("zero3x2xtp2 all off", "zero1x1 optimizer off"),
]


class ScaledGPT(TinyGPT):
    """Has a parameter of one element: its moments are sharded like any other's, unlike Adam's step counts."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1, tied=True)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scale * super().forward(tokens)


def fit(layout: Layout, epochs: int, save_to: str | None = None, resume_from: str | None = None) -> Outcome:
    """Train, perhaps from a checkpoint, perhaps to one; what was seen, as the parity tests see it."""
    torch.manual_seed(0 if resume_from is None else 1)  # a resumed run must not profit from equal initial weights
    data = token_data(3 * BATCH)
    recorder = Recorder()
    saver = Saver(save_to)
    trainer = layout.trainer(max_epochs=epochs, callbacks=[recorder, saver], gradient_clip_val=0.5)
    sampler = RanksTogether(data, 1) if layout.strategy is None else None
    loader = DataLoader(data, BATCH // layout.data_parallel_size, shuffle=sampler is None, sampler=sampler)
    trainer.fit(ScaledGPT(), loader, ckpt_path=resume_from)
    return recorder.outcome


class Saver(Callback):
    """Saves at the end of each epoch."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._path is not None:
            trainer.save_checkpoint(self._path)


def _final(outcomes: list[Outcome]) -> dict[str, Any]:
    return {name: value for name, value in tensors(outcomes).items() if name.startswith(("weight", "moment"))}


@pytest.mark.parametrize(("saved_under", "resumed_under"), PAIRS, ids=lambda name: name)
def test_resumes_under_another_layout(
    ranks: Ranks, one_process: OneProcess, tmp_path: Path, saved_under: str, resumed_under: str
) -> None:
    by_name = {**EVERY, "single": SINGLE}
    first, second = by_name[saved_under], by_name[resumed_under]
    path = str(tmp_path / "half.ckpt")
    ranks(first.world_size, fit, first, FIRST, save_to=path)
    resumed = ranks(second.world_size, fit, second, ALL, resume_from=path)
    found = differences(_final(resumed), _final([one_process(fit, ALL)]), 1e-5)
    assert not found, report(found)


@pytest.mark.parametrize("name", ["zero3x2", "zero3x2xtp2"])
def test_file_is_ordinary(ranks: Ranks, tmp_path: Path, name: str) -> None:
    layout, path = LAYOUTS[name], tmp_path / "model.ckpt"
    outcome = tensors(ranks(layout.world_size, fit, layout, FIRST, save_to=str(path)))
    content = torch.load(path, weights_only=True)
    assert list(content["state_dict"]) == list(ScaledGPT().state_dict())
    # Read by plain Lightning, without strategy or process group.
    restored = ScaledGPT.load_from_checkpoint(path)
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
    trainer.fit(TinyGPT(num_blocks=1), data, data)
    trainer.test(ckpt_path="best", dataloaders=data, verbose=False)
    return sorted(path.name for path in Path(folder).iterdir()), float(trainer.callback_metrics["test_loss"])


def test_model_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    (expected,) = ranks(1, save_by_callback, SINGLE, str(tmp_path / "one"))
    for name in ("zero3x2", "tp2"):
        seen = ranks(2, save_by_callback, LAYOUTS[name], str(tmp_path / name))
        assert seen[0] == seen[1]
        assert seen[0][0] == expected[0]
        assert seen[0][1] == pytest.approx(expected[1], rel=1e-5)


CONFIG = {"tied": True, "optimizer": "sgd", "learning_rate": 0.1, "paths": ["a"]}


class WithConfig(TinyGPT):
    """Keeps an OmegaConf configuration among its hyperparameters."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(num_blocks=1, tied=cfg["tied"])
        self.save_hyperparameters()


class Configured(TinyGPT):
    """Has an OmegaConf configuration for its hyperparameters."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(num_blocks=1, tied=cfg["tied"])
        self.save_hyperparameters(cfg)


def save_with_config(layout: Layout, make: type[TinyGPT], path: str) -> None:
    """Save a module whose hyperparameters are not plain."""
    trainer = layout.trainer(max_steps=1)
    trainer.fit(make(OmegaConf.create(CONFIG)), DataLoader(token_data(8), 4))
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("make", [WithConfig, Configured])
def test_hyperparameters_become_plain(ranks: Ranks, tmp_path: Path, make: type[TinyGPT]) -> None:
    path = tmp_path / "configured.ckpt"
    ranks(2, save_with_config, LAYOUTS["zero3x2"], make, str(path))
    kept = torch.load(path, weights_only=True)["hyper_parameters"]
    assert (kept["cfg"] if make is WithConfig else kept) == CONFIG
    restored = make.load_from_checkpoint(path)
    assert restored.net.head.weight is restored.net.tokens.weight


class Failing(Callback):
    """Fails on one rank only, in the second step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.global_rank == 1:
            raise RuntimeError("a bad batch")


def fail_and_save(layout: Layout, folder: str) -> None:
    """An exception, with a callback that wants to save then."""
    callbacks = [Failing(), OnExceptionCheckpoint(folder)]
    trainer = layout.trainer(max_steps=3, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(TinyGPT(num_blocks=1), DataLoader(token_data(16), 4))


@pytest.mark.parametrize("name", ["dp2", "zero3x2"])
def test_a_rank_that_fails_waits_for_no_other_to_save(ranks: Ranks, tmp_path: Path, name: str) -> None:
    with pytest.raises(RankError, match="RuntimeError: a bad batch") as caught:
        ranks(2, fail_and_save, LAYOUTS[name], str(tmp_path), timeout=20)
    assert caught.value.failures[0].rank == 1
    assert list(tmp_path.iterdir()) == []


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
