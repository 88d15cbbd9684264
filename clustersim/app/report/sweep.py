"""The page of a sweep: the answer, case by case, curves, speed and cost, every row."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from clustersim.app import plots
from clustersim.app.report.pages import (
    MOST_ROWS,
    Page,
    PageSection,
    PageTable,
    both,
    front_grid,
    kept,
    speed_and_cost,
)
from clustersim.core.errors import ClusterSimError
from clustersim.core.figures import FIGURES, shown_in
from clustersim.studies import sweep as sweeps
from clustersim.studies.plan.of_sweep import Decision, answer
from clustersim.studies.plan.swept import SweptRows, load, worded


def sweep_page(folder: Path) -> Page:
    """The page of the sweep in a folder. Raises :class:`ClusterSimError` where there is none."""
    swept = load(folder)
    decision = answer(swept)
    figures = [
        ("scenarios", f"{len(swept.rate) + swept.failed:,}"),
        ("with a result", f"{len(swept.rate):,}"),
        _fastest(swept),
    ]
    front = f"Of {len(decision.front):,} scenarios that fit, those that no other beats in speed, cost and GPUs at once."
    grid = front_grid([row for row in decision.front if row.best], "scenario", swept.unit)
    sections = [
        PageSection("cases", "Case by case", _cases_words(swept), [], [], _cases(decision)),
        PageSection("curves", "Curves", [], _curves(folder)),
        PageSection("front", "Speed and cost", [front], _sweep_front(decision, swept.unit), [], grid),
        PageSection("assumed", "Assumptions", [], [], [("", text) for text in decision.assumptions]),
        PageSection("all", "All scenarios", grid=_all_rows(folder)),
    ]
    return Page(swept.title, decision.verdict, kept(sections), figures, decision.warnings)


def _fastest(swept: SweptRows) -> tuple[str, str]:
    """The figure of the fastest scenario that fits; where none does, of the fastest as it was timed."""
    rates = swept.rate[swept.fits] if swept.fits.any() else swept.rate
    name = "fastest" if swept.fits.all() else "fastest that fits" if swept.fits.any() else "fastest, none fits"
    return name, f"{rates.max():,.0f} {swept.unit}/s"


def _cases_words(swept: SweptRows) -> list[str]:
    question = swept.question
    if question is None or question.value is None:
        return [f"In each case the fastest choice of {swept.axis}, that fits, and the others' throughput against it."]
    against = worded(str(swept.axis), question.against)
    return [f"Throughput with each {swept.axis}, against {against}; + is faster."]


def _cases(decision: Decision) -> PageTable | None:
    if not decision.cases:
        return None
    numeric = [not any(row[i].strip("0123456789.,%+-") for row in decision.cases) for i in range(len(decision.head))]
    return PageTable(list(zip(decision.head, numeric, strict=True)), decision.cases)


def _curves(folder: Path) -> list[Any]:
    about = sweeps.about(folder)
    try:
        return both(partial(plots.sweep_curves, sweeps.read(folder), about.axes), "curves")
    except ClusterSimError:  # too many curves to tell apart
        return []


def _sweep_front(decision: Decision, unit: str) -> list[Any]:
    if len({row.rate for row in decision.front}) < 2:
        return []
    best = {row.option for row in decision.front if row.best}
    return both(lambda: speed_and_cost(decision.front, best, (), unit), "front")


SHARES = {
    f"share_{f.key.removesuffix('_s')}": f.column for f in FIGURES if f.key in {"exposed_communication_s", "idle_s"}
}
LINKS = {"busiest_link": "busiest link", "busiest_link_utilisation": "its use"}
"""Columns of a sweep's table that are no figure of a run, and their heads."""


def _heads() -> dict[str, str]:
    """Columns of a sweep's table that the page has, and their heads; the CSV has all."""
    rates = {figure.key: figure.column for figure in shown_in("rows")}
    last = {key: rates.pop(key) for key in ("bytes_sent_per_gpu", "peak_memory_bytes")}
    return {"gpus": "GPUs", **rates, **SHARES, **last, **LINKS, "error": "error"}


def _all_rows(folder: Path) -> PageTable:
    table = sweeps.read(folder)
    axes = sweeps.about(folder).axes
    heads = _heads()
    figures = {figure.key: figure for figure in shown_in("rows") if figure.unit != "number"}

    def text(name: str, value: Any) -> str:
        """A cell: the value with its figure's unit; nothing for NaN."""
        if isinstance(value, float) and np.isnan(value):
            return ""
        if name in figures:
            return figures[name].text(float(value))
        if name.startswith("share_") or name == "busiest_link_utilisation":
            return f"{value:.1%}"
        return f"{value:,.6g}" if isinstance(value, int | float) else str(value)

    names = [*axes, *(name for name in heads if name not in axes and _worth_a_column(table[name]))]
    rows = [[text(name, table[name][i].item()) for name in names] for i in range(min(MOST_ROWS, len(table["key"])))]
    head = [(heads.get(name, name.replace("_", " ")), table[name].dtype.kind != "U") for name in names]
    more = f" (the first {MOST_ROWS:,})" if len(table["key"]) > MOST_ROWS else ""
    return PageTable(head, rows, folded=f"All {len(table['key']):,} rows{more}; table.csv has every column")


def _worth_a_column(column: Any) -> bool:
    return bool((column != "").any() if column.dtype.kind == "U" else (column == column).any())
