"""The machine with its links coloured by load: every part of a small one, a summary of a large one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from clustersim.app.plots import layout
from clustersim.app.plots.drawing import Axes, Figure, colour_bar, drawn_on, inches_wide, only_one, titled
from clustersim.app.plots.layout import FIRST_TIER, ROWS, TIER, Places
from clustersim.app.plots.style import FAINT, INK, QUIET, load_map
from clustersim.core.arrays import Floats
from clustersim.core.errors import TopologyError
from clustersim.core.timeline import LinkUse
from clustersim.core.topology import CPU, GPU, NIC, NVSWITCH, PCIE_SWITCH, SWITCH, Topology

MAX_COLUMNS = 32
"""GPUs side by side that are still readable; a larger machine is summarised."""
LEAST_BOX = 0.3
"""Width of a box, in columns, that still takes a number."""
SCALES = (0.1, 0.25, 0.5, 1.0)
"""Ends of the colour scale: the first that holds the busiest link."""

_BOX = {
    GPU: ("#24292F", "white", 0.74),
    CPU: ("#57606A", "white", 0.9),
    NIC: ("#57606A", "white", 0.66),
    PCIE_SWITCH: ("#8C959F", "white", 0.9),
    NVSWITCH: ("#57606A", "white", 0.9),
    SWITCH: ("#24292F", "white", 0.9),
}
_WORDS = {GPU: "GPUs", CPU: "CPUs", NIC: "NICs", PCIE_SWITCH: "PCIe switches", NVSWITCH: "NVSwitches"}


def link_loads(topology: Topology, use: LinkUse, window: tuple[float, float] | None = None) -> Floats:
    """(L,) mean share of each link's line rate over a window [s]; None is until the last byte.

    Raises :class:`TopologyError` when the links are another machine's.
    """
    if len(use.link_bandwidth) != topology.n_links:
        raise TopologyError(f"{topology.name} has {topology.n_links} links, the run {len(use.link_bandwidth)}")
    begin, end = window or (0.0, float(use.segment_end.max(initial=0.0)))
    inside = replace(
        use, segment_start=np.clip(use.segment_start, begin, end), segment_end=np.clip(use.segment_end, begin, end)
    )
    room = topology.link_bandwidth * max(end - begin, 1e-30)
    share: Floats = np.divide(inside.bytes_per_link(), room, out=np.zeros(len(room)), where=room > 0)
    return share


def loaded_topology(topology: Topology, loads: Floats, title: str | None = None, *, ax: Axes | None = None) -> Figure:
    """The machine as it is built, links coloured by load, the busier direction of each.

    Parameters
    ----------
    loads : (L,) share of each link's line rate that is used, 0 to 1, as :func:`link_loads` gives it.
    ax : drawn on instead of a new figure; for a machine that is drawn whole.

    Up to :data:`MAX_COLUMNS` GPUs are all drawn; of a larger machine the network, every node as a cell of its busiest
    link, and the busiest node in full.
    """
    columns = len(topology.gpus)
    busiest = float(np.max(loads, initial=0.0))
    scale_end = next((end for end in SCALES if busiest <= end * 1.0001), 1.0)
    canvas = MachineCanvas(topology, np.asarray(loads), scale_end)
    if columns <= MAX_COLUMNS or topology.n_nodes == 1:
        places, boxes = _whole(topology)
    else:
        from clustersim.app.plots.summary import summarised

        only_one(ax, f"a machine of {columns:,} GPUs")
        return summarised(canvas, title)
    height = max(y for _, y in places.values()) + 1.0
    figure, canvas.axes = drawn_on(ax, 0.62 * height + 0.9)
    for box in boxes:
        canvas.frame(*box)
    canvas.links(places)
    canvas.vertices(places)
    canvas.row_names(places)
    canvas.finish(figure)
    return titled(figure, title, alt_of(topology, canvas.loads), ax)


def _whole(topology: Topology) -> tuple[Places, list[tuple[float, float, float, float, str]]]:
    """Places of everything, and a frame for each node: x, y, width, height, name."""
    places: Places = {}
    boxes = []
    left_edge = 0.0
    for node in range(topology.n_nodes):
        spots = layout.place_node(topology, node)
        corners = np.array(list(spots.values()) or [(0.0, 0.0)])
        (left, low), (right, high) = corners.min(axis=0).tolist(), corners.max(axis=0).tolist()
        columns = right - left
        places |= {v: (x + (left_edge - left), y) for v, (x, y) in spots.items()}
        boxes.append((left_edge - 0.7, low - 0.85, columns + 1.4, high - low + 1.3, f"node {node}"))
        left_edge += columns + 2.1
    width = left_edge - 2.1
    places |= layout.evenly(layout.shared_switches(topology), -1.1, width)
    for i, tier in enumerate(layout.tiers(topology)):
        places |= layout.evenly(_by_below(topology, tier, places), FIRST_TIER + i * TIER, width)
    return places, boxes


def _by_below(topology: Topology, tier: list[int], places: Places) -> list[int]:
    """Switches in the order of what hangs below them."""
    near = layout.neighbours(topology, [*tier, *places])
    x = {v: [places[w][0] for w in near[v] if w in places] for v in tier}
    return sorted(tier, key=lambda v: (round(float(np.mean(x[v])), 6) if x[v] else 0.0, v))


@dataclass
class MachineCanvas:
    """Axes, and what is drawn on them."""

    topology: Topology
    loads: Floats
    end: float
    axes: Axes = field(default=None)  # type: ignore[assignment]

    def colours(self, loads: Floats) -> npt.NDArray[Any]:
        """(n, 4) colours of loads."""
        return np.asarray(load_map()(np.clip(loads / self.end, 0.0, 1.0)))

    def frame(self, x: float, y: float, width: float, height: float, name: str) -> None:
        """A node's outline, with its name inside at the bottom left."""
        from matplotlib.patches import FancyBboxPatch

        self.axes.add_patch(
            FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.18", fc="#F6F8FA", ec=FAINT)
        )
        self.axes.text(x + 0.2, y + 0.1, name, fontsize=9, color=QUIET, va="bottom", ha="left")

    def links(self, places: Places, most: int | None = None) -> None:
        """Every cable whose ends have a place, or the ``most`` busiest of them; the busiest on top."""
        from matplotlib.collections import LineCollection

        ends, loads, rates = cables(self.topology, self.loads, places)
        order = np.argsort(loads, kind="stable")[-most if most else None :]
        widths = 0.7 + 2.4 * np.sqrt(rates / rates.max(initial=1e-30)) * (0.35 + 0.65 * (loads > 0.002))
        widths *= min(1.0, (150 / max(len(order), 1)) ** 0.5)
        lines = [_bent(places[a], places[b]) for a, b in ends]
        drawn = [lines[i] for i in order.tolist()]
        colours = self.colours(loads[order])
        self.axes.add_collection(
            LineCollection(drawn, colors=colours, linewidths=widths[order], capstyle="round", zorder=2)
        )

    def vertices(self, places: Places, width: float = 1.0) -> None:
        """A box for each, with its number; ``width`` scales the boxes."""
        from matplotlib.patches import FancyBboxPatch

        columns = max(x for x, _ in places.values()) + 1
        room = spacing(places)
        size = float(np.clip(190.0 / columns, 5.0, 8.5))
        for v, (x, y) in places.items():
            face, ink, broad = _BOX[self.topology.vertex_kinds[v]]
            broad = min(broad * width, 0.84 * room[y])
            height = 0.42
            box = FancyBboxPatch(
                (x - broad / 2, y - height / 2),
                broad,
                height,
                boxstyle="round,pad=0,rounding_size=0.1",
                fc=face,
                ec="white",
                lw=1.2,
                zorder=3,
            )
            self.axes.add_patch(box)
            if broad < LEAST_BOX:
                continue  # no room for a number
            self.axes.text(
                x,
                y,
                number_of(self.topology.vertex_names[v]),
                ha="center",
                va="center_baseline",
                fontsize=min(size, 14.0 * broad),
                color=ink,
                zorder=4,
            )

    def row_names(self, places: Places, left: float | None = None) -> None:
        """What each row holds, left of it."""
        rows = {y: self.topology.vertex_kinds[v] for v, (_, y) in places.items()}
        left = min(x for x, _ in places.values()) - 0.95 if left is None else left
        tiers = sorted(y for y, kind in rows.items() if kind == SWITCH and y >= FIRST_TIER)
        for y, kind in rows.items():
            name = tier_name(tiers.index(y), len(tiers)) if y in tiers else _WORDS.get(kind, kind)
            self.axes.text(left, y, name, ha="right", va="center_baseline", fontsize=9, color=INK)

    def finish(self, figure: Figure) -> None:
        """No axes, and a colour bar where something is loaded."""
        self.axes.set_axis_off()
        low, high = self.axes.dataLim.intervalx
        # Names of rows stand left of everything: 1.2 inches of a figure.
        wide = inches_wide(self.axes) + 0.7
        self.axes.set_xlim(low - (high - low) * 1.15 / wide, high + 0.01 * (high - low))
        if self.loads.max(initial=0.0) > 0:  # a machine at rest has no scale
            scale_of_loads(figure, self.axes, self.end)


