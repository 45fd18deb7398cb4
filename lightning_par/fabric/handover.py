"""Training steps of a pipeline under Fabric: the schedule runs backward at once, ``fabric.backward`` hands over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from torch import Tensor

from lightning_par.pipeline_parallel.microbatches import merge
from lightning_par.pipeline_parallel.outputs import loss_of
from lightning_par.pipelined import PipelinedEngine

__all__ = ["GradientHandover"]


class GradientHandover:
    """Gives a loss whose backward hands the schedule's gradients to the parameters.

    So a loop may divide the loss, add a number to it or scale it, as it would anywhere: the factor that arrives at the
    loss in its backward is the factor of the gradients.

    Args:
        engine: The engine.
        precision: Fabric's precision plugin.
    """

    def __init__(self, engine: PipelinedEngine, precision: Precision) -> None:
        self._engine = engine
        self._precision = precision
        # Of the accumulation window: the factors of its losses so far, its steps, and whether more are to come.
        self._factors: list[float] = []
        self._num_steps = 0
        self._is_open = False

    def train(self, batch: Any, step_fn: Callable[[Any, Any], Any]) -> Any:
        """Forward and backward of a batch, and the output with such a loss, on every rank.

        Raises:
            RuntimeError: If the loss of an earlier step of the window was not given to ``fabric.backward``.
        """
        engine = self._engine
        self._begin_step()
        scaler = getattr(self._precision, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        outputs = engine.train_batch((batch,), scale, self._context, step_fn)
        gradients = engine.take_gradients()
        output = engine.share_from_last(lambda: merge(outputs))

        def hand_over(factor: float) -> None:
            self._check_factor(factor / scale)
            engine.hand_over_gradients(gradients, factor / scale)

        anchor = torch.zeros((), device=engine.device, requires_grad=True)
        loss = _Handover.apply(anchor, loss_of(output), hand_over)
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def _context(self, is_last: bool) -> AbstractContextManager[Any]:
        return self._precision.forward_context()

    def _begin_step(self) -> None:
        is_lost = self._num_steps > len(self._factors)
        if self._engine.sums_window and is_lost and (self._factors or self._is_open):
            raise RuntimeError(
                "The loss of an earlier step was not given to fabric.backward, but under a pipeline its gradients are "
                "already part of the accumulation window. Give every loss of a window to fabric.backward."
            )
        if not self._is_open:
            self._factors, self._num_steps = [], 0
        self._num_steps += 1
        self._is_open = self._engine.is_accumulating

    def _check_factor(self, factor: float) -> None:
        """A schedule that leaves its gradients to the last of the window leaves them without their factor."""
        self._factors.append(factor)
        differs = any(abs(other - factor) > 1e-6 * abs(factor) for other in self._factors)
        if self._engine.sums_window and differs:
            raise ValueError(
                f"The losses of one accumulation window were multiplied by {self._factors}, but a pipeline over a "
                "sharded or replicated data axis reduces a window's gradients together. Multiply all by one number."
            )


class _Handover(torch.autograd.Function):
    """The loss as it is; its backward calls ``hand_over`` with the factor that it gets."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, hand_over: Callable[[float], None]) -> Tensor:
        ctx.hand_over = hand_over
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor, None, None]:
        ctx.hand_over(float(factors[0]))
        return torch.zeros_like(factors[0]), None, None
