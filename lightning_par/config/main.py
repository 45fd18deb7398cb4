"""``hydra.main`` with errors for people, and the step from Hydra's nodes to a plain mapping."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_par.config.errors import ConfigError, explain

__all__ = ["hydra_main", "resolve"]

_FULL_ERROR = "HYDRA_FULL_ERROR"


def hydra_main(
    config_path: str | None, config_name: str
) -> Callable[[Callable[[DictConfig], Any]], Callable[[], None]]:
    """Like :func:`hydra.main`, but a mistake in the configuration is said in one paragraph, with the nearest valid key.

    Args:
        config_path: folder of the configuration files, relative to the file of the decorated function.
        config_name: the primary one, without its suffix.

    Returns:
        A decorator for ``task(config) -> objective``. The program exits with 1 when its configuration does not
        compose, or when the task raises.
    """

    def decorate(task: Callable[[DictConfig], Any]) -> Callable[[], None]:
        until_composed = ExitStack()

        @functools.wraps(task)
        def composed_task(config: DictConfig) -> Any:
            until_composed.close()
            return task(config)

        program = hydra.main(config_path=config_path, config_name=config_name, version_base="1.3")(composed_task)

        @functools.wraps(task)
        def main() -> None:
            user_asked = os.environ.get(_FULL_ERROR) == "1"
            # Hydra prints composition errors itself and exits, unless full errors are asked for: then it raises them,
            # so that they can be explained here. From the first task on, the user's own setting holds again.
            try:
                with until_composed:
                    until_composed.enter_context(_full_errors())
                    program()
            except Exception as error:  # a task's own exceptions do not come this far
                if user_asked:
                    raise
                print(explain(error), file=sys.stderr)
                sys.exit(1)

        return main

    return decorate


def resolve(config: DictConfig) -> dict[str, Any]:
    """The configuration as plain containers: every interpolation resolved, nothing missing.

    Raises:
        ConfigError: if a value was not given, or an interpolation leads nowhere.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError("\n".join(f"{key}: a value must be given, as {key}=..." for key in missing))
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@contextmanager
def _full_errors() -> Iterator[None]:
    before = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = before
