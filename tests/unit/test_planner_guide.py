"""The decision list: each row is the recommendation of its situation, with the words of its reason."""

from __future__ import annotations

import pytest

from examples.gpt.model import GPTConfig
from lightning_par.planner import Plan, Workload, make_plan
from lightning_par.planner.guide import ROWS, situation_of
from lightning_par.planner.traffic import crosses_nodes
from lightning_par.planner.words import gigabytes, seconds
from tests.planner_models import GPT2_SMALL, GPT2_XL, LLAMA_7B, LLAMA_65B, cluster, planned

FAT_LAYERS = GPTConfig(
    vocab_size=32000, block_size=1024, num_layers=8, num_heads=32, hidden_size=16384, positions="rotary", tied=False
)


def plan(config: GPTConfig, machines: str, samples: int, *overrides: str) -> Plan:
    return make_plan(planned(config), cluster(machines, *overrides), Workload(global_batch=samples))


GOLDEN = {
    "one device, and the model fits": (
        (GPT2_SMALL, "h200", 64),
        ("plain",),
        "training takes {whole} of the 120 GB that may be used: nothing else is needed",
    ),
    "one device, and the model does not fit": (
        (GPT2_XL, "consumer_24gb", 8),
        ("ZeRO-1", "ZeRO-2", "ZeRO-3"),
        "training takes {whole}, more than the 20.2 GB that may be used, and there is no other device to share it "
        "with: the host's memory takes the optimizer states",
    ),
    "several devices, and the model fits one": (
        (GPT2_SMALL, "8xa100_80gb", 128),
        ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3"),
        "training takes {whole} of the 68 GB that may be used, so each device can hold the whole model and only "
        "gradients travel",
    ),
    "several devices, and the model does not fit one": (
        (LLAMA_7B, "8xa100_80gb", 64),
        ("ZeRO-1", "ZeRO-2", "ZeRO-3", "PP", "PP+DP", "TP", "TP+DP"),
        "training takes {whole}, more than the 68 GB of a device that may be used, so the model's states must be "
        "shared, in one way of the three",
    ),
    "several devices, and not even the largest layer fits one": (
        (FAT_LAYERS, "consumer_24gb", 64, "devices_per_node=32", "host.memory=1e12"),
        ("PP+TP", "PP+TP+DP", "PP+TP+ZeRO-1", "PP+TP+ZeRO-2", "PP+TP+ZeRO-3", "PP+ZeRO-3"),
        "the largest layer with its gradients and optimizer states takes 51.5 GB, more than the 20.2 GB of a device",
    ),
    "several machines with a fast link": (
        (LLAMA_7B, "4x8xh100_fast", 256),
        ("ZeRO-1", "ZeRO-2", "ZeRO-3"),
        "the link between machines carries 45 GB/s for each device, enough to hide gathers and reductions",
    ),
    "several machines with a slow link": (
        (LLAMA_65B, "4x8xa100_slow", 256),
        ("PP+TP+DP", "PP+TP+ZeRO-1", "PP+TP+ZeRO-2", "PP+TP+ZeRO-3"),
        "the link between machines carries 360 MB/s for each device, 639 times less than the one inside: only a "
        "pipeline's hidden states should cross it",
    ),
}


def test_every_row_of_the_list_has_a_golden_situation() -> None:
    assert set(GOLDEN) == {row.name for row in ROWS}


@pytest.mark.parametrize("situation", GOLDEN)
def test_a_row_is_the_recommendation_of_its_situation(situation: str) -> None:
    question, kinds, words = GOLDEN[situation]
    answer = plan(*question)
    config, machines, _, *overrides = question
    words = words.format(whole=gigabytes(situation_of(planned(config), cluster(machines, *overrides)).whole))
    assert answer.advice is not None
    assert answer.recommended is not None
    assert answer.advice.situation == situation
    assert words in answer.advice.reason
    assert answer.recommended.candidate.kind in kinds
    assert answer.advice.agrees
    assert answer.advice.comparison == ""
    assert answer.recommended.reason.startswith(words[0].upper() + words[1:])
    assert answer.recommended.memory.fits
    assert bool(answer.recommended.candidate.offload) == (situation == "one device, and the model does not fit")


def test_the_tensor_axis_never_leaves_a_machine() -> None:
    answer = plan(LLAMA_65B, "4x8xa100_slow", 256)
    assert answer.recommended is not None
    for one in (answer.recommended, *answer.runners_up):
        assert not crosses_nodes(answer.cluster, one.candidate.layout, "tp")


def test_where_the_figures_disagree_with_the_list_both_numbers_are_said() -> None:
    """Over Ethernet a 7B model needs no tensor axis: its layers fit, and the axis would only add messages."""
    answer = plan(LLAMA_7B, "4x8xa100_slow", 256)
    assert answer.advice is not None
    assert answer.recommended is not None
    assert answer.recommended.candidate.kind == "PP+ZeRO-1"
    assert not answer.advice.agrees
    assert "The list says data, pipeline and tensor parallelism and ZeRO together" in answer.advice.comparison
    taken = answer.recommended.time.total
    best = next(one.time.total for one in answer.runners_up if one.candidate.kind == "PP+TP+ZeRO-1")
    more = f"{best / taken - 1:.0%} more than what is recommended: PP+ZeRO-1 takes {seconds(taken)} a step"
    assert f"(PP+TP+ZeRO-1) takes {seconds(best)} a step, {more}" in answer.advice.comparison
    assert best > 1.2 * taken


def test_runners_up_say_what_they_lose() -> None:
    answer = plan(GPT2_SMALL, "8xa100_80gb", 128)
    reasons = {one.candidate.kind: one.reason for one in answer.runners_up}
    assert "slower" in reasons["PP+ZeRO-1"]
    assert "DP" in reasons
    assert answer.recommended is not None
    assert answer.recommended.candidate.kind not in reasons
