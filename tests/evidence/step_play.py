"""One measured run, played: what its step costs and how long the step takes on its machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import msgspec
import numpy as np

from clustersim.cluster import files as fabrics
from clustersim.core.memory_rates import host_bandwidth
from clustersim.core.memory_use import MemoryUse
from clustersim.core.mesh import Mesh
from clustersim.core.model import Model, StepCost
from clustersim.core.program import DTYPE_BYTES, Compute, Op, Program
from clustersim.core.texts import Table
from clustersim.core.topology import Topology
from clustersim.engine import simulate
from clustersim.explain import metrics
from clustersim.model.seconds import Execution, step_cost
from clustersim.scenario.run.hosts import host_copy_rates
from clustersim.training.memory import Training, memory
from clustersim.training.strategies import STRATEGIES, Strategy, StrategyConfig
from tests.evidence.step_rows import StepRun

STEPS = 5
"""Steps played per row: DDP's first has one bucket and the second follows the rebuild; three are averaged."""

FEWER = 3
"""Steps played of sharded ranks and of servers, whose steps are alike from the second on."""

SHARDED = frozenset(("fsdp", "zero"))
"""Strategies whose every micro-batch communicates."""

SEGMENTS = 24
"""Into how many pieces a model is cut where every piece is a send of every worker: overlap is as good as with all."""


def costs_of(run: StepRun) -> StepCost:
    """What a rank's step of this run costs."""

    def priced(how: Execution) -> StepCost:
        return step_cost(run.model, run.device, run.config.micro_batch_size, how, run.framework.constants())

    if not run.alternate:
        return priced(run.how)
    plain, full = (priced(replace(run.how, activation_checkpointing=policy)) for policy in ("none", "full"))
    odd = np.arange(len(run.model.layers)) % 2 == 1
    return replace(
        plain,
        backward=np.where(odd, full.backward, plain.backward),
        backward_flops=np.where(odd, full.backward_flops, plain.backward_flops),
        backward_mix=(),
    )


def scaled(cost: StepCost, factor: float) -> StepCost:
    """The same step with all of the device's work taking ``factor`` times as long."""
    return replace(
        cost,
        forward=cost.forward * factor,
        backward=cost.backward * factor,
        optimizer=cost.optimizer * factor,
        step_overhead=cost.step_overhead * factor,
    )


def step_time_as_priced(run: StepRun) -> float:
    """:func:`step_time` at this run's own costs. Rows that differ in what was measured only are played once."""
    return _as_priced(replace(run, measured=0.0))


@lru_cache(maxsize=1024)
def _as_priced(run: StepRun) -> float:
    """The same of a run of which nothing was measured."""
    return step_time(run, costs_of(run))


def step_time(run: StepRun, cost: StepCost) -> float:
    """Seconds of one optimizer step, played on the run's machine.

    Micro-batches under ``no_sync`` communicate nothing, so all but the last two are added rather than played; of
    sharded ranks, which communicate in each, two are played and the others take what the second adds. A rank alone
    waits for nobody, so its ops are added too.
    """
    if run.kind in SHARDED:
        first, *more = (_played(run, cost, count) for count in ((1,) if run.accumulation == 1 else (1, 2)))
        return first + sum((run.accumulation - 1) * (second - first) for second in more)
    played = min(run.accumulation, 2)
    alone = float(cost.forward.sum() + cost.backward.sum()) * (run.accumulation - played)
    if run.gpus == 1:
        _, mesh = machine(run.topology, run.nodes, run.gpus)
        alike = replace(cost, jitter=0.0)
        config = _of_passes(run, played)
        return alone + _computed(STRATEGIES[run.kind], run.model, alike, mesh, config)
    flattened = run.model.parameters * DTYPE_BYTES[run.how.param_dtype] / run.framework.flat_rate
    return alone + _played(run, cost, played) + (flattened if run.kind == "ddp" else 0.0)


def _computed(strategy: Strategy, model: Model, cost: StepCost, mesh: Mesh, config: StrategyConfig) -> float:
    """Seconds of kernels of one rank's step behind the first, mean over a period."""
    period = strategy.period_of(config)
    ops = strategy.build(model, cost, mesh, config, 1 + period, 0).roles[0].ops
    return sum(float(op.duration) for op in ops if isinstance(op, Compute) and op.step) / period


def _of_passes(run: StepRun, passes: int) -> StrategyConfig:
    return msgspec.structs.replace(run.config, gradient_accumulation_steps=passes)


