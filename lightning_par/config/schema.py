"""The shape of a run's configuration, and the types that guard it.

A run is one mapping. Each group under it is built by its ``_target_``; a key that is misspelt or of the wrong type
fails while the configuration is composed, before any process starts::

    seed: 42                     seeds every rank alike
    output_dir: <Hydra's>        where everything the run writes goes
    objective: val_loss          the logged metric that the run returns, for sweeps
    ckpt_path: null              a checkpoint to resume from, written under any layout

    model:      the LightningModule              (typed by whoever brings it; see examples/gpt/config.py)
    data:       the LightningDataModule          (the same)
    optimizer:  a partial: parameters -> optimizer; the model node refers to it as ${optimizer}
    strategy:   StrategyConfig   -> lightning_par.HybridStrategy
    trainer:    TrainerConfig    -> lightning.pytorch.Trainer
    launch:     LaunchConfig     -> lightning_par.launch.LaunchSettings
    logger:     name -> logger   null entries are left out; so is a logger whose package is missing
    callbacks:  name -> callback null entries are left out

The Trainer's remaining arguments are not in the file because they follow from the rest: ``strategy``, ``logger`` and
``callbacks`` are the objects above, ``devices`` and ``num_nodes`` what the launch found, ``default_root_dir`` is
``output_dir``.

A file takes its type from its defaults list: ``- /lightning_par/schema/strategy@_here_``. More arguments than the type
names can be given with Hydra's plus: ``+trainer.barebones=true``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

__all__ = [
    "SCHEMAS",
    "AdamWConfig",
    "AutoConfig",
    "ClusterConfig",
    "LaunchConfig",
    "OffloadConfig",
    "RunConfig",
    "SGDConfig",
    "StrategyConfig",
    "ThisClusterConfig",
    "TrainerConfig",
]


@dataclass
class Seconds:
    """A ``datetime.timedelta`` that can be written in a file."""

    _target_: str = "datetime.timedelta"
    seconds: float = 1800.0


@dataclass
class StrategyConfig:
    """Arguments of :class:`lightning_par.HybridStrategy`; at most one size may be ``auto``."""

    _target_: str = "lightning_par.HybridStrategy"
    _convert_: str = "all"
    data_parallel_size: int | str = "auto"
    tensor_parallel_size: int | str = 1
    pipeline_parallel_size: int | str = 1
    zero_stage: int = 0
    zero_shard_size: int | None = None
    tensor_parallel_plan: Any = None  # pattern -> style; not typed, because an empty typed mapping takes no override
    sync: str = "all_reduce"
    server_rank: int = 0
    dedicated: bool = False
    offload: Any = None  # "optimizer", "all" or an OffloadConfig
    find_unused_parameters: bool = True
    activation_checkpointing: bool | str = False
    schedule: str = "1f1b"
    num_microbatches: int | None = None
    num_eval_microbatches: int = 1
    num_virtual_stages: int | None = None
    pipeline_blocks: str | None = None
    pipeline_split: list[int] | None = None
    pipeline_first: list[str] = field(default_factory=list)
    pipeline_last: list[str] = field(default_factory=list)
    process_group_backend: str | None = None
    timeout: Seconds = field(default_factory=Seconds)


@dataclass
class OffloadConfig:
    """Arguments of :class:`lightning_par.OffloadPolicy`."""

    _target_: str = "lightning_par.OffloadPolicy"
    device: str = "cpu"
    path: str | None = None
    pin_memory: bool = True
    overlap: bool = True
    fraction: float = 1.0
    parameters: bool = False


@dataclass
class AutoConfig:
    """Arguments of :class:`lightning_par.AutoStrategy`."""

    _target_: str = "lightning_par.AutoStrategy"
    _convert_: str = "all"
    tensor_parallel_plan: Any = None
    find_unused_parameters: bool = True
    process_group_backend: str | None = None
    timeout: Seconds = field(default_factory=Seconds)


@dataclass
class TrainerConfig:
    """Arguments of :class:`lightning.pytorch.Trainer`, with its own defaults."""

    _target_: str = "lightning.pytorch.Trainer"
    accelerator: str = "auto"
    precision: int | str | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_time: str | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    fast_dev_run: bool | int = False
    overfit_batches: int | float = 0.0
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    val_check_interval: int | float | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = None
    log_every_n_steps: int | None = None
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = None
    deterministic: bool | str | None = None
    benchmark: bool | None = None
    use_distributed_sampler: bool = True
    detect_anomaly: bool = False
    profiler: str | None = None
    reload_dataloaders_every_n_epochs: int = 0


@dataclass
class LaunchConfig:
    """Arguments of :class:`lightning_par.launch.LaunchSettings`."""

    _target_: str = "lightning_par.launch.LaunchSettings"
    devices: int | None = None
    accelerator: str = "auto"
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    max_restarts: int = 0
    in_place: bool = False


@dataclass
class AdamWConfig:
    """Arguments of :class:`torch.optim.AdamW` but the parameters."""

    _target_: str = "torch.optim.AdamW"
    _partial_: bool = True
    _convert_: str = "all"
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 1e-2
    fused: bool | None = None
    foreach: bool | None = None


@dataclass
class SGDConfig:
    """Arguments of :class:`torch.optim.SGD` but the parameters."""

    _target_: str = "torch.optim.SGD"
    _partial_: bool = True
    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    fused: bool | None = None
    foreach: bool | None = None


@dataclass
class ClusterDevice:
    """Figures of :class:`lightning_par.planner.Device`."""

    name: str = MISSING
    memory: float = MISSING
    flops: dict[str, float] = field(default_factory=dict)
    memory_bandwidth: float = MISSING
    efficiency: float = 0.75
    overhead: float = 5e-6
    reserved: float = 0.0
    is_gpu: bool = True


@dataclass
class ClusterLink:
    """Figures of :class:`lightning_par.planner.Link`; those of a lone device, which uses none."""

    bandwidth: float = 1e9
    latency: float = 1e-4


@dataclass
class ClusterHost:
    """Figures of :class:`lightning_par.planner.Host`."""

    memory: float = MISSING
    memory_bandwidth: float = MISSING
    link: float = MISSING
    disk: Any = None  # capacity and bandwidth; not typed, because an absent typed mapping takes no override


@dataclass
class ClusterConfig:
    """Figures of :class:`lightning_par.planner.Cluster`, in bytes, seconds and FLOP/s."""

    name: str = MISSING
    device: ClusterDevice = field(default_factory=ClusterDevice)
    devices_per_node: int = 1
    nodes: int = 1
    inside: ClusterLink = field(default_factory=ClusterLink)
    between: ClusterLink = field(default_factory=ClusterLink)
    host: ClusterHost = field(default_factory=ClusterHost)
    source: str = ""


@dataclass
class ThisClusterConfig:
    """The machine at hand; ``None`` is what there is."""

    measure: bool = True
    devices_per_node: int | None = None
    nodes: int = 1
    accelerator: str = "auto"
    refresh: bool = False


@dataclass
class RunConfig:
    """The whole; see the module's docstring."""

    seed: int = 42
    output_dir: str = MISSING
    objective: str = "val_loss"
    ckpt_path: str | None = None
    model: Any = MISSING
    data: Any = MISSING
    optimizer: Any = MISSING
    strategy: Any = MISSING
    trainer: Any = MISSING
    launch: Any = MISSING
    logger: Any = field(default_factory=dict)
    callbacks: Any = field(default_factory=dict)


@dataclass
class PlanConfig:
    """The whole of ``conf/plan.yaml``."""

    model: Any = MISSING
    data: Any = MISSING
    optimizer: Any = MISSING
    cluster: Any = MISSING
    precision: str | None = None
    global_batch: int | None = None
    json: str | None = None
    html: str | None = None


SCHEMAS: dict[str, type] = {
    "run": RunConfig,
    "plan": PlanConfig,
    "strategy": StrategyConfig,
    "auto": AutoConfig,
    "offload": OffloadConfig,
    "trainer": TrainerConfig,
    "launch": LaunchConfig,
    "adamw": AdamWConfig,
    "sgd": SGDConfig,
    "cluster": ClusterConfig,
    "this_cluster": ThisClusterConfig,
}
"""Name -> type; the plugin in ``hydra_plugins`` serves them as ``lightning_par/schema/<name>``."""
