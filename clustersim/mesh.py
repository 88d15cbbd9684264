"""Which rank runs on which GPU, and the groups ranks form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clustersim.errors import ProgramError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Mesh:
    """Ranks on GPUs, node-major as torchrun numbers them: ``RANK = NODE_RANK * nproc_per_node + LOCAL_RANK``.

    Parameters
    ----------
    gpus : (world_size,) int, the vertex id in the Topology of the GPU each rank drives; a server's may be a CPU.
    nproc_per_node : int, workers on a node (LOCAL_WORLD_SIZE).
    servers : int, how many ranks, the last ones, serve parameters and compute no layers.

    >>> mesh = Mesh(np.arange(16), 8)
    >>> mesh.world_size, mesh.n_nodes
    (16, 2)
    >>> mesh.world_group().shape
    (1, 16)
    """

    gpus: Ints
    nproc_per_node: int
    servers: int = 0

    def __post_init__(self) -> None:
        # A dedicated server's GPU is missing among its node's workers, so only a world without servers must divide.
        if self.nproc_per_node < 1 or (not self.servers and len(self.gpus) % self.nproc_per_node):
            raise ProgramError(f"a world of {len(self.gpus)} ranks does not divide into nodes of {self.nproc_per_node}")

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
