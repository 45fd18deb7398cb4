"""Find in one process, in seconds, what would otherwise stop every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hydra.utils import instantiate

from examples.gpt.data import TextData
from examples.gpt.module import GPTModule
from lightning_par.config import check_layout
from lightning_par.tensor_parallel import check_plan, resolve_plan

__all__ = ["check"]


def check(config: Mapping[str, Any]) -> None:
    """Prepare the text, build the network without memory, and see that text, network, layout and ranks fit.

    Args:
        config: the resolved configuration.

    Raises:
        ValueError: if they do not, with the numbers and a way out.
    """
    data = instantiate(config["data"])
    with torch.device("meta"):
        module = instantiate(config["model"])
    if isinstance(data, TextData):
        data.check()
        if isinstance(module, GPTModule):
            data.check_network(module.config.vocab_size, module.config.block_size)
    layout = check_layout(config)
    if layout is not None and layout.tp > 1 and isinstance(module, GPTModule):
        module.configure_model()
        plan = resolve_plan(module, config["strategy"]["tensor_parallel_plan"])
        check_plan(module, plan, layout.tp)
