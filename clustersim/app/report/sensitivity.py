"""The page of a sensitivity study: what the step depends on, how slow the network may be, how it scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from clustersim.app import plots
from clustersim.app.report.pages import Page, PageSection, PageTable, drawn, kept
from clustersim.core.units import format_change, format_time
from clustersim.studies.sensitivity import ScalingPoint, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("strong", "weak")


def pictures(said: Study) -> dict[str, Figure]:
    """Every picture of a study by its name, of what it found."""
    made = {"tornado": plots.tornado(said.tornado, said.swing)} if said.tornado else {}
    made |= {"network": plots.network_speed(said.network)} if said.network else {}
    ran = any(not one.error for points in said.curves.values() for one in points)
    return made | ({"scaling": plots.efficiency_losses(said.curves)} if ran else {})


def sensitivity_page(said: Study) -> Page:
    """The page of a study, as of :func:`clustersim.studies.sensitivity.study`."""
    svgs = {name: drawn(figure, name) for name, figure in pictures(said).items()}
    figures = [("step time", format_time(said.step_s)), ("nodes", f"{said.nodes:,}")]
    sections = [
        PageSection(
            "tornado",
            "What the step depends on",
            [f"Each hardware number {said.swing:.0%} better and worse, the others as they are; each bar is a run."],
            svgs.get("tornado", []),
            [],
            _swings(said),
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
            [(kind, _stop(said, kind)) for kind in KINDS if "scaling" in svgs],
        ),
        *(PageSection(kind, f"{kind.capitalize()} scaling", grid=_points(said.curves[kind])) for kind in KINDS),
    ]
    return Page(f"What {said.title} depends on", said.verdict, kept(sections), figures)


def _swings(said: Study) -> PageTable:
    head = [("number", False), ("better", True), ("step time", True), ("worse", True), ("step time", True)]
    rows = [
        [
            one.knob,
            format_change(-one.gain),
            format_time(one.better_s),
            format_change(one.loss),
            format_time(one.worse_s),
        ]
        for one in said.tornado
    ]
    return PageTable(head, rows)


def _stop(said: Study, kind: str) -> str:
    stop = said.stops[kind]
    if stop is None:
        return f"every doubling tried buys at least {said.gain:.0%}"
    return f"doubling {stop[0]:,} nodes buys {stop[1]:.0%}, less than {said.gain:.0%}"


def _points(points: list[ScalingPoint]) -> PageTable:
    names = ("nodes", "GPUs", "batch", "micro-batch", "passes", "step time", "samples/s", "efficiency")
    rows = []
    for one in points:
        if one.error:
            rows.append([f"{one.nodes:,}", *[""] * 7, one.error])
            continue
        why = one.cause + ("" if one.fits else " (does not fit in memory)")
        counts = [f"{getattr(one, name):,}" for name in ("nodes", "gpus", "batch", "micro_batch", "passes")]
        figures = [format_time(one.step_s), f"{one.rate:,.1f}", f"{one.efficiency:.1%}"]
        rows.append([*counts, *figures, why.strip()])
    return PageTable([*((name, True) for name in names), ("mostly lost to", False)], rows)


TABLES: dict[str, Callable[[Study], PageTable]] = {
    "each number {swing:.0%} better and worse": _swings,
    "strong scaling": lambda said: _points(said.strong),
    "weak scaling": lambda said: _points(said.weak),
}
"""Tables for a terminal, by their titles."""
