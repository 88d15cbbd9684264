"""Which leaf switches nodes are plugged into: rails, nodes that straddle two leaves, how many nodes stay under one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from clustersim.core.arrays import Bools
from clustersim.core.errors import few, several
from clustersim.core.topology import NIC, Ints, Topology


def ports(topology: Topology) -> Bools:
    """(L,) which links lead from a NIC into the network."""
    is_nic = np.array([kind == NIC for kind in topology.vertex_kinds], dtype=bool)
    is_port: Bools = np.array([kind == "net" for kind in topology.link_kinds], dtype=bool) & is_nic[topology.link_src]
    return is_port


def _plugged(topology: Topology) -> tuple[Ints, Ints]:
    """(P, 2) int, node and switch of each cable from a NIC to a switch; (P,) int, that NIC."""
    net = ports(topology)
    nics = topology.link_src[net]
    pairs = np.column_stack([topology.vertex_node[nics], topology.link_dst[net]])
    to_switch = topology.vertex_node[pairs[:, 1]] < 0  # cables straight to another node's NIC are no rail
    return pairs[to_switch], nics[to_switch]


def rails(topology: Topology) -> int:
    """The most switches that one node's NICs are plugged into, where those are rails; else 1."""
    plugged, nics = _plugged(topology)
    if not _by_position(topology, plugged, nics):
        return 1
    nodes = np.unique(plugged, axis=0)[:, 0]
    return int(np.bincount(nodes).max(initial=0))


def straddling(topology: Topology) -> Iterator[str]:
    """Nodes whose NICs are on more leaf switches than those of another node with as many, where those are no rails."""
    plugged, _ = _plugged(topology)
    if rails(topology) > 1 or not len(plugged):
        return
    cables = defaultdict(list)
    for node, switch in plugged.tolist():
        cables[node].append(switch)
    fewest: dict[int, int] = {}
    for switches in cables.values():
        n_leaves = len(set(switches))
        fewest[len(switches)] = min(n_leaves, fewest.get(len(switches), n_leaves))
    odd = [node for node, switches in cables.items() if len(set(switches)) > fewest[len(switches)]]
    if not odd:
        return
    switches = cables[odd[0]]
    names = [f"{switches.count(leaf)} on {topology.vertex_names[leaf]}" for leaf in dict.fromkeys(switches)]
    more = f" (and {len(odd) - 1} more of {len(cables)} nodes)" if len(odd) > 1 else f", of {len(cables)} nodes,"
    yield (
        f"node{odd[0]}{more} straddles leaf switches: {few(names, 4)} of its {several(len(switches), 'NIC')}, where "
        f"other nodes are on {fewest[len(switches)]}: what its NICs send to the same nodes passes other switches"
    )


def spread(topology: Topology) -> tuple[int, ...]:
    """How many nodes share the same leaf switches, most first: one number where all do; empty without switches."""
    leaves_of = defaultdict(set)
    for node, switch in _plugged(topology)[0].tolist():
        leaves_of[node].add(switch)
    nodes_on: defaultdict[frozenset[int], int] = defaultdict(int)
    for switches in leaves_of.values():
        nodes_on[frozenset(switches)] += 1
    return tuple(sorted(nodes_on.values(), reverse=True))


def spread_words(counts: tuple[int, ...]) -> str:
    """How nodes lie on leaf switches, and how many a smaller job may have to stay under one set of them.

    >>> spread_words((32, 8))
    '40 nodes on 2 sets of leaf switches (32 + 8): a job of up to 32 stays on one, a larger one passes other switches'
    >>> spread_words((4,)), spread_words((1, 1))
    ('4 nodes, all on the same leaf switches', '2 nodes, no two on the same leaf switches')
    """
    total = sum(counts)
    if len(counts) == 1:
        return f"{several(total, 'node')}, all on the same leaf switches"
    if counts[0] == 1:
        return f"{several(total, 'node')}, no two on the same leaf switches"
    shown = [f"{count:,}" for count in counts[:6]]
    tail = " + ..." if len(counts) > len(shown) else ""
    sets = f"{len(counts):,} sets of leaf switches ({' + '.join(shown)}{tail})"
    return (
        f"{several(total, 'node')} on {sets}: a job of up to {counts[0]:,} stays on one, a larger one passes other "
        "switches"
    )


def _by_position(topology: Topology, plugged: Ints, nics: Ints) -> bool:
    """Whether every switch joins the same NICs of all its nodes, and any joins more than one node's.

    plugged : (P, 2) int, node and switch of each of ``nics``. A tree whose leaf takes in the half of a node as well is
    no rail fabric: that node is plugged into two leaves, whose NICs are not the ones that its neighbour has there.
    """
    positions: defaultdict[int, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    all_positions: defaultdict[int, set[str]] = defaultdict(set)
    for (node, switch), nic in zip(plugged.tolist(), nics.tolist(), strict=True):
        positions[switch][node].add(position(topology, nic))
        all_positions[node].add(position(topology, nic))
    for of_node in positions.values():
        joined = set().union(*of_node.values())
        # A NIC that a node lacks altogether, or that has another name there, is no sign.
        if any(joined & all_positions[node] != own for node, own in of_node.items()):
            return False
    return len(all_positions) < 2 or any(len(of_node) > 1 for of_node in positions.values())


def position(topology: Topology, vertex: int) -> str:
    """The name of a vertex within its node."""
    return topology.vertex_names[vertex].partition("/")[2]
