"""The page of a plan: the answer, what is worth having and why, more GPUs, why not the others, every option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET

from clustersim.app import plots
from clustersim.app.plots.style import MARKERS
from clustersim.app.report.pages import (
    MOST_ROWS,
    Page,
    PageSection,
    PageTable,
    both,
    front_grid,
    kept,
    number,
    speed_and_cost,
)
from clustersim.studies.plan.rows import BEST_OF_PLACES, PlanAnswer, ReasonedRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plan_page(answer: PlanAnswer) -> Page:
    """The page of a plan's answer."""
    fates = ", ".join(f"{n:,} {label}" for label, n in answer.counts.items() if n)
    counted = f"{answer.combined:,} combinations, {sum(answer.counts.values()):,} options: {fates}."
    numbered = list(answer.numbered_others())
    tempting = numbered[: len(answer.tempting)]
    others = numbered[len(answer.tempting) :]
    sections = [
        _front(answer),
        _places(answer),
        _map(answer),
        _made(answer),
        *robust(answer),
        *failures(answer),
        _listed("tempting", "Better, if predictions hold", tempting, "Measure before taking one of these."),
        _scaling(answer),
        _listed("not", "Why not the others", others),
        PageSection("launch", "Launch it", items=_launch(answer)),
        PageSection("assumed", "Assumptions", items=[("", text) for text in answer.assumptions]),
        PageSection("all", "All options", [counted], grid=_plan_options(answer)),
    ]
    return Page(answer.title or "A plan", answer.verdict, kept(sections), _tiles(answer), answer.warnings)


def _front(answer: PlanAnswer) -> PageSection:
    more = {"MFU": ("mfu", ".1%"), "days": ("days", ",.1f"), "USD": ("usd", ",.0f")}
    front = front_grid(answer.front, "option", answer.unit, more)
    sentence = f"No option beats one of these in {answer.unit}/s, cost, GPUs and energy at once, errors counted."
    return PageSection(
        "front",
        "Worth having",
        [sentence] if front.rows else [],
        both(lambda: front_figure(answer), "front"),
        [(row.option, row.why) for row in answer.front],
        front,
        range(1, len(answer.front) + 1),
    )


def _launch(answer: PlanAnswer) -> list[tuple[str, str]]:
    """The command that writes the fastest option's launch files, and how another option is named."""
    if not answer.launch:
        return []
    return [
        ("", f"`{answer.launch}`"),
        ("", "Another option by its number, of this, run, explain or memory: `--option 2`"),
    ]


def _listed(id: str, heading: str, numbered: Sequence[tuple[int, ReasonedRow]], *words: str) -> PageSection:
    """Options beside the front and why they are there; what was run with the number that --option takes."""
    items = [(row.option, row.why) for _, row in numbered]
    return PageSection(id, heading, words, items=items, numbers=[place for place, _ in numbered])


def _map(answer: PlanAnswer) -> PageSection:
    """The step of each pair of degrees, where any was run."""
    sentence = (
        "The shortest step of each tensor- and pipeline-parallel degree on the fastest "
        "option's machine; that option is framed."
    )
    ran = any(degree.step_s for degree in answer.landscape)
    svgs = both(lambda: plots.degrees(answer.landscape), "degrees") if ran else []
    return PageSection("map", "Degrees", [sentence], svgs)


def _made(answer: PlanAnswer) -> PageSection:
    heads = [("option", False), ("at the least", False), ("GiB by stage", False)]
    rows = [
        [row.option, row.limited_by, ", ".join(f"{b / 2**30:.1f}" for b in row.stage_bytes)]
        for row in (*answer.front, *answer.tempting, *answer.alternatives)
        if row.stage_bytes
    ]
    sentence = (
        "The least a step can take, by what it waits for; what transfers beside it take longer comes on top. "
        "And what each stage holds."
    )
    return PageSection("made", "What a step takes at the least", [sentence], grid=PageTable(heads, rows))


def _places(answer: PlanAnswer) -> PageSection:
    """Every machine and size asked for, where the plan has several."""
    head = ["machine", "GPUs", "best option", f"{answer.unit}/s", "MFU", "days", "USD", "USD/GPU-h", "which is"]
    rows = []
    for place in answer.places if len(answer.places) > 1 else ():
        best = place.best
        name = best.option if best else ""
        values = (best.rate, best.mfu, best.days, best.usd) if best else (None,) * 4
        cells = [number(*pair) for pair in zip(values, (",.0f", ".1%", ",.1f", ",.0f"), strict=True)]
        price = number(place.usd_per_gpu_hour, ",.2f")
        rows.append([place.machine, f"{place.gpus:,}", name, *cells, price, place.why])
    sentences = [f"{BEST_OF_PLACES[0].upper()}{BEST_OF_PLACES[1:]}."] if rows else []
    columns = [(name, 0 < i < 8 and i != 2) for i, name in enumerate(head)]
    return PageSection("places", "Each machine and size", sentences, grid=PageTable(columns, rows))


