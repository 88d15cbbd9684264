"""The ``[calibration]`` table of a topology file: read into a Calibration, and written from one.

A constant is written ``"hop.net/Simple" = { value = "17.2 us", low = "15.1 us", high = "19.6 us" }``, with its unit
where it has one; ``low`` and ``high`` are its 95 % interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Literal

import msgspec

from clustersim.core import units
from clustersim.core.calibrated import PARTS, Calibration, Constant, Provenance, names, unit_of
from clustersim.core.errors import TopologyError, UnitError, nearest
from clustersim.core.measured_spans import MeasuredSpan
from clustersim.core.tomls import toml_value

_PARSE: Mapping[str, Callable[[str], float]] = {
    "s": units.parse_time,
    "B/s": units.parse_bandwidth,
    "B": units.parse_bytes,
}
_WRITTEN = {"s": (1e6, " us"), "B/s": (1e-9, " GB/s"), "B": (1.0, " B"), "": (1.0, "")}


class ConstantSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fitted constant and its 95 % interval, each with its unit where it has one (``"17.2 us"``).

    Parameters
    ----------
    value : as fitted. low, high : ends of the interval.
    """

    value: str | float
    low: str | float | None = None
    high: str | float | None = None


class SpanSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rows of one collective on one number of ranks, as the measurements had them.

    Parameters
    ----------
    collective : as ``clustersim collective`` names it. nodes, ranks : that took part. smallest, largest : size of the
        buffer, as nccl-tests counts it. rows : timed calls. launch : how the job was started; absent where the log
        does not say. nccl : its version; absent where the log does not say.
    """

    collective: Literal[
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "reduce",
        "scatter",
        "gather",
        "all_to_all",
        "send",
        "sendrecv",
    ]
    nodes: Annotated[int, msgspec.Meta(ge=1)]
    ranks: Annotated[int, msgspec.Meta(ge=2)]
    smallest: str
    largest: str
    rows: Annotated[int, msgspec.Meta(ge=1)]
    launch: Literal["process_per_gpu", "single_process", "threads"] | None = None
    nccl: Annotated[str, msgspec.Meta(pattern=r"^[0-9]+\.[0-9]+$")] | None = None


class CalibrationSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Constants fitted to this machine's own measurements (:class:`clustersim.core.calibrated.Calibration`).

    Parameters
    ----------
    date : of the fit. data : files it is from. versions : of the software measured. rows : how many.
    spans : what of NCCL's collectives was measured: other predictions are no better known than an uncalibrated
        machine's. errors : what the fit leaves of its own rows in the median, by class of sizes: predictions are no
        surer. nccl, gloo, mpi, device : constants by name. refused : constants that the rows cannot tell, and why.
    """

    date: str = ""
    data: list[str] = []
    versions: list[str] = []
    rows: int = 0
    spans: list[SpanSpec] = []
    errors: dict[str, Annotated[float, msgspec.Meta(ge=0)]] = {}
    nccl: dict[str, ConstantSpec] = {}
    gloo: dict[str, ConstantSpec] = {}
    mpi: dict[str, ConstantSpec] = {}
    device: dict[str, ConstantSpec] = {}
    refused: dict[str, str] = {}


def calibration(spec: CalibrationSpec, where: str) -> Calibration:
    """The constants a file gives. Raises :class:`TopologyError` with file, field path, value and the nearest name."""
    constants: dict[str, dict[str, Constant]] = {}
    for part in PARTS:
        for name, given in getattr(spec, part).items():
            path = f"{where}: $.calibration.{part}.{name!r}"
            if name not in names(part):
                raise TopologyError(f"{path}: no constant of that name; {nearest(name, names(part))}")
            constants.setdefault(part, {})[name] = _constant(given, unit_of(part, name), path)
    spans = tuple(_span(span, f"{where}: $.calibration.spans[{i}]") for i, span in enumerate(spec.spans))
    provenance = Provenance(
        spec.date, tuple(spec.data), tuple(spec.versions), spec.rows, dict(spec.refused), spans, dict(spec.errors)
    )
    try:
        return Calibration(**constants, provenance=provenance)
    except TopologyError as error:
        raise TopologyError(f"{where}: $.calibration.{error}") from None


