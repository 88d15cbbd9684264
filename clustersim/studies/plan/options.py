"""An option of a plan and what became of it, and all of them together."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from clustersim.core.economics import GpuRates, RunningCosts
from clustersim.core.memory_states import UNLIKELY
from clustersim.core.topology import Topology
from clustersim.studies.plan.candidates import PlanCandidate
from clustersim.studies.plan.limits import Bound
from clustersim.studies.plan.pareto import front
from clustersim.studies.plan.untried import offloads
from clustersim.studies.sweep.row import SweepFigures


class PlanOption(msgspec.Struct, frozen=True):
    """A candidate and what became of it.

    Parameters
    ----------
    candidate : it. state : ``"simulated"``, or why not: ``"memory"``, ``"limits"``, ``"bound"``, ``"error"``; of a
        split model also ``"rough"``, simulated roughly folded alone, and ``"left"``, beyond the plan's simulations.
    reason : in words, for those that were not simulated or break a limit. result : the row's, where it was simulated.
    rate : tokens/s of the whole machine (samples/s where the model has no tokens). costs : see
        :func:`clustersim.core.economics.costs`. objectives : as predicted, smaller is better: speed, cost (infinite
        where no price is known), GPUs, energy.
    days, usd : to train on the plan's tokens, None without them.
    on_front : no other option beats it in everything, each taken at the worse end of its error; room in memory is one
        of the things.
    tempting : not on the front, but no other option would beat it in everything if predictions held.
    bound : what it can at best be, None where that was not looked at. by : whose name ``reason`` ends with: a number.
    kind : which published steps it is like (:func:`clustersim.scenario.result.trust.step_kind`). error : relative, half
        of those lay within; more on a GPU of a generation on which none ran, or of which figures are assumed.
    needs : of one that does not fit, the memory of a GPU that it needs [bytes].
    """

    candidate: PlanCandidate
    state: str = ""
    reason: str = ""
    result: SweepFigures | None = None
    rate: float = 0.0
    costs: RunningCosts | None = None
    objectives: tuple[float, ...] = ()
    days: float | None = None
    usd: float | None = None
    on_front: bool = False
    tempting: bool = False
    bound: Bound | None = None
    by: int | None = None
    kind: str = ""
    error: float = 0.0
    needs: float = 0.0

    @property
    def priced(self) -> bool:
        """Whether its machine has a price."""
        return math.isfinite(self.objectives[1])

    @property
    def step_s(self) -> float:
        """Of one that was simulated [s], not a number for another."""
        return math.nan if self.result is None else self.result.step_time_s

    @property
    def robust(self) -> tuple[float, ...]:
        """Its objectives at the worse end of its error."""
        return at_worst(self.objectives, self.error)

    @property
    def runs_out(self) -> float:
        """How likely it takes more memory than there is, of GPU or host; 0 for what was not run whole or folded."""
        return 0.0 if self.result is None else self.result.runs_out

    @property
    def gpu_runs_out(self) -> float:
        """How likely it takes more memory than a GPU has; 0 for what was not run whole or folded."""
        return 0.0 if self.result is None else self.result.gpu_runs_out

    @property
    def has_room(self) -> bool:
        """Whether it is unlikely to run out of memory."""
        return self.runs_out < UNLIKELY

    @property
    def counts(self) -> bool:
        """Whether it was simulated and keeps every limit."""
        return self.state == "simulated" and not self.reason


@dataclass(frozen=True)
class ScaledRuns:
    """First runs of some options on a machine whose rates are multiplied by ``factors``: ``seconds`` of a step by
    number."""

    factors: Mapping[str, float]
    seconds: Mapping[int, float]


def dtype_of(option: PlanOption, dtype: str) -> str:
    """In what an option's products are; ``dtype`` : of one that says none."""
    return str(option.candidate.form.recipe.get("dtype") or dtype)


