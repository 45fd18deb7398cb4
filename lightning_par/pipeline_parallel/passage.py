"""The passage of a user's step through one stage: how far it has come, and what its tensors are worth.

A step meets placeholders before its stage's blocks, and sees only its stage's blocks. Both are harmless as long as all
that goes on is the hidden state. :class:`Passage` verifies just that by following every operation, so that no
comparison, mask or detour can turn a missing value into a number that looks good.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_par.pipeline_parallel.trunk import CannotSplitError

__all__ = ["LeaveStage", "Origin", "Passage", "find_hidden"]

_READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero")
"""Operations after which a step goes on by the numbers in a tensor."""


class LeaveStage(BaseException):  # noqa: N818
    """Ends a step at the blocks of the next stage; no error, so that no ``except Exception`` of a step stops it."""


def find_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | str, Tensor] | None:
    """Where the hidden state is in the arguments of a block, and the hidden state.

    It is the first positional floating-point tensor; if there is none, the argument ``hidden_states``; then the first
    floating-point tensor given by name.
    """
    named = sorted(kwargs, key=lambda name: name != "hidden_states")
    values: list[tuple[int | str, Any]] = [*enumerate(args), *((name, kwargs[name]) for name in named)]
    return next((entry for entry in values if isinstance(entry[1], Tensor) and entry[1].is_floating_point()), None)


@dataclass(frozen=True)
class Origin:
    """Where a tensor comes from that must not be used everywhere.

    Attributes:
        what: In words.
        way_out: What the user can do, a sentence.
        is_local: Whether it comes from inside of a block of this stage, where it may be used; else from another stage.
    """

    what: str
    way_out: str
    is_local: bool = False

    def refuse(self, complaint: str) -> NoReturn:
        """Raise that the step can't be split; ``{}`` in ``complaint`` stands for the tensor."""
        raise CannotSplitError(f"{complaint.format(self.what)}. {self.way_out}")


class Passage:
    """What a stage shares with its placeholders.

    Attributes:
        method: The step that runs, ``None`` outside of one.
        entered: Whether it has reached the stage's first block.
        inside: The stage's block that is running.
        training: Whether the step runs in training mode.
        hidden: The hidden state that left the stage.
        excuses: Blocks that could not be run on the meta device, and why.
    """

    def __init__(self) -> None:
        self.method: str | None = None
        self.entered = False
        self.inside: Origin | None = None
        self.training = True
        self.hidden: Tensor | None = None
        self.excuses: dict[str, str] = {}
        # By address of the storage, which is not used anew as long as the reference exists.
        self._origins: dict[int, tuple[StorageWeakRef, Origin]] = {}
        self._follows = False

    @contextmanager
    def step(self, method: str, training: bool, followed: Mapping[str, nn.Module]) -> Iterator[None]:
        """The context of one step.

        Args:
            method: Its name.
            training: Whether it runs in training mode.
            followed: The stage's blocks by name, if the step is to be verified; else nothing.
        """
        self.method, self.entered, self.inside, self.training = method, False, None, training
        self._follows = bool(followed)
        try:
            with ExitStack() as stack:
                for name, block in followed.items():
                    self._watch(name, block, stack)
                if followed:
                    stack.enter_context(_Follow(self))
                yield
        finally:
            self.method, self._follows = None, False
            self._origins.clear()

    def mark(self, tree: Any, origin: Origin) -> None:
        """Note where the tensors in ``tree`` come from."""
        if self._follows:
            for storage in _storages(tree):
                self._origins[storage._cdata] = StorageWeakRef(storage), origin

    def origin_of(self, tree: Any) -> Origin | None:
        """Where a tensor in ``tree`` comes from, if it must not be used everywhere; another stage before a block."""
        found = (self._origins.get(storage._cdata) for storage in _storages(tree))
        return min((entry[1] for entry in found if entry), key=lambda origin: origin.is_local, default=None)

    def _watch(self, name: str, block: nn.Module, stack: ExitStack) -> None:
        origin = Origin(
            f"parameters of {name}, or what it computes inside",
            "Only the hidden state leaves a stage, so the same of other stages' blocks is missing here. Call blocks as "
            "block(hidden, ...) and leave out what uses them otherwise, or use pipeline_parallel_size=1.",
            is_local=True,
        )
        self.mark(list(block.parameters()), origin)
        stack.enter_context(block.register_forward_pre_hook(partial(self._go_in, origin), prepend=True))
        stack.enter_context(block.register_forward_hook(self._come_out))

    def _go_in(self, origin: Origin, *_: Any) -> None:
        self.inside = origin

    def _come_out(self, block: nn.Module, args: Any, output: Any) -> None:
        self.inside = None
        for storage in _storages(output):
            self._origins.pop(storage._cdata, None)

    def follow(self, operation: str, inputs: Any) -> Origin | None:
        """Where the results of an operation come from.

        Raises:
            CannotSplitError: If it uses what can't be used here.
        """
        origin = self.origin_of(inputs)
        if origin is None or operation.endswith("_like") or operation.startswith("aten::new_"):  # only shapes are used
            return self.inside
        if origin.is_local and self.inside is None:
            origin.refuse(f"{self.method} uses {{}}, outside of it")
        if not origin.is_local and self.entered:
            origin.refuse(f"{self.method} uses {{}} after it has entered this stage's blocks")
        if not origin.is_local and operation in _READS:
            origin.refuse(f"{self.method} reads numbers of {{}}, or chooses by them what to do")
        return self.inside or origin


class _Follow(TorchDispatchMode):
    """Shows every operation to a passage."""

    supports_higher_order_operators = True

    def __init__(self, passage: Passage) -> None:
        super().__init__()
        self._passage = passage

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled blocks stay compiled: what they are called with is seen at their entry."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = (args, kwargs)
        origin = self._passage.follow(func.name().partition(".")[0], inputs)
        result = func(*args, **kwargs or {})
        if origin is not None:
            # A view of a weight or of a mask inside of a block is not new there.
            old = {storage._cdata for storage in _storages(inputs)} if origin.is_local else ()
            self._passage.mark([storage for storage in _storages(result) if storage._cdata not in old], origin)
        return result


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and torch._C._has_storage(leaf):  # sparse ones have none
            yield leaf.untyped_storage()
        elif isinstance(leaf, torch.UntypedStorage):
            yield leaf
