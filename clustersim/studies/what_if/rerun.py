"""A scenario run again with one thing better, to set beside the bound that :mod:`clustersim.explain.whatif` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import msgspec
import numpy as np

from clustersim.collectives import backends
from clustersim.collectives.base import Group, Plan, Request
from clustersim.core.arrays import Bools
from clustersim.core.device import Speed
from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.program import Compute, Op, Program, Role
from clustersim.core.timeline import Timeline
from clustersim.core.topology import Topology
from clustersim.explain.knobs import COPY, KNOB_NAMED, KNOB_TABLE, WIDER
from clustersim.explain.metrics import steady_window
from clustersim.scenario import Scenario
from clustersim.scenario.file.reading import Changes, Table
from clustersim.scenario.run.altered import altered
from clustersim.scenario.run.held import held
from clustersim.scenario.run.hosts import host_copy_rates
from clustersim.scenario.run.incidents import varying_of
from clustersim.scenario.run.played import play
from clustersim.scenario.run.running import Prepared, prepare
from clustersim.training.strategies.offloading import D2H_STREAM, H2D_STREAM

Factors = Mapping[str, float]
"""Knob -> what it is multiplied by."""
LINKS = ("network", "inside")
"""Knobs of links between nodes and inside them."""
BUCKETS = (1, 5, 25, 100, 1000)
"""Sizes [MiB] tried for ``bucket size``, and PyTorch's own first bucket."""

UNIT_BLOCKS = (1, 2, 4)
"""Blocks a unit of FSDP tried for it: what it gathers and reduces together."""


def rerun_saving(prepared: Prepared, knob: str, factor: float, now: float) -> float | None:
    """What share of a step of ``now`` seconds a knob of :data:`clustersim.explain.knobs.KNOBS` really saves.

    Returns None for a knob this scenario does not have. Of ``bucket size`` the best of some is taken; ``batch`` is per
    sample. Negative where the step gets longer. Raises :class:`ScenarioError` for an unknown knob.
    """
    step = rerun_step(prepared, knob, factor)
    return None if step is None or now <= 0 else 1.0 - step / now


def rerun_step(prepared: Prepared, knob: str, factor: float) -> float | None:
    """Seconds of a step with a knob turned; ``factor`` below 1 makes it worse.

    Beside the knobs of :data:`clustersim.explain.knobs.KNOBS`: ``GPU compute`` and ``HBM``, the GPU's own rates, each
    kernel priced anew, and ``kernels``, both; ``network``, NICs and switches together; ``inside``, all other links.
    Returns None for a knob this scenario does not have. Raises :class:`ScenarioError` for an unknown one.
    """
    if knob not in RERUNS:
        raise ScenarioError(f"no knob {knob!r}; {nearest(knob, RERUNS)}")
    return RERUNS[knob](prepared, knob, factor)


def step_time(timeline: Timeline) -> float:
    """Seconds per step of the steady state."""
    return steady_window(timeline).step_time


def _faster(prepared: Prepared, knob: str, factor: float) -> float:
    bounds = KNOB_NAMED[knob].helps

    def one(op: Op, role: Role) -> Op:
        """An op, faster where one of the bounds holds it."""
        if not isinstance(op, Compute) or op.bound not in bounds:
            return op
        return _sooner(op, factor)

    return step_time(replace(prepared, program=altered(prepared.program, one)).run().timeline)


def _sooner(op: Compute, factor: float) -> Compute:
    return msgspec.structs.replace(op, duration=np.asarray(op.duration, dtype=np.float64) / factor)


def links_of(topology: Topology, knob: str) -> Bools:
    """(links,) bool: those that ``NVLink``, ``NIC``, ``fabric``, ``network`` or ``inside`` widens."""
    kinds = enumerate(topology.link_kinds)
    if knob in LINKS:
        return np.array([(kind == "net") == (knob == "network") for _, kind in kinds], dtype=np.bool_)
    return np.array([WIDER[knob](kind, topology.link_name(i)) for i, kind in kinds], dtype=np.bool_)


def speed_of(factors: Factors) -> Speed:
    """The GPU's rates with ``kernels``, ``GPU compute`` and ``HBM`` turned."""
    both = factors.get("kernels", 1.0)
    return Speed(both * factors.get("GPU compute", 1.0), both * factors.get("HBM", 1.0))


def widened(topology: Topology, factors: Factors) -> Topology:
    """The machine with links turned, by the knobs of :func:`links_of`; itself where none is."""
    bandwidth = topology.link_bandwidth
    for knob, factor in factors.items():
        if knob in WIDER or knob in LINKS:
            bandwidth = bandwidth * np.where(links_of(topology, knob), factor, 1.0)
    return topology if bandwidth is topology.link_bandwidth else replace(topology, link_bandwidth=bandwidth)


