"""The one test that matters: a run under any layout equals the run of one process.

`train` runs a scenario under a layout and records what a user can see of it: losses, every
gradient, learning rates, the weights and Adam moments at the end, the logged metrics.
`differences` compares two such records. One process sees the global batches in the order in which
the ranks together see them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from lightning_par import HybridStrategy
from lightning_par.engine import engine_of
from lightning_par.offload import OffloadPolicy
from lightning_par.pipeline_parallel import SCHEDULES
from lightning_par.pipeline_parallel.standins import Placeholder
from tests.dist.models import TinyGPT, token_data
from tests.dist.pieces import Pieces, Weights, assemble, piece, pieces

BATCH = 16
"""Samples in a global batch, whatever the layout."""
EPOCHS = 2
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""What every Trainer of the tests gets."""


@dataclass(frozen=True)
class Layout:
    """How many ranks, and what their strategy is made with (`None`: plain Lightning)."""

    name: str
    world_size: int = 1
    strategy: Mapping[str, Any] | None = None

    @property
    def tensor_parallel_size(self) -> int:
        return (self.strategy or {}).get("tensor_parallel_size", 1)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that see different batches."""
        on_axis = self.world_size // (self.tensor_parallel_size * self.pipeline_parallel_size)
        return on_axis - (self.strategy or {}).get("dedicated", False)

    @property
    def idle_ranks(self) -> range:
        """Ranks that see no data of their own."""
        strategy = self.strategy or {}
        first = strategy.get("server_rank", 0) * self.tensor_parallel_size
        return range(first, first + self.tensor_parallel_size * strategy.get("dedicated", False))

    @property
    def pipeline_parallel_size(self) -> int:
        return (self.strategy or {}).get("pipeline_parallel_size", 1)

    def trainer(self, **options: Any) -> Trainer:
        """A quiet Trainer on this layout's ranks."""
        strategy = "auto" if self.strategy is None else HybridStrategy(**self.strategy)
        return Trainer(**{**QUIET, "devices": self.world_size, "strategy": strategy, **options})


SINGLE = Layout("single")
INTERLEAVED = {"schedule": "interleaved_1f1b"}
LAYOUTS = {
    layout.name: layout
    for layout in [
        Layout("one rank", 1, {}),
        Layout("dp2", 2, {}),
        Layout("zero1x2", 2, {"zero_stage": 1}),
        Layout("zero2x2", 2, {"zero_stage": 2}),
        Layout("zero3x2", 2, {"zero_stage": 3}),
        Layout("tp2", 2, {"tensor_parallel_size": 2}),
        Layout("dp4", 4, {}),
        Layout("zero3x4", 4, {"zero_stage": 3}),
        Layout("zero3_hsdp2x2", 4, {"zero_stage": 3, "zero_shard_size": 2}),
        Layout("tp4", 4, {"tensor_parallel_size": 4}),
        Layout("dp2xtp2", 4, {"tensor_parallel_size": 2}),
        Layout("zero1x2xtp2", 4, {"zero_stage": 1, "tensor_parallel_size": 2}),
        Layout("zero2x2xtp2", 4, {"zero_stage": 2, "tensor_parallel_size": 2}),
        Layout("zero3x2xtp2", 4, {"zero_stage": 3, "tensor_parallel_size": 2}),
    ]
}


