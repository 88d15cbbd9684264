"""Routed experts on one rank.

Without expert parallelism (ep = 1) and tensor parallelism every rank has all of them, and their kernels run as they
are.
"""

from __future__ import annotations

from clustersim.errors import ModelError
from clustersim.model import Kernel, Tensor
from clustersim.parallel import ParallelConfig
from clustersim.partition.nodes import Local, Nodes
from clustersim.partition.share import Share


def expert_nodes(name: str, kernels: tuple[Kernel, ...], share: Share, parallel: ParallelConfig) -> Nodes:
    """Nodes of consecutive kernels whose cut begins with ``expert``. Raises :class:`ModelError` for cut experts."""
    if parallel.ep > 1 or share.tp > 1 or share.cp > 1:
        raise ModelError("a mixture of experts cannot be split over tp, cp or ep yet; use 1 (at $.parallel.ep)")
    return (Local(name, kernels),)


def expert_tensors(tensors: tuple[Tensor, ...], share: Share, parallel: ParallelConfig) -> tuple[Tensor, ...]:
    """This rank's tensors of routed experts."""
    return tuple(tensor for tensor in tensors if tensor.cut.startswith("expert"))
