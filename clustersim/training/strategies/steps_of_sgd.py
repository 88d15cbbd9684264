"""Distributed SGD, one step at a time, with nothing overlapped: what every other strategy rearranges.

1. *copy the model*: rank 0's parameters to everybody, once;
2. *scatter the batch*: rank 0 reads it and hands out the parts;
3. *forward* and 4. *backward* on every rank's part;
5. *gather gradients* at rank 0, which adds them up (``exchange``: ``"gather"``), or let the network add them up on the
   way (``"reduce"``), or give everybody the sum (``"all_reduce"``, then everybody updates and step 7 falls away);
6. *update* the parameters;
7. *broadcast* them again.

Each phase waits for the one before. The report says of each how long it took, what bound it, and what share of it GPUs
stood idle. ``algorithm`` picks how an all_reduce is done, from the naive ways to the good ones: ``sequential`` (one
device after the other), ``direct`` (everyone to everyone), ``ring_unsplit``, ``ring``, ``tree``, ``hierarchical``...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.holding import Holding, always
from clustersim.core.mesh import Mesh
from clustersim.core.model import Model
from clustersim.core.program import COMPUTE_STREAM, DTYPE_BYTES, Compute, Program
from clustersim.core.timeline import Timeline
from clustersim.core.topology import Topology
from clustersim.core.units import format_time
from clustersim.training.strategies import base
from clustersim.training.strategies.primitives import collective
from clustersim.training.strategies.walk import WholeModelHooks, walked

PHASES = {
    "broadcast model": "copy the model",
    "scatter batch": "scatter the batch",
    "input": "scatter the batch",
    "fwd": "forward",
    "bwd": "backward",
    "accumulate": "backward",
    "gather gradients": "exchange gradients",
    "reduce gradients": "exchange gradients",
    "all_reduce gradients": "exchange gradients",
    "sum gradients": "exchange gradients",
    "update": "update",
    "broadcast parameters": "broadcast parameters",
}
"""Phase by how an op's name begins, in order."""


class StepsOfSGDConfig(base.StrategyConfig, frozen=True, tag_field="kind", tag="sgd_steps"):
    """Knobs of plain distributed SGD.

    Parameters
    ----------
    exchange : how gradients become one: ``"gather"``, ``"reduce"`` or ``"all_reduce"``.
    algorithm, protocol : pins for that exchange, as NCCL_ALGO and NCCL_PROTO.
    """

    exchange: Literal["gather", "reduce", "all_reduce"] = "gather"
    algorithm: str | None = None
    protocol: str | None = None

    def __post_init__(self) -> None:
        if self.exchange == "gather" and (self.algorithm or self.protocol):
            raise ValueError("a gather is plain sends; algorithm and protocol need exchange = 'reduce' or 'all_reduce'")


class SGD(WholeModelHooks[StepsOfSGDConfig]):
    """The hooks of one rank. ``last`` : what the next scatter waits for."""

    def __post_init__(self) -> None:
        dtype, self.group = self.config.param_dtype, self.mesh.world_group()
        self.n, self.parameters = self.mesh.world_size, float(self.model.parameters * DTYPE_BYTES[dtype])
        self.last: tuple[int, ...] = ()
        if self.n > 1:
            self.last = (collective(self.ops, "broadcast", "model", self.parameters, self.group, dtype=dtype),)

    def begin_step(self) -> None:
        """Scatter the batch."""
        before = tuple(dict.fromkeys((*self.last, *self.ops.here)))
        samples = self.n * self.config.gradient_accumulation_steps * self.config.micro_batch_size
        batch = samples * base.sample_bytes(self.model)
        self.ops.waits = (
            (collective(self.ops, "scatter", "batch", batch, self.group, before, dtype="uint8"),)
            if self.n > 1
            else before
        )

    def finish(self) -> None:
        """Phases 5 to 7."""
        ops = self.ops
        cost = self.cost
        parameters = self.parameters
        if self.n == 1:
            self.last = (ops.compute("update", cost.optimizer, "optimizer"),)
            return
        if self.config.exchange == "all_reduce":
            done = self._exchange("all_reduce", parameters)
            self.last = (ops.compute("update", cost.optimizer, "optimizer", after=(done,)),)
            return
        if self.config.exchange == "reduce":
            done = self._exchange("reduce", parameters)
        else:
            done = self._exchange("gather", self.n * parameters)
            traffic = (self.n + 1) * parameters
            done = self._at_root("sum gradients", base.gradient_pass(traffic, cost), "gradient", done, traffic)
        updated = self._at_root("update", cost.optimizer, "optimizer", done)
        dtype = self.config.param_dtype
        self.last = (collective(ops, "broadcast", "parameters", parameters, self.group, (updated,), dtype=dtype),)

    def _exchange(self, kind: str, nbytes: float) -> int:
        config = self.config
        ops = self.ops
        return collective(
            ops,
            kind,
            "gradients",
            nbytes,
            self.group,
            ops.here,
            dtype=config.param_dtype,
            algorithm=config.algorithm,
            protocol=config.protocol,
        )

    def _at_root(self, name: str, seconds: float, phase: str, after: int, nbytes: float = 0.0) -> int:
        """Work that rank 0 does while the others have none."""
        spent = np.zeros(self.n)
        spent[0] = seconds
        return self.ops.add(Compute(name, spent, COMPUTE_STREAM, (after,), phase, "memory", 0.0, nbytes, self.ops.step))

    def notes(self) -> tuple[str, ...]:
        """How gradients become one."""
        return (f"sgd_steps: {self.n} ranks, gradients by {self.config.exchange}, nothing overlaps",)


