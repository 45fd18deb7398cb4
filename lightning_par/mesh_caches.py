"""torch's caches of what it once worked out for a device mesh, which outlive the mesh's process groups.

Two meshes of the same shape are equal, so a later one finds the results of an earlier one, and with them the earlier
mesh: tensors would talk over groups that are gone.
"""

from __future__ import annotations

import sys
from importlib import import_module
from operator import attrgetter

__all__ = ["forget_meshes"]

# Module and name of each function that empties a cache. They are torch's own affair and differ between its releases.
_EMPTYING = (
    ("torch.distributed.tensor.debug", "_clear_sharding_prop_cache"),
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
    ("torch.distributed.tensor._sharding_prop", "ShardingPropagator._propagate_tensor_meta_cached.cache_clear"),
)


def forget_meshes() -> None:
    """Empty those caches. Call it when process groups have been destroyed."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module_name, name in _EMPTYING:
        try:
            empty = attrgetter(name)(import_module(module_name))
        except (ImportError, AttributeError):
            continue
        empty()
