"""Every file of the configuration composes, builds what it names, and refuses mistakes by name."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from examples.gpt.check import check
from examples.gpt.config import register
from examples.gpt.module import GPTModule
from hydra_plugins import lightning_par_plugin
from lightning_par import HybridStrategy
from lightning_par.config import (
    ConfigError,
    as_config_errors,
    check_layout,
    explain,
    resolve,
    schema_of,
)
from lightning_par.config.loggers import tensorboard_if_installed
from lightning_par.config.register import short_name
from lightning_par.config.schema import AdamWConfig, LaunchConfig, StrategyConfig, TrainerConfig
from lightning_par.launch import LaunchSettings

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
GROUPS = ("model", "data", "optimizer", "strategy", "trainer", "launch", "logger", "experiment", "debug")
TRAINER_ALONE = {
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_checkpointing": "false",
}


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def every_option() -> list[tuple[str, str]]:
    return [(group, option) for group in GROUPS for option in options(group)]


register()


@pytest.fixture(autouse=True)
def _alone(monkeypatch) -> Iterator[None]:
    """No launcher around, and no Hydra left over."""
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    yield
    GlobalHydra.instance().clear()


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("It was a dark and stormy night. " * 1000)
    return path


@pytest.fixture
def composed(tmp_path: Path, book: Path) -> Callable[..., DictConfig]:
    """``composed("strategy=dp", ...)``: train.yaml with these overrides and a short text, no Hydra job around it."""

    def build(*overrides: str) -> DictConfig:
        own = [f"output_dir={tmp_path / 'out'}", f"data.cache_dir={tmp_path / 'cache'}"]
        if not any(override.startswith("data=") for override in overrides):
            own += ["data=text", f"data.path={book}"]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("train", overrides=[*own, *overrides])

    return build


class TestEveryFile:
    @pytest.mark.parametrize(("group", "option"), every_option())
    def test_it_composes_and_passes_the_checks(self, composed, book: Path, group: str, option: str) -> None:
        overrides = {
            "model": ["data.block_size=128"],
            "launch": ["launch.rdzv_endpoint=localhost:29400"],
            "trainer": ["trainer.accelerator=cpu"],
        }.get(group, [])
        if (group, option) == ("data", "text"):
            overrides = [f"data.path={book}"]
        plain = resolve(composed(f"{group}={option}", *overrides))
        assert type(plain["optimizer"]["lr"]) is float
        assert plain["model"]["optimizer"] == plain["optimizer"]
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
            ("hybrid", ("auto", 2, 2)),
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

    FILLED_BY_TRAINER = {
        *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    }

    @staticmethod
    def defaults(schema: type) -> dict[str, Any]:
        return {
            field.name: field.default if field.default is not MISSING else field.default_factory()
            for field in fields(schema)
            if not field.name.startswith("_")
        }

    def test_strategy_has_all_arguments_with_their_defaults(self) -> None:
        parameters = inspect.signature(HybridStrategy).parameters
        expected = {name: p.default for name, p in parameters.items() if name not in self.FILLED_BY_TRAINER}
        found = self.defaults(StrategyConfig)
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


class TestMistakes:
    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("strategy.zero_stge=2", "strategy.zero_stge: there is no such key. Did you mean strategy.zero_stage?"),
            ("trainer.max_step=3", "trainer.max_step: there is no such key. Did you mean trainer.max_steps?"),
            ("straegy=dp", "straegy: there is no such key. Did you mean strategy?"),
            ("sed=3", "sed: there is no such key. Did you mean seed?"),
            ("model.network.hiden_size=3", "Did you mean model.network.hidden_size?"),
            ("data.blocksize=3", "Did you mean data.block_size?"),
            ("optimizer.weigth_decay=3", "Did you mean optimizer.weight_decay?"),
            ("launch.device=3", "Did you mean launch.devices?"),
            ("strategy.timeout.seonds=3", "Did you mean strategy.timeout.seconds?"),
            ("callbacks.samle=null", "Did you mean callbacks.sample?"),
            ("hydra.sweep.dri=x", "Did you mean hydra.sweep.dir?"),
            ("strategy=zero4", "strategy=zero4: there is no such option. Did you mean strategy=zero3?"),
            ("data=txt", "Did you mean data=text?"),
            ("optimizer=adam", "Did you mean optimizer=adamw?"),
            ("experiment=qqq", "experiment=qqq: there is no such option\nOptions of experiment: compare_str"),
            ("trainer.max_steps=abc", "trainer.max_steps: Value 'abc' of type 'str' could not be converted to Integer"),
            ("launch.devices=two", "launch.devices: Value 'two'"),
            ("strategy.data_parallel_size=[1]", "strategy.data_parallel_size: Value '[1]' of type 'list'"),
            ("trainer.limit_val_batches=some", "trainer.limit_val_batches: Value 'some'"),
            ("optimizer.betas=[a,b]", "optimizer.betas[0]: Value 'a'"),
            ("model.network.vocab_size=x", "model.network.vocab_size: Value 'x'"),
            ("strategy.find_unused_parameters=perhaps", "strategy.find_unused_parameters: Value 'perhaps'"),
        ],
    )
    def test_composition_fails_and_names_the_nearest(self, composed, override: str, message: str) -> None:
        with pytest.raises(Exception, match=".") as caught:
            composed(override)
        assert message in explain(caught.value)

    def test_a_mistake_in_a_file_is_named_too(self, composed, tmp_path: Path) -> None:
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nstrategy:\n  zero_stge: 2\n")
        with pytest.raises(Exception, match=".") as caught:
            composed(f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine")
        assert "Did you mean strategy.zero_stage?" in explain(caught.value)

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["data.tokenizer=bpee"], "no such tokenizer. Did you mean data.tokenizer=bpe?"),
            (["data=text"], "data.path: a value must be given, as data.path=..."),
            (["data.vocab_size=${nowhere}"], "nowhere"),
        ],
    )
    def test_values_that_cannot_be_had_are_named(self, composed, overrides: list[str], message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            resolve(composed(*overrides))
        assert message in str(caught.value)

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["strategy.zero_stage=4"], "zero_stage=4"),
            (["strategy.data_parallel_size=3"], "= 3 ranks, but the job has 2"),
            (["strategy=tp", "launch.devices=8"], "heads"),
            (["strategy=hybrid", "launch.devices=3"], "does not"),
            (["model=gpt2_small", "strategy=tp"], "50257"),
            (["model.network.vocab_size=100"], "model.network.vocab_size=100 is less than the 256 tokens"),
            (["data.block_size=200"], "data.block_size=200 is longer than model.network.block_size=128"),
            (["model.network.num_heads=3"], "hidden_size=128 does not divide into num_heads=3"),
            (["data.path=/no/such/place"], "no such file or folder"),
            (["data.block_size=100000", "model.network.block_size=100000"], "give more text"),
            (["launch.devices=0"], "launch.devices=0"),
            (["+strategy.zero_stge=2"], "unexpected keyword argument 'zero_stge'"),
            (["strategy.tensor_parallel_plan={head:colwize}", "strategy=tp"], "colwize"),
        ],
    )
    def test_what_does_not_fit_is_refused_before_any_rank_starts(
        self, composed, overrides: list[str], message: str
    ) -> None:
        config = resolve(composed("trainer.accelerator=cpu", *overrides))
        with pytest.raises(ConfigError) as caught, as_config_errors():
            check(config)
        assert message in str(caught.value)

    def test_layout_is_that_of_the_ranks_a_launcher_started(self, composed, monkeypatch) -> None:
        config = resolve(composed("strategy=hybrid", "trainer.accelerator=cpu"))
        assert check_layout(config).as_dict() == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 2}
        monkeypatch.setenv("WORLD_SIZE", "8")
        assert check_layout(config).as_dict() == {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "tp": 2}

    def test_another_strategy_is_left_alone(self, composed) -> None:
        config = resolve(composed())
        config["strategy"] = {"_target_": "lightning.pytorch.strategies.DDPStrategy"}
        assert check_layout(config) is None

    def test_a_bug_is_no_mistake_in_the_configuration(self) -> None:
        with pytest.raises(RuntimeError, match="bug"), as_config_errors():
            raise RuntimeError("bug")


PROGRAM = """
from lightning_par.config import ConfigError, hydra_main
import os, examples.gpt.config
examples.gpt.config.register()

