"""The ``nccl`` backend: algorithm and protocol as NCCL's tuner chooses, time from measured constants and link loads.

The byte term is not a table: the algorithm's traffic over its channels is routed onto links, each edge enlarged by
what its protocol and path achieve (:mod:`clustersim.collectives.costs`), and the narrowest link sets the rate. So a slow
NIC, a shared PCIe switch or an odd number of GPUs changes the answer without a special case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from clustersim.collectives import nccl
from clustersim.collectives.base import Floats, Group, Ints, Plan, Request, Traffic, bus_factor
from clustersim.collectives.bounds import lower_bound
from clustersim.collectives.channels import channels
from clustersim.collectives.costs import COSTS, Costs, generation
from clustersim.collectives.islands import kinds_of_members, member_islands
from clustersim.collectives.loads import link_loads
from clustersim.collectives.registry import ALGORITHMS
from clustersim.routing import router

TUNED = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"})
"""Kinds NCCL's tuner chooses for; the rest are grouped sends and receives."""

EDGE_CLASSES = ("nvlink", "pcie", "shm", "net")
_CLASS_OF_PATH = {"NVL": "nvlink", "NVB": "nvlink", "C2C": "nvlink", "LOC": "nvlink", "PIX": "pcie", "PXB": "pcie"}
_ROOTED = frozenset({"broadcast", "reduce"})


@dataclass(frozen=True, eq=False)
class _Loads:
    """Link loads per edge class of one algorithm on one group, per byte of S.

    ``links`` (k,), ``by_class`` (4, k) bytes on each link per payload byte; steps as in Traffic.
    """

    links: Ints
    by_class: Floats
    steps: int
    net_steps: int


@dataclass(eq=False)
class _Memo:
    """What is computed once per group: its system, its shape, and loads.

    ``islands`` and ``per_island``: NVLink domains (nodes, for most machines) and members on the fullest; ``age``: GPU
    generation; ``net``: transport.
    """

    system: nccl.System
    islands: int
    per_island: int
    age: str
    net: str
    loads: dict[tuple[str, str, int, int], _Loads] = field(default_factory=dict)


@lru_cache(maxsize=1024)
def _memo(group: Group) -> _Memo:
    system = nccl.system_of(group)
    counts = np.bincount(member_islands(group))
    net = group.node_type.net
    return _Memo(system, len(counts), int(counts.max()), generation(system.sm), net if net != "none" else "ib")


def plan(request: Request, group: Group, n_channels: int | None = None, costs: Costs = COSTS) -> Plan:
    """The Plan of one collective under NCCL. Raises ProgramError for a pin that cannot do it."""
    memo = _memo(group)
    if request.kind not in TUNED:
        return _p2p_plan(request, group, costs)
    chosen = nccl.choose(
        request.kind,
        request.nbytes,
        memo.system,
        dtype=request.dtype,
        algorithm=request.algorithm,
        protocol=request.protocol,
        version=group.nccl_version,
    )
    count = n_channels or nccl.search_channels(chosen.algorithm, memo.system)
    loads = _loads(request, group, chosen.algorithm, count)
    weights = _weights(loads, chosen.algorithm, chosen.protocol, group, costs)
    hops = _hop_time(request.kind, chosen.algorithm, chosen.protocol, loads, group, costs)
    return _finish(request, group, chosen.algorithm, chosen.protocol, count, loads, weights, hops, costs)


def _finish(
    request: Request,
    group: Group,
    algorithm: str,
    protocol: str,
    count: int,
    loads: _Loads,
    weights: Floats,
    hops: float,
    costs: Costs,
) -> Plan:
    used = weights > 0
    links, weights = loads.links[used], weights[used]
    rate = float(np.min(group.topology.link_bandwidth[links] / weights)) if len(links) else math.inf
    wire = request.nbytes / rate
    base = costs.rooted_base if request.kind in _ROOTED else costs.base
    if group.launch == "threads":
        base += costs.threads_base
    total = _floored(base + _norm(hops, wire, costs.fill_norm), _host_floor(request.kind, group, costs), costs)
    return Plan(
        kind=request.kind,
        algorithm=algorithm,
        protocol=protocol,
        n_channels=count,
        nbytes=request.nbytes,
        latency=total - wire,
        links=links,
        weights=weights,
        ceiling=math.inf,
        lower_bound=lower_bound(request, group),
        bus_factor=bus_factor(request.kind, group.size),
    )


