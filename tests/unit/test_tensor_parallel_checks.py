"""Every reason why a tensor-parallel plan does not fit a model, in words and with numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_par.tensor_parallel import check_plan, resolve_plan
from tests.tensor_parallel_models import GPT, HEADS, Options, Wrapper


def problems(model: nn.Module, degree: int = 2, plan: dict[str, str] | None = None) -> list[str]:
    """The reasons in the error, without their header."""
    with pytest.raises(ValueError, match=rf"does not fit .* tensor_parallel_size={degree}:\n- ") as caught:
        check_plan(model, resolve_plan(model, plan), degree)
    return str(caught.value).split("\n- ")[1:]


def layers(**modules: nn.Module) -> nn.Module:
    """A module called Layers that holds `modules`, with attributes for any that are numbers."""
    holder = nn.Module()
    holder.__class__ = type("Layers", (nn.Module,), {})
    for name, value in modules.items():
        setattr(holder, name, value)
    return holder


def linear(size_in: int, size_out: int) -> nn.Linear:
    return nn.Linear(size_in, size_out)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("options", [Options(), Options(tied=True, head_norms=True)])
def test_what_fits(options: Options, degree: int) -> None:
    with torch.device("meta"):
        model = Wrapper(GPT(options))
    check_plan(model, resolve_plan(model), degree)


def test_heads() -> None:
    # 32 is divisible by 8, four heads are not: heads are split whole.
    found = problems(GPT(), 8)
    assert len(found) == 2  # one for each attribute, not one for each block
    assert found[0] == (
        f"blocks.0.attention (Attention): n_head={HEADS} is not divisible by 8, and heads are split whole; "
        "change the number of heads, or the degree (nearest that fit: 4)"
    )


def test_key_value_heads() -> None:
    found = problems(GPT(Options(kv_heads=2)), 4)
    assert [text.partition("; ")[0] for text in found] == [
        "blocks.0.attention (Attention): n_kv_head=2 is not divisible by 4, and heads are split whole"
    ]
    assert "nearest that fit: 2" in found[0]


def test_heads_in_the_configuration_of_hugging_face_attention() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_attention_heads=8, num_key_value_heads=2
    )
    with torch.device("meta"):
        found = problems(transformers.LlamaForCausalLM(config), 4)
    assert len(found) == 1
    assert "(LlamaAttention): num_key_value_heads=2 is not divisible by 4" in found[0]


def test_sizes() -> None:
    model = layers(up=linear(6, 10), down=linear(10, 6))
    found = problems(model, 4, {"up": "colwise", "down": "rowwise"})
    assert found == [
        "up (colwise): out_features=10 is not divisible by 4; "
        "change the size, or the degree (nearest that fit: 2 and 5)",
        "down (rowwise): in_features=10 is not divisible by 4; "
        "change the size, or the degree (nearest that fit: 2 and 5)",
    ]


def test_vocabulary() -> None:
    model = layers(embedding=nn.Embedding(50257, 8), head=linear(8, 50257), wide=nn.Embedding(4, 6))
    plan = {"embedding": "embedding_rowwise", "head": "colwise_gather_output", "wide": "embedding_colwise"}
    assert problems(model, 4, plan) == [
        "embedding (embedding_rowwise): num_embeddings=50257 is not divisible by 4; "
        "pad the vocabulary to 50260 (the next multiple of 4)",
        "head (colwise_gather_output): out_features=50257 is not divisible by 4; "
        "pad the vocabulary to 50260 (the next multiple of 4)",
        "wide (embedding_colwise): embedding_dim=6 is not divisible by 4; "
        "change the size, or the degree (nearest that fit: 3 and 6)",
    ]


class SelfAttention(nn.Module):
    """Fused in one of the ways people write it."""

    def __init__(self, name: str, size_out: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        setattr(self, name, linear(32, size_out))
        self.proj = linear(32, 32)


@pytest.mark.parametrize(
    ("name", "size_out"),
    [
        ("qkv", 96),
        ("Wqkv", 96),
        ("c_attn", 96),
        ("qkv_proj", 32 + 2 * 16),  # two key-value heads of four
        ("query_key_value", 96),
        ("in_proj", 96),
        ("to_kv", 64),
        ("kv_proj", 32),
    ],
)
def test_fused_projection(name: str, size_out: int) -> None:
    model = SelfAttention(name, size_out)
    (found,) = problems(model, 2, {name: "colwise", "proj": "rowwise"})
    assert f"{name} (32 -> {size_out}) looks like query, key and value in one weight" in found
    assert "use separate q, k and v layers" in found
    # The way out that the message names.
    check_plan(model, resolve_plan(model, {name: "colwise_gather_output", "proj": "rowwise_split_input"}), 2)


@pytest.mark.parametrize(("name", "size_out"), [("q_proj", 32), ("qkv_gate", 32), ("in_proj", 128)])
def test_not_fused(name: str, size_out: int) -> None:
    check_plan(SelfAttention(name, size_out), {name: "colwise", "proj": "rowwise"}, 2)


@pytest.mark.parametrize("name", ["gate_up_proj", "fc1"])
def test_fused_gate(name: str) -> None:
    model = layers(**{name: linear(8, 32)}, down=linear(16, 8))
    (found,) = problems(model, 2, {name: "colwise", "down": "rowwise"})
    assert f"{name} (8 -> 32) looks like gate and up in one weight" in found
    assert "use two layers" in found


@pytest.mark.parametrize("name", ["attention", "attention.out_proj"])
def test_multi_head_attention(name: str) -> None:
    model = layers(attention=nn.MultiheadAttention(8, 2))
    (found,) = problems(model, 2, {name: "rowwise"})
    assert f"{name} is (part of) an nn.MultiheadAttention" in found
    assert "three nn.Linear layers" in found


def test_conv1d() -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    (found,) = problems(layers(c_attn=pytorch_utils.Conv1D(24, 8)), 2, {"c_attn": "colwise"})
    assert "c_attn is a Conv1D" in found
    assert "replace it by nn.Linear layers" in found


def test_wrong_kind_of_layer() -> None:
    found = problems(GPT(), 2, {"blocks.*.mlp": "colwise", "embedding": "rowwise", "head": "embedding_rowwise"})
    assert found == [
        "style 'rowwise' of embedding is for Linear, not for Embedding",
        "style 'colwise' of blocks.0.mlp is for Linear, not for MLP; inside it are gate, up, down",
        "style 'embedding_rowwise' of head is for Embedding, not for Linear",
    ]


def test_layer_with_contents() -> None:
    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.adapter = linear(8, 2)

    (found,) = problems(layers(up=Adapted()), 2, {"up": "colwise"})
    assert "up (Adapted) holds modules with parameters of their own" in found
    (found,) = problems(GPT(), 2, {"blocks.*.attention": "replicated_with_grad_allreduce"})
    assert "holds modules with parameters" in found


@pytest.mark.parametrize(("option", "value"), [("max_norm", 1.0), ("sparse", True), ("scale_grad_by_freq", True)])
def test_embedding_options(option: str, value: Any) -> None:
    model = layers(embedding=nn.Embedding(8, 4, **{option: value}))
    assert problems(model, 2, {"embedding": "embedding_rowwise"}) == [
        f"embedding is an embedding with {option}, which cannot be split: turn it off"
    ]


def test_ties_planned_differently() -> None:
    plan = {"embedding": "embedding_rowwise", "head": "rowwise_split_input"}
    (found,) = problems(GPT(Options(tied=True)), 2, plan)
    assert "embedding.weight (embedding_rowwise), head.weight (rowwise_split_input)" in found

    model = layers(first=linear(8, 8), second=linear(8, 8))
    model.second.weight = model.first.weight
    (found,) = problems(model, 2, {"first": "colwise"})
    assert "first.weight (colwise), second.weight (not in the plan)" in found

    model = layers(head=linear(8, 8))
    model.bias = model.head.bias
    (found,) = problems(model, 2, {"head": "colwise"})
    assert "bias (not in the plan)" in found
    check_plan(model, resolve_plan(model, {"head": "rowwise"}), 2)  # a rowwise bias stays whole


def test_norm_of_local_heads() -> None:
    found = problems(GPT(Options(head_norms=True, plan_head_norms=False)))
    assert len(found) == 2
    assert "blocks.0.attention.q_norm (RMSNorm) has parameters of the size of a head" in found[0]
    assert "'replicated_with_grad_allreduce'" in found[0]


def test_norm_of_the_stream_whose_gradient_would_be_multiplied() -> None:
    model = layers(norm=nn.LayerNorm(8), up=linear(8, 16), down=linear(16, 8))
    plan = {"norm": "replicated_with_grad_allreduce", "up": "colwise", "down": "rowwise"}
    (found,) = problems(model, 2, plan)
    assert "norm (LayerNorm) is as wide as the input of the split layers beside it" in found


def test_several_reasons_at_once() -> None:
    model = GPT()
    model.embedding = nn.Embedding(49, 32)
    found = problems(model, 8)
    assert len(found) == 3
    assert found[0].startswith("embedding (embedding_rowwise): num_embeddings=49")
