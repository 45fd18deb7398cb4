"""Finding and expanding tensor-parallel plans; no process is started."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from lightning_par.tensor_parallel import STYLES, check_plan, describe_styles, resolve_plan
from lightning_par.tensor_parallel.styles import REFUSED_STYLES
from tests.tensor_parallel_models import GPT, HIDDEN, VOCABULARY, Options, Wrapper


def message_of(model: nn.Module, plan: Mapping[str, str] | None) -> str:
    with pytest.raises(ValueError, match="plan") as caught:
        resolve_plan(model, plan)
    return str(caught.value)


def test_own_plan_is_expanded_in_order_of_registration() -> None:
    plan = resolve_plan(GPT())
    attention = {f"blocks.0.attention.{name}_proj": "colwise" for name in "qkv"}
    assert list(plan.items())[:5] == [
        ("embedding", "embedding_rowwise"),
        *attention.items(),
        ("blocks.0.attention.o_proj", "rowwise"),
    ]
    assert list(plan)[-1] == "head"
    assert len(plan) == 2 + 2 * 7


def test_plan_of_a_submodule_gets_its_prefix() -> None:
    inner = resolve_plan(GPT())
    assert resolve_plan(Wrapper(Wrapper(GPT()))) == {f"inner.inner.{n}": s for n, s in inner.items()}


def test_two_submodules_carry_plans_and_an_outer_one_wins() -> None:
    both = nn.ModuleDict({"student": GPT(), "teacher": GPT()})
    assert {name.split(".")[0] for name in resolve_plan(both)} == {"student", "teacher"}
    outer = Wrapper(GPT())
    outer.tp_plan = {"inner.blocks.*.mlp.up": "colwise"}
    assert resolve_plan(outer) == {f"inner.blocks.{index}.mlp.up": "colwise" for index in range(2)}


def test_argument_wins_and_is_relative_to_the_module() -> None:
    plan = resolve_plan(Wrapper(GPT()), {"inner.blocks.1.mlp.*": "replicate"})
    assert plan == {f"inner.blocks.1.mlp.{name}": "replicate" for name in ("gate", "up", "down")}


def test_star_stands_for_one_part() -> None:
    assert "names no module" in message_of(GPT(), {"blocks.*.up": "colwise"})
    assert len(resolve_plan(GPT(), {"blocks.0.attention.?_proj": "replicate"})) == 4


def test_exact_name_wins_over_a_pattern_and_patterns_must_agree() -> None:
    plan = {"blocks.*.mlp.up": "colwise", "blocks.1.mlp.up": "replicate"}
    assert resolve_plan(GPT(), plan) == {"blocks.0.mlp.up": "colwise", "blocks.1.mlp.up": "replicate"}
    text = message_of(GPT(), {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.*": "replicate"})
    assert "'blocks.0.mlp.up'" in text
    assert "'colwise' by 'blocks.*.mlp.up'" in text


def test_module_of_two_names_is_planned_once() -> None:
    model = GPT()
    model.alias = model.blocks[0].mlp
    assert resolve_plan(model, {"alias.up": "colwise"}) == {"blocks.0.mlp.up": "colwise"}


@pytest.mark.parametrize(
    ("planned", "added"),
    [
        ({"embedding": "embedding_rowwise"}, {"head": "colwise_gather_output"}),
        ({"head": "colwise_gather_output"}, {"embedding": "embedding_rowwise"}),
        ({"embedding": "embedding_colwise"}, {"head": "rowwise_split_input"}),
    ],
)
def test_other_end_of_a_tie_is_planned_to_match(planned: dict[str, str], added: dict[str, str]) -> None:
    assert resolve_plan(GPT(Options(tied=True)), planned) == {**planned, **added}
    assert resolve_plan(GPT(), planned) == planned


def test_unknown_name_gets_the_nearest() -> None:
    text = message_of(GPT(), {"blocks.*.atention.q_proj": "colwise"})
    assert "'blocks.*.atention.q_proj' names no module of GPT" in text
    assert "blocks.*.attention.q_proj" in text
    # A plan written for the inner model.
    assert "nearest names: inner.blocks.*.mlp.up" in message_of(Wrapper(GPT()), {"blocks.*.mlp.up": "colwise"})
    assert "inner" in message_of(Wrapper(GPT()), {"zzz": "colwise"})


def test_name_of_a_parameter_is_refused() -> None:
    assert "names a parameter of GPT" in message_of(GPT(), {"blocks.*.mlp.up.weight": "colwise"})
    assert "names a parameter of GPT" in message_of(GPT(), {"positions": "colwise"})


def test_unknown_style_lists_the_styles() -> None:
    text = message_of(GPT(), {"head": "colwize"})
    assert "'colwize' of 'head'" in text
    assert all(f"  {name} " in text for name in STYLES)
    assert text.endswith(describe_styles())


@pytest.mark.parametrize("style", sorted(REFUSED_STYLES))
def test_refused_style_gives_the_reason(style: str) -> None:
    assert REFUSED_STYLES[style] in message_of(GPT(), {"head": style})


def test_missing_plan_prints_layers_and_a_plan_that_works() -> None:
    class Plain(GPT):
        tp_plan = None

    text = message_of(Plain(), None)
    assert "each block of 'blocks' (2 of Block)" in text
    assert f"\n  attention.q_proj: {HIDDEN} -> {HIDDEN}\n" in text
    suggested = eval(text.partition("tp_plan = ")[2])
    assert resolve_plan(Plain(), suggested) == resolve_plan(GPT())
    check_plan(Plain(), suggested := resolve_plan(Plain(), suggested), 2)


def test_missing_plan_without_blocks_or_layers() -> None:
    text = message_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), None)
    assert '"0": "colwise"' in text
    assert '"2": "rowwise"' in text
    assert "The linear layers of it: none" in message_of(nn.ReLU(), None)


def test_hugging_face_plan() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    plan = resolve_plan(Wrapper(model))
    assert plan["inner.model.embed_tokens"] == "embedding_rowwise"
    assert plan["inner.model.layers.1.self_attn.k_proj"] == "colwise"
    assert plan["inner.lm_head"] == "colwise_gather_output"
    check_plan(Wrapper(model), plan, 4)


def test_family_plan_may_name_what_this_model_has_not() -> None:
    class Family(GPT):
        _tp_plan: Mapping[str, str] = {"blocks.*.mlp.up": "colwise", "blocks.*.experts": "moe_tp_experts"}
        tp_plan = _tp_plan

    assert resolve_plan(Family()) == {f"blocks.{index}.mlp.up": "colwise" for index in range(2)}

    class Elsewhere(GPT):
        _tp_plan: Mapping[str, str] = {"layers.*.up": "colwise"}
        tp_plan = None

    assert "names no module of this model" in message_of(Elsewhere(), None)


def test_every_hugging_face_style_is_known() -> None:
    parallel = pytest.importorskip("transformers.integrations.tensor_parallel")
    assert set(parallel.ALL_PARALLEL_STYLES.keys()) <= {*STYLES, *REFUSED_STYLES}
