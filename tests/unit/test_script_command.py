"""The command line of a script's other ranks survives Hydra's grammar and the shell-less start."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from lightning_par.strategies.script_command import _quoted, child_command, current_job


@pytest.mark.parametrize(
    "text",
    [
        "/plain/path",
        "/sp ace/a=b,c=[1,2]",
        "it's",
        'double "quotes"',
        "{x: 1}, (y)",
        "50% #1 @home ~ !",
        "back\\slash\\'s",
        "ends with \\",
        "ünï/cødé",
        "$HOME ${not:resolved}",
    ],
)
def test_any_directory_is_one_value(text: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"hydra.run.dir={_quoted(text)}"])
    assert OmegaConf.create({"dir": override.value()}).dir == text


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "-cn", "other", "a=1,2", "hydra.sweep.dir=x"])


@pytest.mark.usefixtures("script")
def test_without_hydra_the_command_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command, directory = child_command()
    assert command == [sys.executable, str(tmp_path / "train.py"), *sys.argv[1:]]
    assert directory is None
    assert current_job() == ()
    sys.modules["__main__"].__spec__ = types.SimpleNamespace(name="tool.train.__main__")  # type: ignore[assignment]
    assert child_command()[0][:3] == [sys.executable, "-m", "tool.train"]


@pytest.mark.usefixtures("script")
def test_under_hydra_the_command_is_that_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = OmegaConf.create(
        {
            "hydra": {
                "mode": RunMode.MULTIRUN,
                "job": {"num": 1, "id": "1"},
                "runtime": {"cwd": str(tmp_path), "output_dir": str(tmp_path / "a=2")},
                "overrides": {
                    "task": ["a=2", "note='x y'"],
                    "hydra": ["hydra.sweep.dir=x", "hydra.mode=MULTIRUN", "hydra/job_logging=none", "+hydra.job.id=9"],
                },
            }
        }
    )
    monkeypatch.setattr(HydraConfig.instance(), "cfg", config)
    command, directory = child_command()
    assert directory == str(tmp_path)
    assert command == [
        sys.executable,
        str(tmp_path / "train.py"),
        "--config-name=other",
        "a=2",
        "note='x y'",
        "hydra.sweep.dir=x",
        "hydra/job_logging=none",
        "hydra.mode=RUN",
        f"hydra.run.dir='{tmp_path}/a=2'",
        "hydra.output_subdir=null",
        "hydra.job.num=1",
        "hydra.job.id='1'",
    ]
    assert current_job() == ("1", str(tmp_path / "a=2"))
