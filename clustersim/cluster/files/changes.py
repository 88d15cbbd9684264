"""Parts of a finished Topology degraded or gone: "this NIC runs at half speed", "this leaf is down"."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec
import numpy as np

from clustersim.core.arrays import Bools, Ints
from clustersim.core.errors import TopologyError, few, nearest, several
from clustersim.core.memo import kept_with_first
from clustersim.core.topology import GPU, NIC, NodeType, Topology
from clustersim.core.units import format_bandwidth

MOST_NAMED = 8
"""Parts of one kind that an error names."""
FIRST_NODE = "node0/"
"""What names of the first node's parts begin with."""
HOST_LINKS = ("pcie", "c2c")
"""What a NIC hangs from inside its machine."""


class Change(msgspec.Struct, frozen=True):
    """One change. ``match`` is a vertex (``"node3/nic0"``: all its links) or links (``"a -> b"``); both may be globs.

    Parameters
    ----------
    match : str
    factor : float, the links' bandwidth is multiplied by it; None leaves it. Below 1 drivers and NCCL do not see it;
        above 1 the links are faster than their hardware, which ``Topology.assumed`` says.
    bandwidth : float [bytes/s], the links' new line rate, which drivers and NCCL read; None leaves it. Of a NIC it is
        the port's: its slot stays as wide as it is.
    remove : bool, the vertices (with their links) or the links are taken out.
    """

    match: str
    factor: float | None = None
    bandwidth: float | None = None
    remove: bool = False


@kept_with_first(maxsize=4)
def change(topology: Topology, *changes: Change) -> Topology:
    """The topology after the changes, in order. Raises :class:`TopologyError` for one that meets nothing."""
    for change in changes:
        _check(topology, change)
        vertices = _vertices(topology, change.match)
        links = _links(topology, change.match, vertices)
        if change.remove:
            topology = _without(topology, vertices, links)
            continue
        topology = (
            _declared(topology, vertices, links, change.bandwidth)
            if change.bandwidth
            else _hidden(topology, links, change)
        )
    return topology


def _declared(topology: Topology, vertices: Ints, links: Bools, bandwidth: float) -> Topology:
    """Links at another line rate, as they say themselves."""
    nics = [v for v in vertices.tolist() if topology.vertex_kinds[v] == NIC]
    inside = np.array([kind in HOST_LINKS for kind in topology.link_kinds])
    of_nics = np.isin(topology.link_src, nics) | np.isin(topology.link_dst, nics)
    links = links & ~(inside & of_nics)
    rate = topology.link_bandwidth.copy()
    rate[links] = bandwidth
    if topology.hidden_factor is None:
        return replace(topology, link_bandwidth=rate)
    return replace(topology, link_bandwidth=rate, hidden_factor=np.where(links, 1.0, topology.hidden_factor))


def _hidden(topology: Topology, links: Bools, change: Change) -> Topology:
    """Links that deliver a share of what they say; faster ones say so themselves."""
    factor = np.where(links, change.factor or 1.0, 1.0)
    if change.factor is None or change.factor >= 1:
        assumed = topology.assumed
        if change.factor is not None and change.factor > 1 and links.any():
            assumed = (*assumed, _faster(topology, links, change.factor))
        return replace(topology, link_bandwidth=topology.link_bandwidth * factor, assumed=assumed)
    before = 1.0 if topology.hidden_factor is None else topology.hidden_factor
    return replace(topology, link_bandwidth=topology.link_bandwidth * factor, hidden_factor=before * factor)


WHAT_IF = "by a factor above 1: a what-if, not a machine"
"""How the sentence on links that are faster than their hardware ends."""


def _faster(topology: Topology, links: Bools, factor: float) -> str:
    """Whose rate is above that of the hardware, and by how much."""
    named = np.flatnonzero(links).tolist()
    more = f" and {several(len(named) - 1, 'more link')}" if len(named) > 1 else ""
    return (
        f"{topology.link_name(named[0])}{more}: {factor:g} times the rate of the hardware "
        f"({format_bandwidth(float(topology.link_bandwidth[named[0]]))}), {WHAT_IF}"
    )


OF_NODE = re.compile(r"\bnode(\d+)/")
"""The node that a part's name begins with."""
NO_SUCH_NODE = "nothing is changed there"
"""How the sentence on a change of a node that a cluster does not have ends."""


def absent_node(topology: Topology, match: str) -> str:
    """A sentence on a change of a node that a cluster of so few nodes does not have, though its nodes have such a part;
    empty where the cluster has the node, or no node has the part: a topology file is of any number of nodes."""
    last = topology.n_nodes - 1
    numbers = [int(number) for number in OF_NODE.findall(match)]
    if not numbers or max(numbers) <= last:
        return ""
    inside = OF_NODE.sub(lambda name: name[0] if int(name[1]) <= last else FIRST_NODE, match)
    try:
        links_of(topology, inside)
    except TopologyError:
        return ""
    return f"{match}: this cluster has {several(topology.n_nodes, 'node')}, the first is node0; {NO_SUCH_NODE}"


def links_of(topology: Topology, match: str) -> list[int]:
    """Links that a ``match`` names. Raises :class:`TopologyError` where it names none."""
    matched: list[int] = np.flatnonzero(_links(topology, match, _vertices(topology, match))).tolist()
    return matched


