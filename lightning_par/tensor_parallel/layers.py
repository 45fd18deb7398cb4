"""A planned layer on one rank: its parameters split, its forward run on the local part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_par.gradients import local
from lightning_par.tensor_parallel import axis as exchange
from lightning_par.tensor_parallel.axis import TensorAxis
from lightning_par.tensor_parallel.callers import Caller
from lightning_par.tensor_parallel.styles import Style

__all__ = ["LocalForward", "split_parameters"]


def split_parameters(module: nn.Module, style: Style, axis: TensorAxis) -> None:
    """Replace the parameters of `module` by DTensors that hold this rank's part.

    Every rank must hold the same whole parameters; each takes its own slice, nothing is sent.
    A parameter that is a DTensor already (the other end of a tie) is left as it is. The whole
    tensor is freed as soon as nothing else refers to it.
    """
    if style.shard_dim is None:
        return
    for name, whole in module._parameters.items():
        if whole is None or isinstance(whole, DTensor):
            continue
        parameter = nn.Parameter(axis.part(whole, style.split_dim(name)), requires_grad=whole.requires_grad)
        # Marks that people and libraries leave on parameters ("no weight decay") stay on.
        parameter.__dict__.update(whole.__dict__)
        module._parameters[name] = parameter


@dataclass(eq=False)
class LocalForward:
    """Stands in for the forward of a planned layer.

    The layer's own forward runs, whatever its class, on ordinary tensors: this rank's part of its
    parameters, and an input and output that enter and leave as the style says.
    """

    module: nn.Module
    forward: Callable[..., Any]
    style: Style
    caller: Caller

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        if self.style.enter == "as_is":
            return self._run(args, kwargs)
        # Linear layers and embeddings call their one argument "input".
        tensor, *rest = args or (kwargs.pop("input"),)
        if self.style.enter == "look_up":
            return self._look_up(tensor, *rest, **kwargs)
        shared = self.style.enter == "share"
        tensor = self.caller.enter(tensor) if shared else exchange.split(tensor, self.caller.axis, -1)
        return self._run((tensor, *rest), kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bias = self._late_bias()
        with self._local_parameters():
            output = self.forward(*args, **kwargs)
        return self._leave(output, bias)

    def _leave(self, output: Any, bias: Tensor | None) -> Any:
        if self.style.leave == "gather":
            return exchange.gather(output, self.caller.axis, -1)
        if self.style.leave == "reduce":
            output = exchange.reduce(output, self.caller.axis)
        # Under autocast the output is of lower precision than the parameter.
        return output if bias is None else output + bias.to(output.dtype)

    def _late_bias(self) -> Tensor | None:
        """The bias of a layer whose partial outputs are summed: added once, after the sum."""
        if self.style.leave != "reduce":
            return None
        bias = self.module._parameters.get("bias")
        return None if bias is None else local(bias)

    @contextmanager
    def _local_parameters(self) -> Iterator[None]:
        parameters = self.module._parameters
        whole = dict(parameters)
        parts: dict[str, Any] = {name: self._localize(name, p) for name, p in whole.items()}
        parameters.update(parts)
        try:
            yield
        finally:
            parameters.update(whole)

    def _localize(self, name: str, parameter: nn.Parameter | None) -> Tensor | None:
        if parameter is None or (name == "bias" and self.style.leave == "reduce"):
            return None
        if self.style.sums_gradients:
            return exchange.sum_gradient(parameter, self.caller.axis)
        return local(parameter)

    def _look_up(self, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Look up the token ids whose rows are here; the others' rows come from the other ranks."""
        table = self.module
        assert isinstance(table, nn.Embedding)
        num_rows = table.num_embeddings // self.caller.axis.size
        row = ids - self.caller.axis.rank * num_rows
        # An id outside the vocabulary stays outside, so that the lookup reports it as ever.
        elsewhere = (ids >= 0) & (ids < table.num_embeddings) & ((row < 0) | (row >= num_rows))
        padding_idx = table.padding_idx
        with self._local_parameters():
            try:
                table.padding_idx = _local_row(padding_idx, self.caller.axis.rank * num_rows, num_rows)
                output = self.forward(row.masked_fill(elsewhere, 0), *args, **kwargs)
            finally:
                table.padding_idx = padding_idx
        return self._leave(output.masked_fill(elsewhere.unsqueeze(-1), 0), None)


def _local_row(row: int | None, first: int, num_rows: int) -> int | None:
    """Index of `row` among the `num_rows` rows from `first` on, None if it is not one of them."""
    return row - first if row is not None and first <= row < first + num_rows else None
