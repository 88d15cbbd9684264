"""A Program on machines of several kinds of GPU: each rank computes at its own GPU's pace, kernel by kernel.

A Program is built for each kind of GPU as if all ranks had it. What happens is the same each time, only how long it
takes differs, so that each rank's times can be taken from the Program of its own kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from clustersim.arrays import Floats, Ints
from clustersim.device import Device
from clustersim.errors import ScenarioError
from clustersim.mix import Mix, total
from clustersim.model import StepCost
from clustersim.program import Compute, Op, Program


class Kind(msgspec.Struct, frozen=True, eq=False):
    """GPUs of one kind: the ``device``, what a step ``cost``s on it, and the ``ranks`` that drive one, ascending."""

    device: Device
    cost: StepCost
    ranks: Ints


def mean_peak(kinds: Sequence[Kind], dtype: str) -> float:
    """Dense peak [FLOP/s] of a GPU, mean over ranks: what the MFU of a mixed machine is of."""
    peaks = np.array([kind.device.peak[kind.device.runs_as(dtype)] for kind in kinds])
    return float(np.average(peaks, weights=[len(kind.ranks) for kind in kinds]))


def joined(programs: Sequence[Program], kinds: Sequence[Kind], peak: float) -> Program:
    """One Program from those of each kind of GPU, in the same order; ``peak`` : of :func:`mean_peak`.

    Raises :class:`ScenarioError` where what happens, not only how long it takes, depends on the kind.
    """
    first, *others = programs
    kind_of = np.zeros(first.world_size, dtype=np.int64)
    for number, kind in enumerate(kinds):
        kind_of[kind.ranks] = number
    roles = []
    for n, role in enumerate(first.roles):
        alike = [one.roles[n].ops for one in others if len(one.roles) == len(first.roles)]
        if any(len(ops) != len(role.ops) for ops in alike) or len(alike) < len(others):
            raise ScenarioError("kinds of GPU that are mixed need the same schedule; name one that no times decide")
        mine = kind_of[role.ranks]
        ops = tuple(_op(each, mine, peak) for each in zip(role.ops, *alike, strict=True))
        roles.append(replace(role, ops=ops))
    return replace(first, roles=tuple(roles))


def _op(each: Sequence[Op], kind_of: Ints, peak: float) -> Op:
    """An op with each rank's time from its own kind's."""
    first = each[0]
    if not isinstance(first, Compute) or len(set(kind_of.tolist())) == 1:
        return each[int(kind_of[0])] if len(kind_of) else first
    columns = [np.broadcast_to(np.asarray(op.duration, dtype=np.float64), kind_of.shape) for op in each]  # type: ignore[union-attr]
    seconds: Floats = np.choose(kind_of, columns)
    mixes = [op.mix for op in each if isinstance(op, Compute) and op.mix is not None]
    mix = _mean(mixes, kind_of, first.flops / peak) if len(mixes) == len(each) else None
    return msgspec.structs.replace(first, duration=seconds, mix=mix)


def _mean(mixes: Sequence[Mix], kind_of: Ints, executed: float) -> Mix:
    """What a rank spends its time on, in the mean; its FLOPs are at the mean peak, as the MFU has them."""
    share = np.bincount(kind_of, minlength=len(mixes)) / len(kind_of)
    mean = total(mix.times(part) for mix, part in zip(mixes, share.tolist(), strict=True))
    at_peak = min(executed, mean.peak) if mean.again else executed
    return msgspec.structs.replace(mean, peak=at_peak, products=mean.products + mean.peak - at_peak)
