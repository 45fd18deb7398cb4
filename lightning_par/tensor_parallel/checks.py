"""Does a plan fit a model? Every reason why not, in words, before any process group call."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_par.tensor_parallel.fused import check_fused
from lightning_par.tensor_parallel.owners import (
    colwise_by_owner,
    head_counts,
    is_attention,
    nearest_degrees,
    owner_of,
)
from lightning_par.tensor_parallel.sequence import check_sequence
from lightning_par.tensor_parallel.shared_weights import check_ties
from lightning_par.tensor_parallel.styles import STYLES

__all__ = ["check_plan"]

_SUMMED = "replicated_with_grad_allreduce"


def check_plan(module: nn.Module, plan: Mapping[str, str], tensor_parallel_size: int) -> None:
    """Check that `plan` can split `module` over `tensor_parallel_size` ranks.

    Needs no process group and no memory: parameters may be on the meta device.

    Args:
        module: the module that the plan was resolved for.
        plan: exact module name to style name, from `resolve_plan`.
        tensor_parallel_size: the degree; with 1 nothing is checked.

    Raises:
        ValueError: with every distinct reason: a layer of the wrong kind, a fused projection, sizes,
            heads or a vocabulary that the degree does not divide, layers with shared weights planned
            differently, a norm of local heads that is not planned, or blocks whose sequence cannot
            be split.
    """
    if tensor_parallel_size == 1:
        return
    modules = dict(module.named_modules())
    # A layer of the wrong kind makes all further reasons nonsense.
    problems = _check_kinds(modules, plan) or [
        *check_fused(modules, plan),
        *_check_sizes(modules, plan, tensor_parallel_size),
        *_check_heads(modules, plan, tensor_parallel_size),
        *check_ties(module, plan),
        *check_sequence(modules, plan),
    ]
    if problems:
        reasons = "".join(f"\n- {problem}" for problem in _distinct(problems))
        raise ValueError(
            f"the tensor-parallel plan does not fit {type(module).__name__} with "
            f"tensor_parallel_size={tensor_parallel_size}:{reasons}"
        )


def _distinct(problems: Iterable[str]) -> list[str]:
    """One problem for all layers of a kind: block numbers make no difference."""
    kinds: dict[str, str] = {}
    for problem in problems:
        kinds.setdefault(re.sub(r"(?<![\w])\d+(?=\.)|(?<=\.)\d+(?![\w])", "*", problem), problem)
    return list(kinds.values())


def _check_kinds(modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> list[str]:
    problems = (
        _check_kind(name, modules[name], style, caller=modules[owner_of(modules, name)]) for name, style in plan.items()
    )
    return [problem for problem in problems if problem]


def _check_kind(name: str, module: nn.Module, style: str, caller: nn.Module) -> str | None:
    kind, class_name = STYLES[style].kind, type(module).__name__
    if class_name == "Conv1D" and kind is nn.Linear:
        return (
            f"{name} is a Conv1D, whose weight is transposed and in GPT-2 holds query, key and value in "
            "one: replace it by nn.Linear layers (three for the fused one), or take a model with "
            "separate projections"
        )
    if isinstance(module, nn.MultiheadAttention) or isinstance(caller, nn.MultiheadAttention):
        return (
            f"{name} is (part of) an nn.MultiheadAttention, which fuses query, key and value in in_proj_weight: "
            "write the attention with three nn.Linear layers and scaled_dot_product_attention"
        )
    if not isinstance(module, kind):
        inside = [child for child, m in module.named_modules() if child and isinstance(m, kind)]
        hint = f"; inside it are {', '.join(inside[:6])}" if inside else ""
        return f"style {style!r} of {name} is for {kind.__name__}, not for {class_name}{hint}"
    if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
        return f"{name} is split already: resolve and check a plan before applying it"
    return _check_contents(name, module, style)


def _check_contents(name: str, module: nn.Module, style: str) -> str | None:
    if style == "replicate":
        return None
    if any(True for child in module.children() if next(child.parameters(), None) is not None):
        return (
            f"{name} ({type(module).__name__}) holds modules with parameters of their own, which style "
            f"{style!r} does not reach: name those"
        )
    if isinstance(module, nn.Embedding) and STYLES[style].shard_dim is not None:
        options = {
            "max_norm": module.max_norm is not None,
            "sparse": module.sparse,
            "scale_grad_by_freq": module.scale_grad_by_freq,
        }
        used = [option for option, on in options.items() if on]
        if used:
            return f"{name} is an embedding with {', '.join(used)}, which cannot be split: turn it off"
    return None


def _check_sizes(modules: Mapping[str, nn.Module], plan: Mapping[str, str], degree: int) -> list[str]:
    vocabularies = {m.num_embeddings for m in modules.values() if isinstance(m, nn.Embedding)}
    problems = []
    for name, style in plan.items():
        for attribute, size in _split_sizes(modules[name], style):
            if size % degree:
                is_vocabulary = attribute == "num_embeddings" or (
                    STYLES[style].leave == "gather" and size in vocabularies
                )
                fix = _vocabulary_fix(size, degree) if is_vocabulary else _size_fix(size, degree)
                problems.append(f"{name} ({style}): {attribute}={size} is not divisible by {degree}; {fix}")
    return problems


def _split_sizes(module: nn.Module, style: str) -> list[tuple[str, int]]:
    names = {
        (nn.Linear, 0): "out_features",
        (nn.Linear, 1): "in_features",
        (nn.Embedding, 0): "num_embeddings",
        (nn.Embedding, 1): "embedding_dim",
    }
    dim = STYLES[style].shard_dim
    return [
        (attribute, getattr(module, attribute))
        for (kind, kind_dim), attribute in names.items()
        if isinstance(module, kind) and kind_dim == dim
    ]


def _vocabulary_fix(size: int, degree: int) -> str:
    padded = math.ceil(size / degree) * degree
    return f"pad the vocabulary to {padded} (the next multiple of {degree})"


def _size_fix(size: int, degree: int) -> str:
    return f"change the size, or the degree ({nearest_degrees([size], degree)})"


def _check_heads(modules: Mapping[str, nn.Module], plan: Mapping[str, str], degree: int) -> list[str]:
    problems = []
    for name, layers in colwise_by_owner(modules, plan).items():
        owner = modules[name]
        counts = head_counts(owner, with_config=is_attention(owner))
        for attribute, count in counts.items():
            if count % degree:
                fix = nearest_degrees(list(counts.values()), degree)
                problems.append(
                    f"{name} ({type(owner).__name__}): {attribute}={count} is not divisible by {degree}, "
                    f"and heads are split whole; change the number of heads, or the degree ({fix})"
                )
        if not problems:
            problems += _check_head_norms(name, owner, plan, counts, layers)
    return problems


def _check_head_norms(
    owner_name: str,
    owner: nn.Module,
    plan: Mapping[str, str],
    counts: Mapping[str, int],
    layers: Mapping[str, nn.Linear],
) -> list[str]:
    """Norms beside split projections: one of heads has partial gradients, one of the stream whole ones."""
    stream = {layer.in_features for layer in layers.values()}
    heads = {layer.out_features // count for layer in layers.values() for count in counts.values()}
    problems = []
    for child_name, child in owner.named_children():
        name = f"{owner_name}.{child_name}" if owner_name else child_name
        # 0 for what is no vector and so no norm's parameter.
        widths = {p.shape[0] if p.dim() == 1 else 0 for p in child.parameters(recurse=False)}
        summed = plan.get(name) == _SUMMED
        if widths and widths <= heads - stream and name not in plan:
            problems.append(
                f"{name} ({type(child).__name__}) has parameters of the size of a head and so works on "
                f"this rank's heads only: give it style {_SUMMED!r}, so that its gradients are summed"
            )
        elif widths and widths <= stream - heads and summed:
            problems.append(
                f"{name} ({type(child).__name__}) is as wide as the input of the split layers beside it and so "
                f"has its whole gradient on every rank, which {_SUMMED!r} would multiply: leave it out of the plan"
            )
    return problems
