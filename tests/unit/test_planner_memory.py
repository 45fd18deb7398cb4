"""Bytes of a rank: the paper's figure, states to the byte, and what each knob does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW

from examples.gpt.model import GPTConfig
from lightning_par.layout import ParallelLayout
from lightning_par.planner import Candidate, OptimizerRule, optimizer_rule, predict_memory, state_bytes, zero_figure
from lightning_par.planner.profile import shard_numel
from tests.planner_models import GPT2_SMALL, LLAMA_7B, PlannedModel, Stack, cluster, planned

A100 = cluster("8xa100_80gb")
ZERO_8 = ParallelLayout(dp_shard=8)


def test_the_papers_figure() -> None:
    """7.5 billion parameters on 64 ranks: figure 1 of arXiv 1910.02054, in decimal gigabytes."""
    totals = {stage: round(sum(parts.values()) / 1e9, 1) for stage, parts in zero_figure(7.5e9, 64).items()}
    assert totals == {"DP": 120.0, "ZeRO-1": 31.4, "ZeRO-2": 16.6, "ZeRO-3": 1.9}


def test_the_papers_figure_of_one_rank_is_that_of_no_sharding() -> None:
    stages = zero_figure(1e9, 1)
    assert {sum(parts.values()) for parts in stages.values()} == {16e9}
    with pytest.raises(ValueError, match="must be positive"):
        zero_figure(0, 4)


@pytest.mark.parametrize("size", [(), (5,), (7, 3), (8, 2), (1, 100), (64, 16)])
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_shards_are_what_chunk_leaves(size: tuple[int, ...], shards: int) -> None:
    parts = torch.empty(size).chunk(shards) if size else [torch.empty(size)] * shards
    for index in range(shards):
        expected = parts[index].numel() if index < len(parts) else 0
        assert shard_numel(size, shards, index) == expected


def test_states_of_all_ranks_are_those_of_one_process() -> None:
    """Weights, gradients and two moments of four bytes: 16 a parameter, and Adam's step count of each."""
    module = Stack([5, 7], width=6, frozen=True)
    model = PlannedModel(module, torch.zeros(2, 8))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    ranks = [state_bytes(model, Candidate(ParallelLayout(dp_shard=3), 3), 0, rank) for rank in range(3)]
    assert sum(rank.parameters for rank in ranks) == 4 * model.num_parameters
    assert sum(rank.gradients for rank in ranks) == 4 * sum(p.numel() for p in trained)
    assert sum(rank.optimizer for rank in ranks) == 8 * sum(p.numel() for p in trained) + 3 * 4 * len(trained)


def test_tied_weights_count_once_where_one_rank_has_both_ends() -> None:
    config = GPTConfig(vocab_size=50, block_size=8, num_layers=4, num_heads=2, hidden_size=16)
    tied, loose = planned(config, "32-true"), planned(replace(config, tied=False), "32-true")
    alone = Candidate()
    assert state_bytes(loose, alone).parameters - state_bytes(tied, alone).parameters == 4 * 50 * 16
    pipe = Candidate(ParallelLayout(pp=2), schedule="1f1b", num_microbatches=2)
    for rank in range(2):
        assert state_bytes(loose, pipe, rank) == state_bytes(tied, pipe, rank)
    v_shaped = replace(pipe, schedule="zbv", num_virtual_stages=2, num_microbatches=4)
    assert state_bytes(loose, v_shaped, 0).parameters - state_bytes(tied, v_shaped, 0).parameters == 4 * 50 * 16


