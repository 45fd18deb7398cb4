"""Models and clusters for tests of the planner."""

from __future__ import annotations

from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor, nn

from examples.gpt.model import GPTConfig
from examples.gpt.module import GPTModule
from lightning_par.planner import Cluster, PlannedModel
from tests.unit.configuration import CONF

GPT2_SMALL = GPTConfig(vocab_size=50304, block_size=1024, num_layers=12, num_heads=12, hidden_size=768)
GPT2_XL = GPTConfig(vocab_size=50304, block_size=1024, num_layers=48, num_heads=25, hidden_size=1600)
LLAMA_7B = GPTConfig(
    vocab_size=32000,
    block_size=2048,
    num_layers=32,
    num_heads=32,
    hidden_size=4096,
    mlp_size=11008,
    activation="swiglu",
    positions="rotary",
    tied=False,
)
LLAMA_65B = GPTConfig(
    vocab_size=32000,
    block_size=2048,
    num_layers=80,
    num_heads=64,
    hidden_size=8192,
    mlp_size=22016,
    activation="swiglu",
    positions="rotary",
    tied=False,
)
GPT3_175B = GPTConfig(vocab_size=51200, block_size=2048, num_layers=96, num_heads=96, hidden_size=12288)


def preset(name: str, *overrides: str) -> dict[str, Any]:
    """A shipped cluster configuration as plain containers."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(overrides=[f"+cluster={name}", *overrides])
    plain = OmegaConf.to_container(config.cluster, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def cluster(name: str, *overrides: str) -> Cluster:
    """A shipped cluster."""
    return Cluster.from_mapping(preset(name, *(f"cluster.{word}" for word in overrides)))


def planned(config: GPTConfig, precision: str = "bf16-mixed", **options: Any) -> PlannedModel:
    """The example's GPT, without memory."""
    with torch.device("meta"):
        module = GPTModule(config)
    tokens = torch.zeros(4, config.block_size, dtype=torch.long)
    return PlannedModel(module, (tokens, tokens), precision=precision, **options)


class Residual(nn.Module):
    """A block of any width; the last layer may be wider inside."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between an input and an output layer, trained on random targets."""

    def __init__(self, widths: list[int], width: int = 16, frozen: bool = False, plan: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Residual(width, inner) for inner in widths)
        self.last = nn.Linear(width, 4)
        if plan:
            self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        if frozen:
            self.first.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()
