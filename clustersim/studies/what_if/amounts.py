"""What a step comes to, as amounts that add up: of a step of few passes, and of each pass more."""

from __future__ import annotations

import msgspec
import numpy as np

from clustersim.core.arrays import Floats

ALIKE = 9
"""Digits to which links carry as much: sums in another order must not name others."""


class StepAmounts(msgspec.Struct, frozen=True, gc=False):
    """Of a step, or of what one pass more adds to it, mean over ranks.

    Parameters
    ----------
    step_time_s, compute_s, exposed_communication_s : as :func:`clustersim.explain.metrics.summary` has them [s].
    flops : executed by a rank. phases : seconds of kernels by phase. links : by name, of links that may be the busiest,
        the seconds that what they carry takes at their line rate.
    """

    step_time_s: float
    compute_s: float
    exposed_communication_s: float
    flops: float = 0.0
    phases: dict[str, float] = {}
    links: dict[str, float] = {}

    def with_more(self, times: int, each: StepAmounts) -> StepAmounts:
        """With so many ``times`` what ``each`` adds."""
        return StepAmounts(
            self.step_time_s + times * each.step_time_s,
            self.compute_s + times * each.compute_s,
            self.exposed_communication_s + times * each.exposed_communication_s,
            self.flops + times * each.flops,
            _sum(self.phases, times, each.phases),
            _sum(self.links, times, each.links),
        )

    @property
    def phase_shares(self) -> dict[str, float]:
        """As of ``summary``: of the step, kernels by phase, exposed communication, and what is left."""
        step = self.step_time_s
        idle = max(0.0, step - self.compute_s - self.exposed_communication_s)
        spent = self.phases | {"exposed_communication": self.exposed_communication_s, "idle": idle}
        return {name: seconds / step for name, seconds in spent.items()}


def _sum(amounts: dict[str, float], times: int, each: dict[str, float]) -> dict[str, float]:
    names = dict.fromkeys((*amounts, *each))
    return {name: amounts.get(name, 0.0) + times * each.get(name, 0.0) for name in names}


def busiest_first(links: dict[str, float]) -> list[str]:
    """Names of links, those that carry most first; where it is the same but for rounding, in their order."""
    most = max(links.values(), default=0.0) or 1.0
    return sorted(links, key=lambda name: -round(links[name] / most, ALIKE))


def may_be_busiest(seconds: Floats, each: Floats) -> list[int]:
    """Of links, by what they carry in a step and in each pass more, those of which one is the busiest, however many
    passes more there are: no other carries as much in both."""
    most = seconds.max(initial=0.0)
    if not most:
        return []
    rounded = np.round(seconds / most, ALIKE), np.round(each / (each.max() or 1.0), ALIKE)
    order = np.lexsort((np.arange(len(seconds)), -rounded[1], -rounded[0]))
    further = np.maximum.accumulate(rounded[1][order])
    first = order[:1].tolist()
    return [*first, *order[1:][further[1:] > further[:-1]].tolist()]
