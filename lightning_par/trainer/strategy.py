"""The strategy: Lightning's hooks, answered by the engine."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from typing_extensions import override

from lightning_par.engine import engine_of
from lightning_par.loss_weights import LossWeights
from lightning_par.pipelined import PipelinedEngine
from lightning_par.process_group import rank_label
from lightning_par.strategies.sync import check_dedicated
from lightning_par.trainer.checkpoint_hooks import optimizer_order
from lightning_par.trainer.logged_keys import SameLoggedKeys
from lightning_par.trainer.metrics import sync_metrics_over
from lightning_par.trainer.mirrored_steps import MirroredSteps
from lightning_par.trainer.offload_overlap import overlap_unseen
from lightning_par.trainer.pipeline_metrics import adopt_states_from, adopt_states_over, stop_adopting
from lightning_par.trainer.pipeline_steps import PipelineSteps, refuse_under_a_pipeline, warn_of_own_stages
from lightning_par.trainer.precision import connect_precision
from lightning_par.trainer.step_hooks import StepHooks

if TYPE_CHECKING:
    from collections.abc import Generator

    from lightning.pytorch import Callback, Trainer

__all__ = ["HybridStrategy"]


class HybridStrategy(StepHooks):
    """Data, tensor, pipeline and ZeRO parallelism in any combination, for an unchanged LightningModule.

    The arguments are those of :class:`~lightning_par.strategies.hybrid.Hybrid`.
    """

    # Set-up

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
            self.precision_plugin, self.root_device, self.remember_norm, scope=lambda: self.engine.norm_scope
        )
        self._lay_out(trainer)
        self._weights = LossWeights(self.mesh.get_group("dp"), self.num_data_ranks, self.root_device)
        self._connect_metrics()
        self.share_random_state()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)
        _use_no_grad(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self.engine.offload is not None:
            overlap_unseen(trainer, self.engine.offload)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if trainer.state.fn == TrainerFn.FITTING and self.layout.pp > 1:
            warn_of_own_stages(self.lightning_module, callbacks)
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
        fits = trainer.state.fn == TrainerFn.FITTING
        if self._engine is not None and self.layout.pp > 1 and fits and self._optimizer_order is None:
            # Only a whole module tells how one process numbers what its optimizers hold.
            self._engine.remove()
            self._engine = None
        if self._engine is None or not self._engine.still_holds(module, self.mesh):
            self.precision_plugin.convert_module(module)  # in place
            self._optimizer_order = None
            if self.layout.pp > 1:
                refuse_under_a_pipeline(module)
                self._optimizer_order = optimizer_order(trainer, module) if fits else None
            self._engine = self.make_engine(module, self.precision_plugin, not module.automatic_optimization)
            if isinstance(self._engine, PipelinedEngine):
                self._pipeline_steps = PipelineSteps(self._engine, module, self.precision_plugin.forward_context)

    def _connect_metrics(self) -> None:
        """Count every sample once, and mirror what counts elsewhere."""
        module = self.lightning_module
        assert module is not None
        stop_adopting(module)
        sync_metrics_over(module, self.mesh.get_group("dp"), self.idle_rank)
        if isinstance(self._engine, PipelinedEngine):
            adopt_states_over(module, self.mesh.get_group("pp"), self._engine.last_rank, self.root_device)
        if self.idle_rank is not None:
            pair = self.idle_pair()
            if pair.takes_part:
                adopt_states_from(pair, module)
                self._mirrored_steps = MirroredSteps(module, pair)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        if self.engine.offload is not None:
            self.engine.offload.detach()  # an earlier fit's optimizers would take gradients from the new ones
        self.engine.parameters()  # optimizers must be given the sharded parameters
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self.connect_optimizer(optimizer, self.engine)

    @property
    @override
    def model(self) -> nn.Module | None:
        # Asked for anew each time: thawed parameters are wrapped anew, and nothing may keep the old wrapper.
        return self.lightning_module if self._engine is None else self._engine.root

    @model.setter
    def model(self, new_model: nn.Module | None) -> None:
        pass

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

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<{name} for the Trainer; Fabric takes lightning_par.fabric.{name}>"

    # The way out

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Say on stderr which rank failed, and where it stands on the mesh."""
        if not isinstance(exception, KeyboardInterrupt):
            print(f"{rank_label()} raised {type(exception).__name__}: {exception}", file=sys.stderr, flush=True)

    @override
    def teardown(self) -> None:
        if self._engine is not None and self._engine.offload is not None:
            # Whatever trains the module next, plain Lightning included, must find its gradients.
            self._engine.offload.observe(defers=False, takes_gradients=False, steps_in_backward=False)
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
