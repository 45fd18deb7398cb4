"""Tensor parallelism equals one process: loss and every gradient, alone and with the data axes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_par.communication import CommunicationCounter
from lightning_par.tensor_parallel import check_replicated_gradients
from tests.dist.ranks import Ranks
from tests.tensor_parallel_models import GPT, HIDDEN, LENGTH, VOCABULARY, Options, Wrapper, parallelize, tokens, tp_mesh

TOLERANCE = 1e-5


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The same model twice."""
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def assert_close(mine: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    difference = (mine - theirs).abs().max().item()
    assert difference <= tolerance * max(theirs.abs().max().item(), 1e-3), f"{what}: {difference}"


def assert_same_gradients(model: nn.Module, single: nn.Module, tolerance: float = TOLERANCE) -> None:
    pairs = zip(model.named_parameters(), single.named_parameters(), strict=True)
    for (name, parameter), (other_name, other) in pairs:
        assert name == other_name
        assert parameter.grad is not None, name
        assert other.grad is not None, name
        assert_close(full(parameter.grad), other.grad, tolerance, name)


def assert_parity(
    make: Callable[[], nn.Module],
    mesh: DeviceMesh,
    run: Callable[[nn.Module], Tensor] = lambda model: model(tokens()),
    plan: dict[str, str] | None = None,
    tolerance: float = TOLERANCE,
) -> nn.Module:
    single, model = twins(make)
    expected = run(single)
    expected.backward()
    parallelize(model, mesh, plan)
    loss = run(model)
    loss.backward()
    assert_close(loss.detach(), expected.detach(), tolerance, "loss")
    assert_same_gradients(model, single, tolerance)
    check_replicated_gradients(model, mesh)
    return model


# ----- parity of plain models -----


def gpt_equals_one_process(options: Options) -> None:
    assert_parity(lambda: Wrapper(GPT(options)), tp_mesh())


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, Options()),
        (2, Options(tied=True)),
        (2, Options(kv_heads=2, head_norms=True, auxiliary=True)),
        (4, Options(tied=True, head_norms=True, auxiliary=True)),
    ],
    ids=["untied", "tied", "grouped queries", "four ranks"],
)
def test_gpt_equals_one_process(ranks: Ranks, world_size: int, options: Options) -> None:
    ranks(world_size, gpt_equals_one_process, options)


# ----- Hugging Face models with the plan they carry -----


