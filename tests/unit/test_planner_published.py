"""Predictions beside published measurements: torchtitan's Llama 3.1 on H100 (benchmarks/llama3_h100_202412).

The hardware there: H100 with 96 GB of HBM2e at 2.4 TB/s and a limit of 500 W, NVLink, 400 Gb/s a GPU. What is published
is reserved memory (the allocator's, with its gaps) and tokens per second; sequences of 8,192 tokens. torchtitan does
some things that the strategies here do not, so the profile is changed to do them, each as its notes say:

- parameters are cast by FSDP and there is no autocast;
- selective checkpointing computes every second matrix product again;
- under a tensor axis, the sequence and the loss are split over it too;
- a pipeline keeps gradients whole until its last micro-batch, and parameters gathered: stage 1 of ZeRO;
- the 405B rows compile and use float8, which at 8B made 8,532 of 5,762 tokens per second.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_par.layout import ParallelLayout
from lightning_par.planner import Candidate, Cluster, PlannedModel, predict_memory, predict_time
from lightning_par.planner.profile import Line, Profile, Section, Work
from tests.planner_models import cluster

transformers = pytest.importorskip("transformers")

GIB = 2**30
COMPILED_FLOAT8 = 8532 / 5762
HOSTS = {"device.memory": 96e9, "device.memory_bandwidth": 2.4e12}


def step(module: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(module(tokens).logits.flatten(0, 1).float(), tokens.flatten())


@cache
def llama(blocks: int, hidden: int, heads: int, inner: int) -> PlannedModel:
    with torch.device("meta"):
        config = transformers.LlamaConfig(
            vocab_size=128256,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=blocks,
            num_attention_heads=heads,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            use_cache=False,
            attn_implementation="sdpa",
        )
        module = transformers.LlamaForCausalLM(config)
    model = PlannedModel(module, torch.zeros(2, 8192, dtype=torch.long), precision="bf16-mixed", step=step)
    model.precision = replace(model.precision, autocast=None)
    return model


def every_second_product_again(kind: Section, hidden: int, inner: int) -> Section:
    """Of q, k, v, o, gate, up, down it keeps q, v, gate, down; k and v are a quarter of a hidden state."""
    again = 8192 * 2 * (hidden / 4 + hidden + inner)
    return replace(kind, costly=kind.costly + Line(0.0, -again))


def sequence_parallel(whole: Profile, split: Profile, size: int) -> Profile:
    """What is whole on each rank of the tensor axis is split over the sequence; as many bytes travel."""

    def work(one: Work, other: Work) -> Work:
        share = 1 / size
        return replace(
            other,
            flops=one.flops * share,
            product_bytes=one.product_bytes * share,
            other_bytes=one.other_bytes * share,
        )

    def section(one: Section, other: Section) -> Section:
        share = 1 / size
        return replace(
            other,
            kept=one.kept * share,
            costly=one.costly * share,
            output=one.output * share,
            forward_peak=one.forward_peak * share,
            backward_peak=one.backward_peak * share,
            forward=work(one.forward, other.forward),
            backward=work(one.backward, other.backward),
        )

    return replace(
        split,
        before=section(whole.before, split.before),
        kinds=tuple(section(one, other) for one, other in zip(whole.kinds, split.kinds, strict=True)),
        after=section(whole.after, split.after),
    )


def machines(nodes: int) -> Cluster:
    return cluster("8xh100", f"nodes={nodes}", *(f"{key}={value}" for key, value in HOSTS.items()))


@pytest.mark.parametrize(("gpus", "gib", "rate"), [(8, 82.4, 5762), (128, 67.0, 5605)])
def test_8b_on_fsdp(gpus: int, gib: float, rate: float) -> None:
    model = llama(32, 4096, 32, 14336)
    profile = model.profile(1, gathers=True)
    kinds = tuple(every_second_product_again(kind, 4096, 14336) for kind in profile.kinds)
    model._profiles[1, True] = replace(profile, kinds=kinds)
    assert model.num_parameters == 8_030_261_248
    candidate = Candidate(ParallelLayout(dp_shard=gpus), 3, 2, 1, activation_checkpointing="selective")
    memory = predict_memory(model, machines(gpus // 8), candidate)
    time = predict_time(model, machines(gpus // 8), candidate)
    model._profiles[1, True] = profile
    # Below, by what the allocator keeps in reserve.
    assert memory.total / GIB == pytest.approx(gib, rel=0.10)
    assert time.tokens_per_second_per_device == pytest.approx(rate, rel=0.25)


@pytest.mark.parametrize(
    ("schedule", "stages", "gib", "rate", "memory_off"),
    [
        # 1F1B was published with more memory than the interleaved schedule, which keeps more activations. Its reading
        # holds 14 GiB that no tensor accounts for here; reserved memory counts gaps that 1F1B's changing sizes leave.
        ("1f1b", 1, 82.5, 100, 0.20),
        ("interleaved_1f1b", 2, 72.7, 128, 0.10),
    ],
)
def test_405b_on_512(schedule: str, stages: int, gib: float, rate: float, memory_off: float) -> None:
    """FSDP 8 x TP 8 x PP 8, full checkpointing, 32 samples of each data rank in 8 micro-batches."""
    model = llama(126, 16384, 128, 53248)
    assert model.num_parameters == 405_853_388_800
    model._profiles[8, True] = sequence_parallel(model.profile(1, True), model.profile(8, True), 8)
    layout = ParallelLayout(pp=8, tp=8, dp_shard=8)
    candidate = Candidate(layout, 1, 4, 8, schedule, stages, activation_checkpointing=True)
    memory = predict_memory(model, machines(64), candidate)
    time = predict_time(model, machines(64), candidate)
    assert memory.total / GIB == pytest.approx(gib, rel=memory_off)
    assert time.tokens_per_second_per_device * COMPILED_FLOAT8 == pytest.approx(rate, rel=0.25)


def test_interleaving_gains_what_was_published() -> None:
    """128 of 100 tokens per second: the bubble shrinks from 7/15 to 7/23."""
    model = llama(126, 16384, 128, 53248)
    model._profiles[8, True] = sequence_parallel(model.profile(1, True), model.profile(8, True), 8)
    layout = ParallelLayout(pp=8, tp=8, dp_shard=8)
    plain, interleaved = (
        predict_time(model, machines(64), Candidate(layout, 1, 4, 8, name, v, activation_checkpointing=True)).total
        for name, v in (("1f1b", 1), ("interleaved_1f1b", 2))
    )
    assert plain / interleaved == pytest.approx(1.28, abs=0.05)
