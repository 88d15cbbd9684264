"""Libraries that can be asked what they would do for a collective: each a row of :data:`BACKENDS`; and :func:`plan`,
which asks one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np

from clustersim.collectives import gloo, host_copies, ideal, mpi, nccl_backend
from clustersim.collectives.base import Group, Plan, Request
from clustersim.core.arrays import Ints
from clustersim.core.byte_matrix import ByteMatrix
from clustersim.core.errors import ProgramError, nearest
from clustersim.core.memo import kept_with_topology
from clustersim.core.topology import CPU, Topology

BACKENDS: Mapping[str, Callable[[Request, Group, int | None], Plan]] = MappingProxyType(
    {
        "nccl": nccl_backend.plan,
        "gloo": gloo.plan,
        "mpi": mpi.plan,
        "mpi_cuda": partial(mpi.plan, cuda=True),
        "ideal": ideal.plan,
    }
)
"""Libraries that can be asked for a plan."""


def usual_backend(topology: Topology, members: Ints) -> str:
    """Who plans collectives where nobody says: NCCL, or Gloo where all members (vertices) are CPUs."""
    return "gloo" if all(topology.vertex_kinds[vertex] == CPU for vertex in members.tolist()) else "nccl"


def plan(request: Request, group: Group, backend: str = "nccl", n_channels: int | None = None) -> Plan:
    """What ``backend`` does for this request, as a macro-flow.

    Parameters
    ----------
    backend : ``"nccl"``, ``"gloo"``, ``"mpi"``, ``"mpi_cuda"`` (with CUDA support), or ``"ideal"`` (line rates and
        hop latencies only).
    n_channels : int, pins the number of channels; None leaves it to the backend.

    Raises :class:`ProgramError` for an unknown backend or algorithm, or a pin that cannot do this kind.
    """
    if backend not in BACKENDS:
        raise ProgramError(f"no collective backend {backend!r}; {nearest(backend, BACKENDS)}")
    if not 0 <= request.root < group.size:
        raise ProgramError(f"root {request.root} is not a position in a group of {group.size}")
    if not (math.isfinite(request.nbytes) and request.nbytes >= 0):
        raise ProgramError(f"a collective of {request.nbytes!r} bytes; the size must be a number >= 0")
    if request.matrix is not None:
        request = _with_matrix(request, request.matrix, group)
    if group.size == 1:
        return _nothing(request)
    return _planned(group, request, backend, n_channels)


def _with_matrix(request: Request, matrix: ByteMatrix, group: Group) -> Request:
    """The request, whose matrix fits it; an even one says no more than the size does."""
    if request.kind != "all_to_all":
        raise ProgramError(f"a byte matrix goes with all_to_all, not {request.kind}")
    if matrix.n != group.size:
        raise ProgramError(f"a byte matrix of {matrix.n} members for a group of {group.size}")
    if request.algorithm not in {None, "direct"}:
        raise ProgramError(f"algorithm {request.algorithm!r} sends even parts; use 'direct' for a byte matrix")
    return replace(request, matrix=None) if matrix.even else request


@kept_with_topology(maxsize=1024)
def _planned(group: Group, request: Request, backend: str, n_channels: int | None) -> Plan:
    if backend == "nccl" and any(group.topology.vertex_kinds[member] == CPU for member in group.gpus.tolist()):
        return host_copies.plan(request, group)
    return BACKENDS[backend](request, group, n_channels)


def _nothing(request: Request) -> Plan:
    """A group of one has nobody to talk to."""
    empty = np.empty(0, dtype=np.int64)
    return Plan(request.kind, "none", "none", 0, request.nbytes, 0.0, empty, np.empty(0), math.inf)
