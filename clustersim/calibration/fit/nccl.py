"""NCCL's time model with measured rows in hand.

What NCCL picks for a row (algorithm, protocol, channels, link loads) depends on none of the constants, so it is worked
out once; a fit then asks nothing but the time law.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clustersim.calibration.fit.knobs import Floats, Ints, Knob
from clustersim.collectives.costs import costs_of
from clustersim.collectives.nccl_backend import Choice, seconds
from clustersim.collectives.paths import placement
from clustersim.costs import COSTS, Costs, flat, overlaid

SPREADS: Mapping[str, float] = {
    # The host and its CPU are the operator's; nothing about them is known before a small message is timed.
    "host_floor": 0.7,
    "host_floor_per_gpu": 0.7,
    "host_p2p": 0.4,
    "host_p2p_peer": 0.4,
    "base": 0.4,
    "rooted_base": 0.4,
    "threads_base": 0.5,
    "threads_step": 0.3,
    # Hops differ from machine to machine by some 20 to 40 % (jackknife over machines of a first study).
    "hop": 0.3,
    "net_extra": 0.4,
    "simple_ring_net": 0.3,
    "rooted_overlap": 0.5,
    "tree_levels": 0.2,
    "nvls_latency": 0.3,
    "nvls_tree_hop": 0.3,
    # Rates are hardware: NVLink's are known to some per cent, a NIC's and a PCIe tree's less well.
    "share.nvlink": 0.08,
    "share.pcie": 0.08,
    "share.shm": 0.15,
    "share.net/LL128": 0.05,  # of net_share, which is what Simple reaches
    "share.net/LL": 0.3,
    "net_share": 0.15,
    "net_ll": 0.7,
    "tree_share": 0.1,
    "nvls_share": 0.07,
    "nvls_tree_share": 0.05,
    "p2p_share": 0.1,
    "p2p_net_share": 0.1,
    "send_share": 0.1,
    "p2p_channel_rate": 0.4,
    "p2p_channel_bytes": 0.5,
    "fill_norm": 0.1,
    "fill_span": 0.4,
}
"""Prior spread of ln(constant) between machines, by the longest beginning of its name."""

AGES: Mapping[str, float] = {"hop_generation": 0.2, "share_generation": 0.03}
"""The same for the factors between GPU generations, which only rows of several machines can tell."""

_OF_NET = frozenset({"net_extra", "net_share", "net_ll"})
_OF_AGE = frozenset({"nvls_share", "p2p_channel_rate", "p2p_channel_bytes", *AGES})


@dataclass(frozen=True, eq=False)
class Measured:
    """A measured collective, and what NCCL picks for it on its machine.

    Parameters
    ----------
    seconds : float, measured. choice : what NCCL picks. case : rows of one case are one table of one run.
    version : of NCCL, as the row says it.
    """

    seconds: float
    choice: Choice
    case: str
    version: str = ""

    @property
    def nbytes(self) -> float:
        """S [bytes]."""
        return self.choice.request.nbytes


@dataclass(frozen=True, eq=False)
class NcclTimes:
    """Rows of one machine or of several: a :class:`clustersim.calibration.fit.knobs.TimeModel`.

    Parameters
    ----------
    rows : what was measured. joint : rows of many machines: the factors between GPU generations are fitted, too, and
    what a machine's own file says stays.
    """

    rows: tuple[Measured, ...]
    joint: bool = False
    part: str = "nccl"

    @cached_property
    def measured(self) -> Floats:
        """(n,) seconds."""
        return np.array([row.seconds for row in self.rows])

    @cached_property
    def series(self) -> Sequence[str]:
        """(n,) case, algorithm and protocol."""
        return [f"{row.case} {row.choice.algorithm} {row.choice.protocol}" for row in self.rows]

    @cached_property
    def knobs(self) -> tuple[Knob, ...]:
        """Constants of these machines' links, GPUs, transports and CPUs, in the order of :class:`Costs`."""
        found: dict[str, Knob] = {}
        order: list[str] = []
        machines = {(id(c), *_traits(row)): (c, row) for c, row in zip(self._defaults, self.rows, strict=True)}
        for costs, row in machines.values():
            values = flat(COSTS if self.joint else costs)
            order = order or list(values)
            for name, spread in _mattering(values, row.choice, self.joint):
                found.setdefault(name, Knob(name, values[name], spread, 1.0 if "share" in name else math.inf))
        return tuple(sorted(found.values(), key=lambda k: order.index(k.name)))

    @cached_property
    def _defaults(self) -> list[Costs]:
        return [costs_of(row.choice.group) for row in self.rows]

    def predict(self, values: Mapping[str, float], rows: Ints | None = None) -> Floats:
        """(n,) seconds."""
        made: dict[int, Costs] = {}
        out = []
        for i in range(len(self.rows)) if rows is None else rows.tolist():
            base = self._defaults[i]
            if id(base) not in made:
                made[id(base)] = overlaid(base, self._shared(base, values))
            out.append(seconds(self.rows[i].choice, made[id(base)]))
        return np.array(out)

    def _shared(self, base: Costs, values: Mapping[str, float]) -> Mapping[str, float]:
        """What of a joint fit's constants a machine takes: not those that its own file gives."""
        if not self.joint or base is COSTS:
            return values
        own, usual = flat(base), flat(COSTS)
        return {name: value for name, value in values.items() if own[name] == usual[name]}


def _traits(row: Measured) -> tuple[str, str, str]:
    where, group = placement(row.choice.group), row.choice.group
    return where.net if where.islands > 1 else "", where.age, group.node_type.cpu_vendor


def _mattering(values: Mapping[str, float], choice: Choice, joint: bool) -> Iterator[tuple[str, float]]:
    """(constant, prior spread) of all that can matter on a row's machine and for its launch mode."""
    net, age, cpu = _traits(Measured(0.0, choice, ""))
    spreads = {**SPREADS, **(AGES if joint else {})}
    for name, value in values.items():
        head, _, key = name.partition(".")
        if (
            (head in _OF_NET and key != net)
            or (head in _OF_AGE and key != age)
            or (head == "host_floor" and key != cpu)
        ):
            continue
        beginning = max((b for b in spreads if _begins(name, b)), key=len, default="")
        if beginning and value > 0:  # what is 0 (InfiniBand adds nothing to a hop) is the others' zero point
            yield name, spreads[beginning]


def _begins(name: str, beginning: str) -> bool:
    return name == beginning or name.startswith((beginning + ".", beginning + "/"))
