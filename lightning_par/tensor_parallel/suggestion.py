"""What to tell a person whose model carries no plan: its layers, and a plan to start from."""

from __future__ import annotations

import re

from torch import nn

__all__ = ["explain_missing_plan"]

# Last part of a layer's name, as people call the two halves of an attention or an MLP.
_BACK_TO_STREAM = re.compile(
    r"^(o|out|o_?proj|out_?proj|wo|proj|c_proj|dense|down|down_?proj|fc2|linear2|lin2|w2|fc_out|to_out|output)$"
)


def explain_missing_plan(module: nn.Module) -> str:
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
