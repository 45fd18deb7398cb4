"""Ranks that log different keys are told so, instead of waiting for each other's reductions."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

__all__ = ["SameLoggedKeys"]


class SameLoggedKeys(Callback):
    """Compares what all ranks have logged at the end of each epoch, before Lightning reduces it key by key.

    The strategy adds it to every Trainer. What only rank 0 logs on purpose (``rank_zero_only=True``) does not count.

    Raises:
        MisconfigurationException: On every rank, with the keys that some have and others have not.
    """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the training keys."""
        _check(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Compare the validation keys after each loader's last batch: Lightning reduces before the epoch's hooks."""
        if _is_last_batch(trainer, batch_idx, dataloader_idx):
            _check(trainer)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Compare the test keys after the last batch of each loader."""
        if _is_last_batch(trainer, batch_idx, dataloader_idx):
            _check(trainer)


def _is_last_batch(trainer: Trainer, batch_idx: int, dataloader_idx: int) -> bool:
    loop = trainer._evaluation_loop
    return loop.batch_progress.is_last_batch or batch_idx + 1 == loop.max_batches[dataloader_idx]


def _check(trainer: Trainer) -> None:
    if trainer.world_size == 1 or trainer._results is None:
        return
    own = [key for key, result in trainer._results.items() if not result.meta.sync.rank_zero_only]
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    if all(keys == by_rank[0] for keys in by_rank):
        return
    differing = sorted(set().union(*by_rank) - set.intersection(*map(set, by_rank)))
    if differing:
        places = "; ".join(
            f"{key.rpartition('.')[2]!r} on rank(s) {[rank for rank, keys in enumerate(by_rank) if key in keys]}"
            for key in differing
        )
        raise MisconfigurationException(
            f"Not all ranks logged the same keys: {places} only. Log every key on every rank (a constant where there "
            "is nothing to say), or with rank_zero_only=True on the first alone."
        )
    raise MisconfigurationException(
        f"The ranks logged the same keys in different orders: {by_rank}. Log them in one order, since each is "
        "reduced in turn."
    )
