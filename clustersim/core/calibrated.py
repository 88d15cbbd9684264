"""What a machine's own measurements say of the model's constants: values, how sure they are, and where they are from.

A topology carries a :class:`Calibration` (the ``[calibration]`` table of its file); the time models overlay their
defaults with it. Names are flat: ``nccl`` those of :class:`clustersim.core.costs.CommunicationCosts`, ``gloo`` those of
:class:`clustersim.core.costs.GlooCosts`, ``mpi`` of :class:`clustersim.core.costs.MpiCosts`, ``device`` the
efficiencies of :class:`clustersim.core.device.Device`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from clustersim.core.costs import COSTS, GLOO_COSTS, MPI_COSTS, flat, unit
from clustersim.core.device import DTYPES
from clustersim.core.errors import TopologyError, nearest
from clustersim.core.measured_spans import MeasuredSpan

PARTS = ("nccl", "gloo", "mpi", "device")
"""What constants are of."""


class Constant(msgspec.Struct, frozen=True):
    """A fitted constant.

    Parameters
    ----------
    value : float, in SI units. low, high : float, its 95 % interval.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Provenance:
    """Where fitted constants are from.

    Parameters
    ----------
    date : ``"2026-11-21"``. data : files. versions : of NCCL or PyTorch, as the data say. rows : measurements used.
    refused : constant -> why the data cannot tell it; it keeps its default.
    spans : of NCCL's collectives, what was measured; empty where that is not recorded, or none was. errors : by class
        of sizes (:func:`clustersim.core.ranges.size_class`), the median |relative error| that the fit leaves of its own
        rows.
    """

    date: str = ""
    data: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    rows: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)
    spans: tuple[MeasuredSpan, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasuredNumber:
    """One collective that was timed on a machine: one of the few numbers that tell it from its kind.

    Parameters
    ----------
    kind : as :class:`clustersim.collectives.Request`. nbytes : float [bytes], S. nodes, gpus : that ran it, ``gpus`` on
    each node, 0 for all of them. seconds : float, 0 where ``busbw`` [bytes/s] says it. launch : how it was started.
    version : (major, minor) of NCCL. where : the file and field, for errors.
    """

    kind: str
    nbytes: float
    nodes: int
    gpus: int
    seconds: float
    busbw: float
    launch: str
    version: tuple[int, int]
    where: str


@dataclass(frozen=True, eq=False)
class Calibration:
    """Constants fitted to one machine's measurements.

    Parameters
    ----------
    nccl, gloo, mpi, device : fitted constants by flat name. provenance : where they are from.

    Raises :class:`TopologyError` for a name that is no constant, or a value it cannot have.

    >>> Calibration(nccl={"base": Constant(4e-6, 3e-6, 5e-6)}).values("nccl")
    {'base': 4e-06}
    """

    nccl: Mapping[str, Constant] = field(default_factory=dict)
    gloo: Mapping[str, Constant] = field(default_factory=dict)
    mpi: Mapping[str, Constant] = field(default_factory=dict)
    device: Mapping[str, Constant] = field(default_factory=dict)
    provenance: Provenance = Provenance()

    def __post_init__(self) -> None:
        for part in PARTS:
            constant_names = names(part)
            for name, constant in getattr(self, part).items():
                if name not in constant_names:
                    raise TopologyError(f"{part}: no constant {name!r}; {nearest(name, constant_names)}")
                _check(f"{part}.{name!r}", constant, unit_of(part, name))

    def values(self, part: str) -> dict[str, float]:
        """The values of ``"nccl"``, ``"gloo"``, ``"mpi"`` or ``"device"`` by flat name."""
        return {name: constant.value for name, constant in getattr(self, part).items()}

    def over(self, base: Calibration | None) -> Calibration:
        """These constants, and for those not among them the base's; the provenance is this one's, and with constants of
        NCCL's from nobody knows what, what was measured for the base's says nothing."""
        if base is None:
            return self
        merged = {part: {**getattr(base, part), **getattr(self, part)} for part in PARTS}
        spans = self.provenance.spans
        if spans or not self.nccl:
            spans = tuple(dict.fromkeys((*spans, *base.provenance.spans)))
        errors = self.provenance.errors or base.provenance.errors
        return Calibration(**merged, provenance=replace(self.provenance, spans=spans, errors=errors))


def names(part: str) -> tuple[str, ...]:
    """Names of all constants of ``"nccl"``, ``"gloo"``, ``"mpi"`` or ``"device"``."""
    if part == "device":
        return (*(f"matmul.{dtype}" for dtype in DTYPES), "stream", "kernel_floor", "launch")
    return tuple(flat(COSTS if part == "nccl" else MPI_COSTS if part == "mpi" else GLOO_COSTS))


def unit_of(part: str, name: str) -> str:
    """``"s"``, ``"B/s"``, ``"B"``, or ``""`` for a share."""
    if part == "device":
        return "s" if name in {"kernel_floor", "launch"} else ""
    return unit(name)


def _check(constant_path: str, constant: Constant, unit: str) -> None:
    least = "at least" if unit == "s" else "above"
    if not (math.isfinite(constant.value) and (constant.value > 0 or (constant.value == 0 and unit == "s"))):
        raise TopologyError(f"{constant_path}: {constant.value} is no value of this constant; it must be {least} 0")
    if not constant.low <= constant.value <= constant.high:
        raise TopologyError(
            f"{constant_path}: the interval {constant.low:g} to {constant.high:g} does not hold the value "
            f"{constant.value:g}"
        )