def _norm(a: float, b: float, p: float) -> float:
    return float((a**p + b**p) ** (1.0 / p))


def _floored(device_time: float, floor: float, costs: Costs) -> float:
    return _norm(device_time, floor, costs.floor_norm)


def _host_floor(kind: str, group: Group, costs: Costs) -> float:
    """Seconds below which no collective of this launch mode comes back."""
    if group.launch != "single_process":
        return costs.host_floor
    many = costs.host_p2p_factor if kind == "all_to_all" else 1.0
    return costs.host_floor_per_gpu * group.ranks_per_node * many


# ---------------------------------------------------------------------------------------------------- bytes


def _loads(request: Request, group: Group, algorithm: str, count: int) -> _Loads:
    memo = _memo(group)
    key = (request.kind, algorithm, count, request.root)
    if key not in memo.loads:
        row = ALGORITHMS[algorithm]
        traffic = row.traffic(request, group, channels(group, count, row.layout))
        memo.loads[key] = _route(traffic, group)
    return memo.loads[key]


def _route(traffic: Traffic, group: Group) -> _Loads:
    """Traffic onto links, one row per edge class."""
    classes = _edge_classes(traffic.src, traffic.dst, group)
    parts = []
    for index in range(len(EDGE_CLASSES)):
        mine = classes == index
        parts.append(
            link_loads(
                Traffic(
                    traffic.src[mine],
                    traffic.dst[mine],
                    traffic.fraction[mine],
                    traffic.rail[mine],
                    traffic.steps,
                    traffic.net_steps,
                ),
                group,
            )
            if mine.any()
            else (np.array([], dtype=np.int64), np.array([]))
        )
    links = np.unique(np.concatenate([p[0] for p in parts]))
    by_class = np.zeros((len(EDGE_CLASSES), len(links)))
    for index, (where, amount) in enumerate(parts):
        by_class[index, np.searchsorted(links, where)] = amount
    return _Loads(links, by_class, traffic.steps, traffic.net_steps)


def _edge_classes(src: Ints, dst: Ints, group: Group) -> Ints:
    """(E,) index into EDGE_CLASSES. Nodes of one type share the answer, so a pair of local GPUs is asked about once."""
    islands = member_islands(group)
    inside = (src < 0) | (dst < 0) | (islands[src] == islands[dst])
    classes = np.where(inside, EDGE_CLASSES.index("nvlink"), EDGE_CLASSES.index("net")).astype(np.int64)
    pairs = np.flatnonzero(inside & (src >= 0) & (dst >= 0))
    if not len(pairs):
        return classes
    label, local = kinds_of_members(group)
    key = (label[src[pairs]] * 4096 + local[src[pairs]]) * 4096 + local[dst[pairs]]
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    routes = router(group.topology)
    answer = [
        EDGE_CLASSES.index(
            _CLASS_OF_PATH.get(routes.path_class(int(group.gpus[src[e]]), int(group.gpus[dst[e]])), "shm")
        )
        for e in pairs[first]
    ]
    classes[pairs] = np.array(answer, dtype=np.int64)[inverse]
    return classes


def _weights(loads: _Loads, algorithm: str, protocol: str, group: Group, costs: Costs) -> Floats:
    """(k,) bytes of link capacity one payload byte takes: loads over the achieved share of each edge class."""
    memo = _memo(group)
    age = costs.share_generation[memo.age]
    inside = {c: costs.share[f"{c}/{protocol}"] * age for c in ("nvlink", "pcie", "shm")}
    if algorithm == "tree":
        inside = {c: s * costs.tree_share for c, s in inside.items()}
    elif algorithm in {"nvls", "nvls_tree"}:
        inside["nvlink"] = costs.nvls_share * (costs.nvls_tree_share if algorithm == "nvls_tree" else 1.0)
    growth = 1.0 + costs.scale_net * max(0.0, math.log2(memo.islands) - 1.0)
    net = costs.share[f"net/{protocol}"] * costs.net_share[memo.net] / growth
    shares = np.array([*(inside[c] for c in ("nvlink", "pcie", "shm")), net])
    weights: Floats = (loads.by_class / shares[:, None]).sum(axis=0)
    return weights


