"""Cutting modules into units, and keeping ties."""

from __future__ import annotations

import torch
from torch import nn

from lightning_par.data_parallel import find_units
from lightning_par.ties import find_ties, restore_ties
from tests.dist.models import GPT


class TwoStacks(nn.Module):
    """An encoder and a decoder of composite blocks, a stack of bare layers, a loose parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8) for _ in range(2)))
        self.decoder = nn.ModuleDict({"blocks": nn.ModuleList(nn.TransformerDecoderLayer(8, 2, 8) for _ in range(3))})
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.loose = nn.Parameter(torch.zeros(3))


def test_every_parameter_is_in_one_unit() -> None:
    root = TwoStacks()
    units = find_units(root)
    assert [unit.name for unit in units] == [
        "encoder.0", "encoder.1", "decoder.blocks.0", "decoder.blocks.1", "decoder.blocks.2", "",
    ]  # fmt: skip
    members = [member for unit in units for member in unit.members]
    assert dict(members) == dict(root.named_modules())
    assert len(members) == len(dict(members)), "no module is in two units"
    assert units[-1].module is root


def test_blocks_that_share_stay_with_the_root() -> None:
    root = TwoStacks()
    root.encoder[1].linear1.weight = root.mlp[0].weight
    assert [unit.name for unit in find_units(root)][:2] == ["encoder.0", "decoder.blocks.0"]


def test_children_become_units_where_steps_update_them_in_turn() -> None:
    root = TwoStacks()
    names = [unit.name for unit in find_units(root, split_children=True)]
    assert names[5:] == ["encoder", "mlp", ""], "a ModuleDict is not called, so its blocks alone are units"
    root.mlp[0].weight = root.encoder[0].linear1.weight
    names = [unit.name for unit in find_units(root, split_children=True)]
    assert names == ["encoder.1", "decoder.blocks.0", "decoder.blocks.1", "decoder.blocks.2", ""]


def test_tied_embedding_stays_with_the_root() -> None:
    units = find_units(GPT(num_blocks=2, tied=True))
    assert [unit.name for unit in units] == ["blocks.0", "blocks.1", ""]
    assert {"tokens", "head"} <= {name for name, _ in units[-1].members}


def test_ties_survive_new_parameters() -> None:
    root = GPT(tied=True)
    ties = find_ties(root)
    root.tokens.weight = nn.Parameter(torch.ones(64, 32))
    restore_ties(ties)
    assert root.head.weight is root.tokens.weight
    assert find_ties(GPT(tied=False)) == []
