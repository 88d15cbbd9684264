"""Reading what people wrote: one place where text becomes tables, and anything else becomes one clear line.

Whatever a file holds (broken UTF-8, a NUL, nesting a thousand deep, a number of thousands of digits, a key twice), the
caller's own error says file, place and what would be right, with values shortened.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import stat
import tomllib
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from clustersim.core.errors import ClusterSimError
from clustersim.core.paths import data_path
from clustersim.core.units import format_bytes

LARGEST = 64 * 2**20
"""Largest file that a person writes [bytes]: tables of a hundred thousand rows are below it."""
DEEPEST = 60
"""How deep tables and lists may lie inside each other."""
_PARSED = 1000
"""How deep they may lie in a text that is looked at further: no parser is asked for more by anybody's file."""
_BRACKETS = re.compile(r'"(?:\\.|[^"\\])*"|[\[{\]}]')
"""A text in quotes, or a bracket, of JSON."""
_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""A terminal's colours and other marks (ECMA-48, control sequences)."""
SHOWN = 60
"""Characters of a value in a message."""

Raised = type[ClusterSimError]
Table: TypeAlias = dict[str, Any]
"""Of a file that people write, as it was parsed: by key text, numbers, lists and further tables."""
Plain: TypeAlias = dict[str, Any]
"""An answer in plain values, as ``--json`` prints it: by key text, numbers, lists and further answers."""


@cache
def data_table(name: str) -> Table:
    """The facts in ``data/NAME.toml``: one table for all who ask, to read and not to change."""
    return tomllib.loads((data_path("data") / f"{name}.toml").read_text(encoding="utf-8"))


def shown(value: object) -> str:
    """A value as a message shows it.

    >>> shown("x" * 100), shown(10 ** 9999)
    ("'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...", 'a whole number of thousands of digits')
    """
    try:
        text = repr(value[: SHOWN + 1] if isinstance(value, str | bytes) else value)
    except ValueError:  # of Python's own limit
        return "a whole number of thousands of digits"
    except RecursionError:
        return "tables nested without end"
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def unstyled(text: str) -> str:
    """A text without the colours and other marks of a terminal."""
    return _STYLE.sub("", text) if "\x1b" in text else text


def short(text: str) -> str:
    """A name or path as a message shows it."""
    printable = "".join(c if c.isprintable() else "?" for c in text[: 4 * SHOWN])
    return printable if len(text) <= 4 * SHOWN else printable + "..."


def there(path: str | Path) -> bool:
    """Whether there is anything of this name; a path that cannot be one, such as one of a megabyte, is none."""
    try:
        return os.path.exists(path)
    except (OSError, ValueError):
        return False


def is_file(path: str | Path) -> bool:
    """Whether there is such a file."""
    return there(path) and os.path.isfile(path)


def is_folder(path: str | Path) -> bool:
    """Whether there is such a folder."""
    return there(path) and os.path.isdir(path)


def plain_file(path: Path, error: Raised) -> int:
    """The size [bytes] of a file. Raises ``error`` for a folder, a pipe or a device, which would have no end."""
    try:
        status = path.stat()
    except (OSError, ValueError) as wrong:
        raise error(f"{path}: cannot be read: {getattr(wrong, 'strerror', None) or wrong}") from None
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe"}
        raise error(f"{path}: cannot be read: it is a {kinds.get(stat.S_IFMT(status.st_mode), 'device')}, not a file")
    return status.st_size


def text_of(path: Path, error: Raised) -> str:
    """The whole text of a file in UTF-8. Raises ``error``."""
    size = plain_file(path, error)
    if size > LARGEST:
        raise error(f"{path}: {format_bytes(size)} are more than the {format_bytes(LARGEST)} of text that are read")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as wrong:
        raise error(f"{path}: cannot be read: {wrong.strerror or wrong}") from None
    except UnicodeDecodeError as wrong:
        line = 1 + wrong.object[: wrong.start].count(b"\n")
        raise error(f"{path}: is not a text file in UTF-8: {wrong.reason} (line {line})") from None


def toml(text: str, where: str, error: Raised) -> Table:
    """The tables of a TOML text; ``where`` is said first in an error. Raises ``error``."""
    try:
        table = tomllib.loads(text.replace("\r\n", "\n"))
    except tomllib.TOMLDecodeError as wrong:
        raise error(f"{where}: is not TOML: {wrong}") from None
    except (ValueError, RecursionError) as wrong:
        raise error(f"{where}: is not TOML: {beyond_parser(wrong)}") from None
    check(table, where, error)
    return table


def headline(title: str) -> tuple[str, str]:
    """A title's name, and what was changed, in the parentheses that end it; ``""`` where nothing was.

    >>> headline("ddp_gpt2 (cluster.nodes=4)"), headline("ddp_gpt2")
    (('ddp_gpt2', 'cluster.nodes=4'), ('ddp_gpt2', ''))
    """
    name, _, changes = title.partition(" (")
    return (name, changes[:-1]) if title.endswith(")") and name else (title, "")


def json_table(text: str, where: str, error: Raised) -> Table:
    """The object of a JSON text, every key once. Raises ``error``."""
    twice: list[list[str]] = []

    def once(pairs: list[tuple[str, Any]]) -> Table:
        """An object's table; keys that are there twice are noted."""
        table = dict(pairs)
        if len(table) < len(pairs):
            twice.append([name for name, _ in pairs])
        return table

    try:
        table = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as wrong:
        raise error(f"{where}: is not JSON: {beyond_parser(wrong, text)}") from None
    if twice:
        refuse_twice(twice[0], where, error)
    if not isinstance(table, dict):
        raise error(f"{where}: holds {shown(table)}, not an object in braces")
    check(table, where, error)
    return table


