"""How busy each link was, moment by moment."""

from __future__ import annotations

import numpy as np

from clustersim.app.plots.drawing import Axes, Figure, colour_bar, drawn_on, is_narrow, plain_axes, titled
from clustersim.app.plots.style import load_map, time_unit
from clustersim.core.arrays import Floats
from clustersim.core.errors import ProgramError
from clustersim.core.timeline import LinkUse
from clustersim.explain.hotspots import parts

MAX_LINKS = 24
BINS = 360


def link_heat(
    use: LinkUse,
    window: tuple[float, float] | None = None,
    title: str | None = None,
    n_links: int = MAX_LINKS,
    *,
    ax: Axes | None = None,
) -> Figure:
    """Utilisation of the busiest links over time, dark where they run at their line rate: a row per link, or for all
    links that carried the same at the same times.

    Parameters
    ----------
    window : (begin, end) [s]; None is until the last byte. n_links : how many rows, the busiest.
    ax : drawn on instead of a new figure; the scale of colours stands beside it.

    Raises :class:`ProgramError` where nothing was sent.
    """
    begin, end = window or (0.0, float(use.segment_end.max(initial=0.0)))
    alike = _busiest(use, n_links) if len(use.segment_start) and end > begin else {}
    links = list(alike)
    if not links:
        raise ProgramError("nothing to draw: no link carried anything")
    links.sort(key=lambda i: -float(use.link_bandwidth[i]))
    level = np.array([binned(*use.series(i), begin, end) / use.link_bandwidth[i] for i in links])
    figure, axes = drawn_on(ax, 0.21 * len(links) + (1.65 if title else 1.35))
    slim = ax is None and is_narrow(figure)  # names of two lines, and the scale below, leave the times their room
    if slim:
        figure.set_figheight(0.34 * len(links) + (1.95 if title else 1.65))
    scale, unit = time_unit(end - begin)
    image = axes.imshow(
        level,
        aspect="auto",
        cmap=load_map(),
        vmin=0.0,
        vmax=1.0,
        interpolation="nearest",
        extent=(begin * scale, end * scale, len(links) - 0.5, -0.5),
    )
    for row in range(1, len(links)):
        axes.axhline(row - 0.5, color="white", lw=1.6)
    plain_axes(axes)
    names = [use.link_names[i] for i in links]
    labels = [
        name + (f"  (and {alike[i] - 1:,} alike)" if alike[i] > 1 else "") for name, i in zip(names, links, strict=True)
    ]
    if slim:
        labels = [label.replace(" -> ", " ->\n", 1) for label in labels]
    axes.set_yticks(range(len(links)), labels, fontsize=8)
    axes.set_xlabel(f"time [{unit}]", fontsize=9)
    placing = {"location": "bottom" if slim else "right", "fraction": 0.025, "aspect": 30, "pad": 0.01}
    colour_bar(figure, axes, image, "share of the line rate", 8, **placing)
    peak = level.max(axis=1)
    mean = level.mean(axis=1)
    caption = "; ".join(
        f"{n} {m:.0%} on average, {p:.0%} at most" for n, m, p in zip(names[:5], mean, peak, strict=False)
    )
    return titled(figure, title, f"Utilisation of {sum(alike.values()):,} links over time. {caption}.", ax)


def _busiest(use: LinkUse, n: int) -> dict[int, int]:
    """The links nearest to saturation, first of those with the same history, and how many have it."""
    carried = use.bytes_per_link()
    part_of = parts(use).of
    _, first, counts = np.unique(
        np.stack([part_of.astype(np.float64), use.link_bandwidth]), axis=1, return_index=True, return_counts=True
    )
    share = carried[first] / use.link_bandwidth[first]
    order = np.lexsort((first, -share))[:n]
    return {int(first[k]): int(counts[k]) for k in order.tolist() if carried[first[k]] > 0}


def binned(times: Floats, rates: Floats, begin: float, end: float, bins: int = BINS) -> Floats:
    """(bins,) mean rate of a piecewise-constant series in equal parts of [begin, end]; 0 outside of it."""
    if not len(rates):
        return np.zeros(bins)
    edges = np.linspace(begin, end, bins + 1)
    moved = np.concatenate([[0.0], np.cumsum(rates * np.diff(times))])
    moved_at = np.interp(edges, times, moved)
    mean: Floats = np.diff(moved_at) / ((end - begin) / bins)
    return mean
