"""The matrix of layouts and scenarios once more, through a loop of Fabric's."""

from __future__ import annotations

import pytest
import torch

from tests.dist.fabric_parity import train_by_fabric
from tests.dist.parity import (
    ALL,
    LAYOUTS,
    OFFLOADS,
    PIPELINES,
    SERVERS,
    Scenario,
    differences,
    gradient_norms,
    numbers,
    report,
    tensors,
    train,
)
from tests.dist.ranks import OneProcess, Ranks
from tests.dist.test_parity import BLOCKS, CLIP, ON_EVERY_KIND, ON_EVERY_LAYOUT, TIED_IN_BLOCKS

CLIPPED, ACCUMULATED = ON_EVERY_LAYOUT
BF16 = [scenario for scenario in ON_EVERY_KIND if scenario.name == "bf16-mixed"]
BY_VALUE = [scenario for scenario in ON_EVERY_KIND if "value" in scenario.name]
# Tied, frozen, unused, clipped and padded are the engine's, and told apart by the Trainer's matrix. Here every layout
# runs what a loop can do: clip and accumulate, over a smaller last batch, two groups and a scheduler.
CASES = [(name, CLIPPED) for name in (*LAYOUTS, *SERVERS, *OFFLOADS)]
CASES += [(name, ACCUMULATED) for name in ("dp2", "zero1x2", "zero2x2", "zero3_hsdp2x2", "zero3x2xtp2", "ps2+1")]
CASES += [(name, scenario) for name in ("dp2", "zero3x2", "tp2", "ps2") for scenario in BY_VALUE]
CASES += [(name, scenario) for name in ("dp2", "zero2x2", "zero3x2xtp2") for scenario in BF16]
CASES += [(name, TIED_IN_BLOCKS) for name in PIPELINES]
ACCUMULATED_IN_BLOCKS = Scenario("accumulated, clipped by norm", BLOCKS, CLIP, micro_batches=2)
CASES += [(name, ACCUMULATED_IN_BLOCKS) for name in ("pp2", "pp2 zbv", "pp2xdp2", "pp2xzero1x2", "pp2xzero3x2")]
CASES += [("pp2", Scenario("bf16-mixed", BLOCKS, {"precision": "bf16-mixed"}, tolerance=5e-2))]


@pytest.mark.parametrize(("name", "scenario"), CASES, ids=[f"{name}: {scenario.name}" for name, scenario in CASES])
def test_parity(ranks: Ranks, one_process: OneProcess, name: str, scenario: Scenario) -> None:
    layout = ALL[name]
    expected = one_process(train, scenario, 1)  # the Trainer's, in one process
    expected.metrics = {"val_loss": expected.metrics["val_loss"]}
    outcomes = ranks(layout.world_size, train_by_fabric, layout, scenario)
    whole, expected_whole = tensors(outcomes), tensors([expected])
    found = differences(whole, expected_whole, scenario.tolerance)
    for rank, outcome in enumerate(outcomes):
        actual = numbers(outcome, scenario.micro_batches)
        differing = differences(actual, numbers(expected), scenario.tolerance)
        found |= {f"rank {rank}: {what}": difference for what, difference in differing.items()}
    assert not found, report(found)
    if scenario.clips_by_norm:
        norms = pytest.approx(gradient_norms(expected_whole), rel=scenario.tolerance)
        assert outcomes[-1].clip_norms == norms
    local = torch.tensor([o.local_losses for rank, o in enumerate(outcomes) if rank not in layout.idle_ranks])
    torch.testing.assert_close(local.mean(0), torch.tensor(outcomes[0].losses))
