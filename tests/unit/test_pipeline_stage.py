"""Steps that are entered late and left early: all ranks in one process, against the module as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable import checkpoint

from lightning_par.pipeline_parallel.stage import CannotSplitError
from tests.pipeline_models import (
    IDS,
    IMAGES,
    MODELS,
    NUM_BLOCKS,
    WIDTH,
    Emulated,
    Residual,
    Step,
    VisionTransformer,
    one_process,
)

pytestmark = pytest.mark.unit

PLACEMENTS: dict[str, list[list[int]]] = {
    "two": [[0], [1]],
    "three": [[0], [1], [2]],
    "loop": [[0, 2], [1, 3]],
    "v": [[0, 3], [1, 2]],
}
X = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(3))


def check(module: nn.Module, placement: list[list[int]], batch: Any, **options: Any) -> Emulated:
    """Loss and every gradient are those of one process, also without verification."""
    loss, gradients = one_process(module, batch)
    assert any(gradient.abs().max() > 0 for gradient in gradients.values())
    pipeline = Emulated(module, placement, **options)
    for verify in (True, False):
        for stage in pipeline.stages:
            stage.verify = verify
            stage.zero_grad()
        torch.testing.assert_close(pipeline.step(batch), loss, rtol=0, atol=1e-6)
        torch.testing.assert_close(pipeline.gradients(), gradients, rtol=0, atol=1e-6)
    return pipeline


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("model", MODELS)
def test_equals_one_process(model: str, placement: str) -> None:
    make, batch = MODELS[model]
    torch.manual_seed(0)
    check(make(), PLACEMENTS[placement], batch)


@pytest.mark.parametrize("model", ["gpt2", "vision_transformer", "direct_blocks"])
def test_evaluation_equals_one_process(model: str) -> None:
    make, batch = MODELS[model]
    module = make().eval()
    with torch.no_grad():
        expected = module.training_step(batch, 0)
        assert torch.equal(Emulated(module, PLACEMENTS["v"]).step(batch), expected)


def test_batches_of_another_shape_follow() -> None:
    module = MODELS["llama"][0]()
    pipeline = Emulated(module, PLACEMENTS["loop"])
    for rows, columns in ((4, 17), (2, 17), (1, 9), (4, 17)):
        batch = {"input_ids": IDS[:rows, :columns]}
        assert torch.equal(pipeline.step(batch), module.training_step(batch, 0))


# Models that are not a plain chain


class Blocks(nn.Module):
    """Hidden states (batch, length, WIDTH) through blocks; what is special is in `body` and in the blocks."""

    def __init__(self, body: Callable[..., Tensor], block: type[nn.Module] = Residual) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.scales = nn.Parameter(torch.rand(NUM_BLOCKS))
        self.blocks = nn.ModuleList(block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.body = body

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.body(self, batch).square().mean()


class Conditioned(Residual):
    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return super().forward(x) * condition


class Pair(Residual):
    """Also returns what nobody may need, or somebody."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = super().forward(x if extra is None else x + extra)
        return x, x.mean()


class Halving(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, ::2]


