"""A run beside others with one thing changed, in sentences: what would make it shorter, by runs where those are short
and else by bounds; and what each change of its scenario did, or why it did nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from clustersim.core.errors import ClusterSimError
from clustersim.core.timeline import Timeline
from clustersim.core.tomls import plainly
from clustersim.core.units import format_time
from clustersim.explain.advice import BUT_RUNS_OUT, NO_ROOM
from clustersim.explain.breakdown import breakdown
from clustersim.explain.explain import Explanation
from clustersim.explain.knobs import FACTOR, WIDER
from clustersim.explain.pieces import PieceState, workers
from clustersim.explain.step_words import LossRemedy
from clustersim.explain.whatif import PER_SAMPLE
from clustersim.scenario import Scenario, load
from clustersim.scenario.run.running import Prepared, of_uneven_nodes
from clustersim.studies.what_if.rerun import rerun_saving, step_time, widened
from clustersim.studies.what_if.turned import ChoiceOutcome, short, turned

NOTHING = 5e-4
"""Of a run that was really made, what prints as 0.0 %."""
SMALL = 0.005
"""Bounds below this share of the step are called nothing."""
SAME = 1e-9
"""Step times this close, relatively, are the same."""
LAST = -1.0
"""Where what cannot be done stands among what savings are told of: behind them all."""
HIDDEN = 0.002
"""Below this share of the step, communication is hidden."""


@dataclass(frozen=True, eq=False)
class RerunAnswer:
    """``again`` : by knob, the share of a step that it saves when the scenario is really run again. ``choices`` of a
    split model made otherwise. ``bounds`` : a sentence on each knob that may matter, run again or not."""

    again: dict[str, float] = field(default_factory=dict)
    choices: list[ChoiceOutcome] = field(default_factory=list)
    bounds: list[str] = field(default_factory=list)

    @property
    def ran(self) -> list[str]:
        """What was really run, in sentences."""
        return self.text if self.again or self.choices else []

    @property
    def remedies(self) -> list[LossRemedy]:
        """Choices that fit in memory, by the loss that each is made against."""
        made = [row for row in self.choices if row.choice.mends and row.fits]
        return [LossRemedy(row.choice.mends, row.choice.what, row.saving) for row in made]

    @property
    def text(self) -> list[str]:
        """Everything in sentences."""
        return [*(choice.text for choice in self.choices), *self.bounds]


def otherwise(
    prepared: Prepared | None,
    timeline: Timeline,
    explanation: Explanation,
    *,
    asked: bool = False,
    doing: Callable[[str], None] = lambda text: None,
) -> RerunAnswer:
    """What each knob saves.

    prepared : what was run; None where it cannot be run again. asked : run again however long that takes, and every
        knob. doing : told what is being run.
    """
    again: dict[str, float] = {}
    choices: list[ChoiceOutcome] = []
    if prepared is not None and (asked or short(timeline)):
        again = _again(prepared, timeline, explanation, asked, doing)
        doing("running again with other choices")
        choices = turned(prepared, timeline)
    return RerunAnswer(again, choices, _bounds(explanation, again, prepared))


def _again(
    prepared: Prepared, timeline: Timeline, explanation: Explanation, rerun: bool, doing: Callable[[str], None]
) -> dict[str, float]:
    """Per knob that may matter, what it saves; of all when asked."""
    table = explanation.whatif
    saved = {}
    now = step_time(timeline)
    bounded = set(explanation.bounds)
    for knob, factor, text in zip(*(table[name].tolist() for name in ("knob", "factor", "text")), strict=True):
        if (text in bounded or rerun) and NO_ROOM not in text:
            doing(f"running again: {knob}")
            saving = rerun_saving(prepared, knob, factor, now)
            if saving is not None:
                saved[knob] = saving
    return saved


def _bounds(explanation: Explanation, again: dict[str, float], prepared: Prepared | None) -> list[str]:
    """What each knob saves, where it was run again, the most first, or would save at most; those that save nothing in
    one sentence, and at last what memory has no room for."""
    table = explanation.whatif
    row_of = {text: i for i, text in enumerate(table["text"].tolist())}
    bound_texts: list[tuple[float, str]] = []
    idle: dict[bool, list[str]] = {True: [], False: []}
    for text in explanation.bounds:
        if (
            again and NO_ROOM not in text and str(table["knob"][row_of[text]]) not in again
        ):  # a knob this scenario does not have
            continue
        knob = str(table["knob"][row_of[text]])
        most = float(table["saving"][row_of[text]])
        name = text.partition(" would save ")[0]
        saved = again.get(knob, most)
        if NO_ROOM in text:
            bound_texts.append((LAST, text))
            continue
        if abs(saved) < (NOTHING if knob in again else SMALL):
            idle[knob in again].append(name)
        else:
            told = _run_again(text, saved) if knob in again else text
            told += _rings_then(prepared, knob) if prepared is not None and saved < 0 else ""
            bound_texts.append((saved, told))
    lines = [text for _, text in sorted(bound_texts, key=lambda pair: -pair[0])]
    for rerun, names in idle.items():
        if names:
            lines.append(f"{', '.join(names)}: nothing{' (run again)' if rerun else ''}")
    return lines


def _rings_then(prepared: Prepared, knob: str) -> str:
    """Why wider links make a step longer, where nodes differ and NCCL's search of the wider machine finds other rings:
    one node's more at less speed, of which all take the speed. Empty where that is not the reason."""
    if knob not in WIDER:
        return ""
    machine = widened(prepared.topology, {knob: FACTOR})
    sentences = of_uneven_nodes(prepared.scenario, machine, prepared.mesh)
    changed = [text for text in sentences if text not in prepared.notes]
    return f": then {'; '.join(changed)}" if changed else ""


