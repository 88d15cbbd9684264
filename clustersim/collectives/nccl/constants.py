"""NCCL's tuner constants by version, from the history of nccl src/graph/tuning.cc (figures: NVIDIA, BSD licence).

Rows of the per-architecture tables are Volta and older, Ampere, Hopper, Blackwell; columns are 1, 2 and more nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
"""In NCCL's order, which settles ties."""

PROTOCOLS = ("LL", "LL128", "Simple")

Table = tuple[tuple[float, float, float], ...]
Latencies = Mapping[str, tuple[float, float, float]]


@dataclass(frozen=True)
class Constants:
    """What the tuner's formulas use. Latencies [us] per protocol LL, LL128, Simple; bandwidths [GB/s].

    Parameters
    ----------
    since : first (major, minor) they hold for.
    base : per algorithm, launch and setup.
    nvlink, pcie, net : per algorithm, one step over that kind of path.
    ll_max : total of LL; the row is the GPU's on one node, the CPU's (0 Intel, 1 AMD) on several.
    ring_ll128, tree_ll128, tree, nvls_tree : per channel.
    nvls_efficiency : per architecture, from 2.28. Before, algorithm bandwidth is ``nvls_ratio`` or ``nvls_tree_ratio``
        of the bus's, or ``nvls_tree_by_nodes`` * N/2(N-1) of it where that is set.
    ring_ll_share, ring_ll128_share, pat_share : of the bus bandwidth; ``lone_ring_ll128_share`` with one GPU a node.
    net_rounds : network steps of a ring all-reduce are 2(N-1), before 2.23 they were counted as 2N.
    post_overhead : steps on several nodes cost the host at least a post.
    ll_net_factor : on LL steps inside nodes when there are several.
    lone_uses_tree : one GPU a node takes the tree's network latency.
    net_latency_adds : the NIC's latency comes on top of NCCL's (twice for Simple), else instead.
    ampere_cap : on the bus bandwidth of sm80, inf without.
    max_channels : execution channels.
    """

    since: tuple[int, int]
    base: Latencies
    nvlink: Latencies
    pcie: Latencies
    net: Latencies
    ll_max: Table
    ring_ll128: Table
    tree_ll128: Table
    tree: Table
    nvls_tree: Table
    nvls_efficiency: tuple[float, ...] = (0.0, 0.0, 0.85, 0.74)
    nvls_ratio: float = 0.0
    nvls_tree_ratio: float = 0.0
    nvls_tree_by_nodes: float = 0.0
    ring_ll_share: float = 0.5
    ring_ll128_share: float = 0.92
    lone_ring_ll128_share: float = 0.92
    pat_share: float = 0.75
    net_rounds: bool = True
    post_overhead: bool = True
    ll_net_factor: float = 1.0
    lone_uses_tree: bool = True
    net_latency_adds: bool = True
    ampere_cap: float = float("inf")
    max_channels: int = 64
    lacking: frozenset[str] = field(default_factory=frozenset)


