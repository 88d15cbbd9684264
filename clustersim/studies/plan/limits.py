"""What an option can at best be, before it is simulated: its memory exactly, its time from below."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from clustersim.collectives.base import Group, Request
from clustersim.collectives.bounds import lower_bound
from clustersim.core.arrays import Floats, Ints
from clustersim.core.economics import GpuRates
from clustersim.core.memory_parts import part_label
from clustersim.core.memory_states import DOES_NOT_FIT, UNLIKELY
from clustersim.core.program import COMPUTE_STREAM, Collective, Compute, Op, Role, Serve, seconds
from clustersim.core.units import format_bytes
from clustersim.core.variation import usual
from clustersim.scenario.run.held import ScenarioParts
from clustersim.scenario.run.running import Prepared, prepare_held, sampled_step
from clustersim.studies.sweep.row import SweepFigures

SLACK = 0.97
"""A step is measured where its slowest rank ends; another rank may be ahead by its skew, so that a little less than all
of its work falls into the window."""


STEADY = 2
"""Steps until one has the kernels and collectives of the one before, of a strategy with a period of one."""


@dataclass(frozen=True)
class Bound:
    """Seconds that no run of a step beats: ``compute_s`` of kernels alone, ``step_s`` of kernels or transfers.

    Of a split model also what ``step_s`` is made of beside kernels: ``exposed_s``, exchanges inside the model that
    kernels wait for; ``ramp_s``, the pipeline's bubble; ``data_s``, of data parallelism; and ``held``, bytes by stage.
    ``runs_out`` : how likely it takes more memory than there is, at the least. ``folds`` : of a whole model, whether a
    few passes may tell its step (:mod:`clustersim.studies.what_if.folded_passes`).
    """

    compute_s: float
    step_s: float
    exposed_s: float = 0.0
    ramp_s: float = 0.0
    data_s: float = 0.0
    held: tuple[float, ...] = ()
    runs_out: float = 0.0
    folds: bool = False

    @property
    def tight(self) -> float:
        """1 where it is known to have no room to spare, 0 where it may have: one more objective, smaller is better."""
        return float(self.runs_out >= UNLIKELY)


def too_much(held_parts: ScenarioParts, margin: float) -> str:
    """Why it does not fit with ``margin`` of its GPUs' memory left free, or not in its hosts', without building its
    Program; empty where it does."""
    verdict = held_parts.verdict
    if verdict.host.state == DOES_NOT_FIT:
        return verdict.host.in_words
    total = verdict.use.total / verdict.share if verdict.share else 0.0
    missing = verdict.use.total - (1.0 - margin) * total
    if missing <= 0:
        return ""
    most = list(verdict.use.at_peak().items())[:2]
    parts = ", ".join(f"{part_label(name)} {format_bytes(nbytes)}" for name, nbytes in most)
    return f"needs {format_bytes(verdict.use.total)} of {format_bytes(total)}, {margin:.0%} kept free ({parts})"


def step_bound(prepared: Prepared) -> Bound:
    """From the Program: of the last step, the kernels of the compute stream that every rank has, and for each other
    stream the physical bounds of its collectives one after another (:mod:`clustersim.collectives.bounds`)."""
    last = max(op.step for role in prepared.program.roles for op in role.ops)
    least = LeastTransfers(prepared)
    compute = np.inf
    communication = 0.0
    for role in prepared.program.roles:
        if not any(isinstance(op, Compute) and op.phase == "forward" for op in role.ops):
            continue  # a server
        ops = [op for op in role.ops if op.step == last]
        streams = least.by_stream(ops)
        compute = min(compute, float(_busy(role, ops).min()))
        communication = max(communication, *streams.values(), 0.0)
    return _with_slack(compute if np.isfinite(compute) else 0.0, communication)


def _with_slack(compute: float, communication: float) -> Bound:
    return Bound(SLACK * compute, SLACK * max(compute, communication))


class SampledSteps:
    """Bounds of scenarios whose model is whole, told from a step in few passes that those of one key share.

    A key is of whatever a scenario's steps follow from but how many passes they have.
    """

    def __init__(self) -> None:
        self._bills: dict[object, _SampleBill | None] = {}

    def bound(self, parts: ScenarioParts, key: object = None) -> Bound:
        """:func:`step_bound` of a scenario whose model is whole, from the fewest steps and passes that say it.

        ``key`` : hashable; None where the scenario shares with no other.
        """
        passes = parts.scenario.config.gradient_accumulation_steps
        whole_key = key, passes > 1
        if key is None or whole_key not in self._bills:
            self._bills[whole_key] = _bill(parts)
        bill = self._bills[whole_key]
        return _written_out(parts) if bill is None else bill.bound(passes)


@dataclass(frozen=True)
class _SampleBill:
    """What the two parts of a :class:`StepSample` take at least: ``paced``, ``fixed`` kernels [s], at the fastest
    rank's ``pace`` and at any; and by stream."""

    pace: float
    kernels: tuple[tuple[float, float], ...]
    streams: tuple[dict[str, float], ...]

    def bound(self, passes: int) -> Bound:
        """Of a step of so many passes."""
        times = 1, max(passes - 2, 0)
        compute = sum(n * (fixed + paced * self.pace) for (paced, fixed), n in zip(self.kernels, times, strict=True))
        streams = defaultdict[str, float](float)
        for least, n in zip(self.streams, times, strict=True):
            for stream, least_s in least.items():
                streams[stream] += n * least_s
        return _with_slack(compute, max(streams.values(), default=0.0))


