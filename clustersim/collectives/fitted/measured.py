"""A topology with a few numbers of its own (``[measured]``) gets the constants that they make most likely."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Group, Request, bus_factor
from clustersim.collectives.costs import costs_of
from clustersim.collectives.fitted.machine import FewNumbers
from clustersim.collectives.fitted.trusted import disordered, impossible, trusted_machine
from clustersim.collectives.nccl_backend import NcclChoice, choice, seconds
from clustersim.core.calibrated import Calibration, MeasuredNumber, Provenance
from clustersim.core.device import Device
from clustersim.core.errors import TopologyError
from clustersim.core.texts import Table
from clustersim.core.topology import Topology
from clustersim.core.units import format_bytes, format_time


class NumberKeptApart(UserWarning):
    """A measured number that cannot be, or that contradicts the others, is not used."""


class MeasuredMachine(msgspec.Struct, frozen=True, eq=False):
    """What measured numbers say of a machine.

    Parameters
    ----------
    numbers : as the file gives them. seconds : (n,) measured. before, after : (n,) as its kind and as it are predicted.
    found : the constants, and by how much they moved. apart : of numbers that were left out, by index, the reasons.
    """

    numbers: tuple[MeasuredNumber, ...]
    seconds: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    found: FewNumbers
    apart: dict[int, str] = {}

    @property
    def calibration(self) -> Calibration:
        """The constants that moved."""
        used = [number for i, number in enumerate(self.numbers) if i not in self.apart]
        refused = {self.numbers[i].where: reason for i, reason in self.apart.items()}
        provenance = Provenance(data=tuple(number.where for number in used), rows=len(used), refused=refused)
        return Calibration(nccl=self.found.constants, provenance=provenance)

    def words(self) -> Iterator[str]:
        """Lines that say how far the machine is from its kind, and what its numbers are with either."""
        factors = ", ".join(f"{name} {100.0 * (by - 1.0):+.0f} %" for name, by in self.found.factors.items())
        yield f"measured numbers moved {len(self.found.constants)} constants; as a whole, against its kind: {factors}"
        for i, (number, *times) in enumerate(zip(self.numbers, self.seconds, self.before, self.after, strict=True)):
            measured_text, usual, now = map(format_time, times)
            number_text = f"{number.kind} of {format_bytes(number.nbytes)} over {number.nodes} node(s)"
            condition = "with all numbers known" if not self.apart else "with the numbers that are used"
            yield f"  {number_text}: {measured_text} measured, {usual} as its kind, {now} {condition}"
            if i in self.apart:
                yield f"  warning: {number.where} is kept apart and moves nothing: {self.apart[i]}"


def load(
    name_or_path: str,
    nodes: int | None = None,
    device: str | Device | None = None,
    fabric: Table | None = None,
    measured: tuple[MeasuredNumber, ...] = (),
) -> Topology:
    """:func:`clustersim.cluster.files.load`, and what the machine's own numbers say of it (what a log was fitted to is
    kept).

    ``measured`` replaces the numbers that the topology's file gives. The topology has those that are used.

    A number that no such machine can have, or that contradicts the others, moves nothing, and a warning
    (:class:`NumberKeptApart`) says which and why.
    """
    topology = fabrics.load(name_or_path, nodes=nodes, device=device, fabric=fabric)
    numbers = measured or topology.measured
    if not numbers:
        return topology
    calibration = informed(numbers, name_or_path, device, tuple(sorted((fabric or {}).items())))
    for i, reason in calibration.apart.items():
        warnings.warn(f"{numbers[i].where} is kept apart and moves nothing: {reason}", NumberKeptApart, stacklevel=2)
    used = tuple(number for i, number in enumerate(numbers) if i not in calibration.apart)
    if not used:
        return replace(topology, measured=())
    own = calibration.calibration
    if topology.calibration is not None:  # the numbers move what a log was fitted to, and the log still tells of it
        spans = topology.calibration.provenance.spans
        own = replace(own, provenance=replace(own.provenance, spans=spans))
    return replace(topology, calibration=own.over(topology.calibration), measured=used)


@lru_cache(maxsize=32)
def informed(
    numbers: tuple[MeasuredNumber, ...],
    name_or_path: str,
    device: str | Device | None = None,
    fabric: tuple[Any, ...] = (),
) -> MeasuredMachine:
    """The constants that numbers of a machine make most likely; those that cannot be, or that contradict the others,
    are kept apart and move nothing. Raises as :func:`load`."""
    choices = [_choice(number, name_or_path, device, dict(fabric)) for number in numbers]
    times = [
        number.seconds or number.nbytes * bus_factor(number.kind, chosen.group.size) / number.busbw
        for number, chosen in zip(numbers, choices, strict=True)
    ]
    kind = costs_of(choices[0].group)
    before = [seconds(chosen, kind) for chosen in choices]
    apart = impossible(numbers, choices, times, before)
    apart |= disordered(numbers, times, before, apart)
    machine, apart = trusted_machine(choices, times, kind, apart)
    after = [seconds(chosen, machine.costs) for chosen in choices]
    return MeasuredMachine(numbers, tuple(times), tuple(before), tuple(after), machine, apart)


def _choice(number: MeasuredNumber, name_or_path: str, device: str | Device | None, fabric: Table) -> NcclChoice:
    machine = fabrics.load(name_or_path, nodes=number.nodes, device=device, fabric=fabric or None)
    try:
        mesh = fabrics.mesh(machine, nodes=number.nodes, nproc_per_node=number.gpus or None)
    except TopologyError as error:
        raise TopologyError(f"{number.where}: {error}") from None
    if mesh.world_size < 2:
        raise TopologyError(f"{number.where}: a collective of one GPU says nothing; give nodes or gpus")
    group = Group(machine, mesh.gpus, number.launch, number.version)
    return choice(Request(number.kind, number.nbytes), group)