class Reading(Residual):
    """Can't run on the meta device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.detach().abs().max()) > 0 else x


class ReadingPair(Reading):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        return super().forward(x), 1


class Keyword(Residual):
    def forward(self, mask: Tensor, *, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden_states) * mask


def chain(module: Any, x: Tensor) -> Tensor:
    x = module.embed(x)
    for block in module.blocks:
        x = block(x)
    return module.head(x)


def between(module: Any, x: Tensor) -> Tensor:
    x = module.embed(x)
    for block, scale in zip(module.blocks, module.scales, strict=True):
        x = block(x) * scale + 1
    return module.head(x)


def unused_extra(module: Any, x: Tensor) -> Tensor:
    x = module.embed(x)
    for block in module.blocks:
        x, _ = block(x)
    return module.head(x)


def keyword(module: Any, x: Tensor) -> Tensor:
    mask = (torch.arange(x.shape[1]) < 4)[:, None]
    x = module.embed(x)
    for block in module.blocks:
        x = block(mask, hidden_states=x)
    return module.head(x)


def shape_only(module: Any, x: Tensor) -> Tensor:
    x = module.embed(x)
    ones = torch.ones_like(x) * x.new_full((), 2)
    for block in module.blocks:
        x = block(x)
    return module.head(x + ones)


def sparse(module: Any, x: Tensor) -> Tensor:
    weights = torch.eye(x.shape[1]).to_sparse()
    return chain(module, torch.stack([torch.sparse.mm(weights, row) for row in x]))


@pytest.mark.parametrize("placement", ["three", "v"])
@pytest.mark.parametrize(
    ("body", "block"),
    [
        (chain, Residual),
        (between, Residual),
        (unused_extra, Pair),
        (chain, Halving),
        (chain, Reading),
        (keyword, Keyword),
        (shape_only, Residual),
        (sparse, Residual),
    ],
)
def test_what_can_be_split(body: Any, block: type[nn.Module], placement: str) -> None:
    check(Blocks(body, block), PLACEMENTS[placement], X)


def test_an_encoder_that_asks_its_first_layer_for_settings() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, NUM_BLOCKS, norm=nn.LayerNorm(WIDTH))
    module = Step(nn.ModuleList([nn.Linear(WIDTH, WIDTH), encoder]), lambda net, x: net[1](net[0](x)).square().mean())
    padding = torch.arange(5).expand(4, 5) >= torch.tensor([5, 4, 3, 2])[:, None]
    check(module, PLACEMENTS["three"], X)
    module.step = lambda net, x: net[1](net[0](x), src_key_padding_mask=padding).square().mean()
    with torch.no_grad(), pytest.raises(CannotSplitError, match="nested tensor.*enable_nested_tensor=False"):
        Emulated(module.eval(), PLACEMENTS["two"]).step(X)


def test_blocks_that_are_computed_again_in_backward() -> None:
    module = VisionTransformer()
    step = Step(module, lambda net, batch: net(batch).square().mean())
    loss, gradients = one_process(step, IMAGES)
    pipeline = Emulated(step, PLACEMENTS["v"])
    for rank in pipeline.ranks:
        for layer in rank.network.layers:
            if any(True for _ in layer.parameters()):
                checkpoint(layer)
    torch.testing.assert_close(pipeline.step(IMAGES), loss)
    torch.testing.assert_close(pipeline.gradients(), gradients)


def test_a_loss_that_is_not_a_number_by_itself_passes() -> None:
    module = Blocks(lambda module, x: chain(module, x) * torch.nan)
    with torch.no_grad():
        assert Emulated(module, PLACEMENTS["two"]).step(X).isnan()


# What can't be split


def reuses_embedding(module: Any, x: Tensor) -> Tensor:
    return chain(module, x) + module.embed(x)


def reuses_its_output(module: Any, x: Tensor) -> Tensor:
    first = y = module.embed(x)
    for block in module.blocks:
        y = block(y)
    return module.head(y + first)


def reuses_its_weight(module: Any, x: Tensor) -> Tensor:
    return F.linear(chain(module, x), module.embed.weight)


def compares_it(module: Any, x: Tensor) -> Tensor:
    first = y = module.embed(x)
    for block in module.blocks:
        y = block(y)
    return torch.where(first > 0, module.head(y), 0)


def conditions(module: Any, x: Tensor) -> Tensor:
    first = module.embed(x)
    y = x * 2
    for block in module.blocks:
        y = block(y, first.tanh())
    return module.head(y)


WAY_OUTS = [
    (reuses_embedding, Residual, r"calls embed after the blocks"),
    (reuses_its_output, Residual, r"uses what comes from embed \(Linear\).* after it has entered"),
    (reuses_its_weight, Residual, r"uses what comes from embed \(Linear\).* after it has entered"),
    (compares_it, Residual, r"uses what comes from embed \(Linear\).* after it has entered"),
    (conditions, Conditioned, r"blocks\.\d is called with what comes from embed \(Linear\).*besides the hidden state"),
]


@pytest.mark.parametrize(("body", "block", "complaint"), WAY_OUTS)
def test_what_needs_a_module_on_more_stages_is_refused_and_works_when_named(
    body: Any, block: type[nn.Module], complaint: str
) -> None:
    module = Blocks(body, block)
    with pytest.raises(CannotSplitError, match=complaint + r".*in both, pipeline_first and pipeline_last"):
        Emulated(module, PLACEMENTS["three"]).step(X)
    check(module, PLACEMENTS["three"], X, first=["embed"], last=["embed"])


def test_a_module_that_is_called_earlier_than_registered_is_refused_and_works_when_named() -> None:
    def early_head(module: Any, x: Tensor) -> Tensor:
        x = module.head(x)
        for block in module.blocks:
            x = block(x)
        return x

    module = Blocks(early_head)
    with pytest.raises(CannotSplitError, match=r"calls head before the blocks.*Name it in pipeline_first"):
        Emulated(module, PLACEMENTS["two"]).step(X)
    check(module, PLACEMENTS["three"], X, first=["head"])


def passes_extra(module: Any, x: Tensor) -> Tensor:
    x, extra = module.embed(x), None
    for block in module.blocks:
        x, extra = block(x, extra)
    return module.head(x)


def collects_extra(module: Any, x: Tensor) -> Tensor:
    x, extras = module.embed(x), []
    for block in module.blocks:
        x, extra = block(x)
        extras.append(extra)
    return module.head(x) + torch.stack(extras).sum()


def collects_by_hooks(module: Any, x: Tensor) -> Tensor:
    inner: list[Tensor] = []
    layers = [part for part in module.blocks.modules() if isinstance(part, nn.Tanh)]
    handles = [layer.register_forward_hook(lambda *call: inner.append(call[2])) for layer in layers]
    result = chain(module, x)
    for handle in handles:
        handle.remove()
    return result + torch.stack(inner).sum()


def regularizes(module: Any, x: Tensor) -> Tensor:
    return chain(module, x) + sum(parameter.square().sum() for parameter in module.parameters())


def runs_twice(module: Any, x: Tensor) -> Tensor:
    x = module.embed(x)
    for block in [*module.blocks, *module.blocks]:
        x = block(x)
    return x


def never_enters(module: Any, x: Tensor) -> Tensor:
    return module.embed(x)


def goes_round_calls(module: Any, x: Tensor) -> Tensor:
    for block in module.blocks:
        x = block.forward(x)
    return x


def starts_late(module: Any, x: Tensor) -> Tensor:
    for block in module.blocks[3:]:
        x = block(x)
    return x


def reads_numbers(module: Any, x: Tensor) -> Tensor:
    return chain(module, x / module.embed(x).norm().item())


def passes_integers(module: Any, x: Tensor) -> Tensor:
    x = x.long()
    for block in module.blocks:
        x = block(x).long()
    return x.float()


class Float(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


REFUSED = {
    "extra passed on": (passes_extra, Pair, r"besides the hidden state. Only the first floating-point tensor"),
    "extra collected": (collects_extra, Pair, r"uses what comes from blocks\.0 \(Pair\).* after it has entered"),
    "collected by hooks": (collects_by_hooks, Residual, r"uses parameters of blocks\.\d, or what it computes inside"),
    "weights in the loss": (regularizes, Residual, r"uses parameters of blocks\.\d"),
    "trunk run twice": (runs_twice, Residual, r"calls blocks\.\d twice"),
    "never entered": (never_enters, Residual, r"returned without calling blocks\.0"),
    "blocks not called": (goes_round_calls, Residual, r"uses parameters of blocks\.0.*Call blocks as block\(hidden"),
    "blocks left out": (starts_late, Residual, r"calls blocks\.3 without having called the first block"),
    "numbers read": (reads_numbers, Residual, r"reads numbers of what comes from embed"),
    "no floating hidden": (passes_integers, Float, r"blocks\.\d is called without a floating-point tensor"),
    "no shape to be had": (unused_extra, ReadingPair, r"fails before blocks\.\d.*blocks\.0 could not be run"),
}


@pytest.mark.parametrize("placement", ["two", "v"])
@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str, placement: str) -> None:
    body, block, complaint = REFUSED[case]
    module = Blocks(body, block)
    module.training_step(X, 0)  # one process can
    with pytest.raises(CannotSplitError, match=complaint):
        Emulated(module, PLACEMENTS[placement]).step(X)


@pytest.mark.parametrize("result", [lambda embedded: {"features": embedded}, lambda embedded: [embedded.argmax(-1)]])
def test_refuses_results_without_numbers(result: Any) -> None:
    def step(module: Any, x: Tensor) -> Any:
        embedded = module.embed(x)
        chain(module, x)
        return result(embedded)

    module = Blocks(lambda *_: X)
    module.training_step = lambda batch, _: step(module, batch)  # type: ignore[method-assign]
    pipeline = Emulated(module, PLACEMENTS["two"])
    for rank in pipeline.ranks:
        rank.training_step = lambda batch, _, rank=rank: step(rank, batch)  # type: ignore[assignment, misc]
    with torch.no_grad(), pytest.raises(CannotSplitError, match="embed"):
        pipeline.step(X)


def test_a_placeholder_called_outside_of_a_step_says_so() -> None:
    for rank in Emulated(Blocks(chain), PLACEMENTS["two"]).ranks:
        with pytest.raises(RuntimeError, match="outside of a step.*no rank of a pipeline holds the whole module"):
            rank.training_step(X, 0)  # type: ignore[operator]


# What surrounds a step


def test_says_when_it_has_entered_late() -> None:
    pipeline = Emulated(Blocks(chain), PLACEMENTS["v"])
    entered: list[int] = []
    for index, stage in enumerate(pipeline.stages):
        stage.on_entry = lambda index=index: entered.append(index)
    pipeline.step(X)
    assert entered == [1, 2, 3]


def test_attributes_travel_between_the_users_object_and_the_stages() -> None:
    module = MODELS["direct_blocks"][0]()
    pipeline = Emulated(module, PLACEMENTS["loop"])
    for rank in pipeline.ranks:
        rank.seen = 100
        rank.eval()
    pipeline.step(IDS)
    pipeline.step(IDS)
    # A stage that is not the last leaves before it counts.
    assert [rank.seen for rank in pipeline.ranks] == [100, 108]
    assert not any(part.training for stage in pipeline.stages for part in (stage.module, stage.module.blocks))


def test_an_early_exit_keeps_nothing_alive() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def body(module: Any, x: Tensor) -> Tensor:
        doubled = x * 2
        alive.append(weakref.ref(doubled))
        return chain(module, doubled)

    first = Emulated(Blocks(body), PLACEMENTS["two"]).stages[0]
    gc.disable()
    try:
        with torch.no_grad():
            first(method="training_step", args=(X, 0), kwargs={})
        assert alive[0]() is None
    finally:
        gc.enable()


def test_errors_of_a_step_come_through_and_the_stage_works_again() -> None:
    def body(module: Any, x: Tensor) -> Tensor:
        if len(x) == 3:
            raise KeyError("mine")
        return chain(module, x)

    module = Blocks(body)
    pipeline = Emulated(module, PLACEMENTS["v"])
    with pytest.raises(KeyError, match="mine"):
        pipeline.step(X[:3])
    torch.testing.assert_close(pipeline.step(X), module.training_step(X, 0))
    assert not any(block._forward_pre_hooks for rank in pipeline.ranks for block in rank.blocks)


def test_stand_ins_draw_no_random_numbers() -> None:
    pipeline = Emulated(MODELS["vision_transformer"][0](), PLACEMENTS["two"])
    hidden = pipeline.stages[0](method="training_step", args=((IMAGES, torch.arange(4)), 0), kwargs={}).detach()
    before = torch.get_rng_state()
    pipeline.stages[1](hidden, method="training_step", args=((IMAGES, torch.arange(4)), 0), kwargs={})
    assert torch.equal(torch.get_rng_state(), before)
