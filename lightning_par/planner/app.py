"""The planner as a program: from a resolved configuration to a printed plan."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from rich.console import Console
from torch import nn

from lightning_par.planner.cluster import Cluster
from lightning_par.planner.measure import measure_cluster
from lightning_par.planner.model import PlannedModel, optimizer_rule
from lightning_par.planner.plan import Plan
from lightning_par.planner.planner import make_plan
from lightning_par.planner.search import Workload
from lightning_par.planner.tables import print_plan
from lightning_par.reports.page import check_path
from lightning_par.reports.plan_page import write_plan_page

__all__ = ["cluster_of", "flags_to_overrides", "model_for", "plan_for", "run"]

STDOUT = "-"
_MODEL_GROUPS = ("model", "data", "optimizer")
_OWN_KEYS = ("data.batch_size",)
"""What the plan itself sets."""


def flags_to_overrides(arguments: Sequence[str]) -> list[str]:
    """``--json`` in Hydra's words."""
    return [f"json={STDOUT}" if argument == "--json" else argument for argument in arguments]


def run(config: Mapping[str, Any], overrides: Sequence[str] = ()) -> None:
    """Plan, print, and leave with exit code 1 if nothing fits.

    Args:
        config: The resolved configuration.
        overrides: What the user has set, to be repeated in the command.

    Raises:
        ValueError: If the configuration is impossible, or the page's directory does not exist.
    """
    page = Path(config["html"]) if config.get("html") else None
    if page is not None:
        check_path(page)  # before the work
    plan = plan_for(config, overrides)
    if int(os.environ.get("RANK", "0")):
        return  # under torchrun the first rank answers for all
    if page is not None:
        write_plan_page(plan, page)
    target = config.get("json")
    if target == STDOUT:
        json.dump(plan.to_dict(), sys.stdout, indent=2)
        print()
    else:
        print_plan(plan, Console(width=None if sys.stdout.isatty() else 160))
        if target:
            Path(target).write_text(json.dumps(plan.to_dict(), indent=2) + "\n")
    if plan.recommended is None:
        sys.exit(1)


def plan_for(config: Mapping[str, Any], overrides: Sequence[str] = ()) -> Plan:
    """The plan of a resolved configuration.

    Raises:
        ValueError: If the cluster, the precision or the batch is impossible.
    """
    cluster = cluster_of(config["cluster"])
    precision = config.get("precision") or ("bf16-mixed" if cluster.device.is_gpu else "32-true")
    model, notes = model_for(config, precision, _name(overrides))
    samples = config.get("global_batch") or config["data"].get("batch_size", 1) * cluster.num_devices
    given = [word for word in overrides if word.split("=")[0].split(".")[0].lstrip("+") in _MODEL_GROUPS]
    given = [word for word in given if word.split("=")[0] not in _OWN_KEYS]
    return make_plan(model, cluster, Workload(global_batch=samples), given, notes)


def model_for(
    config: Mapping[str, Any], precision: str, name: str = "", tensor_parallel_plan: Mapping[str, str] | None = None
) -> tuple[PlannedModel, list[str]]:
    """The model of a resolved configuration, built without memory, and what a reader must know of its batch.

    Args:
        config: With ``model``, ``data`` and ``optimizer``.
        precision: As ``Trainer(precision=...)``.
        name: What to call it, its class's name by default.
        tensor_parallel_plan: As the strategy's argument.

    Raises:
        ValueError: If the precision is unknown or the module has no parameters.
    """
    with torch.device("meta"):
        module: nn.Module = instantiate(config["model"])
    if callable(configure := getattr(module, "configure_model", None)):
        configure()
    batch, notes = _batch_of(config["data"])
    rule = optimizer_rule(instantiate(config["optimizer"]))
    model = PlannedModel(
        module, batch, precision=precision, optimizer=rule, tensor_parallel_plan=tensor_parallel_plan, name=name
    )
    return model, notes


def cluster_of(values: Mapping[str, Any]) -> Cluster:
    """The cluster of a ``cluster`` node, measured if it says so.

    Raises:
        ValueError: If a figure is impossible.
    """
    if not values.get("measure"):
        return Cluster.from_mapping(values)
    arguments = {key: value for key, value in values.items() if key not in ("measure", "_target_")}
    return measure_cluster(**arguments)


def _name(overrides: Sequence[str]) -> str:
    """The configuration's name; empty for the default one, which is called by its class."""
    return next((word.partition("=")[2] for word in reversed(overrides) if word.startswith("model=")), "")


def _batch_of(node: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """A batch of the data module: one it makes up for the purpose, or the first it would train on."""
    data = instantiate(node)
    if callable(sample := getattr(data, "sample_batch", None)):
        return sample(), []
    try:
        data.prepare_data()
        data.setup("fit")
        return next(iter(data.train_dataloader())), []
    except Exception as error:
        return None, [f"{type(data).__name__} gives no batch ({type(error).__name__}: {error})"]
