"""Does a plan fit a model? Every reason why not, in words, before any process group call.

And what no look at a model can find, after its first backward pass: gradients that differ between ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import ceil, gcd

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_par.gradients import local
from lightning_par.tensor_parallel.heads import colwise_by_owner, head_counts, is_attention, owner_of
from lightning_par.tensor_parallel.styles import STYLES
from lightning_par.ties import find_ties

__all__ = ["check_plan", "check_replicated_gradients"]

_SUMMED = "replicated_with_grad_allreduce"
_QKV_NAME = re.compile(r"qkv|c_attn|query_key_value", re.IGNORECASE)
_KV_NAME = re.compile(r"(^|_)kv(_proj)?$|key_value$", re.IGNORECASE)
_GATE_UP_NAME = re.compile(r"gate_?up|up_?gate|(^|_)w1_?[23]$", re.IGNORECASE)
# Their fused weight is laid out head by head, so that a slice of it is whole heads.
_LAID_OUT_BY_HEAD = ("GPTNeoXAttention",)
_WAY_OUT = (
    "or keep it fused with style 'colwise_gather_output' here and 'rowwise_split_input' on the layer "
    "that follows (the weight is split, the computation between them is not)"
)


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
            differently, or a norm of local heads that is not planned.
    """
    if tensor_parallel_size == 1:
        return
    modules = dict(module.named_modules())
    # A layer of the wrong kind makes all further reasons nonsense.
    problems = _check_kinds(modules, plan) or [
        *_check_fused(modules, plan),
        *_check_sizes(modules, plan, tensor_parallel_size),
        *_check_heads(modules, plan, tensor_parallel_size),
        *_check_ties(module, plan),
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
    padded = ceil(size / degree) * degree
    return f"pad the vocabulary to {padded} (the next multiple of {degree})"


def _size_fix(size: int, degree: int) -> str:
    return f"change the size, or the degree ({_nearest_degrees([size], degree)})"


def _check_heads(modules: Mapping[str, nn.Module], plan: Mapping[str, str], degree: int) -> list[str]:
    problems = []
    for name, layers in colwise_by_owner(modules, plan).items():
        owner = modules[name]
        counts = head_counts(owner, with_config=is_attention(owner))
        for attribute, count in counts.items():
            if count % degree:
                fix = _nearest_degrees(list(counts.values()), degree)
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


def _nearest_degrees(sizes: list[int], degree: int) -> str:
    """The degrees around `degree` that divide all of `sizes`, in words."""
    whole = gcd(*sizes)
    fitting = [d for d in range(1, whole + 1) if whole % d == 0]
    near = [max(d for d in fitting if d < degree), *(d for d in fitting if d > degree)][:2]
    return f"nearest that fit: {' and '.join(map(str, near))}"


def _check_ties(module: nn.Module, plan: Mapping[str, str]) -> list[str]:
    """What is wrong with the plan of layers that share a parameter, one sentence each."""
    names = {id(m): name for name, m in module.named_modules()}
    problems = []
    for tie in find_ties(module):
        dims = {STYLES[plan.get(names[id(m)], "replicate")].split_dim(parameter) for m, parameter in tie}
        if len(dims) > 1:
            places = ", ".join(
                f"{f'{names[id(m)]}.{parameter}'.lstrip('.')} ({plan.get(names[id(m)], 'not in the plan')})"
                for m, parameter in tie
            )
            problems.append(
                f"one parameter is shared by {places}, which would split it differently; plan all of "
                "them so that its dim is the same (embedding_rowwise with colwise_gather_output), "
                "or leave all of them out"
            )
    return problems


def _check_fused(modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> list[str]:
    """Planned fused projections, one sentence each."""
    problems = []
    for owner_name, layers in colwise_by_owner(modules, plan).items():
        inputs = _rowwise_inputs(modules, plan, layers)
        for name, layer in layers.items():
            if _is_fused_qkv(name, layer, modules[owner_name]):
                problems.append(
                    f"{name} ({layer.in_features} -> {layer.out_features}) looks like query, key and "
                    "value in one weight, and 'colwise' would hand each rank a mixture of them: use "
                    f"separate q, k and v layers, {_WAY_OUT}"
                )
            elif _is_fused_gate(name, layer, inputs, is_attention(modules[owner_name])):
                problems.append(
                    f"{name} ({layer.in_features} -> {layer.out_features}) looks like gate and up in "
                    "one weight, and 'colwise' would give whole gates to some ranks and whole ups to "
                    f"others: use two layers, {_WAY_OUT}"
                )
    return problems


def _is_fused_qkv(name: str, layer: nn.Linear, owner: nn.Module) -> bool:
    """By name and by shape: wider than one projection of its input would be."""
    last = name.rpartition(".")[2]
    if type(owner).__name__ in _LAID_OUT_BY_HEAD:
        return False
    if _QKV_NAME.search(last):
        return layer.out_features > layer.in_features
    if _KV_NAME.search(last):
        return layer.out_features == 2 * layer.in_features or is_attention(owner)
    # Also the name of the first layer of an MLP or a state-space block.
    return "in_proj" in last and layer.out_features == 3 * layer.in_features


def _is_fused_gate(name: str, layer: nn.Linear, inputs: set[int], in_attention: bool) -> bool:
    """Twice as wide as what the layer after it takes, and nothing takes the whole width."""
    twice = any(layer.out_features == 2 * size for size in inputs)
    halves = twice and layer.out_features not in inputs
    return halves and (bool(_GATE_UP_NAME.search(name.rpartition(".")[2])) or not in_attention)


def _rowwise_inputs(
    modules: Mapping[str, nn.Module], plan: Mapping[str, str], layers: Mapping[str, nn.Linear]
) -> set[int]:
    """Input widths of the rowwise layers that the callers of `layers` call."""
    callers = {owner_of(modules, name) for name in layers}
    return {
        modules[name].in_features  # type: ignore[misc]
        for name, style in plan.items()
        if STYLES[style].shard_dim == 1 and isinstance(modules[name], nn.Linear) and owner_of(modules, name) in callers
    }


@torch.no_grad()
def check_replicated_gradients(module: nn.Module, mesh: DeviceMesh, tolerance: float = 1e-3) -> None:
    """Check that the gradients of parameters not split over the tensor axis agree on its ranks.

    They differ where a plan forgets a module that works on this rank's heads only; training would
    then let the ranks drift apart without an error. Two small collectives: meant for a first step.

    Args:
        module: after a backward pass; every rank must call this.
        mesh: the one-axis mesh that the plan was applied on.
        tolerance: largest difference of a gradient's norm between ranks, relative to the largest
            norm. Rounding differs by far less.

    Raises:
        ValueError: on every rank, naming the parameters.
    """
    grads = {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and not _is_split(parameter, mesh)
    }
    if mesh.size() == 1 or not grads:
        return
    # A signed sum too: equal norms can belong to different gradients.
    marks = torch.stack([_marks(grad) for grad in grads.values()])
    highest, lowest = marks.clone(), -marks
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh.get_group())
    dist.all_reduce(lowest, dist.ReduceOp.MAX, group=mesh.get_group())
    # A gradient that is zero but for rounding may differ in all its digits.
    scale = highest[:, :1].clamp(min=max(1e-4 * highest[:, 0].max().item(), torch.finfo(highest.dtype).tiny))
    apart = ((highest + lowest) / scale).amax(dim=1) > tolerance
    names = [name for name, differs in zip(grads, apart.tolist(), strict=True) if differs]
    if names:
        raise ValueError(
            f"the ranks of the tensor axis got different gradients of {', '.join(names)}, which each of "
            "them holds whole: the modules work on a part of the heads or features. Give them style "
            "'replicated_with_grad_allreduce' in the tensor-parallel plan; if they come before the split layers, look "
            "for a module beside those that mixes whole and split features, and leave that block's layers out"
        )


def _is_split(parameter: Tensor, mesh: DeviceMesh) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    ours = (mesh.mesh_dim_names or ("",))[0]
    placed = dict(zip(names, parameter.placements, strict=False))
    return ours in placed and not placed[ours].is_replicate()


def _marks(grad: Tensor) -> Tensor:
    """Norm, and a signed sum scaled to the norm's size, of this rank's part of a gradient."""
    values = local(grad).flatten().float()
    signs = torch.arange(values.numel(), device=values.device).remainder(2).mul(2).sub(1)
    return torch.stack([values.norm(), (values * signs).sum() / max(values.numel(), 1) ** 0.5])
