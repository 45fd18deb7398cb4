"""Which layout suits a model on some machines; ``python examples/plan.py --help`` explains."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone runs as it is, installed or not

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from examples.gpt.config import register
from lightning_par.config import as_config_errors, hydra_main, resolve
from lightning_par.planner.app import flags_to_overrides, run

register()


@hydra_main(config_path="../conf", config_name="plan")
def main(config: DictConfig) -> None:
    """Plan and print; exit code 1 if nothing fits."""
    with as_config_errors():
        run(resolve(config), HydraConfig.get().overrides.task)


if __name__ == "__main__":
    sys.argv[1:] = flags_to_overrides(sys.argv[1:])
    main()
