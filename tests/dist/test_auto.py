"""The strategy that chooses for itself: one choice for all ranks, made before the mesh, and trained with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_par import AutoStrategy
from lightning_par.fabric import AutoStrategy as FabricAutoStrategy
from lightning_par.planner import Candidate, Cluster, Device, Host, Link, state_bytes
from lightning_par.planner.model import PlannedModel
from lightning_par.strategies import auto
from tests.dist.fabric_parity import loss_of
from tests.dist.models import TinyGPT, token_data
from tests.dist.parity import Layout, relative_difference
from tests.dist.ranks import OneProcess, Ranks
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


@contextmanager
def _devices_of(memory: float) -> Iterator[None]:
    """Let the planner find two devices of that many bytes."""
    machine = replace(MACHINE, device=replace(MACHINE.device, memory=memory))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "measure_cluster", lambda *_: machine)
        yield


def _fit(memory: float) -> tuple[AutoStrategy, TinyGPT]:
    """Two steps under the planner's choice for devices of that memory."""
    with _devices_of(memory):
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


Loop = tuple[Candidate | None, list[float], dict[str, torch.Tensor], str, float]


def loop(strategy: Any, batch: int, devices: int = 1) -> tuple[Fabric, list[float], TinyGPT]:
    """Three steps of Fabric's on batches of that many samples in all."""
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    module = TinyGPT(num_blocks=4, optimizer="sgd", learning_rate=0.1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = DataLoader(token_data(3 * batch), batch)
    if devices > 1:
        with pytest.raises(RuntimeError, match=r"fabric.setup\(model, optimizer\) first"):
            fabric.setup_dataloaders(loader)
        with pytest.raises(RuntimeError, match=r"fabric.setup\(model, optimizer\) first"):
            fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    model, optimizer = fabric.setup(module, optimizer)
    if devices > 1:
        loader = DataLoader(token_data(3 * batch), batch // fabric.strategy.layout.data_parallel_size)
    losses = []
    for part in fabric.setup_dataloaders(loader):
        loss = fabric.strategy.step(model, part, loss_of) if devices > 1 else loss_of(model, part)
        fabric.backward(loss)
        losses.append(fabric.all_reduce(loss.detach().clone()).item())
        optimizer.step()
        optimizer.zero_grad()
    return fabric, losses, module


def train_in_one_process(_: Layout) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What Fabric alone makes of it."""
    _, losses, module = loop("auto", 8)
    return losses, {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def train_by_choice(memory: float, options: dict[str, Any]) -> Loop:
    """What the planner's choice makes of it, the numbers drawn after all included."""
    with redirect_stdout(StringIO()) as printed, _devices_of(memory):
        fabric, losses, _ = loop(FabricAutoStrategy(**options), 8, devices=2)
    strategy = fabric.strategy
    assert isinstance(strategy, FabricAutoStrategy)
    assert dict(zip(strategy.mesh.mesh_dim_names or (), strategy.mesh.shape, strict=True)) == strategy.layout.as_dict()
    whole = strategy.full_module_state(strategy.engine)
    return strategy.candidate, losses, whole, printed.getvalue(), torch.rand(()).item()


def draw() -> torch.Tensor:
    """A batch that moves this rank's random numbers on."""
    torch.rand(10)
    return token_data(8)[:]


TRACED = {"sample_batch": draw, "step_fn": loss_of}


@pytest.mark.parametrize(
    ("memory", "options", "kinds", "said"),
    [
        (1e9, TRACED, {"DP", "ZeRO-1", "ZeRO-2", "ZeRO-3"}, "each device can hold the whole model"),
        (0.6e6, TRACED, {"PP", "TP"}, "of which nothing fits here"),
        (1e9, {"batch_size": 4}, {"DP", "ZeRO-1", "ZeRO-2", "ZeRO-3"}, "formulas instead of a trace"),
    ],
    ids=["traced", "little memory", "by formulas"],
)
def test_fabric_trains_as_one_process_does(
    ranks: Ranks, one_process: OneProcess, memory: float, options: dict[str, Any], kinds: set[str], said: str
) -> None:
    losses, weights = one_process(train_in_one_process)
    first, second = ranks(2, train_by_choice, memory, options)
    assert first[0] == second[0]
    assert first[0] is not None
    assert first[0].kind in kinds
    for outcome in (first, second):
        assert outcome[1] == pytest.approx(losses, rel=1e-5)
    for name, weight in weights.items():
        assert relative_difference(first[2][name], weight) < 1e-5, name
    assert first[3].startswith(f"AutoStrategy: {first[0].describe()}. ")
    assert said in first[3]
    assert ("instead of a trace" in first[3]) == ("step_fn" not in options)
    assert "AutoStrategy" not in second[3]  # one rank decides
    assert first[4] == second[4]  # and draws no numbers in doing so


def fail() -> torch.Tensor:
    """A batch that can't be had."""
    raise OSError("no such file")


def two_more_ways() -> tuple[str, str, dict[str, str]]:
    """What is said where rank 0 finds no batch; then what is chosen without an optimizer, and why no other."""
    said = ""
    for options in ({"sample_batch": fail}, TRACED):
        strategy = FabricAutoStrategy(**options)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        try:
            with redirect_stdout(StringIO()), _devices_of(0.82e6):
                fabric.setup_module(TinyGPT(num_blocks=4))
        except MisconfigurationException as error:
            said = str(error)
    assert strategy.candidate is not None, said
    reasons = {} if strategy.plan is None else {one.label: one.reason for one in strategy.plan.rejected}
    return said, strategy.candidate.kind, reasons


def test_fabric_tells_all_ranks_and_takes_no_pipeline_without_an_optimizer(ranks: Ranks) -> None:
    first, second = ranks(2, two_more_ways)
    assert first[:2] == second[:2]
    assert first[0] == "AutoStrategy found no layout for TinyGPT. OSError: no such file"
    assert first[1] == "TP"
    assert "a pipeline needs module and optimizer set up together" in first[2]["PP"]
