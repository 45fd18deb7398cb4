"""Errors in a configuration, said in one paragraph that names the nearest valid key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hydra.errors import CompactHydraException, HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    OmegaConfBaseException,
    ValidationError,
)

__all__ = ["ConfigError", "as_config_errors", "explain", "nearest"]


class ConfigError(CompactHydraException, ValueError):
    """Something a person can put right in the configuration. Hydra prints it without a traceback."""


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Turn the ``ValueError`` of a check into a :class:`ConfigError`, and an instantiation error into its cause."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, CompactHydraException) as error:
        cause = error.__cause__ if isinstance(error, CompactHydraException) else error
        if isinstance(cause, (ValueError, TypeError)):
            raise ConfigError(str(cause)) from error
        raise


def explain(error: BaseException) -> str:
    """What is wrong, where, and what was probably meant.

    Args:
        error: what Hydra raised while it composed a configuration.
    """
    for cause in _causes(error):
        if isinstance(cause, ConfigError):
            return str(cause)
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
            return _explain_missing_option(cause)
        if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and not isinstance(cause, InterpolationKeyError):
            return _explain_unknown_key(cause)
        if isinstance(cause, ValidationError):
            return _explain_wrong_type(cause)
    if isinstance(error, HydraException):
        return str(error)
    if isinstance(error, OmegaConfBaseException):
        return _explain_wrong_type(error)
    return f"{type(error).__name__}: {error}\nHYDRA_FULL_ERROR=1 shows where."


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like ``word``, if one is like it at all."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _explain_unknown_key(error: OmegaConfBaseException) -> str:
    key, node = str(error.key), error.parent_node
    known = [str(name) for name in node if not str(name).startswith("_")] if isinstance(node, DictConfig) else []
    prefix = f"{str(error.full_key).removesuffix(key).rstrip('.')}." if error.full_key else ""
    prefix = prefix if prefix != "." else ""
    where = prefix.rstrip(".") or "the configuration"
    lines = [f"{prefix}{key}: there is no such key{_suggestion(prefix, key, known)}"]
    if known:
        lines.append(f"Keys of {where}: {', '.join(sorted(known))}")
    lines.append(f"(To pass on an argument that the schema does not name, write +{prefix}{key}=...)")
    return "\n".join(lines)


def _explain_missing_option(error: MissingConfigException) -> str:
    group, _, option = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
    if not group or not error.options:
        return str(error)
    known = sorted(error.options)
    return (
        f"{group}={option}: there is no such option{_suggestion(f'{group}=', option, known)}\n"
        f"Options of {group}: {', '.join(known)}"
    )


def _explain_wrong_type(error: OmegaConfBaseException) -> str:
    message = str(error).splitlines()[0].rstrip(".")
    return f"{error.full_key}: {message}" if error.full_key else message


def _suggestion(prefix: str, word: str, known: Iterable[str]) -> str:
    match = nearest(word, known)
    return f". Did you mean {prefix}{match}?" if match else ""