SERVER = {"sync": "parameter_server"}
SERVERS = {
    layout.name: layout
    for layout in [
        Layout("ps2", 2, SERVER),
        Layout("ps4", 4, {**SERVER, "server_rank": 1}),
        Layout("ps2+1", 3, {**SERVER, "dedicated": True}),
        Layout("ps2+1 last", 3, {**SERVER, "server_rank": 2, "dedicated": True}),
        Layout("ps1+1xtp2", 4, {**SERVER, "dedicated": True, "tensor_parallel_size": 2}),
        Layout("ps2xtp2", 4, {**SERVER, "server_rank": 1, "tensor_parallel_size": 2}),
        Layout("pp2xps2", 4, {**SERVER, "server_rank": 1, "pipeline_parallel_size": 2}),
    ]
}
PIPELINES = {
    layout.name: layout
    for layout in [
        Layout("pp2", 2, {"pipeline_parallel_size": 2}),
        Layout("pp4", 4, {"pipeline_parallel_size": 4}),
        *(
            Layout(f"pp2 {schedule}", 2, {"pipeline_parallel_size": 2, "schedule": schedule})
            for schedule in SCHEDULES
            if schedule != "1f1b"
        ),
        Layout("pp2xdp2", 4, {"pipeline_parallel_size": 2}),
        Layout("pp2xtp2", 4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        *(Layout(f"pp2xzero{stage}x2", 4, {"pipeline_parallel_size": 2, "zero_stage": stage}) for stage in (1, 2, 3)),
        Layout("pp2xzero3x2 interleaved_1f1b", 4, {"pipeline_parallel_size": 2, "zero_stage": 3, **INTERLEAVED}),
        Layout("pp2xzero3x2 zbv", 4, {"pipeline_parallel_size": 2, "zero_stage": 3, "schedule": "zbv"}),
        Layout("pp2xdp2xtp2", 8, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        *(
            Layout(
                f"pp2xzero{stage}x2xtp2",
                8,
                {"pipeline_parallel_size": 2, "zero_stage": stage, "tensor_parallel_size": 2},
            )
            for stage in (1, 2, 3)
        ),
    ]
}

ON_DISK = OffloadPolicy(device="disk", path=tempfile.gettempdir())
IN_PART = OffloadPolicy(fraction=0.5)
PARAMETERS_IN_PART_ON_DISK = OffloadPolicy(device="disk", path=tempfile.gettempdir(), parameters=True, fraction=0.5)
OFFLOADS = {
    layout.name: layout
    for layout in [
        Layout("zero1x1 optimizer off", 1, {"zero_stage": 1, "offload": "optimizer"}),
        Layout("zero2x1 on disk", 1, {"zero_stage": 2, "offload": ON_DISK}),
        Layout("zero3x1 all off", 1, {"zero_stage": 3, "offload": "all"}),
        Layout("zero1x2 optimizer off", 2, {"zero_stage": 1, "offload": "optimizer"}),
        Layout("zero2x2 half off", 2, {"zero_stage": 2, "offload": IN_PART}),
        Layout("zero3x2 on disk", 2, {"zero_stage": 3, "offload": ON_DISK}),
        Layout("zero1x2 all off", 2, {"zero_stage": 1, "offload": "all"}),
        Layout("zero2x2 all off", 2, {"zero_stage": 2, "offload": "all"}),
        Layout("zero3x2 all on disk", 2, {"zero_stage": 3, "offload": PARAMETERS_IN_PART_ON_DISK}),
        Layout("tp2 optimizer off", 2, {"zero_stage": 1, "tensor_parallel_size": 2, "offload": "optimizer"}),
        Layout("zero3x2xtp2 all off", 4, {"zero_stage": 3, "tensor_parallel_size": 2, "offload": "all"}),
    ]
}
OFFLOADED_PIPELINES = {
    layout.name: layout
    for layout in [
        Layout("pp2 optimizer off", 2, {"zero_stage": 1, "pipeline_parallel_size": 2, "offload": "optimizer"}),
        Layout("pp2xzero3x2 all off", 4, {"zero_stage": 3, "pipeline_parallel_size": 2, "offload": "all"}),
    ]
}

ALL = LAYOUTS | SERVERS | PIPELINES | OFFLOADS | OFFLOADED_PIPELINES


def layouts(*names: str) -> pytest.MarkDecorator:
    """Parametrise `layout` over the named layouts."""
    return pytest.mark.parametrize("layout", [ALL[name] for name in names], ids=names)


@dataclass(frozen=True)
class Scenario:
    """One way to train, told once for every layout.

    Attributes:
        model: Arguments of `TinyGPT`.
        trainer: Arguments of the Trainer.
        micro_batches: Each global batch comes in so many accumulated parts under a layout, and
            whole in the one process.
        num_samples: Size of the training set; 48 is three global batches an epoch.
        tolerance: Largest difference allowed, relative to the largest value of each tensor.
    """

    name: str
    model: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    num_samples: int = 3 * BATCH
    tolerance: float = 1e-5

    @property
    def clips_by_norm(self) -> bool:
        return "gradient_clip_val" in self.trainer and "gradient_clip_algorithm" not in self.trainer


@dataclass
class Outcome:
    """What one rank saw of a run; tensors are this rank's parts, named as in the user's module."""

    losses: list[float] = field(default_factory=list)
    local_losses: list[float] = field(default_factory=list)
    gradients: list[Pieces] = field(default_factory=list)
    clip_norms: list[float | None] = field(default_factory=list)
    learning_rates: list[list[float]] = field(default_factory=list)
    weights: Pieces = field(default_factory=dict)
    moments: Pieces = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class RanksTogether(Sampler[int]):
    """The samples in the order in which `num_ranks` ranks together see them, padding included."""

    def __init__(self, dataset: Dataset[Any], num_ranks: int) -> None:
        self._parts = [DistributedSampler(dataset, num_ranks, rank) for rank in range(num_ranks)]

    def set_epoch(self, epoch: int) -> None:
        for part in self._parts:
            part.set_epoch(epoch)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[int]:
        for indices in zip(*self._parts, strict=True):
            yield from indices


def train_loader(layout: Layout, data: Dataset[Any], global_batch: int, ranks_together: int = 1) -> DataLoader[Any]:
    """A loader of each rank's part of the global batches, which are the same under every layout.

    Under a strategy Lightning always shuffles training data, so the one process draws by the same sampler.

    Args:
        ranks_together: For the one process: the number of data ranks whose padding it follows.
    """
    if layout.strategy is None:
        return DataLoader(data, global_batch, sampler=RanksTogether(data, ranks_together))
    return DataLoader(data, global_batch // layout.data_parallel_size, shuffle=True)


class Recorder(Callback):
    """Fills an `Outcome` while a Trainer fits."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self._names: dict[Tensor, str] = {}

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.outcome.losses.append(trainer.callback_metrics["train_loss_step"].item())
        self.outcome.local_losses.append(trainer.callback_metrics["local_loss"].item())
        if trainer.global_step > len(self.outcome.clip_norms):
            norm = getattr(trainer.strategy, "last_gradient_norm", None)
            self.outcome.clip_norms.append(None if norm is None else float(norm))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TinyGPT, optimizer: Optimizer) -> None:
        self.see_gradients(pl_module, optimizer)

    def on_train_end(self, trainer: Trainer, pl_module: TinyGPT) -> None:
        self.see_end(pl_module, trainer.optimizers[0])

    def see_gradients(self, module: TinyGPT, optimizer: Optimizer) -> None:
        """Record gradients and learning rates before a step of the optimizer."""
        _check_tie(module)
        # Now, because a module may show gathered parameters at other times than its optimizer's.
        self._names = {parameter: name for name, parameter in named_parameters(module)}
        gradients = {name: parameter.grad for parameter, name in self._names.items()}
        self.outcome.gradients.append(pieces({k: v for k, v in gradients.items() if v is not None}))
        self.outcome.learning_rates.append([group["lr"] for group in optimizer.param_groups])

    def see_end(self, module: TinyGPT, optimizer: Optimizer) -> None:
        """Record weights and moments at the end."""
        _check_tie(module)
        self.outcome.weights = pieces(named_parameters(module))
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                self.outcome.moments[f"{self._names[parameter]}.{key}"] = piece(value)


def named_parameters(module: LightningModule) -> list[tuple[str, Tensor]]:
    """The module's parameters by their first names in the whole module, of which a stage may lack the first place."""
    first_names = getattr(engine_of(module), "first_name_of", {})
    return [(first_names.get(name, name), parameter) for name, parameter in module.named_parameters()]


def _check_tie(module: TinyGPT) -> None:
    if any(isinstance(inner, Placeholder) for inner in (module.net.head, module.net.tokens)):
        return  # they are on two stages
    is_tied = module.net.head.weight is module.net.tokens.weight
    assert is_tied == module.hparams["tied"], f"head and embedding are one parameter: {is_tied}"


def train(layout: Layout, scenario: Scenario, ranks_together: int = 1) -> Outcome:
    """Fit `TinyGPT` for `EPOCHS` epochs; call it on every rank of the layout.

    Args:
        ranks_together: For the one process: the number of data ranks whose order it follows.
    """
    options, micro_batches = dict(scenario.trainer), 1
    if layout.strategy is not None and scenario.micro_batches > 1:
        options["accumulate_grad_batches"] = micro_batches = scenario.micro_batches
    recorder = Recorder()
    torch.manual_seed(0)
    module = TinyGPT(**scenario.model)
    trainer = layout.trainer(max_epochs=EPOCHS, callbacks=[recorder], **options)
    data = token_data(scenario.num_samples)
    loader = train_loader(layout, data, BATCH // micro_batches, ranks_together)
    val_loader = DataLoader(token_data(16, seed=1), batch_size=8 // layout.data_parallel_size)
    trainer.fit(module, loader, val_loader)
    outcome = recorder.outcome
    outcome.metrics = {key: value.item() for key, value in trainer.callback_metrics.items()}
    return outcome


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value (or absolute, if that is 0)."""
    if actual.shape != expected.shape:
        return float("inf")
    scale = expected.abs().max().item() or 1.0
    return (actual - expected).abs().max().item() / scale


def tensors(outcomes: Sequence[Outcome]) -> Weights:
    """Gradients of every step, final weights and Adam moments, put together from all ranks."""
    whole = {"weight": assemble([outcome.weights for outcome in outcomes])}
    whole["moment"] = assemble([outcome.moments for outcome in outcomes])
    for step, parts in enumerate(zip(*(outcome.gradients for outcome in outcomes), strict=True)):
        whole[f"gradient {step}"] = assemble(parts)
    return {f"{kind} of {name}": tensor for kind, named in whole.items() for name, tensor in named.items()}


def gradient_norms(whole: Weights) -> list[float]:
    """Total norm before clipping, of each optimizer step in what `tensors` returns."""
    norms: dict[str, list[Tensor]] = {}
    for name, tensor in whole.items():
        if name.startswith("gradient"):
            norms.setdefault(name.split(" of ")[0], []).append(tensor.norm())
    return [torch.stack(step).norm().item() for step in norms.values()]


def numbers(outcome: Outcome, micro_batches: int = 1) -> dict[str, Any]:
    """What one rank saw of losses, learning rates and metrics.

    What is logged without `sync_dist` is left out: it is each rank's own.
    """
    windows = torch.tensor(outcome.losses).view(-1, micro_batches).mean(1)
    return {
        **{f"loss {step}": loss for step, loss in enumerate(windows)},
        **{f"learning rates {step}": torch.tensor(rates) for step, rates in enumerate(outcome.learning_rates)},
        **{name: value for name, value in outcome.metrics.items() if name not in ("local_loss", "train_loss_step")},
    }


def differences(actual: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> dict[str, float]:
    """The names whose numbers or tensors differ by more than `tolerance`, with the difference.

    A name that only one side has differs infinitely.
    """
    found = dict.fromkeys(actual.keys() ^ expected.keys(), float("inf"))
    for name in actual.keys() & expected.keys():
        pair = [torch.as_tensor(side[name]).double() for side in (actual, expected)]
        difference = relative_difference(*pair)
        if not difference <= tolerance:
            found[name] = difference
    return found


def report(found: Mapping[str, float], limit: int = 12) -> str:
    """The worst of the differences, in words."""
    worst = sorted(found, key=lambda name: (-found[name], name))
    lines = [f"{name} is off by {found[name]:.1e}" for name in worst[:limit]]
    return "\n".join([f"{len(found)} differences, of which the worst:", *lines])
