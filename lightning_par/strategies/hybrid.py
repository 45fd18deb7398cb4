"""What the Trainer's and Fabric's strategies have in common: their arguments, and the engine made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.activation_checkpointing import Checkpointing, check_checkpointing
from lightning_par.communication import CommunicationCounter
from lightning_par.engine import ParallelEngine
from lightning_par.gradients import local, total_norm
from lightning_par.layout import AUTO, Degree
from lightning_par.model_state import ModelStateBytes, expected_state_bytes, measure_state_bytes, total_state_bytes
from lightning_par.offload import Offload, resolve_offload, stepped_parameters
from lightning_par.pipeline_parallel.schedules import schedule_named
from lightning_par.pipelined import PipelinedEngine, PipelineOptions
from lightning_par.random_state import share_random_state
from lightning_par.strategies.checkpoints import Checkpoints
from lightning_par.strategies.mesh import DEFAULT_TIMEOUT
from lightning_par.strategies.mirror import Pair
from lightning_par.strategies.optimizers import check_steps_in_stages, choose_update
from lightning_par.strategies.precision import parameter_dtype
from lightning_par.strategies.sync import ALL_REDUCE, check_steps_on_server, check_sync

__all__ = ["Hybrid"]


class Hybrid(Checkpoints):
    """Data, tensor, pipeline and ZeRO parallelism in any combination.

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
        offload: What of the model state is kept off the device: ``None`` for nothing, ``"optimizer"`` for master
            weights and optimizer states, which the host then steps, ``"all"`` for parameters too, or an
            :class:`~lightning_par.offload.OffloadPolicy`. Needs a ``zero_stage``.
        find_unused_parameters: Whether to cope with parameters that a step does not use, on some ranks or on all; costs
            a small reduction a step.
        activation_checkpointing: Whether blocks compute their activations again in backward: ``True`` for all of them,
            ``"selective"`` for all but the results of matrix products and attention.
        schedule: Order of a pipeline's micro-batches: ``"gpipe"``, ``"1f1b"``, ``"interleaved_1f1b"``,
            ``"looped_bfs"``, ``"interleaved_zero_bubble"``, ``"zbv"`` or ``"dualpipev"``.
        num_microbatches: Parts that a pipeline cuts a batch into. ``None`` takes the smallest number that divides the
            batch and is at least four times ``pipeline_parallel_size``, or the largest there is.
        num_eval_microbatches: The same for validation, test and predict steps. With 1 a step sees the whole batch once,
            as in one process, and stages work one after the other. More let stages work at the same time, on smaller
            activations; the step is then called on parts of a batch, so that only means over samples stay exact.
        num_virtual_stages: Stages on each rank of a pipeline; ``None`` takes the schedule's own number.
        pipeline_blocks: Dotted name of the list of blocks that is split, ``None`` to find it.
        pipeline_split: Number of blocks of each stage, ``None`` to balance their cost.
        pipeline_first: Names of modules that belong to the first stage although they are registered after the blocks.
        pipeline_last: Names of modules that belong to the last stage although they are registered before the blocks.
        process_group_backend: ``"gloo"``, ``"nccl"`` ...; ``None`` chooses by device.
        timeout: How long a collective waits for a missing rank.
        **lightning: Lightning's own arguments: ``accelerator``, ``parallel_devices``, ``cluster_environment``,
            ``checkpoint_io``, and ``precision_plugin`` for the Trainer or ``precision`` for Fabric. Those that are not
            given are set by the Trainer or Fabric.

    Raises:
        ValueError: If the degrees or the stage make no sense by themselves, or do not fit the number of devices.
    """

    _engine: ParallelEngine | None = None

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
        offload: Offload = None,
        find_unused_parameters: bool = True,
        activation_checkpointing: Checkpointing = False,
        schedule: str = "1f1b",
        num_microbatches: int | None = None,
        num_eval_microbatches: int = 1,
        num_virtual_stages: int | None = None,
        pipeline_blocks: str | None = None,
        pipeline_split: Sequence[int] | None = None,
        pipeline_first: Sequence[str] = (),
        pipeline_last: Sequence[str] = (),
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        **lightning: Any,
    ) -> None:
        check_checkpointing(activation_checkpointing)
        self._pipeline = PipelineOptions(
            schedule=schedule,
            num_microbatches=num_microbatches,
            num_eval_microbatches=num_eval_microbatches,
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
            parameter_server=check_sync(sync, server_rank, dedicated, zero_stage),
            process_group_backend=process_group_backend,
            timeout=timeout,
            **lightning,
        )
        self.offload_policy = resolve_offload(offload, zero_stage)
        self.last_gradient_norm: Tensor | None = None
        self._plan = tensor_parallel_plan
        self._find_unused_parameters = find_unused_parameters
        self._activation_checkpointing = activation_checkpointing

    @property
    def engine(self) -> ParallelEngine:
        """The engine, once the module is set up.

        Raises:
            RuntimeError: If asked for earlier.
        """
        if self._engine is None:
            raise RuntimeError(f"The module is laid out when {self.starts}.")
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
        return total_state_bytes(self.model_state_by_place())

    def model_state_by_place(self) -> dict[str, ModelStateBytes]:
        """The same by place: ``"device"``, and with offload ``"host"`` or ``"disk"``; masters count as states."""
        if self.engine.offload is not None:
            return self.engine.offload.state_bytes()
        return {"device": measure_state_bytes(self.engine.parameters(), self.optimizers)}

    def expected_model_state_bytes(self) -> int:
        """Bytes per rank that the formula gives for Adam (:func:`~lightning_par.model_state.expected_state_bytes`)."""
        return expected_state_bytes(self.engine.parameters(), self.holds_optimizer_state)

    def expected_step_bytes(self) -> int:
        """The same while a step runs, with what its ZeRO stage and schedule keep whole until its last backward."""
        return self.expected_model_state_bytes() + self.engine.step_bytes()

    @property
    def whole_in_step(self) -> str:
        """What is sharded at rest and whole while a step runs, in words; empty if nothing is."""
        kinds = " and ".join(self.engine.whole_in_step) if self.layout.dp_shard > 1 else ""
        splits = self.layout.pp > 1 and schedule_named(self.schedule).splits_backward
        return (
            f"{kinds} whole, since {self.schedule} splits the backward"
            if kinds and splits
            else kinds and f"{kinds} whole"
        )

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm of all gradients of all optimizers, equal on every rank and to that of one process. A collective.

        Args:
            norm_type: Order of the norm, ``math.inf`` for the largest absolute value.

        Returns:
            Scalar float64 tensor.
        """
        stepped = [tensor for optimizer in self.optimizers for tensor in stepped_parameters(optimizer)]
        return total_norm(stepped, norm_type, self.engine.norm_scope)

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

    def set_world_ranks(self) -> None:
        """Fix this rank's place and the layout, and check what depends on its size."""
        super().set_world_ranks()
        if self._layout is not None and self._layout.pp > 1:
            self._pipeline.check(self._layout.pp)

    def make_engine(self, module: nn.Module, precision: Any, steps_inside: bool = False) -> ParallelEngine:
        """Lay a module out, in place.

        Args:
            module: The user's module.
            precision: Lightning's precision plugin.
            steps_inside: Whether the user's step runs backward and steps optimizers itself.
        """
        options: dict[str, Any] = {
            "device": self.root_device,
            "zero_stage": self.zero_stage,
            "tensor_parallel_plan": self._plan,
            "parameter_dtype": parameter_dtype(precision),
            "find_unused_parameters": self._find_unused_parameters,
            "steps_inside": steps_inside,
            "activation_checkpointing": self._activation_checkpointing,
            "parameter_server": self._parameter_server,
            "offload": self.offload_policy,
        }
        if self.layout.pp > 1:
            engine = PipelinedEngine(module, self.layout, self.mesh, options=self._pipeline, **options)
            self._warn_of_split_backward(engine)
            return engine
        return ParallelEngine(module, self.layout, self.mesh, **options)

    def _warn_of_split_backward(self, engine: PipelinedEngine) -> None:
        if self.zero_stage == 3 and engine.schedule.splits_backward and self.layout.dp_shard > 1:
            rank_zero_warn(
                f"schedule={self.schedule!r} splits the backward, and a weight's half of it needs the weight: so "
                "zero_stage=3 frees no parameters inside a step. From its first forward to its last backward this rank "
                f"holds {engine.step_bytes():,} bytes of whole parameters and gradients, as under zero_stage=1; "
                "between steps only its shards. To free them after each use choose a schedule that does not, "
                "such as '1f1b' or 'interleaved_1f1b'."
            )

    def idle_pair(self) -> Pair:
        """The rank that sees no data, and the one whose steps it takes over."""
        assert self.idle_rank is not None
        return Pair(self.mesh.get_group("dp"), 1 if self.idle_rank == 0 else 0, self.idle_rank, self.root_device)

    def share_random_state(self) -> None:
        """Let the ranks that share layers draw the same random numbers."""
        share_random_state(self.mesh.get_group("tp"), self.root_device)

    def connect_optimizer(self, optimizer: Optimizer, engine: ParallelEngine) -> None:
        """Let an optimizer update this rank's parameters well, and the engine know of it.

        Raises:
            MisconfigurationException: If it does not go with a parameter server or a pipeline.
            ValueError: If it can't be stepped where its states are to be.
        """
        if self._parameter_server is not None:
            check_steps_on_server(optimizer)
        if self.layout.pp > 1:
            check_steps_in_stages(optimizer)
        if engine.offload is None:
            choose_update(optimizer)
        else:
            engine.offload.attach(optimizer)

        def after_step(stepped: Optimizer, *_: Any) -> None:
            engine.after_optimizer_step([p for group in stepped.param_groups for p in group["params"]])

        optimizer.register_step_post_hook(after_step)

    def remember_norm(self, norm: Tensor) -> None:
        """Keep the total gradient norm before the last clipping."""
        self.last_gradient_norm = norm
