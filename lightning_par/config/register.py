"""What Hydra has to be told by a program: its own types, and the resolver that names a sweep's folders."""

from __future__ import annotations

from collections.abc import Mapping

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

__all__ = ["register_schemas", "short_name"]

_MAX_NAME = 80


def register_schemas(schemas: Mapping[str, type], group: str) -> None:
    """Make types known to Hydra as ``<group>/<name>``; doing so again does no harm.

    Args:
        schemas: name -> dataclass.
        group: where they stand.
    """
    for name, schema in schemas.items():
        ConfigStore.instance().store(group=group, name=name, node=schema)


def short_name(text: str) -> str:
    """``text`` as a short file name: of a dotted key only the last word, no separators.

    >>> short_name("launch.devices=2,strategy=zero1,data.path=/home/me/book.txt")
    'devices=2,strategy=zero1,path=_home_me_book.txt'
    """
    words = []
    for override in str(text).split(","):
        key, equals, value = override.partition("=")
        words.append(key.rpartition(".")[2].lstrip("+") + equals + value)
    name = "".join(letter if letter.isalnum() or letter in "=,._-" else "_" for letter in ",".join(words))
    return name[:_MAX_NAME]


OmegaConf.register_new_resolver("short_name", short_name, replace=True)
