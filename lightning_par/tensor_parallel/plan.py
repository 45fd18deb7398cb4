"""From a plan as people and models write it to exact module names.

A plan maps dotted patterns to style names (see `styles`). A pattern is relative to the object that
carries the plan. It is compared with a module's name part by part between the dots, `*` standing
for any text within one part, so "layers.*.q_proj" names every layer's projection. An exact name
goes before a pattern.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lightning_par.tensor_parallel.styles import REFUSED_STYLES, STYLES, describe_styles
from lightning_par.ties import find_ties

__all__ = ["resolve_plan"]

_COMPILED = "_orig_mod."
# How the partner of a planned layer is split to match: (its class, the weight's split dim) -> style.
_PARTNER_STYLES: dict[tuple[type[nn.Module], int], str] = {
    (nn.Embedding, 0): "embedding_rowwise",
    (nn.Embedding, 1): "embedding_colwise",
    (nn.Linear, 0): "colwise_gather_output",
    (nn.Linear, 1): "rowwise_split_input",
}
# Last part of a layer's name, as people call the two halves of an attention or an MLP.
_BACK_TO_STREAM = re.compile(
    r"^(o|out|o_?proj|out_?proj|wo|proj|c_proj|dense|down|down_?proj|fc2|linear2|lin2|w2|fc_out|to_out|output)$"
)


@dataclass(frozen=True)
class _CarriedPlan:
    """A plan and where it was found."""

    patterns: Mapping[str, str]
    prefix: str  # dotted name of the module it is relative to, "" for the root
    source: str  # for messages
    for_a_family: bool = False  # written for many configurations: names not built here are normal


def resolve_plan(module: nn.Module, plan: Mapping[str, str] | None = None) -> dict[str, str]:
    """Find the plan for `module` and expand its patterns.

    The first that exists is taken: the argument, relative to `module`; the module's own `tp_plan`;
    the plans of submodules (a `tp_plan`, or the one a Hugging Face model carries), each relative to
    the submodule that carries it. If one of two layers with tied weights is planned, the other is
    planned to match.

    Args:
        module: the module to be split; parameters may be on the meta device. No process group is
            needed.
        plan: dotted pattern to style name, or None to look for the module's own.

    Returns:
        Exact module name to style name, in the order of registration. The first name of a module
        registered under several.

    Raises:
        ValueError: if there is no plan, it names no module, it names an unknown or refused style,
            or two patterns ask for different styles of one module.
    """
    carried = _find_plans(module, plan)
    if not carried:
        raise ValueError(_explain_missing_plan(module))
    expanded: dict[str, str] = {}
    for found in carried:
        expanded.update(_expand(module, found))
    if not expanded:
        raise ValueError(f"the plan of {carried[0].source} names no module of this model")
    expanded = _extend_to_ties(module, expanded)
    return {name: expanded[name] for name, _ in module.named_modules() if name in expanded}


def _find_plans(module: nn.Module, plan: Mapping[str, str] | None) -> list[_CarriedPlan]:
    if plan is not None:
        return [_CarriedPlan(plan, "", "the tensor-parallel plan argument")]
    found: list[_CarriedPlan] = []
    for name, submodule in module.named_modules():
        inside_another = any(not f.prefix or f"{name}.".startswith(f"{f.prefix}.") for f in found)
        patterns = None if inside_another else _own_plan(submodule)
        if patterns:
            source = f"{type(submodule).__name__}" + (f" ({name})" if name else "")
            found.append(_CarriedPlan(patterns, name, source, hasattr(submodule, "_tp_plan")))
    return found


def _own_plan(module: nn.Module) -> Mapping[str, str] | None:
    """The plan of a module: `tp_plan`, or the private attribute of older Hugging Face models."""
    plans = (getattr(module, name, None) for name in ("tp_plan", "_tp_plan"))
    return next((plan for plan in plans if isinstance(plan, Mapping) and plan), None)


def _expand(root: nn.Module, found: _CarriedPlan) -> dict[str, str]:
    carrier = root.get_submodule(found.prefix)
    canonical = {id(module): name for name, module in carrier.named_modules()}
    # Every alias can be named in a plan; styles are kept under the first name.
    # So can what torch.compile wraps, by the name it had before.
    every = carrier.named_modules(remove_duplicate=False)
    names = {name.replace(_COMPILED, ""): canonical[id(m)] for name, m in every}
    expanded: dict[str, str] = {}
    asked_by: dict[str, str] = {}
    # Exact names first, so that they win over patterns.
    for pattern in sorted(found.patterns, key=lambda text: "*" in text):
        style = found.patterns[pattern]
        matches = _matches(pattern, names)
        if not matches and found.for_a_family:
            continue
        _check_style(pattern, style, found.source)
        if not matches:
            raise ValueError(_explain_unknown_name(carrier, pattern, names, found.source))
        for name in matches:
            earlier = asked_by.setdefault(name, pattern)
            if "*" in earlier and found.patterns[earlier] != style:
                raise ValueError(
                    f"{found.source} asks for two styles of module {name!r}: "
                    f"{found.patterns[earlier]!r} by {earlier!r} and {style!r} by {pattern!r}. "
                    "Keep one of them, or name the module exactly"
                )
            expanded.setdefault(name, style)
    prefix = f"{found.prefix}." if found.prefix else ""
    return {(f"{prefix}{name}" if name else found.prefix): style for name, style in expanded.items()}


def _matches(pattern: str, names: Mapping[str, str]) -> list[str]:
    """First names of the modules that `pattern` stands for."""
    parts = pattern.split(".")
    hits = (
        canonical
        for name, canonical in names.items()
        if name.count(".") == len(parts) - 1
        and all(fnmatchcase(part, want) for part, want in zip(name.split("."), parts, strict=True))
    )
    return list(dict.fromkeys(hits))


def _check_style(pattern: str, style: object, source: str) -> None:
    if isinstance(style, str) and style in STYLES:
        return
    if isinstance(style, str) and style in REFUSED_STYLES:
        raise ValueError(
            f"{source} asks for style {style!r} of {pattern!r}, which is not supported: {REFUSED_STYLES[style]}"
        )
    raise ValueError(
        f"{source} asks for style {style!r} of {pattern!r}, which is not one of these names:\n{describe_styles()}"
    )


def _explain_unknown_name(carrier: nn.Module, pattern: str, names: Mapping[str, str], source: str) -> str:
    parameters = [name for name, _ in carrier.named_parameters()]
    if any(_matches(pattern, {name: name}) for name in parameters):
        return (
            f"{source}: {pattern!r} names a parameter of {type(carrier).__name__}, not a module; "
            "a plan splits whole linear layers and embeddings, so name the module that holds it"
        )
    generic = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names if name}
    near = difflib.get_close_matches(pattern, sorted(generic), n=3, cutoff=0.5)
    # A plan written relative to an inner module lacks the beginning of the name.
    near = near or sorted(name for name in generic if name.endswith(f".{pattern}"))[:3]
    hint = f"nearest names: {', '.join(near)}" if near else f"its children: {', '.join(dict(carrier.named_children()))}"
    return f"{source}: {pattern!r} names no module of {type(carrier).__name__}; {hint}"


def _extend_to_ties(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Plan the unplanned partner of a planned embedding or head.

    Only where the partner is an embedding, or a linear layer tied to an embedding: those see whole
    activations. Any other tie of a planned to an unplanned layer is left for `check_plan`.
    """
    extended = dict(plan)
    names = {id(m): name for name, m in module.named_modules()}
    for tie in find_ties(module):
        dims = {STYLES[plan.get(names[id(m)], "replicate")].split_dim(parameter) for m, parameter in tie} - {None}
        has_embedding = any(isinstance(m, nn.Embedding) for m, _ in tie)
        if len(dims) != 1 or not has_embedding:
            continue
        (dim,) = dims
        for partner, _ in tie:
            for (kind, kind_dim), style in _PARTNER_STYLES.items():
                if isinstance(partner, kind) and kind_dim == dim:
                    extended.setdefault(names[id(partner)], style)
    return extended


