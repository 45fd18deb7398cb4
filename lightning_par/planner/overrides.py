"""A candidate as overrides of ``examples/train.py``."""

from __future__ import annotations

from lightning_par.planner.choice import Candidate
from lightning_par.planner.cluster import Cluster
from lightning_par.planner.model import PlannedModel

__all__ = ["overrides_for"]

_PRESETS = {"plain": "dp", "DP": "dp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3": "zero3", "TP": "tp", "PP": "pp"}


def overrides_for(candidate: Candidate, cluster: Cluster, model: PlannedModel) -> list[str]:
    """What to write after ``python examples/train.py``: strategy, ranks, batch and precision."""
    return [*_strategy(candidate), *_batch(candidate), *_trainer(cluster, model), *_launch(candidate, cluster)]


def _strategy(candidate: Candidate) -> list[str]:
    layout = candidate.layout
    if candidate.offload:
        words = [f"strategy=zero{candidate.zero_stage}_offload"]
        if layout.tp > 1:
            words.append(f"strategy.tensor_parallel_size={layout.tp}")
        if candidate.offload == "all":
            words.append("strategy.offload.parameters=true")
        if candidate.offload_device == "disk":
            words += ["strategy.offload.device=disk", "strategy.offload.path=FOLDER"]
    elif candidate.kind in _PRESETS:
        words = [f"strategy={_PRESETS[candidate.kind]}"]
    else:
        words = [
            "strategy=hybrid",
            f"strategy.pipeline_parallel_size={layout.pp}",
            f"strategy.data_parallel_size={layout.data_parallel_size}",
            f"strategy.tensor_parallel_size={layout.tp}",
        ]
        if candidate.zero_stage and layout.data_parallel_size > 1:
            words.append(f"strategy.zero_stage={candidate.zero_stage}")
    if candidate.zero_stage and layout.dp_replicate > 1:
        words.append(f"strategy.zero_shard_size={layout.dp_shard}")
    if layout.pp > 1:
        words += [f"strategy.schedule={candidate.schedule}", f"strategy.num_microbatches={candidate.num_microbatches}"]
        if candidate.schedule.startswith(("interleaved", "looped")):
            words.append(f"strategy.num_virtual_stages={candidate.num_virtual_stages}")
    if candidate.activation_checkpointing:
        words.append(f"strategy.activation_checkpointing={str(candidate.activation_checkpointing).lower()}")
    return words


def _batch(candidate: Candidate) -> list[str]:
    if candidate.layout.pp > 1:
        return [f"data.batch_size={candidate.batch_size}"]
    accumulates = candidate.num_microbatches > 1
    return [
        f"data.batch_size={candidate.micro_batch_size}",
        *([f"trainer.accumulate_grad_batches={candidate.num_microbatches}"] if accumulates else []),
    ]


def _trainer(cluster: Cluster, model: PlannedModel) -> list[str]:
    return [f"trainer={'gpu' if cluster.device.is_gpu else 'cpu'}", f"trainer.precision={model.precision_name}"]


def _launch(candidate: Candidate, cluster: Cluster) -> list[str]:
    world = candidate.layout.world_size
    devices = [f"launch.devices={min(world, cluster.devices_per_node)}"]
    if cluster.nodes == 1:
        return devices
    return ["launch=multi_node", *devices, f"launch.nnodes={cluster.nodes}", "launch.rdzv_endpoint=FIRST_MACHINE:29400"]
