"""Loggers that a configuration may name without knowing what is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch.loggers import TensorBoardLogger

__all__ = ["tensorboard_if_installed"]


def tensorboard_if_installed(save_dir: str, version: str = "tensorboard") -> TensorBoardLogger | None:
    """A logger that writes to ``save_dir/version``, or None where TensorBoard is missing."""
    from lightning.pytorch.loggers import TensorBoardLogger

    try:
        return TensorBoardLogger(save_dir, name="", version=version)
    except ModuleNotFoundError:
        return None