def _check(topology: Topology, change: Change) -> None:
    if sum((change.factor is not None, change.bandwidth is not None, change.remove)) != 1:
        raise TopologyError(f"{topology.name}: change of {change.match!r} needs one of factor, bandwidth or remove")
    if change.bandwidth is not None and not _is_rate(change.bandwidth):
        raise TopologyError(
            f"{topology.name}: bandwidth {change.bandwidth!r} of {change.match!r} must be a number of bytes/s above "
            "zero, such as 25e9 for 200 Gb/s; use remove for a dead part"
        )
    if change.factor is not None and not 0 < change.factor < float("inf"):
        raise TopologyError(
            f"{topology.name}: factor {change.factor} of {change.match!r} must be above zero; use remove for a dead "
            f"part"
        )


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")


def _matching(names: Iterable[str], pattern: str) -> list[int]:
    if not re.search(r"[*?\[]", pattern):
        return [i for i, name in enumerate(names) if name == pattern]
    expression = re.compile(fnmatch.translate(pattern))
    return [i for i, name in enumerate(names) if expression.match(name)]


def _vertices(topology: Topology, match: str) -> Ints:
    if "->" in match:
        return np.zeros(0, dtype=np.int64)
    matched = _matching(topology.vertex_names, match)
    if not matched:
        raise TopologyError(f"{topology.name}: no vertex matches {match!r}; {_hint(topology, match)}")
    return np.array(matched, dtype=np.int64)


def _links(topology: Topology, match: str, vertices: Ints) -> Bools:
    if "->" not in match:
        of_vertex: Bools = np.isin(topology.link_src, vertices) | np.isin(topology.link_dst, vertices)
        return of_vertex
    ends = [part.strip() for part in match.replace("<->", "->").split("->")]
    if len(ends) != 2:
        raise TopologyError(f"{topology.name}: cannot read the link {match!r}; write it 'a -> b' or 'a <-> b'")
    a, b = (_vertices(topology, end) for end in ends)
    between: Bools = np.isin(topology.link_src, a) & np.isin(topology.link_dst, b)
    if "<->" in match:
        between |= np.isin(topology.link_src, b) & np.isin(topology.link_dst, a)
    if not between.any():
        raise TopologyError(f"{topology.name}: no link matches {match!r}, though both ends exist")
    return between


def _hint(topology: Topology, match: str) -> str:
    # A cluster has thousands of names; the nearest ones are those of the same folder.
    inside = f"{FIRST_NODE}{match}"
    if _matching(topology.vertex_names, inside):
        return f"did you mean '{inside}', or 'node*/{match}' of every node?"
    head = match.rsplit("/", 1)[0] + "/" if "/" in match else ""
    names = set(topology.vertex_names)
    ends = [part for part in re.split(r"[^\w/]+", match) if part in names]
    if len(ends) == 2:
        return f"a link is written '{ends[0]} -> {ends[1]}', or with <-> both ways"
    near = [name for name in topology.vertex_names if name.startswith(head) and ("/" in name) == bool(head)]
    stem = match.rstrip("0123456789")
    alike = [name for name in near if stem != head and name.rstrip("0123456789") == stem]
    if head and alike:  # a NIC by a number that it has not: which there are
        return f"there are {few(alike, MOST_NAMED)}" if len(alike) > 1 else f"there is {alike[0]} alone"
    return nearest(match, near or [name for name in topology.vertex_names if name.startswith(FIRST_NODE)])


def _without(topology: Topology, vertices: Ints, links: Bools) -> Topology:
    keep = np.ones(len(topology.vertex_names), dtype=bool)
    keep[vertices] = False
    number = np.cumsum(keep) - 1
    remaining = np.flatnonzero(~links).tolist()
    flags = keep.tolist()
    return replace(
        topology,
        node_types=_recounted(topology, vertices),
        vertex_names=tuple(n for n, k in zip(topology.vertex_names, flags, strict=True) if k),
        vertex_kinds=tuple(n for n, k in zip(topology.vertex_kinds, flags, strict=True) if k),
        vertex_node=topology.vertex_node[keep],
        link_src=number[topology.link_src[remaining]],
        link_dst=number[topology.link_dst[remaining]],
        link_bandwidth=topology.link_bandwidth[remaining],
        link_latency=topology.link_latency[remaining],
        link_kinds=tuple(topology.link_kinds[i] for i in remaining),
        hidden_factor=None if topology.hidden_factor is None else topology.hidden_factor[remaining],
    )


def _recounted(topology: Topology, gone: Ints) -> tuple[NodeType, ...]:
    """Node types that no longer count the vertices that are gone."""
    types = list(topology.node_types)
    for vertex in gone.tolist():
        node = int(topology.vertex_node[vertex])
        kind = topology.vertex_kinds[vertex]
        if node >= 0 and kind == GPU:
            types[node] = replace(types[node], n_gpus=types[node].n_gpus - 1)
        elif node >= 0 and kind == NIC:
            types[node] = replace(types[node], n_nics=types[node].n_nics - 1)
    return tuple(types)


NO_SUCH_BOARD = "no such board is made"
"""How the sentence on GPUs of one maker on links of another ends."""


def gpus_of_another_maker(topology: Topology) -> Iterator[str]:
    """A sentence on GPUs that were put on a board whose links are another maker's, and which keeps those links."""
    gpus = {node.gpu.name: node.gpu for node in topology.node_types}
    for kind, title, is_amds in (("xgmi", "xGMI", True), ("nvlink", "NVLink", False)):
        others = [name for name, gpu in gpus.items() if gpu.amd is not is_amds]
        if others and kind in topology.link_kinds:
            yield f"{', '.join(others)} in sockets of {topology.name}, whose links are {title}: {NO_SUCH_BOARD}"
