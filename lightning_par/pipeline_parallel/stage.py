"""One stage of a pipeline: the user's own step, entered late and left early.

Every stage calls the whole step on its micro-batch. At the stage's first block the hidden state received from the
stage before takes the place of the block's own input (late entry), at the first block of the next stage the step ends
(early exit); only the last stage runs on to the loss. So masks, positions and targets are computed where they are
needed, and the user's module knows nothing of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from torch import Tensor, nn

from lightning_par.pipeline_parallel.passage import LeaveStage, Passage, find_hidden
from lightning_par.pipeline_parallel.standins import adopt
from lightning_par.pipeline_parallel.trunk import CannotSplitError, Trunk
from lightning_par.step import Step, run_step, step_name

__all__ = ["CannotSplitError", "StageModule"]


class StageModule(nn.Module):
    """The root of everything that wraps a stage: it returns normally, however the user's step ends.

    Args:
        module: The user's module, or a second object of it, with placeholders for what lives on other stages.
        trunk: The list that is cut.
        blocks: The stage's blocks, by their indices.
        passage: That of the placeholders in ``module``.
        doubles: The user's modules and, for each, the second object of it that is in ``module``.
        writes_back: Whether attributes that the step writes on second objects are for the user's.

    Attributes:
        on_entry: Called when the received hidden state takes its place.
        verify: Whether to check that the step needs nothing of other stages but the hidden state. It costs time.
    """

    def __init__(
        self,
        module: nn.Module,
        trunk: Trunk,
        blocks: range,
        passage: Passage,
        doubles: Iterable[tuple[nn.Module, nn.Module]] = (),
        writes_back: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.on_entry: Callable[[], None] | None = None
        self.verify = True
        self._trunk = trunk
        self._blocks = blocks
        self._passage = passage
        self._doubles = list(doubles)
        self._writes_back = writes_back
        self._received: Tensor | None = None

    @property
    def is_first(self) -> bool:
        """Whether the stage holds the first block."""
        return self._blocks.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage holds the last block, and so runs on to the end of the step."""
        return self._blocks.stop == self._trunk.num_blocks

    def forward(self, *hidden: Tensor, method: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the stage's part of a step.

        Args:
            hidden: The hidden state that left the stage before; nothing on the first.
            method: The step.
            args: Its arguments.
            kwargs: Its arguments given by name.

        Returns:
            The hidden state that the next stage's first block is called with; on the last stage what the step returns.

        Raises:
            CannotSplitError: If the step can't be cut at this stage's blocks.
        """
        (self._received,) = hidden or (None,)
        for user, double in self._doubles:
            adopt(user, double)
        # For this call only: so it comes before hooks that wrappers register later, and a block that is computed again
        # in the backward does not meet it.
        entry = self._own_blocks[self._name()].register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        try:
            with entry:
                return self._run(method, args, kwargs)
        finally:
            self._received = self._passage.hidden = None
            for user, double in self._doubles if self._writes_back else ():
                adopt(double, user)

    def _run(self, step: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        passage, method = self._passage, step_name(step)
        with passage.step(method, self.module.training, self._own_blocks if self.verify else {}):
            try:
                result = run_step(self.module, step, args, kwargs)
            except LeaveStage:
                return passage.hidden
            except Exception as error:
                if passage.excuses and not passage.entered:
                    raise CannotSplitError(self._with_excuses(f"{method} fails before {self._name()}")) from error
                raise
            if not passage.entered or not self.is_last:
                raise CannotSplitError(
                    f"{method} returned without calling {self._name(past_end=passage.entered)}. A pipeline needs every "
                    "block called once in every step, as block(hidden, ...). Name the list of blocks that the step "
                    'calls with pipeline_blocks="...", or use pipeline_parallel_size=1.'
                )
            origin = passage.origin_of(result)
            if origin is not None:
                origin.refuse(f"{method} returns {{}}")
            return result

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The hook of the first block: let the hidden state that was received take the place of its own."""
        passage, name = self._passage, self._name()
        if passage.entered:
            raise CannotSplitError(
                f"{passage.method} calls {name} twice, but a hidden state passes the stages of a pipeline once. Name "
                'another list of blocks with pipeline_blocks="...", or use pipeline_parallel_size=1.'
            )
        if self._received is not None:
            args, kwargs = self._put_in(self._received, name, args, kwargs)
        origin = passage.origin_of((args, kwargs))
        if origin is not None:
            origin.refuse(f"{name} is called with {{}}, besides the hidden state")
        passage.entered = True
        if self._received is not None and self.on_entry is not None:
            self.on_entry()
        return args, kwargs

    def _put_in(self, received: Tensor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = find_hidden(args, kwargs)
        if found is None:
            raise CannotSplitError(self._with_excuses(f"{name} is called without a floating-point tensor"))
        place, hidden = found
        if hidden.shape != received.shape:
            shapes = f"{tuple(received.shape)}, but by its shape {tuple(hidden.shape)} was expected"
            raise CannotSplitError(self._with_excuses(f"The hidden state that came for {name} is of shape {shapes}"))
        if isinstance(place, int):
            return (*args[:place], received, *args[place + 1 :]), kwargs
        return args, {**kwargs, place: received}

    @property
    def _own_blocks(self) -> dict[str, nn.Module]:
        blocks = self.module.get_submodule(self._trunk.name).named_children()
        own = islice(blocks, self._blocks.start, self._blocks.stop)
        return {f"{self._trunk.name}.{key}": block for key, block in own}

    def _name(self, past_end: bool = False) -> str:
        """Name of the stage's first block, or of the first after it."""
        keys = list(self.module.get_submodule(self._trunk.name)._modules)
        return f"{self._trunk.name}.{keys[self._blocks.stop if past_end else self._blocks.start]}"

    def _with_excuses(self, complaint: str) -> str:
        reasons = [f"{name} could not be run for its shape ({why})" for name, why in self._passage.excuses.items()]
        return (
            f"{complaint}. {'. '.join(reasons)}{'. ' if reasons else ''}A pipeline needs blocks that are called with "
            "the hidden state and return it; else use pipeline_parallel_size=1."
        )
