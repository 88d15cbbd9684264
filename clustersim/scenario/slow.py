"""Ranks whose GPU is slower than the others: throttled, power-capped, or shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from clustersim.arrays import Floats
from clustersim.errors import ScenarioError
from clustersim.program import Compute, Op, Program
from clustersim.scenario.schema import Slow

_GPU_BOUNDS = frozenset({"compute", "memory"})
"""What a slower GPU stretches; launches and input are the host's."""


def slowed(program: Program, slow: Sequence[Slow], workers: int) -> Program:
    """The Program on a machine with slow GPUs: what their kernels bound takes ``1 / speed`` times as long.

    Raises :class:`ScenarioError` for a rank beyond the ``workers`` that drive a GPU.
    """
    factor = np.ones(program.world_size)
    for i, one in enumerate(slow):
        for rank in one.ranks:
            if not 0 <= rank < workers:
                raise ScenarioError(
                    f"no rank {rank}: the run has ranks 0..{workers - 1} (at $.cluster.slow[{i}].ranks)"
                )
            factor[rank] /= one.speed
    if np.all(factor == 1):
        return program
    roles = tuple(
        replace(role, ops=tuple(_slowed(op, factor[role.ranks]) for op in role.ops)) for role in program.roles
    )
    return replace(program, roles=roles)


def _slowed(op: Op, factor: Floats) -> Op:
    if not isinstance(op, Compute) or op.bound not in _GPU_BOUNDS or np.all(factor == 1):
        return op
    return msgspec.structs.replace(op, duration=np.asarray(op.duration, dtype=np.float64) * factor)
