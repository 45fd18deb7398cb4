"""Presets of the strategy: the common layouts by name. Each adapter makes its classes of them."""

from __future__ import annotations

from typing import Any

from lightning_par.layout import AUTO, Degree
from lightning_par.offload import Offload
from lightning_par.strategies.hybrid import Hybrid
from lightning_par.strategies.sync import ALL_REDUCE, PARAMETER_SERVER

__all__ = ["DataParallel", "PipelineParallel", "TensorParallel", "ZeRO"]


class DataParallel(Hybrid):
    """Data parallelism: a whole model on each rank, gradients averaged by all-reduce or by a parameter server.

    Args:
        data_parallel_size: Number of ranks on the data axis.
        sync: ``"all_reduce"`` or ``"parameter_server"``.
        server_rank: Which of them is the server.
        dedicated: Whether the server sees no data.
        **kwargs: Any other argument of ``HybridStrategy``.
    """

    def __init__(
        self,
        data_parallel_size: Degree = AUTO,
        sync: str = ALL_REDUCE,
        server_rank: int = 0,
        dedicated: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size, sync=sync, server_rank=server_rank, dedicated=dedicated, **kwargs
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``par_dp`` and ``par_ps``."""
        strategy_registry.register("par_dp", cls, description="Data parallelism by all-reduce", override=True)
        strategy_registry.register(
            "par_ps", cls, description="Data parallelism by a parameter server", override=True, sync=PARAMETER_SERVER
        )


class TensorParallel(Hybrid):
    """Tensor parallelism: every planned layer is split over the ranks, which see the same batch.

    Args:
        tensor_parallel_size: Number of ranks that share each layer.
        data_parallel_size: Number of such groups.
        **kwargs: Any other argument of ``HybridStrategy``.
    """

    def __init__(self, tensor_parallel_size: Degree = AUTO, data_parallel_size: Degree = 1, **kwargs: Any) -> None:
        super().__init__(tensor_parallel_size=tensor_parallel_size, data_parallel_size=data_parallel_size, **kwargs)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``par_tp``."""
        strategy_registry.register("par_tp", cls, description="Tensor parallelism", override=True)


class PipelineParallel(Hybrid):
    """Pipeline parallelism: the module's blocks are spread over the ranks, and micro-batches flow through them.

    Args:
        pipeline_parallel_size: Number of ranks that share the blocks.
        data_parallel_size: Number of such pipelines.
        **kwargs: Any other argument of ``HybridStrategy``.
    """

    def __init__(self, pipeline_parallel_size: Degree = AUTO, data_parallel_size: Degree = 1, **kwargs: Any) -> None:
        super().__init__(pipeline_parallel_size=pipeline_parallel_size, data_parallel_size=data_parallel_size, **kwargs)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``par_pp``."""
        strategy_registry.register("par_pp", cls, description="Pipeline parallelism", override=True)


class ZeRO(Hybrid):
    """ZeRO: data parallelism whose ranks share one copy of the model state.

    Args:
        stage: 1 shards optimizer states, 2 also gradients, 3 also parameters.
        shard_size: Ranks that share one copy, ``None`` for all of the data axis (``zero_shard_size`` elsewhere).
        data_parallel_size: Number of ranks that see different batches.
        offload: What is kept off the device: ``None``, ``"optimizer"``, ``"all"`` or an ``OffloadPolicy``.
        **kwargs: Any other argument of ``HybridStrategy``.

    Raises:
        ValueError: If the stage is not 1, 2 or 3.
    """

    def __init__(
        self,
        stage: int = 2,
        shard_size: int | None = None,
        data_parallel_size: Degree = AUTO,
        offload: Offload = None,
        **kwargs: Any,
    ) -> None:
        if stage == 0:
            raise ValueError("stage=0 shards nothing. Use DPStrategy() for that, or stage 1, 2 or 3.")
        super().__init__(
            data_parallel_size=data_parallel_size,
            zero_stage=stage,
            zero_shard_size=shard_size,
            offload=offload,
            **kwargs,
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``par_zero1``, ``par_zero2`` and ``par_zero3``, and each with ``_offload``."""
        for stage in (1, 2, 3):
            name, words = f"par_zero{stage}", f"ZeRO stage {stage}"
            strategy_registry.register(name, cls, description=words, override=True, stage=stage)
            options = {"stage": stage, "offload": "optimizer"}
            words += ", optimizer states on the host"
            strategy_registry.register(f"{name}_offload", cls, description=words, override=True, **options)