def _explain_missing_plan(module: nn.Module) -> str:
    """The message for a module without a plan.

    It lists the linear layers of one block of the longest list of like blocks, and a plan guessed
    from their names and shapes, with embedding and head, to paste and correct.
    """
    list_name, blocks = _longest_list(module)
    layers = {
        name: layer for name, layer in (blocks[0] if blocks else module).named_modules() if isinstance(layer, nn.Linear)
    }
    where = f"each block of {list_name!r} ({len(blocks)} of {type(blocks[0]).__name__})" if blocks else "it"
    prefix = f"{list_name}.*." if blocks else ""
    listing = "".join(f"\n  {name}: {layer.in_features} -> {layer.out_features}" for name, layer in layers.items())
    entries = {f"{prefix}{name}": _guess(name, layer) for name, layer in layers.items()}
    entries = {**entries, **_ends(module, blocks)} if blocks else entries
    plan = "".join(f'\n    "{name}": "{style}",' for name, style in entries.items())
    return (
        f"tensor parallelism needs a plan, and neither the arguments nor {type(module).__name__} nor "
        f"a module in it has one. The linear layers of {where}:{listing or ' none'}\n"
        "Give the module an attribute tp_plan, or pass one as tensor_parallel_plan; "
        f"a first guess to check against the forward pass:\n  tp_plan = {{{plan}\n  }}"
    )


def _longest_list(module: nn.Module) -> tuple[str, list[nn.Module]]:
    """Name and members of the longest ModuleList or Sequential whose members are of one class."""
    best: tuple[str, list[nn.Module]] = ("", [])
    for name, candidate in module.named_modules():
        members = list(candidate.children())
        if (
            isinstance(candidate, (nn.ModuleList, nn.Sequential))
            and len({type(member) for member in members}) == 1
            and any(isinstance(layer, nn.Linear) for layer in members[0].modules())
            and len(members) > len(best[1])
        ):
            best = (name, members)
    return best


def _guess(name: str, layer: nn.Linear) -> str:
    if _BACK_TO_STREAM.match(name.rpartition(".")[2]) or layer.in_features > layer.out_features:
        return "rowwise"
    return "colwise"


def _ends(module: nn.Module, blocks: list[nn.Module]) -> dict[str, str]:
    """The widest embedding, and a linear layer outside the blocks as wide as its vocabulary."""
    inside = {id(part) for block in blocks for part in block.modules()}
    outside = [(name, part) for name, part in module.named_modules() if id(part) not in inside]
    tables = [(name, part) for name, part in outside if isinstance(part, nn.Embedding)]
    if not tables:
        return {}
    name, table = max(tables, key=lambda entry: entry[1].num_embeddings)
    heads = {
        head: "colwise_gather_output"
        for head, part in outside
        if isinstance(part, nn.Linear) and part.out_features == table.num_embeddings
    }
    return {name: "embedding_rowwise", **heads}
