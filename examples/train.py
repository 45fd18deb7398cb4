"""Train a GPT under any layout; ``python examples/train.py --help`` explains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone runs as it is, installed or not

from hydra.utils import instantiate
from lightning_par.config import as_config_errors, hydra_main, resolve
from lightning_par.launch import launch
from lightning_par.run import train
from omegaconf import DictConfig

from examples.gpt.config import register
from examples.gpt.data import TextData

register()


@hydra_main(config_path="../conf", config_name="train")
def main(config: DictConfig) -> float | None:
    """Check what can be checked, start the ranks, and return the objective for a sweeper."""
    plain = resolve(config)
    with as_config_errors():
        check(plain)
    return launch(train, plain, plain["launch"])


def check(config: dict[str, Any]) -> None:
    """Find in seconds, in one process, what would otherwise stop every rank.

    Raises:
        ValueError: if the text or the network's sizes make no sense, or do not fit each other.
    """
    data = instantiate(config["data"])
    if isinstance(data, TextData):
        data.check()
        network = instantiate(config["model"]["network"])
        data.check_network(network.vocab_size, network.block_size)


if __name__ == "__main__":
    main()