@dataclass(frozen=True)
class SearchResult:
    """All options in order of their numbers, and what is assumed of each machine. ``combined`` : combinations of
    machines and knobs, possible or not. ``turned`` : of a robust search,
    :func:`clustersim.studies.plan.robust.at_corners`. ``topologies``, ``gpus`` : by a machine's label and nodes.
    ``untried`` : usual alternatives that are not among them, in words. ``flops`` : of a sample, forward and backward.
    ``dtype`` : of options whose recipe says none."""

    options: tuple[PlanOption, ...]
    rates: tuple[GpuRates, ...]
    tokens: bool
    combined: int = 0
    turned: tuple[ScaledRuns, ...] = ()
    topologies: Mapping[tuple[str, int], Topology] = field(default_factory=dict)
    gpus: Mapping[tuple[str, int], int] = field(default_factory=dict)
    untried: tuple[str, ...] = ()
    flops: float = 0.0
    dtype: str = "fp32"

    @property
    def of_what(self) -> str:
        """Says "tried" where usual alternatives were not: the best in speed is the fastest of what was; else empty."""
        return "tried" if self.untried else ""

    @property
    def fastest(self) -> str:
        """What the best in speed may be called: the fastest only where the usual alternatives were tried."""
        return f"the fastest of what was {self.of_what}" if self.of_what else "the fastest"

    @cached_property
    def split(self) -> bool:
        """Whether any option splits the model."""
        return any(option.candidate.form.split for option in self.options)

    @cached_property
    def offloads(self) -> bool:
        """Whether any option keeps something on the host."""
        return any(offloads(option.candidate.form.strategy) for option in self.options)

    @cached_property
    def common(self) -> frozenset[str]:
        """Knobs that all options worth having share, in words: what is told once.

        A knob without which two options would be called alike is told each time: chunks of a stage are no knob of one
        that has a single chunk.
        """
        knob_sets = [set(option.candidate.knobs) for option in self.front]
        shared = sorted(set.intersection(*knob_sets)) if knob_sets else []
        told_once = frozenset[str]()
        for knob in shared:
            if self._stay_apart(told_once | {knob}):
                told_once |= {knob}
        return told_once

    def _stay_apart(self, left_out: frozenset[str]) -> bool:
        """Whether options that differ in knobs still do without those that are ``left_out``."""
        knobs_of: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}
        for option in self.options:
            knobs = option.candidate.knobs
            rest = tuple(knob for knob in knobs if knob not in left_out)
            if knobs_of.setdefault((option.candidate.form.family, rest), knobs) != knobs:
                return False
        return True

    def title(self, option: PlanOption) -> str:
        """An option in words, without what is common."""
        return title(option.candidate, self.common)

    def reason(self, option: PlanOption) -> str:
        """Why it was not simulated or breaks a limit, in words."""
        return option.reason if option.by is None else f"{option.reason} {self.title(self.options[option.by])}"

    @cached_property
    def front(self) -> list[PlanOption]:
        """Options worth having, those with room in memory first, of them the fastest."""
        worth = (option for option in self.options if option.on_front)
        return sorted(worth, key=lambda option: (not option.has_room, option.robust))

    def judged(self) -> SearchResult:
        """The same with the front marked, and what is tempting."""
        counted = [option for option in self.options if option.counts]
        tight = [float(not option.has_room) for option in counted]
        robust = [(*option.robust, more) for option, more in zip(counted, tight, strict=True)]
        predicted = [(*option.objectives, more) for option, more in zip(counted, tight, strict=True)]
        best = {counted[i].candidate.number for i in front(robust)}
        tempting = {counted[i].candidate.number for i in front(predicted)} - best
        marked = list(self.options)
        for number in {*best, *tempting}:
            marks = {"on_front": number in best, "tempting": number in tempting}
            marked[number] = msgspec.structs.replace(marked[number], **marks)
        return replace(self, options=tuple(marked))

    @cached_property
    def tempting(self) -> list[PlanOption]:
        """Options that would be worth having if their predictions held, fastest first."""
        return sorted((option for option in self.options if option.tempting), key=lambda option: option.objectives)


def at_worst(objectives: Sequence[float], error: float) -> tuple[float, ...]:
    """Objectives where a step takes ``1 + error`` times as long.

    >>> at_worst((-125.0, 1.0, 8.0, 2.0), 0.25)
    (-100.0, 1.25, 8.0, 2.5)
    """
    rate, cost, gpus, energy = objectives
    return rate / (1 + error), cost * (1 + error), gpus, energy * (1 + error)


def title(candidate: PlanCandidate, common: Collection[str] = ()) -> str:
    """A candidate in words, without knobs that are ``common``."""
    return f"{candidate.nodes} x {candidate.machine.label}: {candidate.label(common)}"


def rule(options: Iterable[PlanOption]) -> dict[tuple[str, int], PlanOption]:
    """By machine and nodes what the simple rule takes, "TP 8, then PP until it fits": no other dimension, no
    interleaving, and the first that fits."""
    simplest: dict[tuple[str, int], PlanOption] = {}
    for option in options:
        candidate = option.candidate
        degrees = candidate.form.degrees
        key = (candidate.machine.label, candidate.nodes)
        plain = candidate.form.parallel.get("vpp", 1) == 1 and degrees["cp"] == degrees["ep"] == 1
        if option.bound is None or degrees["tp"] != 8 or not plain:
            continue
        if key not in simplest or _simple(option) < _simple(simplest[key]):
            simplest[key] = option
    return simplest


def _simple(option: PlanOption) -> tuple[int, int, int]:
    candidate = option.candidate
    return candidate.form.degrees["pp"], candidate.played[0], candidate.number