def _played(run: StepRun, cost: StepCost, passes: int) -> float:
    """Seconds of a step of so many passes, all of them played."""
    strategy, (topology, mesh) = STRATEGIES[run.kind], machine(run.topology, run.nodes, run.gpus)
    model = run.model
    config = _of_passes(run, passes)
    cost = replace(cost, host_bandwidth=host_bandwidth(topology.node_types[0]))
    if run.kind in SHARDED:
        cost = replace(cost, host_copy_rates=host_copy_rates(topology, mesh))
    period = strategy.period_of(config)
    steps = metrics.whole_periods(FEWER if run.kind in SHARDED else STEPS, period)
    if strategy.place:  # every layer and worker is a send: fewer of both
        mesh = strategy.place(topology, mesh, config)
        steps = metrics.whole_periods(FEWER, period)
        model, cost = coarser(model, cost)
    program = merged(strategy.build(model, cost, mesh, config, steps, 0))
    timeline = simulate(program, topology, mesh, launch=strategy.launch or "process_per_gpu")
    return metrics.steady_window(timeline).step_time


def coarser(model: Model, cost: StepCost, parts: int = SEGMENTS) -> tuple[Model, StepCost]:
    """The same model and costs in at most so many layers, each made of neighbours."""
    groups = [group.tolist() for group in np.array_split(np.arange(len(model.layers)), parts) if len(group)]
    layers = tuple(
        replace(
            model.layers[group[0]],
            tensors=tuple(t for i in group for t in model.layers[i].tensors),
            kernels=tuple(k for i in group for k in model.layers[i].kernels),
            buffers=sum(model.layers[i].buffers for i in group),
        )
        for group in groups
    )
    first = [group[0] for group in groups]
    sums = {name: np.add.reduceat(getattr(cost, name), first) for name in ("forward", "backward")}
    sums |= {name: np.add.reduceat(getattr(cost, name), first) for name in ("forward_flops", "backward_flops")}
    bounds = {name: tuple(getattr(cost, name)[i] for i in first) for name in ("forward_bound", "backward_bound")}
    unknown: Table = {"forward_launch": None, "forward_mix": (), "backward_mix": ()}
    joined = replace(cost, **sums, **bounds, **unknown)  # type: ignore[arg-type]
    return replace(model, layers=layers), joined


def merged(program: Program) -> Program:
    """The same Program with runs of compute ops that nothing waits for in between made one op.

    Steps take as long as before: the stream runs its ops back to back. Only what a collective takes from compute it
    overlaps (``overlap_slowdown``) is paid at the next op, which may now start later.
    """
    roles = tuple(replace(role, ops=_merged(role.ops)) for role in program.roles)
    return replace(program, roles=roles)


def _merged(ops: Sequence[Op]) -> tuple[Op, ...]:
    awaited = {j for op in ops for j in op.after}
    merged: list[Op] = []
    index: list[int] = []
    for i, op in enumerate(ops):
        last = merged[-1] if merged else None
        if (
            isinstance(op, Compute)
            and isinstance(last, Compute)
            and not op.after
            and i - 1 not in awaited
            and (op.stream, op.step, op.paced) == (last.stream, last.step, last.paced)
        ):
            merged[-1] = msgspec.structs.replace(last, duration=np.add(last.duration, op.duration))
        else:
            merged.append(msgspec.structs.replace(op, after=tuple(index[j] for j in op.after)))
        index.append(len(merged) - 1)
    return tuple(merged)


def peak_memory(run: StepRun) -> MemoryUse:
    """Bytes of one GPU at the peak of this run's step."""
    strategy, (_, mesh) = STRATEGIES[run.kind], machine(run.topology, run.nodes, run.gpus)
    training = Training(
        micro_batch_size=run.config.micro_batch_size,
        dtype=run.how.dtype,
        param_dtype=run.how.param_dtype,
        activation_checkpointing=run.how.activation_checkpointing,
        optimizer=run.how.optimizer,
        optimizer_impl=run.how.optimizer_impl,
        compiled=run.how.implementation == "compiled",
        holding=strategy.holding(run.model, mesh, _of_passes(run, run.accumulation)),
    )
    return memory(run.model, training)


@lru_cache(maxsize=32)
def machine(name: str, nodes: int, gpus: int) -> tuple[Topology, Mesh]:
    """The machine a row of measurements names, and its ranks. Raises :class:`ValueError` where it names none."""
    if not name:
        raise ValueError("the row does not say which topology")
    if gpus % nodes:
        raise ValueError(f"{gpus} GPUs do not divide over {nodes} nodes")
    topology = fabrics.load(name, nodes=nodes)
    return topology, fabrics.mesh(topology, nodes=nodes, nproc_per_node=gpus // nodes)
