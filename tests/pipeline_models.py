"""Modules that a pipeline has to cut as they are, and a pipeline in one process: every rank a copy of the module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt.model import GPTConfig
from examples.gpt.module import GPTModule
from lightning_par.pipeline_parallel.placement import Staged, build_stages
from lightning_par.pipeline_parallel.split import split_evenly_by_cost
from lightning_par.pipeline_parallel.trunk import find_trunk
from tests.dist.models import BLOCK, VOCABULARY, TinyGPT

NUM_BLOCKS = 4
WIDTH = 16
IDS = torch.randint(0, VOCABULARY, (4, BLOCK + 1), generator=torch.Generator().manual_seed(1))


class Step(nn.Module):
    """A module whose step is a function of its network and a batch."""

    def __init__(self, network: nn.Module, step: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.network = network
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(self.network, batch)


class VisionTransformer(nn.Module):
    """Images (batch, 3, 16, 16) to logits of 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH))
        layers = (nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True) for _ in range(NUM_BLOCKS))
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        x += self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


class DirectBlocks(nn.Module):
    """Blocks directly on the module that has the step, between an encoder of names and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"embedding": nn.Embedding(VOCABULARY, WIDTH), "scale": nn.Linear(1, WIDTH)})
        self.blocks = nn.ModuleList(Residual() for _ in range(NUM_BLOCKS))
        self.out = nn.Linear(WIDTH, VOCABULARY)
        self.seen = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.parts["embedding"](batch)
        x *= self.parts["scale"](torch.ones(len(batch), 1, 1))
        for block in self.blocks:
            x = block(x)
        self.seen += len(batch)
        return F.cross_entropy(self.out(x).flatten(0, 1), batch.flatten())


class Residual(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def tiny_gpt(tied: bool) -> nn.Module:
    module = TinyGPT(NUM_BLOCKS, tied=tied)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return module


def example_gpt(**choices: Any) -> nn.Module:
    config = GPTConfig(vocab_size=VOCABULARY, block_size=BLOCK, num_layers=NUM_BLOCKS, num_heads=2, hidden_size=WIDTH)
    module = GPTModule({**vars(config), **choices})
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return module


def llama(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return Step(LlamaForCausalLM(config), lambda model, batch: model(**batch, labels=batch["input_ids"]).loss)


def gpt2(tied: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, n_layer=NUM_BLOCKS, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return Step(GPT2LMHeadModel(config), lambda model, batch: model(**batch, labels=batch["input_ids"]).loss)


def _padded() -> dict[str, Tensor]:
    mask = torch.ones_like(IDS)
    mask[1, 9:] = 0
    return {"input_ids": IDS, "attention_mask": mask}


IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(2))
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "tiny_gpt": (lambda: tiny_gpt(tied=False), (torch.arange(4), IDS)),
    "tiny_gpt_tied": (lambda: tiny_gpt(tied=True), (torch.arange(4), IDS)),
    "example_gpt": (lambda: example_gpt(tied=False), (IDS[:, :-1], IDS[:, 1:])),
    "example_gpt_tied_rotary": (lambda: example_gpt(positions="rotary"), (IDS[:, :-1], IDS[:, 1:])),
    "llama": (lambda: llama(tied=False), _padded()),
    "llama_tied": (lambda: llama(tied=True), {"input_ids": IDS}),
    "gpt2": (lambda: gpt2(tied=False), {"input_ids": IDS}),
    "gpt2_tied": (lambda: gpt2(tied=True), _padded()),
    "vision_transformer": (
        lambda: Step(VisionTransformer(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])),
        (IMAGES, torch.arange(4)),
    ),
    "direct_blocks": (DirectBlocks, IDS),
}


@dataclass
class Emulated:
    """A pipeline in one process.

    Args:
        module: Left as it is; each rank gets a copy.
        placement: The stages of each rank.
        first: As for `build_stages`.
        last: As for `build_stages`.
        blocks: Name of the list of blocks.
    """

    module: nn.Module
    placement: Sequence[Sequence[int]]
    first: Sequence[str] = ()
    last: Sequence[str] = ()
    blocks: str | None = None
    ranks: list[nn.Module] = field(init=False)
    staged: list[Staged] = field(init=False)
    stages: list[nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        trunk = find_trunk(self.module, self.blocks)
        self.num_stages = sum(len(local) for local in self.placement)
        ranges = split_evenly_by_cost([1.0] * trunk.num_blocks, 0, 0, self.num_stages)
        self.ranks = [copy.deepcopy(self.module) for _ in self.placement]
        self.staged = [
            build_stages(rank, trunk, ranges, local, self.first, self.last)
            for rank, local in zip(self.ranks, self.placement, strict=True)
        ]
        by_index = {
            stage: module
            for local, staged in zip(self.placement, self.staged, strict=True)
            for stage, module in zip(local, staged.stages, strict=True)
        }
        self.stages = [by_index[stage] for stage in range(self.num_stages)]

    def step(self, batch: Any, method: str = "training_step") -> Any:
        """Forward through all stages and, if the result has a gradient, backward through all."""
        hidden: tuple[Tensor, ...] = ()
        outputs, inputs = [], []
        for stage in self.stages:
            output = stage(*hidden, method=method, args=(batch, 0), kwargs={})
            outputs.append(output)
            inputs.append(hidden)
            if stage is not self.stages[-1]:
                hidden = (output.detach().requires_grad_(torch.is_grad_enabled()),)
        gradient = None
        for output, received in zip(reversed(outputs), reversed(inputs), strict=True):
            if torch.is_grad_enabled():
                output.backward(gradient)
                gradient = received[0].grad if received else None
        return outputs[-1]

    def gradients(self) -> dict[str, Tensor]:
        """Of each parameter of the whole module, summed over the stages that hold it, under its first name."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        sums = {aliases[0]: self._sum(aliases) for aliases in names.values()}
        return {name: total for name, total in sums.items() if total is not None}

    def _sum(self, aliases: Sequence[str]) -> Tensor | None:
        held = [dict(rank.named_parameters(remove_duplicate=False)) for rank in self.ranks]
        objects = [{id(rank[name]): rank[name] for name in aliases if name in rank}.values() for rank in held]
        gradients = [parameter.grad for rank in objects for parameter in rank if parameter.grad is not None]
        return torch.stack(gradients).sum(0) if gradients else None


def one_process(module: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Loss and gradients of a copy of the whole module."""
    whole = copy.deepcopy(module)
    loss = whole.training_step(batch, 0)  # type: ignore[operator]
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
