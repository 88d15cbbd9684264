"""The tuner's formulas: latency and algorithm bandwidth of every algorithm and protocol, before the size is known.

Latencies add steps, bandwidths start from the search (:mod:`clustersim.collectives.nccl.search`) and are capped by
measured limits per generation (:mod:`clustersim.collectives.nccl.constants`). Source: nccl src/graph/tuning.cc. Units
here are NCCL's, us and GB/s.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from clustersim.collectives.nccl.constants import ALGORITHMS, PROTOCOLS, TunerConstants, constants
from clustersim.collectives.nccl.graph import TREE, ChannelGraph
from clustersim.collectives.nccl.view import NVB, NVL, PXB, PXN, NcclRequest, System
from clustersim.core.errors import ProgramError, nearest
from clustersim.core.topology import PATH_CLASSES

KINDS: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree"),
    "all_gather": ("ring", "collnet_direct", "nvls", "pat"),
    "reduce_scatter": ("ring", "collnet_direct", "nvls", "pat"),
    "broadcast": ("ring",),
    "reduce": ("ring",),
}
"""What can do what. Other collectives are grouped sends and receives, for which there is nothing to choose."""

_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_SIMPLE_ONLY = ("collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3", "float8_e5m2", "f8e4m3", "f8e5m2")
_NARROW = (*_FP8, "int8", "uint8")


class Rating(msgspec.Struct, frozen=True):
    """Latency [us] and algorithm bandwidth [GB/s] of a pair, before the size is known; ``why`` says why it is out."""

    algorithm: str
    protocol: str
    latency: float
    bandwidth: float
    why: str = ""


def ratings(
    kind: str, system: System, graphs: Mapping[str, ChannelGraph], nccl_request: NcclRequest | None = None
) -> tuple[Rating, ...]:
    """Every pair for a kind, in NCCL's order; those NCCL would not use carry the reason.

    Raises :class:`ProgramError` for a kind NCCL's tuner has nothing to choose for.
    """
    if kind not in KINDS:
        raise ProgramError(f"NCCL has no algorithms to choose from for {kind!r}; {nearest(kind, KINDS)}")
    nccl_request = nccl_request or NcclRequest()
    model = _RatingModel(kind, system, graphs, constants(nccl_request.version))
    table = []
    for algorithm in ALGORITHMS:
        if algorithm not in KINDS[kind]:
            continue
        for protocol in PROTOCOLS:
            if protocol != "Simple" and algorithm in _SIMPLE_ONLY:
                continue
            why = model.forbidden(algorithm, protocol, nccl_request)
            latency, bandwidth = (0.0, 0.0) if why else (model.latency(algorithm, protocol), 0.0)
            if not why:
                bandwidth = model.bandwidth(algorithm, protocol)
                why = "" if bandwidth > 0 else "no bandwidth"
            if (
                not why
                and algorithm == "ring"
                and nccl_request.dtype in _FP8
                and kind in _REDUCING
                and system.n_ranks > 8
            ):
                # too many roundings: anything else first
                latency = latency * 1024
                bandwidth = bandwidth / 1024
            table.append(Rating(algorithm, protocol, latency, bandwidth, why))
    return tuple(table)


def generation_row(sm: int) -> int:
    """Row of NCCL's tables by GPU generation, from the compute capability."""
    return 3 if sm >= 100 else 2 if sm >= 90 else 1 if sm >= 80 else 0


