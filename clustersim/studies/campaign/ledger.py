"""What became of the time: parts that add up to the elapsed time, and goodput by everybody's definition."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from clustersim.core.arrays import Bools, Floats, Ints

PARTS = (
    "productive",
    "step variation",
    "checkpoint stalls",
    "evaluation",
    "maintenance",
    "detection",
    "waiting for nodes",
    "restart",
    "loading",
    "lost work",
)
"""Of elapsed time. ``productive`` is new steps at the scenario's own pace; ``step variation``, what slow hosts, varying
ranks and missing replicas add to them; ``lost work``, whatever was done since the save that a failure fell back to."""
PRODUCTIVE, VARIATION, STALLS, EVALUATION, MAINTENANCE, DETECTION, WAITING, RESTART, LOADING, LOST = range(len(PARTS))
PAUSES = np.array([MAINTENANCE, DETECTION, WAITING, RESTART, LOADING])
"""Parts of a pause, in the order in which they pass."""

GOODPUTS = {
    "effective_training_time": "new steps over elapsed time (Llama 3, MegaScale; Gemini calls it goodput)",
    "ettr": "new steps over elapsed time without the wait for nodes (Kokolis, queueing excluded)",
    "scheduling_goodput": "time with all resources over elapsed time (Google's ML productivity goodput)",
    "runtime_goodput": "new steps over time with all resources (Google)",
    "productivity_goodput": "scheduling x runtime x MFU of a step (Google); MFU is left out where it is not known",
    "availability": "time in which the job runs over elapsed time, whatever becomes of what it does",
}
"""Published definitions; they differ by one to three points."""


@dataclass(frozen=True, eq=False)
class ReplicaRuns:
    """Replicas of a campaign that were played.

    elapsed : (replicas,) [s]. ledger : (replicas, :data:`PARTS`) [s], whose rows add up to ``elapsed``.
    failures : (replicas,). finished : (replicas,) bool.
    """

    elapsed: Floats
    ledger: Floats
    failures: Ints
    finished: Bools

    def __len__(self) -> int:
        return len(self.elapsed)

    def part(self, name: str) -> Floats:
        """(replicas,) [s] of a part."""
        return self.ledger[:, PARTS.index(name)]

    def goodput(self, name: str, mfu: float | None = None) -> Floats:
        """(replicas,) of one of :data:`GOODPUTS`; ``mfu`` : of a step."""
        new = self.ledger[:, PRODUCTIVE] + self.ledger[:, VARIATION]
        available = self.elapsed - self.ledger[:, WAITING]
        stopped = self.ledger[:, PAUSES].sum(axis=1)
        productive = self.ledger[:, PRODUCTIVE]
        goodputs: dict[str, Floats] = {
            "effective_training_time": new / self.elapsed,
            "ettr": new / available,
            "scheduling_goodput": available / self.elapsed,
            "runtime_goodput": new / available,
            "productivity_goodput": productive / self.elapsed * (1.0 if mfu is None else mfu),
            "availability": 1.0 - stopped / self.elapsed,
        }
        return goodputs[name]


def joined(parts: list[ReplicaRuns]) -> ReplicaRuns:
    """Batches of replicas as one."""
    return ReplicaRuns(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ReplicaRuns.__dataclass_fields__)
    )


class Percentiles(msgspec.Struct, frozen=True):
    """Of a figure over replicas."""

    p5: float
    p50: float
    p95: float
    mean: float


def percentiles(values: Floats) -> Percentiles:
    """Of (replicas,) values."""
    low, middle, high = np.percentile(values, [5, 50, 95])
    return Percentiles(float(low), float(middle), float(high), float(values.mean()))