def rerun_with(scenario: Scenario, factors: Factors) -> float:
    """Seconds of a whole step with several of a GPU's rates and links turned at once."""
    prepared = prepare(scenario, speed_of(factors))
    return step_time(replace(prepared, topology=widened(prepared.topology, factors)).run().timeline)


def _another_gpu(prepared: Prepared, knob: str, factor: float) -> float:
    return rerun_with(prepared.scenario, {knob: factor})


def _wider(prepared: Prepared, knob: str, factor: float) -> float | None:
    if not links_of(prepared.topology, knob).any():
        return None
    wider = widened(prepared.topology, {knob: factor})
    program = prepared.program
    if knob in KNOB_NAMED and COPY in KNOB_NAMED[knob].helps:
        program = _copies_faster(prepared, wider, factor)
    return step_time(replace(prepared, topology=wider, program=program).run().timeline)


def _copies_faster(prepared: Prepared, wider: Topology, factor: float) -> Program:
    """The Program with copies between host and GPU as fast as the wider machine has them: the memory behind its links
    stays as it is. Rates that somebody wrote are ``factor`` times as high."""
    before = prepared.cost.host_copy_rates
    gains = (factor, factor)
    if all(before):
        after = host_copy_rates(wider, prepared.mesh)
        gains = (after[0] / before[0], after[1] / before[1])

    def copied(op: Op, role: Role) -> Op:
        """An op, sooner over where the host's links hold it."""
        if not isinstance(op, Compute) or op.phase != "memcpy" or op.stream not in {D2H_STREAM, H2D_STREAM}:
            return op
        gain = gains[0] if op.stream == D2H_STREAM else gains[1]
        return _sooner(op, gain)

    return altered(prepared.program, copied)


def _nearer(prepared: Prepared, knob: str, factor: float) -> float:
    def planner(request: Request, group: Group) -> Plan:
        """The backend's plan with a shorter latency."""
        plan = backends.plan(request, group, backend=prepared.backend)
        return replace(plan, latency=plan.latency / factor)

    machine = prepared.program, prepared.topology, prepared.mesh
    timeline = play(
        prepared.scenario,
        *machine,
        backend="nccl",
        planner=planner,
        fidelity=prepared.scenario.file.run.fidelity,
        varying=varying_of(prepared.scenario, prepared.topology),
    )
    return step_time(timeline)


def _other_buckets(prepared: Prepared, knob: str, factor: float) -> float | None:
    config = prepared.scenario.config
    if (
        prepared.split is None
        and hasattr(config, "blocks_per_unit")
        and not getattr(config, "checkpoint_outside", False)
    ):
        larger = [_changed(prepared, change) for change in _units_with_room(prepared)]
        return min(larger, default=None)
    if prepared.split is not None or not hasattr(config, "bucket_cap_mb"):
        return None  # buckets beside a split model are Megatron's: large, and few
    tried: list[Changes] = [{"strategy.bucket_cap_mb": size} for size in BUCKETS]
    if hasattr(config, "first_bucket_bytes"):
        tried.append({"strategy.first_bucket_bytes": 2**20})
    return min(_changed(prepared, change) for change in tried)


def _units_with_room(prepared: Prepared) -> Iterator[Changes]:
    """Units of FSDP, of several blocks each, that may fit in memory: all of a unit is gathered at once."""
    for blocks in UNIT_BLOCKS:
        change: Changes = {"strategy.blocks_per_unit": blocks}
        if held(prepared.scenario.changed(change)).verdict.possible:
            yield change


def larger_batch(prepared: Prepared, factor: float) -> Changes | None:
    """``factor`` times the samples a micro-batch, as ``--set`` would say it; None where that is no whole number."""
    size = prepared.scenario.config.micro_batch_size * factor
    if size != int(size):
        return None
    change: Table = {"strategy.micro_batch_size": int(size)}
    parallel = prepared.scenario.file.parallel
    if parallel is not None and parallel.global_batch_size is not None:
        change["parallel.global_batch_size"] = int(parallel.global_batch_size * factor)  # as many micro-batches
    return change


def _larger_batch(prepared: Prepared, knob: str, factor: float) -> float | None:
    change = larger_batch(prepared, factor)
    return None if change is None else _changed(prepared, change) / factor


def _changed(prepared: Prepared, change: Changes) -> float:
    return step_time(prepared.scenario.changed(change).run().timeline)


RERUNS: dict[str, Callable[[Prepared, str, float], float | None]] = {
    **{knob.name: _faster for knob in KNOB_TABLE if knob.helps and not knob.widens},
    **dict.fromkeys(("GPU compute", "HBM", "kernels"), _another_gpu),
    **dict.fromkeys((*WIDER, *LINKS), _wider),
    "latency": _nearer,
    "bucket size": _other_buckets,
    "batch": _larger_batch,
}
"""The run that shows what a knob really does, by its name; of one whose row says what becomes faster, it follows."""
