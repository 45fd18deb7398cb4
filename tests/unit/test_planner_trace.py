"""Tracing on fake tensors: against formulas, against a run on real ones, and what can't be traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import FlopCounterMode

from examples.gpt.model import GPTConfig
from examples.gpt.module import GPTModule
from lightning_par.planner import PlannedModel
from lightning_par.planner.ledger import Ledger
from lightning_par.planner.trace import trace, training_step
from tests.planner_models import Stack, planned

CONFIG = GPTConfig(vocab_size=96, block_size=32, num_layers=3, num_heads=4, hidden_size=64)
TOKENS = torch.zeros(2, 32, dtype=torch.long)


def test_flops_of_a_block_are_those_of_the_formula() -> None:
    (kind,) = planned(CONFIG, "32-true").profile().kinds
    matrices, tokens = 12 * 64**2, 32
    attention = 4 * tokens**2 * 64
    assert kind.forward.flops.at(5) == 5 * (2 * matrices * tokens + attention)
    # Backward: gradients of inputs and weights; attention computes its scores once more.
    assert kind.backward.flops.at(5) == 5 * (4 * matrices * tokens + 2.5 * attention)


def test_flops_of_the_whole_are_those_that_torch_counts() -> None:
    profile = PlannedModel(Stack([24, 24, 48]), torch.zeros(4, 8)).profile()
    sections = [(profile.before, 1), *((kind, len(kind.blocks)) for kind in profile.kinds), (profile.after, 1)]
    traced = sum(n * (section.forward.flops.at(4) + section.backward.flops.at(4)) for section, n in sections)
    with FlopCounterMode(display=False) as counter:
        Stack([24, 24, 48]).training_step(torch.randn(4, 8), 0).backward()
    assert traced == counter.get_total_flops()


def test_blocks_of_one_kind_are_traced_once_and_stand_for_all() -> None:
    """What is kept until the backward, block by block, is what the module traced as one keeps."""
    with torch.device("meta"):
        module = GPTModule(CONFIG)
    batch = (TOKENS, TOKENS)
    profile = PlannedModel(module, batch).profile()
    (whole,) = trace(module, batch, [2], trunk=None)
    (kind,) = profile.kinds
    kept = profile.before.kept.at(2) + 3 * kind.kept.at(2) + profile.after.kept.at(2)
    entry = whole["before"]
    assert kind.blocks == (0, 1, 2)
    assert kept == entry.end - entry.start


def test_fake_tensors_take_what_real_ones_take() -> None:
    torch.manual_seed(0)
    module = Stack([24, 40], plan=False)
    batch = torch.randn(2, 8)
    (fake,) = trace(module, batch, [2], trunk=None)
    ledger = Ledger([*module.parameters(), batch])
    with ledger:
        ledger.enter("before")
        loss = training_step(module, batch)
        ledger.enter("before backward")
        loss.backward()
        ledger.enter("")
    for section in ("before", "before backward"):
        real = ledger.entries[section]
        assert (real.end - real.start, real.peak - real.start, real.flops, real.operators) == (
            fake[section].end - fake[section].start,
            fake[section].peak - fake[section].start,
            fake[section].flops,
            fake[section].operators,
        )


def test_activations_are_the_tensors_that_autograd_saves() -> None:
    module = Stack([24], plan=False)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = torch.randn(2, 8)
    known = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), batch]}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module.training_step(batch, 0)
    by_autograd = sum(size for place, size in saved.items() if place not in known)
    (entries,) = trace(module, batch, [2], trunk=None)
    assert entries["before"].end - entries["before"].start == by_autograd + loss.nbytes


def test_figures_grow_with_the_batch_in_a_straight_line() -> None:
    model = planned(CONFIG, "32-true")
    (kind,) = model.profile().kinds
    (entries,) = trace(model.module, model.batch, [7], trunk="network.blocks")
    entry = entries["network.blocks.0"]
    assert kind.kept.at(7) == entry.end - entry.start
    assert kind.forward_peak.at(7) == entry.peak - entry.start
    assert kind.forward.other_bytes.at(7) == entry.other_bytes


def test_tensor_axis_moves_two_all_reduces_a_block_each_way() -> None:
    model = planned(CONFIG, "32-true")
    (whole,), (half,) = model.profile(1).kinds, model.profile(2).kinds
    hidden = 3 * 32 * 64 * 4
    assert half.forward.tensor_bytes.at(3) == half.backward.tensor_bytes.at(3) == 2 * 2 * hidden
    assert (half.forward.tensor_calls, whole.forward.tensor_calls) == (2, 0)
    assert half.forward.flops.at(3) == whole.forward.flops.at(3) / 2
    assert half.numel - 2 * 64 == (whole.numel - 2 * 64) / 2  # norms stay whole


def test_the_module_is_left_as_it_is() -> None:
    module = GPTModule(CONFIG)
    module.eval()
    before = {name: (parameter, parameter._version) for name, parameter in module.named_parameters()}
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()]
    state = torch.get_rng_state()
    PlannedModel(module, (TOKENS, TOKENS)).profile(2)
    assert not module.training
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in module.named_parameters():
        assert (parameter, parameter._version) == before[name]
        assert not isinstance(parameter, FakeTensor)
        assert parameter.grad is None
    assert hooks == [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()]
    assert "forward" not in vars(module.network.blocks[1])


class Reads(Stack):
    """Looks at a value, which a fake tensor does not have."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else loss * 2


class Backwards(Stack):
    """Calls its blocks from the last to the first."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        for block in reversed(self.blocks):
            x = block(x)
        return self.last(x).square().mean()


class Twice(Stack):
    """Calls its first block again at the end."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return self.last(x).square().mean()


@pytest.mark.parametrize(
    ("module", "batch", "words"),
    [
        (Reads([24, 24]), torch.zeros(2, 8), "DataDependentOutputException"),
        (Backwards([24, 24]), torch.zeros(2, 8), "a block is called before the first one of its kind"),
        (Twice([24, 24]), torch.zeros(2, 8), "calls the blocks of blocks in the order [0, 1, 0]"),
        (Stack([24, 24]), torch.zeros(2, 9), "Stack: RuntimeError"),
        (Stack([24, 24]), None, "there is no batch to trace with"),
    ],
)
def test_what_cannot_be_traced_is_estimated_and_says_so(module: nn.Module, batch: Any, words: str) -> None:
    model = PlannedModel(module, batch)
    profile = model.profile()
    assert profile.source == "formulas"
    assert profile.kinds[0].kept.at(2) > 0
    (note,) = model.notes
    assert words in note
    assert "from formulas instead of a trace" in note


def test_formulas_are_near_the_trace_of_a_transformer() -> None:
    config = GPTConfig(vocab_size=512, block_size=256, num_layers=4, num_heads=8, hidden_size=512)
    traced = planned(config, "bf16-mixed").profile(1, gathers=True)
    model = planned(config, "bf16-mixed", tokens_per_sample=256)
    model.batch = None
    rough = model.profile(1, gathers=True)
    (kind,), (guess,) = traced.kinds, rough.kinds
    assert guess.kept.at(4) == pytest.approx(kind.kept.at(4), rel=0.25)
    assert guess.forward.flops.at(4) == pytest.approx(kind.forward.flops.at(4), rel=0.01)
    assert guess.output.at(4) == kind.output.at(4)
    assert guess.shapes == kind.shapes
