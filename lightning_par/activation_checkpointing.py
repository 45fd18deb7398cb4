"""Recomputing activations of blocks in backward instead of keeping them."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["COSTLY", "Checkpointing", "check_checkpointing", "checkpoint_activations"]

Checkpointing: TypeAlias = bool | Literal["selective"]

COSTLY = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
"""Kept by selective checkpointing: dear to compute again for the memory they take."""


def check_checkpointing(value: object) -> None:
    """Check a user's choice.

    Raises:
        ValueError: If there is no such choice.
    """
    if not isinstance(value, bool) and value != "selective":
        raise ValueError(
            f"activation_checkpointing={value!r} is unknown. Choose False (keep all activations), True (keep each "
            "block's input and compute it again in backward) or 'selective' (also keep matrix products and attention)."
        )


def checkpoint_activations(block: nn.Module, choice: Checkpointing) -> None:
    """Let ``block`` compute its activations again in backward, in place and without a change of names.

    Args:
        block: One block.
        choice: ``False`` for nothing, ``True`` for all of them, ``"selective"`` for all but costly operators' results.
    """
    if choice is False:
        return
    options: dict[str, Any] = {}
    if choice == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_costly)
    checkpoint(block, **options)


def _keep_costly(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
