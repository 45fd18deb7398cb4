"""A stage's links to its neighbours: what torch's schedules call to send and receive.

torch's ``PipelineStage`` wants to know the shapes that travel before it runs, or finds them out by running the whole
model once more. Here the sender tells the shape with the first micro-batch, so nothing runs twice, and every buffer
lives from its receive to its use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

__all__ = ["GradientSteering", "LinkedStage"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMS = 8


class GradientSteering(ABC):
    """When the data axis reduces the gradients of a stage; the engine knows, by its ZeRO policy."""

    @abstractmethod
    def before_backward(self, is_last: bool) -> None:
        """Called before each backward of the stage; ``is_last`` for that of the batch's last micro-batch."""

    @abstractmethod
    def after_all(self) -> None:
        """Called once after the last backward of a batch."""


class LinkedStage(PipelineStage):
    """One stage, as torch's schedules drive it.

    Args:
        module: The stage; its parameters get the gradients.
        call: Runs one micro-batch of it: (stage index, received hidden state or none, micro-batch) -> output.
        stage_index: Position in the model, from 0.
        num_stages: Stages in the whole pipeline.
        device: This rank's device.
        group: The ``pp`` axis.
        rank_of_stage: Rank in ``group`` that holds each stage.
        steering: When gradients are reduced.
        recomputes: Whether the stage computes activations again in its backward. It then runs in one even if the
            schedule splits it: halves would each compute them again.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[int, tuple[Tensor, ...], int], Any],
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        rank_of_stage: list[int],
        steering: GradientSteering,
        recomputes: bool = False,
    ) -> None:
        weights_later = (lambda: _nothing_left) if recomputes else None
        super().__init__(_Opaque(module), stage_index, num_stages, device, group=group, dw_builder=weights_later)
        self.stage_index_to_group_rank = dict(enumerate(rank_of_stage))
        self.has_backward = False
        self.args_recv_info = defaultdict(tuple)  # which torch reads to see that only neighbours talk
        self._call = call
        self._steering = steering
        self._stage_meta.inputs = () if self.is_first else (None,)  # type: ignore[assignment]
        self._incoming: Tensor | None = None
        self._outgoing: Tensor | None = None
        self._inputs: dict[int, Tensor] = {}
        self._output_grads: dict[int, Tensor] = {}

    @property
    def previous_rank(self) -> int:
        """Rank in the group that holds the stage before."""
        return self.stage_index_to_group_rank[self.stage_index - 1]

    @property
    def next_rank(self) -> int:
        """Rank in the group that holds the stage after."""
        return self.stage_index_to_group_rank[self.stage_index + 1]

    # Before a schedule runs: nothing to find out and nothing to allocate.

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches

    def clear_runtime_states(self) -> None:
        """Forget an earlier batch, also one that an exception has cut short."""
        for state in (self.fwd_cache, self.bwd_cache, self.backward_state, self.dw_runner):
            state.clear()
        self.output_chunks.clear()
        self._inputs.clear()
        self._output_grads.clear()

    # Forward

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive a hidden state into a new buffer."""
        if self.is_first:
            return []
        if self._incoming is None:
            self._incoming = self._receive_shape()
        self._inputs[fwd_chunk_id] = buffer = torch.empty_like(self._incoming, device=self.device)
        return [dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=self.previous_rank)]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the hidden state from a stage of the same rank."""
        self._inputs[mb_index] = prev_stage_outputs.detach()

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        needs_gradient = self.has_backward and torch.is_grad_enabled()
        return (self._inputs.pop(fwd_chunk_id).requires_grad_(needs_gradient),)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch; an error is the user's own, not torch's around it."""
        try:
            return super().forward_one_chunk(*args, **kwargs)
        except RuntimeError as error:
            own = error.__cause__ or error
        raise own

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch."""
        return self._call(self.stage_index, args, kwargs["microbatch"])

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send a hidden state, and before the first one its shape."""
        if self.is_last:
            return []
        (hidden,), _ = self.fwd_cache[fwd_chunk_id]
        if self._outgoing is None:
            self._send_shape(hidden)
        elif (hidden.shape, hidden.dtype) != (self._outgoing.shape, self._outgoing.dtype):
            raise ValueError(
                f"Micro-batches of one batch leave stage {self.stage_index} in different shapes: "
                f"{tuple(self._outgoing.shape)} {self._outgoing.dtype} and {tuple(hidden.shape)} {hidden.dtype}. "
                "Pad them to one shape, or set num_microbatches=1."
            )
        sent = hidden.detach().contiguous()
        return [dist.P2POp(dist.isend, sent, group=self.group, group_peer=self.next_rank)]

    def _send_shape(self, hidden: Tensor) -> None:
        self._outgoing = torch.empty_like(hidden, device="meta")
        words = [_DTYPES.index(hidden.dtype), hidden.ndim, *hidden.shape, *[0] * (_MAX_DIMS - hidden.ndim)]
        dist.send(torch.tensor(words, device=self.device), group=self.group, group_dst=self.next_rank)

    def _receive_shape(self) -> Tensor:
        words = torch.zeros(2 + _MAX_DIMS, dtype=torch.int64, device=self.device)
        dist.recv(words, group=self.group, group_src=self.previous_rank)
        dtype, num_dims, *sizes = words.tolist()
        return torch.empty(sizes[:num_dims], dtype=_DTYPES[dtype], device="meta")

    # Backward

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradient of what was sent into a new buffer."""
        if not self.has_backward or self.is_last:
            return []
        (hidden,), _ = self.fwd_cache[bwd_chunk_id]
        self._output_grads[bwd_chunk_id] = buffer = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        return [dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=self.next_rank)]

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradient from a stage of the same rank."""
        (gradient,) = next_stage_bwd_outputs
        (hidden,), _ = self.fwd_cache[mb_index]
        self._output_grads[mb_index] = torch.zeros_like(hidden) if gradient is None else gradient

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor, ...]:
        return (self._output_grads.pop(bwd_chunk_id),)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradient of what was received."""
        if not self.has_backward or self.is_first:
            return []
        (gradient,) = self.bwd_cache.pop(bwd_chunk_id)
        assert self._incoming is not None
        sent = torch.zeros_like(self._incoming, device=self.device) if gradient is None else gradient.contiguous()
        return [dist.P2POp(dist.isend, sent, group=self.group, group_peer=self.previous_rank)]

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        """One backward, or its half for inputs or weights."""
        self._steering.before_backward(last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Nothing: losses are scaled before their backward."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """After the last backward of a batch."""
        self._steering.after_all()


def _nothing_left() -> None:
    """The second half of a backward that has run in one."""


class _Opaque(nn.Module):
    """Hides from torch's schedules that a stage is sharded, so that they leave it to the engine when it is gathered."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
