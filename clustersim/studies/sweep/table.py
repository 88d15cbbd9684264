"""Rows as a table: one column an axis, one a figure; in memory, as CSV, as Parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from clustersim.core.arrays import Columns
from clustersim.core.errors import ClusterSimError, nearest, needs
from clustersim.core.figures import shown_in
from clustersim.core.memory_states import in_cell
from clustersim.core.outputs import fresh, writing
from clustersim.core.program import PHASES
from clustersim.core.texts import Table, decoded
from clustersim.studies.sweep.axes import Scalar
from clustersim.studies.sweep.left import ABOUT, CASES, SweepDescription
from clustersim.studies.sweep.row import SweepFigures, SweepRow, row_of
from clustersim.studies.sweep.store import RESULTS, Store

WORDS = ("strategy", "model", "topology", "device")
COUNTS = ("nodes", "gpus", "parameters")
SHARES = (*(phase for phase in PHASES if phase != "communication"), "exposed_communication", "bubble", "idle")
"""Of the step: what the GPU did, by phase, and what it waited for."""


class _TableCase(msgspec.Struct):
    key: str
    axes: Table


def about(folder: str | Path) -> SweepDescription:
    """What the sweep in a folder is. Raises :class:`ClusterSimError` where there is none."""
    instead = "`clustersim sweep FILE --out DIR` writes one"
    try:
        text = (Path(folder) / ABOUT).read_bytes()
    except OSError as error:
        raise ClusterSimError(f"{folder}: holds no sweep ({error.strerror}: {ABOUT}); {instead}") from None
    damaged = f"{folder}: holds no sweep, {ABOUT} is damaged; {instead}"
    return decoded(text, SweepDescription, damaged, ClusterSimError)


def rows(folder: str | Path) -> Iterator[tuple[Table, SweepRow]]:
    """(axes, row) of every case of the sweep in a folder that has a row, in the order of the grid.

    Two cases that are the same scenario share a row.
    """
    about(folder)
    store = Store(Path(folder))
    places = store.places()
    with (store.path / CASES).open("rb") as cases, store.file.open("rb") as results:
        for text in cases:
            case = decoded(text, _TableCase, f"{store.path / CASES} is damaged; sweep again", ClusterSimError)
            if case.key in places:
                results.seek(places[case.key])
                yield case.axes, row_of(results.readline(), f"{store.file}: the row {case.key[:12]}...")


def read(folder: str | Path) -> Columns:
    """The table of the sweep in a folder, a line per case that has a row, in the order of the grid.

    Returns
    -------
    dict of columns: the axes by name; ``key`` and ``error`` (empty where there is a result); words (``strategy``,
    ``model``, ``topology``, ``device``, ``busiest_link``); figures as of ``clustersim run --json``, not-a-number where
    there is none: ``gpus``, ``step_time_s``, ``samples_per_s``, ``tokens_per_s``, ``mfu``, ``compute_s``,
    ``exposed_communication_s``, ``bytes_sent_per_gpu``, ``peak_memory_bytes`` and others; ``share_forward`` and so on
    (of the step); ``busiest_link_utilisation``; ``steps_like``, which published steps it is like, and ``off_by``,
    within what share of the prediction half of them lay; ``fits`` (bool, False beside an error); ``memory``, what is
    said of it, and how likely it runs out (:func:`clustersim.core.memory_states.in_cell`).
    """
    axes = about(folder).axes
    flat = [{name: shown.get(name) for name in axes} | _flat(row, axes) for shown, row in rows(folder)]
    names = list(flat[0]) if flat else []
    return {name: _column([line[name] for line in flat]) for name in names}


def _flat(row: SweepRow, taken: Sequence[str]) -> dict[str, Scalar]:
    result = row.result
    error = row.error
    flat: dict[str, Scalar] = {"key": row.key, "error": f"{error.kind}: {error.message}" if error else ""}
    flat |= {name: getattr(result, name, "") for name in WORDS}
    flat |= {name: _number(getattr(result, name, None)) for name in COUNTS}
    flat |= {figure.key: _number(_figure(result, figure.key)) for figure in shown_in("sweep")}
    shares = dict.fromkeys(SHARES, 0.0) | result.phase_shares if result else {}
    flat |= {f"share_{name}": _number(shares.get(name)) for name in SHARES}
    busiest = result.hottest_links[0] if result and result.hottest_links else None
    flat |= {"busiest_link": busiest.link if busiest else ""}
    flat |= {"busiest_link_utilisation": _number(busiest.utilisation if busiest else None)}
    flat |= {"steps_like": result.trust.kind if result else "", "off_by": _number(result.trust.p50 if result else None)}
    flat |= {"fits": result is not None and result.fits}
    flat |= {"memory": in_cell(result.state, result.runs_out) if result else ""}
    return {name: value for name, value in flat.items() if name not in taken}


def _figure(result: SweepFigures | None, key: str) -> float | None:
    if result is None:
        return None
    value: float | None = getattr(result, key, None)
    return result.more.get(key) if value is None else value


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _column(values: list[Any]) -> npt.NDArray[Any]:
    if all(isinstance(value, bool) for value in values):
        return np.array(values, dtype=bool)
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        whole = np.iinfo(np.int64)
        if all(whole.min <= value <= whole.max for value in values):
            return np.array(values, dtype=np.int64)
        return np.array([str(value) for value in values])  # such as a seed of 64 bits, no digit of which may be lost
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return np.array(values, dtype=np.float64)
    return np.array([str(value) for value in values])


def write(columns: Columns, path: str | Path) -> None:
    """A table as ``.csv`` or ``.parquet``. Raises :class:`ClusterSimError` for another ending."""
    path = Path(path)
    if path.suffix not in WRITERS:
        raise ClusterSimError(f"{path}: a table is a .csv or a .parquet; {nearest(path.suffix, WRITERS)}")
    with writing(path), fresh(path) as temporary:
        WRITERS[path.suffix](columns, temporary)


def _write_csv(columns: Columns, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        texts = [[_text(value) for value in column.tolist()] for column in columns.values()]
        writer.writerows(zip(*texts, strict=True))


def _text(value: Any) -> str:
    """A cell: nothing for not-a-number."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if isinstance(value, float) and value != value else str(value)


def _write_parquet(columns: Columns, path: Path) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ClusterSimError(needs("Parquet", "parquet")) from None
    # Not-a-number is what a figure that does not exist has here; a data base calls it null.
    arrays = {name: pyarrow.array(column, from_pandas=True) for name, column in columns.items()}
    parquet.write_table(pyarrow.table(arrays), path)


WRITERS = {".csv": _write_csv, ".parquet": _write_parquet}


def is_sweep(folder: str | Path) -> bool:
    """Whether a folder holds a sweep's rows."""
    return (Path(folder) / RESULTS).is_file()
