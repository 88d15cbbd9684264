"""A topology with a few numbers of its own (``[measured]``) gets the constants that they make most likely."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Group, Request, bus_factor
from clustersim.collectives.bounds import lower_bound
from clustersim.collectives.costs import costs_of
from clustersim.collectives.fitted.machine import FewNumbers, few_numbers
from clustersim.collectives.nccl_backend import NcclChoice, choice, seconds
from clustersim.core.calibrated import Calibration, MeasuredNumber, Provenance
from clustersim.core.errors import TopologyError
from clustersim.core.texts import Table
from clustersim.core.topology import Topology
from clustersim.core.units import format_bytes, format_time

SLOWEST = 100.0
"""Times what its kind takes; a number beyond it is a slip of unit or of scale, not a machine."""

APART = np.log(2.0)
"""|ln(predicted / measured)| of a number, with all of them known, from which on it contradicts the others."""


class MeasuredMachine(msgspec.Struct, frozen=True, eq=False):
    """What measured numbers say of a machine.

    Parameters
    ----------
    numbers : as the file gives them. seconds : (n,) measured. before, after : (n,) as its kind and as it are predicted.
    found : the constants, and by how much they moved.
    """

    numbers: tuple[MeasuredNumber, ...]
    seconds: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    found: FewNumbers

    @property
    def calibration(self) -> Calibration:
        """The constants that moved."""
        told = Provenance(data=tuple(one.where for one in self.numbers), rows=len(self.numbers))
        return Calibration(nccl=self.found.constants, provenance=told)

    def words(self) -> Iterator[str]:
        """Lines that say how far the machine is from its kind, and what its numbers are with either."""
        factors = ", ".join(f"{name} {100.0 * (by - 1.0):+.0f} %" for name, by in self.found.factors.items())
        yield f"measured numbers moved {len(self.found.constants)} constants; as a whole, against its kind: {factors}"
        for one, *times in zip(self.numbers, self.seconds, self.before, self.after, strict=True):
            told, usual, now = map(format_time, times)
            what = f"{one.kind} of {format_bytes(one.nbytes)} over {one.nodes} node(s)"
            yield f"  {what}: {told} measured, {usual} as its kind, {now} with all numbers known"


def load(
    name_or_path: str,
    nodes: int | None = None,
    device: str | None = None,
    fabric: Table | None = None,
    measured: tuple[MeasuredNumber, ...] = (),
) -> Topology:
    """:func:`clustersim.cluster.files.load`, and what the machine's own numbers say of it (what a log was fitted to is
    kept).

    ``measured`` replaces the numbers that the topology's file gives.

    Raises :class:`TopologyError` also for a number that no such machine can have, and for numbers that contradict each
    other.
    """
    topology = fabrics.load(name_or_path, nodes=nodes, device=device, fabric=fabric)
    numbers = measured or topology.measured
    if not numbers:
        return topology
    found = informed(numbers, name_or_path, device, tuple(sorted((fabric or {}).items()))).calibration
    return replace(topology, calibration=found.over(topology.calibration))


@lru_cache(maxsize=32)
def informed(
    numbers: tuple[MeasuredNumber, ...], name_or_path: str, device: str | None = None, fabric: tuple[Any, ...] = ()
) -> MeasuredMachine:
    """The constants that numbers of a machine make most likely. Raises as :func:`load`."""
    choices = [_choice(one, name_or_path, device, dict(fabric)) for one in numbers]
    times = [
        one.seconds or one.nbytes * bus_factor(one.kind, chosen.group.size) / one.busbw
        for one, chosen in zip(numbers, choices, strict=True)
    ]
    kind = costs_of(choices[0].group)
    before = [seconds(chosen, kind) for chosen in choices]
    for one, chosen, time, usual in zip(numbers, choices, times, before, strict=True):
        _possible(one, lower_bound(chosen.request, chosen.group), time, usual)
    _ordered(numbers, times)
    found = few_numbers(choices, times, kind)
    after = [seconds(chosen, found.costs) for chosen in choices]
    _agreeing(numbers, times, after)
    return MeasuredMachine(numbers, tuple(times), tuple(before), tuple(after), found)


def _choice(one: MeasuredNumber, name_or_path: str, device: str | None, fabric: Table) -> NcclChoice:
    machine = fabrics.load(name_or_path, nodes=one.nodes, device=device, fabric=fabric or None)
    try:
        mesh = fabrics.mesh(machine, nodes=one.nodes, nproc_per_node=one.gpus or None)
    except TopologyError as error:
        raise TopologyError(f"{one.where}: {error}") from None
    if mesh.world_size < 2:
        raise TopologyError(f"{one.where}: a collective of one GPU says nothing; give nodes or gpus")
    group = Group(machine, mesh.gpus, one.launch, one.version)
    return choice(Request(one.kind, one.nbytes), group)


def _possible(one: MeasuredNumber, bound: float, time: float, usual: float) -> None:
    """Raises for a time that the wires do not allow, or that no machine of this kind would need."""
    what = f"{one.kind} of {format_bytes(one.nbytes)} over {one.nodes} node(s) in {format_time(time)}"
    if time < bound:
        raise TopologyError(f"{one.where}: {what} is faster than the wires allow, {format_time(bound)} at line rate")
    if time > SLOWEST * usual:
        raise TopologyError(
            f"{one.where}: {what} is more than {SLOWEST:.0f} times what machines of its kind take, {format_time(usual)}"
        )


def _ordered(numbers: Sequence[MeasuredNumber], times: Sequence[float]) -> None:
    """Raises where more bytes of one collective on one scale took much less time."""
    every = sorted(
        zip(numbers, times, strict=True),
        key=lambda pair: (pair[0].kind, pair[0].nodes, pair[0].gpus, pair[0].launch, pair[0].nbytes),
    )
    for (small, first), (large, then) in pairwise(every):
        alike = all(getattr(small, name) == getattr(large, name) for name in ("kind", "nodes", "gpus", "launch"))
        if alike and first > 2.0 * then:
            raise TopologyError(
                f"{small.where} contradicts {large.where.rpartition(': ')[2]}: {format_bytes(small.nbytes)} in "
                f"{format_time(first)}, but {format_bytes(large.nbytes)} in {format_time(then)}"
            )


def _agreeing(numbers: Sequence[MeasuredNumber], times: Sequence[float], after: Sequence[float]) -> None:
    """Raises where no constants explain all numbers: names the one farthest off, and what the others make of it."""
    errors = np.abs(np.log(np.array(after) / np.array(times)))
    worst = int(np.argmax(errors))
    if errors[worst] > APART and len(numbers) > 1:
        raise TopologyError(
            f"{numbers[worst].where}: {format_time(times[worst])} contradicts the other numbers, with which it would "
            f"be about {format_time(after[worst])}"
        )