_NONE = (0.0, 0.0, 0.0)
_V2_30 = Constants(
    since=(2, 30),
    base={
        "tree": (6.8, 14.0, 8.4),
        "ring": (6.6, 14.0, 8.4),
        "collnet_direct": _NONE,
        "collnet_chain": _NONE,
        "nvls": _NONE,
        "nvls_tree": _NONE,
        "pat": (8.0, 8.0, 8.0),
    },
    nvlink={
        "tree": (0.6, 1.25, 4.0),
        "ring": (0.6, 1.9, 3.4),
        "collnet_direct": (0.0, 0.0, 3.7),
        "collnet_chain": (0.0, 0.0, 2.8),
        "nvls": (0.0, 0.0, 25.0),
        "nvls_tree": (0.0, 0.0, 25.0),
        "pat": (0.0, 0.0, 4.0),
    },
    pcie={
        "tree": (1.0, 1.9, 4.0),
        "ring": (1.0, 2.5, 5.7),
        "collnet_direct": (0.0, 0.0, 3.7),
        "collnet_chain": (0.0, 0.0, 2.8),
        "nvls": _NONE,
        "nvls_tree": _NONE,
        "pat": (0.0, 0.0, 4.0),
    },
    net={
        "tree": (5.0, 8.5, 14.0),
        "ring": (2.7, 4.0, 14.0),
        "collnet_direct": (0.0, 0.0, 31.0),
        "collnet_chain": (0.0, 0.0, 30.0),
        "nvls": (0.0, 0.0, 18.0),
        "nvls_tree": (0.0, 0.0, 20.9),
        "pat": (0.0, 0.0, 14.0),
    },
    ll_max=((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0)),
    ring_ll128=((20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (36.7, 36.7, 36.7), (40.0, 40.0, 40.0)),
    tree_ll128=((20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (36.7, 36.7, 29.0), (55.6, 31.67, 20.0)),
    tree=((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0)),
    nvls_tree=(_NONE, _NONE, (0.0, 57.7, 45.5), (0.0, 96.0, 80.0)),
)


def _changed(table: Latencies, **rows: tuple[float, float, float]) -> Latencies:
    return {**table, **rows}


def _row(table: Table, index: int, row: tuple[float, float, float]) -> Table:
    return (*table[:index], row, *table[index + 1 :])


_V2_28 = replace(
    _V2_30,
    since=(2, 28),
    ring_ll128=_row(_V2_30.ring_ll128, 3, (73.4, 34.6, 73.4)),
    nvls_tree=_row(_V2_30.nvls_tree, 3, (0.0, 96.0, 43.8)),
)
_V2_24 = replace(  # NVLS is a fixed share of the search bandwidth before 2.28
    _V2_28,
    since=(2, 24),
    nvls_ratio=5 / 6,
    nvls_tree_ratio=5 / 6,
    net=_changed(_V2_28.net, nvls_tree=(0.0, 0.0, 14.0)),
)
_V2_23 = replace(_V2_24, since=(2, 23), pat_share=0.85)
_V2_21 = replace(
    _V2_23,
    since=(2, 21),
    base=_changed(_V2_23.base, tree=(6.8, 14.0, 0.0)),
    nvlink=_changed(_V2_23.nvlink, tree=(0.6, 1.25, 28.0)),
    pcie=_changed(_V2_23.pcie, tree=(1.0, 1.9, 28.0)),
    net=_changed(_V2_23.net, tree=(5.0, 8.5, 28.0)),
    lone_ring_ll128_share=0.7,
    net_rounds=False,
    lone_uses_tree=False,
    max_channels=32,
    lacking=frozenset({"pat"}),
)
_V2_19 = replace(
    _V2_21,
    since=(2, 19),
    nvlink=_changed(_V2_21.nvlink, nvls=(0.0, 0.0, 23.0), nvls_tree=(0.0, 0.0, 23.0)),
    ll_max=_row(_row(_V2_21.ll_max, 2, (87.7, 22.5, 19.0)), 3, (87.7, 22.5, 19.0)),
    ring_ll_share=0.25,
)
_V2_18 = replace(
    _V2_19,
    since=(2, 18),
    base=_changed(_V2_19.base, nvls=(40.0, 40.0, 40.0), nvls_tree=(40.0, 40.0, 40.0)),
    nvlink=_changed(_V2_19.nvlink, tree=(0.6, 1.25, 4.0), nvls=_NONE, nvls_tree=_NONE),
    pcie=_changed(_V2_19.pcie, tree=(1.0, 1.9, 4.0)),
    nvls_ratio=0.75,
    nvls_tree_by_nodes=0.70,
)
_V2_14 = replace(
    _V2_18,
    since=(2, 14),
    base=_changed(_V2_18.base, tree=(4.4, 4.4, 0.0), ring=(3.6, 10.0, 8.4)),
    nvlink=_changed(_V2_18.nvlink, tree=(0.52, 1.25, 28.0), ring=(0.47, 1.9, 3.4)),
    pcie=_changed(_V2_18.pcie, tree=(1.0, 1.9, 28.0)),
    net=_changed(_V2_18.net, ring=(2.7, 4.0, 9.6)),
    post_overhead=False,
    ll_net_factor=1.8,
    net_latency_adds=False,
    ampere_cap=235.0,
    lacking=frozenset({"pat", "nvls", "nvls_tree"}),
)
_V2_8 = replace(
    _V2_14,
    since=(2, 8),
    net=_changed(_V2_14.net, ring=(2.7, 4.0, 28.0)),
    lacking=frozenset({"pat", "nvls", "nvls_tree", "collnet_chain"}),
)
VERSIONS = (_V2_30, _V2_28, _V2_24, _V2_23, _V2_21, _V2_19, _V2_18, _V2_14, _V2_8)
"""Newest first."""

TREE_CORRECTION = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
    ),
}
"""Share of its bandwidth a tree all-reduce reaches, by floor(log2(bytes / 64))."""


def constants(version: tuple[int, int]) -> Constants:
    """The constants of the newest known version not newer than the one asked for, else of the oldest known."""
    return next((known for known in VERSIONS if known.since <= version), VERSIONS[-1])
