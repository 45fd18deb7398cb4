"""The typed configuration: its schema, its errors, and the entry point of a program that uses it."""

from lightning_par.config.check import check_layout
from lightning_par.config.derive import schema_of
from lightning_par.config.errors import ConfigError, as_config_errors, explain
from lightning_par.config.main import hydra_main, resolve
from lightning_par.config.register import register_schemas

__all__ = [
    "ConfigError",
    "as_config_errors",
    "check_layout",
    "explain",
    "hydra_main",
    "register_schemas",
    "resolve",
    "schema_of",
]