def holding(model: Model, mesh: Mesh, config: StepsOfSGDConfig) -> Holding:
    """What rank 0 keeps: everything, and everybody's gradients where they are gathered."""
    base_holding = base.whole(model, config)
    gathered = always(0.0, len(model.layers))
    if config.exchange == "gather" and mesh.workers > 1:
        gathered[-1] = mesh.workers * base_holding.parameters
    return msgspec.structs.replace(base_holding, buffers=gathered)


class Phase(msgspec.Struct, frozen=True):
    """A phase of the last step: ``seconds`` from its first op's start to its last op's end, over all ranks; ``bound``,
    what limited most of it; ``idle``, the share of it in which a GPU computed nothing, mean over GPUs."""

    phase: str
    seconds: float
    bound: str
    idle: float


class Phases(msgspec.Struct, frozen=True):
    """The phases of a step, in order."""

    phases: list[Phase]

    def lines(self) -> Iterator[str]:
        """For people."""
        for phase in self.phases:
            took = format_time(phase.seconds)
            yield f"phase {phase.phase}: {took}, {phase.bound}-bound, GPUs idle for {phase.idle:.0%} of it"


def report(program: Program, timeline: Timeline, topology: Topology, mesh: Mesh, config: Any) -> Phases:
    """The phases of a run's last step."""
    last = max(op.step for op in timeline.ops)
    begin: dict[str, float] = {}
    end: dict[str, float] = defaultdict(float)
    busy: dict[str, float] = defaultdict(float)
    bounds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    starts, ends, spent = _worked(timeline)
    for o, op in enumerate(timeline.ops):
        phase = phase_of(op.name)
        seconds = float(spent[o])
        if phase is None or not seconds or (op.step != last and phase != "copy the model"):
            continue
        begin[phase] = min(begin.get(phase, np.inf), float(starts[o]))
        end[phase] = max(end[phase], float(ends[o]))
        busy[phase] += seconds * (op.kind == "compute")
        bounds[phase][op.bound] += seconds
    phases = []
    for phase in dict.fromkeys(PHASES.values()):
        if phase in begin:
            seconds = end[phase] - begin[phase]
            bound = bounds[phase]
            idle = 1.0 - busy[phase] / (mesh.world_size * seconds) if seconds else 0.0
            phases.append(Phase(phase, seconds, max(bound, key=lambda b: bound[b]), idle))
    return Phases(phases)


def _worked(timeline: Timeline) -> tuple[Floats, Floats, Floats]:
    """(n_ops,) each: first start, last end and seconds [s] of the ranks it took any time, not those that hand over."""
    _, op, _, _, start, end = timeline._rows()
    first = np.full(len(timeline.ops), np.inf)
    last = np.full(len(timeline.ops), -np.inf)
    took = end > start
    np.minimum.at(first, op[took], start[took])
    np.maximum.at(last, op[took], end[took])
    for block in timeline.blocks:
        took = block.end > block.start
        first[block.op] = np.where(took, block.start, np.inf).min(initial=first[block.op])
        last[block.op] = np.where(took, block.end, -np.inf).max(initial=last[block.op])
    return first, last, timeline.per_op()["seconds"]


def phase_of(name: str) -> str | None:
    """The phase an op belongs to.

    >>> phase_of("fwd layers.3"), phase_of("sum gradients")
    ('forward', 'exchange gradients')
    """
    return next((phase for start, phase in PHASES.items() if name.startswith(start)), None)


build = walked(SGD)
STRATEGY = base.Strategy("sgd_steps", StepsOfSGDConfig, build, report=report, holding=holding)
