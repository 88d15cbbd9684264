"""Topology files -> Topology: shipped by name (``topologies/*.toml``), or the user's own by path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path

import msgspec
import numpy as np

from clustersim.cluster.files import fitted, measured, networks, reading, schema
from clustersim.cluster.files.changes import Change, absent_node, change, gpus_of_another_maker
from clustersim.cluster.files.draft import TopologyDraft
from clustersim.cluster.files.names import expand
from clustersim.cluster.files.node import Ends, NodeBuild, Wire, add_wires, build_node, traits_of, wire_columns
from clustersim.core import gpu_file, limits
from clustersim.core.arrays import Ints
from clustersim.core.calibrated import Calibration
from clustersim.core.device import Device
from clustersim.core.device import device as shipped_gpu
from clustersim.core.errors import TopologyError, nearest, several
from clustersim.core.memo import ByWeight
from clustersim.core.mesh import Mesh
from clustersim.core.paths import data_path, shipped
from clustersim.core.texts import Table, is_file, plain_file, short, shown, text_of, there
from clustersim.core.topology import CPU, GPU, NIC, NVSWITCH, PCIE_SWITCH, NodeType, Topology


def load(
    name_or_path: str,
    nodes: int | None = None,
    device: str | Device | None = None,
    fabric: Table | None = None,
) -> Topology:
    """A cluster of ``nodes`` machines of a shipped topology, or of the user's own file.

    Parameters
    ----------
    name_or_path : ``"hgx-h100"``, or the path of a ``.toml`` file.
    nodes : int; None is 1, or what a file that lists its own nodes says.
    device : another GPU in the same sockets, such as ``"A100-SXM4-40GB"``, or one that :mod:`clustersim.core.gpu_file`
        read; None keeps the file's.
    fabric : fields of ``[fabric]`` to change, such as ``{"oversubscription": 4}``; with ``kind``, a whole one.

    Raises :class:`TopologyError` for an unknown name (with the nearest), or a file that cannot be read.
    """
    path = _find(name_or_path)
    texts = tuple((file, text_of(file, TopologyError)) for file in files(name_or_path))
    key = (path, texts, nodes, device, msgspec.json.encode(dict(fabric or {}), order="sorted"))
    return _KNOWN.get(key, lambda: _built(path, nodes, device, fabric))


PART = 500.0
"""[bytes] that a vertex or a directed link takes at least, while a topology is built."""

_KNOWN: ByWeight[Topology] = ByWeight(300_000, lambda topology: topology.n_links)
"""Topologies asked for last, by the content of their files: two of 2,048 nodes, or eighty of 8."""


def _built(path: Path, nodes: int | None, device: str | Device | None, fabric: Table | None) -> Topology:
    chain = _chain(path)
    spec = chain[0][0]
    if nodes is not None and (not isinstance(nodes, Integral) or nodes < 1):
        raise TopologyError(f"{path}: a cluster has at least one node, not {nodes!r}")
    if spec.vertices or spec.links:
        if fabric:
            raise TopologyError(f"{path}: lists its own links; there is no fabric to change")
        topology = _listed(spec, str(path), nodes)
    else:
        machines = _machines(chain, nodes)
        joined = next((spec.fabric for spec, _ in chain if spec.fabric is not None), schema.NoFabric())
        if fabric:
            joined = reading.changed_fabric(joined, dict(fabric))
        try:
            topology = networks.join(machines, joined, spec.name)
        except TopologyError as error:
            raise TopologyError(f"{path}: $.fabric: {error}") from None
    numbers = next((measured.numbers(spec.measured, str(spec_path)) for spec, spec_path in chain if spec.measured), ())
    assumed = next((spec.assumed for spec, _ in chain if spec.assumed is not None), [])
    if not (spec.vertices or spec.links):
        assumed = [*assumed, *networks.without_effect(topology, joined)]
    topology = replace(topology, calibration=_calibration(chain), measured=numbers, assumed=tuple(assumed))
    if device is not None:
        types = {id(t): _with_gpu(t, device) for t in topology.node_types}
        topology = replace(topology, node_types=tuple(types[id(t)] for t in topology.node_types))
        topology = replace(topology, assumed=(*topology.assumed, *gpus_of_another_maker(topology)))
    specs = [change for spec, _ in reversed(chain) for change in spec.changes]
    changes = [_change(spec, f"{path}: $.changes[{i}]") for i, spec in enumerate(specs)]
    return _changed(topology, changes, any_size=not (spec.vertices or spec.links or spec.nodes))


def _changed(topology: Topology, changes: Sequence[Change], *, any_size: bool) -> Topology:
    """After the changes of its files. A file of a cluster of ``any_size`` may name a node that is not among so few."""
    absent = [absent_node(topology, change.match) if any_size else "" for change in changes]
    if any(absent):
        topology = replace(topology, assumed=(*topology.assumed, *filter(None, absent)))
    return change(topology, *(change for change, sentence in zip(changes, absent, strict=True) if not sentence))


def _with_gpu(node: NodeType, gpu: str | Device) -> NodeType:
    """The node with other GPUs in its sockets, which reach each other as they can, unless the machine keeps them."""
    own = None if isinstance(gpu, str) else gpu
    part = shipped_gpu(gpu) if isinstance(gpu, str) else gpu
    p2p = part.p2p if node.p2p == node.gpu.p2p else node.p2p
    return replace(node, device=gpu if isinstance(gpu, str) else gpu.name, own_gpu=own, p2p=p2p)


def files(name_or_path: str) -> tuple[Path, ...]:
    """Every file that :func:`load` reads for a topology: itself, what it extends and the node types it lists."""
    paths: dict[Path, None] = {}
    ahead = [_find(name_or_path)]
    while ahead:
        path = ahead.pop()
        if path not in paths:
            paths[path] = None
            spec = reading.read(path)
            named = {"extends": spec.extends} | {f"nodes[{i}].type": entry.type for i, entry in enumerate(spec.nodes)}
            ahead += [_named(name, path, field) for field, name in named.items() if name]
    return tuple(paths)


def uncalibrated(topology: Topology) -> Topology:
    """The topology without constants fitted to its measurements, and without the measurements."""
    return replace(topology, calibration=None, measured=())


def node(name_or_path: str) -> NodeBuild:
    """The build of one machine of a topology file, for the builders of this package.

    >>> from clustersim.cluster import files as fabrics
    >>> len(fabrics.fat_tree([fabrics.node("hgx-h100")] * 4, oversubscription=2).gpus)
    32
    """
    return _node(_chain(_find(name_or_path)))


def mesh(topology: Topology, nodes: int | None = None, nproc_per_node: int | None = None) -> Mesh:
    """Ranks on the first ``nproc_per_node`` GPUs of each of the first ``nodes`` nodes; None is all of them.

    Where no node has a GPU, ranks are processes on CPUs, one a core where their number is not said; more than that
    share the cores.

    Raises :class:`TopologyError` when a node has fewer GPUs, or the cluster fewer nodes.
    """
    count = topology.n_nodes if nodes is None else nodes
    if not 1 <= count <= topology.n_nodes:
        raise TopologyError(f"{topology.name}: {several(count, 'node')} asked for; the cluster has {topology.n_nodes}")
    if not len(topology.gpus):
        return _on_cpus(topology, count, nproc_per_node)
    gpus_per_node = np.bincount(topology.vertex_node[topology.gpus], minlength=topology.n_nodes)[:count]
    per_node = int(gpus_per_node.max() if nproc_per_node is None else nproc_per_node)
    if not 1 <= per_node <= gpus_per_node.min():
        short = int(np.argmin(gpus_per_node))
        raise TopologyError(
            f"{topology.name}: {per_node} GPUs a node asked for; node {short} "
            f"({topology.node_types[short].name}) has {gpus_per_node[short]}"
        )
    starts = np.concatenate([[0], np.cumsum(gpus_per_node)[:-1]])
    gpus = topology.gpus[(starts[:, None] + np.arange(per_node)).ravel()]
    return Mesh(gpus, per_node, nproc_per_domain=_per_domain(topology, gpus))


def _per_domain(topology: Topology, gpus: Ints) -> int:
    """How many of these GPUs share the first one's NVSwitch, where it belongs to no node; else 0."""
    outside = np.flatnonzero(topology.vertex_node < 0)
    shared = [vertex for vertex in outside.tolist() if topology.vertex_kinds[vertex] == NVSWITCH]
    if not shared:
        return 0
    neighbours = topology.link_dst[topology.link_src == gpus[0]]
    switches = neighbours[np.isin(neighbours, shared)]
    if not len(switches):
        return 0
    return int(np.isin(gpus, topology.link_src[topology.link_dst == switches[0]]).sum())


