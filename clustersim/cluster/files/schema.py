"""What a topology file may say.

A file describes one node and what joins nodes (``[node]``, ``[fabric]``), or extends another file, or mixes node types
(``[[nodes]]``), or lists a whole cluster itself (``[[vertices]]``, ``[[links]]``); ``[[changes]]`` then degrade or
remove parts. Every bandwidth is a line rate of one direction, with its unit, and every number has a ``source``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec

from clustersim.cluster.files.fitted import CalibrationSpec
from clustersim.cluster.files.measured import MeasuredSpec
from clustersim.core.gpu_file import DeviceSpec
from clustersim.core.units import Bandwidth, Bytes, Seconds


class _StrictTopology(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base: a misspelt field is an error."""


Net: TypeAlias = Literal[
    "ib", "ib_host", "roce", "opa", "slingshot", "efa", "efa_sendrecv", "efa_host", "tcpx", "tcpxo", "tcp", "none"
]
"""The rows of :data:`clustersim.core.transports.TRANSPORTS`, and nothing between nodes."""
P2pLevel: TypeAlias = Literal["LOC", "NVL", "PIX", "PXB", "PHB", "SYS"]
"""What NCCL's user guide has NCCL_P2P_LEVEL be."""


class VerticesSpec(_StrictTopology, frozen=True):
    """One or more vertices of a kind; ``names = "gpu[0-7]"``.

    Parameters
    ----------
    names : one name, or several: ``gpu[0-7]``, ``nic0, nic2``. kind : what they are. bandwidth : the port of a NIC.
    node : of a whole-cluster file, where they are. source : where the numbers are from.
    """

    names: str
    kind: Literal["gpu", "cpu", "nic", "pcie_switch", "nvswitch", "switch"]
    bandwidth: Bandwidth | None = None
    node: int | None = None
    source: str = ""


class LinksSpec(_StrictTopology, frozen=True):
    """Links between vertices, in both directions.

    Parameters
    ----------
    a, b : names of both ends. bandwidth : of one direction. latency : of one direction. kind : what they are.
    source : where the numbers are from. directed : from a to b alone.
    pattern : ``all``: every a with every b; ``zip``: pairwise; of unequal lengths, consecutive runs share.
    """

    a: str
    b: str
    bandwidth: Bandwidth
    kind: Literal["nvlink", "xgmi", "c2c", "pcie", "cpu", "net"]
    source: str
    latency: Seconds = msgspec.field(default_factory=lambda: Seconds(0.0))
    pattern: Literal["all", "zip"] = "all"
    directed: bool = False


class NodeSpec(_StrictTopology, frozen=True):
    """One machine: the traits of :class:`clustersim.core.topology.NodeType`, its vertices and links.

    In a file that extends another, traits given replace the base's, ``remove`` (globs) takes vertices out, and vertices
    and links are added, or replace those of the same name or ends.

    Parameters
    ----------
    device : the GPU, by a name of ``clustersim list devices``. cpu_vendor, cpu_model : as NCCL's cost model tells CPUs
        apart. net : what the NICs speak. net_share : share of a NIC's line rate that transfers reach.
    nvls : the NVSwitches reduce (NVLink SHARP). p2p : GPUs reach each other over PCIe; by default as their
        drivers let them (not of GeForce since Turing). p2p_level : as NCCL_P2P_LEVEL has it, the furthest path over
        which NCCL has them; absent: by its own rule. pcie_gen : of the GPUs.
    cores : of a node whose ranks are CPU processes. host_memory : of its CPUs together, such as ``"2 TiB"``, which
        offloaded states and activations must fit into; whether they do stays unknown without it.
    sources : where a trait is from. remove : vertices of the base that are not here; globs. vertices, links : its
        parts.
    """

    device: str | None = None
    cpu_vendor: Literal["intel", "amd", "arm", "power"] | None = None
    cpu_model: str | None = None
    net: Net | None = None
    nvls: bool | None = None
    p2p: bool | None = None
    p2p_level: P2pLevel | None = None
    pcie_gen: int | None = None
    net_share: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    cores: Annotated[int, msgspec.Meta(ge=1)] | None = None
    host_memory: Bytes | None = None
    sources: dict[str, str] = {}
    remove: list[str] = []
    vertices: list[VerticesSpec] = []
    links: list[LinksSpec] = []


TRAITS = ("cpu_vendor", "cpu_model", "net", "nvls", "p2p", "p2p_level", "pcie_gen", "net_share", "cores", "host_memory")
"""Fields of ``[node]`` that are :class:`clustersim.core.topology.NodeType`'s of the same name, beside ``device``."""


class DomainSpec(_StrictTopology, frozen=True):
    """Parts that consecutive nodes share, such as the switches of an NVLink rack.

    Parameters
    ----------
    nodes : how many share them, at most. vertices, links : the parts.
    filled : which nodes of a cluster share them. ``in_order``: each domain is full before the next one begins;
    ``evenly``: no more domains than that takes, each with as many nodes as the others, or one less.
    """

    nodes: int
    vertices: list[VerticesSpec]
    links: list[LinksSpec]
    filled: Literal["in_order", "evenly"] = "in_order"


