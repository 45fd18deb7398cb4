"""Modules built on the meta device get the weights their own code gives them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_par.data_parallel import find_units
from lightning_par.materialize import check_can_materialize, materialize
from lightning_par.ties import find_ties, restore_ties
from tests.dist.models import GPT

CPU = torch.device("cpu")


class Scaled(nn.Module):
    """Initialises the layers below it, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)


class Table(nn.Module):
    """Has a buffer and nothing that fills it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


def _create(root: nn.Module) -> None:
    ties = find_ties(root)
    for unit in find_units(root):
        materialize(root, unit.members, CPU)
        restore_ties(ties)


def test_owner_above_initialises() -> None:
    with torch.device("meta"):
        root = nn.ModuleDict({"inner": Scaled()})
    check_can_materialize(root)
    _create(root)
    linear, norm = root["inner"].layers
    assert torch.equal(linear.weight, torch.full((4, 4), 0.5))
    assert linear.bias.abs().max() <= 0.5, "reset_parameters() has filled what _init_weights leaves"
    assert torch.equal(norm.weight, torch.ones(4))


def test_same_seed_same_weights() -> None:
    weights = []
    for _ in range(2):
        with torch.device("meta"):
            root = GPT(tied=True)
        torch.manual_seed(3)
        _create(root)
        assert root.head.weight is root.tokens.weight
        weights.append(torch.cat([parameter.flatten() for parameter in root.parameters()]))
    assert torch.isfinite(weights[0]).all()
    assert torch.equal(*weights)


def test_what_nobody_can_initialise_is_named() -> None:
    with torch.device("meta"):
        root = nn.ModuleDict({"rope": Table()})
    with pytest.raises(ValueError, match=r"rope \(Table\) was built on the meta device.*reset_parameters"):
        check_can_materialize(root)


def test_ordinary_modules_are_left_alone() -> None:
    root = nn.ModuleDict({"rope": Table(), "linear": nn.Linear(2, 2)})
    before = root["linear"].weight.clone()
    check_can_materialize(root)
    _create(root)
    assert torch.equal(root["linear"].weight, before)


class Forgetful(nn.Module):
    """Its `_init_weights` knows linear layers only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)


def test_a_tensor_that_nobody_initialises_is_named() -> None:
    with torch.device("meta"):
        module = Forgetful()
    with pytest.raises(ValueError, match=r"the module itself \(Forgetful\).*leaves out scale\."):
        materialize(module, module.named_modules(), torch.device("cpu"))
