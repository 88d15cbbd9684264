"""What NCCL's search and tuner read of a communicator, without a graph."""

from __future__ import annotations

from dataclasses import dataclass

from clustersim.collectives.nccl.view import NodeView


@dataclass(frozen=True)
class System:
    """A communicator on its machines.

    Parameters
    ----------
    n_nodes : nodes, or NVLink domains where several hosts share one.
    n_ranks : members over all nodes.
    views : the distinct :class:`NodeView` of the nodes; one where all nodes are alike.
    net_latency : [s] the transport reports per message: 0 for InfiniBand and RoCE, tens of microseconds for EFA.
    sharp : the network reduces (InfiniBand SHARP), which CollNet and multi-node NVLS need.
    sm_max : newest compute capability in the group; 0 if all are alike.
    """

    n_nodes: int
    n_ranks: int
    views: tuple[NodeView, ...]
    net_latency: float = 0.0
    sharp: bool = False
    sm_max: int = 0

    @property
    def sm(self) -> int:
        """Oldest compute capability in the group; the tuner's tables go by it."""
        return min(view.sm for view in self.views)

    @property
    def ranks_per_node(self) -> float:
        """Members per node, on average where nodes differ."""
        return self.n_ranks / self.n_nodes


@dataclass(frozen=True)
class Asked:
    """What NCCL's choice depends on besides kind, size and machine.

    Parameters
    ----------
    dtype, redop : of elements, and how they are reduced.
    version : (major, minor) of NCCL; the newest known constants not newer than it.
    force_ll128 : use LL128 even where NCCL holds it unsafe, as NCCL_PROTO does.
    """

    dtype: str = "fp32"
    redop: str = "sum"
    version: tuple[int, int] = (2, 28)
    force_ll128: bool = False
