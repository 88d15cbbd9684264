"""One claim, and what all of them are made of: runs with changes, and bytes that links carried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from clustersim.scenario import load
from clustersim.scenario.result import Result


@dataclass(frozen=True)
class Claim:
    """One row.

    Parameters
    ----------
    what : in words. formula : as the textbook writes it. source : where.
    says, found : by the formula, and by the run; both in bytes, or ratios where ``unit`` is "x"; "GB" and "MiB" say how
        bytes are written.
    within : how far apart the two may be, relative.
    """

    what: str
    formula: str
    source: str
    says: float
    found: float
    unit: str = "MiB"
    within: float = 1e-3

    @property
    def holds(self) -> bool:
        """Whether the run says what the formula says."""
        return abs(self.found - self.says) <= self.within * abs(self.says)


def run(scenario: str, **changes: Any) -> Result:
    """A shipped scenario with changes: ``cluster__nodes=4`` is ``cluster.nodes``."""
    return load(scenario, {key.replace("__", "."): value for key, value in changes.items()}).run()


def sent(result: Result) -> float:
    """Bytes that left a GPU in a step, by its links; on NVSwitch machines no GPU passes on another's bytes."""
    use, topology = result.timeline.links, result.prepared.topology
    if use is None or not use.transfer_op.size:
        return 0.0
    leaves = np.isin(topology.link_src, topology.gpus)
    return float(use.bytes_per_link()[leaves].sum()) / result.prepared.mesh.world_size / result.scenario.file.run.steps


def told(claim: Claim) -> tuple[str, str]:
    """What the formula says and what the run found, as text."""
    scale = {"GB": 1e9, "MiB": 2.0**20, "x": 1.0}[claim.unit]
    digits = 3 if claim.unit == "x" else 1
    return f"{claim.says / scale:.{digits}f} {claim.unit}", f"{claim.found / scale:.{digits}f} {claim.unit}"
