"""The GPT as an ordinary LightningModule: nothing in here knows about ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from examples.gpt.model import GPT, GPTConfig

__all__ = ["GPTModule", "warmup_cosine"]

OptimizerFactory = Callable[[Iterable[dict[str, Any]]], Optimizer]
DEFAULT_OPTIMIZER = partial(AdamW, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


class GPTModule(pl.LightningModule):
    """Next-token training of a GPT.

    Args:
        network: the sizes of the network, or the same as a mapping.
        optimizer: makes the optimizer from parameter groups, such as a ``functools.partial`` of a
            torch optimizer class.
        warmup_steps: optimizer steps over which the learning rate rises to its full value.
        min_lr_fraction: part of the learning rate that is left at the end of the cosine.
        meta: build the network on the meta device, for one that does not fit a rank whole; the
            strategy then fills each rank's part.
    """

    def __init__(
        self,
        network: GPTConfig | Mapping[str, Any],
        optimizer: OptimizerFactory = DEFAULT_OPTIMIZER,
        warmup_steps: int = 50,
        min_lr_fraction: float = 0.1,
        meta: bool = False,
    ) -> None:
        super().__init__()
        self.config = network if isinstance(network, GPTConfig) else GPTConfig(**network)
        self.optimizer = optimizer
        self.warmup_steps = warmup_steps
        self.min_lr_fraction = min_lr_fraction
        # Plain values only: a checkpoint holding them opens with weights_only=True.
        self.save_hyperparameters(
            {
                "network": asdict(self.config),
                "warmup_steps": warmup_steps,
                "min_lr_fraction": min_lr_fraction,
            }
        )
        self.network = None if meta else GPT(self.config)

    def configure_model(self) -> None:
        """Build what ``meta=True`` put off; Lightning may call this more than once."""
        if self.network is None:
            with torch.device("meta"):
                self.network = GPT(self.config)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits, ``[batch, sequence, vocabulary]``."""
        return self.network(tokens_BT)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the batch, in nats per token."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The same on held-out text, averaged over batches and ranks."""
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens_BT, targets_BT = batch
        logits_BTV = self(tokens_BT)
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """An optimizer and a schedule by step."""
        optimizer, schedule = self.make_optimizer(self.trainer.estimated_stepping_batches)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def make_optimizer(self, num_steps: float) -> tuple[Optimizer, LambdaLR]:
        """Decay the matrices, leave norms and biases alone; warm up, then follow a cosine.

        Args:
            num_steps: optimizer steps of the run.
        """
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.dim() >= 2]
        vectors = [parameter for parameter in trained if parameter.dim() < 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = self.optimizer([group for group in groups if group["params"]])

        def factor(step: int) -> float:
            return warmup_cosine(step, self.warmup_steps, num_steps, self.min_lr_fraction)

        return optimizer, LambdaLR(optimizer, factor)

    @torch.no_grad()  # not inference_mode: its tensors cannot enter sharded parameters' bookkeeping
    def generate(
        self,
        tokens_BT: Tensor,
        num_tokens: int,
        top_k: int = 1,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue each row of ``tokens_BT``.

        Every token is one ``forward`` of the whole window, which under a sharding strategy is
        collective work: all ranks must call this together, with the same arguments.

        Args:
            tokens_BT: the beginnings, at least one token each.
            num_tokens: how many tokens to add.
            top_k: draw from this many of the likeliest tokens; 1 is greedy.
            temperature: divides the logits before the draw.
            generator: source of randomness.

        Returns:
            Token ids, ``[batch, sequence + num_tokens]``.
        """
        was_training = self.training
        self.eval()
        for _ in range(num_tokens):
            logits_BV = self(tokens_BT[:, -self.config.block_size :])[:, -1].float()
            best_BK, index_BK = logits_BV.topk(min(top_k, logits_BV.size(-1)))
            chances_BK = (best_BK / temperature).softmax(dim=-1)
            drawn_B1 = torch.multinomial(chances_BK, num_samples=1, generator=generator)
            tokens_BT = torch.cat((tokens_BT, index_BK.gather(-1, drawn_B1)), dim=1)
        self.train(was_training)
        return tokens_BT


def warmup_cosine(step: int, warmup_steps: int, num_steps: float, floor: float) -> float:
    """Factor on the learning rate at optimizer step ``step``.

    It rises in a straight line over ``warmup_steps``, then falls along half a cosine to ``floor``
    at ``num_steps`` (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts).
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * progress)) / 2
