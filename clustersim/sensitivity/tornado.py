"""Each hardware number a fifth better and a fifth worse, one at a time: which of them the step depends on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clustersim.scenario.rerun import rerun_step
from clustersim.scenario.running import Prepared

KNOBS = {
    "GPU compute": "GPU compute",
    "HBM": "HBM bandwidth",
    "NVLink": "NVLink bandwidth",
    "NIC": "NIC bandwidth",
    "fabric": "switch up-links",
    "latency": "latency of transfers",
}
"""What is turned, by the name :func:`clustersim.scenario.rerun.rerun_step` knows it by, and in words."""

Told = Callable[[str], None]


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

    Parameters
    ----------
    swing : 0.2 turns each number by 20 % both ways. tell : called with what is being run.
    """
    found = []
    for knob, words in KNOBS.items():
        tell(f"{words} {swing:.0%} better and worse")
        steps = [rerun_step(prepared, knob, factor) for factor in _factors(knob, swing)]
        better, worse = steps
        if better is not None and worse is not None:
            found.append(Swing(words, better, worse, 1.0 - better / now, worse / now - 1.0))
    return sorted(found, key=lambda one: -(one.worse_s - one.better_s))


def _factors(knob: str, swing: float) -> tuple[float, float]:
    """What the knob takes for better and worse: a latency is divided by it, a rate multiplied."""
    if knob == "latency":
        return 1.0 / (1.0 - swing), 1.0 / (1.0 + swing)
    return 1.0 + swing, 1.0 - swing
