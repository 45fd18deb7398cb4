"""What each rank of a pipeline holds, and making the module whole again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_par.pipeline_parallel.placement import build_stages
from lightning_par.pipeline_parallel.split import split_evenly_by_cost
from lightning_par.pipeline_parallel.standins import AbsentBlock, LateStandIn, NextBlock, StandIn
from lightning_par.pipeline_parallel.trunk import find_trunk
from tests.pipeline_models import MODELS, NUM_BLOCKS, WIDTH, Emulated, Residual, tiny_gpt

pytestmark = pytest.mark.unit

RANGES = split_evenly_by_cost([1.0] * NUM_BLOCKS, 0, 0, NUM_BLOCKS)


def build(module: nn.Module, local: Sequence[int], **options: Any) -> Any:
    return build_stages(module, find_trunk(module), RANGES, local, **options)


def held(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("local", [[0], [2], [3], [0, 2], [3, 0], [1, 2]])
@pytest.mark.parametrize("model", ["tiny_gpt_tied", "gpt2", "vision_transformer", "direct_blocks"])
def test_a_rank_holds_what_the_table_says_under_the_same_names(model: str, local: list[int]) -> None:
    module = MODELS[model][0]()
    whole = dict(module.named_parameters(remove_duplicate=False))
    staged = build(module, local)
    assert staged.holders.keys() == whole.keys()
    shared = {parameter for name, parameter in whole.items() if len(staged.holders[name]) > 1}
    expected = {name for name in whole if set(staged.holders[name]) & set(local)}
    missing_ties = {name for name in expected - held(module) if whole[name] in shared}
    assert held(module) == expected - missing_ties
    for name, parameter in module.named_parameters(remove_duplicate=False):
        assert parameter is whole[name]
    for stage, stage_module in zip(local, staged.stages, strict=True):
        assert held(stage_module.module) <= {name for name in held(module) if stage in staged.holders[name]}
    assert set().union(*(held(stage.module) for stage in staged.stages)) == held(module)


def test_holders_of_ties_and_loose_parameters() -> None:
    tied = build(tiny_gpt(tied=True), [1]).holders
    assert tied["net.tokens.weight"] == tied["net.head.weight"] == [0, 3]
    assert tied["net.positions.weight"] == [0]
    assert tied["net.blocks.2.up.weight"] == [2]
    assert tied["net.norm.weight"] == [3]
    loose = build(MODELS["vision_transformer"][0](), [1]).holders
    assert loose["network.class_token"] == [0, 1, 2, 3]


def test_the_last_stage_keeps_a_tied_heads_parameter() -> None:
    module = tiny_gpt(tied=True)
    weight = module.net.tokens.weight
    build(module, [3])
    assert module.net.head.weight is weight
    assert isinstance(module.net.tokens, StandIn)


def test_placeholders_by_place() -> None:
    module = tiny_gpt(tied=False)
    (stage,) = build(module, [1]).stages
    assert stage.module is module
    net = module.net
    kinds = [type(part) for part in (net.tokens, *net.blocks, net.norm, net.head)]
    assert kinds == [StandIn, AbsentBlock, type(net.blocks[1]), NextBlock, NextBlock, LateStandIn, LateStandIn]
    assert net.blocks[0].attention.query.in_features == 32, "settings are read through placeholders"
    assert net.tokens.weight.shape == (64, 32)
    assert net.tokens.weight.isnan().all()
    assert net.tokens.weight.untyped_storage().nbytes() == 4, "without memory"


def test_absent_tensors_are_freed() -> None:
    module = MODELS["vision_transformer"][0]()
    gone = [weakref.ref(parameter) for parameter in module.network.layers[0].parameters()]
    kept = build(module, [1])
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
    assert kept.stages


def test_two_stages_of_a_rank_share_all_but_containers_placeholders_and_hooks() -> None:
    module = MODELS["vision_transformer"][0]()
    first, last = (stage.module for stage in build(module, [0, 3]).stages)
    assert type(first) is type(last) is type(module)
    assert len({module, first, last}) == len({module.network, first.network, last.network}) == 3
    assert first.network.patches is module.network.patches
    assert last.network.head is module.network.head
    assert module.network.layers[0] is first.network.layers[0]
    assert module.network.layers[3] is last.network.layers[3]
    assert isinstance(last.network.layers[0], AbsentBlock)
    assert first.network.class_token is last.network.class_token is module.network.class_token
    assert isinstance(last.network.patches, StandIn)
    assert isinstance(first.network.head, LateStandIn)
    first.network.register_forward_hook(lambda *_: None)
    assert not last.network._forward_hooks
    assert not module.network._forward_hooks


class Untouchable(Residual):
    """No second object may be made by its own means."""

    def __copy__(self) -> Any:
        raise AssertionError

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError

    def __getstate__(self) -> Any:
        raise AssertionError


class Owner(Untouchable):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Untouchable() for _ in range(NUM_BLOCKS)))
        self.table = nn.Linear(1, 1)
        self.register_buffer("count", torch.zeros(()))


def test_no_copying_method_of_the_user_runs() -> None:
    module = Owner()
    trunk = find_trunk(module)
    staged = build_stages(module, trunk, RANGES, [0, 2])
    assert all(stage.module.count is module.count for stage in staged.stages)


class Alias(nn.Module):
    """A module that is called before and after the blocks under two names, as in encoders and decoders."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(NUM_BLOCKS))
        self.again = self.embedding
        self.head = nn.Linear(WIDTH, 4)


