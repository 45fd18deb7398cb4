"""The styles a plan may name: what each shards, and how activations enter and leave the module.

The names are those that Hugging Face models carry in their plans. Between modules activations are
plain local tensors; a style says what the module expects of them and what it gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

__all__ = ["REFUSED_STYLES", "STYLES", "Style", "describe_styles"]

Enter = Literal["as_is", "share", "split", "look_up"]
Leave = Literal["as_is", "gather", "reduce"]


@dataclass(frozen=True)
class Style:
    """How one module runs on the tensor axis.

    Attributes:
        description: one line for people.
        kind: the module class it is for.
        shard_dim: dim of `weight` that is split over the axis; None leaves parameters whole and plain.
        enter: what happens to the input. "share": whole on all ranks, its gradient is summed;
            "split": whole, this rank takes its slice of the last dim; "look_up": token ids, those
            of other ranks' rows are masked; "as_is": nothing.
        leave: what happens to the output. "gather": slices of the last dim are joined; "reduce":
            partial results are summed; "as_is": nothing.
        sums_gradients: whether whole parameters see a part of the work on each rank, so that their
            gradients must be summed.
    """

    description: str
    kind: type[nn.Module]
    shard_dim: int | None = None
    enter: Enter = "as_is"
    leave: Leave = "as_is"
    sums_gradients: bool = False

    @property
    def output_is_local(self) -> bool:
        """Whether each rank is left with its own slice of the output features."""
        return self.shard_dim is not None and self.leave == "as_is"

    @property
    def input_is_local(self) -> bool:
        """Whether each rank brings its own slice of the input features."""
        return self.enter == "as_is" and self.leave == "reduce"

    def split_dim(self, parameter_name: str) -> int | None:
        """The dim of a parameter that is split over the axis, None if it stays whole."""
        # A bias has output features only: split with them, or whole.
        return None if parameter_name == "bias" and self.shard_dim == 1 else self.shard_dim


_GATHERED_HEAD = Style(
    "linear layer split by output features, its output gathered whole "
    "(a vocabulary-parallel head, or a fused projection that is cut up afterwards)",
    nn.Linear,
    shard_dim=0,
    enter="share",
    leave="gather",
)
_ROWWISE_OF_WHOLE = Style(
    "linear layer split by input features that takes a whole input and uses its slice of it",
    nn.Linear,
    shard_dim=1,
    enter="split",
    leave="reduce",
)

STYLES: dict[str, Style] = {
    "colwise": Style(
        "linear layer split by output features; gives this rank's slice (query, key, value, up, gate)",
        nn.Linear,
        shard_dim=0,
        enter="share",
    ),
    "rowwise": Style(
        "linear layer split by input features; takes this rank's slice, sums the results (attention output, down)",
        nn.Linear,
        shard_dim=1,
        leave="reduce",
    ),
    "colwise_gather_output": _GATHERED_HEAD,
    "colwise_rep": _GATHERED_HEAD,
    "rowwise_split_input": _ROWWISE_OF_WHOLE,
    "rowwise_rep": _ROWWISE_OF_WHOLE,
    "embedding_rowwise": Style(
        "embedding split by vocabulary; each rank looks up its own rows, the results are summed",
        nn.Embedding,
        shard_dim=0,
        enter="look_up",
        leave="reduce",
    ),
    "embedding_colwise": Style(
        "embedding split by hidden size, the slices gathered",
        nn.Embedding,
        shard_dim=1,
        leave="gather",
    ),
    "replicated_with_grad_allreduce": Style(
        "small module kept whole that works on this rank's heads (query and key norms); its gradients are summed",
        nn.Module,
        sums_gradients=True,
    ),
    "replicate": Style("kept whole on every rank, computing the same", nn.Module),
}

_EXPERTS = "mixture-of-experts layers are not split over the tensor axis yet"
_LEAVE_OUT = "leave these modules out of the plan: every rank then keeps them whole"
_FUSED = (
    "it would cut a fused weight as if it were one; split the layer in two linear layers, or plan it "
    "as 'colwise_gather_output' followed by 'rowwise_split_input'"
)

REFUSED_STYLES: dict[str, str] = {
    "packed_colwise": _FUSED,
    "packed_rowwise": _FUSED,
    "grouped_gemm": f"{_EXPERTS}; {_LEAVE_OUT}",
    "moe_tp_experts": f"{_EXPERTS}; {_LEAVE_OUT}",
    "moe_identity_expert": f"{_EXPERTS}; {_LEAVE_OUT}",
    "ep_dispatch_experts": f"{_EXPERTS}; {_LEAVE_OUT}",
    "all_reduce": (
        f"it marks a module whose parts are split one by one; {_EXPERTS}, and a 'rowwise' layer sums its own output"
    ),
    "mla_kv_a_proj": (
        "multi-head latent attention is not split over the tensor axis yet; "
        "leave the attention out of the plan and split the MLPs"
    ),
    "sequence_parallel": (
        "the sequence is not split over the tensor axis; leave norms and dropouts out of the plan (every rank then "
        "works on whole sequences), and split the linear layers between them as 'colwise' and 'rowwise'"
    ),
    "local_params": f"loose parameters of a module cannot be split; {_LEAVE_OUT}",
}


def describe_styles() -> str:
    """One line for each style, for messages and documentation."""
    width = max(map(len, STYLES))
    return "\n".join(f"  {name:{width}}  {style.description}" for name, style in STYLES.items())
