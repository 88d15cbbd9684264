"""Parts of one's own that a scenario names, and the code that each is: with other code, its outcome is another."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from clustersim.collectives.registry import ALGORITHMS
from clustersim.core.errors import ClusterSimError
from clustersim.core.optimizers import OPTIMIZERS
from clustersim.core.row_table import RowTable
from clustersim.core.texts import Table
from clustersim.model.families import FAMILIES, by_type
from clustersim.training.schedules import SCHEDULES, schedule
from clustersim.training.strategies import STRATEGIES

HERE = __name__.partition(".")[0]


def own_parts(inputs: Table, model_type: str) -> dict[str, str]:
    """ "part/strategy local_sgd" -> SHA-256 of its code, of each part that this package does not ship.

    inputs : every field of a scenario. model_type : of the model's config.json; empty where it has none.

    A row whose fields are data alone is its fields. Code is that of the files that its functions and classes are in,
    not of what those import; of a notebook's cell it is the function's own.
    """
    named: list[tuple[RowTable[Any], str]] = [(FAMILIES, by_type().get(model_type, ""))]
    for key, text in _texts(inputs):
        if key == "kind":
            named.append((STRATEGIES, text))
        elif key == "optimizer":
            named.append((OPTIMIZERS, text))
        elif key == "schedule":
            named.append((SCHEDULES, _schedule_name(text)))
        elif key == "algorithm":
            named.append((ALGORITHMS, text))
    rows = ((table, table.own(name)) for table, name in named if name)
    return {f"part/{table.noun} {row.name}": _digest(row) for table, row in rows if row is not None}


def _texts(inputs: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in nested tables, with the key that it stands at."""
    if isinstance(inputs, str):
        yield key, inputs
    elif isinstance(inputs, dict):
        for name, value in inputs.items():
            yield from _texts(value, name)
    elif isinstance(inputs, list | tuple):
        for value in inputs:
            yield from _texts(value, key)


def _schedule_name(text: str) -> str:
    """Its own name, of one that another system has for it; as it stands where no schedule has it."""
    try:
        return schedule(text).name
    except ClusterSimError:
        return text


def _digest(row: Any) -> str:
    """SHA-256 of what a row is."""
    digest = hashlib.sha256()
    for part in sorted(set(_code(row, set()))):
        digest.update(part)
    return digest.hexdigest()


def _code(value: Any, seen: set[int]) -> Iterator[bytes]:
    """What a row, a function or a plain value is made of; what refers to itself is gone through once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, str | bytes | int | float | None):
        yield repr(value).encode()
        return
    if isinstance(value, type) or callable(value):
        yield from _source(value)
    for inner in _inside(value):
        yield from _code(inner, seen)


def _inside(value: Any) -> Iterator[Any]:
    """What a value holds: fields, elements, what a function wraps or closes over."""
    if isinstance(value, type):
        return
    if isinstance(value, Mapping):
        yield from (item for pair in value.items() for item in pair)
    elif isinstance(value, Iterable):
        yield from value
    elif callable(value):
        yield from (cell.cell_contents for cell in getattr(value, "__closure__", None) or ())
        yield from (getattr(value, name) for name in ("__wrapped__", "func", "args") if hasattr(value, name))
    else:
        names: Iterable[str] = getattr(value, "__struct_fields__", ()) or getattr(value, "__dataclass_fields__", ())
        yield from (getattr(value, name) for name in names)


def _source(code: Any) -> Iterator[bytes]:
    """The file that a function or a class is in, where it is not this package's; else what it was compiled to."""
    module = getattr(code, "__module__", None) or ""
    if module.partition(".")[0] == HERE:
        return
    file = getattr(sys.modules.get(module), "__file__", None)
    if file and Path(file).is_file():
        yield Path(file).read_bytes()
    elif isinstance(code, type):
        yield from (part for value in vars(code).values() for part in _compiled(value))
    else:
        yield from _compiled(code)


def _compiled(function: Any) -> Iterator[bytes]:
    code = getattr(function, "__code__", None)
    if code is not None:
        yield code.co_code + repr((code.co_names, [c for c in code.co_consts if not hasattr(c, "co_code")])).encode()
