"""What a scenario depends on: a tornado of hardware numbers, the step over the network's speed, and lost efficiency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from clustersim.app.plots.drawing import (
    Axes,
    Figure,
    drawn_on,
    is_narrow,
    legend_below,
    new_figure,
    plain_axes,
    titled,
)
from clustersim.app.plots.lines import Axis, lines
from clustersim.app.plots.style import FAINT, INK, QUIET, palette, series
from clustersim.core.errors import ProgramError
from clustersim.core.units import format_change

if TYPE_CHECKING:
    from clustersim.studies.sensitivity.scaling import ScalingPoint
    from clustersim.studies.sensitivity.turned import BreakEven, Swing

COLOURS = {
    "efficiency": series[0],
    "kernels": palette["backward"],
    "optimizer": palette["optimizer"],
    "copies": palette["gradient"],
    "exposed communication": palette["communication"],
    "bubble": "#C9CED3",
    "host, other": palette["other"],
}
"""Of the parts that efficiency is lost to, as phases are coloured elsewhere."""


def tornado(swings: Sequence[Swing], swing: float, title: str | None = None, *, ax: Axes | None = None) -> Figure:
    """A bar for each number: left, what the step loses in length when it is better; right, what worse adds.

    swings : largest first. swing : how much was turned, 0.2 for 20 %.

    Raises :class:`ProgramError` for no swings.
    """
    if not swings:
        raise ProgramError("nothing to draw: no number was turned")
    figure, axes = drawn_on(ax, 1.0 + 0.42 * len(swings))
    rows = np.arange(len(swings))[::-1]
    better = np.array([-swing.gain for swing in swings])
    worse = np.array([swing.loss for swing in swings])
    axes.barh(rows, better, color=palette["backward"], height=0.62, label=f"{swing:.0%} better")
    axes.barh(rows, worse, color=palette["stall"], height=0.62, label=f"{swing:.0%} worse")
    room = 0.02 * max(float(np.abs(better).max()), float(np.abs(worse).max()), 1e-6)
    for row, low, high in zip(rows, better.tolist(), worse.tolist(), strict=True):
        axes.annotate(format_change(low), (min(low, 0.0) - room, row), ha="right", va="center", fontsize=9, color=INK)
        axes.annotate(format_change(high), (max(high, 0.0) + room, row), ha="left", va="center", fontsize=9, color=INK)
    plain_axes(axes, ())
    axes.axvline(0.0, color=QUIET, lw=1.0)
    axes.set_yticks(rows, [swing.knob for swing in swings], fontsize=10)
    axes.set_xticks([])
    axes.margins(x=0.5 if is_narrow(figure) else 0.16)  # a label beside the longest bar, and none on the names
    axes.set_title("change of the step time", loc="left", fontsize=10, color=INK)
    legend_below(figure, ax, axes, ncols=2, fontsize=9)
    caption = "; ".join(
        f"{swing.knob} {format_change(-swing.gain)} and {format_change(swing.loss)}" for swing in swings
    )
    return titled(
        figure, title, f"Change of the step time with each number {swing:.0%} better and worse: {caption}.", ax
    )


def network_speed(network: BreakEven, title: str | None = None, *, ax: Axes | None = None) -> Figure:
    """The step over a NIC's line rate, with the length that is accepted; the network's switches scale with its NICs."""
    speeds = np.asarray(network.speeds, dtype=np.float64) * 8e-9
    steps = np.asarray(network.steps, dtype=np.float64)
    now = float(np.interp(network.nic * 8e-9, speeds, steps))
    most = now * (1 + network.growth)
    law = (speeds[[0, -1]], np.array([most, most]))
    label = f"{network.growth:.0%} longer than at {network.nic * 8e-9:.3g} Gb/s"
    if network.at is not None:
        label += f": at {network.at * 8e-9:.3g} Gb/s"
    nics = Axis("NIC [Gb/s]", log=True)
    figure = lines({"step": (speeds, steps)}, x=nics, y="step time [s]", laws={label: law}, title=title, ax=ax)
    # The runs that only look for the break-even lie close together: ticks are where the speed was doubled.
    nic = network.nic * 8e-9
    doubled = [nic * 2.0**k for k in range(-10, 11)]
    shown = [speed for speed in doubled if speeds[0] * 0.99 <= speed <= speeds[-1] * 1.01]
    (ax or figure.axes[0]).set_xticks(shown, [f"{speed:,.4g}" for speed in shown])
    return figure


def efficiency_losses(curves: Mapping[str, Sequence[ScalingPoint]], title: str | None = None) -> Figure:
    """A panel for each kind of scaling: bars of efficiency over GPUs, and on top what the rest is lost to.

    Parameters
    ----------
    curves : of each kind. Parts that got shorter are left out, and the others
        share what is lost in proportion.

    Raises :class:`ProgramError` for no points.
    """
    valid = {name: [point for point in points if not point.error] for name, points in curves.items()}
    valid = {name: points for name, points in valid.items() if points}
    if not valid:
        raise ProgramError("nothing to draw: no number of nodes has a run")
    figure = new_figure(3.7)
    panels = figure.subplots(1, len(valid), squeeze=False)[0]
    for axes, (name, points) in zip(panels, valid.items(), strict=True):
        _stacked(axes, points)
        heading = "scaling:\nshare of ideal" if is_narrow(figure) else "scaling: share of ideal throughput"
        axes.set_title(f"{name} {heading}", loc="left", fontsize=10, color=INK)
    handles = {text: handle for axes in panels for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    loss_texts = {
        name: ", ".join(f"{point.efficiency:.0%} on {point.gpus:,} GPUs" for point in points)
        for name, points in valid.items()
    }
    caption = "; ".join(f"{name}: {text}" for name, text in loss_texts.items())
    return titled(figure, title, f"Efficiency. {caption}.")


def _stacked(axes: Axes, points: Sequence[ScalingPoint]) -> None:
    places = np.arange(len(points))
    efficiency = np.array([point.efficiency for point in points])
    axes.bar(places, efficiency, color=COLOURS["efficiency"], width=0.66, label="efficiency")
    parts = [part for part in COLOURS if part != "efficiency"]
    losses = {part: np.array([max(0.0, point.losses.get(part, 0.0)) for point in points]) for part in parts}
    total = np.maximum(sum(losses.values(), np.zeros(len(points))), 1e-12)
    share = np.clip(1.0 - efficiency, 0.0, None) / total
    base = efficiency.copy()
    for part, lost in losses.items():
        if (lost * share).max() >= 0.002:
            axes.bar(places, lost * share, bottom=base, color=COLOURS[part], width=0.66, label=f"lost: {part}")
        base += lost * share
    for place, value in zip(places.tolist(), efficiency.tolist(), strict=True):
        axes.annotate(f"{value:.0%}", (place, value - 0.03), ha="center", va="top", fontsize=9, color="white")
    plain_axes(axes, ("bottom",))
    axes.grid(axis="y", color=FAINT, lw=0.7)
    axes.set_axisbelow(True)
    axes.set_ylim(0.0, max(1.0, float(efficiency.max())) * 1.02)
    axes.set_yticks([])
    axes.set_xticks(
        places, [f"{point.gpus:,}" + ("" if point.fits else "\ndoes not fit") for point in points], fontsize=9
    )
    axes.set_xlabel("GPUs", fontsize=9)
