"""Step time over the degrees of tensor and pipeline parallelism: a landscape of how a model can be split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from clustersim.app.plots.drawing import Axes, Figure, drawn_on, is_narrow, plain_axes, titled
from clustersim.app.plots.style import INK, QUIET, load_map
from clustersim.core.errors import ClusterSimError
from clustersim.core.units import format_time

if TYPE_CHECKING:
    from clustersim.studies.plan.rows import Degrees


def degrees(cells: Sequence[Degrees], title: str | None = None, *, ax: Axes | None = None) -> Figure:
    """A heat map, a row for each pp and a column for each tp: dark is slow, "at least" where nothing was simulated.

    Raises :class:`ClusterSimError` where no cell has a time.
    """
    from matplotlib.patches import Rectangle

    timed = [cell.step_s for cell in cells if cell.step_s is not None]
    if not timed:
        raise ClusterSimError("nothing to draw: no degrees fit")
    tps, pps = (sorted({getattr(cell, name) for cell in cells}) for name in ("tp", "pp"))
    level = np.full((len(pps), len(tps)), np.nan)
    figure, axes = drawn_on(ax, 0.42 * len(pps) + 1.3)
    low = min(timed)
    high = max(timed)
    for cell in cells:
        y = pps.index(cell.pp)
        x = tps.index(cell.tp)
        if cell.step_s is None:
            axes.text(x, y, "does not fit", ha="center", va="center", fontsize=8.5, color=QUIET)
            continue
        level[y, x] = share = np.log(cell.step_s / low) / np.log(high / low) if high > low else 0.0
        least = "at least\n" if is_narrow(figure) else "at least "
        text = format_time(cell.step_s) if cell.sure else f"{least}{format_time(cell.step_s)}"
        colour = "white" if share > 0.6 else INK
        weight = "bold" if cell.best else "normal"
        axes.text(x, y, text, ha="center", va="center", fontsize=9, color=colour, weight=weight)
        if cell.best:
            axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, fill=False, edgecolor=INK, lw=2.0))
    axes.imshow(level, aspect="auto", cmap=load_map(), vmin=0.0, vmax=1.15, interpolation="nearest")
    plain_axes(axes)
    axes.set_xticks(range(len(tps)), [f"tp {n}" for n in tps], fontsize=9)
    axes.set_yticks(range(len(pps)), [f"pp {n}" for n in pps], fontsize=9)
    caption = "; ".join(
        f"tp {cell.tp} pp {cell.pp} {'' if cell.sure else 'at least '}{format_time(cell.step_s)}"
        for cell in sorted(cells, key=lambda degree: degree.step_s or np.inf)[:6]
        if cell.step_s is not None
    )
    return titled(figure, title, f"The shortest step of each tensor- and pipeline-parallel degree. {caption}.", ax)
