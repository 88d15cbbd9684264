"""Dimensions of a split model: what each moves over which kind of link, and which ranks share a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any

import numpy as np

from clustersim.app.plots.drawing import (
    Axes,
    Figure,
    drawn_on,
    inches_wide,
    is_narrow,
    legend_of_all,
    new_figure,
    only_one,
    plain_axes,
    titled,
)
from clustersim.app.plots.style import INK, QUIET, byte_unit, dimensions
from clustersim.core.arrays import Columns
from clustersim.core.errors import ProgramError
from clustersim.core.facts import DimensionGroups, MeshMap
from clustersim.core.units import format_bytes
from clustersim.explain.dimensions import named

KIND_WORDS = {
    "nvlink": "NVLink",
    "net": "network",
    "pcie": "PCIe",
    "cpu": "between sockets",
    "xgmi": "xGMI",
    "c2c": "C2C",
}
STRIP = 64
"""Ranks that fit beside each other in one line."""
TINTS = (0.35, 0.17, 0.44, 0.1, 0.53, 0.26, 0.62)
"""Shares of a dimension's colour in those of its groups, neighbours apart."""
DARK = 0.4
"""Mean of red, green and blue below which words on a colour are white."""
FIRST = "rank 0's group has the full colour"
EACH = 48
"""GPUs beside each other whose groups can still be told apart by colour; of more, only one group is shown."""


def traffic(table: Columns, title: str | None = None) -> Figure:
    """What a step moves: bytes each GPU sends, and bytes on each kind of link, a bar each, split by dimension.

    table : columns of :func:`clustersim.explain.volume.by_dimension`.

    Raises :class:`ProgramError` where nothing is sent.
    """
    names = [str(name) for name in table["dimension"]]
    kinds = [column for column in table if column.startswith("link_")]
    if not names:
        raise ProgramError("nothing to draw: nothing is sent")
    bars = {"sent by each GPU": "sent_per_gpu"} | {
        f"on all {KIND_WORDS.get(kind.removeprefix('link_'), kind.removeprefix('link_'))} links": kind for kind in kinds
    }
    figure = new_figure(0.62 * len(bars) + (1.1 if title else 0.8))
    rows = figure.subplots(len(bars), 1, squeeze=False)[:, 0]
    for axes, (label, column) in zip(rows, bars.items(), strict=True):
        values = [float(v) for v in table[column]]
        _bar(axes, label, dict(zip(names, values, strict=True)))
    legend_of_all(figure, _drawn_parts(rows), 7)
    caption = "; ".join(
        f"{label}: " + ", ".join(f"{n} {format_bytes(float(v))}" for n, v in zip(names, table[column], strict=True))
        for label, column in bars.items()
    )
    return titled(figure, title, f"What a step moves by dimension. {caption}.")


SEEN = 1e-3
"""Share of a bar below which a part is under a pixel wide, so that no legend names its colour."""


def _drawn_parts(rows: Iterable[Axes]) -> dict[str, Any]:
    """Handles of a legend by their names: of parts that can be seen in one of these bars, in their order."""
    named_by: dict[str, Any] = {}
    names: dict[str, None] = {}
    for axes in rows:
        longest = axes.get_xlim()[1]
        handles: list[Any] = axes.get_legend_handles_labels()[0]
        for bars in handles:
            names.setdefault(bars.get_label())
            if sum(bar.get_width() for bar in bars) >= SEEN * longest:
                named_by.setdefault(bars.get_label(), bars)
    return {name: named_by[name] for name in names if name in named_by}


def _bar(axes: Axes, label: str, parts: Mapping[str, float]) -> None:
    total = sum(parts.values())
    scale, unit = byte_unit(total or 1.0)
    left = 0.0
    least = 0.3 if is_narrow(axes.get_figure(root=True)) else 0.08  # type: ignore[arg-type]
    for name, nbytes in parts.items():
        width = nbytes / scale
        axes.barh(0, width, left=left, height=0.7, color=dimensions[name], ec="white", lw=0.8, label=name)
        if total and nbytes > least * total:
            text = f"{name} {nbytes / total:.0%}"
            ink = "white" if name in {"EP", "step end"} else INK
            axes.text(left + width / 2, 0, text, ha="center", va="center_baseline", fontsize=8.5, color=ink)
        left += width
    plain_axes(axes)
    axes.set_yticks([0], [label], fontsize=9)
    axes.set_ylim(-0.5, 0.5)
    axes.set_xlim(0, (total or 1.0) / scale)
    axes.tick_params(axis="x", labelsize=8, labelcolor=QUIET)
    axes.text(1.008, 0.5, f"{total / scale:.3g} {unit}", transform=axes.transAxes, fontsize=8.5, va="center", color=INK)


