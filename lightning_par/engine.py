"""The engine: lays a module out over the ranks of a mesh, and runs its steps.

It splits the module into pipeline stages first (:mod:`lightning_par.pipelined`), then lays out each tree of modules
that is left (:mod:`lightning_par.tree`): tensor axis, activation checkpointing, data axis.

The engine knows torch and nothing of Lightning: trainers drive it through :meth:`ParallelEngine.run`,
:meth:`ParallelEngine.accumulating` and the gradient functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_par.activation_checkpointing import Checkpointing, check_checkpointing
from lightning_par.data_parallel import (
    ZERO_POLICIES,
    ParameterServer,
    ServerOptions,
    average_whole_gradients,
    places_in_several,
    whole_parameters,
)
from lightning_par.gradients import NormScope, is_sharded, local
from lightning_par.layout import ParallelLayout
from lightning_par.materialize import check_can_materialize
from lightning_par.model_state import count_parameters
from lightning_par.offload import ModelOffload, OffloadPolicy, make_tier
from lightning_par.restore import Footprint
from lightning_par.step import Step
from lightning_par.tensor_parallel import check_plan, check_replicated_gradients, resolve_plan
from lightning_par.tree import Settings, StepModule, Tree, equalize

__all__ = ["ParallelEngine", "engine_of"]


class _Link:
    """Ties a module to the engine that has laid it out, for whoever wants to lay it out in another way.

    It hangs on the module itself, so that both are freed together; a copy of the module has no engine.
    """

    NAME = "_parallel_engine_link"

    def __init__(self, engine: ParallelEngine | None = None) -> None:
        self.engine = engine

    def __reduce__(self) -> tuple[type[_Link], tuple[()]]:
        return _Link, ()


class ParallelEngine:
    """A module laid out over the ranks of a mesh.

    Args:
        module: The user's module, ordinary or (in whole or part) on the meta device. Changed in place.
        layout: The degrees.
        mesh: The mesh made by the layout.
        device: This rank's device.
        zero_stage: 0, 1, 2 or 3.
        tensor_parallel_plan: Dotted pattern -> style name; ``None`` takes the module's own plan.
        parameter_dtype: Type that sharded parameters are gathered and used in, ``None`` for their own.
        find_unused_parameters: Whether to cope with parameters that a step does not use, on some ranks or on all.
        steps_inside: Whether the user's step runs backward and steps optimizers itself.
        activation_checkpointing: Whether blocks compute their activations again in backward.
        parameter_server: Which rank of the data axis averages gradients and steps; ``None`` for all of them.
        offload: What is kept off the device, ``None`` for nothing.

    Raises:
        ValueError: If the layout does not suit the module (see :mod:`lightning_par.tensor_parallel`), or meta
            parameters cannot be initialised.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: ParallelLayout,
        mesh: DeviceMesh,
        *,
        device: torch.device,
        zero_stage: int = 0,
        tensor_parallel_plan: Mapping[str, str] | None = None,
        parameter_dtype: torch.dtype | None = None,
        find_unused_parameters: bool = True,
        steps_inside: bool = False,
        activation_checkpointing: Checkpointing = False,
        parameter_server: ServerOptions | None = None,
        offload: OffloadPolicy | None = None,
    ) -> None:
        check_checkpointing(activation_checkpointing)
        self.module = module
        self.layout = layout
        self.mesh = mesh
        self.device = device
        self.zero_stage = zero_stage
        self.num_parameters = count_parameters(module.parameters())
        policy = ZERO_POLICIES[zero_stage]
        if offload is not None and offload.parameters:
            policy = replace(policy, frees_after_use=True)  # their place is the host
        plan = resolve_plan(module, tensor_parallel_plan) if layout.tp > 1 else {}
        check_plan(module, plan, layout.tp)
        check_can_materialize(module)
        self._settings = Settings(
            layout=layout,
            mesh=mesh,
            device=device,
            policy=policy,
            plan=plan,
            parameter_dtype=parameter_dtype if policy.shards else None,
            find_unused_parameters=find_unused_parameters,
            steps_inside=steps_inside,
            activation_checkpointing=activation_checkpointing,
            parameter_server=parameter_server if layout.data_parallel_size > 1 else None,
            offload=offload,
            tier=None if offload is None else make_tier(offload, device),
        )
        self._is_last_micro_batch = True
        self._checks_gradients = layout.tp > 1
        roots = self._split()
        self._footprint = Footprint(module)
        shared = places_in_several([root.module for root in roots])
        self._trees = [Tree(root, self._settings, shared) for root in roots]
        self._whole = whole_parameters(module, shared) if self._settings.composes_units else []
        self.server = self._make_server()
        told_by = None if self.server is None else (self.server.group, self.server.rank)
        self._is_first_micro_batch = True
        self.offload = self._make_offload()
        self.norm_scope = NormScope(device=device, told_by=told_by)
        self._laid_out = _modules_with_parameters(module)
        self._footprint.complete()
        vars(module)[_Link.NAME] = _Link(self)

    def _split(self) -> list[Any]:
        """Cut the module into the trees that this rank calls."""
        return [StepModule(self.module)]

    def _make_server(self) -> ParameterServer | None:
        options = self._settings.parameter_server
        if options is None:
            return None
        return ParameterServer(
            self.module.parameters,
            self.mesh.get_group("dp"),
            options,
            # A schedule puts gradients together from micro-batches, and hands them over at its end.
            overlaps=self.layout.pp == 1,
            device=self.device,
        )

    def _make_offload(self) -> ModelOffload | None:
        settings = self._settings
        if settings.offload is None or settings.tier is None:
            return None
        units = [unit for tree in self._trees for unit in tree.offloaded_units()]
        # A step that optimizes by itself looks at gradients, and a schedule puts them together at its end.
        can_take = not settings.steps_inside and self.layout.pp == 1
        # With parameters that a rank may leave out, the ranks agree on who used what after backward.
        final = all(tree.used is None for tree in self._trees)
        return ModelOffload(
            settings.offload,
            settings.tier,
            self.device,
            units,
            whole=self._whole,
            can_take=can_take,
            final_in_backward=final,
        )

    @property
    def trees(self) -> list[Tree]:
        """The trees that this rank calls."""
        return self._trees

    def still_holds(self, module: nn.Module, mesh: DeviceMesh | None) -> bool:
        """Whether ``module`` is as this engine laid it out on ``mesh``."""
        same = module is self.module and mesh is self.mesh
        return same and self._laid_out == _modules_with_parameters(module)

    def remove(self) -> None:
        """Take the layout off the module again, which is left whole and on the host. A collective of the mesh."""
        self.release()
        if self.server is not None:
            self.server.close()
        if self.offload is not None:
            self.offload.detach()
        self._footprint.remove()
        del vars(self.module)[_Link.NAME]

    def run(self, method: Step, *args: Any, **kwargs: Any) -> Any:
        """Run one step of the user's module through the wrappers."""
        (tree,) = self._trees
        with nullcontext() if self.offload is None else self.offload.forward():
            return tree(method=method, args=args, kwargs=kwargs)

    @property
    def root(self) -> nn.Module:
        """The outermost wrapper of the module."""
        return self._trees[0].root if len(self._trees) == 1 else self.module

    @property
    def is_running(self) -> bool:
        """Whether a step is being run."""
        return any(tree.is_running for tree in self._trees)

    @property
    def gathers_in_forward(self) -> bool:
        """Whether a forward is a collective of the data axis."""
        return self._settings.policy.shards and self.layout.data_parallel_size > 1

    @property
    def is_accumulating(self) -> bool:
        """Whether the present step is not the last of its accumulation window."""
        return not self._is_last_micro_batch

    @property
    def whole_in_step(self) -> tuple[str, ...]:
        """What is sharded at rest and whole while a step runs: ``"parameters"``, ``"gradients"``."""
        policy = self._settings.policy
        if not policy.shards:
            return ()
        kinds = {"parameters": not policy.frees_after_use, "gradients": not policy.reduces_each_micro_batch}
        return tuple(kind for kind, is_whole in kinds.items() if is_whole)

    def step_bytes(self) -> int:
        """Bytes of model state that a step holds on this rank on top of those at rest: :attr:`whole_in_step`."""
        shards = self.layout.dp_shard
        sharded = [p for p in self.parameters() if shards > 1 and is_sharded(p, "dp_shard")]
        own = [local(p.detach()) for p in sharded]
        trained = [local(p.detach()) for p in sharded if p.requires_grad]
        dtype = self._settings.parameter_dtype
        sizes = {
            "parameters": sum(part.numel() * (dtype or part.dtype).itemsize for part in own),
            "gradients": sum(part.nbytes for part in trained),
        }
        return shards * sum(sizes[kind] for kind in self.whole_in_step)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context of a micro-batch that is not the last of its accumulation window."""
        self._is_last_micro_batch = False
        try:
            with ExitStack() as stack:
                for tree in self._trees:
                    stack.enter_context(tree.accumulating())
                yield
        finally:
            self._is_last_micro_batch = True

    def before_evaluation(self) -> None:
        """Give every rank the batch-norm statistics of the first, as the checkpoint has them. A collective."""
        if self.offload is not None:
            self.offload.settle()
        norms = (module for module in self.module.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
        options = self._settings.parameter_server
        first = int(options is not None and options.is_dedicated and options.rank == 0)  # an idle server has none
        equalize([buffer for norm in norms for buffer in norm.buffers(recurse=False)], self.mesh, data_source=first)

    def before_backward(self) -> None:
        """Tell the engine that a backward begins."""
        if self.offload is not None:
            self.offload.before_backward(self._is_first_micro_batch, self._is_last_micro_batch)
        self._is_first_micro_batch = self._is_last_micro_batch
        if self.server is not None:
            self.server.before_backward(self._is_last_micro_batch)
        for tree in self._trees:
            if tree.used is not None:
                tree.used.before_backward()

    def after_backward(self) -> None:
        """Tell the engine that a backward ended.

        Raises:
            ValueError: After the first backward, on every rank, if gradients of whole parameters differ over the tensor
                axis: the plan then forgets a layer, and training would let the ranks drift apart unseen.
        """
        if self._checks_gradients and any(parameter.grad is not None for parameter in self.module.parameters()):
            self._checks_gradients = False
            check_replicated_gradients(self.module, self.mesh["tp"])
        if self._is_last_micro_batch:
            self._finish_gradients()
        for tree in self._trees:
            tree.gather_again()

    def _finish_gradients(self) -> None:
        """After the last backward of a window: what the wrappers have left to do."""
        if self.server is not None:
            self.server.finish()
        whole = [parameter for parameter in self._whole if parameter.requires_grad]
        average_whole_gradients(whole, self.mesh.get_group("dp"), self.device)
        for tree in self._trees:
            if tree.used is not None:
                unused = tree.used.settle()
                if self.offload is not None:
                    self.offload.drop_gradients(unused)

    def release(self) -> None:
        """Free gathered copies of parameters, so that the module shows its shards as they are after the last step."""
        if self.offload is not None:
            self.offload.settle()
        for tree in self._trees:
            tree.release()

    def after_optimizer_step(self, stepped: Collection[Tensor]) -> None:
        """Tell the engine that an optimizer changed parameters. A collective of the data axis with a parameter server.

        Args:
            stepped: All parameters of the optimizer.
        """
        if self.server is not None:
            self.server.return_weights(stepped)
        for tree in self._trees:
            tree.release()
            tree.gather_again()

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters as optimizers see them (sharded where they are), tied ones once."""
        self.release()
        return list(self.module.parameters())


def engine_of(module: nn.Module) -> ParallelEngine | None:
    """The engine that has laid out ``module``, if one has."""
    link = vars(module).get(_Link.NAME)
    return link.engine if link is not None else None


def _modules_with_parameters(root: nn.Module) -> list[nn.Module]:
    return [module for module in root.modules() if module._parameters]
