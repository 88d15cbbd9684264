"""The ``[calibration]`` table of a topology file: read into a Calibration, and written from one.

A constant is written ``"hop.net/Simple" = { value = "17.2 us", low = "15.1 us", high = "19.6 us" }``, with its unit
where it has one; ``low`` and ``high`` are its 95 % interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from clustersim.core import units
from clustersim.core.calibrated import PARTS, Calibration, Constant, Provenance, names, unit_of
from clustersim.core.errors import TopologyError, UnitError, nearest
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


class CalibrationSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Constants fitted to this machine's own measurements (:class:`clustersim.core.calibrated.Calibration`).

    Parameters
    ----------
    date : of the fit. data : files it is from. versions : of the software measured. rows : how many.
    nccl, gloo, mpi, device : constants by name. refused : constants that the rows cannot tell, and why.
    """

    date: str = ""
    data: list[str] = []
    versions: list[str] = []
    rows: int = 0
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
    provenance = Provenance(spec.date, tuple(spec.data), tuple(spec.versions), spec.rows, dict(spec.refused))
    try:
        return Calibration(**constants, provenance=provenance)
    except TopologyError as error:
        raise TopologyError(f"{where}: $.calibration.{error}") from None


def _constant(given: ConstantSpec, unit: str, path: str) -> Constant:
    def number(field: str, text: str | float) -> float:
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


def _written(value: float, unit: str) -> str:
    scale, suffix = _WRITTEN[unit]
    text = f"{value * scale:.5g}"
    return toml_value(text + suffix) if suffix else text if "." in text or "e" in text else text + ".0"
