"""Tensor parallelism: layers of a module split over one mesh axis, the module's code unchanged.

    plan = resolve_plan(module)            # the module's own, or one given
    check_plan(module, plan, degree)       # every reason why it does not fit, before anything starts
    apply_plan(module, plan, mesh["tp"])   # in place; parameters become DTensors
    with explain_errors():                 # of shapes, in words
        module(batch)

`STYLES` has the words of a plan. Activations between modules are plain tensors: whole, except
between a colwise and a rowwise layer, where each rank has its own heads or inner features.

Known limits: head counts are recognised by their usual names (`heads`), so a module that keeps
the full count under another name must unfold heads with -1; attention biases computed from a head
count in the forward pass (ALiBi slopes) see this rank's count, not this rank's heads; random numbers
are those of the global generator, so seed the ranks of one tensor-parallel group alike, and dropout
on local heads repeats its mask on them.
"""

from lightning_par.tensor_parallel.apply import apply_plan
from lightning_par.tensor_parallel.callers import explain_errors
from lightning_par.tensor_parallel.checks import check_plan, check_replicated_gradients
from lightning_par.tensor_parallel.plan import resolve_plan
from lightning_par.tensor_parallel.styles import STYLES, Style, describe_styles

__all__ = [
    "STYLES",
    "Style",
    "apply_plan",
    "check_plan",
    "check_replicated_gradients",
    "describe_styles",
    "explain_errors",
    "resolve_plan",
]
