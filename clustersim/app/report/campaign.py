"""The page of a campaign: how long it takes, where the time goes, and what would change it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from clustersim.app.plots.campaign import goodput_over_gpus, ledger, loss_over_interval, month
from clustersim.app.report.pages import Page, PageSection, PageTable, each_twice, kept
from clustersim.core.errors import several
from clustersim.core.units import format_bytes, format_days, format_long
from clustersim.studies.campaign import GOODPUTS, CampaignAnswer, Job, Percentiles
from clustersim.studies.campaign.answer import CampaignCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ASSUMED = "assumed: "
"""Before the source of a figure that has none."""
NO_PRICE = "not known: no price of this GPU is shipped; give campaign.price.usd_per_gpu_hour"
"""What stands for the cost of a training on GPUs whose price nobody says."""
LABELS = {"job": "job", "inputs": "from [campaign]", "sources": "from", "assumed": "assumed"}
"""Of sections with items, before each of them in a terminal."""


def pictures(answer: CampaignAnswer) -> dict[str, Figure]:
    """Every picture of a campaign by its name; none of one that does not finish."""
    if not answer.finishes:
        return {}
    figures = {"month": month(answer.month), "ledger": ledger(answer.ledger)}
    if answer.interval:
        figures["interval"] = loss_over_interval(answer.interval, answer.plan.saves[0].interval)
    if answer.nodes:
        figures["nodes"] = goodput_over_gpus(answer.nodes, answer.gpus_per_node)
    return figures


def campaign_page(answer: CampaignAnswer) -> Page:
    """The page of a campaign, as of :func:`clustersim.studies.campaign.answer`."""
    return campaign_words(answer, each_twice(partial(pictures, answer)))


def campaign_words(answer: CampaignAnswer, drawings: Mapping[str, Sequence[Any]] = MappingProxyType({})) -> Page:
    """The same with these drawings alone: what a terminal shows has none, and draws none."""
    head = [("cause", False), ("takes", False), ("expected, without failures' own delay", True)]
    causes = [[cause.name, cause.scope, f"{cause.expected:,.1f}"] for cause in answer.plan.causes]
    sections = [
        PageSection(
            "ledger",
            "Where the time went",
            ["The parts add up to the elapsed time; means over replicas."],
            drawings.get("ledger", []),
            grid=_ledger(answer),
        ),
        PageSection("goodput", "Goodput", ["By each published definition, under its own name."], grid=_goodput(answer)),
        PageSection(
            "month",
            "A month",
            ["One replica, a line a day. Saves and evaluations are part of training."],
            drawings.get("month", []),
        ),
        PageSection("what-if", "What if", ["The same campaign with one thing changed."], grid=_what_if(answer)),
        PageSection("interval", "How often to save", [], drawings.get("interval", [])),
        PageSection("size", "How large the job may be", [_largest(answer)], drawings.get("nodes", [])),
        PageSection("causes", "What fails", [answer.plan.source], grid=PageTable(head, causes)),
        PageSection("job", "The job", items=_job(answer)),
        PageSection("inputs", "From the [campaign] table", items=_inputs(answer)),
        *_sources(answer),
    ]
    return Page(f"{answer.title}: the whole training", answer.verdict, kept(sections), figures(answer))


def figures(answer: CampaignAnswer) -> list[tuple[str, str]]:
    """(what, how much) of a campaign's main figures, as text."""
    if not answer.finishes:
        return []
    days = answer.days
    cost = answer.cost
    entries = [
        ("days", f"{days.p50:,.1f} ({days.p5:,.1f} to {days.p95:,.1f})"),
        ("without failures", f"{answer.plan.ideal_days:,.1f} days"),
        ("by closed form", "" if answer.plan.expected_days is None else f"{answer.plan.expected_days:,.1f} days"),
        ("failures", f"{answer.failures.p50:,.0f}"),
        ("effective training time", f"{answer.goodput['effective_training_time'].p50:.1%}"),
    ]
    if isinstance(answer.mfu, Percentiles):
        entries.append(("MFU over all of it", f"{answer.mfu.p50:.1%} (of a step: {answer.job.mfu:.1%})"))
    if isinstance(cost, CampaignCost) and cost.usd and cost.ideal_usd:
        more = cost.usd.p50 / cost.ideal_usd - 1
        entries.append(("cost", f"{_money(cost.usd.p50)} ({more:+.1%} for failures and spares)"))
    elif isinstance(cost, CampaignCost) and not cost.usd:
        entries.append(("cost", NO_PRICE))
    if isinstance(cost, CampaignCost):
        power = cost.usd_of_power
        entries.append(("energy", f"{cost.kwh.p50 / 1e3:,.0f} MWh" + (f", {_money(power.p50)}" if power else "")))
    return [(label, text) for label, text in entries if text]


def _money(usd: float) -> str:
    """As wide as a tile is: millions from ten on.

    >>> _money(320_144_155.0), _money(9_876_543.0)
    ('320.1 M USD', '9,876,543 USD')
    """
    return f"{usd / 1e6:,.1f} M USD" if usd >= 1e7 else f"{usd:,.0f} USD"