def _tiles(answer: PlanAnswer) -> list[tuple[str, str]]:
    if not answer.front:
        return []
    best = answer.front[0]
    tiles = [
        (f"{answer.unit}/s", number(best.rate, ",.0f")),
        ("MFU", number(best.mfu, ".1%")),
        ("days", number(best.days, ",.1f")),
        ("USD", number(best.usd, ",.0f")),
        ("GPUs", number(best.gpus, ",.0f")),
    ]
    return [(name, value) for name, value in tiles if value]


def robust(answer: PlanAnswer) -> list[PageSection]:
    """Regrets of the fastest one's rivals where machines are not as predicted, of a robust search."""
    robust_choice = answer.robust
    if robust_choice is UNSET:
        return []
    head = [("option", False), (f"{answer.unit}/s", True), ("regret at worst", True), ("which is at", False)]
    rows = [
        [row.option, number(row.rate, ",.0f"), number(row.regret, ".1%") or "never ends", row.at]
        for row in robust_choice.rows
    ]
    best = frozenset(i for i, row in enumerate(robust_choice.rows) if row.robust)
    worth = [
        (f"Measure {measurement.name}", f"worth {measurement.worth:.1%} of the training: {measurement.command}")
        for measurement in robust_choice.measure
        if measurement.worth >= 0.0005
    ]
    return [PageSection("robust", "Robust", [robust_choice.verdict], [], worth, PageTable(head, rows, best))]


def failures(answer: PlanAnswer) -> list[PageSection]:
    """Days and cost of the front with its campaign, where the plan names one."""
    if answer.failures is UNSET:
        return []
    sentences = ["Whole trainings with the plan's [campaign], played many times: the middle one, and p5 to p95."]
    return [PageSection("failures", "With failures", [*sentences, *answer.failures], grid=_with_failures(answer))]


def _with_failures(answer: PlanAnswer) -> PageTable:
    """A row for each option of the front whose campaign was played."""
    head = ["option", "days of steps", "days, p50", "p5 to p95", "USD, p50", "USD, p5 to p95", "new steps", "in time"]
    rows = []
    for row in answer.front:
        outcome = row.campaign
        if outcome is UNSET or outcome.days is None:
            continue
        days = outcome.days
        usd = outcome.usd
        dates = f"{days.p5:,.1f} to {days.p95:,.1f}"
        costs = f"{usd.p5:,.0f} to {usd.p95:,.0f}" if usd else ""
        in_time = "" if outcome.in_time is None else f"{outcome.in_time:.0%}"
        rows.append(
            [
                row.option,
                f"{outcome.ideal_days:,.1f}",
                f"{days.p50:,.1f}",
                dates,
                f"{usd.p50:,.0f}" if usd else "",
                costs,
                f"{outcome.goodput:.1%}",
                in_time,
            ]
        )
    return PageTable([(name, i > 0) for i, name in enumerate(head)], rows)


def pictures(answer: PlanAnswer) -> dict[str, Figure]:
    """The front by its name, where anything was simulated."""
    figure = front_figure(answer)
    return {} if figure is None else {"front": figure}


def front_figure(answer: PlanAnswer) -> Figure | None:
    """Cost over speed of every option that was simulated; None where none was."""
    best, tempting = ({row.option for row in rows} for rows in (answer.front, answer.tempting))
    return speed_and_cost([row for row in answer.options if row.counts], best, tempting, answer.unit)


def _scaling(answer: PlanAnswer) -> PageSection:
    """Curves by strategy; of several machines by machine, for what one GPU does is not the same on all of them."""
    several = len({row.machine for row in answer.options}) > 1
    sentences = [f"The fastest option of each {'machine' if several else 'strategy'} on each number of GPUs."]
    roomy = any(row.counts and row.has_room for row in answer.options)
    if any(row.counts and not row.has_room for row in answer.options) and roomy:
        sentences.append("Of those with room in memory.")
    best: dict[tuple[str, int], float] = {}
    for row in answer.options:
        if row.counts and (row.has_room or not roomy):
            key = row.machine if several else row.family, row.gpus
            best[key] = max(best.get(key, 0.0), row.rate or 0.0)
    if len({gpus for _, gpus in best}) < 2:
        return PageSection("scaling", "More GPUs", sentences)
    names = sorted({name for name, _ in best}, key=lambda name: -max(v for k, v in best.items() if k[0] == name))
    curves = {
        name: (
            [gpus for series_name, gpus in best if series_name == name],
            [v for k, v in best.items() if k[0] == name],
        )
        for name in names[: len(MARKERS)]
    }
    svgs = both(lambda: plots.scaling(curves, unit=f"{answer.unit}/s", ideal=not several), "scaling")
    return PageSection("scaling", "More GPUs", sentences, svgs)


def _plan_options(answer: PlanAnswer) -> PageTable:
    rows = [
        [row.option, number(row.gpus, ",.0f"), number(row.rate, ",.0f"), row.state, row.reason]
        for row in answer.options[:MOST_ROWS]
    ]
    more = f" (the first {MOST_ROWS:,})" if len(answer.options) > MOST_ROWS else ""
    head = [("option", False), ("GPUs", True), (f"{answer.unit}/s", True), ("became", False), ("because", False)]
    best = {row.option for row in answer.front}
    numbers = frozenset(i for i, row in enumerate(rows) if row[0] in best)
    return PageTable(head, rows, numbers, f"All {len(answer.options):,} options and what became of them{more}")
