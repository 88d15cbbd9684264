"""Tables of rows beside the tests and in ``../shared``."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path


def table_rows(path: Path) -> list[dict[str, str]]:
    """Every row of a ``.csv`` or ``.csv.gz`` by its columns; lines that begin with ``#`` are no rows."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))
