"""Puts lightning_par's configuration groups on the search path of every Hydra application.

An application that has lightning_par installed can write in its defaults list::

    - lightning_par/strategy: zero3           # lands at lightning_par.strategy, or
    - lightning_par/strategy@strategy: zero3  # at strategy

Hydra imports this module in every application, so it must not import torch: the package proper is imported only when
one of the groups is used.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import Container, OmegaConf

__all__ = ["LightningParConfigSource", "LightningParSearchPath"]

PREFIX = "lightning_par"
GROUPS = ("cluster", "launch", "logger", "optimizer", "strategy", "trainer")
"""Those that stand on their own; the others describe the example and its whole run."""
SCHEMA = "schema"
"""Types of the above. Not in Hydra's own store, which is copied before this package can be imported on demand."""

_HEADER_LENGTH = 512


def conf_dir() -> Path:
    """The configuration files: inside the installed package, or beside it in a clone."""
    spec = importlib.util.find_spec(PREFIX)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{PREFIX} is not importable, so its configuration cannot be found")
    package = Path(spec.origin).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


class LightningParConfigSource(ConfigSource):
    """Serves ``conf/<group>/<name>.yaml`` as ``lightning_par/<group>/<name>``, and types as ``.../schema/<name>``."""

    @staticmethod
    def scheme() -> str:
        """What marks this source in a search path."""
        return PREFIX

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one file, or look up one type."""
        config, header = self._schema(config_path), ""
        file = self._file(config_path)
        if file is not None and file.is_file():
            header = file.read_text(encoding="utf-8")[:_HEADER_LENGTH]
            config = OmegaConf.load(file)
        if config is None:
            raise ConfigLoadError(f"Config not found: {config_path}")
        return ConfigResult(
            config=config,
            path=f"{self.scheme()}://{self.path}",
            provider=self.provider,
            header=self._get_header_dict(header),
        )

    def available(self) -> bool:
        """Whether the files are there."""
        return conf_dir().is_dir()

    def is_group(self, config_path: str) -> bool:
        """Whether ``config_path`` is ``lightning_par`` or a group under it."""
        parts = _parts(config_path)
        return parts == (PREFIX,) or (len(parts) == 2 and parts[0] == PREFIX and parts[1] in GROUPS)

    def is_config(self, config_path: str) -> bool:
        """Whether there is such a file or type."""
        file = self._file(config_path)
        return (file is not None and file.is_file()) or self._schema(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Names directly under ``config_path``."""
        parts = _parts(config_path)
        if parts == ():
            names = [PREFIX]
        elif parts == (PREFIX,):
            names = list(GROUPS)
        else:
            names = [file.name for file in (conf_dir() / parts[1]).glob("*.yaml")]
        found: list[str] = []
        for name in names:
            self._list_add_result(found, "/".join((*parts, name)), name, results_filter)
        return sorted(set(found))

    def _schema(self, config_path: str) -> Container | None:
        parts = _parts(config_path.removesuffix(".yaml"))
        if len(parts) != 3 or parts[:2] != (PREFIX, SCHEMA):
            return None
        from lightning_par.config.schema import SCHEMAS

        schema = SCHEMAS.get(parts[2])
        return None if schema is None else OmegaConf.structured(schema)

    def _file(self, config_path: str) -> Path | None:
        parts = _parts(self._normalize_file_name(config_path))
        if len(parts) == 3 and parts[0] == PREFIX and parts[1] in GROUPS:
            return conf_dir() / parts[1] / parts[2]
        return None


class LightningParSearchPath(SearchPathPlugin):
    """Adds the source above behind the application's own files, which so take precedence."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append, as Hydra asks."""
        search_path.append(provider=PREFIX, path=f"{LightningParConfigSource.scheme()}://")


def _parts(config_path: str) -> tuple[str, ...]:
    return tuple(part for part in config_path.split("/") if part)
