"""Train a GPT under any layout; ``python examples/train.py --help`` explains."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone runs as it is, installed or not

from omegaconf import DictConfig

from examples.gpt.check import check
from examples.gpt.config import register
from lightning_par.config import as_config_errors, hydra_main, resolve
from lightning_par.launch import launch
from lightning_par.run import train

register()


@hydra_main(config_path="../conf", config_name="train")
def main(config: DictConfig) -> float | None:
    """Check what can be checked, start the ranks, and return the objective for a sweeper."""
    plain = resolve(config)
    with as_config_errors():
        check(plain)
    return launch(train, plain, plain["launch"])


if __name__ == "__main__":
    main()
