"""The ``[measured]`` table of a topology file: a few timed collectives of the machine, read into numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clustersim import units
from clustersim.calibrated import MeasuredNumber
from clustersim.errors import TopologyError, UnitError
from clustersim.fabrics import reading
from clustersim.fabrics.schema import MeasuredSpec, NumberSpec


def numbers(spec: MeasuredSpec, where: str) -> tuple[MeasuredNumber, ...]:
    """What a file says was measured. Raises :class:`TopologyError` with file, field path, value and what is right."""
    return tuple(
        _number(kind, one, f"{where}: $.measured.{kind}[{i}]")
        for kind in MeasuredSpec.__struct_fields__
        for i, one in enumerate(getattr(spec, kind))
    )


def numbers_of(table: Mapping[str, Any], where: str) -> tuple[MeasuredNumber, ...]:
    """The same from a parsed table, such as a scenario's."""
    return numbers(reading.decode({"name": "", "measured": dict(table)}, where).measured or MeasuredSpec(), where)


def _number(kind: str, spec: NumberSpec, path: str) -> MeasuredNumber:
    if (spec.time is None) == (spec.busbw is None):
        raise TopologyError(f'{path}: needs either time = "38 us" or busbw = "180 GB/s", and not both')
    try:
        nbytes = units.parse_bytes(spec.size)
    except UnitError as error:
        raise TopologyError(f"{path}.size: {error}") from None
    if nbytes <= 0 or (spec.time or spec.busbw or 0.0) <= 0:
        raise TopologyError(f"{path}: a size, a time and a rate are above zero")
    major, minor = spec.nccl.split(".")[:2]
    return MeasuredNumber(
        kind=kind,
        nbytes=nbytes,
        nodes=spec.nodes,
        gpus=spec.gpus or 0,
        seconds=float(spec.time or 0.0),
        busbw=float(spec.busbw or 0.0),
        launch=spec.launch,
        version=(int(major), int("".join(c for c in minor if c.isdigit()))),
        where=path,
    )
