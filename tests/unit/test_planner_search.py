"""The search: what it may and may not recommend, and what it says where nothing fits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples.gpt.model import GPTConfig
from lightning_par import HybridStrategy
from lightning_par.config import check_layout, resolve
from lightning_par.layout import ParallelLayout
from lightning_par.pipeline_parallel.schedules import SCHEDULES, check_num_microbatches, check_num_virtual_stages
from lightning_par.pipelined import PipelineOptions
from lightning_par.planner import (
    Cluster,
    Device,
    Disk,
    Evaluation,
    Host,
    Link,
    Plan,
    PlannedModel,
    Workload,
    make_plan,
    predict_memory,
)
from lightning_par.planner.overrides import overrides_for
from lightning_par.tensor_parallel import check_plan, resolve_plan
from tests.planner_models import GPT2_SMALL, GPT3_175B, LLAMA_7B, Stack, cluster, planned
from tests.unit.configuration import compose_train, no_launcher


def test_a_175b_model_on_1024_devices() -> None:
    answer = make_plan(planned(GPT3_175B), cluster("8xh100", "nodes=128"), Workload(global_batch=1536))
    assert answer.recommended is not None
    assert answer.recommended.candidate.layout.world_size == 1024
    assert answer.recommended.memory.fits
    assert answer.num_considered > 1000
    assert 0.2 < answer.recommended.time.mfu < 0.6


def test_the_same_question_has_the_same_answer() -> None:
    first, second = (
        make_plan(planned(GPT2_SMALL), cluster("8xh100"), Workload(global_batch=64)).to_dict() for _ in range(2)
    )
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert json.loads(json.dumps(first)) == json.loads(json.dumps({**second, "seconds": first["seconds"]}))


def test_what_divides_badly_is_refused_with_the_checks_own_words() -> None:
    answer = make_plan(planned(GPT2_SMALL), cluster("8xa100_80gb"), Workload(global_batch=12))
    reasons = {rejection.label: rejection.reason for rejection in answer.rejected}
    assert "num_heads=12 is not divisible by 8" in reasons["TP of 8"]
    assert reasons["DP of 8"] == "12 samples of a step do not divide over 8 data-parallel ranks"


def test_a_model_without_a_tensor_plan_says_so() -> None:
    module = Stack([32, 32], plan=False)
    answer = make_plan(PlannedModel(module, torch.zeros(4, 8)), cluster("8xh100"), Workload(global_batch=64))
    reasons = {rejection.label: rejection.reason for rejection in answer.rejected}
    assert "tensor parallelism needs a plan" in reasons["TP of 2"]


@pytest.mark.parametrize(("total", "size"), [(None, None), (8, 8), (0, None), (None, 0)])
def test_a_workload_is_of_one_kind_and_positive(total: int | None, size: int | None) -> None:
    with pytest.raises(ValueError, match=r"either global_batch|must be at least 1"):
        Workload(global_batch=total, batch_size=size)


def test_a_fixed_loader_keeps_its_batches() -> None:
    """A pipeline may cut a batch up, other layouts take it whole."""
    answer = make_plan(planned(GPT2_SMALL), cluster("8xh100"), Workload(batch_size=4, accumulate=2))
    assert answer.recommended is not None
    for one in (answer.recommended, *answer.runners_up):
        sizes = one.candidate.micro_batch_size, one.candidate.num_microbatches
        assert sizes == (4, 2) if one.candidate.layout.pp == 1 else one.candidate.batch_size == 4


# Nothing fits


def test_where_nothing_fits_it_says_what_is_missing_and_what_buys_it() -> None:
    machines = cluster("consumer_24gb", "host.memory=16e9", "host.disk=null")
    answer = make_plan(planned(LLAMA_7B), machines, Workload(global_batch=2))
    assert answer.recommended is None
    assert answer.overrides == ()
    closest = re.search(r"it lacks [\d.]+ [GT]B \(([\d,]+) bytes\)", answer.fix)
    assert closest is not None
    missing = min(rejection.missing for rejection in answer.rejected if rejection.closest is not None)
    assert int(closest[1].replace(",", "")) == missing
    nodes = re.search(r"(\d+) machines instead of 1 \(cluster.nodes=(\d+)\) would do", answer.fix)
    assert nodes is not None
    more = make_plan(planned(LLAMA_7B), machines.sized(nodes=int(nodes[1])), Workload(global_batch=2 * int(nodes[1])))
    assert more.recommended is not None
    assert "trainer.precision=bf16-true saves" in answer.fix
    assert "Devices of" in answer.fix


# What it recommends, the engine accepts


def accepted(one: Evaluation, model: PlannedModel, machines: Cluster, samples: int) -> None:
    """Hold a recommendation against the engine's own checks."""
    candidate = one.candidate
    layout = candidate.layout
    arguments = {name: value for name, value in candidate.strategy_arguments().items() if name != "offload"}
    HybridStrategy(**arguments)
    assert layout.world_size == machines.num_devices
    assert candidate.batch_size * layout.data_parallel_size == samples
    assert layout == ParallelLayout.from_degrees(
        machines.num_devices,
        data_parallel_size=layout.data_parallel_size,
        tensor_parallel_size=layout.tp,
        pipeline_parallel_size=layout.pp,
        zero_stage=candidate.zero_stage,
        zero_shard_size=layout.dp_shard if candidate.zero_stage else None,
    )
    if layout.tp > 1:
        check_plan(model.module, resolve_plan(model.module), layout.tp)
    if layout.pp > 1:
        schedule = SCHEDULES[candidate.schedule]
        check_num_microbatches(schedule, candidate.num_microbatches, layout.pp)
        check_num_virtual_stages(schedule, candidate.num_virtual_stages)
        PipelineOptions(candidate.schedule, candidate.num_microbatches, candidate.num_virtual_stages).check(layout.pp)
        assert layout.pp * candidate.num_virtual_stages <= model.profile().num_blocks
    memory = predict_memory(model, machines, candidate)
    assert memory == one.memory
    assert memory.fits
    assert memory.host <= machines.host.memory
    assert one.time.total > 0
    assert 0 < one.time.mfu <= 1
    assert sum(one.time.shares().values()) == pytest.approx(1)


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    widths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    return Stack(widths, width=draw(st.integers(1, 24)), frozen=draw(st.booleans()), plan=draw(st.booleans()))


