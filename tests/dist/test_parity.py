"""Every layout trains as one process does: the matrix of layouts and scenarios."""

from __future__ import annotations


import pytest
import torch

from tests.dist.parity import (
    ALL,
    LAYOUTS,
    OFFLOADED_PIPELINES,
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

CLIP = {"gradient_clip_val": 0.2}
ON_EVERY_LAYOUT = [
    Scenario("tied, clipped by norm, last batch smaller", {"tied": True}, CLIP, num_samples=44),
    Scenario("accumulated, clipped by norm", trainer=CLIP, micro_batches=4),
]
ON_EVERY_KIND = [
    Scenario("frozen and unused parameters, last batch padded", {"frozen": True, "unused": True}, num_samples=45),
    # Three batches an epoch in windows of two: the last window is not full.
    Scenario(
        "last window not full, clipped by value",
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    ),
    Scenario("bf16-mixed", trainer={"precision": "bf16-mixed"}, tolerance=5e-2),
]
KINDS = ("dp2", "zero1x2", "zero2x2", "zero3x2", "tp2", "zero3_hsdp2x2", "dp2xtp2", "zero3x2xtp2")
CASES = [(name, scenario) for name in LAYOUTS for scenario in ON_EVERY_LAYOUT]
CASES += [(name, scenario) for name in KINDS for scenario in ON_EVERY_KIND]
CASES += [(name, scenario) for name in SERVERS for scenario in ON_EVERY_LAYOUT]
CASES += [("ps2", scenario) for scenario in ON_EVERY_KIND]
CASES += [(name, scenario) for name in OFFLOADS for scenario in ON_EVERY_LAYOUT]
CASES += [(name, scenario) for name in ("zero2x2 half off", "zero3x2 all on disk") for scenario in ON_EVERY_KIND]
BLOCKS = {"num_blocks": 4}
TIED_IN_BLOCKS = Scenario("tied, clipped by norm, last batch smaller", {**BLOCKS, "tied": True}, CLIP, num_samples=44)
ON_SOME_PIPELINES = [
    Scenario("accumulated, clipped by norm", BLOCKS, CLIP, micro_batches=2),
    Scenario("frozen, unused parameters", {**BLOCKS, "frozen": True, "unused": True}),
]
SOME_PIPELINES = ("pp2", "pp2 zbv", "pp2xdp2", "pp2xzero1x2", "pp2xzero3x2")
CASES += [(name, TIED_IN_BLOCKS) for name in PIPELINES | OFFLOADED_PIPELINES]
CASES += [(name, scenario) for name in SOME_PIPELINES for scenario in ON_SOME_PIPELINES]
CASES += [("pp2", Scenario("bf16-mixed", BLOCKS, {"precision": "bf16-mixed"}, tolerance=5e-2))]


@pytest.mark.parametrize(("name", "scenario"), CASES, ids=[f"{name}: {scenario.name}" for name, scenario in CASES])
def test_parity(ranks: Ranks, one_process: OneProcess, name: str, scenario: Scenario) -> None:
    layout = ALL[name]
    # The number of data ranks only orders the samples, and without padding the order is the same for any number.
    needs_padding = scenario.num_samples % layout.data_parallel_size
    expected = one_process(train, scenario, layout.data_parallel_size if needs_padding else 1)
    outcomes = ranks(layout.world_size, train, layout, scenario)
    whole, expected_whole = tensors(outcomes), tensors([expected])
    found = differences(whole, expected_whole, scenario.tolerance)
    for rank, outcome in enumerate(outcomes):
        actual = numbers(outcome, scenario.micro_batches)
        differing = differences(actual, numbers(expected), scenario.tolerance)
        found |= {f"rank {rank}: {what}": difference for what, difference in differing.items()}
    assert not found, report(found)
    norms = pytest.approx(gradient_norms(expected_whole), rel=scenario.tolerance)
    assert gradient_norms(whole) == norms
    if scenario.clips_by_norm:
        assert outcomes[-1].clip_norms == norms
        assert min(outcomes[-1].clip_norms) > scenario.trainer["gradient_clip_val"], "nothing was clipped"
    # What is logged without sync_dist is each rank's own: their mean is the whole batch's.
    local = torch.tensor([o.local_losses for rank, o in enumerate(outcomes) if rank not in layout.idle_ranks])
    torch.testing.assert_close(local.mean(0), torch.tensor(outcomes[0].losses))