def mesh_on_machine(mesh: MeshMap, title: str | None = None, *, ax: Axes | None = None) -> Figure:
    """Which ranks share a group, a panel for each dimension: a column is a machine, a row one of its GPUs.

    ``ax`` : drawn on instead of a new figure; for up to :data:`STRIP` ranks, whose dimensions share an axes.

    Raises :class:`ProgramError` for a mesh of one rank.
    """
    dims = mesh.dims
    per_node = mesh.per_node
    if not dims:
        raise ProgramError("nothing to draw: no dimension has more than one rank")
    nodes = -(-mesh.world // per_node)
    dims_text = "; ".join(f"{d.name} {d.degree} over {', '.join(d.links) or 'nothing'}" for d in dims)
    caption = f"{mesh.world:,} ranks on {nodes:,} machine(s), by dimension: {dims_text}. {FIRST.capitalize()}."
    if mesh.world <= STRIP:
        return titled(_strips(mesh, ax), title, caption, ax)
    only_one(ax, f"a mesh of {mesh.world:,} ranks")
    figure = new_figure(1.0)
    columns = 1 if nodes > EACH or is_narrow(figure) else min(len(dims), 3)
    lines = -(-len(dims) // columns)
    figure.set_figheight(lines * (0.5 + (0.17 if nodes <= EACH else 0.06) * per_node) + (0.75 if title else 0.45))
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, dim in zip(grid, dims, strict=False):
        _panel(axes, dim, nodes, per_node)
    for axes in grid[len(dims) :]:
        axes.set_visible(False)
    shade_text = _one_shade(mesh) if nodes <= EACH else "coloured: rank 0's group"
    words = f"a column is a machine, a row one of its GPUs; {shade_text}"
    words = "\n".join(wrap(words, 60)) if is_narrow(figure) else words
    figure.supxlabel(words, fontsize=8.5, color=QUIET)
    return titled(figure, title, caption)


def _one_shade(mesh: MeshMap) -> str:
    again = any(mesh.world > dim.degree * (len(TINTS) + 1) for dim in mesh.dims)
    return f"one shade is one group{', and shades repeat' if again else ''}; {FIRST}"


def _shade(name: str, group: int | None = None) -> Any:
    """A dimension's colour, which rank 0's group has; another ``group`` has a tint of it."""
    from matplotlib.colors import to_rgb

    share = 1.0 if group is None else TINTS[group % len(TINTS)]
    return share * np.array(to_rgb(dimensions[named(name.replace(" x ", "-"))])) + (1.0 - share)


def _strips(mesh: MeshMap, ax: Axes | None) -> Figure:
    """A line for each dimension, all ranks beside each other, machines apart."""
    dims = mesh.dims
    world = mesh.world
    per_node = mesh.per_node
    figure, axes = drawn_on(ax, 0.36 * len(dims) + 1.15)
    gap = 0.4
    nodes = -(-world // per_node)
    for y, dim in enumerate(dims):
        _rank_boxes(axes, y, dim, [rank + gap * (rank // per_node) for rank in range(world)])
        axes.text(
            1.005,
            y,
            ", ".join(dim.links),
            fontsize=8.5,
            color=QUIET,
            va="center_baseline",
            transform=axes.get_yaxis_transform(),
        )
    plain_axes(axes, ())
    axes.set_yticks(range(len(dims)), [f"{dim.name} {dim.degree}" for dim in dims], fontsize=9)
    middles = [(n + 0.5) * per_node + gap * n for n in range(nodes)]
    apart = inches_wide(axes) / nodes > 0.085 * len(f"machine {nodes - 1}")  # else names run into each other
    axes.set_xticks(middles, [f"machine {n}" if apart else f"{n}" for n in range(nodes)], fontsize=8.5)
    axes.set_ylim(len(dims) - 0.5, -0.5)
    axes.set_xlim(-0.1, world + gap * (nodes - 1) + 0.1)
    words = f"{'' if apart else 'machines; '}in a line, {_one_shade(mesh)}"
    words = "\n".join(wrap(words, 48)) if is_narrow(figure) else words
    axes.set_xlabel(words, fontsize=8.5, color=QUIET)
    return figure


def _rank_boxes(axes: Axes, y: int, dim: DimensionGroups, left: Sequence[float]) -> None:
    """A box for each rank of a dimension's line, from its place on the ``left`` on, numbered where there is room."""
    world = len(left)
    for rank, group in enumerate(dim.of_rank or ()):
        is_first = rank in dim.first
        face = _shade(dim.name, None if is_first else group)
        axes.barh(y, 0.94, left=left[rank], height=0.84, color=face, align="center")
        if inches_wide(axes) / world > 0.1:  # a number has room
            axes.text(
                left[rank] + 0.47,
                y,
                f"{rank}",
                ha="center",
                va="center_baseline",
                color="white" if face.mean() < DARK else INK,
                fontsize=6 if world > STRIP // 2 else 8,
                weight="bold" if is_first else "normal",
            )


def _panel(axes: Axes, dim: DimensionGroups, nodes: int, per_node: int) -> None:
    from matplotlib.colors import to_rgb

    cells = np.ones((per_node, nodes, 3)) * np.array(to_rgb("#EEF0F2"))
    if dim.of_rank is not None and nodes <= EACH:
        for rank, group in enumerate(dim.of_rank):
            cells[rank % per_node, rank // per_node] = _shade(dim.name, group)
    for rank in dim.first:
        cells[rank % per_node, rank // per_node] = _shade(dim.name)
    axes.imshow(cells, aspect="auto", interpolation="nearest")
    if nodes <= EACH:
        axes.set_xticks(np.arange(nodes + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(per_node + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", lw=1.2)
    axes.tick_params(which="both", length=0, labelsize=7.5, labelcolor=QUIET)
    axes.set_yticks([0, per_node - 1] if per_node > 1 else [0])
    axes.set_xticks([0, nodes - 1] if nodes > 1 else [0])
    for spine in axes.spines.values():
        spine.set_visible(False)
    links = f": {', '.join(dim.links)}" if dim.links else ""
    axes.set_title(f"{dim.name} {dim.degree}{links}", fontsize=9, color=INK, loc="left")
