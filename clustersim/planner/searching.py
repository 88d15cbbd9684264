"""The search: bounds prune, simulation decides.

Every candidate is looked at by its memory, which is exact, and by bounds on its step. An option whose *bounds* are
already beaten in everything by a simulated one cannot be on the front, so it need not be simulated: the front is the
one an exhaustive search finds. Candidates are simulated in rounds of a fixed size, the most promising first, so that
what is pruned does not depend on how many processes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clustersim import scenario
from clustersim.errors import ClusterSimError
from clustersim.outputs import Folder
from clustersim.planner.candidates import Candidate, base, candidates, scenario_of
from clustersim.planner.economics import DAY, Rates, costs, rates
from clustersim.planner.limits import Bound, least_joules, memory_verdict, step_bound, too_much
from clustersim.planner.pareto import dominates, front
from clustersim.planner.rounds import Runner
from clustersim.planner.spec import PlanFile
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
        :func:`clustersim.planner.economics.costs`. objectives : what the front compares, smaller is better.
    days, usd : to train on the plan's tokens, None without them. on_front : no other option beats it in everything.
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
        return sorted((one for one in self.options if one.on_front), key=lambda one: -one.rate)


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
        self.priced = all(one.usd_per_gpu_hour is not None for one in self.rates)
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
            broken = self._broken(-best[0], best[1] * -best[0] * DAY if self.priced else None, sure="at best ")
            if broken:
                self._note(option, "limits", broken)
            else:
                yield option, best[1]

    def _objectives(self, candidate: Candidate, bound: Bound, tokens: int) -> tuple[float, ...]:
        """The best this candidate can be."""
        rate = candidate.batch * tokens / bound.step_s
        known = self.rates_of(candidate)
        price = known.usd_per_gpu_hour or 1.0
        joules = least_joules(known, bound) * candidate.gpus
        return (-rate, price * candidate.gpus / 3600.0 / rate, float(candidate.gpus), joules / (rate * bound.step_s))

    def _broken(self, rate: float, usd_per_day: float | None, sure: str = "") -> str:
        """The limit that a rate breaks, in words; empty where it keeps them."""
        limits = self.plan.limits
        if limits.tokens is None:
            return ""
        days = limits.tokens / rate / DAY
        if limits.deadline is not None and days * DAY > float(limits.deadline):
            allowed = float(limits.deadline) / DAY
            return f"takes {sure}{days:,.1f} days for {limits.tokens:.3g} tokens; {allowed:,.1f} allowed"
        usd = None if usd_per_day is None else usd_per_day * days
        if limits.budget_usd is not None and usd is not None and usd > limits.budget_usd:
            return f"costs {sure}{usd:,.0f} USD for {limits.tokens:.3g} tokens; {limits.budget_usd:,.0f} allowed"
        return ""

    def beaten_by(self, option: Option) -> Option | None:
        """A simulated option that beats the best this one can be."""
        best = self.best[option.candidate.number]
        return next((one for one in self.options if one.counts and dominates(one.objectives, best)), None)

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
        per_sample = spent["usd_per_sample"] or candidate.gpus / 3600.0 / rate
        energy = float(spent["kwh_per_sample"] or 0.0) * 3.6e6
        per_day = None if spent["usd_per_hour"] is None else 24.0 * float(spent["usd_per_hour"])
        tokens = self.plan.limits.tokens
        days = None if tokens is None else tokens / rate / DAY
        usd = None if days is None or per_day is None else days * per_day
        objectives = (-rate, float(per_sample), float(candidate.gpus), energy)
        return replace(
            option, state="simulated", reason=self._broken(rate, per_day), result=result, rate=rate, costs=spent,
            objectives=objectives, days=days, usd=usd,
        )  # fmt: skip

    def _note(self, option: Option, state: str, reason: str) -> None:
        number = option.candidate.number
        self.options[number] = replace(option, state=state, reason=reason)

    def done(self) -> Searched:
        """With the front marked."""
        counted = [one for one in self.options if one.counts]
        best = {counted[i].candidate.number for i in front([one.objectives for one in counted])}
        marked = tuple(replace(one, on_front=one.candidate.number in best) for one in self.options)
        return Searched(marked, self.rates, self.tokens)


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
