"""The one sentence a reader in a hurry takes away: what a run came to, and what it loses most by."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from clustersim.core.facts import RunFacts
from clustersim.core.figures import rate_text
from clustersim.core.memory_states import UNLIKELY, running_out
from clustersim.core.timeline import Timeline
from clustersim.core.units import format_bytes, format_time
from clustersim.explain.advice import room_words
from clustersim.explain.breakdown import breakdown
from clustersim.explain.cause_kinds import CauseKind, WeighedKind, cause_kinds, subjects, weighed
from clustersim.explain.cause_table import headline
from clustersim.explain.knobs import FACTOR, KNOB_NAMED, WIDER
from clustersim.explain.metrics import has_steps, step_word
from clustersim.explain.pieces import KERNELS, workers
from clustersim.explain.stalls import Causes
from clustersim.explain.step_words import LossRemedy, StepLoss, losses
from clustersim.explain.whatif import link_kinds_of

DOING = {
    "compute-bound": "compute-bound kernels",
    "memory-bound": "memory-bound kernels",
    "launch-bound": "launching kernels",
    "recomputation": "repeated forwards",
    "optimizer": "the optimizer",
}
"""What most of a step goes to in which GPUs seldom wait."""
SMALL = 0.03
"""A run whose costliest cause costs less than this share of the step seldom waits."""
LARGE = 0.25
"""Of a run that seldom waits, what takes more than this share of the step is named beside what takes most."""
MUCH = 0.5
"""A remedy that gives back less than this part of what its kind of causes costs is told to."""
NOTHING_TRIED: Mapping[str, float] = MappingProxyType({})
"""Savings of a run in which no knob was turned."""
BESIDE_LOSSES = frozenset({"slow rank", "uneven experts", "calls", "host", "host copies", "idle device", "launch"})
"""Causes that no :func:`clustersim.explain.step_words.losses` tells: a slow rank is in many of its losses at once, and
what the host takes is neither bubble, transfer nor waiting."""


def verdict(
    facts: RunFacts,
    causes: Causes,
    savings: Mapping[str, float] = NOTHING_TRIED,
    remedies: Sequence[LossRemedy] = (),
    ran: Collection[str] = (),
) -> str:
    """What the run came to, and what it loses most by, in one sentence.

    savings : by knob, the share of a step that turning it by :data:`clustersim.explain.knobs.FACTOR` saves, where
        that is known; elsewhere it is bounded for the costliest kinds of causes.
    remedies : what was tried against the losses of a split model.
    ran : knobs whose savings are of a run of their own; others' are bounds.
    """
    causes = replace(causes, room=room_words(facts))
    step_losses = losses(causes.timeline, causes.where) if causes.where else []
    step = (causes.cut.end - causes.cut.begin) / causes.steps
    whole = not has_steps(causes.timeline)
    tried = [*remedies, *_of_knobs(causes.timeline, step_losses, savings, ran)]
    return f"{came_to(facts, step, whole=whole)}; {_lost(causes, step_losses, savings, tried)}."


def came_to(facts: RunFacts, step: float, *, whole: bool = False) -> str:
    """What the run came to; ``step`` [s], or the ``whole`` window of a trace without steps."""
    lacking = [(facts.missing_bytes, "a GPU"), (facts.memory.host.missing_bytes, "a node's host")]
    more = " and ".join(f"{format_bytes(nbytes)} more memory than {who} has" for nbytes, who in lacking if nbytes)
    lacks = f"does not fit, it needs {more}; if it fitted, " if more else ""
    text = f"{facts.what}: {lacks}" if facts.what else lacks
    text += f"{format_time(step)} from first span to last" if whole else f"{format_time(step)} {_whose_step(facts)}"
    text += f", {rate_text(facts.samples_per_s)} samples per second" if facts.samples_per_s else ""
    text += f" at {facts.mfu:.1%} of peak" if facts.mfu else ""
    if more:
        return text
    memories = [(facts.memory.runs_out, "memory"), (facts.memory.host.runs_out, "the host's memory")]
    doubts = [f"{which} lasts ({running_out(share)})" for share, which in memories if share >= UNLIKELY]
    return f"{text}, if {' and '.join(doubts)}" if doubts else text


def _whose_step(facts: RunFacts) -> str:
    """Whose step a step's time is: where workers have paces of their own, what all take for a step's samples."""
    if facts.slowest_step_s is None:
        return "a step"
    return f"a step of workers at paces of their own, {format_time(facts.slowest_step_s)} of the slowest"


def _lost(
    causes: Causes, step_losses: Sequence[StepLoss], savings: Mapping[str, float], tried: Sequence[LossRemedy]
) -> str:
    kinds = cause_kinds(causes)
    period = step_word(causes.timeline)
    if step_losses:
        beside = next((kind for kind in kinds if kind.first.cause in BESIDE_LOSSES), None)
        if beside is not None and beside.share > max(SMALL, step_losses[0].share):
            return f"{beside.share:.1%} of the {period} is lost{_parts(causes, beside)} because {_why(causes, beside)}"
        if step_losses[0].share >= SMALL:
            return _of_losses(weighed_losses(step_losses, tried), period)
    if not kinds:
        who = "ranks" if causes.on_cpu else "GPUs"
        return f"{who} compute all the time, and {_mostly(causes)}"
    if kinds[0].share < SMALL:
        why = _why(causes, kinds[0])
        return f"{_mostly(causes)}, and the largest wait is small, {kinds[0].share:.1%}: {why}"
    best, *others = weighed(causes, kinds, savings)
    parts = _parts(causes, best.kind)
    text = f"{best.kind.share:.1%} of the {period} is lost{parts} because {_why(causes, best.kind)}{_though(best)}"
    passed = next((row for row in others if row.kind.share > best.kind.share), None)
    return text if passed is None else f"{text}; {_passed(causes, passed)}"


@dataclass(frozen=True)
class WeighedLoss:
    """A loss of a split model's step, and the best that was tried against it; None where nothing was."""

    loss: StepLoss
    remedy: LossRemedy | None

    @property
    def share(self) -> float:
        """What can be had back of it: of what nothing was tried against, all."""
        return self.loss.share if self.remedy is None else min(self.loss.share, self.remedy.most)


