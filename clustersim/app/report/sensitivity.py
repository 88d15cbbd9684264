"""The page of a sensitivity study: what the step depends on, how slow the network may be, how it scales."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from clustersim.app import plots
from clustersim.app.report.pages import Page, PageSection, PageTable, each_twice, kept
from clustersim.core.errors import several
from clustersim.core.units import format_change, format_time
from clustersim.studies.sensitivity import ScalingPoint, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("strong", "weak")


def pictures(study: Study) -> dict[str, Figure]:
    """Every picture of a study by its name, of what it found."""
    figures = {"tornado": plots.tornado(study.tornado, study.swing)} if study.tornado else {}
    figures |= {"network": plots.network_speed(study.network)} if study.network else {}
    ran = any(not point.error for points in study.curves.values() for point in points)
    return figures | ({"scaling": plots.efficiency_losses(study.curves)} if ran else {})


def sensitivity_page(study: Study) -> Page:
    """The page of a study, as of :func:`clustersim.studies.sensitivity.study`."""
    svgs = each_twice(partial(pictures, study))
    figures = [("step time", format_time(study.step_s)), ("nodes", f"{study.nodes:,}")]
    sections = [
        PageSection(
            "tornado",
            "What the step depends on",
            [f"Each hardware number {study.swing:.0%} better and worse, the others as they are; each bar is a run."],
            svgs.get("tornado", []),
            [],
            _swings(study),
        ),
        PageSection(
            "network",
            "How slow the network may be",
            ["NICs and switches made slower and faster together."],
            svgs.get("network", []),
        ),
        PageSection(
            "scaling",
            "More machines",
            [
                "Strong: the batch of a step stays. Weak: each GPU's stays. Efficiency is throughput per GPU against "
                "that of the fewest nodes."
            ],
            svgs.get("scaling", []),
            [(kind, _stop(study, kind)) for kind in KINDS if "scaling" in svgs],
        ),
        *(PageSection(kind, f"{kind.capitalize()} scaling", grid=_points(study.curves[kind])) for kind in KINDS),
    ]
    return Page(f"What {study.title} depends on", study.verdict, kept(sections), figures)


def _swings(study: Study) -> PageTable:
    head = [("number", False), ("better", True), ("step time", True), ("worse", True), ("step time", True)]
    rows = [
        [
            swing.knob,
            format_change(-swing.gain),
            format_time(swing.better_s),
            format_change(swing.loss),
            format_time(swing.worse_s),
        ]
        for swing in study.tornado
    ]
    return PageTable(head, rows)


def _stop(study: Study, kind: str) -> str:
    stop = study.stops[kind]
    if stop is None:
        return f"every doubling tried buys at least {study.gain:.0%}"
    return f"doubling {several(stop[0], 'node')} buys {stop[1]:.0%}, less than {study.gain:.0%}"


def _points(points: list[ScalingPoint]) -> PageTable:
    names = ("nodes", "GPUs", "batch", "micro-batch", "passes", "step time", "samples/s", "efficiency")
    rows = []
    for point in points:
        if point.error:
            rows.append([f"{point.nodes:,}", *[""] * 7, point.error])
            continue
        why = point.cause + ("" if point.fits else " (does not fit in memory)")
        counts = [f"{getattr(point, name):,}" for name in ("nodes", "gpus", "batch", "micro_batch", "passes")]
        figures = [format_time(point.step_s), f"{point.rate:,.1f}", f"{point.efficiency:.1%}"]
        rows.append([*counts, *figures, why.strip()])
    return PageTable([*((name, True) for name in names), ("mostly lost to", False)], rows)


TABLES: dict[str, Callable[[Study], PageTable]] = {
    "each number {swing:.0%} better and worse": _swings,
    "strong scaling": lambda study: _points(study.strong),
    "weak scaling": lambda study: _points(study.weak),
}
"""Tables for a terminal, by their titles."""
