"""What a function takes the host, in calls of a module (:mod:`clustersim.model.seconds.host`)."""

from __future__ import annotations

from clustersim.core.model import Kernel, product_beside
from clustersim.model.seconds.kernels import weighted

POST = 0.25
"""What posting an exchange takes, in calls of a module: a function of torch.distributed inside a module that was called
already. Megatron-LM's functional tests of dense models on H100 with no tensor parallelism, with it, and with sequence
parallelism are 3, 5 and 6 % too fast by it; as whole calls 21 % too fast, 14 and 20 % too slow."""


def adapter_calls(kernel: Kernel) -> float:
    """What a kernel of an adapter takes the host, in calls of a module: one for a linear, a part for a function of the
    adapter that was called already; 0 for a kernel of no adapter."""
    if not product_beside(kernel.name):
        return 0.0
    return 1.0 if weighted(kernel) else POST
