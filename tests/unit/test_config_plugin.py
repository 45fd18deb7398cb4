"""Another Hydra application composes our groups."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from hydra_plugins import lightning_par_plugin
from lightning_par import HybridStrategy
from lightning_par.config import explain
from tests.unit.configuration import ROOT, no_launcher, options


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with no_launcher():
        yield


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

    @pytest.mark.timeout(240)
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
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=200)

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
