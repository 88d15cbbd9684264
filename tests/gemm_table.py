"""How well the GEMM model meets measured tables: the figures quoted for it, printed again from the rows themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clustersim.core.device import Device
from clustersim.core.device_names import device_from_text
from clustersim.core.errors import TopologyError
from clustersim.model.seconds import gemm_time

_QUANTITY = re.compile(r"(cublas\w* gemm|matmul perf table|^matmul achieved|^linear forward|^bmm forward)", re.I)
_NAMED = re.compile(r"\b([bmnkBMNK])=(\d+)")
_DTYPES = {"f32xf32->f32": "tf32", "bf16xbf16->bf16": "bf16", "fp8_e4m3": "fp8"}


@dataclass(frozen=True)
class Gemm:
    """A measured product: ``batch`` of (m x k)(k x n) in ``seconds``."""

    device: Device
    dtype: str
    table: str
    batch: int
    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """Errors of one device, dtype and table: relative, ``predicted / measured - 1``."""

    device: str
    dtype: str
    table: str
    rows: int
    median_abs: float
    mean_abs: float
    bias: float

    def __str__(self) -> str:
        """One line: who, how many rows, median and mean absolute error and median signed error in percent."""
        return (
            f"{self.device:18s} {self.dtype:5s} {self.table:24s} {self.rows:5d} rows  median {self.median_abs:6.1%}  "
            f"mean {self.mean_abs:6.1%}  bias {self.bias:+6.1%}"
        )


def read_gemms(rows: Iterable[Mapping[str, str]]) -> list[Gemm]:
    """The matrix products among rows of a compute table (columns source, device, quantity, shape_or_params, dtype,
    value, unit); rows of anything else, or of a device that is not known, are left out."""
    gemms = [_read(row) for row in rows if _QUANTITY.search(row["quantity"])]
    return [gemm for gemm in gemms if gemm is not None]


def _read(row: Mapping[str, str]) -> Gemm | None:
    dtype = _DTYPES.get(row["dtype"], row["dtype"])
    sizes = {name.lower(): int(size) for name, size in _NAMED.findall(row["shape_or_params"])}
    if not sizes:
        found = re.match(r"(\d+)x(\d+)x(\d+)", row["shape_or_params"])
        sizes = dict(zip("mnk", map(int, found.groups()), strict=True)) if found else {}
    try:
        device = device_from_text(row["device"])
        value = float(row["value"])
        device.runs_as(dtype)
    except (TopologyError, ValueError):
        return None
    if not {"m", "n", "k"} <= sizes.keys():
        return None
    batch = sizes.get("b", 1)
    m = sizes["m"]
    n = sizes["n"]
    k = sizes["k"]
    seconds = value * 1e-3 if row["unit"] == "ms" else 2.0 * batch * m * n * k / (value * 1e12)
    return Gemm(device, dtype, f"{row['source'].split()[0][:18]} {row['quantity'].split()[0]}", batch, m, n, k, seconds)


def check(rows: Iterable[Mapping[str, str]]) -> list[Fit]:
    """Errors of :func:`~clustersim.model.seconds.gemm.gemm_time` per device, dtype and source, in the order of the
    table.

    Nothing is fitted here: the rates are the devices' own, the shape terms the global constants.
    """
    errors: dict[tuple[str, str, str], list[float]] = {}
    for g in read_gemms(rows):
        predicted = gemm_time(g.device, g.dtype, g.m, g.n, g.k, g.batch)
        errors.setdefault((g.device.name, g.dtype, g.table), []).append(predicted / g.seconds - 1.0)
    return [_fit(key, np.array(values)) for key, values in errors.items()]


def _fit(key: tuple[str, str, str], errors: npt.NDArray[np.float64]) -> Fit:
    size = np.abs(errors)
    return Fit(*key, len(errors), float(np.median(size)), float(size.mean()), float(np.median(errors)))