def scale_of_loads(figure: Figure, axes: Axes, end: float) -> None:
    """The scale of loads, below."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    colours = ScalarMappable(Normalize(0.0, end), load_map())
    placing = {"location": "bottom", "fraction": 0.04}
    label = "share of the line rate used, mean over the time shown, busier direction"
    colour_bar(figure, axes, colours, label, 8.5, **placing, aspect=50, pad=0.02)


def spacing(places: Places) -> dict[float, float]:
    """The least distance between neighbours of each row, by height; infinite for one alone."""
    rows: dict[float, list[float]] = {}
    for x, y in places.values():
        rows.setdefault(y, []).append(x)
    return {y: float(np.diff(np.sort(x)).min(initial=np.inf)) for y, x in rows.items()}


def cables(topology: Topology, loads: Floats, places: Places) -> tuple[list[tuple[int, int]], Floats, Floats]:
    """Both directions of each link as one: ends, the busier direction's load, the wider one's bandwidth [bytes/s]."""
    placed = np.zeros(len(topology.vertex_names), dtype=bool)
    placed[list(places)] = True
    keep = np.flatnonzero(placed[topology.link_src] & placed[topology.link_dst])
    low = np.minimum(topology.link_src, topology.link_dst)[keep]
    high = np.maximum(topology.link_src, topology.link_dst)[keep]
    pairs, which = np.unique(np.column_stack([low, high]), axis=0, return_inverse=True)
    load = np.zeros(len(pairs))
    rate = np.zeros(len(pairs))
    np.maximum.at(load, which.reshape(-1), loads[keep])
    np.maximum.at(rate, which.reshape(-1), topology.link_bandwidth[keep])
    return [(a, b) for a, b in pairs.tolist()], load, rate


def _bent(a: tuple[float, float], b: tuple[float, float]) -> npt.NDArray[Any]:
    """A straight line, or an arc between two of one row, which would otherwise run through those between."""
    if a[1] != b[1]:
        return np.array([a, b])
    t = np.linspace(0.0, 1.0, 17)
    depth = min(0.18 + 0.11 * abs(b[0] - a[0]), 0.85) * (-1.0 if a[1] <= ROWS[GPU] else 1.0)
    return np.column_stack([a[0] + (b[0] - a[0]) * t, a[1] + depth * 4 * t * (1 - t)])


def number_of(name: str) -> str:
    """``node0/gpu3`` -> ``3``; a name without a number stays."""
    last = name.rsplit("/", 1)[-1]
    digits = last.lstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-")
    return digits or last


def tier_name(i: int, n: int) -> str:
    """What switches of the i-th of n tiers are called."""
    if n == 1:
        return "switches"
    return ("leaf switches", "spine switches", "core switches")[min(i, 2)]


def alt_of(topology: Topology, loads: Floats) -> str:
    """The picture in words."""
    devices = "GPUs" if len(topology.gpus) else "CPUs"
    count = f"{topology.n_nodes} node(s) with {len(topology.homes)} {devices} in all"
    start = f"{topology.name}: {count}, links coloured by load."
    if not len(loads) or loads.max() <= 0:
        return f"{start} No link carries anything."
    top = int(np.argmax(loads))
    return f"{start} The busiest is {topology.link_name(top)} at {loads[top]:.1%} of {topology.rate_words(top)}."
