"""How long an exchange over a mesh dimension takes at least: its group alone, and all groups of a node on its NICs.

Ranks of a stage do the same at the same time, so that a node's groups of one dimension share what leads out of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from clustersim.collectives.base import Group, Request
from clustersim.collectives.bounds import lower_bound
from clustersim.core.byte_matrix import ByteMatrix
from clustersim.core.dims import Dims
from clustersim.core.mesh import Ints, Mesh
from clustersim.core.topology import Topology
from clustersim.engine.planning import Planner

PAIRWISE = {"ring": "sendrecv", "copies": "sendrecv"}
"""Exchanges that are no collective, and what each member does."""

MOST_ALONE = 64
"""Members of a group that is looked at by itself though it leaves its node."""


@dataclass(eq=False)
class TrafficBounds:
    """Lower bounds of the exchanges of one mesh.

    topology, mesh : the machine and its ranks. dims : its dimensions. way_out : what leads out of a node [bytes/s].
    planner : what the backend makes of a collective; of a group on one node no more than line rates are known without.
    manner : how a job is started, and NCCL's version, as of :class:`clustersim.collectives.base.Group`.
    """

    topology: Topology
    mesh: Mesh
    dims: Dims
    way_out: float
    planner: Planner | None = None
    manner: tuple[str, tuple[int, int]] = ("process_per_gpu", (2, 28))
    _groups: dict[tuple[str, ...], tuple[Group, int, float]] = field(default_factory=dict)
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def seconds(self, kind: str, nbytes: float, dims: tuple[str, ...], matrix: ByteMatrix | None = None) -> float:
        """At least so long; 0 for groups of one. ``nbytes`` : NCCL's S; of a ring, what one rank sends."""
        if self.dims.size(*dims) < 2:
            return 0.0
        key = kind, nbytes, dims, id(matrix)
        if key not in self._known:
            self._known[key] = self._least(PAIRWISE.get(kind, kind), nbytes, dims, matrix)
        return self._known[key]

    def _least(self, kind: str, nbytes: float, dims: tuple[str, ...], matrix: ByteMatrix | None) -> float:
        if dims not in self._groups:
            self._groups[dims] = self._group(dims)
        group, on_node, sharing = self._groups[dims]
        # What leaves a node binds a large group that leaves it.
        small = on_node == group.size or group.size <= MOST_ALONE
        request = Request(kind, nbytes, matrix=matrix)
        alone = lower_bound(request, group) if small else 0.0
        if on_node == group.size:
            return max(alone, self._planned(request, group))
        return max(alone, sharing * _crossing(kind, nbytes, group.size, on_node, matrix) / self.way_out)

    def _planned(self, request: Request, group: Group) -> float:
        """What the backend's collective takes when its links are free and the host has posted it in time; of pairs of
        sends, which a schedule may cut smaller, nothing."""
        if self.planner is None or request.kind == "sendrecv":
            return 0.0
        plan = self.planner(request, group)
        return plan.time(self.topology.link_bandwidth) - plan.host

    def _group(self, dims: tuple[str, ...]) -> tuple[Group, int, float]:
        """The first group, its members on the first node, and how many such groups of the first stage are there."""
        ranks = first_group(self.dims, *dims)
        per_node = self.mesh.nproc_per_node
        on_node = int((ranks < per_node).sum())
        stride = self.dims.size_of(self.dims.dense_axes[: self.dims.dense_axes.index("pp")])
        beside = int((np.arange(per_node) // stride % self.dims.pp == 0).sum())
        return Group(self.topology, self.mesh.gpus[ranks], *self.manner), on_node, max(1.0, beside / on_node)


def first_group(dims: Dims, *names: str) -> Ints:
    """Ranks of the group that rank 0 is in.

    >>> first_group(Dims(tp=2, dp=2, pp=2), "dp").tolist()
    [0, 2]
    """
    axes, chosen = dims.axes_of(*names)
    ranks = np.zeros(1, dtype=np.int64)
    stride = 1
    for axis in axes:
        size = dims.sizes[axis]
        if axis in chosen:
            ranks = (np.arange(size)[:, None] * stride + ranks[None, :]).reshape(-1)
        stride *= size
    return ranks


def _crossing(kind: str, nbytes: float, n: int, on_node: int, matrix: ByteMatrix | None) -> float:
    """Bytes of a group of ``n`` that leave, or enter, a node with ``on_node`` of its members."""
    away = n - on_node
    if matrix is not None:
        return float(nbytes * matrix.array[:on_node, on_node:].sum())
    if kind == "all_reduce":
        return nbytes
    if kind in {"all_gather", "reduce_scatter"}:
        return nbytes * max(on_node, away) / n
    if kind == "all_to_all":
        return nbytes * on_node * away / n
    return nbytes if kind == "sendrecv" else 0.0
