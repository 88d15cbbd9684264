"""What all figures share: one palette, how areas and curves look, and the units of an axis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy.typing as npt

from clustersim.core.memory_parts import part_colours, part_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap


palette: dict[str, str] = {
    "forward": "#0072B2",
    "backward": "#009E73",
    "optimizer": "#CC79A7",
    "gradient": "#56B4E9",
    "input": "#F0E442",
    "memcpy": "#F0E442",
    "other": "#999999",
    "communication": "#E69F00",
    "stall": "#D55E00",
    "idle": "#EFEFEF",
}
"""Colours by phase: Okabe and Ito's set, which colour-blind readers can tell apart. A stall is drawn as a hatch."""

kernels: dict[str, str] = {"compute": "#4B3F8F", "products": "#7468B5", "memory": "#9E94D0", "launch": "#CEC8EA"}
"""Colours of kernels by what limits them, where no phases are told apart: one hue, so that none is a phase's."""

series: tuple[str, ...] = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""The same colours where there are no phases: curves, parts of a sum."""

MARKERS = "osD^vPX*"
"""Of curves and clouds, beside the colours of :data:`series`."""
HATCHES = ("", "....")
"""More parts than colours: they begin again, dotted."""
dimensions: dict[str, str] = {
    "TP": "#CC6677",
    "CP": "#DDCC77",
    "EP": "#882255",
    "PP": "#999933",
    "DP": "#44AA99",
    "step end": "#332288",
    "point to point": "#AA4499",
}
"""Which way of splitting the work a transfer belongs to (:data:`clustersim.explain.dimensions.DIMENSIONS`): Paul Tol's
muted set, which colour-blind readers can tell apart, and none of it is a phase's."""

INK = "#1F2328"
QUIET = "#6E7781"
FAINT = "#D8DEE4"
"""Text, text that matters less, rules."""

DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1, 1.4)), (0, (6, 1.4, 1, 1.4)))
"""Of the second thing that tells curves apart."""


class AreaStyle(msgspec.Struct, frozen=True):
    """How an area is drawn: its ``face``, a ``hatch`` in the colour of its ``edge``, and the edge's ``width``."""

    face: str
    hatch: str = ""
    edge: str = "white"
    width: float = 0.0

    @property
    def colour(self) -> str:
        """Of a small mark in a table: where the face is white, that of the hatch."""
        return self.edge if self.face == "white" else self.face

    @property
    def mark(self) -> str:
        """What is on the colour of a page's small mark: "dotted", "stall" (hatched), "outlined", or nothing."""
        if self.hatch:
            return "dotted" if self.hatch.startswith(".") else "stall"
        return "outlined" if self.face == "white" else ""


NOT_RECORDED_AREA = AreaStyle("white", edge=QUIET, width=0.6)
"""Of the part of a step that profilers did not record: outlined, or nobody would see it."""


class CurveStyle(msgspec.Struct, frozen=True):
    """How a curve is drawn: its colour, its mark and its dash."""

    colour: str
    marker: str
    dash: Any

    def draw(self, axes: Axes, x: npt.ArrayLike, y: npt.ArrayLike, label: str | None = None) -> None:
        """Draw the curve of such points."""
        axes.plot(x, y, color=self.colour, marker=self.marker, ls=self.dash, lw=2.0, ms=5.5, mec="white", label=label)


def curve_styles(names: Iterable[str]) -> dict[str, CurveStyle]:
    """Colour, mark and dash of curves named by what they chose (``"ring, 25 Gb/s"``): the first is a colour, what
    follows it a dash, the same for all colours as long as there are dashes enough.

    >>> found = curve_styles(["ring, 25 Gb/s", "ring, 100 Gb/s", "server, 25 Gb/s"])
    >>> [one.colour == found["ring, 25 Gb/s"].colour for one in found.values()]
    [True, True, False]
    """
    parts = {name: name.partition(", ")[::2] for name in names}
    first, rest = (list(dict.fromkeys(pair[side] for pair in parts.values())) for side in (0, 1))
    dash = {(first_part, second_part): rest.index(second_part) for first_part, second_part in parts.values()}
    if len(rest) > len(DASHES):
        dash = {
            (first_part, second_part): [b for a, b in parts.values() if a == first_part].index(second_part)
            for first_part, second_part in dash
        }
    places = {
        name: (first.index(first_part), dash[first_part, second_part])
        for name, (first_part, second_part) in parts.items()
    }
    return {
        name: CurveStyle(series[place % len(series)], MARKERS[place % len(MARKERS)], DASHES[dashes % len(DASHES)])
        for name, (place, dashes) in places.items()
    }


def part_styles(names: Iterable[str]) -> dict[str, AreaStyle]:
    """Colour and hatch of each part of a whole: parts of memory their own, others the next ones.

    >>> part_styles(["activations", "anything"])["activations"] == part_styles(["activations"])["activations"]
    True
    """
    wanted = dict.fromkeys(part_label(name) for name in names)
    colours = part_colours()
    styles = {name: AreaStyle(colours[name]) for name in wanted if name in colours}
    # Beside what holds memory, parts without a colour of their own are dotted: a plain one would be a phase's.
    first = len(series) if styles else 0
    for place, name in enumerate((name for name in wanted if name not in colours), first):
        styles[name] = AreaStyle(series[place % len(series)], HATCHES[place // len(series) % len(HATCHES)])
    return styles


LOAD_STOPS = ("#E1E4E8", "#FBE3A0", "#F2B134", "#DD6B12", "#A82A10", "#5C0A14")
"""Link load from none, grey, to the most; lightness falls all the way, so the order survives in print."""


def load_map() -> Colormap:
    """Colours of a share of a link's line rate, 0 to 1."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("load", LOAD_STOPS)


def time_unit(seconds: float) -> tuple[float, str]:
    """What to multiply seconds by for an axis this long, and the unit."""
    return next((s, u) for s, u in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if seconds * s >= 2 or s == 1e6)


def byte_unit(nbytes: float) -> tuple[float, str]:
    """What to divide bytes by for an axis up to this many, and the unit."""
    return next(
        (float(2**p), u)
        for p, u in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B"))
        if nbytes >= 2**p or p == 0
    )
