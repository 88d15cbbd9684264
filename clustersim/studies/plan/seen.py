"""What is known of every candidate so far: its bound, its runs, and who beats it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from clustersim.core.economics import DAY, HOUR, GpuRates, RunningCosts, costs, rates, watts_per_gpu
from clustersim.core.errors import ClusterSimError
from clustersim.core.mesh import Mesh
from clustersim.core.model import Model
from clustersim.core.topology import Topology
from clustersim.scenario.result.trust import block_flops, called_work, step_kind, trust_in
from clustersim.scenario.run.parts import model_of
from clustersim.studies.plan.candidates import PlanCandidate, candidates, combined, scenario_of
from clustersim.studies.plan.form import RefusedOption
from clustersim.studies.plan.known import Place
from clustersim.studies.plan.limits import Bound, least_joules, with_shares
from clustersim.studies.plan.options import PlanOption, SearchResult, at_worst, rule
from clustersim.studies.plan.pareto import ParetoObjectives
from clustersim.studies.plan.sieve import OptionSieve, kept
from clustersim.studies.plan.sites import tried_parallel
from clustersim.studies.plan.spec import EXACT, PlanFile
from clustersim.studies.plan.untried import offloads, untried
from clustersim.studies.sweep.row import SweepFigures, SweepRow
from clustersim.studies.what_if.folded_passes import PassesDiffer

ROUGH = 0.05
"""How far a step that is sketched or roughly folded may be from the whole one, relatively. Of 432 options of a small
GPT on 8 GPUs, whose steps are short, a sketch was off by 4.0 % at most, and by 1.7 % without a pipeline; of five of a
7B by 0.4 %; a rough run by 2.6 %."""
OUTSIDE = 8
"""Rough runs of a machine and number of nodes after which another's options rule out what they beat."""
FINALISTS = 2
"""Of one machine and number of nodes in a large space, options with a split model that are run as near to whole as
they can be: so many with room in memory, and so many that may run out."""


