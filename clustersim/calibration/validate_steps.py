"""Predict every row of a table of measured training steps, and say how far off we are.

Each row is played: model and device priced by :mod:`clustersim.compute`, the strategy's Program run by the engine on
the row's machine. ``anchor="single"`` scales compute so that the *measured* one-GPU row of the same source, model,
batch and precision is met, which leaves only what data parallelism adds to be predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from clustersim import fabrics
from clustersim.analysis import metrics
from clustersim.calibration.score import evaluate, read_table, score
from clustersim.calibration.step_rows import COLUMNS, Row, StepRun, read
from clustersim.compute import step_cost
from clustersim.engine import simulate
from clustersim.errors import ClusterSimError
from clustersim.mesh import Mesh
from clustersim.model import StepCost
from clustersim.strategies import STRATEGIES
from clustersim.topology import Topology

STEPS = 5
"""Steps played per row: DDP's first has one bucket and the second follows the rebuild; three are averaged."""

ANY_MACHINE = "hgx-h100"
"""Where a one-GPU row is played whose source does not name the machine: nothing leaves the GPU."""


def validate_steps(path: str | Path, anchor: str | None = None) -> dict[str, Any]:
    """Predict the step time of every row. See :func:`clustersim.calibration.score.score` for the result.

    Parameters
    ----------
    anchor : ``"single"`` to take the measured one-GPU time as given where the table has it.
    """
    table = read_table(path, COLUMNS)
    anchors = _anchors(table) if anchor == "single" else None
    rows = evaluate(table, lambda row: _predict(row, anchors))
    return score(
        rows,
        {
            "source": lambda row: row["case_id"].split("-")[0],
            "platform": lambda row: row.get("topology", ""),
            "strategy": lambda row: row["strategy"],
            "model": lambda row: row["model"],
            "size_class": lambda row: f"{row['gpus']} GPUs",
        },
    )


def _predict(row: Row, anchors: Mapping[tuple[str, ...], float] | None) -> tuple[float, float]:
    run = read(row)
    cost = costs_of(run)
    if anchors is not None:
        if run.strategy == "single":
            raise ValueError("is the anchor of its model, not a prediction")
        scale = anchors.get(_identity(row))
        if scale is None:
            raise ValueError("the table has no one-GPU row of the same source, model, batch and precision to anchor on")
        cost = scaled(cost, scale)
    return run.measured, step_time(run, cost)


def costs_of(run: StepRun) -> StepCost:
    """What a rank's step of this run costs."""
    return step_cost(
        run.model,
        run.device,
        run.micro_batch,
        dtype=run.dtype,
        param_dtype=run.param_dtype,
        activation_checkpointing=run.checkpointing,
        optimizer=run.optimizer,
        implementation=run.implementation,
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


def step_time(run: StepRun, cost: StepCost) -> float:
    """Seconds of one optimizer step, played on the run's machine.

    Micro-batches under ``no_sync`` communicate nothing, so all but the last two are added rather than played.
    """
    played = min(run.accumulation, 2)
    config: dict[str, Any] = {"micro_batch_size": run.micro_batch, "gradient_accumulation_steps": played}
    config["param_dtype"] = run.param_dtype
    if run.strategy == "ddp":
        config["bucket_cap_mb"] = run.bucket_cap_mb
    strategy = STRATEGIES[run.strategy]
    topology, mesh = _machine(run.topology or ANY_MACHINE if run.gpus == 1 else run.topology, run.nodes, run.gpus)
    program = strategy.build(run.model, cost, mesh, strategy.config(**config), STEPS, 0)
    timeline = simulate(program, topology, mesh)
    figures = metrics.summary(timeline, run.model, samples_per_step=run.micro_batch * played * run.gpus)
    alone = float(cost.forward.sum() + cost.backward.sum())
    return float(figures["step_time_s"]) + (run.accumulation - played) * alone


@lru_cache(maxsize=32)
def _machine(name: str, nodes: int, gpus: int) -> tuple[Topology, Mesh]:
    if not name:
        raise ValueError("the row does not say which topology")
    if gpus % nodes:
        raise ValueError(f"{gpus} GPUs do not divide over {nodes} nodes")
    topology = fabrics.load(name, nodes=nodes)
    return topology, fabrics.mesh(topology, nodes=nodes, nproc_per_node=gpus // nodes)


def _identity(row: Row) -> tuple[str, ...]:
    """What an anchor and the rows it serves have in common; p50 and p75 of one run share it."""
    return tuple(row.get(column, "") for column in ("source", "model", "precision", "gpu", "micro_batch_per_gpu"))


def _anchors(table: list[dict[str, str]]) -> dict[tuple[str, ...], float]:
    """Measured over predicted compute of every one-GPU row that can be predicted."""
    found: dict[tuple[str, ...], float] = {}
    for row in table:
        if not row["strategy"].startswith("single"):
            continue
        try:
            run = read(row)
            found.setdefault(_identity(row), run.measured / step_time(run, costs_of(run)))
        except (ValueError, ClusterSimError):
            continue
    return found
