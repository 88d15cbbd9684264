"""The page of a plan: the answer, what is worth having and why, more GPUs, why not the others, every option."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from clustersim.app import plots
from clustersim.app.plots.style import MARKERS
from clustersim.app.report.pages import (
    MOST_ROWS,
    Page,
    PageSection,
    PageTable,
    drawn,
    front_grid,
    kept,
    number,
    speed_and_cost,
)
from clustersim.studies.plan.rows import PlanAnswer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plan_page(said: PlanAnswer) -> Page:
    """The page of a plan's answer."""
    unit = said.unit
    more = {"MFU": ("mfu", ".1%"), "days": ("days", ",.1f"), "USD": ("usd", ",.0f")}
    front = front_grid(said.front, "option", unit, more)
    heads = [("option", False), ("made of", False), ("GiB by stage", False)]
    made = [
        [row.option, row.limited_by, ", ".join(f"{b / 2**30:.1f}" for b in row.stage_bytes)]
        for row in (*said.front, *said.tempting, *said.alternatives)
        if row.stage_bytes
    ]
    degrees = drawn(plots.degrees(said.landscape), "degrees") if any(one.step_s for one in said.landscape) else []
    fates = ", ".join(f"{n:,} {words}" for words, n in said.counts.items() if n)
    counted = f"{said.combined:,} combinations, {sum(said.counts.values()):,} options: {fates}."
    sections = [
        PageSection(
            "front",
            "Worth having",
            [f"No option beats one of these in {unit}/s, cost, GPUs and energy at once, errors counted."]
            if front.rows
            else [],
            drawn(front_figure(said), "front"),
            [(row.option, row.why) for row in said.front],
            front,
        ),
        _places(said),
        PageSection(
            "map",
            "Degrees",
            [
                "The shortest step of each tensor- and pipeline-parallel degree on the fastest "
                "option's machine; that option is framed."
            ],
            degrees,
        ),
        PageSection(
            "made",
            "What a step is made of",
            ["The least a step can take, by what it waits for, and what each stage holds."],
            grid=PageTable(heads, made),
        ),
        *robust(said),
        *failures(said),
        PageSection(
            "tempting",
            "Better, if predictions hold",
            ["Measure before taking one of these."],
            [],
            [(row.option, row.why) for row in said.tempting],
        ),
        _scaling(said),
        PageSection("not", "Why not the others", [], [], [(row.option, row.why) for row in said.alternatives]),
        PageSection("launch", "Launch it", [], [], [("", said.launch)] if said.launch else []),
        PageSection("assumed", "Assumptions", [], [], [("", text) for text in said.assumptions]),
        PageSection("all", "All options", [counted], grid=_plan_options(said)),
    ]
    return Page(said.title or "A plan", said.verdict, kept(sections), _tiles(said), said.warnings)


def _places(said: PlanAnswer) -> PageSection:
    """Every machine and size asked for, where the plan has several."""
    head = ["machine", "GPUs", "best option", f"{said.unit}/s", "MFU", "days", "USD", "USD/GPU-h", "which is"]
    rows = []
    for place in said.places if len(said.places) > 1 else ():
        best = place.best
        name = best.option if best else ""
        values = (best.rate, best.mfu, best.days, best.usd) if best else (None,) * 4
        cells = [number(*pair) for pair in zip(values, (",.0f", ".1%", ",.1f", ",.0f"), strict=True)]
        price = number(place.usd_per_gpu_hour, ",.2f")
        rows.append([place.machine, f"{place.gpus:,}", name, *cells, price, place.why])
    words = ["The best option of each machine and size that was asked for."] if rows else []
    columns = [(name, 0 < i < 8 and i != 2) for i, name in enumerate(head)]
    return PageSection("places", "Each machine and size", words, grid=PageTable(columns, rows))


def _tiles(said: PlanAnswer) -> list[tuple[str, str]]:
    if not said.front:
        return []
    best = said.front[0]
    tiles = [
        (f"{said.unit}/s", number(best.rate, ",.0f")),
        ("MFU", number(best.mfu, ".1%")),
        ("days", number(best.days, ",.1f")),
        ("USD", number(best.usd, ",.0f")),
        ("GPUs", number(best.gpus, ",.0f")),
    ]
    return [(name, value) for name, value in tiles if value]


