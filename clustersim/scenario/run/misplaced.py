"""What ``[[incident]]`` does to the machine before a job starts on it: a NIC that is not there, cables in wrong
switches, a NIC at the other socket, a machine whose NICs do not reach GPU memory, a machine in another rack.

NCCL reads the machine as it is then, and plans on it. It knows nothing of switches: of a wrong rail or another rack it
sees nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from clustersim.cluster import files as fabrics
from clustersim.core.arrays import Ints
from clustersim.core.errors import ScenarioError
from clustersim.core.topology import CPU, NIC, PCIE_SWITCH, SWITCH, Topology
from clustersim.scenario.file.incident_table import Incident

ELSEWHERE = "rack1/"
"""What names of switches of the other rack begin with."""


def misplaced(topology: Topology, incident: Incident) -> Topology:
    """The machine with what an incident makes of it from the start; of other kinds, as it is.

    Raises :class:`ScenarioError`, or :class:`TopologyError` for a NIC that is not there, naming no field.
    """
    if incident.kind == "lost_nic":
        _nic_of(topology, str(incident.link))
        return fabrics.change(topology, fabrics.Change(str(incident.link), remove=True))
    if incident.kind == "wrong_rail":
        return _swapped(topology, str(incident.link), str(incident.other))
    if incident.kind == "far_nic":
        return _at_other_socket(topology, str(incident.link))
    if incident.kind == "gdr_off":
        return _without_gpudirect(topology, _node_of(topology, incident))
    if incident.kind == "other_rack":
        return _in_other_rack(topology, _node_of(topology, incident))
    return topology


def _nic_of(topology: Topology, name: str) -> int:
    """The vertex of a NIC. Raises :class:`ScenarioError` for a name that is none."""
    fabrics.links_of(topology, name)  # which says what is near a name that is not there
    vertex = topology.vertex_names.index(name) if name in topology.vertex_names else -1
    if vertex < 0 or topology.vertex_kinds[vertex] != NIC:
        raise ScenarioError(f'{name!r} is no NIC; write one such as "node0/nic0"')
    return vertex


def _node_of(topology: Topology, incident: Incident) -> int:
    node = -1 if incident.node is None else incident.node
    if not 0 <= node < topology.n_nodes:
        raise ScenarioError(f"no node {node}: the run has nodes 0..{topology.n_nodes - 1}")
    return node


def _ways(topology: Topology, vertex: int, kinds: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """(link, vertex at its other end) of a vertex's links, both directions, to vertices of some kinds."""
    for near_end, far_end in ((topology.link_src, topology.link_dst), (topology.link_dst, topology.link_src)):
        for link in np.flatnonzero(near_end == vertex).tolist():
            if topology.vertex_kinds[int(far_end[link])] in kinds:
                yield link, int(far_end[link])


def _moved(topology: Topology, vertex: int, before: int, after: int) -> Topology:
    """The links between a vertex and the one ``before`` it, between it and the one ``after``."""
    out = (topology.link_src == vertex) & (topology.link_dst == before)
    back = (topology.link_dst == vertex) & (topology.link_src == before)
    return replace(
        topology,
        link_dst=np.where(out, after, topology.link_dst),
        link_src=np.where(back, after, topology.link_src),
    )


def leaf_of(topology: Topology, nic: int) -> int:
    """The switch that a NIC's cable is in. Raises :class:`ScenarioError` for a NIC with no switch, or with several."""
    switches = {switch for _, switch in _ways(topology, nic, (SWITCH,))}
    if len(switches) != 1:
        raise ScenarioError(f"{topology.vertex_names[nic]} has cables to {len(switches)} switches, not to one")
    return switches.pop()


