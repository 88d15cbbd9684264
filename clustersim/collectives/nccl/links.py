"""The links of a node as NCCL sees it, each with its class and bandwidth (nccl src/graph/topo.cc)."""

from __future__ import annotations

import msgspec

from clustersim.collectives.nccl.view import (
    C2C,
    NET,
    NVL,
    PIX,
    SYS,
    NodeView,
    PcieSlot,
    nvlink_bandwidth,
    socket_bandwidth,
)

LOCAL_BANDWIDTH = 5000.0
"""GB/s that NCCL takes a device's own memory for (nccl src/graph/topo.h)."""

Vertex = tuple[str, int]
"""``("gpu", 0)``, ``("pci", 1)``, ``("cpu", 0)``, ``("nic", 0)`` (the card), ``("net", 0)`` (its port) and
``("nvs", 0)``, all NVSwitches as one."""


class NcclLinks(msgspec.Struct, frozen=True, eq=False):
    """Directed links, made in pairs: ``ends``, ``bandwidth`` [GB/s] and ``kind`` of each; those ``out`` of a vertex,
    the widest first."""

    ends: list[tuple[Vertex, Vertex]] = msgspec.field(default_factory=list)
    bandwidth: list[float] = msgspec.field(default_factory=list)
    kind: list[int] = msgspec.field(default_factory=list)
    out: dict[Vertex, list[int]] = msgspec.field(default_factory=dict)

    def join(self, a: Vertex, b: Vertex, kind: int, rate: float) -> None:
        """Add a link and its way back."""
        for src, dst in ((a, b), (b, a)):
            self.out.setdefault(src, []).append(len(self.ends))
            self.ends.append((src, dst))
            self.bandwidth.append(rate)
            self.kind.append(kind)


def links_of(view: NodeView) -> NcclLinks:
    """All links of a node: NVLink, PCIe, ports, and between the sockets of a host."""
    graph_links = NcclLinks()
    per_link = view.link_rate or nvlink_bandwidth(view.sm)
    for g in range(len(view.gpus)):
        if view.nvswitch_links > 0:
            graph_links.join(("gpu", g), ("nvs", 0), NVL, view.nvswitch_links * per_link)
        for peer in range(g + 1, len(view.gpus)) if view.nvlinks else ():
            if view.nvlinks[g][peer]:
                graph_links.join(("gpu", g), ("gpu", peer), NVL, view.nvlinks[g][peer] * per_link)
    for g, gpu in enumerate(view.gpus):
        if view.c2c:
            graph_links.join(("gpu", g), ("cpu", socket_of(view, gpu)), C2C, view.c2c)
    for kind, slots in (("gpu", view.gpus), ("pci", view.switches), ("nic", tuple(n.slot for n in view.nics))):
        for i, slot in enumerate(slots):
            up = ("pci", slot.parent) if slot.parent >= 0 else ("cpu", -1 - slot.parent)
            graph_links.join((kind, i), up, PIX, slot.bandwidth)
    for i, nic in enumerate(view.nics):
        graph_links.join(("nic", i), ("net", i), NET, nic.bandwidth)
    rate = socket_bandwidth(view.cpu_vendor, view.cpu_model)
    for s, host in enumerate(view.socket_host):
        for peer in range(s + 1, len(view.socket_host)):
            if view.socket_host[peer] == host:
                graph_links.join(("cpu", s), ("cpu", peer), SYS, rate)
    for links in graph_links.out.values():  # NCCL walks wide links first, which settles ties between equal paths
        links.sort(key=lambda link: -graph_links.bandwidth[link])
    return graph_links


def socket_of(view: NodeView, slot: PcieSlot) -> int:
    """The socket a PCIe slot belongs to."""
    while slot.parent >= 0:
        slot = view.switches[slot.parent]
    return -1 - slot.parent
