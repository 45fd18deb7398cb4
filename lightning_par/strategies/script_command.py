"""The command by which a script starts its own other ranks: the same script, and under Hydra the same job of it."""

from __future__ import annotations

import os
import re
import sys
from typing import Any, cast

__all__ = ["child_command", "current_job"]

_OWN_OVERRIDES = ("hydra.mode", "hydra.run.dir", "hydra.output_subdir", "hydra.job.num", "hydra.job.id")
"""What the child gets from its parent's job and not from the command line."""


def current_job() -> tuple[str, ...]:
    """What tells one Hydra job from the next in a process; empty without Hydra."""
    if not _hydra_runs():
        return ()
    from hydra.core.hydra_config import HydraConfig

    return str(_of_job("num")), str(HydraConfig.get().runtime.output_dir)


def child_command() -> tuple[list[str], str | None]:
    """Command and working directory of another rank of this script.

    Under Hydra the child runs *this job* alone, not the sweep it belongs to: the job's own overrides, its output
    directory, number and id, and no ``.hydra`` folder of its own. It composes its configuration again, so what a
    resolver makes up anew (``now`` outside the output directory, random numbers) may differ from rank 0's.
    """
    if _hydra_runs():
        return _hydra_command()
    return [*_script(os.getcwd()), *sys.argv[1:]], None


def _hydra_runs() -> bool:
    if "hydra" not in sys.modules:
        return False
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.initialized()


def _of_job(key: str) -> Any:
    """An entry of Hydra's job node, ``None`` if it is missing, as a sweep's number is in a single run."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    return OmegaConf.select(cast("Any", HydraConfig.instance().cfg), f"hydra.job.{key}")


def _script(directory: str) -> list[str]:
    """The interpreter and the script or module it runs; a relative script is one of the given directory."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return [sys.executable, os.path.join(directory, sys.argv[0])]
    return [sys.executable, "-m", spec.name.removesuffix(".__main__")]


def _hydra_command() -> tuple[list[str], str]:
    from hydra._internal.utils import get_args_parser
    from hydra.core.hydra_config import HydraConfig

    config = HydraConfig.get()
    given = get_args_parser().parse_args(sys.argv[1:])
    flags = {"--config-path": given.config_path, "--config-name": given.config_name, "--config-dir": given.config_dir}
    number, identity = _of_job("num"), _of_job("id")
    own = {
        "hydra.mode": "RUN",
        "hydra.run.dir": _quoted(config.runtime.output_dir),
        "hydra.output_subdir": "null",
        "hydra.job.num": number,
        "hydra.job.id": None if identity is None else _quoted(str(identity)),
    }
    kept = [text for text in config.overrides.hydra if text.partition("=")[0].lstrip("+~") not in _OWN_OVERRIDES]
    directory = config.runtime.cwd
    command = [
        *_script(directory),
        *(f"{flag}={value}" for flag, value in flags.items() if value is not None),
        *config.overrides.task,
        *kept,
        *(f"{name}={value}" for name, value in own.items() if value is not None),
    ]
    return command, directory


def _quoted(text: str) -> str:
    """The text as one value in Hydra's override grammar, whatever brackets, commas, quotes or dollars it has."""
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + match[2].replace("'", r"\'"), text)
    return "'" + escaped.replace("${", r"\${") + "'"
