"""The search: bounds prune, simulation decides.

Every candidate is looked at by its memory, which is exact, and by bounds on its step. An option whose *bounds* are
already beaten in everything by a simulated one cannot be on the front, so it need not be simulated: the front is the
one an exhaustive search finds. Candidates are simulated in rounds of a fixed size, the most promising first, so that
what is pruned does not depend on how many processes there are.

What is worth having is decided with the errors of predictions: every option is as good as it is at the worse end of
what half of published steps lay within. One that would be worth having if its prediction held is *tempting*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clustersim import scenario
from clustersim.economics import DAY, HOUR, Rates, costs, rates
from clustersim.errors import ClusterSimError
from clustersim.outputs import Folder
from clustersim.planner.candidates import Candidate, base, candidates, scenario_of
from clustersim.planner.limits import Bound, least_joules, memory_verdict, step_bound, too_much
from clustersim.planner.pareto import dominates, front
from clustersim.planner.rounds import Runner
from clustersim.planner.spec import PlanFile
from clustersim.ranges import of_step
from clustersim.scenario.parts import machine
from clustersim.sweeps.crews import Executor, crew
from clustersim.sweeps.store import Store

FILES = ("plan.json", "front.png")
"""What a plan leaves beside its rows."""
ROUND = 8
"""Candidates simulated between two looks at what they prune."""


@dataclass(frozen=True)
class Option:
    """A candidate and what became of it.

    Parameters
    ----------
    candidate : it. state : ``"simulated"``, or why not: ``"memory"``, ``"limits"``, ``"bound"``, ``"error"``.
    reason : in words, for those that were not simulated or break a limit. result : the row's, of ``clustersim run``.
    rate : tokens/s of the whole machine (samples/s where the model has no tokens). costs : see
        :func:`clustersim.economics.costs`. objectives : as predicted, smaller is better: speed, cost (infinite
        where no price is known), GPUs, energy.
    days, usd : to train on the plan's tokens, None without them.
    on_front : no other option beats it in everything, each taken at the worse end of its error.
    tempting : not on the front, but no other option would beat it in everything if predictions held.
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
    """All options in order of their numbers, and what is assumed of each machine."""

    options: tuple[Option, ...]
    rates: tuple[Rates, ...]
    tokens: bool

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
) -> Searched:
    """Every option of a plan, as far as it had to be looked at.

    Parameters
    ----------
    path : the plan's file. out : folder of ``results.jsonl``; rows that are there are not simulated again.
    executor, jobs : as for :func:`clustersim.sweeps.sweep`. exhaustive : simulate also what bounds rule out.
    progress : called with (options done with, options in all).

    Raises :class:`ClusterSimError` where no option can be read, or the folder cannot be written.
    """
    store, name = Store(Path(out)), plan.title or Path(path).stem
    folder = Folder(store.path, "plan", name, FILES, (name, plan.model))
    folder.check()
    seen = _Seen(plan, path, *_machines(plan, path))
    ranked = sorted(seen.open(), key=lambda pair: (pair[1], pair[0].candidate.number))
    team = crew(executor, jobs)
    try:
        with store.writing(folder) as writer:
            runner = Runner(plan, path, store, writer.append, team)
            waiting = [option for option, _ in ranked]
            while waiting:
                turn, waiting = _next_round(waiting, seen, exhaustive)
                seen.take(runner.run([option.candidate for option in turn]))
                if progress:
                    progress(len(seen.options) - len(waiting), len(seen.options))
    finally:
        team.close()
    return seen.done()


def _next_round(waiting: Sequence[Option], seen: _Seen, exhaustive: bool) -> tuple[list[Option], list[Option]]:
    """The next candidates to simulate, and the rest; what is ruled out on the way is noted."""
    turn: list[Option] = []
    for i, option in enumerate(waiting):
        if len(turn) == ROUND:
            return turn, list(waiting[i:])
        by = None if exhaustive else seen.beaten_by(option)
        if by is None:
            turn.append(option)
        else:
            seen.rule_out(option, by)
    return turn, []


