"""What measurements say of their machine, and the topology file that carries it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from clustersim import fabrics
from clustersim.arrays import Floats
from clustersim.calibrated import Calibration
from clustersim.calibration.fit.solve import Fit

MARK = "# Written by `clustersim calibrate`."
"""The first line of a calibrated topology's file, by which it is known again."""


@dataclass(frozen=True, eq=False)
class Calibrated:
    """What measurements say of their machine.

    Parameters
    ----------
    fits : by part. cores : of a node, where ranks ran on them, else 0. calibration : the fitted constants.
    held_out : (n,) |relative error| of a part's rows, each predicted from the other half of the sizes. noise : see
        :func:`clustersim.calibration.captured.noise`.
    sizes : (n,) bytes of NCCL's rows; empty without. skipped : rows left out, by reason.
    """

    fits: tuple[Fit, ...]
    cores: int
    calibration: Calibration
    held_out: Floats
    noise: float
    sizes: Floats = field(default_factory=lambda: np.empty(0))
    skipped: Mapping[str, int] = field(default_factory=dict)


def topology_text(found: Calibrated, name: str, extends: str) -> str:
    """The topology file of the calibrated machine."""
    lines = [
        MARK,
        f'name = "{name}"',
        f'title = "{extends}, calibrated on its own measurements"',
        f'extends = "{extends}"',
        "",
    ]
    if found.cores:
        lines += ["[node]", f"cores = {found.cores}", ""]
    return "\n".join(lines) + "\n" + fabrics.calibration_text(found.calibration)
