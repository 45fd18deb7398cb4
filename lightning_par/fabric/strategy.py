"""The strategy: Fabric's hooks, answered by the engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.wrappers import _FabricModule
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.engine import ParallelEngine, engine_of
from lightning_par.fabric.checkpoint_file import CheckpointFile
from lightning_par.fabric.laid_out import LaidOut, StepFunction, refuse_plain_backward
from lightning_par.fabric.launcher import FabricLauncher
from lightning_par.fabric.optimizers import Repointing, owner_of
from lightning_par.gradients import clip_by_norm_, clip_by_value_
from lightning_par.offload import stepped_parameters
from lightning_par.pipeline_parallel.outputs import loss_of
from lightning_par.strategies.data import check_equal_lengths, lockstep, seed_workers
from lightning_par.strategies.hybrid import Hybrid
from lightning_par.strategies.precision import scale_together
from lightning_par.strategies.sync import check_dedicated

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH

__all__ = ["HybridStrategy"]

_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)


class HybridStrategy(Hybrid, ParallelStrategy):  # type: ignore[misc]
    """Data, tensor, pipeline and ZeRO parallelism in any combination, for a loop of your own.

    The arguments are those of :class:`~lightning_par.strategies.hybrid.Hybrid`.
    """

    driver = "Fabric"
    starts = "Fabric is launched (the mesh) and sets a module up (its layout)"

    # Training

    def step(self, module: nn.Module, batch: Any, step_fn: StepFunction) -> Any:
        """Run one step, under any layout.

        Without a pipeline this is one forward of ``step_fn``. Under a pipeline every stage calls it on each
        micro-batch, enters late and leaves early, and its backward is run along; :meth:`fabric.backward` then hands
        the gradients over. Inside ``torch.no_grad()`` there are only forwards.

        Args:
            module: What ``fabric.setup`` returned.
            batch: This rank's batch: tensors in any containers. Under a pipeline it is cut along the first dim.
            step_fn: ``step_fn(module, batch)`` calls the module that it is given on the batch that it is given, and
                returns the loss, a mean over samples; or a dictionary with it under ``"loss"``. All of it runs in mixed
                precision, if there is one. Without gradients it may return anything.

        Returns:
            What ``step_fn`` would have returned for the whole batch, on every rank of a replica. The loss is for
            ``fabric.backward`` alone.

        Raises:
            TypeError: If ``module`` is not set up.
            ValueError: If ``step_fn`` returns no loss in training.
        """
        output = self._laid_out(module, "fabric.strategy.step").step(batch, step_fn)
        if torch.is_grad_enabled():
            refuse_plain_backward(loss_of(output), lambda: self._is_in_backward)
        return output

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if not self._engines:
            raise RuntimeError(
                "fabric.backward was called before a module was set up. Call model, optimizer = fabric.setup(model, "
                "optimizer) first, and compute the loss with what it returns."
            )
        engines = [module.engine] if isinstance(module, LaidOut) else self._engines
        self._is_in_backward = True
        try:
            for engine in engines:
                engine.before_backward()
            super().backward(tensor, module, *args, **kwargs)
            for engine in engines:
                engine.after_backward()
        finally:
            self._is_in_backward = False

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        engine = self._laid_out(module, "fabric.clip_gradients").engine
        self.precision.unscale_gradients(optimizer)
        norm = clip_by_norm_(stepped_parameters(optimizer), max_norm, norm_type, engine.norm_scope, error_if_nonfinite)
        self.remember_norm(norm)
        return norm

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        self._laid_out(module, "fabric.clip_gradients")
        self.precision.unscale_gradients(optimizer)
        clip_by_value_(stepped_parameters(optimizer), clip_val)

    # Set-up

    def _set_world_ranks(self) -> None:
        """Begin; Fabric calls this as soon as it has given the strategy its parts."""
        self.optimizers: list[Optimizer] = []
        self._engines: list[ParallelEngine] = []
        self._names: dict[Optimizer, list[list[str]]] = {}
        self._is_in_backward = False
        self._backward_sync_control = _SyncControl()
        scale_together(self.precision, _PRECISIONS, self.root_device)
        self.set_world_ranks()

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = FabricLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Nothing to do: the engine moves each unit before it shards it."""

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        # Modules are created on the host (or, on request, on no device at all) and moved unit by unit.
        stack = ExitStack()
        stack.enter_context(torch.device("meta") if empty_init else nullcontext())
        stack.enter_context(self.precision.module_init_context())
        return stack

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        earlier = engine_of(module)
        if earlier is not None:
            earlier.remove()
            self._engines = [engine for engine in self._engines if engine is not earlier]
        pair = None
        if self.idle_rank is not None:
            check_dedicated(module, self.layout.pp)
            pair = self.idle_pair()
        self._engine = self.make_engine(module, self.precision)
        self._engines.append(self._engine)
        self.share_random_state()
        return LaidOut(self._engine, self.precision, pair)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if self.layout.pp > 1:
            raise RuntimeError(self._err_msg_joint_setup_required())
        for engine in owner_of(optimizer, self._engines):
            self.connect_optimizer(optimizer, engine)
        self.optimizers.append(optimizer)
        return optimizer

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any | None = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        if (earlier := engine_of(module)) is not None and earlier in self._engines:
            raise RuntimeError(
                "This module was set up before, and its optimizers refer to what it is made of now. Set up module and "
                "optimizers together once, or make the optimizer after fabric.setup_module and set it up by "
                "fabric.setup_optimizers."
            )
        repointings = [Repointing(optimizer, module, self._engines) for optimizer in optimizers]
        laid_out = self.setup_module(module)
        for repointing in repointings:
            optimizer = repointing.optimizer
            repointing.apply(self.engine)
            self._names[optimizer] = repointing.names
            self.connect_optimizer(optimizer, self.engine)
            if repointing.earlier["state"]:
                self.load_full_optimizer_state(self.engine, optimizer, repointing.earlier)
        self.optimizers.extend(optimizers)
        return laid_out, optimizers, scheduler

    @override
    def _err_msg_joint_setup_required(self) -> str:
        return (
            "Under a pipeline this rank's module has only some of the parameters, so an optimizer is made before: set "
            "up both together by model, optimizer = fabric.setup(model, optimizer)."
        )

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        group = self.mesh.get_group("dp")
        seed_workers(dataloader, self.data_parallel_rank)
        check_equal_lengths(dataloader, group)
        return lockstep(dataloader, group, self.root_device)

    def _laid_out(self, module: nn.Module, call: str) -> LaidOut:
        inner = module._forward_module if isinstance(module, _FabricModule) else module
        if isinstance(inner, torch._dynamo.OptimizedModule):
            raise TypeError(
                f"{call} can't take a module that was compiled as a whole. Compile parts of it, such as its blocks: "
                "for block in model.blocks: block.compile()"
            )
        if not isinstance(inner, LaidOut):
            raise TypeError(
                f"{call} was given {type(inner).__name__}, which is not set up. Give it what fabric.setup or "
                "fabric.setup_module returned."
            )
        return inner

    # Over ranks

    @override
    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks that see different batches (or over ``group``), in place where that can be.

        Fabric names all ranks where its user names none. Those that share a batch hold the same value, which counts
        once, as in one process.
        """
        result = self.reduce(tensor, self._data_axis(group), reduce_op)
        if isinstance(tensor, Tensor) and result is not tensor and result.dtype == tensor.dtype:
            tensor.data.copy_(result)
        return result

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from the ranks that see different batches (or from ``group``), stacked in a new first dim."""
        return super().all_gather(tensor, self._data_axis(group), sync_grads)

    def _data_axis(self, group: Any | None) -> Any | None:
        return None if dist.is_initialized() and group is dist.group.WORLD else group

    # Checkpoints

    @override
    def optimizer_names(self, optimizer: Optimizer) -> list[list[str]]:
        return self._names[optimizer]

    @override
    def save_checkpoint(
        self,
        path: _PATH,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        content = CheckpointFile(self).content(state, filter or {})
        if storage_options is not None or not self.write_ordinary_file(content, path):
            super().save_checkpoint(path, content, storage_options)

    @override
    def load_checkpoint(
        self, path: _PATH, state: Any | None = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        content = self.read_ordinary_file(path, weights_only)
        if content is None:
            content = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        return CheckpointFile(self).restore(content, state, strict)

    def engine_of_optimizer(self, optimizer: Optimizer) -> ParallelEngine | None:
        """The engine of the parameters of an optimizer that was set up."""
        known = any(optimizer is one for one in self.optimizers)
        return owner_of(optimizer, self._engines)[0] if known else None

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<{name} for Fabric; a Trainer takes lightning_par.{name}>"


class _SyncControl(_BackwardSyncControl):
    """Fabric's switch for micro-batches that are not the last of their accumulation window."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        if not enabled:
            return nullcontext()
        if not isinstance(module, LaidOut):
            raise TypeError("fabric.no_backward_sync needs the module that fabric.setup returned, uncompiled.")
        return module.engine.accumulating()
