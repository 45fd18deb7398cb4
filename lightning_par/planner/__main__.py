"""``python -m lightning_par.planner model=gpt_7b cluster=8xa100_80gb``: which layout, and why."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from hydra_plugins.lightning_par_plugin import conf_dir
from lightning_par.config import as_config_errors, hydra_main, resolve
from lightning_par.planner.app import flags_to_overrides, run

with suppress(ModuleNotFoundError):  # the example's models, in a clone
    import_module("examples.gpt.config").register()


@hydra_main(config_path=str(conf_dir()), config_name="plan")
def main(config: DictConfig) -> None:
    """Plan and print."""
    with as_config_errors():
        run(resolve(config), HydraConfig.get().overrides.task)


if __name__ == "__main__":
    sys.argv[1:] = flags_to_overrides(sys.argv[1:])
    main()