def _span(spec: SpanSpec, path: str) -> MeasuredSpan:
    ends = {}
    for field in ("smallest", "largest"):
        try:
            ends[field] = units.parse_bytes(getattr(spec, field))
        except UnitError as error:
            raise TopologyError(f"{path}.{field}: {error}") from None
    if not 0 < ends["smallest"] <= ends["largest"]:
        raise TopologyError(
            f"{path}: smallest = {spec.smallest!r}, largest = {spec.largest!r}: sizes are above zero, and the smallest "
            "comes first"
        )
    version = None if spec.nccl is None else units.parse_nccl_version(spec.nccl)
    return MeasuredSpan(
        spec.collective, spec.nodes, spec.ranks, **ends, rows=spec.rows, launch=spec.launch or "", version=version
    )


def _constant(given: ConstantSpec, unit: str, path: str) -> Constant:
    def number(field: str, text: str | float) -> float:
        """A text in SI units, a bare number where there is no unit. Raises :class:`TopologyError`."""
        if not unit and not isinstance(text, str):
            return float(text)
        if not unit:
            raise TopologyError(f"{path}.{field}: {text!r} is text; a share is a bare number, such as 0.9")
        try:
            return _PARSE[unit](text)  # type: ignore[arg-type]
        except UnitError as error:
            raise TopologyError(f"{path}.{field}: {error}") from None

    value = number("value", given.value)
    low, high = (value if text is None else number(f, text) for f, text in (("low", given.low), ("high", given.high)))
    return Constant(value, low, high)


def calibration_text(calibration: Calibration) -> str:
    """The ``[calibration]`` table as TOML; :func:`clustersim.cluster.files.load` reads it back to five digits."""
    return "\n".join(_lines(calibration)) + "\n"


def _lines(calibration: Calibration) -> Iterator[str]:
    provenance = calibration.provenance
    yield "[calibration]"
    yield f"date = {toml_value(provenance.date)}"
    yield f"data = {toml_value(provenance.data)}"
    yield f"versions = {toml_value(provenance.versions)}"
    yield f"rows = {provenance.rows}"
    if provenance.spans:
        yield "spans = ["
        yield from (f"  {{ {', '.join(_span_fields(span))} }}," for span in provenance.spans)
        yield "]"
    if provenance.errors:
        left = ", ".join(f"{toml_value(name)} = {error:.3g}" for name, error in provenance.errors.items())
        yield f"errors = {{ {left} }}"
    for part in PARTS:
        constants: Mapping[str, Constant] = getattr(calibration, part)
        if constants:
            yield f"\n[calibration.{part}]"
        for name, constant in constants.items():
            value, low, high = (
                _written(number, unit_of(part, name)) for number in (constant.value, constant.low, constant.high)
            )
            yield f"{toml_value(name)} = {{ value = {value}, low = {low}, high = {high} }}"
    if provenance.refused:
        yield "\n[calibration.refused]"
        yield from (f"{toml_value(name)} = {toml_value(why)}" for name, why in provenance.refused.items())


def _span_fields(span: MeasuredSpan) -> Iterator[str]:
    yield f"collective = {toml_value(span.kind)}"
    yield f"nodes = {span.nodes}"
    yield f"ranks = {span.ranks}"
    for field, size in (("smallest", span.smallest), ("largest", span.largest)):
        yield f"{field} = {toml_value(_size(size))}"
    yield f"rows = {span.rows}"
    if span.launch:
        yield f"launch = {toml_value(span.launch)}"
    if span.version is not None:
        yield f'nccl = "{span.version[0]}.{span.version[1]}"'


def _size(nbytes: float) -> str:
    """Bytes, none of them rounded away: whole prefixes where there are."""
    for prefix, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes % scale == 0:
            return f"{int(nbytes) // scale} {prefix}"
    return f"{nbytes:.17g} B"


def _written(value: float, unit: str) -> str:
    scale, suffix = _WRITTEN[unit]
    text = f"{value * scale:.5g}"
    return toml_value(text + suffix) if suffix else text if "." in text or "e" in text else text + ".0"
