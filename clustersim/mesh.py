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
    gpus : (world_size,) int, the vertex id in the Topology of the GPU each rank drives.
    nproc_per_node : int, ranks on a node (LOCAL_WORLD_SIZE).

    >>> mesh = Mesh(np.arange(16), 8)
    >>> mesh.world_size, mesh.n_nodes
    (16, 2)
    >>> mesh.world_group().shape
    (1, 16)
    """

    gpus: Ints
    nproc_per_node: int

    def __post_init__(self) -> None:
        if self.nproc_per_node < 1 or len(self.gpus) % self.nproc_per_node:
            raise ProgramError(f"a world of {len(self.gpus)} ranks does not divide into nodes of {self.nproc_per_node}")

    @property
    def world_size(self) -> int:
        """How many ranks (WORLD_SIZE)."""
        return len(self.gpus)

    @property
    def n_nodes(self) -> int:
        """How many nodes are used."""
        return self.world_size // self.nproc_per_node

    def world_group(self) -> Ints:
        """(1, world_size): one group of everybody."""
        return np.arange(self.world_size, dtype=np.int64).reshape(1, -1)
