"""Parquet files as columns of plain values: a logger's history of steps, or a table of Nsight Systems' export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustersim.core.errors import TraceError, needs
from clustersim.core.texts import short
from clustersim.core.units import format_bytes
from clustersim.files.traces import files

if TYPE_CHECKING:
    from pyarrow import Table
    from pyarrow.parquet import ParquetFile

MAGIC = b"PAR1"


def columns(path: Path, wanted: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Numbers and words of a file by column, those that are ``wanted`` (empty: all); lists and bytes are left out.

    Raises :class:`TraceError` where pyarrow is not installed, and for a file that is damaged or too large.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise TraceError(f"{path}: {needs('a Parquet file', 'parquet')}") from None
    try:
        with ParquetFile(path) as file:
            table = _table(file, path, wanted)
            return {name: table.column(name).to_pylist() for name in table.column_names}
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        raise TraceError(f"{path}: not a whole Parquet file: {short(str(error))}") from None


def _table(file: ParquetFile, path: Path, wanted: Sequence[str]) -> Table:
    from pyarrow import types

    groups = (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups))
    if (size := sum(group.total_byte_size for group in groups)) > files.LARGEST:
        raise TraceError(
            f"{path}: {format_bytes(size)} is above the {format_bytes(files.LARGEST)} that are read at once"
        )
    fields = [
        field
        for field in file.schema_arrow
        if (not wanted or field.name in wanted) and not (types.is_nested(field.type) or types.is_binary(field.type))
    ]
    return file.read(columns=[field.name for field in fields])
