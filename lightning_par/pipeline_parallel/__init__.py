"""Pipeline parallelism: a model cut into stages, each on its own rank, and micro-batches that flow through them.

A schedule is data. ``SCHEDULES`` names them, ``build_grid`` writes down what torch's own schedule does on each rank,
``check_grid`` proves the order possible, ``simulate`` times it and ``draw_timeline`` draws it, all without a process:

    python -m lightning_par.pipeline_parallel --schedule 1f1b --stages 4 --microbatches 8

Throughout, p is the number of pipeline ranks (``pipeline_parallel_size``), m that of micro-batches
(``num_microbatches``) and v that of stages each rank holds (``num_virtual_stages``).
"""

from lightning_par.pipeline_parallel.check import check_grid
from lightning_par.pipeline_parallel.grid import Action, Grid, build_grid
from lightning_par.pipeline_parallel.picture import draw_timeline
from lightning_par.pipeline_parallel.schedules import (
    SCHEDULES,
    Schedule,
    check_num_microbatches,
    check_num_virtual_stages,
    default_num_microbatches,
    schedule_named,
    stage_indices,
    suitable_num_microbatches,
)
from lightning_par.pipeline_parallel.simulate import Costs, Timeline, peak_activations, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Grid",
    "Schedule",
    "Timeline",
    "build_grid",
    "check_grid",
    "check_num_microbatches",
    "check_num_virtual_stages",
    "default_num_microbatches",
    "draw_timeline",
    "peak_activations",
    "schedule_named",
    "simulate",
    "stage_indices",
    "suitable_num_microbatches",
]