def _swapped(topology: Topology, name: str, other_name: str) -> Topology:
    nic, other_nic = _nic_of(topology, name), _nic_of(topology, other_name)
    if topology.vertex_node[nic] != topology.vertex_node[other_nic] or nic == other_nic:
        raise ScenarioError(f"{name} and {other_name} are not two NICs of one machine")
    leaf, other_leaf = leaf_of(topology, nic), leaf_of(topology, other_nic)
    if leaf == other_leaf:
        switch = topology.vertex_names[leaf]
        raise ScenarioError(f"{name} and {other_name} are both on {switch}: this network has no rails that differ")
    return _moved(_moved(topology, nic, leaf, other_leaf), other_nic, other_leaf, leaf)


def _at_other_socket(topology: Topology, name: str) -> Topology:
    nic = _nic_of(topology, name)
    _, host = next(_ways(topology, nic, (PCIE_SWITCH, CPU)), (-1, -1))
    socket = _socket(topology, host)
    node = topology.vertex_node[nic]
    own = np.flatnonzero(topology.vertex_node == node).tolist()
    other_sockets = [v for v in own if topology.vertex_kinds[v] == CPU and v != socket]
    if host < 0 or not other_sockets:
        raise ScenarioError(f"{name} hangs from the only socket that its machine has")
    switches = [v for v in own if topology.vertex_kinds[v] == PCIE_SWITCH and _socket(topology, v) == other_sockets[0]]
    return _moved(topology, nic, host, switches[0] if switches else other_sockets[0])


def _socket(topology: Topology, vertex: int) -> int:
    """The CPU that a vertex hangs from, or is; -1 for none."""
    if vertex >= 0 and topology.vertex_kinds[vertex] == CPU:
        return vertex
    return next((cpu for _, cpu in _ways(topology, vertex, (CPU,))), -1)


def _without_gpudirect(topology: Topology, node: int) -> Topology:
    types = list(topology.node_types)
    if types[node].net != "ib":
        raise ScenarioError(f"node {node} has {types[node].net}: only of InfiniBand it is known what GPUDirect saves")
    types[node] = replace(types[node], net="ib_host")
    return replace(topology, node_types=tuple(types))


def _in_other_rack(topology: Topology, node: int) -> Topology:
    """Its cables in switches of their own, which have the same ways up as those of the other machines."""
    kinds = np.array(topology.vertex_kinds)
    nics: list[int] = np.flatnonzero((topology.vertex_node == node) & (kinds == NIC)).tolist()
    leaves: dict[int, int] = {}
    for nic in nics:
        leaf = leaf_of(topology, nic)
        if leaf not in leaves:
            leaves[leaf] = len(topology.vertex_names)
            topology = _with_twin(topology, leaf)
        topology = _moved(topology, nic, leaf, leaves[leaf])
    if not leaves:
        raise ScenarioError(f"node {node} has no NIC")
    return topology


def _with_twin(topology: Topology, leaf: int) -> Topology:
    """A switch more, with the same ways up as this one."""
    ups = dict(_ways(topology, leaf, (SWITCH,)))
    if not ups:
        name = topology.vertex_names[leaf]
        raise ScenarioError(f"no switch is above {name}: all machines of this network are in one rack")
    twin = len(topology.vertex_names)
    copied: Ints = np.array(sorted(ups), dtype=np.int64)
    hidden = topology.hidden_factor

    def ends(column: Ints) -> Ints:
        """An end of every link, then of the twin's links."""
        return np.concatenate([column, np.where(column[copied] == leaf, twin, column[copied])])

    return replace(
        topology,
        vertex_names=(*topology.vertex_names, ELSEWHERE + topology.vertex_names[leaf]),
        vertex_kinds=(*topology.vertex_kinds, SWITCH),
        vertex_node=np.append(topology.vertex_node, -1),
        link_src=ends(topology.link_src),
        link_dst=ends(topology.link_dst),
        link_bandwidth=np.concatenate([topology.link_bandwidth, topology.link_bandwidth[copied]]),
        link_latency=np.concatenate([topology.link_latency, topology.link_latency[copied]]),
        link_kinds=(*topology.link_kinds, *(topology.link_kinds[link] for link in copied.tolist())),
        hidden_factor=None if hidden is None else np.concatenate([hidden, hidden[copied]]),
    )
