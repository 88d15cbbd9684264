"""How long steps take where ranks vary: over steps, and over machines that could have been had instead.

A step is played by the step simulator. Where thousands are asked for, or the world is large, some are, and the others
lie on the line through them: a step is later than one that does not vary by a multiple of what its busiest rank has to
compute more, ``T = T_0 + b (max_r w_r - max_r w_r0)``. For data parallelism with one barrier b is 1. How far the steps
that were played lie from the line is told with the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import ScenarioError
from clustersim.core.mesh import Mesh
from clustersim.core.program import COMPUTE_STREAM, Compute, Program, seconds
from clustersim.core.timeline import Timeline
from clustersim.core.variation import DrawnVariation
from clustersim.scenario import Scenario
from clustersim.scenario.run.altered import draw, micro_batches, varied
from clustersim.scenario.run.running import Prepared
from clustersim.studies.what_if.rerun import step_time

SLOWEST = 0.005
"""Share of hosts that MegaScale found to be slow, and removed."""
AT_ONCE = 25
"""Steps of one play: its memory grows with them."""
FEWEST = 3
"""Steps that are played at least."""
OP = 5e-5
RANK = 3.2e-7
"""CPU seconds of an op, and of each of its ranks."""


@dataclass(frozen=True)
class Distribution:
    """Times [s]: their mean, percentiles, and the 201 quantiles from the smallest to the largest, to be drawn."""

    mean: float
    p50: float
    p95: float
    p99: float
    quantiles: tuple[float, ...]

    @classmethod
    def of(cls, times: Floats) -> Distribution:
        """Of times in whatever shape."""
        p50, p95, p99 = np.percentile(times, [50, 95, 99]).tolist()
        every = np.percentile(times, np.linspace(0, 100, 201), method="inverted_cdf")
        return cls(float(times.mean()), p50, p95, p99, tuple(every.tolist()))


@dataclass(frozen=True, eq=False)
class StepSpread:
    """Times of steps of several machines.

    Parameters
    ----------
    still : a step in which nothing varies [s]. times : (machines, steps) [s].
    played : how many of them were simulated; the others lie on the line. slope, error : b of the line, and how far what
        was played lies from it (root mean square, relative); 1 and 0 where all were played.
    """

    still: float
    times: Floats
    played: int
    slope: float = 1.0
    error: float = 0.0

    @property
    def of_machines(self) -> Floats:
        """(machines,) [s], the mean step of each."""
        means: Floats = self.times.mean(axis=1)
        return means

    @property
    def within(self) -> float:
        """Standard deviation of a step on one and the same machine, over its mean."""
        return float(np.sqrt(self.times.var(axis=1).mean()) / self.times.mean())


def spread(
    scenario: Scenario,
    machines: int = 20,
    steps: int = 50,
    *,
    best: float = 0.0,
    budget: float = 20.0,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> StepSpread:
    """Steps of a scenario with ``[run.variation]`` on so many machines, each with GPUs and hosts of its own.

    best : share of the slowest hosts that others took the place of.
    budget : CPU seconds, about, for steps that are played. tell : called with (machines played, in all).

    Raises :class:`ScenarioError` without variation, or where ranks do not wait for each other in every step.
    """
    v = scenario.file.run.variation
    if v is None:
        raise ScenarioError(
            f"{scenario.path}: nothing varies; add a table [run.variation] "
            "(`clustersim schema scenario` lists its keys)"
        )
    if not scenario.strategy.together(scenario.config):
        raise ScenarioError(f"{scenario.path}: ranks do not step together, so a step has no one length (at $.strategy)")
    period = scenario.strategy.period_of(scenario.config)
    if period > 1:
        raise ScenarioError(
            f"{scenario.path}: ranks wait for each other only every {period} steps, and how late a step is follows "
            "from a barrier in each (at $.strategy)"
        )
    plain = scenario.changed({"run.jitter": 0.0})
    still = plain.prepare()
    base = step_time(still.run().timeline)
    every = [draw(scenario, still.topology, still.mesh, steps=steps, machine=m, best=best) for m in range(machines)]
    if all(variation is None for variation in (every[0].pace, every[0].lengths, every[0].pauses)):
        return StepSpread(base, np.full((machines, steps), base), 0)
    work = _RankWork.of(still)
    late = np.array([work.late(drawn_step, still.mesh) for drawn_step in every])
    affordable = max(FEWEST, int(budget / _cost(still)))
    if late.size <= affordable:
        times = []
        for done, drawn_step in enumerate(every):
            tell(done, machines)
            times.append(_play(plain, drawn_step, np.arange(steps)))
        return StepSpread(base, np.array(times), late.size)
    tell(0, 1)
    chosen = _across(late.ravel(), affordable)
    played = _play(plain, _rows(every), chosen)
    x = late.ravel()[chosen]
    slope = float(x @ (played - base) / (x @ x)) if x.any() else 1.0
    error = float(np.sqrt(np.mean((played / (base + slope * x) - 1.0) ** 2)))
    return StepSpread(base, base + slope * late, len(chosen), slope, error)


def _cost(prepared: Prepared) -> float:
    """CPU seconds, about, of playing a step in which ranks differ."""
    ops = sum(len(role.ops) * (OP + RANK * len(role.ranks)) for role in prepared.program.roles)
    return ops / prepared.scenario.steps


def _across(late: Floats, n: int) -> Ints:
    """n steps from the whole range of how late they are, whose places the order of draws does not decide."""
    order = np.argsort(late, kind="stable")
    return np.sort(order[np.linspace(0, late.size - 1, n).round().astype(int)])


def _rows(every: Sequence[DrawnVariation], rows: Ints | None = None) -> DrawnVariation:
    """Draws one behind the other; of them ``rows``, or all."""

    def of(name: str) -> Floats | None:
        """The chosen rows of a column, None where it is not drawn."""
        columns = [getattr(drawn_step, name) for drawn_step in every]
        return None if columns[0] is None else np.concatenate(columns)[slice(None) if rows is None else rows]

    return DrawnVariation(*(of(name) for name in DrawnVariation.__dataclass_fields__))


def _play(plain: Scenario, variation: DrawnVariation, rows: Ints) -> Floats:
    """(n,) [s] of these steps: some at once, behind some like the first of them that nobody counts."""
    warm = min(2, plain.steps - 1)
    times = []
    for begin in range(0, len(rows), AT_ONCE):
        chunk = rows[begin : begin + AT_ONCE]
        prepared = plain.changed({"run.steps": len(chunk) + warm}).prepare()
        program = varied(prepared.program, _rows([variation], np.append(chunk[:1].repeat(warm), chunk)), prepared.mesh)
        times.append(_lengths(replace(prepared, program=program).run().timeline)[warm:])
    return np.concatenate(times)


def _lengths(timeline: Timeline) -> Floats:
    """(steps,) [s] from the end of the step before to the end of each; of the first from its begin."""
    number = timeline.op_steps
    ops = timeline.per_op()
    ends = np.array([ops["end"][(number == k) & (ops["ranks"] > 0)].max() for k in np.unique(number)])
    begin = float(ops["ready"][ops["ranks"] > 0].min())
    return np.diff(ends, prepend=begin)


@dataclass(frozen=True, eq=False)
class _RankWork:
    """What each rank computes in a step: (ranks,) [s], of micro-batches (micro-batches, ranks) and of the rest."""

    rest: Floats
    passes: Floats

    @classmethod
    def of(cls, prepared: Prepared) -> _RankWork:
        """Of the first step that is like the others."""
        program: Program = prepared.program
        step = min(1, prepared.scenario.steps - 1)
        count = prepared.scenario.config.gradient_accumulation_steps
        rest = np.zeros(program.world_size)
        passes = np.zeros((count, program.world_size))
        for role in program.roles:
            batch_of = dict(micro_batches(role))
            for i, op in enumerate(role.ops):
                if isinstance(op, Compute) and op.paced and op.step == step and op.stream == COMPUTE_STREAM:
                    into = passes[batch_of[i]] if i in batch_of else rest
                    into[role.ranks] += seconds(role, op)
        return cls(rest, passes)

    def late(self, variation: DrawnVariation, mesh: Mesh) -> Floats:
        """(steps,) [s]: how much more the busiest rank has to do in each than where nothing varies."""
        ranks = slice(0, mesh.workers)
        rest = self.rest[ranks]
        passes = self.passes[:, ranks]
        replica = mesh.coordinates("dp")
        usual = rest + passes.sum(axis=0)
        late = []
        steps = next(
            lengths.shape[0] for lengths in (variation.pace, variation.lengths, variation.pauses) if lengths is not None
        )
        for k in range(steps):
            work = (
                usual if variation.lengths is None else rest + (passes * variation.lengths[k][:, replica]).sum(axis=0)
            )
            work = work if variation.pace is None else work * variation.pace[k]
            late.append(float((work if variation.pauses is None else work + variation.pauses[k]).max() - usual.max()))
        return np.array(late)
