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
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from clustersim.holding import Holding, always, piling_up
from clustersim.mesh import Ints, Mesh
from clustersim.model import Model, StepCost
from clustersim.program import COMPUTE_STREAM, DTYPE_BYTES, Compute, Program
from clustersim.strategies import base
from clustersim.strategies.primitives import collective
from clustersim.timeline import Timeline
from clustersim.topology import Topology

Floats = npt.NDArray[np.float64]

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


def build(model: Model, cost: StepCost, mesh: Mesh, config: StepsOfSGDConfig, steps: int, seed: int) -> Program:
    """The Program of ``steps`` steps on all ranks; see the module's docstring."""
    base.check(model, cost, steps)
    n, group = mesh.world_size, mesh.world_group()
    ops, paces = base.OpList(), base.pace(cost.jitter, steps, n, seed)
    parameters = float(model.parameters * DTYPE_BYTES[config.param_dtype])
    batch = n * config.gradient_accumulation_steps * config.micro_batch_size * base.sample_bytes(model)
    last: tuple[int, ...] = ()
    if n > 1:
        last = (collective(ops, "broadcast", "model", parameters, group, dtype=config.param_dtype),)
    for step in range(steps):
        base.begin_step(ops, cost, step)
        before = tuple(dict.fromkeys((*last, *_here(ops))))
        parts = (collective(ops, "scatter", "batch", batch, group, before, dtype="uint8"),) if n > 1 else before
        for micro_step in range(config.gradient_accumulation_steps):
            base.forward(ops, model, cost, () if micro_step else parts)
            base.backward(ops, model, cost)
            if micro_step:
                ops.compute("accumulate gradients", base.gradient_pass(3.0 * parameters, cost), "gradient")
        last = _exchange_and_update(ops, cost, config, group, parameters)
    notes = f"sgd_steps: {n} ranks, gradients by {config.exchange}, nothing overlaps"
    return base.program(ops, mesh, cost, (notes, *cost.notes), paces)


def _here(ops: base.OpList) -> tuple[int, ...]:
    return (len(ops.ops) - 1,) if ops.ops else ()


def _exchange_and_update(
    ops: base.OpList, cost: StepCost, config: StepsOfSGDConfig, group: Ints, parameters: float
) -> tuple[int, ...]:
    """Phases 5 to 7; returns what the next step waits for."""
    n, dtype = group.shape[1], config.param_dtype
    if n == 1:
        return (ops.compute("update", cost.optimizer, "optimizer"),)

    def exchange(kind: str, nbytes: float) -> int:
        pins = config.algorithm, config.protocol
        return collective(
            ops, kind, "gradients", nbytes, group, _here(ops), dtype=dtype, algorithm=pins[0], protocol=pins[1]
        )

    if config.exchange == "all_reduce":
        done = exchange("all_reduce", parameters)
        return (ops.compute("update", cost.optimizer, "optimizer", after=(done,)),)
    if config.exchange == "reduce":
        done = exchange("reduce", parameters)
    else:
        done = exchange("gather", n * parameters)
        summing = base.gradient_pass((n + 1) * parameters, cost)
        done = _at_root(ops, "sum gradients", summing, "gradient", n, done, (n + 1) * parameters)
    updated = _at_root(ops, "update", cost.optimizer, "optimizer", n, done)
    return (collective(ops, "broadcast", "parameters", parameters, group, (updated,), dtype=dtype),)


def _at_root(ops: base.OpList, name: str, seconds: float, phase: str, n: int, after: int, nbytes: float = 0.0) -> int:
    """Work that rank 0 does while the others have none."""
    spent = np.zeros(n)
    spent[0] = seconds
    return ops.add(Compute(name, spent, COMPUTE_STREAM, (after,), phase, "memory", 0.0, nbytes, ops.step))


def holding(model: Model, mesh: Mesh, config: StepsOfSGDConfig) -> Holding:
    """What rank 0 keeps: everything, and everybody's gradients where they are gathered."""
    element, n = DTYPE_BYTES[config.param_dtype], len(model.layers)
    gradients = piling_up(np.array([float(layer.parameters * element) for layer in model.layers]))
    gathered, whole = always(0.0, n), float(model.parameters)
    if config.exchange == "gather" and mesh.workers > 1:
        gathered[-1] = mesh.workers * whole * element
    return Holding(whole * element, whole, 0.0, element, gradients, always(0.0, n), gathered)


def report(program: Program, timeline: Timeline, topology: Topology, mesh: Mesh, config: Any) -> dict[str, Any]:
    """``phases``: in order, each with ``seconds`` (of the last step, from its first op's start to its last op's end,
    over all ranks), ``bound`` (what limited most of it) and ``idle`` (the share of it in which a GPU computed nothing,
    mean over GPUs)."""
    last = max(op.step for op in timeline.ops)
    begin: dict[str, float] = {}
    end: dict[str, float] = defaultdict(float)
    busy: dict[str, float] = defaultdict(float)
    bounds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    starts, ends, spent = _worked(timeline)
    for o, op in enumerate(timeline.ops):
        phase, seconds = phase_of(op.name), float(spent[o])
        if phase is None or not seconds or (op.step != last and phase != "copy the model"):
            continue
        begin[phase] = min(begin.get(phase, np.inf), float(starts[o]))
        end[phase] = max(end[phase], float(ends[o]))
        busy[phase] += seconds * (op.kind == "compute")
        bounds[phase][op.bound] += seconds
    found = []
    for phase in dict.fromkeys(PHASES.values()):
        if phase in begin:
            seconds, bound = end[phase] - begin[phase], bounds[phase]
            idle = 1.0 - busy[phase] / (mesh.world_size * seconds) if seconds else 0.0
            found.append(
                {"phase": phase, "seconds": seconds, "bound": max(bound, key=lambda b: bound[b]), "idle": idle}
            )
    return {"phases": found}


def _worked(timeline: Timeline) -> tuple[Floats, Floats, Floats]:
    """(n_ops,) each: first start, last end and seconds [s] of the ranks it took any time, not those that hand over."""
    _, op, _, _, start, end = timeline._rows()
    first, last = np.full(len(timeline.ops), np.inf), np.full(len(timeline.ops), -np.inf)
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


STRATEGY = base.Strategy("sgd_steps", StepsOfSGDConfig, build, report=report, holding=holding)
