"""A machine too large to draw every part of: its network, each node as a cell, and the busiest node in full."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from clustersim.app.plots import layout
from clustersim.app.plots.drawing import Axes, Figure, new_figure, titled
from clustersim.app.plots.layout import Places
from clustersim.app.plots.machine import alt_of, scale_of_loads, tier_name
from clustersim.app.plots.style import INK, QUIET
from clustersim.core.arrays import Floats

if TYPE_CHECKING:
    from clustersim.app.plots.machine import MachineCanvas


MAX_SWITCHES = 64
MAX_LINES = 1200
"""Switches of a tier, and cables between two tiers, that are drawn one by one."""
CELLS = 32
"""Nodes in a line."""
_WIDE = 31.0
_BASE = 10.0


def summarised(canvas: MachineCanvas, title: str | None) -> Figure:
    """The network on top, the nodes in the middle, the busiest of them in full at the bottom."""
    topology = canvas.topology
    tiers = layout.tiers(topology)
    worst = node_loads(canvas)
    busiest = int(np.argmax(worst))
    rows = math.ceil(topology.n_nodes / CELLS)
    heights = [0.35 + 0.62 * len(tiers), 0.45 + 0.28 * rows, 2.7]
    figure = new_figure(sum(heights) + 1.1)
    axes = figure.subplots(3, 1, height_ratios=heights)
    _network(canvas, axes[0], tiers)
    _cells(canvas, axes[1], worst, busiest)
    _one_node(canvas, axes[2], busiest)
    for axis in axes:
        axis.set_axis_off()
        axis.set_xlim(-5.0, _WIDE + 0.8)
    scale_of_loads(figure, axes[2], canvas.end)
    return titled(figure, title, alt_of(topology, canvas.loads))


def node_loads(canvas: MachineCanvas) -> Floats:
    """(nodes,) the busiest link that begins or ends in each node."""
    topology = canvas.topology
    worst = np.zeros(canvas.topology.n_nodes)
    for ends in (topology.link_src, topology.link_dst):
        node = topology.vertex_node[ends]
        np.maximum.at(worst, node[node >= 0], canvas.loads[node >= 0])
    return worst


def _network(canvas: MachineCanvas, axes: Axes, tiers: list[list[int]]) -> None:
    """Switches tier by tier, and the cables between tiers."""
    places: Places = {}
    for i, tier in enumerate(tiers):
        shown = _sample(tier, canvas)
        places |= layout.evenly(shown, _BASE + i, _WIDE)
        left_out = f", {len(shown)} busiest shown" if len(shown) < len(tier) else ""
        _row_name(axes, _BASE + i, tier_name(i, len(tiers)), f"{len(tier)}{left_out}")
    canvas.axes = axes
    canvas.links(places, most=MAX_LINES)
    _squares(canvas, axes, places, _touching(canvas))
    axes.set_ylim(_BASE - 0.45, _BASE + len(tiers) - 0.5)


def _sample(tier: list[int], canvas: MachineCanvas) -> list[int]:
    """All of a tier, or its busiest switches."""
    if len(tier) <= MAX_SWITCHES:
        return tier
    load = _touching(canvas)
    return sorted(sorted(tier, key=lambda v: (-load[v], v))[:MAX_SWITCHES])


def _touching(canvas: MachineCanvas) -> Floats:
    """(V,) the busiest link at each vertex."""
    load = np.zeros(len(canvas.topology.vertex_names))
    for ends in (canvas.topology.link_src, canvas.topology.link_dst):
        np.maximum.at(load, ends, canvas.loads)
    return load


def _squares(canvas: MachineCanvas, axes: Axes, places: Places, load: Floats) -> None:
    """A small box for each switch, coloured by its busiest link."""
    from matplotlib.patches import FancyBboxPatch

    for v, (x, y) in places.items():
        colour = canvas.colours(np.array([load[v]]))[0]
        axes.add_patch(
            FancyBboxPatch(
                (x - 0.22, y - 0.16),
                0.44,
                0.32,
                boxstyle="round,pad=0,rounding_size=0.06",
                fc=colour,
                ec=INK,
                lw=0.9,
                zorder=3,
            )
        )


def _cells(canvas: MachineCanvas, axes: Axes, worst: Floats, busiest: int) -> None:
    """Each node as a square coloured by its busiest link; the busiest is framed."""
    from matplotlib.patches import Rectangle

    per_line = min(CELLS, len(worst))
    lines = math.ceil(len(worst) / per_line)
    width = min((_WIDE + 1) / per_line, 2.0)
    left = (_WIDE + 1 - width * per_line) / 2 - 0.5
    colours = canvas.colours(worst)
    for node in range(len(worst)):
        x = left + width * (node % per_line)
        y = -(node // per_line)
        edge, wide, above = (INK, 1.8, 3) if node == busiest else ("white", 1.2, 1)
        axes.add_patch(
            Rectangle((x + 0.03, y - 0.45), width - 0.06, 0.9, fc=colours[node], ec=edge, lw=wide, zorder=above)
        )
    _row_name(axes, -(lines - 1) / 2, "nodes", f"{len(worst)}, by busiest link")
    axes.set_ylim(-lines + 0.3, 0.65)


def _row_name(axes: Axes, y: float, name: str, more: str) -> None:
    """A name left of a row, and something smaller below it."""
    for text, size, colour, points in ((name, 9, INK, 1.0), (more, 7.5, QUIET, -10.0)):
        axes.annotate(
            text,
            (-0.9, y),
            xytext=(0, points),
            textcoords="offset points",
            ha="right",
            va="center_baseline",
            fontsize=size,
            color=colour,
            annotation_clip=False,
        )


def _one_node(canvas: MachineCanvas, axes: Axes, node: int) -> None:
    """One node in full, as wide as the figure."""
    places = layout.place_node(canvas.topology, node)
    shared = layout.shared_switches(canvas.topology)
    near = layout.neighbours(canvas.topology, [*places, *shared])
    x = [p[0] for p in places.values()]
    stretch = (_WIDE - 3) / max(max(x) - min(x), 1.0)
    stretch = min(stretch, 6.4 if shared else 3.2)
    shift = min(x)
    room = 1.0 + (_WIDE - (max(x) - min(x)) * stretch) / 2
    wide = {v: ((px - shift) * stretch + room, py) for v, (px, py) in places.items()}
    joined = [v for v in shared if near[v]]
    low = min(y for _, y in places.values()) - 1.35
    wide |= {v: ((k + 0.5) * (_WIDE - 3) / len(joined) + 1.5, low) for k, v in enumerate(joined)}
    xs = [p[0] for p in wide.values()]
    ys = [p[1] for p in wide.values()]
    canvas.axes = axes
    canvas.frame(
        min(xs) - 1.4, min(ys) - 0.8, max(xs) - min(xs) + 2.8, max(ys) - min(ys) + 1.2, f"node {node}, the busiest"
    )
    canvas.links(wide)
    canvas.vertices(wide, width=1.4 if joined else 2.0)
    canvas.row_names(wide, left=-0.9)
    axes.set_ylim(min(ys) - 0.9, max(ys) + 0.5)