def _ledger(answer: CampaignAnswer) -> PageTable | None:
    if not answer.finishes:
        return None
    rows = [[part, format_days(part_of.days), f"{part_of.share:z.2%}"] for part, part_of in answer.ledger.items()]
    return PageTable([("part", False), ("time", True), ("share", True)], rows)


def _goodput(answer: CampaignAnswer) -> PageTable | None:
    if not answer.finishes:
        return None
    rows = [
        [name.replace("_", " "), *(f"{getattr(percentiles, key):.1%}" for key in ("p5", "p50", "p95")), GOODPUTS[name]]
        for name, percentiles in answer.goodput.items()
    ]
    head = [("definition", False), ("p5", True), ("p50", True), ("p95", True), ("what it is", False)]
    return PageTable(head, rows)


def _what_if(answer: CampaignAnswer) -> PageTable | None:
    questions = answer.what_if
    if not questions:
        return None
    now = questions[0]
    rows = []
    for question in questions:
        if question.days_p50 is None or question.days_p95 is None:
            rows.append([question.question, "does not finish", "", "", ""])
            continue
        change = question.days_p50 - (now.days_p50 or math.inf)
        rows.append(
            [
                question.question,
                f"{question.days_p50:,.1f}",
                f"{question.days_p95:,.1f}",
                f"{change:+.2f}",
                f"{question.effective_training_time:.1%}",
            ]
        )
    head = [("question", False), ("days p50", True), ("days p95", True), ("change", True), ("new steps", True)]
    return PageTable(head, rows, frozenset({0}))


def _largest(answer: CampaignAnswer) -> str:
    nodes = answer.largest_job
    if not answer.nodes:
        return ""
    if not isinstance(nodes, float):
        return "Within the sizes that were tried the effective training time does not fall below 90 %."
    return f"The effective training time falls below 90 % at about {nodes * answer.gpus_per_node:,.0f} GPUs."


def _job(answer: CampaignAnswer) -> list[tuple[str, str]]:
    job = answer.job
    plan = answer.plan
    return [
        ("size", f"{several(job.nodes, 'node')}, {several(job.gpus, 'GPU')}"),
        ("replicas", _copies(job.replicas, job.copies)),
        ("step", f"{job.step_s:.4g} s, simulated; {plan.steps:,.0f} of them"),
        *_varying(job),
        *((f"degraded: {name}", f"a step is {by:.3f} times as long") for name, by in job.slower.items()),
        ("checkpoint", format_bytes(plan.checkpoint_bytes)),
    ]


def _varying(job: Job) -> list[tuple[str, str]]:
    """What ``[run.variation]`` makes of steps."""
    if len(job.machines) < 2:
        return []
    middle, late = np.percentile(job.machines, [50, 95]).tolist()
    machines_text = (
        f"{middle - 1:+.1%} on the middle machine of {len(job.machines)}, {late - 1:+.1%} on the slowest twentieth"
    )
    entries = [("steps vary", f"{machines_text}; {job.step_cv:.2%} from step to step on one of them")]
    if job.swapped:
        gain = 1.0 - float(np.mean(job.swapped) / np.mean(job.machines))
        entries.append(
            ("slowest 0.5 % of hosts", f"with others in their place a step is {gain:.1%} shorter, on average")
        )
    return entries


def _copies(replicas: int, copies: int) -> str:
    """How many replicas a batch is shared by, and whether some can go on without a lost one."""
    if replicas == 1:
        return "one replica of the model: none can be dropped (no drop_replica)"
    replicas_text = f"{replicas:,} data-parallel replicas of the model"
    if copies == 1:
        return (
            f"{replicas_text}, one copy of the optimizer states sharded over them: none can be dropped (no "
            f"drop_replica)"
        )
    return f"{replicas_text}, {copies:,} whole copies of the optimizer states: drop_replica goes on without one of them"


def _inputs(answer: CampaignAnswer) -> list[tuple[str, str]]:
    plan = answer.plan
    entries = [
        ("failures", f"one every {format_long(plan.mtbf_s)}" if plan.mtbf_s else "none"),
        ("recovery", f"{format_long(plan.recovery_s)} on average, without waiting for nodes or lost work"),
    ]
    for save in plan.saves:
        intervals = (
            f"{format_long(getattr(save, key))} {meaning}"
            for key, meaning in (
                ("interval", "of work between two"),
                ("stall", "of stall"),
                ("write", "until it counts"),
                ("load", "to load"),
            )
        )
        entries.append((f"saves to {save.tier}", ", ".join(intervals)))
    return entries


def _sources(answer: CampaignAnswer) -> list[PageSection]:
    """Whose figures cost and energy rest on, and which of them nobody has published."""
    sources = answer.cost.sources if isinstance(answer.cost, CampaignCost) else {}
    entries = [(name.replace("_", " "), text.removeprefix(ASSUMED), text) for name, text in sources.items()]
    by_kind = {key: [(name, rest) for name, rest, text in entries if (rest != text) == key] for key in (False, True)}
    return [
        PageSection("sources", "Where figures are from", items=by_kind[False]),
        PageSection("assumed", "What was assumed", items=by_kind[True]),
    ]
