"""The strategy: Lightning's hooks, answered by the engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_par.activation_checkpointing import Checkpointing, check_checkpointing
from lightning_par.communication import CommunicationCounter
from lightning_par.engine import ParallelEngine, engine_of
from lightning_par.gradients import local
from lightning_par.layout import AUTO, Degree
from lightning_par.model_state import ModelStateBytes, expected_state_bytes, measure_state_bytes
from lightning_par.pipelined import PipelinedEngine, PipelineOptions
from lightning_par.process_group import rank_label
from lightning_par.random_state import share_random_state
from lightning_par.trainer.checkpoint_hooks import CheckpointHooks
from lightning_par.trainer.data import check_equal_lengths, extra_steps, lockstep, seed_workers
from lightning_par.trainer.logged_keys import SameLoggedKeys
from lightning_par.trainer.mesh_strategy import DEFAULT_TIMEOUT
from lightning_par.trainer.metrics import sync_metrics_over
from lightning_par.trainer.optimizers import choose_update
from lightning_par.trainer.pipeline_checkpoint import OptimizerOrder, StagedCheckpoint, optimizer_order
from lightning_par.trainer.pipeline_metrics import adopt_states_over
from lightning_par.trainer.pipeline_steps import PipelineSteps, refuse_under_a_pipeline
from lightning_par.trainer.precision import connect_precision, parameter_dtype

if TYPE_CHECKING:
    from collections.abc import Generator

    from lightning.pytorch import Callback, Trainer

__all__ = ["HybridStrategy"]


class HybridStrategy(CheckpointHooks):
    """Data, tensor and ZeRO parallelism in any combination, for an unchanged LightningModule.

    Args:
        data_parallel_size: Number of ranks that see different batches; ``"auto"`` is what the others leave.
        tensor_parallel_size: Number of ranks that share each planned layer.
        pipeline_parallel_size: Number of ranks that the module's blocks are spread over, or ``"auto"``.
        zero_stage: 0 replicates the model state over the data axis, 1 shards optimizer states, 2 also gradients, 3
            also parameters.
        zero_shard_size: Ranks that share one copy of the model state, ``None`` for the whole data axis.
        tensor_parallel_plan: Dotted pattern of module names -> style in Hugging Face's words; ``None`` takes the plan
            of the module or its model.
        find_unused_parameters: Whether to cope with parameters that a step does not use, on some ranks or on all; costs
            a small reduction a step.
        activation_checkpointing: Whether blocks compute their activations again in backward: ``True`` for all of them,
            ``"selective"`` for all but the results of matrix products and attention.
        schedule: Order of a pipeline's micro-batches: ``"gpipe"``, ``"1f1b"``, ``"interleaved_1f1b"``,
            ``"looped_bfs"``, ``"interleaved_zero_bubble"``, ``"zbv"`` or ``"dualpipev"``.
        num_microbatches: Parts that a pipeline cuts a batch into. ``None`` takes the smallest number that divides the
            batch and is at least four times ``pipeline_parallel_size``, or the largest there is.
        num_virtual_stages: Stages on each rank of a pipeline; ``None`` takes the schedule's own number.
        pipeline_blocks: Dotted name of the list of blocks that is split, ``None`` to find it.
        pipeline_split: Number of blocks of each stage, ``None`` to balance their cost.
        pipeline_first: Names of modules that belong to the first stage although they are registered after the blocks.
        pipeline_last: Names of modules that belong to the last stage although they are registered before the blocks.
        process_group_backend: ``"gloo"``, ``"nccl"`` ...; ``None`` chooses by device.
        timeout: How long a collective waits for a missing rank.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer, or the user's own.
        checkpoint_io: Set by the Trainer, or the user's own.
        precision_plugin: Set by the Trainer, or the user's own.

    Raises:
        ValueError: If the degrees or the stage make no sense by themselves, or do not fit the number of devices.
    """

    def __init__(
        self,
        data_parallel_size: Degree = AUTO,
        tensor_parallel_size: Degree = 1,
        pipeline_parallel_size: Degree = 1,
        zero_stage: int = 0,
        zero_shard_size: int | None = None,
        tensor_parallel_plan: Mapping[str, str] | None = None,
        find_unused_parameters: bool = True,
        activation_checkpointing: Checkpointing = False,
        schedule: str = "1f1b",
        num_microbatches: int | None = None,
        num_virtual_stages: int | None = None,
        pipeline_blocks: str | None = None,
        pipeline_split: Sequence[int] | None = None,
        pipeline_first: Sequence[str] = (),
        pipeline_last: Sequence[str] = (),
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_checkpointing(activation_checkpointing)
        self._pipeline = PipelineOptions(
            schedule=schedule,
            num_microbatches=num_microbatches,
            num_virtual_stages=num_virtual_stages,
            blocks=pipeline_blocks,
            split=pipeline_split,
            first=pipeline_first,
            last=pipeline_last,
        )
        self._pipeline.check()
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            zero_stage=zero_stage,
            zero_shard_size=zero_shard_size,
            process_group_backend=process_group_backend,
            timeout=timeout,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.last_gradient_norm: Tensor | None = None
        self._plan = tensor_parallel_plan
        self._find_unused_parameters = find_unused_parameters
        self._activation_checkpointing = activation_checkpointing
        self._pipeline_steps: PipelineSteps | None = None
        self._optimizer_order: OptimizerOrder = []
        self._engine: ParallelEngine | None = None
        self._predict_steps_left: list[int | float] = []
        self._predict_steps_extra: list[int] = []

    @property
    def engine(self) -> ParallelEngine:
        """The engine, once the module is set up.

        Raises:
            RuntimeError: If asked for earlier.
        """
        if self._engine is None:
            raise RuntimeError("The module is laid out when the Trainer starts to fit, validate, test or predict.")
        return self._engine

    @property
    def total_num_parameters(self) -> int:
        """Number of parameters of the whole module, as one process counts them."""
        return self.engine.num_parameters

    def local_parameters(self) -> list[Tensor]:
        """This rank's part of every parameter."""
        return [local(parameter.detach()) for parameter in self.engine.parameters()]

    def model_state_bytes(self) -> ModelStateBytes:
        """Bytes of parameters, gradients and optimizer states that this rank holds, read off the tensors."""
        return measure_state_bytes(self.engine.parameters(), self.optimizers)

    def expected_model_state_bytes(self) -> int:
        """Bytes per rank that the formula gives for Adam (:func:`~lightning_par.model_state.expected_state_bytes`)."""
        return expected_state_bytes(self.engine.parameters())

    def count_communication(self) -> CommunicationCounter:
        """A context that counts this rank's collectives by axis."""
        return CommunicationCounter(self.mesh)

    @property
    def schedule(self) -> str:
        """Name of the pipeline's schedule."""
        return self._pipeline.schedule

    def blocks_of(self, pipeline_rank: int) -> str:
        """Which blocks a rank of the pipeline holds, in words."""
        assert isinstance(self._engine, PipelinedEngine)
        return self._engine.blocks_of(pipeline_rank)

    @property
    def staged_checkpoint(self) -> StagedCheckpoint | None:
        """Saves and loads what lies on several stages; ``None`` without a pipeline."""
        if not isinstance(self._engine, PipelinedEngine):
            return None
        keeps = all(index == 0 for axis, index in self.coordinates.items() if axis != "pp")
        return StagedCheckpoint(self._engine, self._optimizer_order, keeps)

    # Set-up

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        if self._layout is not None and self._layout.pp > 1:
            self._pipeline.check(self._layout.pp)

    @override
    def setup_environment(self) -> None:
        self._take_off_other_layout()
        super().setup_environment()

    def _take_off_other_layout(self) -> None:
        """Make a module whole again that is laid out in another way, while its process group still exists."""
        module = self.lightning_module
        assert module is not None
        earlier = engine_of(module)
        if earlier is not None and not (earlier is self._engine and earlier.still_holds(module, self._mesh)):
            earlier.remove()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self._refuse_unsupported()
        self.accelerator.setup(trainer)
        connect_precision(
            self.precision_plugin, self.root_device, self._remember_norm, scope=lambda: self.engine.norm_scope
        )
        self._lay_out(trainer)
        sync_metrics_over(self.lightning_module, self.mesh.get_group("dp"))
        share_random_state(self.mesh.get_group("tp"), self.root_device)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)
        _use_no_grad(trainer)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, SameLoggedKeys) for callback in callbacks):
            callbacks.insert(0, SameLoggedKeys())  # before any that reads what was logged

    def _refuse_unsupported(self) -> None:
        if self._layer_sync is not None:
            raise MisconfigurationException(
                "Trainer(sync_batchnorm=True) is not supported by this strategy. Leave it out if statistics of each "
                "rank's own batches will do, or use a layer or group norm, which need no other rank."
            )

    def _lay_out(self, trainer: Trainer) -> None:
        """Parallelise the module, or keep what an earlier fit, validate, test or predict has made of it."""
        module = self.lightning_module
        assert module is not None
        if self._engine is None or not self._engine.still_holds(module, self.mesh):
            options: dict[str, Any] = {
                "device": self.root_device,
                "zero_stage": self.zero_stage,
                "tensor_parallel_plan": self._plan,
                "parameter_dtype": parameter_dtype(self.precision_plugin),
                "find_unused_parameters": self._find_unused_parameters,
                "steps_inside": not module.automatic_optimization,
                "activation_checkpointing": self._activation_checkpointing,
            }
            self.precision_plugin.convert_module(module)  # in place
            if self.layout.pp > 1:
                refuse_under_a_pipeline(module)
                self._optimizer_order = optimizer_order(trainer, module)
                engine = PipelinedEngine(module, self.layout, self.mesh, options=self._pipeline, **options)
                self._pipeline_steps = PipelineSteps(engine, module, self.precision_plugin.forward_context)
                adopt_states_over(module, self.mesh.get_group("pp"), engine.last_rank, self.root_device)
                self._engine = engine
            else:
                self._engine = ParallelEngine(module, self.layout, self.mesh, **options)
        self.model = self._engine.root

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        self.engine.parameters()  # optimizers must be given the sharded parameters
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            choose_update(optimizer)
            optimizer.register_step_post_hook(lambda *_: self.engine.after_optimizer_step())

    @override
    def model_to_device(self) -> None:
        """Nothing to do: the engine moves each unit before it shards it."""

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Modules are created on the host (or, on request, on no device at all) and moved unit by unit.
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    # Between steps the module shows its sharded parameters, not copies gathered for the last forward.

    @override
    def on_train_end(self) -> None:
        self.engine.release()

    @override
    def on_validation_end(self) -> None:
        self.engine.release()

    @override
    def on_test_end(self) -> None:
        self.engine.release()

    @override
    def on_predict_end(self) -> None:
        self.engine.release()

    # Steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline_steps is not None:
            scale = self._loss_scale()
            return self._pipeline_steps.train(args, scale, self.precision_plugin.train_step_context)
        with self.precision_plugin.train_step_context():
            return self.engine.run("training_step", *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline_steps is not None:
            context = self.precision_plugin.val_step_context
            return self._pipeline_steps.evaluate("validation_step", args, kwargs, context)
        with self.precision_plugin.val_step_context():
            return self.engine.run("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline_steps is not None:
            context = self.precision_plugin.test_step_context
            return self._pipeline_steps.evaluate("test_step", args, kwargs, context)
        with self.precision_plugin.test_step_context():
            return self.engine.run("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        predictions = self._predict_once(args, kwargs)
        for _ in range(self._steps_owed(*args[2:3])):
            self._predict_once(args, kwargs)
        return predictions

    def _predict_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context = self.precision_plugin.predict_step_context
        if self._pipeline_steps is not None:
            return self._pipeline_steps.evaluate("predict_step", args, kwargs, context)
        with context():
            return self.engine.run("predict_step", *args, **kwargs)

    def _loss_scale(self) -> float:
        """What Lightning would multiply a loss by before its backward, which a schedule runs inside the step."""
        assert self.lightning_module is not None
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        return scale / self.lightning_module.trainer.accumulate_grad_batches

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self._pipeline_steps is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        # The schedule has run it: what is left are the hooks, and the gradients.
        module = self.lightning_module
        assert module is not None
        assert isinstance(self._engine, PipelinedEngine)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)  # type: ignore[assignment]
        self._engine.hand_over_gradients()
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

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.engine.accumulating():
            yield

    def _remember_norm(self, norm: Tensor) -> None:
        self.last_gradient_norm = norm

    # The way out

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Say on stderr which rank failed, and where it stands on the mesh."""
        if not isinstance(exception, KeyboardInterrupt):
            print(f"{rank_label()} raised {type(exception).__name__}: {exception}", file=sys.stderr, flush=True)

    @override
    def teardown(self) -> None:
        # Shards stay where they are, so that saving, testing and predicting go on after a fit; so does the process
        # group, which the next set-up replaces if it needs another.
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _use_no_grad(trainer: Trainer) -> None:
    """Keep evaluation out of inference mode, whose tensors cannot be gathered into parameters that train later."""
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False
