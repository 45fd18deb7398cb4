"""A GPT in plain PyTorch: token ids in, logits out.

Two choices make it easy to split over ranks, and cost nothing on one: query, key and value are
three separate projections (a fused one cannot be cut along its rows without mixing the three), and
the number of heads is inferred when heads are unfolded (a rank of a tensor-parallel group holds
only some of them).

Shapes are spelt in suffixes::

    B  batch            T  position in the sequence     V  vocabulary
    C  hidden size      N  heads (those on this rank)   H  size of one head

so ``x_BTC`` is a tensor of shape ``[batch, sequence, hidden]``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "GPTConfig"]

ACTIVATIONS = ("gelu", "swiglu")
POSITIONS = ("learned", "rotary")


@dataclass(frozen=True)
class GPTConfig:
    """Every number that shapes the network.

    Raises:
        ValueError: if a size is not positive, the hidden size does not divide into heads, rotary
            heads are of odd size, or a name is not one of those known.
    """

    vocab_size: int = 256
    block_size: int = 128  # longest sequence
    num_layers: int = 4
    num_heads: int = 4
    hidden_size: int = 128
    mlp_size: int | None = None  # None: 4 hidden sizes, or 8/3 of them for SwiGLU's three matrices
    activation: str = "gelu"
    positions: str = "learned"
    tied: bool = True  # one matrix serves as embedding and as head
    bias: bool = False  # in every projection but the key's, and in the norms
    # A bias on the keys shifts all scores of a query alike, so softmax ignores it and its gradient
    # is zero but for rounding. Only GPT-2's own sizes carry one.
    key_bias: bool = False
    dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "num_layers", "num_heads", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.mlp_size is not None and self.mlp_size < 1:
            raise ValueError(f"mlp_size={self.mlp_size} must be at least 1, or null to derive it")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} does not divide into num_heads={self.num_heads}; "
                f"take a multiple, such as hidden_size={self._next_hidden_size()}"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(
                f"positions=rotary turns pairs of numbers, so a head must be of even size; "
                f"hidden_size={self.hidden_size} / num_heads={self.num_heads} = {self.head_size}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} must lie in [0, 1)")
        for name, known in (("activation", ACTIVATIONS), ("positions", POSITIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}")

    def _next_hidden_size(self) -> int:
        return math.ceil(self.hidden_size / self.num_heads) * self.num_heads

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def inner_size(self) -> int:
        """Width of the MLP; a derived SwiGLU width is rounded up to a multiple of 64."""
        if self.mlp_size is not None:
            return self.mlp_size
        if self.activation == "swiglu":
            return math.ceil(8 * self.hidden_size / 3 / 64) * 64
        return 4 * self.hidden_size


class ResidualProjection(nn.Linear):
    """A linear layer that adds to the residual stream; a class of its own so that init knows it."""


class RotaryTable(nn.Module):
    """Cosines and sines of the rotary position embedding (Su et al. 2021, arXiv:2104.09864).

    The table is computed, not learned, so it stays out of checkpoints; ``reset_parameters`` fills
    it again after the model was built on the meta device.
    """

    def __init__(self, length: int, head_size: int) -> None:
        super().__init__()
        self.register_buffer("cos_TH", torch.empty(length, head_size // 2), persistent=False)
        self.register_buffer("sin_TH", torch.empty(length, head_size // 2), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the table where it lies."""
        length, half = self.cos_TH.shape
        device = self.cos_TH.device
        frequency_H = 10_000.0 ** (-torch.arange(half, device=device) / half)
        angle_TH = torch.outer(torch.arange(length, device=device), frequency_H)
        self.cos_TH.copy_(angle_TH.cos())
        self.sin_TH.copy_(angle_TH.sin())

    def forward(self, x_BNTH: Tensor) -> Tensor:
        """Turn each pair ``(x[h], x[h + H/2])`` by the angle of its position."""
        length = x_BNTH.size(-2)
        cos_TH = self.cos_TH[:length].to(x_BNTH.dtype)
        sin_TH = self.sin_TH[:length].to(x_BNTH.dtype)
        first, second = x_BNTH.chunk(2, dim=-1)
        turned = (first * cos_TH - second * sin_TH, second * cos_TH + first * sin_TH)
        return torch.cat(turned, dim=-1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.bias
        self.config = config
        self.q = nn.Linear(size, size, bias=bias)
        self.k = nn.Linear(size, size, bias=config.key_bias)
        self.v = nn.Linear(size, size, bias=bias)
        self.o = ResidualProjection(size, size, bias=bias)
        self.rotary = (
            RotaryTable(config.block_size, config.head_size) if config.positions == "rotary" else nn.Identity()
        )

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Mix each position with those before it."""
        q_BNTH, k_BNTH, v_BNTH = (
            projection(x_BTC).unflatten(-1, (-1, self.config.head_size)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        mixed_BNTH = F.scaled_dot_product_attention(
            self.rotary(q_BNTH),
            self.rotary(k_BNTH),
            v_BNTH,
            dropout_p=self.config.dropout if self.training else 0.0,
            is_causal=True,
        )
        return self.o(mixed_BNTH.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Position-wise feed-forward: GELU, or SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.inner_size, config.bias
        self.up = nn.Linear(size, inner, bias=bias)
        self.gate = nn.Linear(size, inner, bias=bias) if config.activation == "swiglu" else None
        self.down = ResidualProjection(inner, size, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Widen, bend, narrow."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x_BTC), approximate="tanh"))
        return self.down(F.silu(self.gate(x_BTC)) * self.up(x_BTC))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, bias=config.bias)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Add what attention and MLP have to say to the residual stream."""
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC)))
        return x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC)))


