"""Whole programs under test: run with a time limit, and found again if they leave a process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
TOKEN = "LIGHTNING_PAR_TEST_TOKEN"
LEAVE_SECONDS = 30
"""How long anything may live on after its program, or after the death of one of its ranks."""


@dataclass
class Program:
    """A started program, with all processes that inherit its environment."""

    process: subprocess.Popen[str]
    token: str

    @classmethod
    def start(cls, command: Sequence[str | Path], directory: Path) -> Program:
        """Start a Python command with its output piped and a token in its environment."""
        token = uuid.uuid4().hex
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, TOKEN: token, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return cls(process, token)

    def wait_for(self, text: str, times: int = 1) -> None:
        """Read its standard output until the text has come that often."""
        assert self.process.stdout is not None
        seen = 0
        for line in self.process.stdout:
            seen += line.count(text)
            if seen >= times:
                return
        _, errors = self.finish(10)
        raise AssertionError(f"The program ended before it printed {text!r} {times} times:\n{errors}")

    def finish(self, seconds: float) -> tuple[str, str]:
        """Its output and errors once it has ended; everything of it is killed if it does not."""
        try:
            return self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            for left in self.living():
                with suppress(psutil.Error):
                    left.kill()
            output, errors = self.process.communicate()
            raise AssertionError(f"Not finished after {seconds} s:\n{output}\n{errors}") from None

    def living(self) -> list[psutil.Process]:
        """Its processes that still run."""
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def assert_all_gone(self, seconds: float = LEAVE_SECONDS) -> None:
        """Fail, and kill what is left, if a process lives on."""
        deadline = time.monotonic() + seconds
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(0.1)
        commands = [" ".join(process.cmdline()) for process in left]
        for process in left:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        assert commands == []

    def _is_mine(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error, OSError):
            return process.environ().get(TOKEN) == self.token and process.status() != psutil.STATUS_ZOMBIE
        return False


def spare_lightning() -> None:
    """Let this process import single modules of lightning_par without what its packages import, Lightning above all.

    What needs only torch then starts in a third of the time. Without effect once the package has been imported.
    """
    for name in ("lightning_par", "lightning_par.strategies"):
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
        sys.modules.setdefault(name, package)


def run_program(command: Sequence[str | Path], directory: Path, seconds: float) -> tuple[int, str, str]:
    """Run a Python command to its end: exit code, output, errors. Nothing of it may be left."""
    program = Program.start(command, directory)
    output, errors = program.finish(seconds)
    program.assert_all_gone()
    return program.process.returncode, output, errors
