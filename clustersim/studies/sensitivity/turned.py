"""Hardware numbers turned, and the scenario run again: which of them the step depends on, and how slow the network may
be before it grows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from clustersim.explain.knobs import named_inside
from clustersim.scenario.run.running import Prepared
from clustersim.studies.what_if.rerun import links_of, rerun_step

KNOBS = {
    "GPU compute": "GPU compute",
    "HBM": "HBM bandwidth",
    "NVLink": "{inside} bandwidth",
    "NIC": "NIC bandwidth",
    "fabric": "switch up-links",
    "latency": "latency of transfers",
}
"""What is turned, by the name :func:`clustersim.studies.what_if.rerun.rerun_step` knows it by, and in words,
with ``{inside}`` for what links between the GPUs of a node are called."""

FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
"""Of the network's speed that are always run, for the curve."""
CLOSE = 1.05
"""Ratio of the two speeds that the break-even lies between at the end."""

Told = Callable[[str], None]
"""Called with what is being run, in words."""


@dataclass(frozen=True)
class Swing:
    """What one number does to the step.

    Parameters
    ----------
    knob : in words. better_s, worse_s : float [s] of a step with it so much better and worse.
    gain, loss : what share of the step that saves and adds.
    """

    knob: str
    better_s: float
    worse_s: float
    gain: float
    loss: float


def tornado(prepared: Prepared, now: float, swing: float = 0.2, tell: Told = lambda _: None) -> list[Swing]:
    """Swings of a step of ``now`` seconds, largest first; numbers that the machine does not have are left out.

    swing : 0.2 turns each number by 20 % both ways. tell : called with what is being run.
    """
    swings = []
    inside = named_inside(prepared.topology.link_kinds)
    for knob, words in KNOBS.items():
        label = words.format(inside=inside)
        tell(f"{label} {swing:.0%} better and worse")
        up = 1.0 + swing
        down = 1.0 - swing
        if knob == "latency":  # which is divided, where rates are multiplied
            up, down = 1.0 / down, 1.0 / up
        better, worse = (rerun_step(prepared, knob, factor) for factor in (up, down))
        if better is not None and worse is not None:
            swings.append(Swing(label, better, worse, 1.0 - better / now, worse / now - 1.0))
    return sorted(swings, key=lambda swing: -(swing.worse_s - swing.better_s))


@dataclass(frozen=True)
class BreakEven:
    """The speed of a NIC below which the step grows by more than ``growth``.

    Parameters
    ----------
    nic : float [bytes/s], of one NIC as it is. speeds, steps : of the runs, (n,) [bytes/s] and [s], ascending.
    at : float [bytes/s], the break-even; None where even the slowest network tried does not make the step that long.
    """

    growth: float
    nic: float
    speeds: tuple[float, ...]
    steps: tuple[float, ...]
    at: float | None


def break_even(prepared: Prepared, now: float, growth: float = 0.05, tell: Told = lambda _: None) -> BreakEven | None:
    """NICs and switch links made slower and faster together, so that oversubscription stays what it is.

    now : float [s] of a step as it is. growth : of the step that is accepted. tell : called with what is being run.

    Returns None where the scenario has no network.
    """
    ends = links_of(prepared.topology, "NIC")
    if not ends.any():
        return None
    nic = float(np.median(prepared.topology.link_bandwidth[ends]))
    step_of = {1.0: now}

    def step(factor: float) -> float:
        """Seconds of a step on a network so many times as fast; played once."""
        if factor not in step_of:
            tell(f"a network {factor:.3g} times as fast")
            step_of[factor] = rerun_step(prepared, "network", factor) or now
        return step_of[factor]

    for factor in FACTORS:
        step(factor)
    crossing = _crossing(step, (1.0 + growth) * now)
    speeds = sorted(step_of)
    return BreakEven(
        growth,
        nic,
        tuple(nic * f for f in speeds),
        tuple(step_of[f] for f in speeds),
        None if crossing is None else nic * crossing,
    )


def _crossing(step: Callable[[float], float], most: float) -> float | None:
    """The factor at which a step becomes longer than ``most``: bisection of its logarithm, within :data:`CLOSE`."""
    slower = [factor for factor in FACTORS if factor < 1.0 and step(factor) > most]
    if not slower:
        return None
    low = max(slower)
    high = min(factor for factor in FACTORS if factor > low)
    while high / low > CLOSE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if step(middle) > most else (low, middle)
    return math.sqrt(low * high)
