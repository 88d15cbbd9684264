"""Measured kernels as columns, with the spec sheet of each row's GPU: what ``tests/kernel_fit.py`` fits."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clustersim.core.device import device
from clustersim.model.seconds.kernel_law.constants import KIN
from clustersim.model.seconds.kernel_law.sheet import Sheet, sheet_of

FOLDER = Path(__file__).parents[2] / "shared" / "measurements" / "kernels"
GPUS: Mapping[str, str] = {
    "a100_sxm": "A100-SXM4-80GB",
    "h100_sxm": "H100-SXM5-80GB",
    "b200_sxm": "B200-SXM-180GB",
    "gb200": "GB200-186GB",
    "rtx_pro_6000_server": "RTX-PRO-6000-Server",
}
"""Systems of the table -> devices."""
DEVICES: Mapping[str, str] = {
    **GPUS,
    "a100_pcie": "A100-PCIe-80GB",
    "h200": "H200-SXM5-141GB",
    "gb300": "GB300-288GB",
}
"""The same, and those whose attention alone others published."""

Row = Mapping[str, str]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Kernels:
    """Rows of one table, in columns."""

    rows: list[Row]

    def __getitem__(self, column: str) -> Floats:
        return np.array([float(row[column]) for row in self.rows])

    def words(self, column: str) -> npt.NDArray[np.str_]:
        """A column of text."""
        return np.array([row[column] for row in self.rows])

    @property
    def seconds(self) -> Floats:
        """What was measured."""
        return self["time_us"] * 1e-6

    @property
    def generation(self) -> npt.NDArray[np.str_]:
        """Architecture of each row's GPU, or the one at whose level it is."""
        return np.array([_generation(row["system"]) for row in self.rows])

    def take(self, which: npt.NDArray[np.bool_]) -> Kernels:
        """Some of the rows."""
        return Kernels([row for row, wanted in zip(self.rows, which, strict=True) if wanted])

    def sheet(self, arithmetic: str, levels: Mapping[str, float]) -> Sheet:
        """The sheets of all rows; a generation without a level has 0."""
        names, places = self._systems
        sheets = [sheet_of(device(DEVICES[name]), arithmetic, levels.get(_generation(name), 0.0)) for name in names]
        fields = Sheet.__dataclass_fields__
        return Sheet(*(np.array([float(getattr(sheet, name)) for sheet in sheets])[places] for name in fields))

    @cached_property
    def _systems(self) -> tuple[list[str], npt.NDArray[np.intp]]:
        names, places = np.unique(self.words("system"), return_inverse=True)
        return names.tolist(), places


def _generation(system: str) -> str:
    arch = device(DEVICES[system]).arch
    return KIN.get(arch, arch)


def read(
    table: str, wanted: Callable[[Row], bool], group: Callable[[Row], object], most: int, regime: str = "burst"
) -> Kernels:
    """At most ``most`` rows of each group, drawn by a hash of the row that no order of the file changes."""
    groups: dict[object, list[tuple[int, Row]]] = {}
    with gzip.open(FOLDER / f"{table}.csv.gz", "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["system"] in GPUS and row.get("regime", "burst") == regime and wanted(row):
                draw = zlib.crc32(",".join(row.values()).encode())
                groups.setdefault(group(row), []).append((draw, row))
    drawn = [sorted(rows, key=lambda pair: pair[0])[:most] for rows in groups.values()]
    return Kernels([row for rows in drawn for _, row in rows])
