"""The typed configuration: its schema, its errors, and the entry point of a program that uses it.

Importing this package makes the schema known to Hydra as ``lightning_par/schema/<name>``.
"""

from lightning_par.config.check import check_layout
from lightning_par.config.derive import schema_of
from lightning_par.config.errors import ConfigError, as_config_errors, explain
from lightning_par.config.main import hydra_main, resolve
from lightning_par.config.schema import SCHEMAS, register_schemas

__all__ = [
    "SCHEMAS",
    "ConfigError",
    "as_config_errors",
    "check_layout",
    "explain",
    "hydra_main",
    "register_schemas",
    "resolve",
    "schema_of",
]

register_schemas()