def hugging_face_equals_one_process(name: str, extra: dict[str, Any]) -> None:
    import transformers

    mesh = tp_mesh()
    config = {
        "vocab_size": 48,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": max(2, mesh.size()),
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | extra
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM")

    def make() -> nn.Module:
        return model_class(config_class(**config))

    ids = tokens()[:, :LENGTH]
    assert_parity(make, mesh, lambda model: model(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize(
    ("world_size", "name", "extra"),
    [
        (2, "Llama", {}),
        (4, "Llama", {}),
        (2, "Llama", {"tie_word_embeddings": True, "attn_implementation": "eager"}),
        (2, "Qwen3", {"head_dim": 8}),
        (2, "Phi3", {}),
        (2, "GPTNeoX", {}),
    ],
    ids=["llama", "llama on four ranks", "tied llama", "qwen3", "phi3", "neox"],
)
def test_hugging_face_equals_one_process(ranks: Ranks, world_size: int, name: str, extra: dict[str, Any]) -> None:
    ranks(world_size, hugging_face_equals_one_process, name, extra)


# ----- with the data axes -----


def composes(data_axis: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(data_axis, "tp"))
    single, model = twins(lambda: GPT(Options(tied=True, head_norms=True)))
    batch = tokens(num_rows=4)
    single(batch).backward()
    parallelize(model, mesh["tp"])
    wrap = fully_shard if data_axis == "dp_shard" else replicate
    assert isinstance(model, GPT)
    for block in model.blocks:
        wrap(block, mesh=mesh[data_axis])
    wrap(model, mesh=mesh[data_axis])
    assert model.head.weight is model.embedding.weight
    for _ in range(2):  # the second step sees parameters that were gathered and freed before
        model.zero_grad()
        model(batch.chunk(2)[mesh[data_axis].get_local_rank()]).backward()
    assert_same_gradients(model, single)
    check_replicated_gradients(model, mesh["tp"])


@pytest.mark.parametrize("data_axis", ["dp_shard", "dp_replicate"])
def test_composes_with_data_axes(ranks: Ranks, data_axis: str) -> None:
    ranks(4, composes, data_axis)


# ----- precision, recomputation, copies -----


def low_precision_follows_one_process() -> None:
    mesh = tp_mesh()

    def autocast(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(tokens())

    # bfloat16 keeps 8 bits: sums in another order differ in the last of them.
    options = Options(tied=True)
    assert_parity(lambda: GPT(options), mesh, autocast, tolerance=0.05)
    model = assert_parity(lambda: GPT(options).bfloat16(), mesh, tolerance=0.05)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}

    model = parallelize(GPT(), mesh)
    output = model.blocks[0].attention.o_proj
    with torch.autocast("cpu", torch.bfloat16):  # the bias is float32, and must not lift the output
        assert output(torch.zeros(1, output.in_features // mesh.size())).dtype == torch.bfloat16


def test_low_precision(ranks: Ranks) -> None:
    ranks(2, low_precision_follows_one_process)


def recomputes_and_copies() -> None:
    mesh = tp_mesh()

    def recomputing(model: nn.Module) -> Tensor:
        assert isinstance(model, GPT)
        for block in model.blocks:
            run = block.forward
            block.__dict__["forward"] = lambda x, run=run: checkpoint(run, x, use_reentrant=False)
        return model(tokens())

    assert_parity(lambda: GPT(Options(head_norms=True)), mesh, recomputing)

    model = parallelize(GPT(Options(tied=True)), mesh)
    twin = copy.deepcopy(model)
    twin(tokens()).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    model(tokens()).backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine is not theirs
        assert torch.equal(full(mine.grad), full(theirs.grad))


def test_recomputes_and_copies(ranks: Ranks) -> None:
    ranks(2, recomputes_and_copies)


def differentiates_twice() -> None:
    mesh = tp_mesh()
    single, model = twins(lambda: GPT(Options()))
    parallelize(model, mesh)

    def penalty(net: nn.Module) -> Tensor:
        assert isinstance(net, GPT)
        x = torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1), requires_grad=True)
        # The math backend is the one that can be differentiated twice.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            (slope,) = torch.autograd.grad(net.blocks[0](x).square().sum(), x, create_graph=True)
        return slope.square().sum()

    for net in (single, model):
        penalty(net).backward()
    for (name, mine), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
        if theirs.grad is not None:
            assert_close(full(mine.grad), theirs.grad, 1e-4, name)


def test_differentiates_twice(ranks: Ranks) -> None:
    ranks(2, differentiates_twice)


def encoder_equals_one_process() -> None:
    mesh = tp_mesh()
    plan = {"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"}
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))

    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2)

    # Not a function of all features alike: the last norm would leave it no gradient.
    model = assert_parity(make, mesh, lambda m: m(x)[..., :3].square().mean(), plan)
    training = model(x)
    with torch.no_grad():  # where torch would run the whole layer in one operator
        assert_close(model.eval()(x), training.detach(), TOLERANCE, "evaluation")


def test_encoder_equals_one_process(ranks: Ranks) -> None:
    ranks(2, encoder_equals_one_process)


class Doubling(nn.Module):
    """Changes the input of two layers between them, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.up.requires_grad_(False)  # or autograd would refuse the change

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        up = self.up(x)
        return self.down(up * self.gate(x.mul_(2)))


def changes_shared_input_in_place() -> None:
    single, model = twins(Doubling)
    parallelize(model, tp_mesh(), {"up": "colwise", "gate": "colwise", "down": "rowwise"})
    slopes = []
    for net in (single, model):
        x = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
        net(x).square().sum().backward()
        slopes.append(x.grad)
    assert_close(slopes[1], slopes[0], TOLERANCE, "gradient of the input")


def test_changes_shared_input_in_place(ranks: Ranks) -> None:
    ranks(2, changes_shared_input_in_place)


# ----- communication -----


def counts_collectives() -> dict[str, dict[str, Any]]:
    mesh = tp_mesh()
    model = parallelize(GPT(), mesh)
    with CommunicationCounter(mesh) as ahead:
        loss = model(tokens())
    with CommunicationCounter(mesh) as back:
        loss.backward()
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    return {
        when: {kind: counter.calls(kind)["tp"] for kind in kinds if counter.calls(kind)} | counter.bytes_by_axis()
        for when, counter in (("forward", ahead), ("backward", back))
    }


def test_two_all_reduces_per_layer_each_way(ranks: Ranks) -> None:
    """Four all-reduces of batch x sequence x hidden a layer, as in Megatron; the ends on top."""
    counted = ranks(2, counts_collectives)[0]
    num_blocks, positions = 2, 4 * LENGTH
    num_sums = 2 * num_blocks + 1
    summed = num_sums * 2 * positions * HIDDEN * 4  # bytes of activations in float32, sent and received
    # Forward: two a block, the embedding, and the gathered logits.
    logits = positions * VOCABULARY * 4
    assert counted["forward"] == {"all_reduce": num_sums, "all_gather": 1, "tp": summed + logits}
    # Backward: two a block (one for q, k and v together), and the head's input.
    assert counted["backward"] == {"all_reduce": num_sums, "tp": summed}