@hydra_main(config_path={conf!r}, config_name="train")
def main(config):
    print("job", config.seed, os.environ.get("HYDRA_FULL_ERROR"))
    if config.seed == 13:
        raise ConfigError("unlucky seed")
    return 1.0

if __name__ == "__main__":
    main()
"""


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def program(tmp_path: Path, monkeypatch, capfd) -> Callable[..., Outcome]:
    """Run a small program, as from a shell, with the example's configuration."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(conf=str(CONF)))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        code = 0
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as error:
            code = int(error.code or 0)
        return Outcome(code, *capfd.readouterr())

    return run


class TestProgram:
    def test_a_good_configuration_runs(self, program, tmp_path: Path) -> None:
        outcome = program("seed=7")
        assert (outcome.code, outcome.out) == (0, "job 7 None\n")
        assert len(list(tmp_path.glob("outputs/*/*/.hydra/config.yaml"))) == 1
        assert "HYDRA_FULL_ERROR" not in os.environ

    def test_a_misspelt_key_is_one_paragraph_and_exit_code_one(self, program) -> None:
        outcome = program("strategy.zero_stge=2")
        assert outcome.code == 1
        assert outcome.out == ""
        assert outcome.err.startswith("strategy.zero_stge: there is no such key. Did you mean strategy.zero_stage?")
        assert "Traceback" not in outcome.err
        assert "HYDRA_FULL_ERROR" not in os.environ

    def test_what_hydra_itself_trips_over_is_short_too(self, program) -> None:
        outcome = program("strategy.tensor_parallel_plan.head=colwise")
        assert outcome.code == 1
        assert "Traceback" not in outcome.err

    def test_full_errors_can_be_had(self, program, monkeypatch) -> None:
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        with pytest.raises(Exception, match="Could not override 'sed'"):
            program("sed=2")
        assert program("seed=7").out == "job 7 1\n"

    def test_a_refusal_by_the_task_is_printed_without_a_traceback(self, program) -> None:
        outcome = program("seed=13")
        assert outcome.code == 1
        assert "unlucky seed" in outcome.err
        assert "Traceback" not in outcome.err

    def test_a_mistake_in_a_sweep_stops_it_before_its_first_job(self, program) -> None:
        outcome = program("-m", "strategy=dp,zero4")
        assert outcome.code == 1
        assert "job" not in outcome.out
        assert "Did you mean strategy=zero3?" in outcome.err

    def test_a_failing_job_does_not_stop_a_sweep_but_tells_in_the_end(self, program, tmp_path: Path) -> None:
        outcome = program("-m", "seed=7,13,8")
        assert outcome.code == 1
        assert re.findall(r"job (\d+)", outcome.out) == ["7", "13", "8"]
        assert "unlucky seed" in outcome.err
        folders = {path.name for path in tmp_path.glob("multirun/*/*/*/")}
        assert folders == {"0_seed=7", "1_seed=13", "2_seed=8"}

    def test_help_explains_itself(self, program) -> None:
        outcome = program("--help")
        assert outcome.code == 0
        for word in ("Usage: python examples/train.py", "strategy=zero3", "zero_stage: 0", "--multirun"):
            assert word in outcome.out


