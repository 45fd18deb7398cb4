"""The strategy that chooses for itself: one choice for all ranks, made before the mesh, and trained with."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_par import AutoStrategy
from lightning_par.planner import Candidate, Cluster, Device, Host, Link, state_bytes
from lightning_par.planner.model import PlannedModel
from lightning_par.trainer import auto
from tests.dist.models import TinyGPT, token_data
from tests.dist.parity import relative_difference
from tests.dist.ranks import Ranks
from tests.dist.whole import whole_weights

MACHINE = Cluster(
    "a machine for tests",
    Device("a share of it", 1e9, {"fp32": 1e11}, 1e10, is_gpu=False),
    devices_per_node=2,
    nodes=1,
    inside=Link(1e9, 1e-4),
    between=Link(1e9, 1e-4),
    host=Host(8e9, 2e10, 1e10),
)


def _fit(memory: float) -> tuple[AutoStrategy, TinyGPT]:
    """Two steps under the planner's choice for devices of that memory."""
    machine = replace(MACHINE, device=replace(MACHINE.device, memory=memory))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "measure_cluster", lambda *_: machine)
        torch.manual_seed(0)
        module = TinyGPT(tied=False, optimizer="sgd", learning_rate=0.1)
        strategy: Any = "par_auto"
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(token_data(16), 4))
    assert isinstance(trainer.strategy, AutoStrategy)
    return trainer.strategy, module


def choice(memory: float) -> tuple[Candidate | None, dict[str, int], dict[str, int], str, dict[str, torch.Tensor]]:
    """What was chosen, what the mesh and the states are, what was printed, and the weights after training."""
    with redirect_stdout(StringIO()) as printed:
        strategy, module = _fit(memory)
    mesh = dict(zip(strategy.mesh.mesh_dim_names or (), strategy.mesh.shape, strict=True))
    return strategy.candidate, mesh, dict(strategy.model_state_bytes()), printed.getvalue(), whole_weights(module)


def test_ranks_agree_on_a_layout_and_train_with_it(ranks: Ranks) -> None:
    found = ranks(2, choice, 1e9)
    candidates = {one for one, *_ in found}
    (candidate,) = candidates
    assert candidate is not None
    assert candidate.kind in ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
    for _, mesh, _, _, weights in found:
        assert mesh == candidate.layout.as_dict()
        for name, weight in weights.items():
            assert relative_difference(weight, found[0][4][name]) == 0, name
    assert "each device can hold the whole model" in found[0][3]
    assert found[0][3].startswith(f"AutoStrategy: {candidate.describe()}. Training takes")
    assert "AutoStrategy" not in found[1][3]  # one rank decides


def test_little_memory_makes_it_share_the_states(ranks: Ranks) -> None:
    """Of the whole states half a megabyte does not fit; predicted states are those that the ranks hold."""
    found = ranks(2, choice, 0.52e6)
    candidate = found[0][0]
    assert candidate is not None
    assert candidate.kind not in ("plain", "DP")
    model = PlannedModel(TinyGPT(tied=False), None)
    coordinates = candidate.layout.coordinates(0)
    expected = state_bytes(model, candidate, coordinates["pp"], coordinates["dp_shard"])
    assert found[0][2]["parameters"] == expected.parameters


def misfit() -> str:
    """What is said where nothing fits."""
    with pytest.raises(MisconfigurationException) as caught:
        _fit(1e5)
    return str(caught.value)


def test_all_ranks_are_told_that_nothing_fits(ranks: Ranks) -> None:
    first, second = ranks(2, misfit)
    assert first == second
    assert "AutoStrategy found no layout for TinyGPT. Nothing fits. The closest is" in first
    assert "bytes)" in first