class GPT(nn.Module):
    """Decoder-only transformer.

    Args:
        config: the sizes; see :class:`GPTConfig`.

    Built under ``torch.device("meta")`` it holds no memory; to fill it later, call ``to_empty``,
    ``tie_weights`` and ``apply(model._init_weights)``.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.block_size, config.hidden_size) if config.positions == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size, bias=config.bias)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()
        self.apply(self._init_weights)

    @property
    def tp_plan(self) -> dict[str, str]:
        """How to split the layers over a tensor-parallel group, in Hugging Face's vocabulary."""
        plan = {
            "embedding": "embedding_rowwise",
            "blocks.*.attention.q": "colwise",
            "blocks.*.attention.k": "colwise",
            "blocks.*.attention.v": "colwise",
            "blocks.*.attention.o": "rowwise",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "head": "colwise_gather_output",
        }
        if self.config.activation == "swiglu":
            plan["blocks.*.mlp.gate"] = "colwise"
        return plan

    def tie_weights(self) -> None:
        """Let the head use the embedding's matrix, if the configuration says so."""
        if self.config.tied:
            self.head.weight = self.embedding.weight

    def _init_weights(self, module: nn.Module) -> None:
        """GPT-2's scheme: normal weights, smaller where 2 x num_layers outputs pile up."""
        std = self.config.init_std
        if isinstance(module, ResidualProjection):
            std = std / math.sqrt(2 * self.config.num_layers)
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, (nn.LayerNorm, RotaryTable)):
            module.reset_parameters()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Predict the token that follows each position.

        Args:
            tokens_BT: token ids, ``[batch, sequence]``, the sequence at most ``block_size`` long.

        Returns:
            Logits, ``[batch, sequence, vocabulary]``.

        Raises:
            ValueError: if the sequence is longer than ``block_size``.
        """
        length = tokens_BT.size(1)
        if length > self.config.block_size:
            raise ValueError(f"a sequence of {length} tokens is longer than block_size={self.config.block_size}")
        x_BTC = self.embedding(tokens_BT)
        if self.positions is not None:
            x_BTC = x_BTC + self.positions(torch.arange(length, device=tokens_BT.device))
        x_BTC = self.dropout(x_BTC)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.norm(x_BTC))