class TestForeignApplication:
    @pytest.fixture
    def foreign(self, tmp_path: Path) -> Callable[..., DictConfig]:
        def build(text: str, *overrides: str) -> DictConfig:
            (tmp_path / "app.yaml").write_text(text)
            with initialize_config_dir(str(tmp_path), version_base="1.3"):
                return compose("app", overrides=list(overrides))

        return build

    def test_it_composes_a_strategy(self, foreign) -> None:
        config = foreign("defaults:\n  - lightning_par/strategy: zero3\n")
        assert config.lightning_par.strategy.zero_stage == 3
        assert isinstance(instantiate(config.lightning_par.strategy), HybridStrategy)

    def test_it_chooses_where_and_overrides(self, foreign) -> None:
        text = "defaults:\n  - lightning_par/strategy@strategy: zero3\n"
        assert foreign(text).strategy.zero_stage == 3
        config = foreign(text, "lightning_par/strategy@strategy=zero1", "strategy.zero_shard_size=2")
        assert (config.strategy.zero_stage, config.strategy.zero_shard_size) == (1, 2)

    def test_its_mistakes_are_named(self, foreign) -> None:
        text = "defaults:\n  - lightning_par/strategy@strategy: zero3\n"
        for override, message in (
            ("strategy.zero_stge=1", "Did you mean strategy.zero_stage?"),
            ("lightning_par/strategy@strategy=zero4", "Did you mean lightning_par/strategy=zero3?"),
        ):
            with pytest.raises(Exception, match=".") as caught:
                foreign(text, override)
            assert message in explain(caught.value)

    @pytest.mark.parametrize(
        ("group", "option"),
        [(group, option) for group in lightning_par_plugin.GROUPS for option in options(group)],
    )
    def test_every_offered_file_stands_on_its_own(self, foreign, group: str, option: str) -> None:
        config = foreign(f"defaults:\n  - lightning_par/{group}@node: {option}\n")
        OmegaConf.to_container(config, resolve=True, throw_on_missing=True)

    def test_its_own_files_come_first(self, foreign, tmp_path: Path) -> None:
        own = tmp_path / "lightning_par" / "strategy"
        own.mkdir(parents=True)
        (own / "zero3.yaml").write_text("mine: true\n")
        assert foreign("defaults:\n  - lightning_par/strategy@strategy: zero3\n").strategy == {"mine": True}

    def test_groups_and_options_can_be_listed(self, foreign) -> None:
        source = lightning_par_plugin.LightningParConfigSource("test", "lightning_par://")
        assert source.available()
        assert source.list("", None) == ["lightning_par"]
        assert source.list("lightning_par", None) == sorted(lightning_par_plugin.GROUPS)
        assert source.list("lightning_par/strategy", None) == options("strategy")
        assert not source.is_config("lightning_par/experiment/compare_strategies")
        assert not source.is_group("strategy")

    def test_it_needs_nothing_imported_and_others_pay_nothing(self, tmp_path: Path) -> None:
        """In a fresh interpreter: no torch until a group of ours is used, then all of it, at the first composition."""
        (tmp_path / "app.yaml").write_text("defaults:\n  - lightning_par/strategy@strategy: zero3\n")
        (tmp_path / "other.yaml").write_text("a: 1\n")
        program = (
            "import sys, hydra\n"
            "with hydra.initialize_config_dir(sys.argv[1], version_base='1.3'):\n"
            "    hydra.compose('other')\n"
            "    assert 'torch' not in sys.modules\n"
            "    assert hydra.compose('app', overrides=['strategy.zero_stage=2']).strategy.zero_stage == 2\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=55)

    def test_files_are_found_in_a_wheel_as_in_a_clone(self, tmp_path: Path, monkeypatch) -> None:
        package = tmp_path / "lightning_par"
        package.mkdir()
        (package / "__init__.py").touch()

        class Spec:
            origin = str(package / "__init__.py")

        monkeypatch.setattr(lightning_par_plugin.importlib.util, "find_spec", lambda name: Spec)
        assert lightning_par_plugin.conf_dir() == tmp_path / "conf"
        (package / "conf").mkdir()
        assert lightning_par_plugin.conf_dir() == package / "conf"
