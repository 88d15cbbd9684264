"""NCCL's time model with measured rows in hand.

What NCCL picks for a row (algorithm, protocol, channels, link loads) depends on none of the constants, so it is worked
out once; a fit then asks nothing but the time law.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clustersim.calibrate.fit.solve import Knob
from clustersim.collectives.costs import costs_of
from clustersim.collectives.fitted import priors
from clustersim.collectives.nccl_backend import NcclChoice, seconds_of
from clustersim.collectives.paths import placement
from clustersim.core.arrays import Floats, Ints
from clustersim.core.costs import CommunicationCosts, flat, most_of, overlaid
from clustersim.core.ranges import size_class

SPREADS: Mapping[str, float] = {
    # The host and its CPU are the operator's; nothing about them is known before a small message is timed.
    "host_floor": 0.9,
    "host_single": 0.7,
    "host_floor_per_gpu": 0.7,
    # With a whole log in hand, a rate that is surely below its kind's may be found as such.
    "net_share": 0.15,
}
"""Prior spread of ln(constant) between machines where a log may say more than
:mod:`clustersim.collectives.fitted.priors`."""

_OF_NET = frozenset({"net_extra", "net_share", "rendezvous"})
_OF_AGE = frozenset({"nvls_share", "p2p_channel_rate"})
_GENERATIONS = frozenset({"hop_generation", "share_generation"})


@dataclass(frozen=True, eq=False)
class MeasuredCollective:
    """A measured collective, and what NCCL picks for it on its machine.

    Parameters
    ----------
    seconds : float, measured. choice : what NCCL picks. case : rows of one case are one table of one run.
    version : of NCCL, as the row says it. launch : how the job was started, as the row says it.
    """

    seconds: float
    choice: NcclChoice
    case: str
    version: str = ""
    launch: str = ""

    @property
    def nbytes(self) -> float:
        """S [bytes]."""
        return self.choice.request.nbytes


@dataclass(frozen=True, eq=False)
class NcclTimes:
    """Rows of one machine: a :class:`clustersim.calibrate.fit.solve.TimeModel`."""

    rows: tuple[MeasuredCollective, ...]
    part: str = "nccl"

    @cached_property
    def measured(self) -> Floats:
        """(n,) seconds."""
        return np.array([row.seconds for row in self.rows])

    @cached_property
    def series(self) -> Sequence[str]:
        """(n,) case, algorithm and protocol."""
        return [f"{row.case} {row.choice.algorithm} {row.choice.protocol}" for row in self.rows]

    @property
    def classes(self) -> Sequence[str]:
        """(n,) how large each is, in the classes that errors are told by."""
        return [size_class(row.nbytes) for row in self.rows]

    @cached_property
    def knobs(self) -> tuple[Knob, ...]:
        """Constants of these machines' links, GPUs, transports and CPUs, in the order of
        :class:`CommunicationCosts`."""
        knobs: dict[str, Knob] = {}
        order: list[str] = []
        machines = {(id(c), *_traits(row)): (c, row) for c, row in zip(self._defaults, self.rows, strict=True)}
        for costs, row in machines.values():
            values = flat(costs)
            order = order or list(values)
            for name, spread in _mattering(values, row.choice):
                knobs.setdefault(name, Knob(name, values[name], spread, most_of(name)))
        return tuple(sorted(knobs.values(), key=lambda k: order.index(k.name)))

    @cached_property
    def _defaults(self) -> list[CommunicationCosts]:
        return [costs_of(row.choice.group) for row in self.rows]

    def predict(self, values: Mapping[str, float], rows: Ints | None = None) -> Floats:
        """(n,) seconds."""
        chosen = range(len(self.rows)) if rows is None else rows.tolist()
        parts: dict[int, list[int]] = {}
        for place, i in enumerate(chosen):
            parts.setdefault(id(self._defaults[i]), []).append(place)
        out = np.empty(len(chosen))
        for places in parts.values():
            costs = overlaid(self._defaults[chosen[places[0]]], values)
            out[places] = list(seconds_of((self.rows[chosen[place]].choice for place in places), costs))
        return out


def _traits(row: MeasuredCollective) -> tuple[str, str, str]:
    group_placement = placement(row.choice.group)
    group = row.choice.group
    return group_placement.net if group_placement.islands > 1 else "", group_placement.age, group.node_type.cpu_vendor


def _mattering(values: Mapping[str, float], choice: NcclChoice) -> Iterator[tuple[str, float]]:
    """(constant, prior spread) of all that can matter on a row's machine and for its launch mode."""
    prior_constants, (net, age, cpu) = priors().constants, _traits(MeasuredCollective(0.0, choice, ""))
    for name, value in values.items():
        head, _, key = name.partition(".")
        if (
            head in _GENERATIONS  # one machine has one generation: its hops and shares themselves tell
            or (head in _OF_NET and key != net)
            or (head in _OF_AGE and key != age)
            or (head == "host_floor" and key != cpu)
        ):
            continue
        spread = SPREADS.get(head) or (prior_constants[name].spread if name in prior_constants else 0.0)
        if spread and value > 0:  # what is 0 (InfiniBand adds nothing to a hop) is the others' zero point
            yield name, spread
