"""Mistakes in a configuration are refused before any rank starts, in a paragraph that names the nearest key."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from omegaconf import DictConfig

from examples.gpt.check import check
from lightning_par.config import ConfigError, as_config_errors, check_layout, explain, resolve
from tests.unit.configuration import CONF, compose_train, no_launcher


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with no_launcher():
        yield


@pytest.fixture
def composed(tmp_path: Path) -> Callable[..., DictConfig]:
    return partial(compose_train, tmp_path)


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
            ("strategy.timeout.second=3", "Did you mean strategy.timeout.seconds?"),
            ("callbacks.samplee=null", "Did you mean callbacks.sample?"),
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
        torchrun = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
        for name, value in {**torchrun, "WORLD_SIZE": "8"}.items():
            monkeypatch.setenv(name, value)
        assert check_layout(config).as_dict() == {"pp": 2, "dp_replicate": 2, "dp_shard": 1, "tp": 2}

    def test_layout_is_that_of_the_ranks_to_be_started_in_an_interactive_shell(self, composed, monkeypatch) -> None:
        shell = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_NAME": "bash"}
        for name, value in {**shell, "WORLD_SIZE": "1"}.items():  # the latter is left over from something
            monkeypatch.setenv(name, value)
        config = resolve(composed("strategy=hybrid", "trainer.accelerator=cpu", "launch.devices=4"))
        assert check_layout(config).as_dict() == {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "tp": 2}

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
