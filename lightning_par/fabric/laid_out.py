"""A module that Fabric has set up: how a step of it runs, whatever its layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn

from lightning_par.engine import ParallelEngine
from lightning_par.fabric.handover import GradientHandover
from lightning_par.pipeline_parallel.microbatches import merge
from lightning_par.pipeline_parallel.outputs import loss_of
from lightning_par.pipelined import PipelinedEngine
from lightning_par.strategies.mirror import Pair

__all__ = ["LaidOut", "StepFunction"]

StepFunction: TypeAlias = Callable[[Any, Any], Any]
"""``step_fn(module, batch)`` returns the loss, or a dictionary with it under ``"loss"``."""


class LaidOut(nn.Module):
    """What Fabric wraps and calls in place of the user's module.

    Args:
        engine: The engine that has laid the module out.
        precision: Fabric's precision plugin.
        pair: With a dedicated parameter server, the ranks of it and of the worker whose steps it takes over.
    """

    def __init__(self, engine: ParallelEngine, precision: Precision, pair: Pair | None) -> None:
        super().__init__()
        self.module = engine.module
        self.engine = engine
        self._precision = precision
        self._pair = pair
        self._handover = GradientHandover(engine, precision) if isinstance(engine, PipelinedEngine) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A plain call of the module.

        Under a pipeline and with a dedicated parameter server only without gradients, by all ranks together.

        Raises:
            RuntimeError: If the call can't be part of training under this layout, with the call that can.
        """
        self._refuse_inside_a_step()
        if torch.is_grad_enabled() and (self._handover is not None or self._pair is not None):
            raise RuntimeError(self._needs_step())
        with _no_inference():
            if not isinstance(self.engine, PipelinedEngine):
                return self.engine.run("__call__", *args, **kwargs)
            if "forward" in vars(self.module):
                # Fabric has put a redirection there, which would serve one micro-batch only.
                del vars(self.module)["forward"]
                raise RuntimeError(self._needs_step())
            return self._evaluate(self.engine, _call, (args, kwargs))

    def step(self, batch: Any, step_fn: StepFunction) -> Any:
        """One step under any layout; see :meth:`lightning_par.fabric.HybridStrategy.step`."""
        self._refuse_inside_a_step()
        trains = torch.is_grad_enabled()
        if not isinstance(self._precision, MixedPrecision):  # autocast knows better what to cast
            batch = self._precision.convert_input(batch)
        with _no_inference():
            if not isinstance(self.engine, PipelinedEngine):
                output = self._run_here(batch, step_fn)
            elif not trains:
                output = self._evaluate(self.engine, step_fn, batch)
            else:
                assert self._handover is not None
                output = self._handover.train(batch, step_fn)
        output = self._precision.convert_output(output)
        if trains:
            loss_of(output)
        return output

    def train(self, mode: bool = True) -> LaidOut:
        """Between training and evaluation the module shows its shards, and batch norms the first rank's statistics.

        To turn to evaluation is a collective: all ranks do it together.
        """
        self.engine.release()
        if self.training and not mode:
            self.engine.before_evaluation()
        return super().train(mode)

    def _run_here(self, batch: Any, step_fn: StepFunction) -> Any:
        def run() -> Any:
            with self._precision.forward_context():
                return self.engine.run(step_fn, batch)

        if self._pair is None or not self._pair.takes_part:
            return run()
        output = self._pair.mirror(run)
        if not self._pair.is_here and torch.is_grad_enabled():
            loss_of(output).requires_grad_()  # a backward of it leads nowhere
        return output

    def _evaluate(self, engine: PipelinedEngine, step_fn: StepFunction, batch: Any) -> Any:
        outputs = engine.evaluate_batch(step_fn, (batch,), {}, self._context)
        return engine.share_from_last(lambda: merge(outputs))

    def _context(self, is_last: bool) -> AbstractContextManager[Any]:
        return self._precision.forward_context()

    def _refuse_inside_a_step(self) -> None:
        if self.engine.is_running:
            raise RuntimeError(
                "step_fn called the module that fabric.setup returned. Let it call the module that it is given: "
                "def step_fn(module, batch): return loss(module(batch[0]), batch[1])"
            )

    def _needs_step(self) -> str:
        where = "a pipeline" if self._handover is not None else "a dedicated parameter server"
        return (
            f"Under {where} a plain call of the module can't be trained. Call loss = fabric.strategy.step(module, "
            "batch, step_fn) with step_fn(module, batch) -> loss, which works under every layout. To evaluate, call "
            "the module inside torch.no_grad(), on all ranks together."
        )


def _call(module: nn.Module, call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Any:
    args, kwargs = call
    return module(*args, **kwargs)


@contextmanager
def _no_inference() -> Iterator[None]:
    """Keep out of inference mode, whose tensors cannot be gathered into parameters that train later."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def refuse_plain_backward(loss: Tensor, is_in_backward: Callable[[], bool]) -> None:
    """Make ``loss.backward()`` fail that does not come through Fabric."""

    def check(gradient: Tensor) -> None:
        if not is_in_backward():
            raise RuntimeError(
                "loss.backward() leaves gradients unsynchronised. Call fabric.backward(loss), which knows the layout."
            )

    if loss.requires_grad:
        loss.register_hook(check)