class _Seen:
    """What is known of every candidate so far."""

    def __init__(
        self, plan: PlanFile, path: str | Path, gpus: Mapping[tuple[int, int], int], devices: Sequence[str]
    ) -> None:
        self.plan, self.path = plan, path
        self.rates = tuple(
            rates(name, one.usd_per_gpu_hour, one.power) for name, one in zip(devices, plan.machines, strict=True)
        )
        self.options = [Option(one) for one in candidates(plan, gpus)]
        self.best: dict[int, tuple[float, ...]] = {}
        self.tokens = True
        if not self.options:
            raise ClusterSimError(
                f"{path}: no combination of nodes, micro-batch and accumulation makes a batch of "
                f"{self.plan.batch.samples} samples within the limit of GPUs (at $.batch.samples)"
            )

    def rates_of(self, candidate: Candidate) -> Rates:
        """What is assumed of its machine."""
        return self.rates[self.plan.machines.index(candidate.machine)]

    def open(self) -> Iterator[tuple[Option, float]]:
        """Options that fit and are read, each with its best rank: the smaller, the more promising."""
        for option in list(self.options):
            try:
                one = scenario_of(self.plan, self.path, option.candidate)
                reason = too_much(memory_verdict(one), self.plan.limits.memory_margin)
                if reason:
                    self._note(option, "memory", reason)
                    continue
                prepared = one.prepare()
            except ClusterSimError as error:
                self._note(option, "error", str(error))
                continue
            self.tokens = bool(prepared.model.seq_len)
            best = self._objectives(option.candidate, step_bound(prepared), prepared.model.seq_len or 1)
            self.best[option.candidate.number] = best
            broken = self._broken(-best[0], best[1] * -best[0] * DAY, sure="at best ")
            if broken:
                self._note(option, "limits", broken)
            else:
                yield option, best[0] / option.candidate.gpus

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
        worst = at_worst(best, option.error)
        counted = [one for one in self.options if one.counts]
        if not any(dominates(one.robust, worst) for one in counted):
            return None
        return next((one for one in counted if dominates(one.objectives, best)), None)

    def rule_out(self, option: Option, by: Option) -> None:
        """Note that it need not be simulated."""
        best = self.best[option.candidate.number]
        unit = "tokens/s" if self.tokens else "samples/s"
        self._note(
            option, "bound", f"even at its bound of {-best[0]:,.0f} {unit} it is beaten by {title(by.candidate)}"
        )

    def take(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Rows of simulated candidates, by number."""
        for number, row in rows.items():
            option = self.options[number]
            if "error" in row:
                self._note(option, "error", row["error"]["message"])
                continue
            self.options[number] = self._simulated(option, row["result"])

    def _simulated(self, option: Option, result: Mapping[str, Any]) -> Option:
        candidate, known = option.candidate, self.rates_of(option.candidate)
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
            option, state="simulated", reason=self._broken(rate, per_day), result=result, rate=rate, costs=spent,
            objectives=objectives, days=days, usd=usd,
        )  # fmt: skip

    def _note(self, option: Option, state: str, reason: str) -> None:
        number = option.candidate.number
        self.options[number] = replace(option, state=state, reason=reason)

    def done(self) -> Searched:
        """All of it, judged."""
        return Searched(tuple(self.options), self.rates, self.tokens).judged()


def title(candidate: Candidate) -> str:
    """A candidate in words."""
    return f"{candidate.nodes} x {candidate.machine.label}: {candidate.label}"


def _machines(plan: PlanFile, path: str | Path) -> tuple[dict[tuple[int, int], int], list[str]]:
    """GPUs of every machine and number of nodes, and each machine's device."""
    gpus, devices = {}, []
    for m, one in enumerate(plan.machines):
        topology = None
        for nodes in one.nodes:
            made = scenario.from_table(base(plan), path, {"cluster": one.cluster(nodes)})
            topology, mesh = machine(made)
            gpus[m, nodes] = mesh.world_size
        if topology is None:
            raise ClusterSimError(f"{path}: nodes is empty; list the numbers to try (at $.machines[{m}].nodes)")
        devices.append(topology.node_types[0].device)
    return gpus, devices
