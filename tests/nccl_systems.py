"""The nodes of NCCL's golden tables, as NCCL would see them, and readers of the tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clustersim.collectives.nccl.view import Nic, NodeView, PcieSlot, System
from tests.tables import table_rows

DATA = Path(__file__).parent / "data" / "nccl"
ALGORITHMS = {"Tree": "tree", "Ring": "ring", "NVLS": "nvls", "NVLSTree": "nvls_tree", "PAT": "pat"}
KINDS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
}
DGX1 = dict.fromkeys([(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)], 1) | dict.fromkeys(
    [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)], 2
)
"""NVLinks of the DGX-1V hybrid cube mesh."""


def behind_switches(
    gpus: int, per_switch: int, slot: float, nic: float, nics_each: int = 1, **rest: object
) -> NodeView:
    """Two sockets, PCIe switches with some GPUs and NICs each. Slots and NICs in GB/s as NCCL takes them."""
    count = gpus // per_switch
    return NodeView(
        gpus=tuple(PcieSlot(g // per_switch, slot) for g in range(gpus)),
        switches=tuple(PcieSlot(-1 - 2 * s // count, slot) for s in range(count)),
        nics=tuple(Nic(PcieSlot(s, slot), nic) for s in range(count) for _ in range(nics_each)),
        dev=tuple(range(gpus)),
        socket_host=(0, 0),
        **rest,  # type: ignore[arg-type]
    )


def tray(trays: int) -> NodeView:
    """GB200 trays in one NVLink domain: 2 Grace, 4 GPUs and 4 NICs each, described over PCIe alone."""
    gpus = 4 * trays
    return NodeView(
        sm=100,
        gpus=tuple(PcieSlot(-1 - g // 2, 48.0) for g in range(gpus)),
        nics=tuple(Nic(PcieSlot(-1 - g // 2, 48.0), 50.0) for g in range(gpus)),
        dev=tuple(g % 4 for g in range(gpus)),
        socket_host=tuple(s // 2 for s in range(2 * trays)),
        cpu_vendor="arm",
        nvswitch_links=18,
        nvls=True,
    )


def pair_matrix(links: dict[tuple[int, int], int], gpus: list[int]) -> tuple[tuple[int, ...], ...]:
    """NVLinks between each two of some GPUs."""
    return tuple(tuple(links.get((min(a, b), max(a, b)), 0) for b in gpus) for a in gpus)


_HOPPER: dict[str, object] = {"sm": 90, "nvls": True, "cpu_model": "spr"}
VIEWS = {
    "dgx1v": behind_switches(8, 2, 12.0, 12.5, sm=70, nvlinks=pair_matrix(DGX1, list(range(8))), cpu_model="bdw"),
    "dgx2": behind_switches(16, 2, 12.0, 12.5, sm=70, nvswitch_links=6, cpu_model="skl"),
    "p4d": behind_switches(8, 2, 12.0, 12.5, sm=80, nvswitch_links=12, cpu_model="skl"),
    "a100_100g_4nic": behind_switches(8, 2, 24.0, 12.5, sm=80, nvswitch_links=12, cpu_model="spr"),
    "dgxa100": behind_switches(8, 2, 24.0, 25.0, 2, sm=80, nvswitch_links=12, cpu_vendor="amd"),
    "dgxh100": behind_switches(8, 1, 48.0, 50.0, nvswitch_links=18, **_HOPPER),
    "h100_200g": behind_switches(8, 1, 48.0, 25.0, nvswitch_links=18, **_HOPPER),
    "h800": behind_switches(8, 1, 48.0, 50.0, nvswitch_links=8, **_HOPPER),
    "dgxb200": behind_switches(8, 1, 48.0, 50.0, sm=100, nvswitch_links=18, nvls=True, cpu_model="emr"),
    "pcie_a100_sw": behind_switches(8, 4, 24.0, 25.0, sm=80, cpu_model="spr"),
    "l40s_sw": behind_switches(8, 4, 24.0, 25.0, sm=89, cpu_model="spr"),
    "pcie_rtx4090": NodeView(
        sm=89,
        gpus=tuple(PcieSlot(-1 - g // 4, 24.0) for g in range(8)),
        nics=tuple(Nic(PcieSlot(-1 - s, 24.0), 25.0) for s in range(2)),
        dev=tuple(range(8)),
        socket_host=(0, 0),
        cpu_vendor="amd",
        p2p=False,
    ),
    "gb200_tray4": tray(1),
    "gb200_nvl72": tray(18),
}
EXAMPLES = {
    "8xA100 DGX (8x200G)": "dgxa100",
    "8xH100 (8x200G) NVLS": "h100_200g",
    "8xH100 (8x200G) no NVLS": "h100_200g",
    "8xH100 DGX (8x400G) NVLS": "dgxh100",
    "8xH100 DGX (8x400G) no NVLS": "dgxh100",
    "8xH800 (8x400G) NVLS": "h800",
    "DGX B200 (8x400G) NVLS": "dgxb200",
    "DGX-1V (4x100G)": "dgx1v",
    "p4d (4x100G, net latency 75us)": "p4d",
}
"""Rows of the table of examples, by the node they describe."""


def system(name: str, nodes: int, net_latency: float = 0.0) -> System:
    """Some nodes of one kind, all GPUs in use."""
    view = VIEWS[name]
    if nodes == 1:
        view = replace(view, nics=())
    return System(nodes, nodes * len(view.gpus), (view,), net_latency)


def example(name: str, nodes: int) -> System:
    """A system of the table of examples."""
    found = system(EXAMPLES[name], nodes, 75e-6 if "75us" in name else 0.0)
    if "no NVLS" in name:
        found = replace(found, views=tuple(replace(view, nvls=False) for view in found.views))
    return found


def table(name: str) -> list[dict[str, str]]:
    """Rows of a table, without its comment line."""
    return table_rows(DATA / f"{name}.csv")
