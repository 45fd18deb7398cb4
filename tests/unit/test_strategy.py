"""What the strategy says before any process starts: names, layouts and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from lightning_par import DPStrategy, HybridStrategy, TPStrategy, ZeROStrategy
from lightning_par.checkpoint import to_plain
from lightning_par.gradients import NormScope
from lightning_par.strategies.mesh import _reduce_operation
from lightning_par.trainer.callbacks import format_bytes
from lightning_par.trainer.precision import connect_precision

CPU = torch.device("cpu")


def _trainer(strategy: Any, devices: int = 4, **options: Any) -> Trainer:
    return Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False, **options)


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        ("par_dp", "dp_replicate 4"),
        ("par_tp", "tp 4"),
        ("par_zero1", "dp_shard 4"),
        ("par_zero2", "dp_shard 4"),
        ("PAR_ZERO3", "dp_shard 4"),
        (DPStrategy(), "dp_replicate 4"),
        (TPStrategy(tensor_parallel_size=2, data_parallel_size="auto"), "dp_replicate 2 x tp 2"),
        (ZeROStrategy(stage=3, shard_size=2), "dp_replicate 2 x dp_shard 2"),
        (HybridStrategy(tensor_parallel_size=2, zero_stage=1), "dp_shard 2 x tp 2"),
    ],
)
def test_layout_is_known_from_the_trainer(strategy: Any, layout: str) -> None:
    trainer = _trainer(strategy)
    assert isinstance(trainer.strategy, HybridStrategy)
    assert str(trainer.strategy.layout) == layout
    assert trainer.strategy.is_distributed
    samplers = trainer.distributed_sampler_kwargs
    assert samplers == {"num_replicas": trainer.strategy.layout.data_parallel_size, "rank": 0}


def test_stage_of_registered_names() -> None:
    assert [_trainer(f"par_zero{stage}").strategy.zero_stage for stage in (1, 2, 3)] == [1, 2, 3]
    assert {"par_dp", "par_ps", "par_tp", "par_zero1", "par_zero2", "par_zero3"} <= set(
        StrategyRegistry.available_strategies()
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: HybridStrategy(zero_stage=5), "zero_stage=5 is unknown"),
        (lambda: ZeROStrategy(stage=0), "stage=0 shards nothing. Use DPStrategy"),
        (lambda: ZeROStrategy(stage=7), "zero_stage=7 is unknown"),
        (lambda: DPStrategy(sync="gossip"), "sync='gossip' is unknown. Choose 'all_reduce' or 'parameter_server'"),
        (lambda: DPStrategy(server_rank=1), "describe a server, and sync='all_reduce' has none"),
        (
            lambda: DPStrategy(sync="parameter_server", server_rank=-1),
            "server_rank=-1 must be an integer of at least 0",
        ),
        (lambda: HybridStrategy(sync="parameter_server", zero_stage=1), "zero_stage=1 shards"),
        (
            lambda: _trainer(DPStrategy(sync="parameter_server", server_rank=4)),
            "outside of the data axis, whose 4 rank",
        ),
        (
            lambda: _trainer(TPStrategy(sync="parameter_server", dedicated=True)),
            "the data axis has one rank, so nobody would have any",
        ),
        (lambda: HybridStrategy(pipeline_parallel_size=0), "pipeline_parallel_size=0 must be a positive integer"),
        (lambda: HybridStrategy(schedule="1f2b"), "schedule='1f2b' is unknown. Did you mean '1f1b'"),
        (lambda: HybridStrategy(num_virtual_stages=3), "num_virtual_stages=3 does not fit schedule='1f1b'"),
        (lambda: HybridStrategy(num_eval_microbatches=0), "num_eval_microbatches=0 must be a positive integer"),
        (lambda: HybridStrategy(activation_checkpointing="some"), "activation_checkpointing='some' is unknown"),
        (
            lambda: _trainer(HybridStrategy(pipeline_parallel_size=4, data_parallel_size=1, num_microbatches=2)),
            "num_microbatches=2 does not fit schedule='1f1b', which needs at least 4",
        ),
        (lambda: HybridStrategy(data_parallel_size="auto", tensor_parallel_size="auto"), "Only one degree"),
        (lambda: _trainer(HybridStrategy(tensor_parallel_size=3)), "3 does not divide 4"),
        (lambda: _trainer(HybridStrategy(data_parallel_size=2)), "= 2 ranks, but the job has 4"),
        (lambda: _trainer(TPStrategy(tensor_parallel_size=2)), "= 2 ranks, but the job has 4"),
    ],
)
def test_bad_layouts_fail_at_construction(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_wrong_tree_is_refused() -> None:
    with pytest.raises(ValueError, match="HybridStrategy"):
        Fabric(accelerator="cpu", devices=2, strategy=HybridStrategy())


def test_precision_that_changes_layers_is_refused() -> None:
    class Quantised(Precision):
        """Stands for plugins that replace layers."""

    with pytest.raises(MisconfigurationException, match="Quantised is not supported.*'bf16-mixed'"):
        connect_precision(Quantised(), CPU, lambda norm: None, NormScope)


def test_mesh_and_engine_say_when_they_exist() -> None:
    strategy = HybridStrategy()
    for name in ("layout", "mesh", "engine"):
        with pytest.raises(RuntimeError, match="Trainer"):
            getattr(strategy, name)


def test_averages_never_reach_the_backend() -> None:
    # gloo sums where it is told to average, without an error.
    average = torch.distributed.ReduceOp.AVG
    for operation in (None, "mean", "avg", "AVG", average):
        assert _reduce_operation(operation) == (torch.distributed.ReduceOp.SUM, True)
    assert _reduce_operation("sum") == (torch.distributed.ReduceOp.SUM, False)
    with pytest.raises(ValueError, match="reduce_op='median' is unknown. Choose one of mean"):
        _reduce_operation("median")


def test_to_plain() -> None:
    config = OmegaConf.create({"a": [1, {"b": "${c}"}], "c": 2})
    tensor = torch.ones(1)
    given = {"hyper_parameters": {"cfg": config, "path": Path("x/y")}, "state": [tensor, (1, config.a)]}
    plain = to_plain(given)
    assert plain["hyper_parameters"] == {"cfg": {"a": [1, {"b": 2}], "c": 2}, "path": "x/y"}
    assert plain["state"][0] is tensor
    assert plain["state"][1] == (1, [1, {"b": 2}])


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1.875e9, "1.88 GB"), (120e9, "120 GB"), (2.5e18, "2500 PB")],
)
def test_format_bytes(number: float, words: str) -> None:
    assert format_bytes(number) == words
