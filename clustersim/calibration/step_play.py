"""One measured run, played: what its step costs and how long the step takes on its machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import msgspec
import numpy as np

from clustersim import fabrics
from clustersim.analysis import metrics
from clustersim.calibration.step_rows import StepRun
from clustersim.compute import Execution, step_cost
from clustersim.compute.host import host_bandwidth
from clustersim.engine import simulate
from clustersim.mesh import Mesh
from clustersim.model import Model, StepCost
from clustersim.program import DTYPE_BYTES, Compute, Op, Program
from clustersim.strategies import STRATEGIES
from clustersim.texts import Table
from clustersim.topology import Topology

STEPS = 5
"""Steps played per row: DDP's first has one bucket and the second follows the rebuild; three are averaged."""

SEGMENTS = 24
"""Into how many pieces a model is cut where every piece is a send of every worker: overlap is as good as with all."""

ANY_MACHINE = "hgx-h100"
"""Where a one-GPU row is played whose source does not name the machine: nothing leaves the GPU."""


def costs_of(run: StepRun) -> StepCost:
    """What a rank's step of this run costs."""
    channels_last = run.model.sample == "image" and run.framework.channels_last
    how = Execution(
        dtype=run.dtype,
        param_dtype=run.param_dtype,
        activation_checkpointing=run.checkpointing,
        optimizer=run.optimizer,
        implementation="compiled" if run.compiled or channels_last else "eager",
    )
    return step_cost(run.model, run.device, run.micro_batch, how, run.framework.constants())


def scaled(cost: StepCost, factor: float) -> StepCost:
    """The same step with all of the device's work taking ``factor`` times as long."""
    return replace(
        cost,
        forward=cost.forward * factor,
        backward=cost.backward * factor,
        optimizer=cost.optimizer * factor,
        step_overhead=cost.step_overhead * factor,
    )


@lru_cache(maxsize=1024)
def step_time_as_priced(run: StepRun) -> float:
    """:func:`step_time` at this run's own costs. Rows that differ in what was measured only are played once."""
    return step_time(run, costs_of(run))


def step_time(run: StepRun, cost: StepCost) -> float:
    """Seconds of one optimizer step, played on the run's machine.

    Micro-batches under ``no_sync`` communicate nothing, so all but the last two are added rather than played. A rank
    alone waits for nobody, so its ops are added too.
    """
    played = min(run.accumulation, 2)
    config: Table = {"micro_batch_size": run.micro_batch, "gradient_accumulation_steps": played}
    config["param_dtype"] = run.param_dtype
    if run.strategy == "ddp":
        config["bucket_cap_mb"] = run.bucket_cap_mb
    strategy = STRATEGIES[run.strategy]
    topology, mesh = machine(run.topology or ANY_MACHINE if run.gpus == 1 else run.topology, run.nodes, run.gpus)
    alone = float(cost.forward.sum() + cost.backward.sum()) * (run.accumulation - played)
    if mesh.world_size == 1:
        program = strategy.build(run.model, replace(cost, jitter=0.0), mesh, strategy.config(**config), 2, 0)
        return alone + sum(float(op.duration) for op in program.roles[0].ops if isinstance(op, Compute) and op.step)
    knobs = strategy.config(**config)
    cost = replace(cost, host_bandwidth=host_bandwidth(topology.node_types[0]))
    if strategy.place:
        mesh = strategy.place(topology, mesh, knobs)
    model, steps = run.model, STEPS
    if strategy.place:  # every layer and worker is a send: fewer of both, of steps that are alike from the second on
        model, cost, steps = *coarser(run.model, cost), 3
    program = merged(strategy.build(model, cost, mesh, knobs, steps, 0))
    timeline = simulate(program, topology, mesh, launch=strategy.launch or "process_per_gpu")
    samples = run.micro_batch * played * run.gpus
    figures = metrics.summary(timeline, run.model, samples_per_step=samples, workers=mesh.workers)
    flattened = run.model.parameters * DTYPE_BYTES[run.param_dtype] / run.framework.flat_rate
    return alone + float(figures["step_time_s"]) + (flattened if run.strategy == "ddp" else 0.0)


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
    unknown: Table = {"forward_launch": None, "backward_launch": None, "forward_mix": (), "backward_mix": ()}
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
    kept: list[Op] = []
    index: list[int] = []
    for i, op in enumerate(ops):
        last = kept[-1] if kept else None
        if (
            isinstance(op, Compute) and isinstance(last, Compute) and not op.after and i - 1 not in awaited
            and (op.stream, op.step, op.paced) == (last.stream, last.step, last.paced)
        ):  # fmt: skip
            kept[-1] = msgspec.structs.replace(last, duration=np.add(last.duration, op.duration))
        else:
            kept.append(msgspec.structs.replace(op, after=tuple(index[j] for j in op.after)))
        index.append(len(kept) - 1)
    return tuple(kept)


@lru_cache(maxsize=32)
def machine(name: str, nodes: int, gpus: int) -> tuple[Topology, Mesh]:
    """The machine a row of measurements names, and its ranks. Raises :class:`ValueError` where it names none."""
    if not name:
        raise ValueError("the row does not say which topology")
    if gpus % nodes:
        raise ValueError(f"{gpus} GPUs do not divide over {nodes} nodes")
    topology = fabrics.load(name, nodes=nodes)
    return topology, fabrics.mesh(topology, nodes=nodes, nproc_per_node=gpus // nodes)
