"""One run from its resolved configuration: build, fit, and report.

This is what every rank executes. The configuration's shape is told in :mod:`lightning_par.config.schema`; objects are
built by their ``_target_``.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything

from lightning_par.launch import restart_count, trainer_resources
from lightning_par.picture import draw_run
from lightning_par.trainer.callbacks import Banner, ClosingSummary, ParallelProgressBar
from lightning_par.trainer.monitor import RunMonitor

__all__ = ["train"]

# Advice that does not fit here: loaders read memory-mapped tokens and need no workers, and what varies is recorded.
_NOISE = (
    ".*does not have many workers.*",
    ".*litlogger.*",
    ".*smaller than the logging interval.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*LeafSpec.*is deprecated.*",
)


def train(config: Mapping[str, Any]) -> float | None:
    """Fit a module as configured. Every rank calls this; ranks other than the first stay quiet.

    Args:
        config: The resolved configuration, plain containers only.

    Returns:
        The logged metric named by ``config["objective"]``, averaged over ranks, for sweepers; ``None`` if the run
        logged none by that name.
    """
    _quiet()
    seed_everything(config["seed"], workers=True, verbose=False)
    data: LightningDataModule = instantiate(config["data"])
    module: LightningModule = instantiate(config["model"])
    monitor = RunMonitor(config["output_dir"])
    trainer = _build_trainer(config, monitor)
    trainer.fit(module, datamodule=data, ckpt_path=_checkpoint_to_resume(config))
    if trainer.is_global_zero:
        _record_data(data, Path(config["output_dir"]))
        draw_run(Path(config["output_dir"]))
    return _objective(trainer, config["objective"])


def _build_trainer(config: Mapping[str, Any], monitor: RunMonitor) -> Trainer:
    callbacks: list[Callback] = [monitor, Banner(), *_instantiate_all(config.get("callbacks"))]
    if config["trainer"].get("enable_progress_bar", True) is not False:
        callbacks.append(ParallelProgressBar(monitor))
    callbacks.append(ClosingSummary(monitor))  # after the bar has let go of the terminal
    return instantiate(
        config["trainer"],
        strategy=instantiate(config["strategy"]),
        logger=_instantiate_all(config.get("logger")),
        callbacks=callbacks,
        default_root_dir=config["output_dir"],
        **trainer_resources(),
    )


def _record_data(data: LightningDataModule, output_dir: Path) -> None:
    """Write what the data was, if the data module can tell: losses on different data do not compare."""
    if (record := getattr(data, "record", None)) is not None:
        (output_dir / "data.json").write_text(json.dumps(record, indent=2, default=str) + "\n")


def _instantiate_all(nodes: Mapping[str, Any] | None) -> list[Any]:
    objects = [instantiate(node) for node in (nodes or {}).values() if node is not None]
    return [made for made in objects if made is not None]  # a logger whose package is missing


def _checkpoint_to_resume(config: Mapping[str, Any]) -> str | None:
    """The configured checkpoint, or this run's own last one when its ranks were started again."""
    last = Path(config["output_dir"]) / "checkpoints" / "last.ckpt"
    return str(last) if restart_count() > 0 and last.exists() else config.get("ckpt_path")


def _objective(trainer: Trainer, name: str) -> float | None:
    value = trainer.callback_metrics.get(name)
    if value is None:
        return None
    mean = float(trainer.strategy.reduce(value.float(), reduce_op="mean"))
    return mean if math.isfinite(mean) else math.inf


def _quiet() -> None:
    """Keep the terminal to what this run has to say."""
    for pattern in _NOISE:
        warnings.filterwarnings("ignore", pattern)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING)
