"""The part of the strategy that runs steps: through the engine, through a pipeline's stages, or on another rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor
from typing_extensions import override

from lightning_par.gradients import scale_gradients
from lightning_par.loss_weights import LossWeights
from lightning_par.offload import stepped_parameters
from lightning_par.pipeline_parallel.outputs import num_samples_of
from lightning_par.pipelined import PipelinedEngine
from lightning_par.strategies.data import check_equal_lengths, extra_steps, lockstep, seed_workers
from lightning_par.trainer.checkpoint_hooks import CheckpointHooks
from lightning_par.trainer.mirrored_steps import MirroredSteps
from lightning_par.trainer.pipeline_steps import PipelineSteps

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["StepHooks"]

Context: TypeAlias = Callable[[], AbstractContextManager[Any]]


class StepHooks(CheckpointHooks):
    """Runs the user's steps and their backwards."""

    _pipeline_steps: PipelineSteps | None = None
    _mirrored_steps: MirroredSteps | None = None
    _weights: LossWeights
    _loss_factor = 1.0
    _predict_steps_left: list[int | float]
    _predict_steps_extra: list[int]

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.train_step_context
        if self._pipeline_steps is not None:
            return self._pipeline_steps.train(args, self._loss_scale(), context, self._weights)
        output = self._run_step("training_step", context, args, kwargs)
        self._weigh(output)
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step("test_step", self.precision_plugin.test_step_context, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.predict_step_context
        predictions = self._run_step("predict_step", context, args, kwargs)
        for _ in range(self._steps_owed(*args[2:3])):
            self._run_step("predict_step", context, args, kwargs)
        return None if self.is_idle else predictions  # the first worker returns them

    def _run_step(self, method: str, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._pipeline_steps is not None:
            return self._pipeline_steps.evaluate(method, args, kwargs, context)

        def step() -> Any:
            with context():
                return self.engine.run(method, *args, **kwargs)

        return step() if self._mirrored_steps is None else self._mirrored_steps.run(step)

    def _loss_scale(self) -> float:
        """What Lightning would multiply a loss by before its backward, which a schedule runs inside the step."""
        assert self.lightning_module is not None
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        return scale / self.lightning_module.trainer.accumulate_grad_batches

    def _weigh(self, output: Any) -> None:
        """Look up by what the loss of this rank is multiplied before its backward."""
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization or output is None:  # backward has run, or will not
            return
        weights, counts = self._weights, not self.is_idle
        num_samples = weights.sum_over_ranks([output], counts)
        weights.add(num_samples)
        self._loss_factor = weights.factor(None if num_samples is None else num_samples_of(output))
        if num_samples is not None and module.trainer.accumulate_grad_batches > 1 and self.engine.offload is not None:
            self.engine.offload.hold_steps()

    def _close_window(self) -> None:
        """After the last backward of a window: make its gradients those of one mean over all its samples."""
        module = self.lightning_module
        assert module is not None
        if self.engine.is_accumulating or not module.automatic_optimization:
            return
        factor = self._weights.close(module.trainer.accumulate_grad_batches)
        if factor != 1.0:
            scale_gradients(
                {id(p): p for optimizer in self.optimizers for p in stepped_parameters(optimizer)}.values(), factor
            )

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self._pipeline_steps is None:
            factor, self._loss_factor = self._loss_factor, 1.0
            closure_loss = closure_loss if factor == 1.0 else closure_loss * factor
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        # The schedule has run it: what is left are the hooks, and the gradients.
        module = self.lightning_module
        assert module is not None
        assert isinstance(self._engine, PipelinedEngine)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)  # type: ignore[assignment]
        self._engine.hand_over_gradients()
        self._close_window()  # so that on_after_backward sees what one process has
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)  # type: ignore[assignment]
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def on_predict_start(self) -> None:
        self.engine.before_evaluation()
        # Prediction data is not padded. Where a forward gathers parameters over the data axis, ranks with fewer batches
        # repeat their last one for the others' sake, and throw the result away.
        assert self.lightning_module is not None
        num_batches = self.lightning_module.trainer.predict_loop.max_batches
        self._predict_steps_left = list(num_batches)
        self._predict_steps_extra = (
            extra_steps(num_batches, self.mesh.get_group("dp"), self.root_device)
            if self.engine.gathers_in_forward
            else [0] * len(num_batches)
        )

    def _steps_owed(self, dataloader_idx: int = 0) -> int:
        """How many steps to repeat after this one: none but after the last of a loader."""
        self._predict_steps_left[dataloader_idx] -= 1
        return self._predict_steps_extra[dataloader_idx] if self._predict_steps_left[dataloader_idx] == 0 else 0

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        assert self.lightning_module is not None
        group = self.mesh.get_group("dp")
        seed_workers(dataloader, self.data_parallel_rank)
        if not self.lightning_module.trainer.predicting:
            check_equal_lengths(dataloader, group)
        return lockstep(dataloader, group, self.root_device)

    @override
    def on_validation_start(self) -> None:
        self.engine.before_evaluation()

    @override
    def on_test_start(self) -> None:
        self.engine.before_evaluation()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self.engine.before_backward()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        self.engine.after_backward()
        self._close_window()

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.engine.accumulating():
            yield