NETWORK = (*WIDER, "latency")
"""Knobs of what carries transfers."""


def _of_knobs(
    timeline: Timeline, step_losses: Sequence[StepLoss], savings: Mapping[str, float], ran: Collection[str]
) -> list[LossRemedy]:
    """What knobs of the network save, against each loss that is a transfer which nothing hides."""
    exposed = [loss.key for loss in step_losses if loss.key.startswith("exposed ")]
    kinds = link_kinds_of(timeline)
    return [
        LossRemedy(key, KNOB_NAMED[knob].words(FACTOR, kinds), savings[knob], 1 - 1 / FACTOR, bounded=knob not in ran)
        for key in exposed
        for knob in NETWORK
        if knob in savings
    ]


def weighed_losses(step_losses: Sequence[StepLoss], remedies: Sequence[LossRemedy]) -> list[WeighedLoss]:
    """Losses that had to be weighed to say which can be had back most of: that one first, then those that cost more
    and can be had back less. ``step_losses`` : the largest first."""
    tried: list[WeighedLoss] = []
    for loss in step_losses:
        if loss.share < SMALL or (tried and max(row.share for row in tried) >= loss.share):
            break
        against = [remedy for remedy in remedies if remedy.key == loss.key]
        tried.append(WeighedLoss(loss, max(against, key=lambda remedy: remedy.most, default=None)))
    best = max(tried, key=lambda row: row.share)
    return [best, *(row for row in tried if row is not best)]


def _of_losses(weighed_rows: Sequence[WeighedLoss], period: str) -> str:
    """What a split model loses most by that can be had back, what would do so, and what costs more but cannot."""
    best, *others = weighed_rows
    text = f"{best.loss.share:.1%} of the {period} is lost because {best.loss.why}"
    if best.remedy is not None:
        saved = f"{max(0.0, best.remedy.saving):.1%} of the time per sample"
        little = best.share < MUCH * best.loss.share
        text += f", though {best.remedy.what} would save no more than {saved}" if little else ""
        most = "at most " if best.remedy.bounded else ""
        text += "" if little else f"; {best.remedy.what} would save {most}{saved}"
    passed = next((row for row in others if row.loss.share > best.loss.share), None)
    if passed is None or passed.remedy is None:
        return text
    saved = f"{max(0.0, passed.remedy.saving):.1%} of the time per sample"
    why = f"{passed.loss.share:.1%} is lost because {passed.loss.why}"
    return f"{text}; {why}, but {passed.remedy.what} would save no more than {saved}"


def _why(causes: Causes, kind: CauseKind) -> str:
    """Why a kind's share of the step is lost, after "because"."""
    return headline(causes, kind.first.cause, subjects(causes, kind), several=len(kind.charges) > 1)


LAUNCHING = {"calls": "calling layers", "launch": "launching kernels", "idle device": "nothing queued"}
"""What a kind of the host's causes is made of, in words."""


def _parts(causes: Causes, kind: CauseKind) -> str:
    """What each of the host's causes takes of a kind's share, where they are several: tables have each by itself."""
    shares: dict[str, float] = {}
    for charge in kind.charges:
        shares[charge.cause] = shares.get(charge.cause, 0.0) + causes.share(charge)
    parts = [f"{LAUNCHING[cause]} {share:.1%}" for cause, share in shares.items() if cause in LAUNCHING]
    return f" ({', '.join(parts)})" if len(parts) > 1 else ""


def _though(best: WeighedKind) -> str:
    """That even its remedy gives little of it back; empty where it gives much, or none is known."""
    if best.saves is None or best.share >= MUCH * best.kind.share:
        return ""
    return f", though {best.kind.remedy} would save no more than {max(0.0, best.saves):.1%}"


def _passed(causes: Causes, row: WeighedKind) -> str:
    """What costs more than the kind that is named, and why that is not named first."""
    saves = max(0.0, row.saves or 0.0)
    return (
        f"{row.kind.share:.1%} is lost because {_why(causes, row.kind)}, but {row.kind.remedy} would save "
        f"no more than {saves:.1%}"
    )


def _mostly(causes: Causes) -> str:
    """What most of the step goes to, and what else much of it does, where GPUs seldom wait: far from the peak they may
    be even so."""
    table = breakdown(causes.timeline, causes.cut)
    mean = table.over(workers(causes.timeline))
    longest, *others = sorted(range(len(KERNELS)), key=lambda state: -mean[state])
    text = f"{mean[longest]:.1%} of the {step_word(causes.timeline)} goes to {DOING[KERNELS[longest]]}"
    named = [f" and {mean[state]:.1%} to {DOING[KERNELS[state]]}" for state in others if mean[state] > LARGE]
    return text + "".join(named)
