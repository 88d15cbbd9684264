"""Rounds of simulations: candidates to a sweep's workers, rows back, and none simulated twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from clustersim import scenario
from clustersim.core.texts import Table
from clustersim.scenario.run.identity import Fingerprints, identity, version
from clustersim.scenario.run.parts import model_of
from clustersim.studies.plan.candidates import PlanCandidate, base, scenario_of
from clustersim.studies.plan.spec import PlanFile
from clustersim.studies.sweep.driving import Driver
from clustersim.studies.sweep.left import ScenarioTask
from clustersim.studies.sweep.row import Failure, FullestMemory, SweepFigures, SweepRow, failure, line, row_of
from clustersim.studies.sweep.running import compute, timed
from clustersim.studies.sweep.store import Store
from clustersim.studies.what_if.folded import folded
from clustersim.studies.what_if.rerun import Factors

SKETCHED = "sketched"
FOLDED = "roughly folded"
WHOLE = "whole"
"""How near a run is to the whole one: see :mod:`clustersim.studies.what_if.folded`."""
TURNED = "turned"
"""Of a run on a machine with other rates, what they are multiplied by: a field of its inputs."""
MOST_PASSES = 300_000
"""Passes through a layer, of all ranks, up to which a split model is run whole: 20 CPU seconds and half a GiB."""


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
        step = folded(loaded, roughly=True, sketched=fidelity == SKETCHED, factors=inputs.get(TURNED))
    except MemoryError:
        raise  # of this machine, not of the scenario
    except Exception as error:
        return failure(error, loaded.path.parent)
    verdict = step.memory
    if verdict is None:
        memory = FullestMemory()
    else:
        memory = FullestMemory(verdict.room, verdict.use.shown, verdict.use.shown_range, verdict.host)
    return SweepFigures(
        step_time_s=step.step_time_s,
        gpus=step.ranks[1],
        fits=True,
        compute_s=0.0,
        exposed_communication_s=0.0,
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
        that a sketch says nothing of them."""
        if rough:
            return SKETCHED if candidate.form.strategy["kind"] == "ddp" else FOLDED
        stage_passes = (
            self.layers / candidate.form.degrees["pp"] * candidate.played[1] * 2 * int(self.run_table["steps"])
        )
        return WHOLE if not candidate.form.split or candidate.gpus * stage_passes <= MOST_PASSES else FOLDED

    def run(
        self, chosen: Sequence[PlanCandidate], *, rough: bool, factors: Factors | None = None
    ) -> dict[int, SweepRow]:
        """Rows by number, of first runs (``rough``) or last ones; of one that killed its worker, the row says so.

        ``factors`` : of first runs, what rates of the machine are multiplied by.
        """
        rows: dict[int, SweepRow] = {}
        for how in (SKETCHED, FOLDED, WHOLE):
            rows |= self._run(
                [candidate for candidate in chosen if self.fidelity(candidate, rough=rough) == how], how, factors
            )
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
