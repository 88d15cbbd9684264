"""A change played, and drawn beside what was there before."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from clustersim import scenario
from clustersim.app import plots
from clustersim.app.explore import fence
from clustersim.app.report.hover import gantt_pair, legend
from clustersim.app.report.pages import PageChart, both, rendered
from clustersim.core.errors import ClusterSimError
from clustersim.core.facts import RunFacts
from clustersim.core.figures import shown_in
from clustersim.core.saved_run import SavedRun
from clustersim.core.timeline import Timeline
from clustersim.core.units import format_change, format_time
from clustersim.explain.stalls import causes
from clustersim.explain.verdict import verdict
from clustersim.scenario import Scenario
from clustersim.scenario.result.trust import trust
from clustersim.scenario.run.head import head_lines
from clustersim.scenario.run.running import Prepared
from clustersim.studies.what_if.folded import folded as folded_step

MANY = 30_000
"""Ops of a Program from which on a split model's step is folded: played whole it takes more than a second or two."""
KEPT = 4
"""Runs that are kept, to be drawn again beside others."""


@dataclass(frozen=True)
class PlayRequest:
    """What to play, and what to set beside it: ``--set`` texts; ``before`` None for nothing."""

    now: tuple[str, ...] = ()
    before: tuple[str, ...] | None = None


@dataclass(frozen=True)
class PageReply:
    """A fragment of the page, or an ``error`` in one line and the ``field`` it is of; ``figures`` as of ``run --json``,
    those of :data:`clustersim.core.figures.FIGURES`."""

    html: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    error: str = ""
    field: str = ""


@dataclass(frozen=True, eq=False)
class ExploredRun:
    """One run; ``timeline`` None where only its step was asked for, by folding, of which ``note`` tells."""

    prepared: Prepared
    values: dict[str, Any]
    verdict: str
    notes: tuple[str, ...]
    timeline: Timeline | None = None
    note: str = ""


@dataclass(eq=False)
class RunPlayer:
    """Plays one scenario's changes; the last few runs are kept."""

    path: str
    opened: Scenario = field(init=False)
    kept: dict[tuple[str, ...], ExploredRun] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.opened = scenario.load(self.path)

    def __call__(self, ask: PlayRequest) -> PageReply:
        """What the browser is told. An error of the input is an answer."""
        try:
            now = self._played(ask.now)
            before = None if ask.before is None else self._played(ask.before)
            figures = {
                figure.key: float(now.values[figure.key])
                for figure in shown_in("run")
                if now.values.get(figure.key) is not None
            }
            return PageReply(_answer(now, before), figures)
        except ClusterSimError as error:
            return told(str(error))
        except MemoryError:
            return told("this needs more memory than there is; use fewer ranks or steps")

    def _played(self, changes: tuple[str, ...]) -> ExploredRun:
        run_found = self.kept.pop(changes, None) or _play(self.asked(changes))
        self.kept[changes] = run_found  # the last asked for is the last to go
        while len(self.kept) > KEPT:
            del self.kept[next(iter(self.kept))]
        return run_found

    def asked(self, changes: tuple[str, ...]) -> Scenario:
        """The scenario with these changes, inside the fence. Raises :class:`ClusterSimError`."""
        edited = scenario.load(self.path, scenario.parse_overrides(changes))
        fence.check(edited, self.opened)
        return edited


def told(text: str) -> PageReply:
    """An error as one line, and the field it is of."""
    match = re.search(r"\(at \$\.([\w.-]+)", text) or re.match(r"--set ([\w.-]+)", text)
    return PageReply(error=" ".join(text.split())[:1500], field=match.group(1) if match else "")


def _play(edited: Scenario) -> ExploredRun:
    prepared = edited.prepare()
    large = edited.file.parallel is not None and sum(len(role.ops) for role in prepared.program.roles) > MANY
    if large and not (prepared.cost.jitter or _asked_to_vary(prepared)):
        return _folded(prepared)
    if large and prepared.cost.jitter and not _asked_to_vary(prepared):
        quiet = _folded(edited.changed({"run.jitter": 0.0}).prepare())
        more = (
            f" Its ranks are played as if none was ever late; run.jitter = {prepared.cost.jitter:g} plays all of them."
        )
        return replace(quiet, note=quiet.note + more)
    result = prepared.run()
    values = result.to_dict()
    verdict_text = verdict(RunFacts.of(values), causes(result.timeline))
    note = "A large run whose ranks vary, so that all of it was played; without (run.jitter = 0) its step is folded."
    return ExploredRun(prepared, values, verdict_text, result.notes, result.timeline, note if large else "")


def _asked_to_vary(prepared: Prepared) -> bool:
    """Whether the file says that ranks differ; else it is their GPU's usual jitter."""
    file = prepared.scenario.file
    return bool(file.run.jitter or file.cluster.slow or file.run.variation or file.incident)


