"""What a module looks like after a plan was applied, and how wrong forward passes are reported."""

from __future__ import annotations

import gc
import inspect
import time
import traceback
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_par.engine import ParallelEngine
from lightning_par.layout import ParallelLayout
from lightning_par.tensor_parallel import (
    apply_plan,
    check_plan,
    check_replicated_gradients,
    explain_errors,
    resolve_plan,
)
from tests.dist.ranks import Ranks
from tests.tensor_parallel_models import GPT, HEADS, HIDDEN, Options, parallelize, tokens, tp_mesh


def message_of(call: Any, kind: type[Exception]) -> tuple[str, Exception]:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value), caught.value


# ----- parameters and attributes -----


def keeps_what_parameters_are() -> None:
    mesh = tp_mesh()
    torch.manual_seed(0)
    model = GPT(Options(tied=True, head_norms=True))
    model.blocks[0].attention.requires_grad_(False)
    model.head.weight.no_decay = True
    names = [name for name, _ in model.named_parameters()]
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    parallelize(model, mesh)

    assert [name for name, _ in model.named_parameters()] == names
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.no_decay is True
    placements = {
        name: parameter.placements[0] if isinstance(parameter, DTensor) else None
        for name, parameter in model.named_parameters()
    }
    assert placements["embedding.weight"] == Shard(0)
    attention = "blocks.1.attention"
    assert placements[f"{attention}.q_proj.weight"] == placements[f"{attention}.q_proj.bias"] == Shard(0)
    assert placements[f"{attention}.o_proj.weight"] == Shard(1)
    assert placements[f"{attention}.o_proj.bias"] == Replicate()
    plain = ("positions", "norm.weight", "blocks.0.norm1.weight", f"{attention}.q_norm.weight")
    assert all(placements[name] is None for name in plain)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (not name.startswith("blocks.0.attention"))
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(full, whole[name])
        if isinstance(parameter, DTensor):  # the whole tensor's memory is gone
            local = parameter.to_local()
            assert local.untyped_storage().nbytes() == local.numel() * local.element_size()
    assert model.blocks[0].attention.n_head == HEADS // mesh.size()
    assert model.blocks[1].attention.n_kv_head == HEADS // mesh.size()
    # Libraries ask for the arguments of a forward, and for the class of a layer.
    assert list(inspect.signature(model.forward).parameters) == ["tokens"]
    assert type(model.head) is nn.Linear

    text, _ = message_of(lambda: apply_plan(model, resolve_plan(model), mesh), ValueError)
    assert "applied to 'embedding' before" in text
    assert model.blocks[0].attention.n_head == HEADS // mesh.size()
    text, _ = message_of(lambda: check_plan(model, resolve_plan(model), 2), ValueError)
    assert "is split already" in text


def test_keeps_what_parameters_are(ranks: Ranks) -> None:
    ranks(2, keeps_what_parameters_are)


def splits_part_by_part_and_on_meta() -> None:
    mesh = tp_mesh()
    torch.manual_seed(0)
    options = Options(tied=True, head_norms=True)
    whole = parallelize(GPT(options), mesh)
    torch.manual_seed(0)
    parts = GPT(options)
    plan = resolve_plan(parts)
    names = [name for name, _ in parts.named_modules()]
    blocks = [[name for name in names if name.startswith(f"blocks.{index}")] for index in (1, 0)]
    # The tied ends in different parts, too.
    for members in (*blocks, ["head"]):
        apply_plan(parts, plan, mesh, members)
    assert isinstance(parts.embedding.weight, DTensor)
    apply_plan(parts, plan, mesh, [n for n in names if n != "head" and not n.startswith("blocks.")])
    assert parts.head.weight is parts.embedding.weight
    assert torch.equal(whole(tokens()), parts(tokens()))

    with torch.device("meta"):
        on_meta = parallelize(GPT(options), mesh)
    shapes = {name: (p.shape, type(p.data)) for name, p in whole.named_parameters()}
    assert {name: (p.shape, type(p.data)) for name, p in on_meta.named_parameters()} == shapes

    one_rank = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = GPT()
    apply_plan(model, resolve_plan(model), one_rank["tp"])
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    text, _ = message_of(lambda: apply_plan(model, resolve_plan(model), one_rank), ValueError)
    assert "one mesh axis" in text


def test_splits_part_by_part_and_on_meta(ranks: Ranks) -> None:
    ranks(2, splits_part_by_part_and_on_meta)


def embedding_as_on_one_process(padding_idx: int | None, style: str) -> None:
    mesh = tp_mesh()
    torch.manual_seed(0)
    single = nn.Sequential(nn.Embedding(8, 4, padding_idx=padding_idx))
    model = nn.Sequential(nn.Embedding(8, 4, padding_idx=padding_idx))
    model.load_state_dict(single.state_dict())
    parallelize(model, mesh, {"0": style})
    ids = torch.tensor([[0, 1, 4, 5, 5, 7]])
    weights = torch.randn(1, 6, 4)
    for net in (single, model):
        (net(ids) * weights).sum().backward()
    assert torch.equal(model(ids), single(ids))
    grad = model[0].weight.grad
    assert isinstance(grad, DTensor)
    # No rank ever holds the gradient of the whole vocabulary.
    assert grad.placements == model[0].weight.placements
    assert torch.equal(grad.full_tensor(), single[0].weight.grad)
    assert model[0].padding_idx == padding_idx
    for outside in (8, -1):
        message_of(lambda i=outside: model(torch.tensor([i])), IndexError)


@pytest.mark.parametrize(
    ("padding_idx", "style"),
    [
        (None, "embedding_rowwise"),
        (0, "embedding_rowwise"),  # on the first rank
        (5, "embedding_rowwise"),  # on the second
        (5, "embedding_colwise"),
    ],
)
def test_embedding_as_on_one_process(ranks: Ranks, padding_idx: int | None, style: str) -> None:
    ranks(2, embedding_as_on_one_process, padding_idx, style)


