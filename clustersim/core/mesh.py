"""Which rank runs on which GPU, and the groups ranks form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustersim.core.arrays import Ints as Ints
from clustersim.core.dims import DENSE, NAMES, Dims
from clustersim.core.errors import ProgramError
from clustersim.core.memo import Keeper, kept_with_first


@dataclass(frozen=True, eq=False)
class Mesh(Keeper):
    """Ranks on GPUs, node-major as torchrun numbers them: ``RANK = NODE_RANK * nproc_per_node + LOCAL_RANK``.

    Parameters
    ----------
    gpus : (world_size,) int, the vertex id in the Topology of the GPU each rank drives; a server's may be a CPU.
    nproc_per_node : int, workers on a node (LOCAL_WORLD_SIZE).
    servers : int, how many ranks, the last ones, serve parameters and compute no layers.
    dims : the dimensions that the workers form; None is data parallelism over all of them.
    nproc_per_domain : int, workers of an NVLink domain that several nodes share; 0 where a node is one by itself.

    >>> mesh = Mesh(np.arange(16), 8)
    >>> mesh.world_size, mesh.n_nodes
    (16, 2)
    >>> mesh.world_group().shape
    (1, 16)
    >>> split = Mesh(np.arange(16), 8, dims=Dims(tp=2, dp=4, pp=2))
    >>> split.groups("dp").tolist()
    [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    >>> split.coordinate(11)["pp"], split.ranks(pp=1).tolist()
    (1, [8, 9, 10, 11, 12, 13, 14, 15])
    """

    gpus: Ints
    nproc_per_node: int
    servers: int = 0
    dims: Dims | None = None
    nproc_per_domain: int = 0

    def __post_init__(self) -> None:
        # A dedicated server's GPU is missing among its node's workers, so only a world without servers must divide.
        if self.nproc_per_node < 1 or (not self.servers and len(self.gpus) % self.nproc_per_node):
            raise ProgramError(f"a world of {len(self.gpus)} ranks does not divide into nodes of {self.nproc_per_node}")
        if self.dims is not None and self.dims.world != self.workers:
            product = " * ".join(f"{name} {self.dims.sizes[name]}" for name in DENSE)
            raise ProgramError(f"{product} = {self.dims.world} is not the {self.workers} workers of the mesh")

    @property
    def world_size(self) -> int:
        """How many ranks (WORLD_SIZE)."""
        return len(self.gpus)

    @property
    def workers(self) -> int:
        """How many ranks compute layers."""
        return self.world_size - self.servers

    @property
    def n_nodes(self) -> int:
        """How many nodes have workers."""
        return -(-self.workers // self.nproc_per_node)

    def world_group(self) -> Ints:
        """(1, world_size): one group of everybody."""
        return np.arange(self.world_size, dtype=np.int64).reshape(1, -1)

    @property
    def layout(self) -> Dims:
        """The dimensions, also where there is only data parallelism."""
        return self.dims if self.dims is not None else _data_parallel(self)

    def size(self, *dims: str) -> int:
        """Members of a group over these dimensions, such as ``size("dp", "cp")``."""
        return self.layout.size(*dims)

    def groups(self, *dims: str) -> Ints:
        """Groups over one dimension or several, each worker in exactly one.

        Rows and members are in the order of Megatron's RankGenerator: both count through the dimensions with the
        mesh's fastest-varying one first, however the arguments are ordered.

        Parameters
        ----------
        dims : ``"tp"``, ``"cp"``, ``"dp"``, ``"pp"``, their parts ``"dp_replicate"``, ``"dp_shard"``, ``"cp_a2a"``,
            ``"cp_p2p"``; of experts ``"etp"``, ``"ep"``, ``"edp"``, ``"efsdp"``. ``"embd"`` alone is the first and the
            last rank of every pipeline, where tied word embeddings are.

        Returns (groups, members) int64, read-only, and the same array at every call: the engine recognises a group by
        it. Raises :class:`ProgramError` for an unknown dimension, or cp beside one of experts.
        """
        if dims == ("embd",):
            return _groups(self, (), ("embd",))
        axes, chosen = self.layout.axes_of(*dims)
        return _groups(self, axes, tuple(axis for axis in chosen if self.layout.sizes[axis] > 1))

    def coordinates(self, *dims: str) -> Ints:
        """(workers,) int64, each worker's place in its group over these dimensions; read-only."""
        return _coordinates(self, self.layout.axes_of(*dims))

    def coordinate(self, rank: int) -> dict[str, int]:
        """A worker's place in every dimension. Raises :class:`ProgramError` for a rank that is no worker."""
        if not 0 <= rank < self.workers:
            raise ProgramError(f"rank {rank} is none of the {self.workers} workers of the mesh")
        return {name: int(self.coordinates(name)[rank]) for name in NAMES}

    def ranks(self, **at: int) -> Ints:
        """Workers at these coordinates, ascending: ``ranks(pp=2)`` are the ranks of the third stage."""
        selected = np.ones(self.workers, dtype=bool)
        for name, index in at.items():
            if not 0 <= index < self.size(name):
                raise ProgramError(f"{name} = {index}: the mesh has {self.size(name)} along {name}, counted from 0")
            selected &= self.coordinates(name) == index
        return np.flatnonzero(selected).astype(np.int64)


@kept_with_first(maxsize=1)
def _data_parallel(mesh: Mesh) -> Dims:
    return Dims(dp=mesh.workers)


# More than there are sets of axes: what is remembered is never forgotten, so a group stays one and the same array.
@kept_with_first(maxsize=1024)
def _groups(mesh: Mesh, axes: tuple[str, ...], chosen: tuple[str, ...]) -> Ints:
    if chosen == ("embd",):
        pipelines = mesh.groups("pp")
        groups = pipelines[:, [0, -1]] if pipelines.shape[1] > 1 else pipelines
    else:
        slow_first = axes[::-1]
        grid = np.arange(mesh.workers, dtype=np.int64).reshape([mesh.layout.sizes[axis] for axis in slow_first])
        order = sorted(range(len(axes)), key=lambda i: slow_first[i] in chosen)  # a stable sort: others, then members
        groups = grid.transpose(order).reshape(-1, mesh.layout.size_of(chosen))
    groups = np.ascontiguousarray(groups)
    groups.flags.writeable = False
    return groups


@kept_with_first(maxsize=1024)
def _coordinates(mesh: Mesh, dims: tuple[tuple[str, ...], tuple[str, ...]]) -> Ints:
    axes, chosen = dims
    place = np.zeros(mesh.workers, dtype=np.int64)
    step = 1
    stride = 1
    for axis in axes:
        size = mesh.layout.sizes[axis]
        if axis in chosen:
            place += np.arange(mesh.workers) // stride % size * step
            step *= size
        stride *= size
    place.flags.writeable = False
    return place
