"""Keeping checkpoint files to tensors and plain containers, so that ``torch.load(weights_only=True)`` opens them."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import PurePath
from typing import Any

from omegaconf import Container, OmegaConf

__all__ = ["to_plain"]


def to_plain(value: Any) -> Any:
    """Replace configuration objects and paths in nested containers by dictionaries, lists and strings.

    A configuration's class, which Lightning notes beside hyperparameters, becomes its name: Lightning then reads them
    as a dictionary with attributes.
    """
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, type) and issubclass(value, Container):
        return value.__name__
    if type(value) in (dict, OrderedDict):
        return type(value)((key, to_plain(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(to_plain(item) for item in value)
    return value