def robust(said: PlanAnswer) -> list[PageSection]:
    """Regrets of the fastest one's rivals where machines are not as predicted, of a robust search."""
    found = said.robust
    if found is UNSET:
        return []
    head = [("option", False), (f"{said.unit}/s", True), ("regret at worst", True), ("which is at", False)]
    rows = [
        [row.option, number(row.rate, ",.0f"), number(row.regret, ".1%") or "never ends", row.at] for row in found.rows
    ]
    best = frozenset(i for i, row in enumerate(found.rows) if row.robust)
    worth = [
        (f"Measure {one.name}", f"worth {one.worth:.1%} of the training: {one.command}")
        for one in found.measure
        if one.worth >= 0.0005
    ]
    return [PageSection("robust", "Robust", [found.verdict], [], worth, PageTable(head, rows, best))]


def failures(said: PlanAnswer) -> list[PageSection]:
    """Days and cost of the front with its campaign, where the plan names one."""
    if said.failures is UNSET:
        return []
    words = ["Whole trainings with the plan's [campaign], played many times: the middle one, and p5 to p95."]
    return [PageSection("failures", "With failures", [*words, *said.failures], grid=_with_failures(said))]


def _with_failures(said: PlanAnswer) -> PageTable:
    """A row for each option of the front whose campaign was played."""
    head = ["option", "days of steps", "days, p50", "p5 to p95", "USD, p50", "USD, p5 to p95", "new steps", "in time"]
    rows = []
    for row in said.front:
        one = row.campaign
        if one is UNSET or one.days is None:
            continue
        days = one.days
        usd = one.usd
        dates = f"{days.p5:,.1f} to {days.p95:,.1f}"
        costs = f"{usd.p5:,.0f} to {usd.p95:,.0f}" if usd else ""
        in_time = "" if one.in_time is None else f"{one.in_time:.0%}"
        rows.append(
            [
                row.option,
                f"{one.ideal_days:,.1f}",
                f"{days.p50:,.1f}",
                dates,
                f"{usd.p50:,.0f}" if usd else "",
                costs,
                f"{one.goodput:.1%}",
                in_time,
            ]
        )
    return PageTable([(name, i > 0) for i, name in enumerate(head)], rows)


def pictures(said: PlanAnswer) -> dict[str, Figure]:
    """The front by its name, where anything was simulated."""
    figure = front_figure(said)
    return {} if figure is None else {"front": figure}


def front_figure(said: PlanAnswer) -> Figure | None:
    """Cost over speed of every option that was simulated; None where none was."""
    best, tempting = ({row.option for row in rows} for rows in (said.front, said.tempting))
    return speed_and_cost([row for row in said.options if row.counts], best, tempting, said.unit)


def _scaling(said: PlanAnswer) -> PageSection:
    """Curves by strategy; of several machines by machine, for what one GPU does is not the same on all of them."""
    several = len({row.machine for row in said.options}) > 1
    words = [f"The fastest option of each {'machine' if several else 'strategy'} on each number of GPUs."]
    best: dict[tuple[str, int], float] = {}
    for row in said.options:
        if row.counts:
            key = row.machine if several else row.family, row.gpus
            best[key] = max(best.get(key, 0.0), row.rate or 0.0)
    if len({gpus for _, gpus in best}) < 2:
        return PageSection("scaling", "More GPUs", words)
    names = sorted({name for name, _ in best}, key=lambda name: -max(v for k, v in best.items() if k[0] == name))
    curves = {
        name: ([gpus for other, gpus in best if other == name], [v for k, v in best.items() if k[0] == name])
        for name in names[: len(MARKERS)]
    }
    figure = plots.scaling(curves, unit=f"{said.unit}/s", ideal=not several)
    return PageSection("scaling", "More GPUs", words, drawn(figure, "scaling"))


def _plan_options(said: PlanAnswer) -> PageTable:
    rows = [
        [row.option, number(row.gpus, ",.0f"), number(row.rate, ",.0f"), row.state, row.reason]
        for row in said.options[:MOST_ROWS]
    ]
    more = f" (the first {MOST_ROWS:,})" if len(said.options) > MOST_ROWS else ""
    head = [("option", False), ("GPUs", True), (f"{said.unit}/s", True), ("became", False), ("because", False)]
    best = {row.option for row in said.front}
    numbers = frozenset(i for i, row in enumerate(rows) if row[0] in best)
    return PageTable(head, rows, numbers, f"All {len(said.options):,} options and what became of them{more}")
