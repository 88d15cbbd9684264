"""What an option can at best be, before it is simulated: its memory exactly, its time from below."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from clustersim.collectives.base import Group, Request
from clustersim.collectives.bounds import lower_bound
from clustersim.economics import Rates
from clustersim.memory_use import Verdict
from clustersim.program import COMPUTE_STREAM, Collective, Compute, Serve, seconds
from clustersim.scenario import Scenario
from clustersim.scenario.held import held
from clustersim.scenario.running import Prepared
from clustersim.units import format_bytes

SLACK = 0.97
"""A step is measured where its slowest rank ends; another rank may be ahead by its skew, so that a little less than all
of its work falls into the window."""


@dataclass(frozen=True)
class Bound:
    """Seconds that no run of a step beats: ``compute_s`` of kernels alone, ``step_s`` of kernels or transfers.

    Of a split model also what ``step_s`` is made of beside kernels: ``exposed_s``, exchanges inside the model that
    kernels wait for; ``ramp_s``, the pipeline's bubble; ``data_s``, of data parallelism; and ``held``, bytes by stage.
    """

    compute_s: float
    step_s: float
    exposed_s: float = 0.0
    ramp_s: float = 0.0
    data_s: float = 0.0
    held: tuple[float, ...] = ()


def memory_verdict(scenario: Scenario) -> Verdict:
    """Whether a scenario fits on its GPUs, without building its Program. Raises :class:`ClusterSimError`."""
    found = held(scenario)
    return found.use.fits(found.card)


def too_much(verdict: Verdict, margin: float) -> str:
    """Why it does not fit with ``margin`` of the memory left free; empty where it does."""
    total = verdict.use.total / verdict.share if verdict.share else 0.0
    missing = verdict.use.total - (1.0 - margin) * total
    if missing <= 0:
        return ""
    held = ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(b)}" for name, b in list(verdict.use.at_peak().items())[:2]
    )
    return f"needs {format_bytes(verdict.use.total)} of {format_bytes(total)}, {margin:.0%} kept free ({held})"


def step_bound(prepared: Prepared) -> Bound:
    """From the Program: of the last step, the kernels of the compute stream that every rank has, and for each other
    stream the physical bounds of its collectives one after another (:mod:`clustersim.collectives.bounds`)."""
    last = max(op.step for role in prepared.program.roles for op in role.ops)
    compute, communication = np.inf, 0.0
    for role in prepared.program.roles:
        if not any(isinstance(op, Compute) and op.phase == "forward" for op in role.ops):
            continue  # a server
        busy, streams = np.zeros(len(role.ranks)), defaultdict[str, float](float)
        for op in role.ops:
            if op.step != last:
                continue
            if isinstance(op, Compute) and not isinstance(op, Serve) and op.stream == COMPUTE_STREAM:
                busy += seconds(role, op)
            elif isinstance(op, Collective) and op.groups.shape[1] > 1:
                streams[op.stream] += _least(prepared, op)
        compute = min(compute, float(busy.min()))
        communication = max(communication, *streams.values(), 0.0)
    compute = SLACK * compute if np.isfinite(compute) else 0.0
    return Bound(compute, max(compute, SLACK * communication))


def _least(prepared: Prepared, op: Collective) -> float:
    file = prepared.scenario.file
    group = Group(prepared.topology, prepared.mesh.gpus[op.groups[0]], file.run.launch)
    return lower_bound(Request(op.kind, op.nbytes, dtype=op.dtype, root=op.root), group)


def least_joules(rates: Rates, bound: Bound) -> float:
    """Joules per GPU and step that no run with this bound undercuts."""
    p = rates.power
    waits = (bound.step_s - bound.compute_s) * min(p.communication, p.idle)
    return rates.limit_w * p.pue * (p.compute * bound.compute_s + waits + p.rest_of_machine * bound.step_s)
