"""What measurements say of their machine, and the topology file that carries it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

import numpy as np

from clustersim.calibrate.fit.host import HostTimes
from clustersim.calibrate.fit.solve import FitResult, fit
from clustersim.calibrate.fit.structures import Explained
from clustersim.cluster import files as fabrics
from clustersim.core.arrays import Floats
from clustersim.core.calibrated import Calibration

MARK = "# Written by `clustersim calibrate`."
"""The first line of a calibrated topology's file, by which it is known again."""


@dataclass(frozen=True, eq=False)
class Calibrated:
    """What measurements say of their machine.

    Parameters
    ----------
    fits : by part. cores : of a node, where ranks ran on them, else 0. calibration : the fitted constants.
    held_out : (n,) |relative error| of a part's rows, each predicted from the other half of the sizes. noise : see
        :func:`clustersim.calibrate.captured.noise`.
    sizes : (n,) bytes of NCCL's rows; empty without. skipped : rows left out, by reason. explained : how the machine
        differs from its file, if it does; ``tried``, what was played to find that out. doubts : sentences on what logs
        do not say and what is taken instead, and on logs that contradict each other.
    """

    fits: tuple[FitResult, ...]
    cores: int
    calibration: Calibration
    held_out: Floats
    noise: float
    sizes: Floats = field(default_factory=lambda: np.empty(0))
    skipped: Mapping[str, int] = field(default_factory=dict)
    explained: Explained | None = None
    tried: str = ""
    doubts: tuple[str, ...] = ()


def topology_text(calibrated: Calibrated, name: str, extends: str) -> str:
    """The topology file of the calibrated machine."""
    lines = [
        MARK,
        f'name = "{name}"',
        f'title = "{extends}, calibrated on its own measurements"',
        f'extends = "{extends}"',
        "",
    ]
    if calibrated.cores:
        lines += ["[node]", f"cores = {calibrated.cores}", ""]
    if calibrated.explained is not None and calibrated.explained.written:
        lines += calibrated.explained.structure.lines()
    return "\n".join(lines) + "\n" + fabrics.calibration_text(calibrated.calibration)


def held_out(times: HostTimes, tables: Sequence[str]) -> Floats:
    """(n,) |relative error| of every row, predicted with constants fitted to the other half of its table's sizes.

    ``tables`` : (n,) which table each row is of.
    """
    errors = []
    for training_rows, unknown in permutations(halves(tables, [row.nbytes for row in times.rows])):
        if training_rows and unknown:
            fitted, rest = (
                replace(times, rows=tuple(times.rows[i] for i in indices)) for indices in (training_rows, unknown)
            )
            errors.append(np.abs(rest.predict(fit(fitted).values) / rest.measured - 1.0))
    return np.concatenate(errors) if errors else np.empty(0)


def halves(tables: Sequence[str], sizes: Sequence[float]) -> tuple[list[int], list[int]]:
    """Rows of every second size of each table, and the others."""
    sizes_of: dict[str, list[float]] = {}
    for table, size in sorted(set(zip(tables, sizes, strict=True))):
        sizes_of.setdefault(table, []).append(size)
    parts: tuple[list[int], list[int]] = ([], [])
    for i in sorted(range(len(tables)), key=lambda i: (tables[i], sizes[i])):
        parts[sizes_of[tables[i]].index(sizes[i]) % 2].append(i)
    return parts
