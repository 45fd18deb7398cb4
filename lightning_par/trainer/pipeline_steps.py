"""Lightning's steps under a pipeline: what the last stage returns and logs reaches every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_par.loss_weights import LossWeights
from lightning_par.pipeline_parallel.microbatches import merge
from lightning_par.pipeline_parallel.outputs import merge_weighted
from lightning_par.pipelined import PipelinedEngine
from lightning_par.trainer.looking_hooks import SEE_GRADIENTS, who_looks
from lightning_par.trainer.pipeline_logging import LogRecorder, replay

__all__ = ["PipelineSteps", "refuse_under_a_pipeline", "warn_of_own_stages"]

Precision: TypeAlias = Callable[[], AbstractContextManager[Any]]


class PipelineSteps:
    """Runs steps of a module that is split into stages.

    Outside of steps ``module(...)`` goes through all stages too, so that a callback may call it, on all ranks together.

    Args:
        engine: The engine.
        module: The user's module.
        precision: Context of such a call.
    """

    def __init__(self, engine: PipelinedEngine, module: LightningModule, precision: Precision) -> None:
        self._engine = engine
        self._module = module
        self._precision = precision
        self._has_warned = False
        vars(module)["forward"] = self._forward_outside

    def train(self, args: tuple[Any, ...], loss_scale: float, context: Precision, weights: LossWeights) -> Any:
        """Forward and backward of a batch; what the step returned is merged over micro-batches, on every rank."""
        engine = self._engine
        with self._inside() as recorder:
            around = partial(_around_stage, recorder, context)
            outputs = engine.train_batch(args, loss_scale, around, weights=weights)

        def result() -> Any:
            num_samples = weights.sum_over_ranks(outputs)
            return merge_weighted(outputs), recorder.take(), num_samples, engine.take_mismatch()

        merged, entries, num_samples, mismatch = engine.share_from_last(result)
        weights.add(num_samples)
        if mismatch is not None and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(str(mismatch))
        replay(self._module, entries)
        return merged

    def evaluate(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], context: Precision) -> Any:
        """Forward of a batch by ``validation_step``, ``test_step`` or ``predict_step``."""
        with self._inside() as recorder:
            outputs = self._engine.evaluate_batch(method, args, kwargs, partial(_around_stage, recorder, context))
        merged, entries = self._engine.share_from_last(lambda: (merge(outputs), recorder.take()))
        replay(self._module, entries)
        return merged

    @torch.no_grad()
    def _forward_outside(self, *args: Any, **kwargs: Any) -> Any:
        return self.evaluate("forward", args, kwargs, self._precision)

    @contextmanager
    def _inside(self) -> Iterator[LogRecorder]:
        """Around a batch: the module is itself again, but for what it logs."""
        copies: list[Any] = [tree.module for tree in self._engine.trees]  # with one stage a rank the module itself
        modules = {id(module): module for module in (self._module, *copies)}
        vars(self._module).pop("forward", None)
        try:
            with LogRecorder().recording(list(modules.values())) as recorder:
                yield recorder
        finally:
            vars(self._module)["forward"] = self._forward_outside


@contextmanager
def _around_stage(recorder: LogRecorder, precision: Precision, is_last: bool) -> Iterator[None]:
    """Mixed precision; and a stage that is left early logs and counts nothing."""
    with precision(), nullcontext() if is_last else recorder.unfinished():
        yield


def warn_of_own_stages(module: LightningModule, callbacks: Iterable[Callback]) -> None:
    """Say once which hooks may take this rank's gradients for those of the whole model."""
    hooks = who_looks(SEE_GRADIENTS, module, callbacks)
    if hooks:
        rank_zero_warn(
            f"{', '.join(hooks)} may look at gradients. Under a pipeline each rank has those of its own stages only, "
            "also in named_parameters(); trainer.strategy.gradient_norm() is the norm of all of them."
        )


def refuse_under_a_pipeline(module: LightningModule) -> None:
    """Refuse what can't be split into micro-batches and stages.

    Raises:
        MisconfigurationException: With the way out.
    """
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{type(module).__name__} optimizes by hand (automatic_optimization=False), but under a pipeline the "
            "schedule runs forwards and backwards. Use automatic optimization, or pipeline_parallel_size=1."
        )
    if is_overridden("backward", module):
        raise MisconfigurationException(
            f"{type(module).__name__} overrides backward(), but under a pipeline the schedule runs backwards. Remove "
            "the override, or use pipeline_parallel_size=1."
        )
