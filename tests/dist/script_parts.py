"""What the scripts under test import: a Trainer that leaves marks, and a callback that fails on purpose."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_par  # noqa: F401  registers the strategies

FAILED_AT = "failed-at"


class Mark(Callback):
    """Leaves a variable and a file per (name, rank) at the start of a fit, and fails if there is one already."""

    def __init__(self, folder: str | Path, name: str) -> None:
        self.folder, self.name = Path(folder), name

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave("fit", trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave("test", trainer)

    def _leave(self, what: str, trainer: Trainer) -> None:
        os.environ["MARKED"] = self.name
        text = f"{dist.get_world_size()} {os.getpid()} {os.environ['MASTER_PORT']}"
        with (self.folder / f"{self.name}-{what}-{trainer.global_rank}").open("x") as file:
            file.write(text)


class Fail(Callback):
    """On the third batch, rank `rank` raises or is killed; the other ranks go on, or are stuck and deaf."""

    def __init__(self, folder: str | Path, how: str, rank: int, others_are_stuck: bool = False) -> None:
        self.folder, self.how, self.rank, self.others_are_stuck = Path(folder), how, rank, others_are_stuck

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx < 2:
            return
        if trainer.global_rank != self.rank:
            if self.others_are_stuck:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
            return
        (self.folder / FAILED_AT).write_text(str(time.time()))
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("boom on purpose")


def make_trainer(strategy: str, devices: int, *callbacks: Callback) -> Trainer:
    """A quiet Trainer for a few steps."""
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=4,
        limit_test_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


def model() -> BoringModel:
    """A module whose layers every strategy can use."""
    return BoringModel()
