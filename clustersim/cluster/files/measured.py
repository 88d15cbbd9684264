"""The ``[measured]`` table of a topology file: a few timed collectives of the machine, read into numbers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from clustersim.core import units
from clustersim.core.calibrated import MeasuredNumber
from clustersim.core.errors import TopologyError, UnitError
from clustersim.core.units import Bandwidth, Seconds


class NumberSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One timed collective: ``{nodes = 2, size = "8 B", time = "38 us"}``, or ``busbw`` as nccl-tests prints it.

    Parameters
    ----------
    size : of the buffer, as nccl-tests counts it. nodes : that took part. gpus : of each node; all when absent.
    time : what it took. busbw : instead, the bus bandwidth. nccl : its version.
    launch : how the job was started; nccl-tests' ``-g 8`` is ``single_process``, ``-t 8`` is ``threads``.
    """

    size: str
    nodes: Annotated[int, msgspec.Meta(ge=1)] = 1
    gpus: Annotated[int, msgspec.Meta(ge=1)] | None = None
    time: Seconds | None = None
    busbw: Bandwidth | None = None
    launch: Literal["process_per_gpu", "single_process", "threads"] = "process_per_gpu"
    nccl: Annotated[str, msgspec.Meta(pattern=r"^[0-9]+\.[0-9]+")] = "2.28"


class MeasuredSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A few numbers of this machine, by collective.

    Parameters
    ----------
    all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, send : what each was measured to take.
    """

    all_reduce: list[NumberSpec] = []
    all_gather: list[NumberSpec] = []
    reduce_scatter: list[NumberSpec] = []
    broadcast: list[NumberSpec] = []
    reduce: list[NumberSpec] = []
    all_to_all: list[NumberSpec] = []
    send: list[NumberSpec] = []


def numbers(spec: MeasuredSpec, where: str) -> tuple[MeasuredNumber, ...]:
    """What a file says was measured. Raises :class:`TopologyError` with file, field path, value and what is right."""
    return tuple(
        _number(kind, number, f"{where}: $.measured.{kind}[{i}]")
        for kind in MeasuredSpec.__struct_fields__
        for i, number in enumerate(getattr(spec, kind))
    )


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
