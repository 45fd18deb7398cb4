"""The data axis: ranks that see different batches and keep one model.

Replication and the three ZeRO stages (arXiv 1910.02054) are *policies over one family of calls*: the module is cut into
units (each block, and the rest), each unit is replicated or sharded by torch's composable ``replicate`` or
``fully_shard``, and the stage only says when parameters are gathered and when gradients are reduced
(:mod:`~lightning_par.data_parallel.policy`).

Elements moved by each rank per optimizer step of ``k`` micro-batches, with ``P`` parameters:

=====  ==========================  ===========================  ==========
stage  parameters                  gradients                    moved
=====  ==========================  ===========================  ==========
0      replicated                  all-reduced once             2 P
1      gathered once               reduce-scattered once        2 P
2      gathered once               reduce-scattered each time   P + k P
3      gathered and freed per use  reduce-scattered each time   3 k P
=====  ==========================  ===========================  ==========
"""

from lightning_par.data_parallel.apply import (
    HostShards,
    UnitPrecision,
    apply_data_axis,
    defer_gradient_sync,
    defer_reduction,
    gather,
    make_root,
    reduce_now,
    release_gathered,
    set_last_micro_batch,
    wrap_whole,
)
from lightning_par.data_parallel.parameter_server import ParameterServer, ServerOptions
from lightning_par.data_parallel.policy import ZERO_POLICIES, ZeroPolicy
from lightning_par.data_parallel.units import Unit, find_units
from lightning_par.data_parallel.unused import UsedParameters
from lightning_par.data_parallel.whole import Place, average_whole_gradients, places_in_several, whole_parameters

__all__ = [
    "ZERO_POLICIES",
    "HostShards",
    "ParameterServer",
    "Place",
    "ServerOptions",
    "Unit",
    "UnitPrecision",
    "UsedParameters",
    "ZeroPolicy",
    "apply_data_axis",
    "average_whole_gradients",
    "defer_gradient_sync",
    "defer_reduction",
    "find_units",
    "gather",
    "make_root",
    "places_in_several",
    "reduce_now",
    "release_gathered",
    "set_last_micro_batch",
    "whole_parameters",
    "wrap_whole",
]