Routing: TypeAlias = Literal["destination", "hash", "adaptive"]


class _Fabric(_StrictTopology, frozen=True, tag_field="kind"):
    """What joins nodes.

    Parameters
    ----------
    source : where its shape and numbers are from. routing : one path to each destination, by a hash of the flow, or
        spread over all of them by load. sharp : the switches reduce (InfiniBand SHARP) and NCCL is let use them
        (NCCL_COLLNET_ENABLE=1 and its plug-in).
    port_latency : of a NIC and its cable. switch_latency : of each switch passed.
    """

    source: str
    routing: Routing = "destination"
    sharp: bool = False
    port_latency: Seconds = msgspec.field(default_factory=lambda: Seconds(300e-9))
    switch_latency: Seconds = msgspec.field(default_factory=lambda: Seconds(230e-9))


class NoFabric(_StrictTopology, frozen=True, tag_field="kind", tag="none"):
    """Nodes that nothing joins.

    Parameters
    ----------
    source : where that is from.
    """

    source: str = ""


class OneSwitch(_Fabric, frozen=True, tag="one_switch"):
    """Every NIC on one non-blocking switch."""


class RailOptimised(_Fabric, frozen=True, tag="rail_optimised"):
    """NIC i of the nodes of a scalable unit on the unit's leaf i; spines join the leaves.

    Parameters
    ----------
    radix : ports of a switch. nodes_per_unit : of a scalable unit; half the radix when absent.
    oversubscription : bandwidth down from a leaf over bandwidth up.
    """

    radix: int = 64
    nodes_per_unit: int | None = None
    oversubscription: float = 1.0


class FatTree(_Fabric, frozen=True, tag="fat_tree"):
    """A folded Clos.

    Parameters
    ----------
    radix : ports of a switch. levels : of switches, 2 or 3; as few as suffice when absent.
    oversubscription : bandwidth down from a leaf over bandwidth up.
    """

    radix: int = 64
    levels: int | None = None
    oversubscription: float = 1.0


class Dragonfly(_Fabric, frozen=True, tag="dragonfly"):
    """Groups of fully joined switches, all groups joined; Slingshot's switches route adaptively.

    Parameters
    ----------
    switches_per_group, nics_per_switch, global_links_per_switch : its shape. taper : multiplies the global links' rate.
    """

    switches_per_group: int = 32
    nics_per_switch: int = 16
    global_links_per_switch: int = 16
    taper: float = 1.0
    routing: Routing = "adaptive"


FabricSpec: TypeAlias = NoFabric | OneSwitch | RailOptimised | FatTree | Dragonfly
FABRICS: Mapping[str, type[FabricSpec]] = {
    str(fabric_type.__struct_config__.tag): fabric_type
    for fabric_type in (NoFabric, OneSwitch, RailOptimised, FatTree, Dragonfly)
}
"""By their ``kind``."""
OWN = "the scenario's own"
"""Source of a fabric that no file describes."""


class OneFabric(_StrictTopology, frozen=True):
    """A fabric alone, as a scenario may change one."""

    fabric: FabricSpec


class NodesSpec(_StrictTopology, frozen=True):
    """Nodes of the type that another file describes.

    Parameters
    ----------
    type : the file, by name or path. count : of nodes.
    """

    type: str
    count: int


class ChangeSpec(_StrictTopology, frozen=True):
    """Something degraded or gone, by vertex (``"node3/nic0"``) or link (``"node0/gpu0 -> node0/nvswitch*"``); globs.

    Parameters
    ----------
    match : what. factor : its bandwidth is multiplied by it; below 1 NCCL does not see that, above 1 it is a what-if,
        of which ``clustersim check`` warns. bandwidth : its new line rate, which NCCL reads. remove : what is gone, or
        true: what ``match`` is. source : where that is from.
    """

    match: str | None = None
    factor: float | None = None
    bandwidth: Bandwidth | None = None
    remove: str | bool | None = None
    source: str = ""


class TopologyFile(_StrictTopology, frozen=True):
    """A whole file.

    Parameters
    ----------
    name : in tables. title : one line about it. assumed : what nobody measured or read, sentences that ``check`` and
    ``collective`` repeat. extends : another file, by name or path, that this one changes.
    device : the GPU of its nodes, where it is not a shipped one. node : one machine. domain : what several share.
    fabric : what joins them. nodes : types of a mixed cluster.
    vertices, links : of a file that lists a whole cluster. changes : parts degraded or gone.
    calibration : what ``clustersim calibrate`` writes. measured : a few numbers of this machine.
    """

    name: str
    title: str = ""
    assumed: list[str] | None = None
    extends: str | None = None
    device: DeviceSpec | None = None
    node: NodeSpec | None = None
    domain: DomainSpec | None = None
    fabric: FabricSpec | None = None
    nodes: list[NodesSpec] = []
    vertices: list[VerticesSpec] = []
    links: list[LinksSpec] = []
    changes: list[ChangeSpec] = []
    calibration: CalibrationSpec | None = None
    measured: MeasuredSpec | None = None
