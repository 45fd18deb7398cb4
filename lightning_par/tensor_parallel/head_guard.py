"""A check, in an attention module's first forward, that its code counts this rank's heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["HeadGuard", "WrongHeadsError"]

_QUERY_FIRST = (
    F.scaled_dot_product_attention,
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
)


class WrongHeadsError(ValueError):
    """The forward pass reshapes this rank's heads as if it held all of them, or a part of them."""


class HeadGuard(TorchFunctionMode):
    """Watches the first operand of attention's products, `[batch, heads, sequence, head size]`.

    A reshape such as `view(batch, length, num_heads, -1)` with the full number of heads fits this
    rank's slice too: it gives full-count heads of a fraction of their size, no error and wrong
    numbers. The opposite, `view(batch, length, -1, hidden // num_heads)` with the local number,
    gives too few heads that are too large. Both are recognised here by their shape.

    Args:
        num_heads: query heads on this rank.
        head_size: size of one head.
        degree: the tensor-parallel degree.
        module_name: for the message.
    """

    def __init__(self, num_heads: int, head_size: int, degree: int, module_name: str) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.degree = degree
        self.module_name = module_name

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Check `func`'s first operand if it is one of attention's products, and run it."""
        if func in _QUERY_FIRST and args and args[0].dim() == 4:
            self._check(args[0].shape[1], args[0].shape[3])
        return func(*args, **(kwargs or {}))

    def _check(self, num_heads: int, head_size: int) -> None:
        too_many = (self.num_heads * self.degree, self.head_size // self.degree)
        too_few = (self.num_heads // self.degree, self.head_size * self.degree)
        if (num_heads, head_size) in (too_many, too_few):
            raise WrongHeadsError(
                f"{self.module_name} computes attention on {num_heads} heads of size {head_size}, but "
                f"under tensor parallelism of degree {self.degree} this rank holds {self.num_heads} "
                f"heads of size {self.head_size}. Keep the head size in an attribute set in __init__ "
                "and use -1 for the head dimension: q.view(batch, length, -1, self.head_size)"
            )