def refuse_twice(names: list[str], source: str, error: Raised) -> None:
    """Raise ``error`` for a key that is there twice."""
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise error(f"{source}: the key {shown(repeated)} is there twice; say it once")


T = TypeVar("T")


def decoded(data: bytes | bytearray | str, kind: type[T], damaged: str, error: Raised) -> T:
    """JSON that a program wrote, as ``kind``; ``damaged`` is the error's beginning, with file and line. Raises
    ``error``."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
        raise error(f"{damaged}: {str(wrong)[:200]}") from None


def csv_rows(text: str, source: str, error: Raised) -> Iterator[list[str]]:
    """The rows of a CSV text. Raises ``error`` for a NUL, or a cell without an end."""
    if "\0" in text:
        raise error(f"{source}: line {1 + text[: text.index(chr(0))].count(chr(10))} holds a NUL character")
    try:
        yield from csv.reader(io.StringIO(text, newline=""))
    except csv.Error as wrong:
        raise error(f"{source}: is not a CSV table: {wrong}") from None


ENDLESS = frozenset({"time_step_limit", "mamba_dt_limit"})
"""Fields that configs of state spaces end at infinity, or at 1e308, as published (Nemotron-H, Mamba-2)."""


def check(table: Any, source: str, error: Raised) -> None:
    """Raise ``error`` for what no field can hold: numbers without end or of more than 64 bits, NUL, endless nesting."""
    for path, depth, value in _values(table):
        field = f"(at $.{path[:200]})" if path else "(at $)"
        if depth > DEEPEST:
            raise error(f"{source}: tables and lists lie more than {DEEPEST} deep inside each other {field}")
        if isinstance(value, str) and "\0" in value:
            raise error(f"{source}: {shown(value)} holds a NUL character {field}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise error(f"{source}: {shown(value)} is larger than any number that is meant here {field}")
        endless = isinstance(value, float) and value > 0 and path.partition("[")[0].rpartition(".")[2] in ENDLESS
        if isinstance(value, float) and not (abs(value) < 1e200 or endless):
            raise error(f"{source}: {value} is not a number that a field can hold {field}")


def _values(table: Any) -> Iterator[tuple[str, int, Any]]:
    """(path, depth, value) of everything inside, without recursion."""
    waiting: list[tuple[str, int, Any]] = [("", 0, table)]
    while waiting:
        path, depth, value = waiting.pop()
        yield path, depth, value
        if depth > DEEPEST:
            continue
        if isinstance(value, dict):
            for key, item in value.items():
                yield f"{path}.{key}".lstrip("."), depth, key
                waiting.append((f"{path}.{key}".lstrip("."), depth + 1, item))
        elif isinstance(value, list):
            waiting += [(f"{path}[{i}]", depth + 1, item) for i, item in enumerate(value)]


def beyond_parser(wrong: Exception, text: str = "") -> str:
    """What is beyond a parser; of the JSON in ``text`` also what it would only meet with a lower limit of recursion,
    which other packages raise."""
    if isinstance(wrong, RecursionError) or _nesting(text) > _PARSED:
        return "tables and lists lie too deep inside each other"
    text = str(wrong)
    return "a whole number has thousands of digits" if "integer string conversion" in text else text[:200]


def _nesting(text: str) -> int:
    """How deep objects and lists of a JSON text, broken or not, lie inside each other."""
    deepest = 0
    depth = 0
    for mark in _BRACKETS.findall(text):
        depth += (mark in "[{") - (mark in "]}")
        deepest = max(deepest, depth)
    return deepest


def at_path(value: Any, kind: Any, path: str) -> tuple[Any, Any]:
    """The value and the declared type at msgspec's path ``.cluster.links[1]``, as far as both can be followed."""
    for name, index in re.findall(r"\.([\w-]+)|\[(\d+|\.\.\.)\]", path):
        if name:
            value = value.get(name) if isinstance(value, dict) else None
            kind = typing.get_type_hints(kind, include_extras=True).get(name) if _is_struct(kind) else None
        else:
            value = value[int(index)] if isinstance(value, list) and index.isdigit() else value
            bare = _bare(kind)
            arguments = typing.get_args(_bare(kind))
            kind = arguments[-1 if typing.get_origin(bare) is dict else 0] if arguments else None
        kind = _bare(kind)
    return value, kind


def fields_of(kind: Any) -> list[str]:
    """Names of a Struct's fields, as a file has them, of an optional one's too; none of another type."""
    bare = _bare(kind)
    return [field.encode_name for field in msgspec.structs.fields(bare)] if _is_struct(bare) else []


def choices_of(kind: Any) -> list[str]:
    """What a Literal allows."""
    return [str(choice) for choice in typing.get_args(kind)]


def _bare(kind: Any) -> Any:
    """A type without Annotated and Optional around it."""
    if typing.get_origin(kind) is typing.Annotated:
        return _bare(typing.get_args(kind)[0])
    if typing.get_origin(kind) in {typing.Union, types.UnionType}:
        return _bare(next(member for member in typing.get_args(kind) if member is not type(None)))
    return kind


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
