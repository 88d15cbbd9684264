"""Rounds of simulations: candidates to a sweep's workers, rows back, and none simulated twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from clustersim import scenario
from clustersim.core.memory_use import Verdict
from clustersim.core.texts import Table
from clustersim.scenario.run.held import held
from clustersim.scenario.run.identity import Fingerprints, identity, version
from clustersim.scenario.run.parts import model_of
from clustersim.studies.plan.candidates import PlanCandidate, base, scenario_of
from clustersim.studies.plan.spec import PlanFile
from clustersim.studies.sweep.driving import Driver
from clustersim.studies.sweep.left import ScenarioTask
from clustersim.studies.sweep.row import (
    Failure,
    FewPasses,
    FullestMemory,
    HotLink,
    SweepFigures,
    SweepRow,
    failure,
    line,
    row_of,
)
from clustersim.studies.sweep.running import compute, timed
from clustersim.studies.sweep.store import Store
from clustersim.studies.what_if.amounts import StepAmounts, busiest_first
from clustersim.studies.what_if.folded import folded
from clustersim.studies.what_if.folded_passes import KINDS, PLAYED, PassesDiffer, folded_passes
from clustersim.studies.what_if.rerun import Factors

SKETCHED = "sketched"
FOLDED = "roughly folded"
FEW_PASSES = "few passes with all figures"
WHOLE = "whole"
"""How near a run is to the whole one: see :mod:`clustersim.studies.what_if.folded`, and of whole models
:mod:`clustersim.studies.what_if.folded_passes`."""
TURNED = "turned"
"""Of a run on a machine with other rates, what they are multiplied by: a field of its inputs."""
MOST_PASSES = 300_000
"""Passes through a layer, of all ranks, up to which a split model is run whole: 20 CPU seconds and half a GiB."""

USUAL_PASSES = 30_000
"""The same of a run of a usual size: how much work it is beside another is told by it."""


def roughly(
    fidelity: str, base: Table, path: str, expected: str, tasks: Sequence[ScenarioTask]
) -> tuple[float, list[bytes]]:
    """In a worker: (seconds, a line for each task), of steps that say their time alone."""

    def row(task: ScenarioTask) -> bytes:
        """A task's line."""
        task_scenario = scenario.from_table(base, path, task.changes)
        return line(task.identity, _rough(task_scenario, fidelity, task.identity.inputs))

    return timed("plan", expected, tasks, row)


def _rough(loaded: scenario.Scenario, fidelity: str, inputs: Table) -> SweepFigures | Failure:
    try:
        if fidelity == FEW_PASSES:
            return _of_few_passes(loaded)
        step = folded(loaded, roughly=True, sketched=fidelity == SKETCHED, factors=inputs.get(TURNED))
    except MemoryError:
        raise  # of this machine, not of the scenario
    except Exception as error:
        return failure(error, loaded.path.parent)
    return _bare(StepAmounts(step.step_time_s, 0.0, 0.0), step.ranks[1], step.memory)


def _of_few_passes(loaded: scenario.Scenario) -> SweepFigures:
    """Of a whole model's step as it is, and what one pass more adds."""
    parts = held(loaded)
    few = folded_passes(parts)
    figures = _bare(few.step, parts.mesh.workers, parts.verdict)
    config = parts.scenario.config
    samples_of_pass = config.rank_samples / config.gradient_accumulation_steps * parts.mesh.size("dp")
    samples = few.passes * samples_of_pass / few.step.step_time_s
    tokens = samples * parts.model.tokens if parts.model.tokens else None
    needed = parts.model.flops_per_sample() * samples / parts.mesh.workers
    return msgspec.structs.replace(
        figures,
        samples_per_s=samples,
        tokens_per_s=tokens,
        tokens_per_s_per_gpu=tokens and tokens / parts.mesh.workers,
        mfu=needed / few.peak_flops,
        hfu=few.step.flops / few.step.step_time_s / few.peak_flops,
        phase_shares=few.step.phase_shares,
        hottest_links=_hottest(few.step, {name: parts.topology.rate_words_named(name) for name in few.step.links}),
        few_passes=FewPasses(few.passes, few.step, few.each),
    )


def _hottest(step: StepAmounts, words: Mapping[str, str]) -> list[HotLink]:
    """Links of a step; ``words`` : of what their share is, by name."""
    links = busiest_first(step.links)
    return [HotLink(name, step.links[name] / step.step_time_s, words[name]) for name in links]


def _with_passes(row: SweepRow, passes: int) -> SweepRow:
    """A row of few passes, as one of so many."""
    result = row.result
    if result is None or result.few_passes is None or passes <= result.few_passes.passes:
        return row
    few = result.few_passes
    if few.each is None:
        return SweepRow(row.key, error=Failure(PassesDiffer.__name__, "its passes do not repeat"))
    step = few.step.with_more(passes - few.passes, few.each)
    # As many samples for each pass, as many FLOPs as were executed, in the time that it takes.
    faster = few.step.step_time_s / step.step_time_s
    rate = faster * passes / few.passes
    executed = faster * step.flops / few.step.flops if few.step.flops else 0.0
    told = msgspec.structs.replace(
        result,
        step_time_s=step.step_time_s,
        compute_s=step.compute_s,
        exposed_communication_s=step.exposed_communication_s,
        samples_per_s=rate * result.samples_per_s,
        tokens_per_s=result.tokens_per_s and rate * result.tokens_per_s,
        tokens_per_s_per_gpu=result.tokens_per_s_per_gpu and rate * result.tokens_per_s_per_gpu,
        mfu=result.mfu and rate * result.mfu,
        hfu=result.hfu and executed * result.hfu,
        phase_shares=step.phase_shares,
        hottest_links=_hottest(step, {link.link: link.of for link in result.hottest_links}),
    )
    return SweepRow(row.key, told)