class KnownCandidates:
    """What is known of every candidate so far."""

    def __init__(
        self,
        plan: PlanFile,
        path: str | Path,
        machines: Mapping[Place, tuple[Topology, Mesh]],
        devices: Sequence[str],
        told: Callable[[str], None] | None = None,
    ) -> None:
        self.plan = plan
        self.path = path
        types = [kind for topology, _ in machines.values() for kind in topology.node_types]
        own = {kind.device: kind.own_gpu for kind in types if kind.own_gpu is not None}
        self.rates = tuple(
            rates(name, machine_spec.usd_per_gpu_hour, machine_spec.power, own)
            for name, machine_spec in zip(devices, plan.machines, strict=True)
        )
        gpus = {place: mesh.world_size for place, (_, mesh) in machines.items()}
        tables = tried_parallel(plan, path, machines)
        self.combined = combined(plan, gpus, tables)
        self.options = [PlanOption(candidate) for candidate in candidates(plan, gpus, tables)]
        if not self.options:
            raise ClusterSimError(
                f"{path}: no combination of nodes, micro-batch and accumulation makes a batch of "
                f"{self.plan.batch.samples} samples within the limit of GPUs (at $.batch.samples)"
            )
        if told:
            told(
                f"{self.combined:,} combinations, each with as many passes as the batch allows: {len(self.options):,} "
                "options whose ranks and batch divide"
            )
        self.sieve = OptionSieve(plan, path, machines)
        self.best: dict[int, tuple[float, ...]] = {}
        self.runs, self.whole = 0, Counter[tuple[Place, float]]()
        self._rates: defaultdict[tuple[Place, str, bool], list[float]] = defaultdict(list)
        self._roomy_rates: defaultdict[tuple[Place, str, bool], list[float]] = defaultdict(list)
        self._better = ParetoObjectives()
        self.seq_len = 1
        self.tokens = True

    def rates_of(self, candidate: PlanCandidate) -> GpuRates:
        """What is assumed of its machine."""
        return self.rates[self.plan.machines.index(candidate.machine)]

    def open(
        self, folder: Path | None = None, looked: Callable[[int, int], None] = lambda looks, fit: None
    ) -> list[int]:
        """Numbers of the options that fit and are read, the most promising first.

        ``folder`` : where what the sieve says is kept, and read from if it is there. ``looked`` : called for each
        option that was looked at, with how many were, and how many of them fit.
        """
        options = [option.candidate for option in self.options]
        outcomes = self.sieve.look(options) if folder is None else kept(self.sieve, options, folder)
        self.seq_len = 0  # of a model without tokens, and of one that cannot be read
        with suppress(ClusterSimError):
            model = model_of(scenario_of(self.plan, self.path, options[0]))
            self.seq_len = model.tokens
            self._know_errors(model)
        self.tokens = bool(self.seq_len)
        ranked: list[tuple[float, int]] = []
        for looks, (number, outcome) in enumerate(outcomes, 1):
            looked(looks, len(self.best))
            option = self.options[number]
            candidate = options[number]
            if isinstance(outcome, RefusedOption):
                self._note(replace(option, needs=outcome.needs), outcome.state, outcome.reason)
                continue
            best = self.best[candidate.number] = self._objectives(candidate, outcome, self.seq_len or 1)
            option = self.options[candidate.number] = replace(option, bound=outcome)
            broken = self._broken(-best[0], best[1] * -best[0] * DAY, sure="at best ")
            if broken:
                self._note(option, "limits", broken)
            else:
                ranked.append((best[0] / candidate.gpus, candidate.number))
        return self._in_turn([number for _, number in sorted(ranked)])

    def _in_turn(self, numbers: Sequence[int]) -> list[int]:
        """The same with what may run out of memory and what has room in turn: where not all are run, both are."""
        places = Counter[float]()
        turn = []
        for number in numbers:
            tight = self._tight(self.options[number])
            turn.append((places[tight], tight, number))
            places[tight] += 1
        return [number for _, _, number in sorted(turn)]

    def _tight(self, option: PlanOption) -> float:
        """1 where it may run out of memory, as far as is known; one more objective."""
        if option.result is not None:
            return float(not option.has_room)
        return 0.0 if option.bound is None else option.bound.tight

    def waiting(self, best: Sequence[int], *, rough: bool) -> list[int]:
        """Numbers of the options to simulate, roughly or whole; the best of every machine and number of nodes first,
        and at first those of each strategy with its numbers: what computes in 8 bits is the best by its bounds, and
        would use up all runs."""
        open_ = [number for number in best if not self.options[number].state or self.options[number].state == "rough"]
        if rough:
            open_ = [number for number in open_ if self._has_first_run(self.options[number])]
        elif any(self.options[number].state == "rough" for number in open_):
            open_.sort(key=lambda number: (self.best[number][0] / self.options[number].candidate.gpus, number))
            open_ = self._in_turn(open_)
        else:
            return open_
        place = Counter[Place]()
        sorts = Counter[tuple[Place, str]]()
        turn = []
        first = {option.candidate.number for option in rule(self.options).values()} if rough else set()
        later = self._twins(open_)
        for number in sorted(open_, key=lambda number: (number not in first, number in later)):
            candidate = self.options[number].candidate
            place_of = self.sieve.place(candidate)
            sorts[place_of, candidate.form.sort] += 1
            early = sorts[place_of, candidate.form.sort] <= FINALISTS and rough
            turn.append((sorts[place_of, candidate.form.sort] - FINALISTS if early else 1 + place[place_of], number))
            place[place_of] += 1
        return [number for _, number in sorted(turn, key=lambda pair: pair[0])]

    def _has_first_run(self, option: PlanOption) -> bool:
        """Whether a run of a part of it tells enough to look at that first."""
        return option.candidate.form.split or (option.bound is not None and option.bound.folds)

    def _twins(self, numbers: Sequence[int]) -> set[int]:
        """Those of which the sieve says to the last byte what it says of an earlier one on the same machine: the
        order of ranks, say. They wait until all others had their turn."""
        seen: set[object] = set()
        twins = set()
        for number in numbers:
            option = self.options[number]
            key = self.sieve.place(option.candidate), tuple(option.candidate.form.degrees.values()), option.bound
            twins |= {number} if key in seen else set()
            seen.add(key)
        return twins

    def hand_out(self, option: PlanOption, *, rough: bool) -> None:
        """Count one that is about to be simulated."""
        self.runs += option.candidate.form.split
        # One with a whole model is run whole in any case, and what may run out is no answer where another has room:
        # neither takes the turn of a split option that has room.
        self.whole[self._finals(option)] += not rough and option.candidate.form.split

    def spent(self, option: PlanOption, rough: bool) -> bool:
        """Whether a large space has had its simulations."""
        if len(self.options) <= EXACT or not option.candidate.form.split:
            return False
        return (
            self.runs >= self.plan.tried.simulations
            if rough
            else (option.state != "rough" or self.whole[self._finals(option)] >= FINALISTS)
        )

    def _finals(self, option: PlanOption) -> tuple[Place, float]:
        """Of which options at most :data:`FINALISTS` are run whole: of its machine and nodes, and as tight as it."""
        return self.sieve.place(option.candidate), self._tight(option)

    def leave(self, option: PlanOption) -> None:
        """Note that it is not simulated, or not whole."""
        best = self.best[option.candidate.number]
        unit = self._unit
        if option.state == "rough":
            reason = f"{-best[0] / (1 + ROUGH):,.0f} {unit} roughly, which others were nearer the front with"
        else:
            reason = f"not simulated: at most {-best[0]:,.0f} {unit} by its bound"
        self._note(option, option.state or "left", reason)

    @property
    def _unit(self) -> str:
        return "tokens/s" if self.tokens else "samples/s"

    def _objectives(self, candidate: PlanCandidate, bound: Bound, tokens: int) -> tuple[float, ...]:
        """The best this candidate can be."""
        rate = candidate.batch * tokens / bound.step_s
        gpu_rates = self.rates_of(candidate)
        cost = (
            math.inf
            if gpu_rates.usd_per_gpu_hour is None
            else gpu_rates.usd_per_gpu_hour * candidate.gpus / HOUR / rate
        )
        joules = least_joules(gpu_rates, bound) * candidate.gpus
        return (-rate, cost, float(candidate.gpus), joules / (rate * bound.step_s))

    def _broken(self, rate: float, usd_per_day: float, sure: str = "") -> str:
        """The limit that a rate breaks, in words; empty where it keeps them. ``usd_per_day`` : infinite where no price
        is known."""
        limits = self.plan.limits
        if limits.tokens is None:
            return ""
        days = limits.tokens / rate / DAY
        trained = f"{limits.tokens:.3g} {'tokens' if self.tokens else 'samples'}"
        if limits.deadline is not None and days * DAY > float(limits.deadline):
            allowed = float(limits.deadline) / DAY
            return f"takes {sure}{days:,.1f} days for {trained}; {allowed:,.1f} allowed"
        if limits.budget_usd is not None and math.isinf(usd_per_day):
            return "has no price, so nobody knows whether it keeps the budget: give usd_per_gpu_hour"
        if limits.budget_usd is not None and (usd := usd_per_day * days) > limits.budget_usd:
            return f"costs {sure}{usd:,.0f} USD for {trained}; {limits.budget_usd:,.0f} allowed"
        return ""

    def beaten_by(self, option: PlanOption, *, rough: bool) -> PlanOption | None:
        """A simulated option that beats the best this one can be, with errors and without, in room in memory as well;
        one of another machine, number of nodes, strategy or dtype only where enough is known of this one's: each has
        its best in the answer."""
        best = self.best[option.candidate.number]
        tight = self._tight(option)
        if self._better.first((*at_worst(best, option.error), tight), robust=True) is None:
            return None
        by = self._better.first((*best, tight))
        if by is None or not self._settled(option, self.options[by], rough=rough):
            return None
        return self.options[by]

    def _settled(self, option: PlanOption, other: PlanOption, *, rough: bool) -> bool:
        """Whether what beats an option may rule it out: its own machine and size has one that is as fast as it can be,
        or had its runs; and so has its sort there, a strategy with its numbers."""
        place = self.sieve.place(option.candidate)
        fastest_possible = -self.best[option.candidate.number][0]
        rates_there = self._rates[place, "", rough]
        sort_here = place, option.candidate.form.sort, rough
        # What may run out of memory is no answer for its sort where another has room.
        alike = self._rates[sort_here] if self._tight(option) else self._roomy_rates[sort_here]
        enough = (
            len(rates_there) >= (OUTSIDE if rough else FINALISTS) or max(rates_there, default=0.0) >= fastest_possible
        )
        if self.sieve.place(other.candidate) == place:
            enough = True
        return enough and len(alike) >= (FINALISTS if rough else 1)

    def rule_out(self, option: PlanOption, by: PlanOption) -> None:
        """Note that it need not be simulated, or not whole."""
        rate = -self.best[option.candidate.number][0]
        reason = f"even at its bound of {rate:,.0f} {self._unit} it is beaten by"
        if option.state == "rough":
            reason = f"roughly {rate / (1 + ROUGH):,.0f} {self._unit}: it is beaten by"
        self._note(option, option.state or "bound", reason, by.candidate.number)

    def take(self, rows: Mapping[int, SweepRow], *, rough: bool) -> None:
        """Rows of simulated candidates, by number."""
        for number, row in rows.items():
            option = self.options[number]
            if rough and row.error is not None and row.error.kind == PassesDiffer.__name__:
                continue  # it is played
            if row.result is None:
                self._note(option, "error", row.error.message if row.error else "")
                continue
            result = row.result if row.result.phase_shares else with_shares(row.result, option.bound)
            # A whole model's step from few passes is the whole run's: it is not run again.
            nearly = rough and result.few_passes is None
            option = self.options[number] = self._simulated(option, result, "rough" if nearly else "simulated")
            slack = ROUGH if nearly else 0.0
            if nearly:
                self.best[number] = at_worst(option.objectives, -slack / (1 + slack))
            self._count(option, {rough, nearly})
            if not option.reason:
                worst = at_worst(option.objectives, slack)
                tight = self._tight(option)
                self._better.known[number] = (*worst, tight), (*at_worst(worst, option.error), tight)

    def _count(self, option: PlanOption, passes: Collection[bool]) -> None:
        """Of its place and its sort there, what was run: first runs, last ones, or both."""
        place = self.sieve.place(option.candidate)
        sort = option.candidate.form.sort
        for rough in passes:
            self._rates[place, "", rough].append(option.rate)
            self._rates[place, sort, rough].append(option.rate)
            if not self._tight(option):
                self._roomy_rates[place, sort, rough].append(option.rate)

    def _simulated(self, option: PlanOption, result: SweepFigures, state: str) -> PlanOption:
        candidate = option.candidate
        gpu_rates = self.rates_of(option.candidate)
        rate = candidate.batch * (self.seq_len or 1) / result.step_time_s
        if result.samples_per_s:
            rate = result.tokens_per_s or result.samples_per_s
        watts = watts_per_gpu(gpu_rates, result.step_time_s, result.compute_s, result.exposed_communication_s)
        spent = costs(gpu_rates, candidate.gpus, rate, watts)
        cost = math.inf if spent.usd_per_sample is None else spent.usd_per_sample
        energy = spent.kwh_per_sample * 3.6e6
        per_day = _per_day(spent)
        tokens = self.plan.limits.tokens
        days = None if tokens is None else tokens / rate / DAY
        usd = None if days is None or math.isinf(per_day) else days * per_day
        objectives = (-rate, cost, float(candidate.gpus), energy)
        return replace(
            option,
            state=state,
            reason=self._broken(rate, per_day),
            by=None,
            result=result,
            rate=rate,
            costs=spent,
            objectives=objectives,
            days=days,
            usd=usd,
        )

    def _know_errors(self, model: Model) -> None:
        """How far steps like each option's were from their predictions; of several kinds of GPU, the most."""

        @cache
        def error(kind: str, place: Place, dtype: str) -> float:
            """Median relative error of such predictions on this place's GPUs, of several kinds the largest."""
            topology, _ = self.sieve.machines[place]
            return max(trust_in(kind, node.gpu, dtype).p50 for node in topology.node_types)

        @cache
        def peak(place: Place, dtype: str) -> float:
            """Mean peak of this place's GPUs [FLOP/s]."""
            topology, _ = self.sieve.machines[place]
            return fmean(node.gpu.peak[node.gpu.runs_as(dtype)] for node in topology.node_types)

        of_block = block_flops(model)
        graphs = self.plan.run.get("cuda_graph", ())
        for number, option in enumerate(self.options):
            form = option.candidate.form
            dtype = str(form.recipe.get("dtype") or self.dtype)
            place = self.sieve.place(option.candidate)
            ranks = form.degrees["tp"] * form.degrees["cp"]
            flops = option.candidate.played[0] * of_block
            work = called_work(flops, ranks, peak(place, dtype), graphs) if form.split else math.inf
            away = offloads(form.strategy)
            kind = step_kind(str(form.strategy["kind"]), model, split=form.split, work=work, offloads=away)
            error_there = error(kind, place, dtype)
            self.options[number] = replace(option, kind=kind, error=error_there)

    @property
    def dtype(self) -> str:
        """Of options whose recipe says none."""
        return str(self.plan.model.get("dtype", "fp32"))

    def _note(self, option: PlanOption, state: str, reason: str, by: int | None = None) -> None:
        number = option.candidate.number
        self.options[number] = replace(option, state=state, reason=reason, by=by)

    def done(self) -> SearchResult:
        """All of it, judged."""
        tops = {(self.plan.machines[m].label, n): top for (m, n), (top, _) in self.sieve.machines.items()}
        gpus = {(self.plan.machines[m].label, n): mesh.world_size for (m, n), (_, mesh) in self.sieve.machines.items()}
        flops, left_out = self._of_model()
        return SearchResult(
            tuple(self.options),
            self.rates,
            self.tokens,
            self.combined,
            topologies=tops,
            gpus=gpus,
            untried=left_out,
            flops=flops,
            dtype=self.dtype,
        ).judged()

    def _of_model(self) -> tuple[float, tuple[str, ...]]:
        """FLOPs of a sample, and what is usual and not tried; nothing of a model that cannot be read."""
        options = [option.candidate for option in self.options]
        gpus = {kind.device: kind.gpu for top, _ in self.sieve.machines.values() for kind in top.node_types}
        with suppress(ClusterSimError):
            flops = model_of(scenario_of(self.plan, self.path, options[0])).flops_per_sample()
            left_out = untried(self.plan, self.path, options, [gpus[name] for name in sorted(gpus)])
            return flops, tuple(left_out)
        return 0.0, ()

    def keeps(self, option: PlanOption) -> bool:
        """Whether a simulated option keeps the limits."""
        return not self._broken(option.rate, _per_day(option.costs))


def _per_day(spent: RunningCosts | None) -> float:
    return math.inf if spent is None or spent.usd_per_hour is None else 24.0 * spent.usd_per_hour