def _bill(parts: ScenarioParts) -> _SampleBill | None:
    """None where the step has to be written out: a rank has kernels of its own, or steps are not alike."""
    if parts.scenario.steps < STEADY or not _alike_in_every_step(parts):
        return None
    sampled = sampled_step(parts)
    if sampled is None:
        return None
    sample, cost = sampled
    both = sample.once, sample.between
    if not any(isinstance(op, Compute) and op.phase == "forward" for op in sample.once):
        return None
    if any(isinstance(op, Compute) and isinstance(op.duration, np.ndarray) for ops in both for op in ops):
        return None
    paces = usual(cost.jitter, 1, parts.mesh.world_size, parts.scenario.file.run.seed)
    least = LeastTransfers(parts)
    return _SampleBill(
        pace=1.0 if paces is None else float(paces.min()),
        kernels=tuple(map(_kernel_seconds, both)),
        streams=tuple(least.by_stream(ops) for ops in both),
    )


def _kernel_seconds(ops: Sequence[Op]) -> tuple[float, float]:
    """Of the compute stream, at the ranks' pace and at no pace [s], of ops whose durations are numbers."""
    paced = 0.0
    fixed = 0.0
    for op in ops:
        if isinstance(op, Compute) and not isinstance(op, Serve) and op.stream == COMPUTE_STREAM:
            if op.paced:
                paced += float(op.duration)
            else:
                fixed += float(op.duration)
    return paced, fixed


def _written_out(parts: ScenarioParts) -> Bound:
    """From a Program, of the fewest steps."""
    scenario = parts.scenario
    if scenario.steps > STEADY and not scenario.file.run.op_by_op and _alike_in_every_step(parts):
        prepared = prepare_held(parts, steps=STEADY)
        role = prepared.program.roles[0]
        by_rank = any(isinstance(op, Compute) and isinstance(op.duration, np.ndarray) for op in role.ops)
        if len(prepared.program.roles) == 1 and not by_rank:
            return step_bound(prepared)
    return step_bound(prepare_held(parts))


def _alike_in_every_step(parts: ScenarioParts) -> bool:
    """Whether a step, from the second on, is the one before with its ranks' paces dealt anew, which leaves the fastest
    rank's time as it is."""
    file = parts.scenario.file
    changed = file.cluster.slow or file.cluster.changes or file.incident or file.run.tells_nccl
    kinds = {parts.topology.node_types[i].device for i in parts.topology.vertex_node[parts.mesh.gpus].tolist()}
    period = parts.scenario.strategy.period_of(parts.scenario.config)
    return period == 1 and len(kinds) == 1 and file.run.variation is None and not changed


def _busy(role: Role, ops: Sequence[Op]) -> Floats:
    """(ranks,) seconds of kernels of the compute stream; those at the ranks' pace are added up before it is asked."""
    paced = 0.0
    busy = np.zeros(len(role.ranks))
    for op in ops:
        if isinstance(op, Compute) and not isinstance(op, Serve) and op.stream == COMPUTE_STREAM:
            if op.paced and isinstance(op.duration, float):
                paced += op.duration
            else:
                busy += seconds(role, op)
    pace = 1.0 if role.pace is None or not ops else role.pace[ops[0].step]
    total: Floats = busy + paced * pace
    return total


class LeastTransfers:
    """The least that collectives of one scenario take; those that ask for the same are asked once."""

    def __init__(self, parts: ScenarioParts) -> None:
        self._parts = parts
        self._groups: dict[int, tuple[Ints, Group]] = {}  # with the array, which is told by its identity
        self._seconds: dict[tuple[str, float, str, int, int], float] = {}

    def by_stream(self, ops: Sequence[Op]) -> dict[str, float]:
        """Seconds of each stream's collectives at least, one after another."""
        alike = Counter[tuple[str, str, float, str, int, int]]()
        for op in ops:
            if isinstance(op, Collective) and op.groups.shape[1] > 1:
                self._group(op.groups)
                alike[op.stream, op.kind, op.nbytes, op.dtype, op.root, id(op.groups)] += 1
        streams = defaultdict[str, float](float)
        for (stream, kind, nbytes, dtype, root, groups), count in alike.items():
            streams[stream] += count * self._least(kind, nbytes, dtype, root, groups)
        return streams

    def _group(self, groups: Ints) -> None:
        if id(groups) not in self._groups:
            parts = self._parts
            gpus = parts.mesh.gpus[groups[0]]
            self._groups[id(groups)] = groups, Group(parts.topology, gpus, parts.scenario.file.run.launch)

    def _least(self, kind: str, nbytes: float, dtype: str, root: int, groups: int) -> float:
        key = kind, nbytes, dtype, root, groups
        if key not in self._seconds:
            request = Request(kind, nbytes, dtype=dtype, root=root)
            self._seconds[key] = lower_bound(request, self._groups[groups][1])
        return self._seconds[key]


def least_joules(rates: GpuRates, bound: Bound) -> float:
    """Joules per GPU and step that no run with this bound undercuts."""
    p = rates.power
    waits = (bound.step_s - bound.compute_s) * min(p.communication, p.idle)
    return rates.limit_w * p.pue * (p.compute * bound.compute_s + waits + p.rest_of_machine * bound.step_s)


def with_shares(result: SweepFigures, bound: Bound | None) -> SweepFigures:
    """What a folded run says of its step: kernels and bubble as the bound has them, the rest is exchanges."""
    step = result.step_time_s
    least = bound or Bound(0.0, 0.0)
    compute = min(step, least.compute_s / SLACK)
    exposed = max(0.0, step - compute - least.ramp_s)
    shares = {"exposed_communication": exposed / step, "bubble": least.ramp_s / step}
    return replace(result, compute_s=compute, exposed_communication_s=exposed, phase_shares=shares)