def _bare(spent: StepAmounts, gpus: int, verdict: Verdict | None) -> SweepFigures:
    """The figures of a step of which nothing else was looked at."""
    memory = FullestMemory()
    if verdict is not None:
        memory = FullestMemory(verdict.room, verdict.use.needed, verdict.use.needed_range, verdict.host)
    return SweepFigures(
        step_time_s=spent.step_time_s,
        gpus=gpus,
        fits=True,
        compute_s=spent.compute_s,
        exposed_communication_s=spent.exposed_communication_s,
        peak_memory_bytes=0.0 if verdict is None else verdict.use.total,
        memory=memory,
        samples_per_s=0.0,
        phase_shares={},
        hottest_links=[],
    )


class Runner:
    """Simulates candidates, a round at a time; rows that are in the store are read from it."""

    def __init__(
        self,
        plan: PlanFile,
        path: str | Path,
        store: Store,
        append: Callable[[Sequence[bytes]], None],
        team: Any,
    ) -> None:
        self.plan = plan
        self.path = path
        self.append = append
        self.team = team
        self.rows = {row.key: row for row in store.rows()}
        self.prints = Fingerprints()
        self.run_table = base(plan)["run"]
        self.layers = len(model_of(scenario.from_table(base(plan), path)).layers)

    def fidelity(self, candidate: PlanCandidate, *, rough: bool) -> str:
        """How an option is run, first (``rough``) and last. Traffic of sharded parameters runs beside everything, so
        that a sketch says nothing of them; and a whole model's few passes say all."""
        if rough:
            if not candidate.form.split and candidate.form.strategy["kind"] in KINDS:
                return FEW_PASSES
            return SKETCHED if candidate.form.strategy["kind"] == "ddp" else FOLDED
        few = candidate.gpus * self._stage_passes(candidate) <= MOST_PASSES
        return WHOLE if not candidate.form.split or few else FOLDED

    def _stage_passes(self, candidate: PlanCandidate) -> float:
        """Passes through a layer, of a rank, in all steps."""
        passes = candidate.played[1] * 2 * int(self.run_table["steps"])
        return self.layers / candidate.form.degrees["pp"] * passes

    def work(self, candidate: PlanCandidate, *, rough: bool) -> float:
        """How much an option's run is, of a mean one of its sort: a whole run grows with GPUs and passes."""
        if self.fidelity(candidate, rough=rough) != WHOLE:
            return 1.0
        return max(1.0, self._stage_passes(candidate) * candidate.gpus / USUAL_PASSES)

    def run(
        self, chosen: Sequence[PlanCandidate], *, rough: bool, factors: Factors | None = None
    ) -> dict[int, SweepRow]:
        """Rows by number, of first runs (``rough``) or last ones; of one that killed its worker, the row says so.

        ``factors`` : of first runs, what rates of the machine are multiplied by.
        """
        rows: dict[int, SweepRow] = {}
        how_of = {candidate.number: self.fidelity(candidate, rough=rough) for candidate in chosen}
        if factors:  # a machine with other rates is played
            how_of = {number: FOLDED if how == FEW_PASSES else how for number, how in how_of.items()}
        for how in (SKETCHED, FOLDED, FEW_PASSES, WHOLE):
            such = [candidate for candidate in chosen if how_of[candidate.number] == how]
            if how == FEW_PASSES:  # one run is of all numbers of passes
                few = [msgspec.structs.replace(one, played=(one.played[0], min(one.played[1], PLAYED))) for one in such]
                told = self._run(few, how, factors)
                rows |= {one.number: _with_passes(told[one.number], one.played[1]) for one in such}
            else:
                rows |= self._run(such, how, factors)
        return rows

    def _run(self, chosen: Sequence[PlanCandidate], fidelity: str, factors: Factors | None) -> dict[int, SweepRow]:
        tasks: dict[str, ScenarioTask] = {}
        keys: dict[int, str] = {}
        for candidate in chosen:
            fingerprint = self.prints(scenario_of(self.plan, self.path, candidate))
            if fidelity != WHOLE:
                turned = {TURNED: dict(factors)} if factors else {}
                fingerprint = identity({**fingerprint.inputs, "fidelity": fidelity, **turned}, fingerprint.files)
            keys[candidate.number] = fingerprint.key
            if fingerprint.key not in self.rows:
                tasks[fingerprint.key] = ScenarioTask(fingerprint, candidate.changes)

        def took(lines: Sequence[bytes]) -> None:
            """Write rows, and know them."""
            self.append(lines)
            for text in lines:
                row = row_of(text, "a worker's row")
                self.rows[row.key] = row

        known_as = base(self.plan), str(self.path), version()
        work = partial(compute, *known_as) if fidelity == WHOLE else partial(roughly, fidelity, *known_as)
        driver: Driver[ScenarioTask] = Driver(self.team, work, took)
        driver.run(iter(list(tasks.values())))
        for task, error in driver.given_up:
            known_as_lost = Failure("lost", f"its worker died each time: {error}")
            self.rows[task.identity.key] = SweepRow(task.identity.key, error=known_as_lost)
        return {number: self.rows[key] for number, key in keys.items()}