@st.composite
def machines(draw: st.DrawFn) -> Cluster:
    memory = draw(st.floats(2e3, 1e7))
    is_gpu = draw(st.booleans())
    per_node, nodes = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 2, 3]))
    device = Device("some", memory, {"fp32": draw(st.floats(1e9, 1e15))}, draw(st.floats(1e8, 1e13)), is_gpu=is_gpu)
    host = Host(
        memory * per_node * draw(st.floats(1, 4)),
        draw(st.floats(1e8, 1e12)),
        draw(st.floats(1e8, 1e11)),
        draw(st.sampled_from([None, Disk(1e12, 1e9)])),
    )
    links = [Link(draw(st.floats(1e6, 1e12)), draw(st.floats(0, 1e-2))) for _ in range(2)]
    return Cluster("any", device, per_node, nodes, *links, host)


@given(module=stacks(), machines=machines(), samples=st.sampled_from([1, 6, 8, 24, 48]))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_random_models_and_clusters(module: Stack, machines: Cluster, samples: int) -> None:
    """It never crashes, and never recommends what the engine's own checks refuse."""
    model = PlannedModel(module, torch.zeros(2, 8))
    answer = make_plan(model, machines, Workload(global_batch=samples))
    if answer.recommended is None:
        assert answer.fix
        return
    for one in (answer.recommended, *answer.runners_up):
        accepted(one, model, machines, samples)


# The command


def composed(answer: Plan, folder: Path) -> tuple[dict[str, object], Evaluation]:
    """The recommendation's overrides, composed as ``examples/train.py`` composes them."""
    assert answer.recommended is not None
    path = folder / "offloaded"
    path.mkdir(exist_ok=True)
    words = [word.replace("FOLDER", str(path)) for word in answer.overrides]
    with no_launcher():
        return resolve(compose_train(folder, *words, "launch.accelerator=cpu")), answer.recommended


def test_every_candidates_overrides_compose_to_it(tmp_path: Path) -> None:
    """Of several situations: the recommendation, the runners-up and the closest of what does not fit."""
    model = planned(GPTConfig(vocab_size=256, num_layers=8, block_size=32))
    small = cluster("4x8xa100_slow", "nodes=1", "devices_per_node=4")
    answers = [
        (make_plan(planned(LLAMA_7B), small, Workload(global_batch=16)), small),
        (make_plan(model, small, Workload(global_batch=64)), small),
        (make_plan(planned(LLAMA_7B), cluster("consumer_24gb"), Workload(global_batch=4)), cluster("consumer_24gb")),
    ]
    for answer, place in answers:
        assert answer.recommended is not None
        for one in (answer.recommended, *answer.runners_up):
            words = tuple(overrides_for(one.candidate, place, model))
            config, _ = composed(replace(answer, overrides=words), tmp_path)
            layout = check_layout(config)
            assert layout is not None
            expected = one.candidate.layout
            assert (layout.pp, layout.data_parallel_size, layout.tp) == (
                expected.pp,
                expected.data_parallel_size,
                expected.tp,
            )
            strategy = config["strategy"]
            assert strategy["zero_stage"] == (one.candidate.zero_stage if "ZeRO" in one.candidate.kind else 0)
            assert strategy["activation_checkpointing"] == one.candidate.activation_checkpointing
            batch = config["data"]["batch_size"] * config["trainer"]["accumulate_grad_batches"]
            assert batch == one.candidate.batch_size
            assert bool(strategy["offload"]) == bool(one.candidate.offload)
            if one.candidate.offload:
                assert strategy["offload"]["parameters"] == (one.candidate.offload == "all")


def test_several_machines_are_told_where_to_meet(tmp_path: Path) -> None:
    answer = make_plan(planned(LLAMA_7B), cluster("4x8xh100_fast"), Workload(global_batch=64))
    assert "launch=multi_node" in answer.overrides
    config, one = composed(answer, tmp_path)
    assert config["launch"]["nnodes"] == 4
    assert check_layout(config).world_size == one.candidate.layout.world_size == 32
