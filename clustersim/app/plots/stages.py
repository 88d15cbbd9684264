"""Pipeline stages side by side: where a step of each goes, and what each holds in memory over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from clustersim.app.plots.drawing import (
    Axes,
    Figure,
    drawn_on,
    is_narrow,
    legend_below,
    legend_of_all,
    new_figure,
    plain_axes,
    titled,
)
from clustersim.app.plots.pipeline import usual_step
from clustersim.app.plots.style import (
    FAINT,
    INK,
    NOT_RECORDED_AREA,
    QUIET,
    AreaStyle,
    byte_unit,
    dimensions,
    palette,
    part_styles,
    time_unit,
)
from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import ProgramError
from clustersim.core.facts import MemoryMoments
from clustersim.core.memory_parts import part_label
from clustersim.core.timeline import Timeline
from clustersim.core.units import format_bytes, format_time
from clustersim.explain import pipeline
from clustersim.explain.breakdown import NOT_RECORDED
from clustersim.explain.dimensions import DIMENSIONS
from clustersim.explain.where import BUBBLES, WORDS, StageSeconds

LEAST = 0.002
"""Share of the step below which a part is not drawn."""
MOST = 16
"""Stages that are drawn; of more, so many from first to last, and the fullest."""
NEAR = 0.4
"""A peak above this share of what the GPU has is drawn below that limit; a lower one would be squeezed by it."""
_GREYS = dict(zip(BUBBLES, ("#E3E6EA", "#D3D8DD", "#C1C8CF", "#9AA4AE", "#B0B8C0", "#EEF0F2", "#A6AEB7"), strict=True))
_HATCH = dict(zip(BUBBLES, ("", "\\\\\\", "....", "xxxx", "||||", "----", "++++"), strict=True))
"""A shade alone tells no part of a bubble from the next one: each has a hatch of its own but the first, which is plain.
"""


def stage_bars(rows: Sequence[StageSeconds], title: str | None = None, *, ax: Axes | None = None) -> Figure:
    """A step of each stage as a bar: compute, transfers and waits by dimension, the bubble by its parts.

    rows : of :func:`clustersim.explain.where.where`; the mean over all is drawn last.

    Raises :class:`ProgramError` without rows.
    """
    if not rows:
        raise ProgramError("nothing to draw: no stages")
    bars = [*rows[1:], rows[0]]
    scale, unit = time_unit(rows[0].step)
    figure, axes = drawn_on(ax, 0.34 * len(bars) + (1.55 if title else 1.25))
    y = np.arange(len(bars))[::-1]
    left = np.zeros(len(bars))
    for (key, name), look in _parts(bars):
        width = np.array([_seconds(row, key, name) for row in bars]) * scale
        labels = {"exposed": f"{name} transfer", "waiting": f"waiting, {name}", "bubble": f"bubble, {name}"}
        labels["unseen"] = NOT_RECORDED
        label = labels.get(key, key)
        axes.barh(
            y,
            width,
            left=left,
            height=0.74,
            label=label,
            color=look.face,
            ec=look.edge,
            lw=look.width,
            hatch=look.hatch or None,
        )
        shares = width / (scale * np.array([row.step for row in bars]))
        _write_shares(axes, y, left + width / 2, shares, boxed=key != "compute")
        left += width
    plain_axes(axes)
    axes.set_yticks(y, ["all" if row.stage < 0 else f"stage {row.stage}" for row in bars], fontsize=9)
    axes.set_xlim(0, rows[0].step * scale)
    axes.set_xlabel(f"time of a step [{unit}]", fontsize=9)
    legend_below(figure, ax, axes, ncols=6, handlelength=1.4, columnspacing=1.2)
    return titled(figure, title, _alt(bars), ax)


def _write_shares(axes: Axes, y: Ints, x: Floats, shares: Floats, *, boxed: bool) -> None:
    """Shares of a step, those that there is room for, in the middle of their parts of the bars."""
    box = {"fc": "white", "ec": "none", "pad": 0.8, "alpha": 0.85} if boxed else None
    for height, middle, share in zip(y, x, shares, strict=True):
        if share > 0.04:
            axes.text(
                middle,
                height,
                f"{share:.0%}",
                ha="center",
                va="center_baseline",
                fontsize=8,
                color=INK if boxed else "white",
                bbox=box,
            )


def bubble_style(part: str) -> AreaStyle:
    """How a part of a bubble looks, of :data:`~clustersim.explain.where.BUBBLES`."""
    return AreaStyle(_GREYS[part], _HATCH[part], width=0.4)


def _parts(rows: Sequence[StageSeconds]) -> list[tuple[tuple[str, str], AreaStyle]]:
    """What is worth drawing of any bar, in the order of the bar, and how it looks."""
    styled = [
        (("compute", ""), AreaStyle(palette["forward"], width=1.0)),
        *((("exposed", d), AreaStyle(dimensions[d], width=1.0)) for d in DIMENSIONS),
        *((("waiting", d), AreaStyle("white", "//////", dimensions[d])) for d in DIMENSIONS),
        *((("bubble", b), bubble_style(b)) for b in BUBBLES),
        (("other", ""), AreaStyle(palette["other"], width=1.0)),
        (("unseen", ""), NOT_RECORDED_AREA),
    ]
    return [(part, look) for part, look in styled if any(_seconds(r, *part) > LEAST * r.step for r in rows)]


def _seconds(row: StageSeconds, key: str, name: str) -> float:
    return float(getattr(row, key).get(name, 0.0) if name else getattr(row, key))


def _alt(rows: Sequence[StageSeconds]) -> str:
    captions = []
    for row in rows:
        parts = ", ".join(
            f"{name or WORDS[key]} {s / row.step:.1%}" for key, name, s in row.parts() if s > LEAST * row.step
        )
        captions.append(f"{'all' if row.stage < 0 else f'stage {row.stage}'}: {parts}")
    return f"Where a step of {format_time(rows[0].step)} goes at each stage. " + "; ".join(captions) + "."


# --- memory ---------------------------------------------------------------------------------------------------------


def stage_memory(
    courses: Sequence[MemoryMoments], timeline: Timeline, capacity: float | None = None, title: str | None = None
) -> Figure:
    """What a rank of each stage holds over the usual step, a row per stage, against what the GPU has.

    courses : per stage, with moments such as ``"F 3.0"`` (action, micro-batch, chunk). capacity : [bytes] of the GPU.

    Raises :class:`ProgramError` without stages.
    """
    if not courses:
        raise ProgramError("nothing to draw: no stage's memory is known")
    columns = [course.columns().items() for course in courses]
    parts_of = [{part_label(name): column for name, column in column if column.any()} for column in columns]
    totals = [np.sum(list(parts.values()), axis=0) for parts in parts_of]
    shown = _shown([float(total.max()) for total in totals])
    top = max(float(total.max()) for total in totals)
    limit = capacity if capacity and top > NEAR * capacity else None
    height = max(top, limit or 0.0)
    scale, _ = byte_unit(height)
    begin, end = usual_step(timeline)
    unit_of_time = time_unit(end - begin)
    styles = part_styles(dict.fromkeys(name for parts in parts_of for name in parts))
    figure = new_figure(0.52 * len(shown) + (1.3 if title else 1.0))
    rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, stage in zip(rows, shown, strict=True):
        moments = (_times(timeline, stage, courses[stage].moments, (begin, end)) - begin) * unit_of_time[0]
        _stacked(axes, moments, parts_of[stage], styles, scale)
        if limit:
            axes.axhline(limit / scale, color=palette["stall"], lw=1.2, ls=(0, (4, 2)))
        axes.set_ylim(0, 1.04 * height / scale)
        axes.set_ylabel(f"stage {stage}", rotation=0, ha="right", va="center", fontsize=9)
        axes.text(
            1.008,
            0.5,
            f"{format_bytes(float(totals[stage].max()))}",
            transform=axes.transAxes,
            fontsize=8.5,
            color=INK,
            va="center",
            weight="bold" if float(totals[stage].max()) == top else "normal",
        )
    rows[-1].set_xlim(0, (end - begin) * unit_of_time[0])
    room = f", of {format_bytes(capacity)} that a GPU has" if capacity else ""
    between = ";\n" if is_narrow(figure) else "; "
    rows[-1].set_xlabel(f"time of a step [{unit_of_time[1]}]{between}at the right each stage's peak{room}", fontsize=9)
    _legend(figure, list(rows), f"{format_bytes(limit)} of the GPU" if limit else "")
    peaks = ", ".join(f"stage {s} {format_bytes(float(total.max()))}" for s, total in enumerate(totals))
    return titled(figure, title, f"Memory of a GPU of each stage over a step; peaks: {peaks}.")


def _legend(figure: Figure, rows: Sequence[Axes], limit: str) -> None:
    """Of the marks of all rows once each, and of the line at ``limit``, where there is one."""
    entries = {label: handle for axes in rows for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    legend_of_all(figure, entries | ({limit: rows[0].lines[-1]} if limit else {}), 6)


def _shown(peaks: Sequence[float]) -> list[int]:
    if len(peaks) <= MOST:
        return list(range(len(peaks)))
    chosen = {round(i * (len(peaks) - 1) / (MOST - 2)) for i in range(MOST - 1)}
    return sorted(chosen | {int(np.argmax(peaks))})


def _times(timeline: Timeline, stage: int, moments: Sequence[str], window: tuple[float, float]) -> Floats:
    """(m + 1,) when each moment begins [s], and the end; moments whose action was not seen begin with the one after."""
    begin, end = window
    rank = int(pipeline.stages(timeline)[stage][0])
    done = [a for action in pipeline.actions(timeline, [rank]).values() for a in action]
    began = {f"{a.action} {a.microbatch}.{a.chunk}": a.start for a in done if begin <= a.start < end}
    last = max((a.end for a in done if a.end <= end), default=end)
    begins = [*(began.get(name, last if name == "optimizer" else np.nan) for name in moments), end]
    times = np.array(begins, dtype=np.float64)
    times[0] = begin
    for i in range(len(times) - 2, 0, -1):
        times[i] = times[i + 1] if np.isnan(times[i]) else min(times[i], times[i + 1])
    return times


def _stacked(
    axes: Axes, times: Floats, parts: Mapping[str, Floats], styles: Mapping[str, AreaStyle], scale: float
) -> None:
    below = np.zeros(len(times) - 1)
    for name, nbytes in parts.items():
        above = below + nbytes / scale
        low, high = (np.append(line, line[-1]) for line in (below, above))
        face = styles[name].face
        hatch = styles[name].hatch
        edge = "white" if hatch else "none"
        axes.fill_between(times, low, high, step="post", label=name, fc=face, hatch=hatch, lw=0.0, ec=edge)
        below = above
    plain_axes(axes)
    axes.spines["bottom"].set_color(FAINT)
    axes.set_yticks([])
    axes.tick_params(axis="x", labelcolor=QUIET)
