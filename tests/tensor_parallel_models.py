"""Plain transformers for the tensor-parallel tests, written with no thought of parallelism, and how they are split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_par.tensor_parallel import apply_plan, check_plan, resolve_plan

VOCABULARY = 48
HIDDEN = 32
HEADS = 4
LENGTH = 12


@dataclass(frozen=True)
class Options:
    """What differs between the models."""

    tied: bool = False
    kv_heads: int = HEADS
    head_norms: bool = False
    heads_by: str = "attribute"  # how the attention unfolds heads
    plan_head_norms: bool = True
    auxiliary: bool = False  # attention's input has a second use, computed whole on every rank


class Attention(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.n_head = HEADS
        self.n_kv_head = options.kv_heads
        self.heads_by = options.heads_by
        size = HIDDEN // HEADS
        self.q_proj = nn.Linear(HIDDEN, HIDDEN)
        self.k_proj = nn.Linear(HIDDEN, options.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(HIDDEN, options.kv_heads * size)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, 3) if options.auxiliary else None
        self.auxiliary_loss: Tensor | float = 0.0
        self.q_norm = nn.RMSNorm(size) if options.head_norms else nn.Identity()
        self.k_norm = nn.RMSNorm(size) if options.head_norms else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        if self.router is not None:
            self.auxiliary_loss = self.router(x).square().mean()
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.heads_by == "global count":
            q = q.view(batch, length, HEADS, -1)
        elif self.heads_by == "size from count":
            q = q.view(batch, length, -1, HIDDEN // self.n_head)
        else:
            q = q.view(batch, length, self.n_head, -1)
        k, v = (t.view(batch, length, self.n_kv_head, HIDDEN // HEADS) for t in (k, v))
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        width = HIDDEN if self.heads_by == "full width" else -1
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 64, bias=False)
        self.up = nn.Linear(HIDDEN, 64)
        self.down = nn.Linear(64, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(HIDDEN)
        self.attention = Attention(options)
        self.norm2 = nn.LayerNorm(HIDDEN)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Token ids `[batch, length]` to a scalar loss."""

    def __init__(self, options: Options | None = None) -> None:
        super().__init__()
        self.options = options or Options()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(LENGTH, HIDDEN) * 0.1)
        self.blocks = nn.ModuleList(Block(self.options) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if self.options.tied:
            self.head.weight = self.embedding.weight

    @property
    def tp_plan(self) -> dict[str, str]:
        plan = {
            "embedding": "embedding_rowwise",
            **{f"blocks.*.attention.{name}_proj": "colwise" for name in "qkv"},
            "blocks.*.attention.o_proj": "rowwise",
            "blocks.*.mlp.gate": "colwise",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "head": "colwise_gather_output",
        }
        if self.options.head_norms and self.options.plan_head_norms:
            plan["blocks.*.attention.[qk]_norm"] = "replicated_with_grad_allreduce"
        return plan

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.hidden(tokens[:, :-1]))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        return loss + sum(block.attention.auxiliary_loss for block in self.blocks)


class Wrapper(nn.Module):
    """A model inside another module, as inside a LightningModule."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens)


def tokens(num_rows: int = 4, seed: int = 0) -> Tensor:
    """Token ids `[num_rows, LENGTH + 1]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (num_rows, LENGTH + 1), generator=generator)


def tp_mesh() -> DeviceMesh:
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: dict[str, str] | None = None) -> nn.Module:
    resolved = resolve_plan(model, plan)
    check_plan(model, resolved, mesh.size())
    apply_plan(model, resolved, mesh)
    return model
