"""NCCL's tuner constants by version: ``data/nccl.toml``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from clustersim.core.texts import Table, data_table

ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
"""In NCCL's order, which settles ties."""

PROTOCOLS = ("LL", "LL128", "Simple")

Row = tuple[float, float, float]
Rows = tuple[Row, Row, Row, Row]
Latencies = Mapping[str, Row]


@dataclass(frozen=True)
class TunerConstants:
    """What the tuner's formulas use. Latencies [us] per protocol LL, LL128, Simple; bandwidths [GB/s].

    Parameters
    ----------
    since : first (major, minor) they hold for.
    base : per algorithm, launch and setup.
    nvlink, pcie, net : per algorithm, one step over that kind of path.
    ll_max : total of LL; the row is the GPU's on one node, the CPU's (0 Intel, 1 AMD) on several.
    ring_ll128, tree_ll128, tree, nvls_tree : per channel.
    nvls_efficiency : per architecture, from 2.28. Before, algorithm bandwidth is ``nvls_ratio`` of the bus's, or for
        trees ``nvls_tree_by_nodes`` * N/2(N-1) of it where that is set.
    ring_ll_share, ring_ll128_share, pat_share : of the bus bandwidth; ``lone_ring_ll128_share`` with one GPU a node.
    net_rounds : network steps of a ring all-reduce are 2(N-1), before 2.23 they were counted as 2N.
    post_overhead : steps on several nodes cost the host at least a post.
    ll_net_factor : on LL steps inside nodes when there are several.
    lone_uses_tree : one GPU a node takes the tree's network latency.
    net_latency_adds : the NIC's latency comes on top of NCCL's (twice for Simple), else instead.
    ampere_cap : on the bus bandwidth of sm80, inf without.
    blackwell_ll128 : Blackwell's rings inside one NVLink domain may take LL128.
    lacking : algorithms that it does not have.
    """

    since: tuple[int, int]
    base: Latencies
    nvlink: Latencies
    pcie: Latencies
    net: Latencies
    ll_max: Rows
    ring_ll128: Rows
    tree_ll128: Rows
    tree: Rows
    nvls_tree: Rows
    nvls_efficiency: tuple[float, float, float, float] = (0.0, 0.0, 0.85, 0.74)
    nvls_ratio: float = 0.0
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
    blackwell_ll128: bool = True
    lacking: frozenset[str] = frozenset()


class _TunerFile(msgspec.Struct):
    tree_correction: dict[str, tuple[float, ...]]
    versions: list[TunerConstants]


@lru_cache(maxsize=1)
def _file() -> _TunerFile:
    """The shipped file, with what each version shares with the newer one before it written out."""
    data = copy.deepcopy(data_table("nccl"))
    newer: Table = {}
    for version in data["versions"]:
        for name, value in newer.items():
            version[name] = value | version.get(name, {}) if isinstance(value, dict) else version.get(name, value)
        newer = version
    return msgspec.convert(data, _TunerFile)


def tree_correction(protocol: str) -> tuple[float, ...]:
    """Share of its bandwidth a tree all-reduce reaches, by floor(log2(bytes / 64))."""
    return _file().tree_correction[protocol]


def constants(version: tuple[int, int]) -> TunerConstants:
    """The constants of the newest known version not newer than the one asked for, else of the oldest known."""
    versions = _file().versions
    return next((table for table in versions if table.since <= version), versions[-1])