def _folded(prepared: Prepared) -> ExploredRun:
    folded = folded_step(prepared.scenario)
    mesh = prepared.mesh
    config = prepared.scenario.config
    step = folded.step_time_s
    samples = config.rank_samples * mesh.size("dp")
    fits = prepared.verdict
    values = {
        "step_time_s": step,
        "samples_per_s": samples / step,
        "peak_memory_bytes": prepared.memory.total,
        "memory": {"by": prepared.memory.at_peak(), "message": str(fits)},
        "fits": fits.ok,
    }
    summary_text = (
        f"{prepared.model.name} on {prepared.gpus:,} {prepared.device.name}: {format_time(step)} a step; {fits}"
    )
    exact = "to rounding" if folded.exact else "within some percent"
    note = (
        f"A large run: its step was folded, {folded.ranks[0]:,} of {folded.ranks[1]:,} ranks played, and is the whole "
        f"run's {exact}. `clustersim run` plays all of it, and has the other figures and pictures."
    )
    return ExploredRun(prepared, values, summary_text.rstrip(".") + ".", prepared.notes, None, note)


def _answer(now: ExploredRun, before: ExploredRun | None) -> str:
    """The fragment of the page: what is played now, its figures and pictures, beside what was played ``before``."""
    pair = {"before": before, "now": now} if before is not None else {"now": now}
    timelines = {name: explored.timeline for name, explored in pair.items() if explored.timeline is not None}
    rooms = {explored.prepared.device.memory_bytes for explored in pair.values()}
    memory = {name: explored.values["memory"]["by"] for name, explored in pair.items()}
    room = rooms.pop() if len(rooms) == 1 else None
    gantts = list(_gantts(timelines))
    return rendered(
        "explore_answer.html.j2",
        now=now,
        before=before,
        figures=list(_figures(now, before)),
        states=both(lambda: plots.breakdowns(timelines), "states") if timelines else [],
        falls=list(_falls(pair)),
        gantts=gantts,
        legend=legend([chart.svg for chart in gantts]),
        memory=both(lambda: plots.footprints(memory, room), "memory"),
        message="" if now.values["fits"] else now.values["memory"]["message"],
        ran=list(head_lines(now.prepared)),
        trust=str(trust(now.prepared)),
    )


def _figures(now: ExploredRun, before: ExploredRun | None) -> Iterator[tuple[str, str, str, str, str]]:
    """(figure, before, now, difference, "better" or "worse" or neither)."""
    samples = [explored.values["samples_per_s"] * explored.values["step_time_s"] for explored in (now, before or now)]
    equal_steps = bool(np.isclose(*samples))
    for figure in shown_in("run"):
        old = before.values.get(figure.key) if before else None
        new = now.values.get(figure.key)
        if new is None and old is None:
            continue
        texts = ["" if value is None else figure.text(value) for value in (old, new)]
        difference, sign = ("", 0) if old is None or new is None else _difference(figure.unit, old, new)
        better = figure.better if equal_steps or not figure.of_equal_steps else 0
        yield figure.label, texts[0], texts[1], difference, {1: "better", -1: "worse"}.get(sign * better, "")


def _difference(unit: str, old: float, new: float) -> tuple[str, int]:
    """In words, and whether it is more (1), less (-1) or too little to be either."""
    if unit == "percent":
        change = new - old
        text = f"{100 * (new - old):+.1f} points"
    elif not old:
        change = new
        text = "new" if new else "same"
    else:
        change = (new - old) / old
        text = "same" if new == old else format_change(change) if change < 10 else f"{new / old:,.3g} times"
    return text, int(np.sign(change)) if abs(change) >= 5e-4 else 0


def _falls(pair: dict[str, ExploredRun]) -> Iterator[PageChart]:
    """From peak to the MFU, of each whose FLOPs are known."""
    for name, explored in pair.items():
        if explored.timeline is not None and explored.values.get("mfu"):
            run = SavedRun(explored.timeline, facts=RunFacts.of(explored.values))
            draw = partial(plots.picture, "waterfall", run, plots.View(title=""))
            for svg in both(draw, f"falls-{name}"):
                yield PageChart(f"{name}: {explored.values['mfu']:.1%}", svg)


def _gantts(timelines: dict[str, Timeline]) -> Iterator[PageChart]:
    """The last step of each, from its own begin, on one scale."""
    steps = {name: plots.last_step(timeline) for name, timeline in timelines.items()}
    longest = max((end - begin for begin, end in steps.values()), default=0.0)
    for name, (begin, end) in steps.items():
        heading = f"{name}: {format_time(end - begin)}, the last step"
        label = f"Gantt chart, {heading}"
        yield PageChart(heading, gantt_pair(timelines[name], begin, begin + longest, label, origin=begin))
