"""Every file of the configuration composes, and builds what it names, in the types of the schema."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from examples.gpt.check import check
from examples.gpt.module import GPTModule
from lightning_par import HybridStrategy
from lightning_par.config import ConfigError, as_config_errors, resolve, schema_of
from lightning_par.config.loggers import tensorboard_if_installed
from lightning_par.config.register import short_name
from lightning_par.config.schema import AdamWConfig, LaunchConfig, StrategyConfig, TrainerConfig
from lightning_par.launch import LaunchSettings
from tests.unit.configuration import CONF, GROUPS, compose_train, no_launcher, options, write_book

TRAINER_ALONE = {
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_checkpointing": "false",
}


def every_option() -> list[tuple[str, str]]:
    return [(group, option) for group in GROUPS for option in options(group)]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with no_launcher():
        yield


@pytest.fixture
def composed(tmp_path: Path) -> Callable[..., DictConfig]:
    return partial(compose_train, tmp_path)


class TestEveryFile:
    @pytest.mark.parametrize(("group", "option"), every_option())
    def test_it_composes_and_passes_the_checks(self, composed, tmp_path: Path, group: str, option: str) -> None:
        overrides = {
            "launch": ["launch.rdzv_endpoint=localhost:29400"],
            "trainer": ["trainer.accelerator=cpu"],
        }.get(group, [])
        if (group, option) == ("strategy", "hybrid"):
            overrides = ["launch.devices=4"]
        if (group, option) == ("data", "text"):
            overrides = [f"data.path={write_book(tmp_path)}"]
        plain = resolve(composed(f"{group}={option}", *overrides))
        assert type(plain["optimizer"]["lr"]) is float
        assert plain["model"]["optimizer"] == plain["optimizer"]
        if group != "model":  # those are built below
            check(plain)

    def test_all_keys_are_as_documented(self, composed) -> None:
        assert set(resolve(composed())) == {
            *("seed", "output_dir", "objective", "ckpt_path"),
            *("model", "data", "optimizer", "strategy", "trainer", "launch", "logger", "callbacks"),
        }

    def test_help_lists_every_group_and_option(self) -> None:
        template = OmegaConf.load(CONF / "hydra" / "default.yaml").help.template
        for group in GROUPS:
            line = re.search(rf"^  {group} .*$", template, re.MULTILINE)
            assert line, group
            listed = line.group().split("  ")[-1].strip()
            assert sorted(listed.split(", ")) == options(group)

    def test_no_file_holds_a_path_of_some_machine(self) -> None:
        for path in CONF.rglob("*.yaml"):
            assert not re.search(r"(^|[\s:=])/(home|root|tmp|work|mnt)/", path.read_text()), path


class TestObjects:
    @pytest.mark.parametrize(
        ("option", "degrees"),
        [
            ("dp", ("auto", 1, 0)),
            ("zero1", ("auto", 1, 1)),
            ("zero2", ("auto", 1, 2)),
            ("zero3", ("auto", 1, 3)),
            ("tp", (1, "auto", 0)),
            ("pp", (1, 1, 0)),
            ("hybrid", ("auto", 2, 0)),
        ],
    )
    def test_strategies(self, composed, option: str, degrees: tuple[Any, ...]) -> None:
        node = resolve(composed(f"strategy={option}", "strategy.timeout.seconds=60"))["strategy"]
        assert isinstance(instantiate(node), HybridStrategy)
        assert (node["data_parallel_size"], node["tensor_parallel_size"], node["zero_stage"]) == degrees
        assert instantiate(node["timeout"]) == timedelta(seconds=60)

    @pytest.mark.parametrize(
        ("option", "count"),
        [
            ("gpt_nano", 820_352),
            ("gpt_mini", 10_720_128),
            ("gpt2_small", 124_439_808),
            ("gpt2_medium", 354_823_168),
            ("gpt2_large", 774_030_080),
            ("gpt2_xl", 1_557_611_200),
            ("gpt_7b", 6_738_415_616),
        ],
    )
    def test_models_have_the_published_sizes(self, composed, option: str, count: int) -> None:
        node = resolve(composed(f"model={option}"))["model"]
        assert node["meta"] is (option == "gpt_7b")  # the only one too large to be built whole
        with torch.device("meta"):
            module = instantiate(node)
            module.configure_model()
        assert isinstance(module, GPTModule)
        assert sum(parameter.numel() for parameter in module.parameters()) == count

    @pytest.mark.parametrize(("option", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
    def test_optimizers(self, composed, option: str, kind: type) -> None:
        factory = instantiate(resolve(composed(f"optimizer={option}", "optimizer.lr=0.5"))["optimizer"])
        optimizer = factory([torch.nn.Parameter(torch.zeros(1))])
        assert type(optimizer) is kind
        # Checkpoints hold the groups: no node of the configuration may be among them.
        assert not [value for value in optimizer.param_groups[0].values() if OmegaConf.is_config(value)]
        assert optimizer.param_groups[0]["lr"] == 0.5

    @pytest.mark.parametrize("option", options("trainer"))
    def test_trainers(self, composed, option: str) -> None:
        overrides = [f"{key}={value}" for key, value in TRAINER_ALONE.items()]
        node = resolve(composed(f"trainer={option}", *overrides))["trainer"]
        trainer = instantiate(node, logger=False, devices=1)
        assert isinstance(trainer, pl.Trainer)
        assert trainer.max_steps == 500
        assert trainer.gradient_clip_val == 1.0

    def test_gpu_trainer_insists(self, composed) -> None:
        node = composed("trainer=gpu").trainer
        assert (node.accelerator, node.precision) == ("gpu", "bf16-mixed")

    @pytest.mark.parametrize("option", options("launch"))
    def test_launches(self, composed, option: str) -> None:
        overrides = ["launch.rdzv_endpoint=node0:29400", "trainer.accelerator=cpu", "launch.devices=3"]
        settings = instantiate(resolve(composed(f"launch={option}", *overrides))["launch"])
        assert isinstance(settings, LaunchSettings)
        assert (settings.devices, settings.accelerator) == (3, "cpu")
        assert settings.nnodes == (2 if option == "multi_node" else 1)

    def test_machines_need_a_place_to_meet(self, composed) -> None:
        with pytest.raises(ConfigError, match="launch.nnodes=2 needs launch.rdzv_endpoint"), as_config_errors():
            check(resolve(composed("launch=multi_node")))

    def test_csv_logger_writes_into_the_output_directory(self, composed, tmp_path: Path) -> None:
        logger = instantiate(resolve(composed("logger=csv"))["logger"]["csv"])
        logger.log_metrics({"loss": 1.0}, step=0)
        logger.save()
        assert (tmp_path / "out" / "csv" / "metrics.csv").exists()

    def test_tensorboard_is_left_out_where_it_is_missing(self, composed, tmp_path: Path, monkeypatch) -> None:
        pytest.importorskip("tensorboard")
        node = resolve(composed())["logger"]["tensorboard"]
        assert Path(instantiate(node).log_dir) == tmp_path / "out" / "tensorboard"

        def missing(*arguments: object, **named: object) -> None:
            raise ModuleNotFoundError("neither tensorboard nor tensorboardX")

        monkeypatch.setattr(pl.loggers.TensorBoardLogger, "__init__", missing)
        assert tensorboard_if_installed(str(tmp_path)) is None

    def test_comparison_sweeps_over_strategies_that_exist(self) -> None:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("train", ["experiment=compare_strategies"], return_hydra_config=True)
        swept = config.hydra.sweeper.params.strategy.split(",")
        assert config.hydra.mode.name == "MULTIRUN"
        assert len(swept) == 5
        assert set(swept) <= set(options("strategy"))


class TestSchema:
    """The schema may not drift from the classes it describes."""

    @staticmethod
    def defaults(schema: type) -> dict[str, Any]:
        return {
            field.name: field.default if field.default is not MISSING else field.default_factory()
            for field in fields(schema)
            if not field.name.startswith("_")
        }

    def test_strategy_has_all_arguments_with_their_defaults(self) -> None:
        parameters = inspect.signature(HybridStrategy).parameters
        expected = {name: p.default for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
        found = {k: tuple(v) if isinstance(v, list) else v for k, v in self.defaults(StrategyConfig).items()}
        assert timedelta(seconds=found.pop("timeout").seconds) == expected.pop("timeout")
        assert found == expected

    @pytest.mark.parametrize(
        ("schema", "target"),
        [(TrainerConfig, pl.Trainer), (AdamWConfig, torch.optim.AdamW), (LaunchConfig, LaunchSettings)],
    )
    def test_defaults_are_those_of_the_class(self, schema: type, target: type) -> None:
        parameters = inspect.signature(target).parameters
        for name, default in self.defaults(schema).items():
            expected = parameters[name].default
            assert (tuple(default) if isinstance(default, list) else default) == expected, name

    def test_schema_of_reads_types_and_defaults(self) -> None:
        class Inner:
            def __init__(self, width: int, name: str | None = None) -> None: ...

        class Outer:
            def __init__(
                self, inner: Inner, rate: float = 0.5, hook: Callable[[], None] = print, path: str = "x", **more: int
            ) -> None: ...

        schema = schema_of(Outer, nested={"inner": schema_of(Inner)}, required=["path"])
        node = OmegaConf.structured(schema)
        assert node._target_.endswith("Outer")
        assert node.rate == 0.5
        assert sorted(OmegaConf.missing_keys(node)) == ["hook", "inner.width", "path"]
        assert set(node) == {"_target_", "inner", "rate", "hook", "path"}
        node.inner.width = 3
        with pytest.raises(Exception, match="could not be converted to Integer"):
            node.inner.width = "three"
        with pytest.raises(Exception, match="could not be converted to Float"):
            node.rate = "fast"

    def test_schema_of_refuses_arguments_that_are_none(self) -> None:
        with pytest.raises(ValueError, match="GPTModule has no argument ntwork"):
            schema_of(GPTModule, nested={"ntwork": AdamWConfig})

    def test_short_name_makes_a_folder_of_overrides(self) -> None:
        assert short_name("launch.devices=2,strategy=zero1") == "devices=2,strategy=zero1"
        assert short_name("data.path=/a/b c") == "path=_a_b_c"
        assert short_name("+trainer.profiler=simple") == "profiler=simple"
        assert short_name("") == ""
        assert len(short_name("a" * 500)) == 80
