"""From a module and a batch to a :class:`~lightning_par.planner.profile.Profile`: its own step, on fake tensors.

The step runs forward and backward once for each of two batch sizes. Nothing is computed and nothing allocated, so that
a model of hundreds of billions of parameters is traced on a laptop, in about a second.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from lightning_par.pipeline_parallel.outputs import loss_of
from lightning_par.planner.batches import fake_batch
from lightning_par.planner.ledger import Entry, Ledger
from lightning_par.planner.stand_in import CountingAxis, fake_copy, like_blocks, outline, skip_like
from lightning_par.tensor_parallel.apply import apply_on_axis

__all__ = ["AFTER", "BACKWARD", "BEFORE", "PRECISIONS", "Precision", "Step", "UntraceableError", "trace"]

Step = Callable[[nn.Module, Any], Any]
"""Runs a module's step on a batch, and returns what the step returns."""

AFTER, BEFORE, BACKWARD = "after", "before", " backward"
_ELSEWHERE = "skipped blocks"


class UntraceableError(ValueError):
    """A module whose step does not run on tensors without values; the message says why."""


@dataclass(frozen=True)
class Precision:
    """Types of a ``Trainer(precision=...)``.

    Attributes:
        rest: Type of parameters, gradients and optimizer states at rest, ``None`` for the module's own.
        compute: Type that sharded parameters are gathered in, ``None`` for that at rest.
        autocast: Type of autocast, ``None`` without.
        peak: Whose peak products reach, a key of ``Device.flops``.
    """

    rest: torch.dtype | None
    compute: torch.dtype | None
    autocast: torch.dtype | None
    peak: str


PRECISIONS: dict[str, Precision] = {
    "32-true": Precision(None, None, None, "fp32"),
    "bf16-mixed": Precision(None, torch.bfloat16, torch.bfloat16, "bf16"),
    "16-mixed": Precision(None, torch.float16, torch.float16, "fp16"),
    "bf16-true": Precision(torch.bfloat16, None, None, "bf16"),
    "16-true": Precision(torch.float16, None, None, "fp16"),
    "64-true": Precision(torch.float64, None, None, "fp64"),
}
"""As Lightning's plugins set them; see :func:`lightning_par.trainer.precision.parameter_dtype`."""


def training_step(module: nn.Module, batch: Any) -> Any:
    """Lightning's step, of the first batch."""
    return module.training_step(batch, 0)  # type: ignore[operator]


