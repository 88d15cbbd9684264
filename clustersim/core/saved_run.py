"""A run with its machine and what was said of it: what pictures, pages and files of a run are made from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustersim.core.facts import UNKNOWN, RunFacts
from clustersim.core.timeline import Timeline
from clustersim.core.topology import Topology


@dataclass(frozen=True, eq=False)
class SavedRun:
    """A run as it was saved: its Timeline, the machine of its links, and what else was said of it."""

    timeline: Timeline
    topology: Topology | None = None
    facts: RunFacts = UNKNOWN

    def __repr__(self) -> str:
        return f"<SavedRun {self.facts.title}: {self.timeline!r}>"

    @property
    def memory(self) -> dict[str, float]:
        """Bytes one GPU holds while an op of that name runs; empty where nobody said."""
        course = self.facts.memory_course
        if course is None:
            return {}
        return dict(zip(course.moments, np.sum(list(course.columns().values()), axis=0).tolist(), strict=True))
