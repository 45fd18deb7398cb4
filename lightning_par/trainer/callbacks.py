"""What a person sees of a run: a banner at its start, a progress bar, and a summary at its end."""

from __future__ import annotations

import itertools
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from lightning_par.offload import OffloadPolicy
from lightning_par.trainer.monitor import RunMonitor
from lightning_par.trainer.strategy import HybridStrategy

__all__ = ["Banner", "ClosingSummary", "ParallelProgressBar", "format_bytes"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_AXIS_WORDS = {
    "pp": "pipeline ranks",
    "dp_replicate": "replicas",
    "dp_shard": "ZeRO shards",
    "tp": "tensor parts",
}


def format_bytes(number: float) -> str:
    """Bytes in decimal units, three digits: ``"1.88 GB"``."""
    for unit in _UNITS:
        if abs(number) < 1000 or unit == _UNITS[-1]:
            break
        number /= 1000
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"


def rank_grid(strategy: HybridStrategy) -> Table:
    """The layout as a grid, ranks in the cells.

    A row is a replica and shard of one pipeline rank, a column a tensor part; each pipeline rank is headed by its
    blocks.
    """
    layout = strategy.layout
    grid = Table.grid(padding=(0, 2))
    ranks = itertools.count()
    for stage_rank in range(layout.pp):
        if layout.pp > 1:
            grid.add_row(f"[dim]{strategy.blocks_of(stage_rank)}[/]")
        for replica, shard in itertools.product(range(layout.dp_replicate), range(layout.dp_shard)):
            name = f"replica {replica}" + (f", shard {shard}" if layout.dp_shard > 1 else "")
            grid.add_row(name, *(f"[bold]{next(ranks)}[/]" for _ in range(layout.tp)))
    return grid


class Banner(Callback):
    """Prints the layout, the parameters and the expected model state, once, on rank 0."""

    MAX_ROWS = 16

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print, if the strategy is one of this package's."""
        strategy = trainer.strategy
        if not isinstance(strategy, HybridStrategy):
            return
        facts = _facts(strategy)
        if not trainer.is_global_zero:
            return
        body = Table.grid(padding=(0, 4))
        layout = strategy.layout
        small = layout.pp * layout.data_parallel_size <= self.MAX_ROWS and layout.tp <= self.MAX_ROWS
        body.add_row(facts, rank_grid(strategy)) if small else body.add_row(facts)
        Console().print(Panel(body, title="lightning_par", expand=False))


def _facts(strategy: HybridStrategy) -> Table:
    layout = strategy.layout
    table = Table.grid(padding=(0, 1))
    degrees = [f"{size} {_AXIS_WORDS[axis]}" for axis, size in layout.as_dict().items() if size > 1]
    per_rank = sum(parameter.numel() for parameter in strategy.local_parameters())
    table.add_row("layout", " x ".join(degrees) or "one rank")
    table.add_row("ZeRO stage", str(strategy.zero_stage))
    if strategy.offload_policy is not None:
        table.add_row("off the device", _off_the_device(strategy.offload_policy))
    if layout.pp > 1:
        table.add_row("schedule", strategy.schedule)
    table.add_row("ranks", f"{layout.world_size} on {strategy.root_device.type}, {strategy.process_group_backend}")
    table.add_row("parameters", f"{strategy.total_num_parameters:,} ({per_rank:,} on this rank)")
    table.add_row("model state", f"{format_bytes(strategy.expected_model_state_bytes())} a rank expected with Adam")
    if kept := strategy.whole_in_step:
        table.add_row("in a step", f"{format_bytes(strategy.expected_step_bytes())}: {kept}")
    return table


def _off_the_device(policy: OffloadPolicy) -> str:
    what = "optimizer states and parameters" if policy.parameters else "optimizer states and master weights"
    part = "" if policy.fraction == 1 else f" of {policy.fraction:.0%} of the elements"
    return f"{what}{part}, {'in host memory' if policy.device == 'cpu' else f'in files in {policy.path}'}"


class ParallelProgressBar(RichProgressBar):
    """Lightning's rich progress bar with tokens per second and memory.

    Args:
        monitor: Where both are measured.
        **kwargs: Arguments of :class:`~lightning.pytorch.callbacks.RichProgressBar`.
    """

    def __init__(self, monitor: RunMonitor, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._monitor = monitor

    def _get_train_description(self, current_epoch: int) -> str:
        # Runs are bounded by steps: Lightning would show the unset number of epochs as -2.
        return f"Epoch {current_epoch}"

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Lightning's metrics and ours."""
        metrics: dict[str, Any] = dict(super().get_metrics(trainer, pl_module))
        metrics.pop("v_num", None)
        if (rate := self._monitor.recent_tokens_per_second()) is not None:
            metrics["tok/s"] = f"{rate:,.0f}"
        metrics["mem"] = format_bytes(self._monitor.memory_bytes())
        return metrics


class ClosingSummary(Callback):
    """Prints the run's summary on rank 0.

    Args:
        monitor: The measurements.
    """

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the summary that the monitor has written, once everything else has had its say."""
        summary = self._monitor.summary
        if stage != "fit" or not trainer.is_global_zero or summary is None:
            return
        table = Table.grid(padding=(0, 2))
        for name, value in _closing_rows(summary):
            table.add_row(name, value)
        Console().print(Panel(table, title="run", expand=False))


def _closing_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    loss, times = summary["train_loss"], summary["step_time_ms"]
    traffic = ", ".join(f"{axis} {format_bytes(n)}" for axis, n in summary["communication_bytes_per_step"].items())
    return [
        ("steps", f"{summary['steps']:,}"),
        ("train loss", f"{_number(loss['first'])} -> {_number(loss['last'])}"),
        ("val loss", _number(summary["val_loss"])),
        ("tokens/s", _number(summary["tokens_per_second"], ",.0f")),
        ("step time", f"{_number(times['median'], '.1f')} ms median, {_number(times['p90'], '.1f')} ms p90"),
        ("peak memory", format_bytes(max(summary["peak_memory_bytes"])) + " on the fullest rank"),
        ("model state", _state(summary)),
        ("traffic a step", traffic or "none"),
    ]


def _state(summary: dict[str, Any]) -> str:
    rest, in_step = max(summary["model_state_bytes"]), max(summary["model_state_in_step_bytes"])
    more = f", {format_bytes(in_step)} in a step" if in_step > rest else ""
    return f"{format_bytes(rest)} on the fullest rank{more}"


def _number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)
