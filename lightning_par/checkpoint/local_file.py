"""Writing a checkpoint so that no reader, and no crash, ever meets half of one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

__all__ = ["save_file"]


def save_file(content: Any, path: Path) -> None:
    """Write by ``torch.save`` beside ``path``, then rename over it.

    The temporary file is in the same folder, since renaming is atomic only within one file system.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
