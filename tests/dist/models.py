"""Small LightningModules and their data, written with no thought of parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

VOCABULARY = 64
BLOCK = 16
WIDTH = 32
HEADS = 4


class Attention(nn.Module):
    """Causal self-attention; the key has no bias, because its gradient is zero in theory."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], self.num_heads, WIDTH // HEADS)
        q, k, v = (layer(x).view(heads).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, num_blocks: int = 2, tied: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        if unused:
            self.blocks[0].never_called = nn.Linear(WIDTH, WIDTH)
            self.never_called = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TinyGPT(LightningModule):
    """An ordinary language-model module: two decay groups, a per-step schedule, logged losses.

    Args:
        tied: One weight for the embedding and the head.
        frozen: Attention and positions take no gradient, the rest of each block does.
        unused: Parameters that no forward pass touches, in a block and at the root.
        optimizer: `"adamw"` or `"sgd"`.
    """

    tp_plan = {
        "net.tokens": "embedding_rowwise",
        "net.blocks.*.attention.query": "colwise",
        "net.blocks.*.attention.key": "colwise",
        "net.blocks.*.attention.value": "colwise",
        "net.blocks.*.attention.out": "rowwise",
        "net.blocks.*.up": "colwise",
        "net.blocks.*.down": "rowwise",
        "net.head": "colwise_gather_output",
    }

    def __init__(
        self,
        num_blocks: int = 2,
        tied: bool = False,
        frozen: bool = False,
        unused: bool = False,
        optimizer: str = "adamw",
        learning_rate: float = 1e-2,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = GPT(num_blocks, tied, unused)
        if frozen:
            frozen_modules = [self.net.positions, *(block.attention for block in self.net.blocks)]
            for module in frozen_modules:
                module.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        _, tokens = batch
        logits = self(tokens[:, :-1]).flatten(0, 1)
        # Half precision is not enough for a loss; double stays double.
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), tokens[:, 1:].flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("local_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> tuple[Tensor, Tensor]:
        index, tokens = batch
        return index, self(tokens[:, :-1]).argmax(-1)

    def configure_optimizers(self) -> dict[str, Any]:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        rate = self.hparams["learning_rate"]
        optimizer: torch.optim.Optimizer
        if self.hparams["optimizer"] == "sgd":
            optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9)
        else:
            # A large eps: a small one turns the rounding noise of small gradients into whole steps.
            optimizer = torch.optim.AdamW(groups, lr=rate, eps=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 4))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def token_data(num_samples: int, seed: int = 0) -> TensorDataset:
    """`num_samples` pairs of (index, block of `BLOCK` + 1 tokens)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (num_samples, BLOCK + 1), generator=generator)
    return TensorDataset(torch.arange(num_samples), tokens)
