"""Model states that are kept off the device, in host memory or on disk, and stepped there.

A host copy of each parameter, the *master*, and the optimizer's moments are off the device; a gradient goes down to its
master, the host steps it, and the new values come up again. With ``parameters=True`` the parameter itself is off the
device, and is its own master. Bytes that travel a step, with ``P`` parameters of 4 bytes on a rank: ``4 P`` down and
``4 P`` up, and with parameters on the host ``4 P`` up at every gathering instead.

What goes on at the same time, where the policy allows it and nobody is looking:

- gradients go down while backward goes on;
- the host steps a unit while backward goes on, if nothing (clipping, a scaler, a hook) may still change its gradients;
- else it steps and sends back one unit after the other, in the order of use, while the next forward goes on, which
  waits for each unit as it comes to it.

The numbers are the same to the bit, because each unit is stepped once, with its final gradients, in every case.
"""

from lightning_par.offload.model import ModelOffload, OffloadedUnit, num_on_device
from lightning_par.offload.optimizer import OffloadedOptimizer, offloaded, stepped_parameters
from lightning_par.offload.policy import Offload, OffloadPolicy, resolve_offload
from lightning_par.offload.reach import Reach, update_reach
from lightning_par.offload.tiers import Tier, make_tier

__all__ = [
    "ModelOffload",
    "Offload",
    "OffloadPolicy",
    "OffloadedOptimizer",
    "OffloadedUnit",
    "Reach",
    "Tier",
    "make_tier",
    "num_on_device",
    "offloaded",
    "resolve_offload",
    "stepped_parameters",
    "update_reach",
]
