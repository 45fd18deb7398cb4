"""Checkpoints that know no layout: full tensors keyed by global parameter names.

State is gathered one tensor at a time, so that no rank ever holds more than its share and one whole tensor, except the
first, which collects the file's content in host memory. Loading slices each rank's share out of the full tensors, read
lazily from the file.
"""

from lightning_par.checkpoint.full_state import gather_full_state, shard_full_state, shard_optimizer_state
from lightning_par.checkpoint.local_file import save_file
from lightning_par.checkpoint.plain import to_plain

__all__ = ["gather_full_state", "save_file", "shard_full_state", "shard_optimizer_state", "to_plain"]
