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
from torch.optim import Optimizer
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
from lightning_par.trainer.logged_keys import SameLoggedKeys
from lightning_par.trainer.mesh_strategy import DEFAULT_TIMEOUT
from lightning_par.trainer.metrics import sync_metrics_over
from lightning_par.trainer.mirrored_steps import MirroredSteps, Pair
from lightning_par.trainer.optimizers import choose_update
from lightning_par.trainer.pipeline_checkpoint import OptimizerOrder, StagedCheckpoint, optimizer_order
from lightning_par.trainer.pipeline_metrics import adopt_states_from, adopt_states_over, stop_adopting
from lightning_par.trainer.pipeline_steps import PipelineSteps, refuse_under_a_pipeline
from lightning_par.trainer.precision import connect_precision, parameter_dtype
from lightning_par.trainer.step_hooks import StepHooks
from lightning_par.trainer.sync import ALL_REDUCE, check_dedicated, check_steps_on_server, check_sync

if TYPE_CHECKING:
    from collections.abc import Generator

    from lightning.pytorch import Callback, Trainer

__all__ = ["HybridStrategy"]


class HybridStrategy(StepHooks):
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
        sync: How ranks that see different batches keep one model: ``"all_reduce"``, or ``"parameter_server"``: one of
            them averages gradients, holds the only optimizer state, and hands the weights back.
        server_rank: Which of them is the server.
        dedicated: Whether the server sees no data.
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
        sync: str = ALL_REDUCE,
        server_rank: int = 0,
        dedicated: bool = False,
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
        self._parameter_server = check_sync(sync, server_rank, dedicated, zero_stage)
        self.last_gradient_norm: Tensor | None = None
        self._plan = tensor_parallel_plan
        self._find_unused_parameters = find_unused_parameters
        self._activation_checkpointing = activation_checkpointing
        self._optimizer_order: OptimizerOrder = []

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
        return expected_state_bytes(self.engine.parameters(), self.holds_optimizer_state)

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
        first = self.layout.coordinates(self.collecting_rank)
        keeps = all(index == first[axis] for axis, index in self.coordinates.items() if axis != "pp")
        return StagedCheckpoint(self._engine, self._optimizer_order, keeps)

    @property
    @override
    def idle_rank(self) -> int | None:
        server = self._parameter_server
        return None if server is None or not server.is_dedicated else server.rank

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.idle_rank == 0 and not self._skips_saving():
            self.engine.before_evaluation()  # batch-norm statistics: the rank that writes the file has seen no batch
        return super().lightning_module_state_dict()

    @property
    @override
    def holds_optimizer_state(self) -> bool:
        server = self.engine.server
        return server is None or server.is_server

    @property
    @override
    def collecting_rank(self) -> int:
        return 0 if self.engine.server is None else self.engine.server.rank * self.layout.tp

    # Set-up

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        if self._layout is not None and self._layout.pp > 1:
            self._pipeline.check(self._layout.pp)
        if self._layout is not None and self._parameter_server is not None:
            self._parameter_server.check(self._layout.data_parallel_size)

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
        self._connect_metrics()
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
        assert self.lightning_module is not None
        if self.idle_rank is not None:
            check_dedicated(self.lightning_module, self.layout.pp)

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
                "parameter_server": self._parameter_server,
            }
            self.precision_plugin.convert_module(module)  # in place
            if self.layout.pp > 1:
                refuse_under_a_pipeline(module)
                self._optimizer_order = optimizer_order(trainer, module)
                engine = PipelinedEngine(module, self.layout, self.mesh, options=self._pipeline, **options)
                self._pipeline_steps = PipelineSteps(engine, module, self.precision_plugin.forward_context)
                self._engine = engine
            else:
                self._engine = ParallelEngine(module, self.layout, self.mesh, **options)
        self.model = self._engine.root

    def _connect_metrics(self) -> None:
        """Count every sample once, and mirror what counts elsewhere."""
        module = self.lightning_module
        assert module is not None
        stop_adopting(module)
        sync_metrics_over(module, self.mesh.get_group("dp"), self.idle_rank)
        if isinstance(self._engine, PipelinedEngine):
            adopt_states_over(module, self.mesh.get_group("pp"), self._engine.last_rank, self.root_device)
        if self.idle_rank is not None:
            source = 1 if self.idle_rank == 0 else 0
            pair = Pair(self.mesh.get_group("dp"), source, self.idle_rank, self.root_device)
            if pair.takes_part:
                adopt_states_from(pair, module)
                self._mirrored_steps = MirroredSteps(module, pair)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        self.engine.parameters()  # optimizers must be given the sharded parameters
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if self._parameter_server is not None:
                check_steps_on_server(optimizer)
            choose_update(optimizer)
            optimizer.register_step_post_hook(self._after_optimizer_step)

    def _after_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.engine.after_optimizer_step([p for group in optimizer.param_groups for p in group["params"]])

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
