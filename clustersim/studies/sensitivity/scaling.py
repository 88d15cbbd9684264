"""Strong and weak scaling: the same work on more machines, or more work on more, and where the efficiency goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from clustersim.core.errors import ClusterSimError, several
from clustersim.scenario import Scenario
from clustersim.scenario.result import Result
from clustersim.scenario.run.parts import machine
from clustersim.studies.sensitivity.turned import Told
from clustersim.training.parallel import ParallelConfig

Kind: TypeAlias = Literal["strong", "weak"]

PARTS = {
    "kernels": ("forward", "backward"),
    "optimizer": ("optimizer",),
    "copies": ("gradient", "input", "other"),
    "exposed communication": ("exposed_communication",),
    "bubble": ("bubble",),
    "host, other": ("idle",),
}
"""What a step's time is split into, by phases of the summary."""


@dataclass(frozen=True)
class ScalingPoint:
    """One number of nodes.

    Parameters
    ----------
    nodes, gpus : of the run. micro_batch, passes : of each rank. batch : samples of a step.
    step_s : float [s]. rate : samples/s of the whole machine.
    efficiency : rate per GPU over that of the fewest nodes that fit. losses : part of the step -> share of the
        throughput that it costs against those; their sum is 1 - efficiency. cause : the largest, in words.
    fits : in memory. error : why there is no run.
    """

    nodes: int
    gpus: int = 0
    micro_batch: int = 0
    passes: int = 0
    batch: int = 0
    step_s: float = 0.0
    rate: float = 0.0
    efficiency: float = 0.0
    losses: Mapping[str, float] = field(default_factory=dict)
    cause: str = ""
    fits: bool = True
    error: str = ""


def curve(scenario: Scenario, nodes: Sequence[int], kind: Kind, tell: Told = lambda _: None) -> list[ScalingPoint]:
    """The scenario on each number of nodes, ascending.

    ``strong``: the batch of a step stays; its samples per rank are split into the largest micro-batch not above the
    scenario's, and passes. ``weak``: each rank does the same. Where a run cannot be, the point says why.
    """
    points: list[tuple[ScalingPoint, dict[str, float]]] = []
    for count in sorted(set(nodes)):
        tell(f"{kind} scaling on {several(count, 'node')}")
        try:
            result = scenario.changed({"cluster.nodes": count} | _shared_out(scenario, count, kind)).run()
        except ClusterSimError as error:
            points.append((ScalingPoint(count, error=" ".join(str(error).split())), {}))
            continue
        points.append((_point(result), _spent(result)))
    ran = [(point, spent) for point, spent in points if not point.error]
    first = next((pair for pair in ran if pair[0].fits), ran[0] if ran else None)
    return [point if point.error or first is None else _against(point, spent, *first, kind) for point, spent in points]


def _shared_out(scenario: Scenario, nodes: int, kind: Kind) -> dict[str, int]:
    """What changes with the nodes beside their number: the batch stays, or each rank's work does.

    Raises :class:`ClusterSimError` where no micro-batch and passes keep the batch.
    """
    config = scenario.config
    parallel = scenario.file.parallel
    if parallel is not None and (parallel.microbatches or parallel.global_batch_size):
        return _batch_of(scenario, parallel, nodes, kind)
    if kind == "weak":
        return {}
    mesh = machine(scenario)[1]
    node_samples = config.rank_samples * mesh.n_nodes
    if node_samples % nodes:
        raise ClusterSimError(f"{node_samples:,} samples per GPU of a node do not divide over {several(nodes, 'node')}")
    samples = node_samples // nodes
    micro = max(size for size in range(1, min(samples, config.micro_batch_size) + 1) if samples % size == 0)
    return {"strategy.micro_batch_size": micro, "strategy.gradient_accumulation_steps": samples // micro}


def _batch_of(scenario: Scenario, parallel: ParallelConfig, nodes: int, kind: Kind) -> dict[str, int]:
    """Where ``[parallel]`` says the batch or the micro-batches; the size of a micro-batch stays."""
    batch = parallel.global_batch_size
    passes = parallel.microbatches
    before = machine(scenario)[1].n_nodes
    if (kind == "strong" and batch is not None) or (kind == "weak" and batch is None):
        return {}  # what is said is what stays
    name, stated = ("global_batch_size", batch) if kind == "weak" else ("microbatches", passes)
    count = (stated or 1) * (nodes if kind == "weak" else before)
    by = before if kind == "weak" else nodes
    if count % by:
        raise ClusterSimError(
            f"{name} = {stated} of {several(before, 'node')} does not divide over {several(nodes, 'node')}"
        )
    return {f"parallel.{name}": count // by}


def _point(result: Result) -> ScalingPoint:
    config = result.prepared.scenario.config
    mesh = result.prepared.mesh
    rank_samples = config.rank_samples
    return ScalingPoint(
        nodes=mesh.n_nodes,
        gpus=result.prepared.gpus,
        micro_batch=config.micro_batch_size,
        passes=config.gradient_accumulation_steps,
        batch=rank_samples * mesh.size("dp"),
        step_s=float(result.summary["step_time_s"]),
        rate=float(result.summary["samples_per_s"]),
        fits=result.fits,
    )


def _spent(result: Result) -> dict[str, float]:
    """GPU-seconds a sample, by part."""
    shares = result.summary["phase_shares"]
    rank_seconds = result.prepared.gpus / float(result.summary["samples_per_s"])
    return {
        part: rank_seconds * sum(float(shares.get(phase, 0.0)) for phase in phases) for part, phases in PARTS.items()
    }


def _against(
    point: ScalingPoint, spent: Mapping[str, float], first: ScalingPoint, least: Mapping[str, float], kind: Kind
) -> ScalingPoint:
    total = sum(spent.values())
    losses = {part: (spent[part] - least[part]) / total for part in PARTS}
    worst = max(losses, key=lambda part: losses[part])
    efficiency = point.rate / point.gpus / (first.rate / first.gpus)
    cause = _why(worst, point, first, kind) if losses[worst] > 0.005 else ""
    return replace(point, efficiency=efficiency, losses=losses, cause=cause)


def _why(part: str, point: ScalingPoint, first: ScalingPoint, kind: Kind) -> str:
    """The part that grew most, in words."""
    if part == "kernels" and point.micro_batch < first.micro_batch:
        return f"kernels of smaller micro-batches ({point.micro_batch}, not {first.micro_batch})"
    if part == "kernels":
        return "kernels, which transfers beside them slow down"
    if part in {"exposed communication", "optimizer", "bubble"} and kind == "strong" and point.passes < first.passes:
        return f"{part}, over {point.passes} passes instead of {first.passes}"
    return part


def last_worthwhile(points: Sequence[ScalingPoint], gain: float) -> tuple[int, float] | None:
    """The first number of nodes whose doubling buys less than ``gain`` of throughput, and what it buys.

    >>> last_worthwhile([ScalingPoint(1, rate=10.0), ScalingPoint(2, rate=19.0), ScalingPoint(4, rate=24.0)], 0.5)[0]
    2
    """
    rates = {point.nodes: point.rate for point in points if not point.error}
    for nodes, rate in sorted(rates.items()):
        if 2 * nodes in rates and rates[2 * nodes] / rate - 1.0 < gain:
            return nodes, rates[2 * nodes] / rate - 1.0
    return None
