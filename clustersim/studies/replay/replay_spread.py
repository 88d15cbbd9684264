"""How much ranks that do the same work differ, and what their copies take: drawn, so that many wait for the slowest.

Copies that took as long as the measured ranks would wait as those did, however many they are; of more ranks the slowest
is slower. The time of a rank in a step is its kernels' and its host's, without what it waits for. It is log-normal
around the mean of those that average gradients with one another; how wide is read from them, step by step (the unbiased
variance of logarithms, pooled). Of one replica alone nothing is known, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.program import Compute, Op
from clustersim.core.timeline import Timeline
from clustersim.studies.replay.replay_scale import ReplayGroups

StepSeconds = Mapping[int, Mapping[int, float]]
"""Of each measured rank, what it takes [s] in each step."""
SEED = 0
"""Of the draws: the same trace gives the same replay."""


@dataclass(frozen=True)
class CopySpread:
    """What copies take.

    Parameters
    ----------
    sigma : standard deviation of the logarithm of a rank's time in a step; 0 where nobody knows it.
    usual : of each measured rank and step, the mean of its peers over its own time.
    replicas : measured ranks that were compared with one another, at most.
    unknown : why nobody knows how much replicas differ.
    """

    sigma: float = 0.0
    usual: Mapping[tuple[int, int], float] = field(default_factory=dict)
    replicas: int = 1
    unknown: str = "only one of them was measured"

    def factors(self, rank: int, step: int, copies: int) -> Floats:
        """(copies,) what each copy of a measured rank takes in a step over what the rank took."""
        draws = np.random.default_rng((SEED, rank, step)).standard_normal(copies)
        return self.usual.get((rank, step), 1.0) * np.exp(self.sigma * draws)

    def note(self) -> str:
        """What is assumed, in a sentence."""
        if self.replicas < 2:
            return (
                f"not known: how much replicas differ: {self.unknown}; copies take as long as what they are copies of, "
                "so the wait for the slowest does not grow"
            )
        return (
            f"from the trace: {self.replicas} replicas differ by {self.sigma:.1%} (standard deviation); from the "
            "model: copies are drawn from that, so the slowest of more is slower; what it delays ends one step "
            "later and may shorten the next, never the run"
        )


def spread_of(measured: Timeline, groups: ReplayGroups, seconds: StepSeconds, stages: Mapping[int, int]) -> CopySpread:
    """Of measured ranks that average gradients with one another, and are of one stage of a pipeline.

    ``seconds`` : of :func:`own_seconds`. ``stages`` : of each measured rank, -1 for none.
    """
    squares = 0.0
    freedom = 0
    replicas = 1
    usual: dict[tuple[int, int], float] = {}
    peers = _peers(measured, groups, stages)
    for alike in peers:
        replicas = max(replicas, len(alike))
        for step in sorted({step for rank in alike for step in seconds[rank]}):
            times = {rank: seconds[rank][step] for rank in alike if seconds[rank].get(step, 0.0) > 0}
            if len(times) < 2:
                continue
            logs = np.log(list(times.values()))
            squares += float(((logs - logs.mean()) ** 2).sum())
            freedom += len(times) - 1
            usual |= {(rank, step): float(np.exp(logs.mean())) / took for rank, took in times.items()}
    if freedom:
        return CopySpread(float(np.sqrt(squares / freedom)), usual, replicas)
    if replicas > 1:
        return CopySpread(unknown=f"no step of {replicas} measured ranks has work of two of them")
    if not peers and len(stages) > 1:
        return CopySpread(
            unknown=f"{len(stages)} ranks were measured, and no collective that was read tells whether they average "
            "gradients with one another"
        )
    return CopySpread()


def own_seconds(ops: Sequence[Op], kept: frozenset[int]) -> dict[int, float]:
    """What a rank's own work takes [s] in each step; ``kept`` : ops that are communication as long as measured."""
    seconds: dict[int, float] = {}
    for i, op in enumerate(ops):
        if isinstance(op, Compute) and i not in kept:
            seconds[op.step] = seconds.get(op.step, 0.0) + float(np.mean(op.duration))
    return seconds


def _peers(measured: Timeline, groups: ReplayGroups, stages: Mapping[int, int]) -> list[list[int]]:
    """Measured ranks that average gradients with one another, each in the smallest such group that it is in, by
    stage: stages do other work."""
    world = tuple(range(measured.world_size))
    smallest: dict[int, tuple[int, ...]] = {}
    for i, grows in sorted(groups.grows.items()):
        members = tuple(measured.ops[i].detail.get("members", ())) or world
        for rank in members if grows else ():
            if len(members) < len(smallest.get(rank, (*world, -1))):
                smallest[rank] = members
    alike: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for rank, stage in sorted(stages.items()):
        if rank in smallest:
            alike.setdefault((smallest[rank], stage), []).append(rank)
    return list(alike.values())