class _RatingModel:
    """The formulas for one kind on one system."""

    def __init__(self, kind: str, system: System, graphs: Mapping[str, ChannelGraph], table: TunerConstants) -> None:
        self.kind = kind
        self.system = system
        self.graphs = graphs
        self.table = table
        self.ranks = system.n_ranks
        self.nodes = system.n_nodes
        self.per_node = system.ranks_per_node
        self.arch = generation_row(system.sm)
        self.column = min(self.nodes, 3) - 1
        self.steps = {"all_reduce": 2 * (self.ranks - 1), "broadcast": self.ranks, "reduce": self.ranks}.get(
            kind, self.ranks - 1
        )
        self.whole = max(1, self.ranks // self.nodes)
        self.levels = max(self.nodes, 1).bit_length() - 1

    # ---- who may

    def forbidden(self, algorithm: str, protocol: str, nccl_request: NcclRequest) -> str:
        """Why NCCL would not use a pair, or nothing."""
        if algorithm in self.table.lacking:
            return f"NCCL {'.'.join(map(str, self.table.since))} has no {algorithm}"
        if self.ranks < 2:
            return "" if (algorithm, protocol) == ("ring", "Simple") else "one rank"
        if algorithm.startswith("collnet"):
            return self._no_collnet(algorithm)
        if algorithm in ("nvls", "nvls_tree"):
            return self._no_nvls(algorithm, nccl_request.dtype, nccl_request.redop)
        if algorithm == "pat" and self.per_node != 1:
            return "pat needs one GPU a node"
        if protocol == "LL128" and not nccl_request.force_ll128:
            return self._no_ll128(algorithm)
        return ""

    def _no_nvls(self, algorithm: str, dtype: str, redop: str) -> str:
        system = self.system
        graph = self.graphs[algorithm]
        if graph.n_channels < 2 or min(len(view.gpus) for view in system.views) <= 2:
            return f"{algorithm} needs more than two GPUs behind switches that reduce (NVLink SHARP)"
        if self.kind != "all_gather" and (dtype in _NARROW or redop not in ("sum", "min", "max")):
            return f"the switches cannot do {redop} of {dtype}"
        if algorithm == "nvls_tree" and self.nodes == 1:
            return "nvls_tree needs several nodes"
        if algorithm == "nvls" and self.nodes > 1 and not system.sharp:
            return "nvls over several nodes needs a network that reduces (SHARP)"
        return ""

    def _no_collnet(self, algorithm: str) -> str:
        if not self.system.sharp or self.nodes == 1:
            return f"{algorithm} needs several nodes on a network that reduces (SHARP)"
        if self.system.n_ranks != self.nodes * self.per_node:
            return f"{algorithm} needs as many ranks on every node"
        return ""

    def _no_ll128(self, algorithm: str) -> str:
        system = self.system
        graph = self.graphs[algorithm]
        farthest = PXN if system.sm >= 90 and self.table.since >= (2, 24) else PXB
        if graph.type_inter > farthest and self.nodes > 1:
            return f"LL128 needs a NIC no farther than {PATH_CLASSES[farthest]}, not {PATH_CLASSES[graph.type_inter]}"
        if graph.type_intra > NVB:
            return f"LL128 needs NVLink inside the node, not {PATH_CLASSES[graph.type_intra]}"
        if system.sm < 70:
            return "LL128 needs Volta or newer"
        if system.sm >= 100 and self.nodes == 1 and not self.table.blackwell_ll128:
            return f"NCCL {'.'.join(map(str, self.table.since))} takes no LL128 inside a Blackwell NVLink domain"
        if system.sm_max > system.sm and system.sm < 90:
            return "LL128 needs GPUs of one generation"
        return ""

    # ---- bandwidth

    def bandwidth(self, algorithm: str, protocol: str) -> float:
        """Algorithm bandwidth [GB/s]."""
        if self.ranks < 2:
            return 5000.0
        graph = self.graphs.get(algorithm, self.graphs["ring"])
        bus = self._bus(algorithm, protocol, graph)
        rings = ("ring", "nvls", "nvls_tree")
        if self.kind in ("all_gather", "reduce_scatter") and algorithm != "ring":
            return bus
        if algorithm not in rings:
            return bus * 0.5
        if algorithm == "nvls_tree" and self.table.nvls_tree_by_nodes:
            return bus * self.table.nvls_tree_by_nodes * self.nodes / (2 * (self.nodes - 1))
        if algorithm != "ring" and self.table.nvls_ratio:
            return bus * self.table.nvls_ratio
        return bus * self.ranks / self.steps

    def _bus(self, algorithm: str, protocol: str, graph: ChannelGraph) -> float:
        collnet = algorithm.startswith("collnet")
        per_channel = graph.bw_intra if self.nodes <= 2 or collnet else graph.bw_inter
        bus = graph.n_channels * per_channel
        if self.system.sm == 80:
            bus = min(bus, self.table.ampere_cap)
        if algorithm == "ring":
            return self._ring_bus(protocol, graph, bus)
        if algorithm == "tree":
            return self._tree_bus(protocol, graph, bus)
        if algorithm == "nvls" or algorithm == "nvls_tree":
            return graph.n_channels * self._nvls_channel(algorithm, graph)
        if algorithm == "pat":
            return bus * self.table.pat_share
        if algorithm == "collnet_direct":
            return self._collnet_bus(graph, bus)
        return bus

    def _ll_max(self) -> float:
        row = self.arch if self.nodes == 1 else int(any(v.cpu_vendor == "amd" for v in self.system.views))
        return self.table.ll_max[row][self.column]

    def _ring_bus(self, protocol: str, graph: ChannelGraph, bus: float) -> float:
        if protocol == "LL":
            share = self.table.ring_ll_share
            if share < 0.5 and self.nodes == 1 and self.kind not in ("all_reduce", "reduce"):
                share = 1 / 3
            return min(self._ll_max(), bus * share)
        if protocol == "LL128":
            share = self.table.ring_ll128_share if self.per_node >= 2 else self.table.lone_ring_ll128_share
            return min(bus * share, graph.n_channels * self.table.ring_ll128[self.arch][self.column])
        return bus

    def _tree_bus(self, protocol: str, graph: ChannelGraph, bus: float) -> float:
        bus = min(0.92 * bus, graph.n_channels * self.table.tree[self.arch][self.column])
        if protocol == "LL":
            bus = min(bus / 3.8, self._ll_max())
        elif protocol == "LL128":
            share = 7 / 9 if self.nodes == 1 else 120 / 128
            bus = min(bus * share, graph.n_channels * self.table.tree_ll128[self.arch][self.column])
        return bus * 0.85 if graph.pattern == TREE else bus

    def _nvls_channel(self, algorithm: str, graph: ChannelGraph) -> float:
        peer_share = (self.per_node - 1) / self.per_node
        if self.table.nvls_ratio:
            if algorithm == "nvls_tree":
                return min(graph.bw_intra, graph.bw_inter if self.nodes <= 2 else graph.bw_inter / 2)
            if self.kind == "all_reduce":
                return min(graph.bw_intra, graph.bw_inter)
            return min(graph.bw_intra * peer_share, 0.9 * graph.bw_inter)
        heads = graph.n_channels
        intra = graph.bw_intra * self.table.nvls_efficiency[self.arch] * (heads - 1) / heads
        intra *= 2 if self.kind == "all_reduce" else peer_share
        if algorithm == "nvls":
            return min(intra, graph.bw_inter)
        inter = graph.bw_inter * (2 if self.nodes <= 2 else 1)
        return min(intra, inter, self.table.nvls_tree[self.arch][self.column])

    def _collnet_bus(self, graph: ChannelGraph, bus: float) -> float:
        if self.kind != "all_reduce":
            return self.per_node * min(graph.bw_intra, 0.9 * graph.bw_inter)
        crowding = self.per_node / max(1, graph.n_channels)
        bus /= crowding - (crowding - 1) / 2
        return bus * 0.85 if self.system.sm >= 90 else bus

    # ---- latency

    def latency(self, algorithm: str, protocol: str) -> float:
        """Microseconds: setup and every step in sequence."""
        if self.ranks < 2:
            return 0.0
        table = self.table
        column = PROTOCOLS.index(protocol)
        base = table.base[algorithm][column]
        intra = self._intra(algorithm, column)
        inter = self._inter(algorithm, column)
        if algorithm == "ring":
            return base + self._ring_latency(column, intra, inter)
        if algorithm == "tree":
            return base + 2 * ((self.whole - 1) * intra + self.levels * inter)
        if algorithm == "nvls":
            return base + intra + (inter if self.nodes > 1 else 0.0)
        if algorithm == "nvls_tree":
            return base + intra + 2 * self.levels * inter
        if algorithm == "pat":
            return base + self.levels * inter / 3.5 + 2.8 * self.ranks
        if algorithm == "collnet_direct":
            return base + 2 * (min(1, self.whole - 1) * intra + 0.4 * (self.whole - 1)) + inter
        return base + 2 * (self.whole - 1) * intra + inter

    def _intra(self, algorithm: str, column: int) -> float:
        graph = self.graphs.get(algorithm, self.graphs["ring"])
        steps = self.table.nvlink if graph.type_intra == NVL else self.table.pcie
        intra = steps[algorithm][column]
        return intra * self.table.ll_net_factor if self.nodes > 1 and column == 0 else intra

    def _inter(self, algorithm: str, column: int) -> float:
        nic = self.system.net_latency * 1e6 if self.nodes > 1 else 0.0
        lone = self.per_node == 1 and self.table.lone_uses_tree
        own = self.table.net["tree" if lone else algorithm][column]
        if not self.table.net_latency_adds:
            return nic or own
        return own + (2 * nic if column == 2 else nic)

    def _ring_latency(self, column: int, intra: float, inter: float) -> float:
        if self.kind in ("broadcast", "reduce"):
            ring = self.graphs["ring"]
            latencies = self.table.net if self.nodes > 1 else None
            latencies = latencies or (self.table.nvlink if ring.type_intra == NVL else self.table.pcie)
            if ring.same_channels:
                return latencies["ring"][column]
            return self.steps * latencies["tree" if column == 2 else "ring"][column]
        if self.nodes > 1 and self.table.post_overhead:
            vendors = {view.cpu_vendor for view in self.system.views}
            post = 2.0 if vendors == {"amd"} else 1.0
            intra = max(intra, post * 3 if column == 2 else post)
        rounds = 2 if self.kind == "all_reduce" else 1
        crossing = 0 if self.nodes == 1 else rounds * (self.nodes - 1)
        if self.nodes > 1 and self.kind == "all_reduce" and not self.table.net_rounds:
            crossing = min(2 * self.nodes, self.steps)
        return (self.steps - crossing) * intra + crossing * inter