def test_a_module_of_two_places_lives_on_every_stage() -> None:
    module = Alias()
    holders = build(module, [1]).holders
    assert holders["embedding.weight"] == holders["again.weight"] == [0, 1, 2, 3]
    assert module.embedding is module.again


def test_places_by_hand() -> None:
    holders = build(Alias(), [1], first=["head"]).holders
    assert holders["head.weight"] == [0]
    holders = build(Alias(), [1], first=["head"], last=["head"]).holders
    assert holders["head.weight"] == [0, 1, 2, 3]
    parts = build(MODELS["direct_blocks"][0](), [1], last=["parts"]).holders
    assert parts["parts.embedding.weight"] == parts["parts.scale.bias"] == [3]


@pytest.mark.parametrize("name", ["nothing", "blocks", "blocks.0", "head.weight"])
def test_refuses_to_place_what_is_no_module_beside_the_blocks(name: str) -> None:
    with pytest.raises(ValueError, match=rf'pipeline_last names "{name}".*embedding, again, head'):
        build(Alias(), [1], last=[name])


@pytest.mark.parametrize("placement", [[[0], [1]], [[0], [1], [2]], [[0, 3], [1, 2]]])
@pytest.mark.parametrize("model", ["tiny_gpt_tied", "llama", "vision_transformer", "direct_blocks", "example_gpt"])
def test_restore_makes_every_rank_whole(model: str, placement: list[list[int]]) -> None:
    whole = MODELS[model][0]()
    whole.register_buffer("root_buffer", torch.ones(2))
    next(whole.modules()).training = False
    values = {**dict(whole.named_parameters(remove_duplicate=False)), **dict(whole.named_buffers())}
    shape = {name: type(part) for name, part in whole.named_modules()}
    pipeline = Emulated(whole, placement)
    for rank, staged in zip(pipeline.ranks, pipeline.staged, strict=True):
        missing = set(whole.state_dict()) - set(rank.state_dict())
        present = dict(rank.named_parameters(remove_duplicate=False))
        fetched: list[str] = []

        def fetch(name: str, tensor: Tensor, fetched: list[str] = fetched) -> None:
            assert not tensor.is_meta
            fetched.append(name)
            tensor.copy_(values[name])

        with torch.no_grad():
            staged.restore(fetch)
        assert {name: type(part) for name, part in rank.named_modules()} == shape
        assert list(rank.state_dict()) == list(whole.state_dict())
        torch.testing.assert_close(rank.state_dict(), whole.state_dict(), rtol=0, atol=0)
        assert held(rank) == held(whole)
        assert len(list(rank.parameters())) == len(list(whole.parameters())), "tied again"
        assert all(dict(rank.named_parameters(remove_duplicate=False))[name] is old for name, old in present.items())
        assert len(fetched) == len(set(fetched))
        tied = {name for name in missing if name not in fetched}
        assert all(any(values[name] is values[other] for other in {*present, *fetched}) for name in tied)


def test_restore_returns_the_very_modules_and_flags() -> None:
    module = tiny_gpt(tied=True)
    module.net.blocks[0].requires_grad_(False)
    parts = dict(module.named_modules())
    staged = build(module, [1, 2])
    staged.restore(lambda name, tensor: tensor.zero_())
    assert all(part is parts[name] for name, part in module.named_modules())
    assert not module.net.blocks[0].up.weight.requires_grad
    assert module.net.blocks[3].up.weight.requires_grad
    assert module.net.head.weight is module.net.tokens.weight


def test_placeholders_follow_the_module_to_another_type() -> None:
    module = tiny_gpt(tied=False)
    build(module, [1, 3])
    module.to(torch.bfloat16)
    assert module.net.tokens.weight.dtype == torch.bfloat16