def lets_go_of_activations() -> None:
    model = parallelize(GPT(), tp_mesh())
    seen: list[weakref.ref[Tensor]] = []
    for block in model.blocks:
        block.norm1.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    loss = model(tokens())
    x = torch.randn(1, HIDDEN, requires_grad=True)
    seen.append(weakref.ref(x))
    up = model.blocks[0].mlp.up(x)  # a layer called past the module that holds it
    del loss, up, x
    gc.collect()
    # The thread of a collective that has ended may hold its tensor, and so the graph, a moment longer.
    deadline = time.monotonic() + 5
    while any(reference() is not None for reference in seen) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [reference() for reference in seen] == [None, None, None]


def test_lets_go_of_activations(ranks: Ranks) -> None:
    ranks(2, lets_go_of_activations)


# ----- wrong forward passes -----


class Mixed(nn.Module):
    """Uses the embedding's weight outside the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.embedding(ids), self.embedding.weight)


class Raising(nn.Module):
    """Fails for a reason of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the size of the world is not enough")


class Gated(nn.Module):
    """A gate that sees local features and that nobody can tell from its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.scale)


def explained(module: nn.Module, batch: Tensor) -> None:
    with explain_errors():
        module(batch)


def explains_wrong_forwards() -> None:
    mesh = tp_mesh()
    model = parallelize(GPT(Options(heads_by="full width")), mesh)
    text, error = message_of(lambda: explained(model, tokens()), RuntimeError)
    assert "is invalid for input of size" in text
    assert "Attention holds 1/2 of the heads" in text
    assert "use -1 for the head dimension" in text
    assert text.count("Under tensor parallelism") == 1
    assert type(error) is RuntimeError
    assert isinstance(error.__cause__, RuntimeError)
    frames = [frame.filename for frame in traceback.extract_tb(error.__cause__.__traceback__)]
    assert any(name.endswith("tensor_parallel_models.py") for name in frames)

    for half in ({"up": "colwise"}, {"down": "rowwise"}):
        beside = parallelize(Gated(), mesh, half)
        text, _ = message_of(lambda m=beside: explained(m, torch.ones(1, 4)), RuntimeError)
        assert "Gated holds 1/2 of the heads" in text

    # These two fit the slice, and would silently compute something else.
    for heads_by, heads, size in (("global count", 4, 4), ("size from count", 1, 16)):
        wrong = parallelize(GPT(Options(heads_by=heads_by)), mesh)
        text, _ = message_of(lambda m=wrong: m(tokens()), ValueError)
        assert f"{heads} heads of size {size}" in text
        assert "2 heads of size 8" in text
        q = torch.ones(1, heads, 3, size)
        q @ q.transpose(2, 3)  # what is watched ended with the forward

    # So does a count that comes from a configuration, which is nobody's to change.
    configured = GPT()
    for block in configured.blocks:
        attention = block.attention
        attention.config = SimpleNamespace(n_head=attention.n_head, n_kv_head=attention.n_kv_head)
        attention.heads_by = "global count"
        del attention.n_head
    text, _ = message_of(lambda: parallelize(configured, mesh)(tokens()), ValueError)
    assert "4 heads of size 4" in text
    assert configured.blocks[0].attention.config.n_head == HEADS

    mixed = parallelize(Mixed(), mesh, {"embedding": "embedding_rowwise"})
    text, _ = message_of(lambda: explained(mixed, torch.tensor([1])), RuntimeError)
    assert "outside the layer that holds it" in text

    raising = parallelize(Raising(), mesh, {"up": "colwise", "down": "rowwise"})
    text, error = message_of(lambda: explained(raising, torch.ones(1, 4)), RuntimeError)
    assert text == "the size of the world is not enough"
    assert error.__cause__ is None


def test_explains_wrong_forwards(ranks: Ranks) -> None:
    ranks(2, explains_wrong_forwards)


def explains_wrong_steps() -> None:
    dist.init_process_group("gloo")
    layout = ParallelLayout.from_degrees(2, tensor_parallel_size=2)
    model = GPT(Options(heads_by="full width"))
    engine = ParallelEngine(model, layout, layout.build_mesh("cpu"), device=torch.device("cpu"))
    text, _ = message_of(lambda: engine.run("forward", tokens()), RuntimeError)
    assert "Attention holds 1/2 of the heads" in text


def test_explains_wrong_steps(ranks: Ranks) -> None:
    ranks(2, explains_wrong_steps)


def finds_forgotten_modules() -> None:
    mesh = tp_mesh()
    torch.manual_seed(0)
    model = parallelize(Gated(), mesh, {"up": "colwise", "down": "rowwise"})
    model(torch.randn(3, 4)).sum().backward()
    text, _ = message_of(lambda: check_replicated_gradients(model, mesh), ValueError)
    assert "different gradients of scale," in text

    model = nn.ModuleDict({"whole": nn.Linear(2, 2), "rounding": nn.Linear(2, 2)})
    for name, parameter in model.named_parameters():
        noise = 1e-9 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(dist.get_rank()))
        parameter.grad = noise if name.startswith("rounding") else torch.ones_like(parameter)
    check_replicated_gradients(model, mesh)
    # Equal norms, different gradients.
    model.whole.bias.grad = torch.tensor([1.0, 0.0] if dist.get_rank() else [0.0, 1.0])
    text, _ = message_of(lambda: check_replicated_gradients(model, mesh), ValueError)
    assert "different gradients of whole.bias," in text


def test_finds_forgotten_modules(ranks: Ranks) -> None:
    ranks(2, finds_forgotten_modules)
