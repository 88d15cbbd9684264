"""The search: bounds prune, simulation decides.

Every candidate is looked at by its memory, which is exact, and by bounds on its step. An option whose *bounds* are
already beaten in everything by a simulated one cannot be on the front, so it need not be simulated: the front is the
one an exhaustive search finds. Candidates are simulated in rounds of a fixed size, the most promising first, so that
what is pruned does not depend on how many processes there are.

An option with a split model is first run roughly folded (:mod:`clustersim.scenario.folded`), which is within
:data:`ROUGH` of the whole run; what is beaten by more than that is not run whole. Of a space of more than
:data:`~clustersim.planner.spec.EXACT` options only so many are run as the plan says, and of each machine and number of
nodes the :data:`FINALISTS` best ones whole; what the others could have given by their bounds is told.

What is worth having is decided with the errors of predictions: every option is as good as it is at the worse end of
what half of published steps lay within. One that would be worth having if its prediction held is *tempting*.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustersim import scenario
from clustersim.economics import DAY, HOUR, Rates, costs, rates
from clustersim.errors import ClusterSimError
from clustersim.outputs import Folder
from clustersim.mesh import Mesh
from clustersim.planner.candidates import Candidate, base, candidates, combined, scenario_of
from clustersim.planner.knobs import combinations
from clustersim.planner.limits import SLACK, Bound, least_joules, memory_verdict, step_bound, too_much
from clustersim.planner.pareto import front
from clustersim.planner.rounds import Runner
from clustersim.planner.sieve import Place, Refused, Sieve
from clustersim.planner.spec import EXACT, PlanFile
from clustersim.ranges import of_step
from clustersim.scenario.parts import machine, model_of, shape_of
from clustersim.sweeps.crews import Executor, crew
from clustersim.sweeps.store import Store
from clustersim.topology import Topology

FILES = ("plan.json", "front.png")
"""What a plan leaves beside its rows."""
ROUND = 8
"""Candidates simulated between two looks at what they prune."""
ROUGH = 0.05
"""How far a roughly folded step may be from the whole one, relatively; 2.6 % at most was seen."""
FINALISTS = 3
"""Of one machine and number of nodes in a large space, options that are run whole."""


@dataclass(frozen=True)
class Option:
    """A candidate and what became of it.

    Parameters
    ----------
    candidate : it. state : ``"simulated"``, or why not: ``"memory"``, ``"limits"``, ``"bound"``, ``"error"``; of a split
        model also ``"rough"``, simulated roughly folded alone, and ``"left"``, beyond the plan's number of simulations.
    reason : in words, for those that were not simulated or break a limit. result : the row's, of ``clustersim run``.
    rate : tokens/s of the whole machine (samples/s where the model has no tokens). costs : see
        :func:`clustersim.economics.costs`. objectives : as predicted, smaller is better: speed, cost (infinite
        where no price is known), GPUs, energy.
    days, usd : to train on the plan's tokens, None without them.
    on_front : no other option beats it in everything, each taken at the worse end of its error.
    tempting : not on the front, but no other option would beat it in everything if predictions held.
    bound : what it can at best be, None where that was not looked at.
    """

    candidate: Candidate
    state: str = ""
    reason: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 0.0
    costs: Mapping[str, float | None] = field(default_factory=dict)
    objectives: tuple[float, ...] = ()
    days: float | None = None
    usd: float | None = None
    on_front: bool = False
    tempting: bool = False
    bound: Bound | None = None

    @property
    def priced(self) -> bool:
        """Whether its machine has a price."""
        return math.isfinite(self.objectives[1])

    @property
    def error(self) -> float:
        """Relative error of its kind of strategy: half of published steps lay within."""
        return of_step(self.candidate.kind).p50

    @property
    def robust(self) -> tuple[float, ...]:
        """Its objectives at the worse end of its error."""
        return at_worst(self.objectives, self.error)

    @property
    def counts(self) -> bool:
        """Whether it was simulated and keeps every limit."""
        return self.state == "simulated" and not self.reason


@dataclass(frozen=True)
class Searched:
    """All options in order of their numbers, and what is assumed of each machine. ``combined`` : combinations of
    machines and knobs, possible or not."""

    options: tuple[Option, ...]
    rates: tuple[Rates, ...]
    tokens: bool
    combined: int = 0

    @property
    def front(self) -> list[Option]:
        """Options worth having, fastest first."""
        return sorted((one for one in self.options if one.on_front), key=lambda one: one.robust)

    def judged(self) -> Searched:
        """The same with the front marked, and what is tempting."""
        counted = [one for one in self.options if one.counts]
        best = {counted[i].candidate.number for i in front([one.robust for one in counted])}
        tempting = {counted[i].candidate.number for i in front([one.objectives for one in counted])} - best
        marked = tuple(
            replace(one, on_front=one.candidate.number in best, tempting=one.candidate.number in tempting)
            for one in self.options
        )
        return replace(self, options=marked)

    @property
    def tempting(self) -> list[Option]:
        """Options that would be worth having if their predictions held, fastest first."""
        return sorted((one for one in self.options if one.tempting), key=lambda one: one.objectives)


def at_worst(objectives: Sequence[float], error: float) -> tuple[float, ...]:
    """Objectives where a step takes ``1 + error`` times as long.

    >>> at_worst((-125.0, 1.0, 8.0, 2.0), 0.25)
    (-100.0, 1.25, 8.0, 2.5)
    """
    rate, cost, gpus, energy = objectives
    return rate / (1 + error), cost * (1 + error), gpus, energy * (1 + error)


def search(
    plan: PlanFile,
    path: str | Path,
    out: str | Path,
    *,
    executor: Executor | None = None,
    jobs: int | None = None,
    exhaustive: bool = False,
    progress: Callable[[int, int], None] | None = None,
    told: Callable[[str], None] | None = None,
) -> Searched:
    """Every option of a plan, as far as it had to be looked at.

    Parameters
    ----------
    path : the plan's file. out : folder of ``results.jsonl``; rows that are there are not simulated again.
    executor, jobs : as for :func:`clustersim.sweeps.sweep`. exhaustive : simulate also what bounds rule out.
    progress : called with (options done with, options in all). told : called with the size of the space, in words,
        before anything is looked at.

    Raises :class:`ClusterSimError` where no option can be read, or the folder cannot be written.
    """
    store, name = Store(Path(out)), plan.title or Path(path).stem
    folder = Folder(store.path, "plan", name, FILES, (name, plan.model))
    folder.check()
    seen = _Seen(plan, path, *_machines(plan, path), told=told)
    best = seen.open()
    team = crew(executor, jobs)
    try:
        with store.writing(folder) as writer:
            runner = Runner(plan, path, store, writer.append, team)
            for rough in (True, False):
                waiting = seen.waiting(best, rough=rough and not exhaustive)
                while waiting:
                    turn, waiting = _next_round(waiting, seen, exhaustive, rough)
                    seen.take(runner.run([option.candidate for option in turn], rough=rough), rough=rough)
                    if progress:
                        progress(len(seen.options) - len(waiting), len(seen.options))
    finally:
        team.close()
    return seen.done()


def _next_round(
    waiting: Sequence[int], seen: _Seen, exhaustive: bool, rough: bool
) -> tuple[list[Option], list[int]]:
    """The next candidates to simulate, and numbers of the rest; what is ruled out on the way is noted."""
    turn: list[Option] = []
    for i, number in enumerate(waiting):
        option = seen.options[number]
        if len(turn) == ROUND:
            return turn, list(waiting[i:])
        by = None if exhaustive else seen.beaten_by(option)
        if by is not None:
            seen.rule_out(option, by)
        elif seen.spent(option, rough) and not exhaustive:
            seen.leave(option)
        else:
            turn.append(option)
    return turn, []


class _Seen:
    """What is known of every candidate so far."""

    def __init__(
        self,
        plan: PlanFile,
        path: str | Path,
        machines: Mapping[Place, tuple[Topology, Mesh]],
        devices: Sequence[str],
        told: Callable[[str], None] | None = None,
    ) -> None:
        self.plan, self.path = plan, path
        self.rates = tuple(
            rates(name, one.usd_per_gpu_hour, one.power) for name, one in zip(devices, plan.machines, strict=True)
        )
        gpus = {place: mesh.world_size for place, (_, mesh) in machines.items()}
        tables = _tables(plan, path, machines)
        self.combined = combined(plan, gpus, tables)
        self.options = [Option(one) for one in candidates(plan, gpus, tables)]
        if told:
            told(f"{self.combined:,} combinations, of which {len(self.options):,} have ranks and a batch that divide")
        self.sieve = Sieve(plan, path, machines)
        self.best: dict[int, tuple[float, ...]] = {}
        self.runs, self.whole = 0, Counter[Place]()
        self._better = _Better()
        self.seq_len = 1
        self.tokens = True
        if not self.options:
            raise ClusterSimError(
                f"{path}: no combination of nodes, micro-batch and accumulation makes a batch of "
                f"{self.plan.batch.samples} samples within the limit of GPUs (at $.batch.samples)"
            )

    def rates_of(self, candidate: Candidate) -> Rates:
        """What is assumed of its machine."""
        return self.rates[self.plan.machines.index(candidate.machine)]

    def open(self) -> list[int]:
        """Numbers of the options that fit and are read, the most promising first."""
        whole = [option for option in self.options if not option.candidate.split]
        found = chain(
            ((one.candidate, _looked(self.plan, self.path, one.candidate)) for one in whole),
            self.sieve.look([one.candidate for one in self.options if one.candidate.split]),
        )
        self.seq_len = _seq_len(self.plan, self.path, self.options[0].candidate)
        self.tokens = bool(self.seq_len)
        ranked: list[tuple[float, int]] = []
        for candidate, what in found:
            option = self.options[candidate.number]
            if isinstance(what, Refused):
                self._note(option, what.state, what.reason)
                continue
            best = self.best[candidate.number] = self._objectives(candidate, what, self.seq_len or 1)
            option = self.options[candidate.number] = replace(option, bound=what)
            broken = self._broken(-best[0], best[1] * -best[0] * DAY, sure="at best ")
            if broken:
                self._note(option, "limits", broken)
            else:
                ranked.append((best[0] / candidate.gpus, candidate.number))
        return [number for _, number in sorted(ranked)]

    def waiting(self, best: Sequence[int], *, rough: bool) -> list[int]:
        """Numbers of the options to simulate, roughly or whole; the best of every machine and number of nodes first."""
        open_ = [number for number in best if not self.options[number].state or self.options[number].state == "rough"]
        if rough:
            open_ = [number for number in open_ if self.options[number].candidate.split]
        elif any(self.options[number].state == "rough" for number in open_):
            open_.sort(key=lambda number: (self.best[number][0] / self.options[number].candidate.gpus, number))
        else:
            return open_
        place, turn = Counter[Place](), []
        for number in open_:
            where = self.sieve.place(self.options[number].candidate)
            turn.append((place[where], number))
            place[where] += 1
        return [number for _, number in sorted(turn, key=lambda pair: pair[0])]

    def spent(self, option: Option, rough: bool) -> bool:
        """Whether a large space has had its simulations."""
        if len(self.options) <= EXACT or not option.candidate.split:
            return False
        return self.runs >= self.plan.tried.simulations if rough else (
            option.state != "rough" or self.whole[self.sieve.place(option.candidate)] >= FINALISTS
        )

    def leave(self, option: Option) -> None:
        """Note that it is not simulated, or not whole."""
        best, unit = self.best[option.candidate.number], self._unit
        if option.state == "rough":
            reason = f"{-best[0] / (1 + ROUGH):,.0f} {unit} roughly, which others were nearer the front with"
        else:
            reason = f"not simulated: at most {-best[0]:,.0f} {unit} by its bound"
        self._note(option, option.state or "left", reason)

    @property
    def _unit(self) -> str:
        return "tokens/s" if self.tokens else "samples/s"

    def _objectives(self, candidate: Candidate, bound: Bound, tokens: int) -> tuple[float, ...]:
        """The best this candidate can be."""
        rate = candidate.batch * tokens / bound.step_s
        known = self.rates_of(candidate)
        cost = math.inf if known.usd_per_gpu_hour is None else known.usd_per_gpu_hour * candidate.gpus / HOUR / rate
        joules = least_joules(known, bound) * candidate.gpus
        return (-rate, cost, float(candidate.gpus), joules / (rate * bound.step_s))

    def _broken(self, rate: float, usd_per_day: float, sure: str = "") -> str:
        """The limit that a rate breaks, in words; empty where it keeps them. ``usd_per_day`` : infinite where no price
        is known."""
        limits = self.plan.limits
        if limits.tokens is None:
            return ""
        days = limits.tokens / rate / DAY
        if limits.deadline is not None and days * DAY > float(limits.deadline):
            allowed = float(limits.deadline) / DAY
            return f"takes {sure}{days:,.1f} days for {limits.tokens:.3g} tokens; {allowed:,.1f} allowed"
        if limits.budget_usd is not None and math.isinf(usd_per_day):
            return "has no price, so nobody knows whether it keeps the budget: give usd_per_gpu_hour"
        if limits.budget_usd is not None and (usd := usd_per_day * days) > limits.budget_usd:
            return f"costs {sure}{usd:,.0f} USD for {limits.tokens:.3g} tokens; {limits.budget_usd:,.0f} allowed"
        return ""

    def beaten_by(self, option: Option) -> Option | None:
        """A simulated option that beats the best this one can be, with errors and without."""
        best = self.best[option.candidate.number]
        if not self._better.some(at_worst(best, option.error), robust=True):
            return None
        by = self._better.first(best)
        return None if by is None else self.options[by]

    def rule_out(self, option: Option, by: Option) -> None:
        """Note that it need not be simulated, or not whole."""
        rate = -self.best[option.candidate.number][0]
        how = f"roughly {rate / (1 + ROUGH):,.0f}" if option.state == "rough" else f"even at its bound of {rate:,.0f}"
        what = f"{how} {self._unit}: it is beaten by" if option.state == "rough" else f"{how} {self._unit} it is beaten by"
        self._note(option, option.state or "bound", f"{what} {title(by.candidate)}")

    def take(self, rows: Mapping[int, Mapping[str, Any]], *, rough: bool) -> None:
        """Rows of simulated candidates, by number."""
        self.runs += len(rows)
        for number, row in rows.items():
            option = self.options[number]
            if "error" in row:
                self._note(option, "error", row["error"]["message"])
                continue
            result = row["result"] | (_parts_of(row["result"], option.bound) if rough else {})
            option = self.options[number] = self._simulated(option, result, "rough" if rough else "simulated")
            slack = ROUGH if rough else 0.0
            if rough:
                self.best[number] = at_worst(option.objectives, -ROUGH / (1 + ROUGH))
            else:
                self.whole[self.sieve.place(option.candidate)] += 1
            if not option.reason:
                worst = at_worst(option.objectives, slack)
                self._better.add(number, worst, at_worst(worst, option.error))

    def _simulated(self, option: Option, result: Mapping[str, Any], state: str) -> Option:
        candidate, known = option.candidate, self.rates_of(option.candidate)
        rate = candidate.batch * (self.seq_len or 1) / float(result["step_time_s"])
        if state == "simulated":
            rate = float(result["tokens_per_s"] or result["samples_per_s"])
        spent = costs(known, candidate.gpus, rate, result)
        cost = math.inf if spent["usd_per_sample"] is None else spent["usd_per_sample"]
        energy = float(spent["kwh_per_sample"] or 0.0) * 3.6e6
        per_day = math.inf if spent["usd_per_hour"] is None else 24.0 * spent["usd_per_hour"]
        tokens = self.plan.limits.tokens
        days = None if tokens is None else tokens / rate / DAY
        usd = None if days is None or math.isinf(per_day) else days * per_day
        objectives = (-rate, cost, float(candidate.gpus), energy)
        return replace(
            option, state=state, reason=self._broken(rate, per_day), result=result, rate=rate, costs=spent,
            objectives=objectives, days=days, usd=usd,
        )  # fmt: skip

    def _note(self, option: Option, state: str, reason: str) -> None:
        number = option.candidate.number
        self.options[number] = replace(option, state=state, reason=reason)

    def done(self) -> Searched:
        """All of it, judged."""
        return Searched(tuple(self.options), self.rates, self.tokens, self.combined).judged()


@dataclass
class _Better:
    """Objectives of simulated options, at the worse end of what their run may be off."""

    numbers: list[int] = field(default_factory=list)
    plain: list[tuple[float, ...]] = field(default_factory=list)
    robust: list[tuple[float, ...]] = field(default_factory=list)

    def add(self, number: int, plain: tuple[float, ...], robust: tuple[float, ...]) -> None:
        """One more, or the same once more."""
        if number in self.numbers:
            i = self.numbers.index(number)
            self.plain[i], self.robust[i] = plain, robust
            return
        self.numbers.append(number)
        self.plain.append(plain)
        self.robust.append(robust)

    def some(self, objectives: tuple[float, ...], *, robust: bool = False) -> bool:
        """Whether one of them beats these objectives."""
        return self._beating(objectives, self.robust if robust else self.plain).size > 0

    def first(self, objectives: tuple[float, ...]) -> int | None:
        """The number of the first that does."""
        found = self._beating(objectives, self.plain)
        return self.numbers[int(found[0])] if found.size else None

    def _beating(self, objectives: tuple[float, ...], known: list[tuple[float, ...]]) -> npt.NDArray[np.int64]:
        if not known:
            return np.zeros(0, dtype=np.int64)
        rows = np.array(known)
        return np.flatnonzero((rows <= objectives).all(axis=1) & (rows < objectives).any(axis=1))


def title(candidate: Candidate) -> str:
    """A candidate in words."""
    return f"{candidate.nodes} x {candidate.machine.label}: {candidate.label}"


def _looked(plan: PlanFile, path: str | Path, candidate: Candidate) -> Bound | Refused:
    """An option with a whole model on every rank, from its Program."""
    try:
        one = scenario_of(plan, path, candidate)
        reason = too_much(memory_verdict(one), plan.limits.memory_margin)
        return Refused("memory", reason) if reason else step_bound(one.prepare())
    except ClusterSimError as error:
        return Refused("error", str(error))


def _parts_of(result: Mapping[str, Any], bound: Bound | None) -> dict[str, float]:
    """What a rough run says of its step: kernels and bubble as the bound has them, the rest is exchanges."""
    step, least = float(result["step_time_s"]), bound or Bound(0.0, 0.0)
    compute = min(step, least.compute_s / SLACK)
    return {"compute_s": compute, "exposed_communication_s": max(0.0, step - compute - least.ramp_s)}


def _seq_len(plan: PlanFile, path: str | Path, candidate: Candidate) -> int:
    try:
        return model_of(scenario_of(plan, path, candidate)).seq_len
    except ClusterSimError:
        return 0


def _tables(
    plan: PlanFile, path: str | Path, machines: Mapping[Place, tuple[Topology, Mesh]]
) -> list[dict[str, Any]]:
    """What is tried as ``[parallel]``."""
    if not plan.tried.parallel:
        return [{}]
    made = scenario.from_table(base(plan), path)
    per_node = max(mesh.nproc_per_node for _, mesh in machines.values())
    return combinations(plan.tried.parallel, shape_of(made), per_node, str(path))


def _machines(plan: PlanFile, path: str | Path) -> tuple[dict[Place, tuple[Topology, Mesh]], list[str]]:
    """Every machine with every number of nodes, and each machine's device."""
    built, devices = {}, []
    for m, one in enumerate(plan.machines):
        topology = None
        for nodes in sorted(one.nodes):
            made = scenario.from_table(base(plan), path, {"cluster": one.cluster(nodes)})
            topology, mesh = built[m, nodes] = machine(made)
        if topology is None:
            raise ClusterSimError(f"{path}: nodes is empty; list the numbers to try (at $.machines[{m}].nodes)")
        devices.append(topology.node_types[0].device)
    return built, devices