def trace(
    module: nn.Module,
    batch: Any,
    samples: Sequence[int],
    *,
    trunk: str | None,
    plan: dict[str, str] | None = None,
    tensor_parallel_size: int = 1,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    step: Step = training_step,
) -> list[dict[str, Entry]]:
    """Run one step on fake tensors for each of some batch sizes.

    Args:
        module: The whole module, on any device; not touched.
        batch: A batch, of any size.
        samples: Batch sizes.
        trunk: Dotted name of the list of blocks, ``None`` to take the module as one.
        plan: Module name -> tensor-parallel style, checked.
        tensor_parallel_size: The degree.
        dtype: Type of parameters, ``None`` for their own.
        autocast: Type of autocast, ``None`` without.
        step: What a step is.

    Returns:
        For each, section -> what it did. Sections are ``"before"``, the dotted name of the first block of each kind,
        ``"after"``, and each of these with ``" backward"`` behind it.

    Raises:
        UntraceableError: If the step needs values, a Trainer, or calls its blocks in another order.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = list(module.get_submodule(trunk).children()) if trunk is not None else []
    kinds = like_blocks(blocks)
    hollow = [blocks[index] for kind in kinds for index in kind[1:]]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings(), _rng_kept():
            warnings.simplefilter("ignore")
            entries = []
            for number in samples:
                copy = fake_copy(module, device, dtype, hollow)
                axis = CountingAxis(tensor_parallel_size)
                if tensor_parallel_size > 1:
                    present = dict(copy.named_modules())
                    apply_on_axis(copy, {name: style for name, style in (plan or {}).items() if name in present}, axis)
                copy.train()
                entries.append(_traced(copy, fake_batch(batch, number, device), axis, trunk, kinds, step, autocast))
    except UntraceableError:
        raise
    except Exception as error:
        raise UntraceableError(f"{type(module).__name__}: {type(error).__name__}: {error}".splitlines()[0]) from error
    return entries


def _traced(
    copy: nn.Module,
    batch: Any,
    axis: CountingAxis,
    trunk: str | None,
    kinds: list[list[int]],
    step: Step,
    autocast: torch.dtype | None,
) -> dict[str, Entry]:
    inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    ledger = axis.ledger = Ledger([*copy.parameters(), *copy.buffers(), *inputs])
    calls = [] if trunk is None else _mark(copy, trunk, kinds, ledger)
    with ledger:
        _run(copy, batch, ledger, step, _autocast(next(copy.parameters()).device.type, autocast))
    if trunk is not None and calls != list(range(sum(map(len, kinds)))):
        raise UntraceableError(f"{type(copy).__name__} calls the blocks of {trunk} in the order {calls[:12]}")
    return dict(ledger.entries)


def _run(copy: nn.Module, batch: Any, ledger: Ledger, step: Step, context: AbstractContextManager[Any]) -> None:
    ledger.enter(BEFORE)
    with context:
        output = step(copy, batch)
    loss = loss_of(output)
    ledger.enter((AFTER if AFTER in ledger.entries else BEFORE) + BACKWARD)
    if loss.requires_grad:
        loss.backward()
    ledger.enter("")


def _mark(copy: nn.Module, trunk: str, kinds: list[list[int]], ledger: Ledger) -> list[int]:
    """Let blocks tell the ledger when they begin and end, and skip those that are like another.

    Returns:
        A list that fills with the indices of blocks in the order of their calls.
    """
    blocks = list(copy.get_submodule(trunk).children())
    names = list(dict(copy.get_submodule(trunk).named_children()))
    outputs: dict[int, Any] = {}
    calls: list[int] = []
    for first, *others in kinds:
        _watch(blocks[first], f"{trunk}.{names[first]}", first, ledger, calls, outputs)
        for index in others:
            skip_like(blocks[index], partial(outputs.get, first), _entering(index, _ELSEWHERE, ledger, calls))
    blocks[-1].register_forward_hook(lambda *_: ledger.enter(AFTER))
    return calls


def _watch(block: nn.Module, name: str, index: int, ledger: Ledger, calls: list[int], outputs: dict[int, Any]) -> None:
    """Cut the ledger's time at a block's beginning and end, forward and backward."""
    enter = _entering(index, name, ledger, calls)

    def leave_backward(_: Tensor) -> None:
        if ledger.section == name + BACKWARD:
            ledger.enter((BEFORE if index == 0 else _ELSEWHERE) + BACKWARD)

    def enter_backward(_: Tensor) -> None:
        if name + BACKWARD not in ledger.entries:
            ledger.enter(name + BACKWARD)

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        enter()
        source = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad), None)
        if source is not None:
            source.register_hook(leave_backward)

    def after(_: nn.Module, args: Any, output: Any) -> None:
        outputs[index] = outline(output)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        ledger.entries[name].output = sum(tensor.nbytes for tensor in tensors)
        for leaf in tensors:
            if leaf.requires_grad:
                leaf.register_hook(enter_backward)

    block.register_forward_pre_hook(before, with_kwargs=True)
    block.register_forward_hook(after)


def _entering(index: int, section: str, ledger: Ledger, calls: list[int]) -> Callable[[], None]:
    def enter() -> None:
        calls.append(index)
        ledger.enter(section)

    return enter


def _autocast(device: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(device, dtype)


@contextmanager
def _rng_kept() -> Iterator[None]:
    """Tracing draws no numbers that training would have drawn."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
