"""The example's configuration, composed without a Hydra job around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from examples.gpt.config import register

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
GROUPS = ("model", "data", "optimizer", "strategy", "trainer", "launch", "logger", "experiment", "debug")

register()


def options(group: str) -> list[str]:
    """Names of a group's files."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def compose_train(folder: Path, *overrides: str) -> DictConfig:
    """``train.yaml`` with these overrides; it reads a short text in ``folder`` unless ``data=`` is given."""
    own = [f"output_dir={folder / 'out'}", f"data.cache_dir={folder / 'cache'}"]
    if not any(override.startswith("data=") for override in overrides):
        own += ["data=text", f"data.path={write_book(folder)}"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=[*own, *overrides])


def write_book(folder: Path) -> Path:
    """A text of 32,000 bytes."""
    path = folder / "book.txt"
    path.write_text("It was a dark and stormy night. " * 1000)
    return path


@contextmanager
def no_launcher() -> Iterator[None]:
    """As from a shell: no ranks started by others, and no Hydra left over afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "HYDRA_FULL_ERROR"):
            patch.delenv(name, raising=False)
        yield
    GlobalHydra.instance().clear()
