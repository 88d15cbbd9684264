"""Rounds of simulations: candidates to a sweep's workers, rows back, and none simulated twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from clustersim.planner.candidates import Candidate, base, scenario_of
from clustersim.planner.spec import PlanFile
from clustersim.sweeps.driving import Driver
from clustersim.sweeps.left import Task
from clustersim.sweeps.row import Fingerprints, version
from clustersim.sweeps.running import compute
from clustersim.sweeps.store import Store


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
        self.plan, self.path, self.append, self.team = plan, path, append, team
        self.rows: dict[str, dict[str, Any]] = {row["key"]: row for row in store.rows()}
        self.prints = Fingerprints()

    def run(self, chosen: Sequence[Candidate]) -> dict[int, dict[str, Any]]:
        """Rows by number; of one that killed its worker each time, the row says so."""
        tasks: dict[str, Task] = {}
        keys: dict[int, str] = {}
        for candidate in chosen:
            known = self.prints(scenario_of(self.plan, self.path, candidate))
            keys[candidate.number] = known.key
            if known.key not in self.rows:
                tasks[known.key] = Task(known, dict(candidate.changes))

        def took(lines: Sequence[bytes]) -> None:
            self.append(lines)
            for line in lines:
                row: dict[str, Any] = msgspec.json.decode(line)
                self.rows[row["key"]] = row

        driver: Driver[Task] = Driver(self.team, partial(compute, base(self.plan), str(self.path), version()), took)
        driver.run(iter(list(tasks.values())))
        for task, error in driver.given_up:
            self.rows[task.identity.key] = {
                "error": {"class": "lost", "message": f"its worker died each time: {error}"}
            }
        return {number: self.rows[key] for number, key in keys.items()}