def _run_again(text: str, saved: float) -> str:
    """What a knob does, in place of what it could do at most.

    >>> _run_again("NIC bandwidth x2 would save at most 4.5% of the step", -0.012)
    'NIC bandwidth x2 costs 1.2% of the step (run again)'
    """
    knob = text.partition(" would save ")[0]
    per = "time per sample" if PER_SAMPLE in text else "step"
    of_memory = "".join(text.partition(BUT_RUNS_OUT)[1:])
    return f"{knob} {'saves' if saved > 0 else 'costs'} {abs(saved):.1%} of the {per} (run again){of_memory}"


def at_most(explanation: Explanation) -> list[str]:
    """What each knob would save of a step at most, in one sentence, beside what it saves where it was run again."""
    table = explanation.whatif
    row_of = {text: i for i, text in enumerate(table["text"].tolist())}
    most = sorted(
        ((float(table["saving"][row_of[text]]), text) for text in explanation.bounds), key=lambda row: -row[0]
    )
    named = [
        f"{text.partition(' would save ')[0]} {share:.1%}"
        for share, text in most
        if PER_SAMPLE not in text and NO_ROOM not in text
    ]
    return [f"would save at most: of the step {', '.join(named)}"] if named else []


HOW_LONG = frozenset({"run.steps"})
"""What says how much of a run is played, and nothing of it."""


def each_change(scenario: Scenario, timeline: Timeline) -> tuple[list[str], list[str]]:
    """A sentence for each change of a scenario, by a run without it: of those that matter, and of those without which
    the steps take just as long.

    A change that others need (``parallel.tp`` that ``parallel.sequence_parallel`` needs) is left out with them; how
    many steps are played is none.
    """
    now = breakdown(timeline)
    did: list[str] = []
    lines: list[str] = []
    took = now.step_time_s
    exposed = float(now.over(workers(timeline))[PieceState.EXPOSED])
    tried: set[frozenset[str]] = set()
    for key in scenario.changes:
        if key in HOW_LONG:
            continue
        gone, without_key, step = _without(scenario, key, took)
        if frozenset(gone) in tried:
            continue
        tried.add(frozenset(gone))
        names_text = " and ".join(f"{name}={plainly(scenario.changes[name])}" for name in gone)
        if without_key is None:
            lines.append(f"{names_text} cannot be left out: {step}")
        elif _says(without_key) == _says(scenario):
            lines.append(f"{names_text} changed nothing: it is what the scenario says anyway")
        elif isinstance(step, float) and abs(step - took) > SAME * took:
            change = f"{abs(1 - step / took):.1%} {'less' if step < took else 'more'}"
            did.append(f"without {names_text} a step takes {format_time(step)}, {change} (run again)")
        else:
            lines.append(f"{names_text} changed nothing: {_why(key, timeline, exposed)}")
    return did, lines


def _without(scenario: Scenario, key: str, took: float) -> tuple[list[str], Scenario | None, float | str]:
    """Changes left out so that one of them can be: the one alone, with one more, with those after it, all of them.

    Returns their keys, the scenario without them, and seconds of its step; or None and why it cannot be.
    """
    keys = list(scenario.changes)
    later = keys[keys.index(key) :]
    pairs = [[key, second] for second in keys if second != key]
    wrong: ClusterSimError | None = None
    for gone in ([key], *pairs, later, keys):
        left = {name: value for name, value in scenario.changes.items() if name not in gone}
        try:
            without = load(scenario.path, left)
            if _says(without) == _says(scenario):
                return gone, without, took
            return gone, without, float(breakdown(without.run().timeline).step_time_s)
        except ClusterSimError as error:
            wrong = wrong or error
    return [key], None, str(wrong)


def _says(scenario: Scenario) -> tuple[object, ...]:
    """Everything a run depends on, defaults filled in."""
    file = scenario.file
    happens = file.measured, file.incident, file.watchdog
    return file.cluster, file.model, file.run, file.parallel, file.strategy["kind"], scenario.config, happens


def _why(key: str, timeline: Timeline, exposed: float) -> str:
    talks = any(op.kind != "compute" for op in timeline.ops)
    about = key.split(".")[0]
    if about in {"cluster", "strategy"} and not talks:
        return "this run has no communication"
    if about in {"cluster", "strategy"} and exposed < HIDDEN:
        return f"communication is hidden behind compute ({exposed:.2%} of the step is exposed)"
    return "no step of this run depends on it"
