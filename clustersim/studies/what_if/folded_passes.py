"""The step of a whole model with many passes, from a run of few: every pass between the first and the last is alike.

Replicas of a whole model do the same at the same time, so that the ranks of one node stand for all
(:mod:`clustersim.training.builder.representative`). Of a step's passes four are played: where everything that the third
one does, on every stream, ends as long after the same of the second, the run repeats itself from there on, and each
further pass adds as much again. That is looked at, op by op; where it is not so, everything is played.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from clustersim.cluster.files.leaves import spread
from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import ClusterSimError, ProgramError
from clustersim.core.program import Collective, Program
from clustersim.core.timeline import Timeline
from clustersim.explain.metrics import steady_window
from clustersim.explain.occupancy import occupancy
from clustersim.scenario import Scenario
from clustersim.scenario.run.held import ScenarioParts
from clustersim.scenario.run.played import play
from clustersim.scenario.run.running import prepare_held
from clustersim.training.builder.representative import Representative, representative

PLAYED = 4
"""Passes of a step: the first, two that are compared, and the last."""
STEADY = 2
"""Steps until one is like the one before, of strategies that do in their first what they do in each."""
EVEN = 1e-9
"""How far intervals between two passes may differ, relatively: they are sums of thousands of times."""
KINDS = frozenset({"fsdp", "zero"})
"""Strategies of which each step is like the first."""


class SpentSeconds(NamedTuple):
    """Of a step, or of what one pass more adds to it, mean over ranks [s]."""

    step_time_s: float
    compute_s: float
    exposed_communication_s: float

    def with_more(self, passes: int, each: SpentSeconds) -> SpentSeconds:
        """Of a step with so many ``passes`` more, ``each`` of which adds as much."""
        return SpentSeconds(*(seconds + passes * added for seconds, added in zip(self, each, strict=True)))


@dataclass(frozen=True)
class FoldedPasses:
    """A whole model's step of so many ``passes``, on so many ``ranks`` that were played; and what ``each`` pass more
    adds, None where passes do not repeat, or are too few to tell."""

    step: SpentSeconds
    each: SpentSeconds | None
    ranks: int
    passes: int

    def of(self, passes: int) -> SpentSeconds:
        """Of a step with so many passes. Raises :class:`PassesDiffer` where nothing tells."""
        if passes == self.passes:
            return self.step
        if self.each is None or passes < self.passes:
            raise PassesDiffer(f"a step of {passes} passes is not told by one of {self.passes}")
        return self.step.with_more(passes - self.passes, self.each)


def can_fold(scenario: Scenario) -> bool:
    """Whether a scenario's ranks, steps and passes may be alike: nothing of it is random, slow, changed or to fail."""
    file = scenario.file
    cluster = file.cluster
    run = file.run
    differ = cluster.slow or cluster.changes or cluster.measured or file.incident or run.tells_nccl or run.variation
    plain = run.fidelity == "flow" and not run.op_by_op and not run.jitter
    return scenario.strategy.name in KINDS and file.parallel is None and plain and not differ


class PassesDiffer(ClusterSimError):
    """A few passes of one node do not tell a step: it has to be played."""


def folded_passes(parts: ScenarioParts) -> FoldedPasses:
    """The step of a scenario that :func:`can_fold`, with as many passes, or :data:`PLAYED`.

    Raises :class:`PassesDiffer` where its ranks are not alike, and else as a run does.
    """
    scenario = parts.scenario
    if len({kind.device for kind in parts.topology.node_types}) > 1:
        raise PassesDiffer(f"{scenario.path}: its nodes have GPUs of several kinds")
    played = min(scenario.config.gradient_accumulation_steps, PLAYED)
    config = msgspec.structs.replace(scenario.config, gradient_accumulation_steps=played)
    few = replace(parts, scenario=replace(scenario, config=config))
    part = _standing_for_all(parts, prepare_held(few, steps=min(scenario.steps, STEADY)).program)
    timeline = play(scenario, part.program, parts.topology, part.mesh, whole=part.whole)
    window = steady_window(timeline)
    ranks = np.arange(part.mesh.workers, dtype=np.int64)
    step = _spent(timeline, ranks, window.begin, window.end)
    between = _between_passes(timeline, int(window.steps[-1])) if played == PLAYED else None
    each = None if between is None else _spent(timeline, ranks, *between)
    for seconds in (step, each):
        if seconds is not None and np.ptp(seconds, axis=1).max() > EVEN * seconds.max():
            raise PassesDiffer(f"{scenario.path}: its ranks differ, so that none stands for another")
    return FoldedPasses(_mean(step), None if each is None else _mean(each), len(ranks), played)


def _mean(seconds: Floats) -> SpentSeconds:
    return SpentSeconds(*seconds.mean(axis=1).tolist())


def _standing_for_all(parts: ScenarioParts, program: Program) -> Representative:
    """The ranks of the first node, where all nodes' do the same: each is joined to the others alike, and no collective
    has a rank of its own to go to. Else all ranks."""
    everybody: Ints = np.arange(program.world_size, dtype=np.int64)
    rooted = any(isinstance(op, Collective) and op.root for role in program.roles for op in role.ops)
    if not rooted and len(program.roles) == 1 and len(spread(parts.topology)) < 2:
        try:
            return representative(program, parts.mesh, everybody[: parts.mesh.nproc_per_node])
        except ProgramError:
            pass  # groups are not alike in how many ranks of a node they have
    return Representative(program, parts.mesh, {})


def _spent(timeline: Timeline, ranks: Ints, begin: float, end: float) -> Floats:
    """(3, ranks) seconds between two times: all of them, those in which a rank computes, and those in which it
    communicates and does not."""
    states = occupancy(timeline, ranks, begin, end)
    kernels = states["compute_s"] - states["loads_s"]  # as a run's summary has it
    return np.stack([np.full(len(ranks), end - begin), kernels, states["exposed_communication_s"]])


def _between_passes(timeline: Timeline, step: int) -> tuple[float, float] | None:
    """The end of the second pass of a step of :data:`PLAYED`, and of the third, where each op of the one ends as long
    after the same op of the other; None where some do not."""
    ends = timeline.per_op()["end"]
    same: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for op, end in zip(timeline.ops, ends.tolist(), strict=True):
        if op.step == step:
            same[op.kind, op.stream, op.name].append(end)
    passes = [np.reshape(times, (PLAYED, -1)) for times in same.values() if len(times) % PLAYED == 0]
    if not passes:
        return None
    first, second, third = (np.concatenate([times[k] for times in passes]) for k in (0, 1, 2))
    later = third - second
    if np.ptp(later) > EVEN * float(later.max()):
        return None
    # What has a name of its own cannot be compared: transfers may pile up in it.
    others = np.array([end for times in same.values() if len(times) % PLAYED for end in times])
    if np.any((others > first.max()) & (others <= third.max())):
        return None
    return float(second.max()), float(third.max())
