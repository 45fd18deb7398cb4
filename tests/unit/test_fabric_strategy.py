"""What Fabric's strategies say before any process starts: names, layouts and refusals."""

from __future__ import annotations

import inspect
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import StrategyRegistry

import lightning_par
from lightning_par import fabric as ours

PRESETS = ("HybridStrategy", "DPStrategy", "TPStrategy", "PPStrategy", "ZeROStrategy")


def _fabric(strategy: Any, devices: int = 4, **options: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=devices, strategy=strategy, **options)


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        ("par_dp", "dp_replicate 4"),
        ("par_ps", "dp_replicate 4"),
        ("PAR_TP", "tp 4"),
        ("par_pp", "pp 4"),
        ("par_zero3", "dp_shard 4"),
        (ours.ZeROStrategy(stage=3, shard_size=2), "dp_replicate 2 x dp_shard 2"),
        (ours.HybridStrategy(pipeline_parallel_size=2, tensor_parallel_size=2), "pp 2 x tp 2"),
    ],
)
def test_layout_is_known_from_fabric(strategy: Any, layout: str) -> None:
    strategy = _fabric(strategy).strategy
    assert isinstance(strategy, ours.HybridStrategy)
    assert str(strategy.layout) == layout
    assert strategy.distributed_sampler_kwargs == {"num_replicas": strategy.layout.data_parallel_size, "rank": 0}


def test_same_names_and_arguments_as_for_the_trainer() -> None:
    for name in PRESETS:
        signatures = [inspect.signature(getattr(package, name)) for package in (lightning_par, ours)]
        assert signatures[0] == signatures[1]
    names = {name for name in StrategyRegistry.available_strategies() if name.startswith("par_")}
    assert names == {name for name in STRATEGY_REGISTRY.available_strategies() if name.startswith("par_")}
    for name in names:
        assert STRATEGY_REGISTRY[name]["init_params"] == StrategyRegistry[name]["init_params"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_other_adapters_class_is_refused_with_the_right_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} for the Trainer; Fabric takes lightning_par.fabric.{name}"):
        _fabric(getattr(lightning_par, name)())
    with pytest.raises(ValueError, match=f"{name} for Fabric; a Trainer takes lightning_par.{name}"):
        pl.Trainer(accelerator="cpu", devices=4, strategy=getattr(ours, name)(), logger=False)


def test_bad_layouts_and_precisions_fail_at_construction() -> None:
    class Quantised(Precision):
        """Stands for plugins that replace layers."""

    with pytest.raises(ValueError, match="3 does not divide 4"):
        _fabric(ours.HybridStrategy(tensor_parallel_size=3))
    with pytest.raises(ValueError, match="outside of the data axis, whose 4 rank"):
        _fabric(ours.DPStrategy(sync="parameter_server", server_rank=4))
    with pytest.raises(MisconfigurationException, match="Quantised is not supported"):
        _fabric("par_dp", plugins=[Quantised()])


def test_auto_strategy_knows_no_layout_before_a_module() -> None:
    strategy = _fabric("par_auto").strategy
    with pytest.raises(RuntimeError, match=r"Call model, optimizer = fabric.setup\(model, optimizer\) first, and"):
        _ = strategy.distributed_sampler_kwargs
    with pytest.raises(RuntimeError, match="mesh is made when Fabric sets a module up for the first time"):
        _ = strategy.mesh
    with pytest.raises(ValueError, match="accumulate=0 must be at least 1"):
        ours.AutoStrategy(accumulate=0)
    with pytest.raises(
        ValueError, match="AutoStrategy for the Trainer; Fabric takes lightning_par.fabric.AutoStrategy"
    ):
        _fabric(lightning_par.AutoStrategy())


def test_mesh_and_engine_say_when_they_exist() -> None:
    strategy = ours.HybridStrategy()
    for name in ("layout", "mesh", "engine"):
        with pytest.raises(RuntimeError, match="Fabric"):
            getattr(strategy, name)