def test_a_shared_weight_of_two_trees_stays_whole_on_the_data_axis() -> None:
    config = GPTConfig(vocab_size=50, block_size=8, num_layers=4, num_heads=2, hidden_size=16)
    model = planned(config, "32-true")
    layout = ParallelLayout(pp=2, dp_shard=2)
    zbv = Candidate(layout, 1, schedule="zbv", num_virtual_stages=2, num_microbatches=4)
    both, inner = state_bytes(model, zbv, 0).parameters, state_bytes(model, zbv, 1).parameters
    assert both - inner == 4 * (50 * 16 + 8 * 16 // 2 + 16 // 2)


@pytest.mark.parametrize(
    ("factory", "rule"),
    [
        (AdamW, OptimizerRule("AdamW", 2.0, 4)),
        (lambda parameters: SGD(parameters, lr=0.1), OptimizerRule("SGD", 0.0, 0)),
        (lambda parameters: SGD(parameters, lr=0.1, momentum=0.9), OptimizerRule("SGD", 1.0, 0)),
        (Adagrad, OptimizerRule("Adagrad", 1.0, 4)),
    ],
)
def test_an_optimizer_is_asked_what_it_keeps(factory: type, rule: OptimizerRule) -> None:
    assert optimizer_rule(factory) == rule


def test_each_stage_keeps_less() -> None:
    model = planned(LLAMA_7B)
    figures = [
        predict_memory(model, A100, Candidate(layout, stage, 1, 4))
        for layout, stage in [(ParallelLayout(dp_replicate=8), 0), (ZERO_8, 1), (ZERO_8, 2), (ZERO_8, 3)]
    ]
    totals = [memory.total for memory in figures]
    assert totals == sorted(totals, reverse=True)
    states = 16 * model.num_parameters
    assert figures[0].parameters + figures[0].gradients + figures[0].optimizer == pytest.approx(states, rel=1e-3)
    assert figures[3].parameters + figures[3].gradients + figures[3].optimizer == pytest.approx(states / 8, rel=1e-3)
    # Stage 1 keeps gradients whole, and 1 and 2 parameters, in half precision.
    assert figures[1].gradients == pytest.approx(4 * model.num_parameters, rel=1e-3)
    assert figures[2].gathered == pytest.approx(2 * model.num_parameters, rel=1e-3)
    assert figures[3].gathered < figures[2].gathered / 8


def test_checkpointing_keeps_less_the_more_it_computes_again() -> None:
    model = planned(LLAMA_7B)
    kept = [
        predict_memory(model, A100, Candidate(ZERO_8, 3, 4, activation_checkpointing=choice)).activations
        for choice in (False, "selective", True)
    ]
    assert kept[0] > 1.3 * kept[1] > 1.3 * 1.3 * kept[2]


def test_one_f_one_b_keeps_fewer_micro_batches_than_gpipe() -> None:
    model = planned(GPT2_SMALL)
    layout = ParallelLayout(pp=4)
    figures = {
        name: predict_memory(model, A100, Candidate(layout, 0, 2, 16, name)).activations for name in ("gpipe", "1f1b")
    }
    assert figures["gpipe"] > 3 * figures["1f1b"]


def test_offload_moves_states_to_the_host() -> None:
    model = planned(LLAMA_7B)
    here, optimizer, everything = (
        predict_memory(model, A100, Candidate(ZERO_8, 3, 1, offload=offload)) for offload in ("", "optimizer", "all")
    )
    states = 16 * model.num_parameters / 8
    assert (here.host, optimizer.optimizer, everything.parameters) == (0, 0, 0)
    assert optimizer.host == everything.host == pytest.approx(states, rel=1e-3)
    assert here.total > optimizer.total > everything.total
    on_disk = predict_memory(model, A100, Candidate(ZERO_8, 3, 1, offload="all", offload_device="disk"))
    assert (on_disk.host, on_disk.disk) == (0, everything.host)


def test_parts_add_up() -> None:
    memory = predict_memory(planned(GPT2_SMALL), A100, Candidate(ZERO_8, 2, 4, 2))
    figures = memory.to_dict()
    assert sum(figures[part] for part in memory.PARTS) == figures["total"] == memory.limit - memory.margin
    assert memory.limit == int(0.8 * A100.device.memory)


class NoBlocks(nn.Module):
    """Two layers of different sizes: nothing to pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 4)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.two(torch.relu(self.one(batch))).mean()


def test_a_module_without_blocks_is_one_unit() -> None:
    model = PlannedModel(NoBlocks(), torch.zeros(2, 4))
    assert "no list of like blocks" in model.refuses_pipeline()
    assert state_bytes(model, Candidate()).parameters == 4 * (4 * 8 + 8 + 8 * 4 + 4)
    memory = predict_memory(model, A100, Candidate(ZERO_8, 3, 2))
    assert memory.gathered == 4 * model.num_parameters


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="has no parameters"):
        PlannedModel(nn.ReLU(), None)
    with pytest.raises(ValueError, match="precision='8-bit' is not one of 32-true"):
        PlannedModel(NoBlocks(), None, precision="8-bit")
