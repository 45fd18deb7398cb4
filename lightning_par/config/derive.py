"""A typed schema from a signature, so that a class's arguments are written down once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import field, make_dataclass
from types import SimpleNamespace
from typing import Any, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

__all__ = ["schema_of"]


def schema_of(
    target: Callable[..., Any], nested: Mapping[str, type] | None = None, required: Collection[str] = ()
) -> type:
    """A dataclass with the arguments of ``target``: their types, their defaults, and ``_target_``.

    Args:
        target: a class or function. Arguments of a type that a file cannot hold become ``Any``; those without a default
            that a file can hold become mandatory.
        nested: argument name -> schema of the object it takes.
        required: arguments that a configuration must give although they have a default.

    Returns:
        The schema, to be registered with :func:`~lightning_par.config.register_schemas`.

    Raises:
        ValueError: if ``nested`` or ``required`` names something that is no argument of ``target``.
    """
    hints = _hints(target)
    parameters = [
        parameter
        for parameter in inspect.signature(target).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    nested = nested or {}
    unknown = {*nested, *required} - {parameter.name for parameter in parameters}
    if unknown:
        raise ValueError(f"{target.__qualname__} has no argument {', '.join(sorted(unknown))}")
    fields: list[tuple[str, Any, Any]] = [
        ("_target_", str, field(default=f"{target.__module__}.{target.__qualname__}"))
    ]
    for parameter in parameters:
        if parameter.name in nested:
            schema = nested[parameter.name]
            fields.append((parameter.name, schema, field(default_factory=schema)))
        else:
            fields.append(_field(parameter, hints.get(parameter.name, Any), parameter.name in required))
    return make_dataclass(f"{target.__name__}Schema", fields)


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Types by argument; without those that only a type checker can import."""
    function = target.__init__ if inspect.isclass(target) else target
    namespace = vars(sys.modules[target.__module__])
    hints = {}
    for name, annotation in inspect.get_annotations(function).items():
        alone = SimpleNamespace(__annotations__={name: annotation})
        with suppress(NameError):
            hints.update(get_type_hints(alone, globalns=namespace))
    return hints


def _field(parameter: inspect.Parameter, hint: Any, required: bool) -> tuple[str, Any, Any]:
    kind = hint if _holds(hint, MISSING) else Any
    has_default = not required and parameter.default is not parameter.empty and _holds(kind, parameter.default)
    default = parameter.default if has_default else MISSING
    return parameter.name, kind, field(default_factory=lambda: default)


def _holds(kind: Any, value: Any) -> bool:
    """Whether a typed configuration can have a field of type ``kind`` with this value."""
    probe = make_dataclass("Probe", [("value", kind, field(default_factory=lambda: value))])
    try:
        OmegaConf.structured(probe)
    except OmegaConfBaseException:
        return False
    return True