def _on_cpus(topology: Topology, nodes: int, nproc_per_node: int | None) -> Mesh:
    """Processes over the sockets of each node, in order."""
    sockets = topology.cpus
    homes = [sockets[topology.vertex_node[sockets] == node] for node in range(nodes)]
    ranks_per_node = nproc_per_node or topology.node_types[0].cores or len(homes[0])
    if ranks_per_node < 1 or not all(len(home) for home in homes):
        raise TopologyError(f"{topology.name}: no GPU and no CPU for {ranks_per_node} ranks on every node")
    return Mesh(
        np.concatenate([home[np.arange(ranks_per_node) * len(home) // ranks_per_node] for home in homes]),
        ranks_per_node,
    )


def _find(name_or_path: str, beside: Path | None = None) -> Path:
    """A file by path, then beside the file that names it, then among the shipped ones."""
    name = name_or_path
    if name.endswith(".toml") or "/" in name:
        looked = [beside.parent / name] if beside is not None else []
        looked += [] if Path(name) in looked else [Path(name)]
        path = next((path for path in looked if there(path)), None)
        if path is None:
            looked_text = " nor ".join(short(str(path)) for path in looked)
            raise TopologyError(
                f"no topology file {shown(name)}: neither is there {looked_text}; shipped ones need no path"
            )
        plain_file(path, TopologyError)
        return path
    for folder in (*([beside.parent] if beside else []), data_path("topologies")):
        if is_file(folder / f"{name}.toml"):
            return folder / f"{name}.toml"
    raise TopologyError(f"unknown topology {shown(name)}; {nearest(name, shipped('topologies'))}")


def _named(name: str, path: Path, field: str) -> Path:
    """The file that a field of the file ``path`` names. Raises :class:`TopologyError` saying which field."""
    try:
        return _find(name, path)
    except TopologyError as error:
        raise TopologyError(f"{path}: $.{field}: {error}") from None


Chain = Sequence[tuple[schema.TopologyFile, Path]]
"""A file and where it is, then the one that it extends, and so on."""


def _chain(path: Path, seen: tuple[Path, ...] = ()) -> Chain:
    """The files that one is made of. Raises :class:`TopologyError` where they lead back to it, or to one ``seen``."""
    chain = [(reading.read(path), path)]
    while (name := chain[-1][0].extends) is not None:
        spec_path = chain[-1][1]
        base = _named(name, spec_path, "extends")
        if base in (*seen, *(seen_path for _, seen_path in chain)):
            raise TopologyError(f"{spec_path}: $.extends: {name!r} leads back to this file")
        chain.append((reading.read(base), base))
    return chain


def _node(chain: Chain) -> NodeBuild:
    (spec, path), *below = chain
    base = _node(below) if below else None
    if spec.node is None and base is None:
        raise TopologyError(f"{path}: needs a [node], or extends = the name of a topology that has one")
    gpu = None if spec.device is None else gpu_file.device_of(spec.device, f"{path}: $.device")
    return build_node(spec.name, spec.node or schema.NodeSpec(), base, spec.domain, str(path), gpu)


def _calibration(chain: Chain) -> Calibration | None:
    """The fitted constants of a file, and those of the files it extends which it does not give itself."""
    merged: Calibration | None = None
    for spec, path in reversed(chain):
        merged = fitted.calibration(spec.calibration, str(path)).over(merged) if spec.calibration else merged
    return merged


def _machines(chain: Chain, nodes: int | None) -> Sequence[NodeBuild]:
    spec, path = chain[0]
    if not spec.nodes:
        node_build = _node(chain)
        _affordable((nodes or 1) * (len(node_build.kinds) + len(node_build.wires)), nodes or 1, f"{path}")
        return [node_build] * (nodes or 1)
    out: list[NodeBuild] = []
    for i, entry in enumerate(spec.nodes):
        if entry.count < 1:
            raise TopologyError(f"{path}: $.nodes[{i}].count is {entry.count}; at least 1")
        node_build = _node(_chain(_find(entry.type, path), (path,)))
        _affordable(
            entry.count * (len(node_build.kinds) + len(node_build.wires)), entry.count, f"{path}: $.nodes[{i}].count"
        )
        out += [node_build] * entry.count
    if nodes not in (None, len(out)):
        raise TopologyError(f"{path}: lists {several(len(out), 'node')} of its own; {nodes} asked for")
    return out


def _affordable(parts: int, nodes: int, origin: str) -> None:
    """Raise :class:`TopologyError` where the vertices and links of so many nodes take more memory than there is."""
    limits.check(
        PART * parts, f"for a topology of {several(nodes, 'node')} ({origin})", "use fewer nodes", TopologyError
    )


def _change(spec: schema.ChangeSpec, origin: str) -> Change:
    given = [v is not None for v in (spec.factor, spec.bandwidth, spec.remove)]
    if isinstance(spec.remove, bool):
        if not spec.remove or spec.match is None or sum(given) != 1:
            raise TopologyError(
                f'{origin}: remove = {str(spec.remove).lower()}: write what is gone, such as remove = "node0/nic0", '
                "or match = ... with remove = true"
            )
        return Change(spec.match, remove=True)
    if sum(given) != 1 or (spec.match is None) == (spec.remove is None):
        raise TopologyError(f"{origin}: write either match = ... with factor or bandwidth, or remove = ...")
    if spec.remove is not None:
        return Change(spec.remove, remove=True)
    return Change(str(spec.match), spec.factor, None if spec.bandwidth is None else float(spec.bandwidth))


def _listed(spec: schema.TopologyFile, origin: str, nodes: int | None) -> Topology:
    """A file that lists its own vertices and links. A vertex belongs to the node of its name (``node2/gpu0``) or of its
    ``node`` field; otherwise parts of a machine are node 0 and switches are outside."""
    kinds: dict[str, str] = {}
    place: dict[str, int] = {}
    for i, entry in enumerate(spec.vertices):
        for name in expand(entry.names):
            if name in kinds:
                raise TopologyError(f"{origin}: $.vertices[{i}].names: {name!r} is already there")
            kinds[name], place[name] = entry.kind, _place(name, entry)
    wires: dict[Ends, Wire] = {}
    add_wires(wires, spec.links, kinds, f"{origin}: $.links")
    count = max(place.values(), default=-1) + 1
    if count < 1 or nodes not in (None, count):
        raise TopologyError(f"{origin}: lists {several(count, 'node')} of its own; {nodes or 'at least 1'} asked for")
    draft = TopologyDraft(node_types=_listed_types(spec, kinds, place, count, origin))
    draft.add_vertices(list(kinds), list(kinds.values()), np.array(list(place.values()), dtype=np.int64))
    draft.add_links(*wire_columns(wires, kinds))
    return draft.topology(spec.name, "listed")


def _place(name: str, entry: schema.VerticesSpec) -> int:
    head = name.split("/", 1)[0]
    if entry.node is not None:
        return entry.node
    if "/" in name and head.startswith("node") and head[4:].isdigit():
        return int(head[4:])
    return 0 if entry.kind in (GPU, CPU, NIC, PCIE_SWITCH, NVSWITCH) else -1


def _listed_types(
    spec: schema.TopologyFile, kinds: dict[str, str], place: dict[str, int], count: int, origin: str
) -> list[NodeType]:
    traits = spec.node or schema.NodeSpec()
    if traits.vertices or traits.links or spec.fabric or spec.nodes:
        raise TopologyError(
            f"{origin}: lists its own $.vertices; $.node.vertices, $.fabric and $.nodes have no place here"
        )
    gpu = None if spec.device is None else gpu_file.device_of(spec.device, f"{origin}: $.device")
    given = traits_of(traits, origin, gpu)
    totals = {k: np.bincount([place[n] for n in kinds if kinds[n] == k], minlength=count) for k in (GPU, NIC)}
    return [
        NodeType(spec.name, n_gpus=int(totals[GPU][i]), n_nics=int(totals[NIC][i]), sources=traits.sources, **given)
        for i in range(count)
    ]
