"""Plain values as TOML text, which the standard library reads and does not write."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping

from clustersim.core.texts import Table


def toml_text(table: Table) -> str:
    """A table of plain values, nested tables under heads of their own after what is plain; None is left out."""
    return "\n".join(_lines(table, "")).lstrip("\n") + "\n"


def toml_value(value: object) -> str:
    """A value as TOML writes it on one line.

    >>> toml_value([{"match": "node0/nic0", "factor": 0.5}])
    '[{match = "node0/nic0", factor = 0.5}]'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {toml_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, str):  # as JSON, but for DEL, which JSON leaves as it is and TOML refuses
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)


LARGE = 1e7
"""Whose zeros nobody counts in a title."""


def plainly(value: object) -> str:
    """A changed value as a title shows it: text as it is, nothing for what was taken away, anything else as TOML.

    >>> plainly("hgx-h100"), plainly({"speed": 0.8}), plainly(1e12)
    ('hgx-h100', '{speed = 0.8}', '1e12')
    """
    if isinstance(value, float) and abs(value) >= LARGE and float(short := f"{value:g}") == value:
        return short.replace("e+", "e")
    return value if isinstance(value, str) else "" if value is None else toml_value(value)


def nested(values: Table) -> Table:
    """Values by dotted names as tables in tables.

    >>> nested({"model.name": "resnet50", "seed": 1})
    {'model': {'name': 'resnet50'}, 'seed': 1}
    """
    tables: Table = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        table_at = tables
        for part in parents:
            table_at = table_at.setdefault(part, {})
        table_at[last] = value
    return tables


def flat(table: Table, leaf: Collection[str] = (), head: str = "") -> Table:
    """The inverse: tables inside tables as dotted names. An empty table, and one that holds a key of ``leaf``, is a
    value.

    >>> flat({"cluster": {"nodes": 4}, "run.steps": 3})
    {'cluster.nodes': 4, 'run.steps': 3}
    """
    flattened: Table = {}
    for key, value in table.items():
        if isinstance(value, dict) and value and not set(leaf) & set(value):
            flattened |= flat(value, leaf, f"{head}{key}.")
        else:
            flattened[head + key] = value
    return flattened


def _lines(table: Table, head: str) -> Iterator[str]:
    plain = {name: value for name, value in table.items() if not isinstance(value, Mapping) and value is not None}
    if head and (plain or not table):
        yield f"\n[{head}]"
    yield from (f"{_key(name)} = {toml_value(value)}" for name, value in plain.items())
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(dict(value), f"{head}.{_key(name)}".lstrip("."))


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else toml_value(name)