# ---------------------------------------------------------------------------------------------------- hops


def _hop_time(kind: str, algorithm: str, protocol: str, loads: _Loads, group: Group, costs: Costs) -> float:
    """Seconds of hops in sequence: L of the module docstring of costs."""
    memo = _memo(group)
    inner = _inner_hop(loads, protocol, group, costs)
    extra = costs.net_extra[memo.net] * (2.0 if protocol == "Simple" else 1.0)
    outer = costs.hop[f"net/{protocol}"] + extra
    levels = math.log2(memo.islands)
    if algorithm == "tree":
        return 2.0 * ((memo.per_island - 1) * inner + costs.tree_levels * levels * outer)
    if algorithm == "nvls":
        return costs.nvls_latency
    if algorithm == "nvls_tree":
        return costs.nvls_latency + 2.0 * levels * (costs.nvls_tree_hop + costs.net_extra[memo.net])
    if algorithm == "pat":
        return levels * outer + costs.hop["net/LL"] * math.sqrt(group.size)
    hops = (loads.steps - loads.net_steps) * inner + loads.net_steps * outer
    if protocol == "Simple" and memo.islands > 1:
        hops *= costs.simple_ring_net
    if group.launch == "threads":
        hops += loads.steps * costs.threads_step
    return hops * (costs.rooted_overlap if kind in _ROOTED else 1.0)


def _inner_hop(loads: _Loads, protocol: str, group: Group, costs: Costs) -> float:
    all_nvlink = (
        not loads.by_class[EDGE_CLASSES.index("pcie")].any() and not loads.by_class[EDGE_CLASSES.index("shm")].any()
    )
    link = "nvlink" if all_nvlink else "pcie"
    return costs.hop[f"{link}/{protocol}"] * costs.hop_generation[_memo(group).age]


# ---------------------------------------------------------------------------------------------------- p2p


def _p2p_plan(request: Request, group: Group, costs: Costs) -> Plan:
    """Grouped sends and receives: all_to_all, scatter, gather, send, sendrecv, barrier."""
    memo = _memo(group)
    loads = _loads(request, group, "direct", 1)
    n = group.size
    share = costs.send_share if request.kind in {"send", "sendrecv"} else costs.p2p_share
    pcie = costs.share["pcie/Simple"]
    net = costs.p2p_net_share * costs.net_share[memo.net]
    shares = np.array([share, pcie, costs.share["shm/Simple"], net])
    weights: Floats = (loads.by_class / shares[:, None]).sum(axis=0)
    used = weights > 0
    links, weights = loads.links[used], weights[used]
    rate = float(np.min(group.topology.link_bandwidth[links] / weights)) if len(links) else math.inf
    wire = request.nbytes / rate
    peers = 1 if request.kind in {"send", "sendrecv"} else n - 1
    per_peer = request.nbytes if peers == 1 else request.nbytes / n
    limited = max(wire, _channel_limit(per_peer, peers, group, costs))
    hops = costs.p2p_base + costs.p2p_peer * peers
    if memo.islands > 1:
        hops += costs.net_extra[memo.net] + costs.hop["net/LL"]
    total = _floored(_norm(hops, limited, costs.p2p_norm), _host_floor(request.kind, group, costs), costs)
    return Plan(
        kind=request.kind,
        algorithm="direct",
        protocol="Simple",
        n_channels=1,
        nbytes=request.nbytes,
        latency=total - wire,
        links=links,
        weights=weights,
        ceiling=math.inf,
        lower_bound=lower_bound(request, group),
        bus_factor=bus_factor(request.kind, n),
    )


def _channel_limit(per_peer: float, peers: int, group: Group, costs: Costs) -> float:
    """Seconds a peer's bytes take over the channels a message of that size opens: more of them as it grows."""
    age = _memo(group).age
    opened = min(max(per_peer / costs.p2p_channel_bytes[age], 1.0), costs.p2p_max_channels)
    return per_peer / (opened * costs.p2p_channel_rate[age])
