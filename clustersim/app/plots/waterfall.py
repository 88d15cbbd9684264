"""From peak to MFU: what each class of time takes away, a bar below the other."""

from __future__ import annotations

from collections.abc import Sequence

from clustersim.app.plots.drawing import Axes, Figure, drawn_on, is_narrow, plain_axes, titled
from clustersim.app.plots.style import INK, QUIET, AreaStyle, kernels, palette, time_unit
from clustersim.core.errors import ProgramError
from clustersim.core.units import format_time
from clustersim.explain.waterfall import LEAST, WORDS, Waterfall

STYLE = {
    "bubble": AreaStyle("#C9CED3", "......"),
    "waiting": AreaStyle("white", "//////", palette["stall"]),
    "exposed": AreaStyle(palette["communication"]),
    "host": AreaStyle(palette["other"]),
    "optimizer": AreaStyle(palette["optimizer"]),
    "again": AreaStyle(kernels["compute"], "...."),
    "uneven": AreaStyle("white", "\\\\\\\\", palette["stall"]),
    "beside": AreaStyle(palette["communication"], "...."),
    "launch": AreaStyle(kernels["launch"]),
    "memory": AreaStyle(kernels["memory"]),
    "kernels": AreaStyle(kernels["products"]),
    "products": AreaStyle(kernels["products"]),
    "masked": AreaStyle(kernels["products"], "...."),
}
"""Colour and hatch of each loss: those of a state have the state's in every picture."""


def waterfall(rows: Sequence[Waterfall], title: str | None = None, *, ax: Axes | None = None) -> Figure:
    """Shares of all GPUs' time, from peak down to the MFU.

    ``rows`` : of :func:`clustersim.explain.waterfall.waterfall`; the first is drawn.

    Raises :class:`ProgramError` where no FLOPs are known, as of a profiler's trace.
    """
    if not rows or rows[0].useful <= 0:
        raise ProgramError("nothing to draw: no FLOPs are known of this run, and so no MFU")
    row = rows[0]
    shares = {key: 100 * row.lost.get(key, 0.0) / row.step for key in WORDS}
    shares = {key: share for key, share in shares.items() if abs(share) >= LEAST}
    figure, axes = drawn_on(ax, 0.3 * (len(shares) + 2) + (1.15 if title else 0.8))
    _bar(axes, 0, 0.0, 100.0, AreaStyle("#E4E7EB"), "100 %")
    left = 100.0
    for y, (key, share) in enumerate(shares.items(), 1):
        low, high = sorted((left, left - share))
        took = f"{-share:+.1f} %  {format_time(abs(share) / 100 * row.step)}"
        _bar(axes, y, low, high, STYLE[key], took.replace("-", "\u2212"))
        axes.plot([left, left], [y - 0.6, y + 0.36], color=QUIET, linewidth=0.7)
        left -= share
    left = 100 * row.mfu
    last = len(shares) + 1
    axes.plot([left, left], [last - 0.6, last + 0.36], color=QUIET, linewidth=0.7)
    _bar(axes, last, 0.0, left, AreaStyle(kernels["compute"]), f"{left:.1f} %")
    _framed(axes, ["peak", *(WORDS[key] for key in shares), "MFU"], row.step)
    shares_text = ", ".join(f"{WORDS[key]} {-share:+.1f} %" for key, share in shares.items())
    caption = f"From peak to an MFU of {left:.1f} %, shares of all GPUs' time: {shares_text}."
    return titled(figure, title, caption, ax)


def _bar(axes: Axes, y: float, low: float, high: float, look: AreaStyle, label: str) -> None:
    """A bar, and its figure beside it, where there is room."""
    axes.barh(
        [y],
        [high - low],
        left=[low],
        height=0.72,
        color=look.face,
        hatch=look.hatch,
        edgecolor=look.edge,
        linewidth=0.0,
    )
    inside = high - low > 60
    room = 100 - (50 if is_narrow(axes.get_figure(root=True)) else 28)  # type: ignore[arg-type]
    to_the_right = high < room or 100 - high > low  # where neither side has room for all, the wider one
    x, side = (low + 1.0, "left") if inside else (high + 0.8, "left") if to_the_right else (low - 0.8, "right")
    dark = inside and look.face == kernels["compute"]
    axes.text(x, y, label, ha=side, va="center_baseline", fontsize=8.5, color="white" if dark else INK)


def _framed(axes: Axes, labels: list[str], step: float) -> None:
    plain_axes(axes)
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    scale, unit = time_unit(step)
    between = "\n" if is_narrow(axes.get_figure(root=True)) else " "  # type: ignore[arg-type]
    axes.set_xlabel(f"% of the time of all GPUs;{between}100 % are a step of {step * scale:,.4g} {unit}", fontsize=9)
