"""A whole training: a month of one replica day by day, where the time went, and curves over interval and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from clustersim.app.plots.drawing import Axes, Figure, drawn_on, legend_below, plain_axes, titled
from clustersim.app.plots.lines import Axis, lines
from clustersim.app.plots.style import INK, QUIET, palette
from clustersim.core.errors import ProgramError
from clustersim.core.units import DAY, HOUR, format_days

if TYPE_CHECKING:
    from clustersim.studies.campaign.answer import LedgerPart
    from clustersim.studies.campaign.whatif import KnobPoint

COLOURS = {
    "training": palette["forward"],
    "productive": palette["forward"],
    "step variation": palette["gradient"],
    "checkpoint stalls": palette["input"],
    "evaluation": palette["other"],
    "maintenance": INK,
    "detection": palette["stall"],
    "waiting for nodes": "#8C510A",
    "restart": palette["communication"],
    "loading": palette["optimizer"],
    "lost work": palette["backward"],
}
"""Of the parts of a ledger; training is productive as long as it is kept."""
SEEN = 0.002
"""Share of a bar from which a part is seen, and has its colour in the legend."""

LAW = "closed form (Daly), planned stops and waits left out"


def month(spans: Sequence[tuple[float, float, str]], title: str | None = None, *, ax: Axes | None = None) -> Figure:
    """What one replica of a campaign did, a line a day, so that minutes can be seen.

    spans : (begin [s], end [s], state), in order; saves and evaluations are part of ``training``.

    Raises :class:`ProgramError` for no spans.
    """
    if not spans:
        raise ProgramError("nothing to draw: the campaign did nothing")
    days = int(np.ceil(spans[-1][1] / DAY - 1e-9))
    figure, axes = drawn_on(ax, 1.4 + 0.16 * days)
    used = []
    for state, colour in COLOURS.items():
        pieces = [piece for begin, end, state_of in spans if state_of == state for piece in _by_day(begin, end)]
        for day in sorted({day for day, _, _ in pieces}):
            boxes = [(begin, length) for row, begin, length in pieces if row == day]
            axes.broken_barh(boxes, (day - 0.4, 0.8), color=colour, lw=0, antialiased=False)
        used += [state] if pieces else []
    plain_axes(axes, ("bottom",))
    axes.set_xlim(0, 24)
    axes.set_xticks(range(0, 25, 3))
    axes.set_xlabel("hour of the day", fontsize=9)
    axes.set_ylim(days - 0.4, -0.6)
    axes.set_yticks(range(0, days, 5), [f"day {day + 1}" for day in range(0, days, 5)])
    _legend(figure, ax, axes, {state: COLOURS[state] for state in used})
    total = sum(end - begin for begin, end, _ in spans)
    shares = {state: sum(e - b for b, e, state_of in spans if state_of == state) / total for state in used}
    caption = ", ".join(f"{state} {share:.1%}" for state, share in shares.items())
    return titled(figure, title, f"{days} days of one replica, a line a day: {caption}.", ax)


def _by_day(begin: float, end: float) -> list[tuple[int, float, float]]:
    """(day, hour, hours) of a span, cut at midnight."""
    pieces = []
    while begin < end:
        day = int(begin // DAY)
        stop = min(end, (day + 1) * DAY)
        pieces.append((day, (begin - day * DAY) / HOUR, (stop - begin) / HOUR))
        begin = stop
    return pieces


def ledger(parts: Mapping[str, LedgerPart], title: str | None = None, *, ax: Axes | None = None) -> Figure:
    """Elapsed time as one bar, and below it what is no new step, drawn larger."""
    figure, axes = drawn_on(ax, 2.5)
    rest = {name: part for name, part in parts.items() if name != "productive"}
    total, rest_total = (sum(part.days for part in some_parts.values()) for some_parts in (parts, rest))
    _bar(axes, 1.0, parts, total)
    if rest_total > 0:
        _bar(axes, 0.0, rest, rest_total)
    plain_axes(axes, ())
    axes.set_xticks([])
    axes.set_xlim(0, 1)
    axes.set_yticks([1.0, 0.0], [f"all {format_days(total)}", f"the other {format_days(rest_total)}"], fontsize=10)
    least = {name: SEEN * (rest_total if name in rest else total) for name in parts}  # of the bar where it is larger
    named = {
        f"{name} {format_days(part.days)}": COLOURS[name] for name, part in parts.items() if part.days > least[name]
    }
    _legend(figure, ax, axes, named)
    caption = ", ".join(f"{name} {format_days(part.days)}" for name, part in parts.items())
    return titled(figure, title, f"Where {format_days(total)} went: {caption}.", ax)


def _bar(axes: Axes, y: float, parts: Mapping[str, LedgerPart], total: float) -> None:
    left = 0.0
    for name, part in parts.items():
        share = part.days / total
        axes.barh(y, share, left=left, height=0.62, color=COLOURS[name], lw=0)
        if share > 0.055:
            dark = name in {"productive", "maintenance", "detection", "waiting for nodes", "lost work"}
            axes.annotate(
                f"{share:.0%}",
                (left + share / 2, y),
                ha="center",
                va="center",
                fontsize=9,
                color="white" if dark else INK,
            )
        left += share


def _legend(figure: Figure, ax: Axes | None, axes: Axes, colours: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    legend_below(figure, ax, axes, handles, ncols=min(5, len(handles)), fontsize=9, labelcolor=INK)


def loss_over_interval(
    points: Sequence[KnobPoint], now: float, title: str | None = None, *, ax: Axes | None = None
) -> Figure:
    """Share of time that is no new step, over the time between saves: simulated, and by the closed form.

    points : over [s]. now : the campaign's own interval [s].
    """
    x = np.array([point.x for point in points]) / 60.0
    lost = {
        key: 100.0 * (1.0 - np.array([getattr(point, key) for point in points])) for key in ("simulated", "closed_form")
    }
    figure = lines(
        {"simulated": (x, lost["simulated"])},
        laws={LAW: (x, lost["closed_form"])},
        x=Axis("work between saves [min]", log=True),
        y="time lost [%]",
        title=title,
        ax=ax,
    )
    axes = ax or figure.axes[0]
    axes.axvline(now / 60.0, color=QUIET, lw=1.0, ls=(0, (2, 2)), zorder=1)
    axes.annotate(
        f"this campaign: {now / 60:,.3g} min",
        (now / 60.0, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        fontsize=9,
        color=QUIET,
        va="top",
    )
    return figure


def goodput_over_gpus(
    points: Sequence[KnobPoint], gpus_per_node: float, title: str | None = None, *, ax: Axes | None = None
) -> Figure:
    """Effective training time of the middle run over the GPUs of the job, and by the closed form.

    points : over nodes.
    """
    x = np.array([point.x for point in points]) * gpus_per_node
    share = {key: 100.0 * np.array([getattr(point, key) for point in points]) for key in ("simulated", "closed_form")}
    figure = lines(
        {"simulated": (x, share["simulated"])},
        laws={LAW: (x, share["closed_form"]), "90 %": (x[[0, -1]], np.array([90.0, 90.0]))},
        x=Axis("GPUs", log=True),
        y="effective training time [%]",
        title=title,
        ax=ax,
    )
    axes = ax or figure.axes[0]
    axes.set_xticks(x, [f"{value:,.0f}" for value in x])
    axes.set_ylim(0.0, 104.0)
    return figure
