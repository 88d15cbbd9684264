"""What people, disks and other programs make of a file: values that no field means, damage, and whole tables drawn from
the schema that reads them."""

from __future__ import annotations

import copy
import gzip
import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

NASTY = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            False,
            0,
            -1,
            1,
            2**31,
            2**63,
            -(2**63),
            10**30,
            0.0,
            -0.5,
            1e-300,
            1e300,
            math.inf,
            -math.inf,
            math.nan,
            "",
            " ",
            "\0",
            "\r",
            "🙂",
            "a" * 5000,
            "x/" * 2000,
            "$\\frac{1}{$",
            "[bold]",
            "<script>",
            "../../..",
            "/dev/zero",
            "/",
            "gpu[0-99999999]",
            "gpu[0-9]" * 9,
            "1e400 GB/s",
            "-1 GB/s",
            "400 Gigs",
            [],
            {},
            [[]],
            [1] * 300,
            {"a": {}},
            ["a"],
            [None],
            "node*",
            "ddp",
            "fsdp",
            "pipeline",
            "nan",
            "inf",
        ]
    ),
    st.integers(-100, 10**7),
    st.floats(allow_nan=True),
    st.text(max_size=20),
)


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*here, key)
        yield from places(item, (*here, key))


@st.composite
def documents(draw: Any, base: dict[str, Any]) -> dict[str, Any]:
    """A document with some values replaced, left out, misspelt or doubled."""
    found = json.loads(json.dumps(base))
    for _ in range(draw(st.integers(0, 3))):
        way = draw(st.sampled_from(list(places(found)) or [()]))
        if not way:
            break
        holder: Any = found
        for key in way[:-1]:
            holder = holder[key]
        act = draw(st.sampled_from(["set", "set", "set", "drop", "rename", "double"]))
        if act == "set":
            holder[way[-1]] = copy.deepcopy(draw(NASTY))  # what is drawn is the strategy's own
        elif act == "drop":
            del holder[way[-1]]
        elif act == "rename" and isinstance(holder, dict):
            holder[draw(st.sampled_from([f"{way[-1]}s", "", "\0", "a.b", "x" * 300]))] = holder.pop(way[-1])
        elif act == "double" and isinstance(holder, list):
            holder += [holder[way[-1]]] * draw(st.integers(1, 40))
    return dict(found)


def toml(value: Any) -> str:
    """TOML of a document, tables inline; what TOML cannot hold is left to the reader to refuse."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    return "null" if value is None else json.dumps(value)


def toml_file(table: dict[str, Any]) -> bytes:
    """A TOML file."""
    return "".join(f"{json.dumps(str(k))} = {toml(v)}\n" for k, v in table.items()).encode("utf-8", "surrogatepass")


def json_file(value: Any) -> bytes:
    """A JSON file, with NaN and Infinity as Python writes them."""
    return json.dumps(value).encode()


INSERTED = (
    b"\0",
    b"\r",
    b"\xff\xfe",
    b"[" * 3000,
    b"{" * 3000,
    b"9" * 6000,
    b'{"a":' * 2000,
    b"\na = 0x" + b"f" * 5000 + b"\n",
    b"\n\n",
    b"#",
    b'"',
    b"\xef\xbb\xbf",
    b"\nx = " + b"[" * 2000 + b"]" * 2000 + b"\n",
    b'"a": ' + b"[" * 500 + b"]" * 500 + b", ",
)
"""Bytes that no parser likes in the wrong place."""


@st.composite
def damaged(draw: Any, whole: Any, times_whole: int = 6) -> bytes:
    """A file's bytes, sometimes cut, with bytes changed, or with something no parser likes inside."""
    text = bytearray(draw(whole))
    act = draw(st.sampled_from(["whole"] * times_whole + ["cut", "bytes", "insert", "twice", "gzip", "empty"]))
    at = draw(st.integers(0, max(len(text) - 1, 0)))
    if act == "cut":
        del text[at:]
    elif act == "bytes" and text:
        text[at] = draw(st.integers(0, 255))
    elif act == "insert":
        text[at:at] = draw(st.sampled_from(INSERTED))
    elif act == "twice":
        text += bytes(text)
    elif act == "gzip":
        return gzip.compress(bytes(text), mtime=0)[: draw(st.integers(1, 4000))]
    elif act == "empty":
        return b""
    return bytes(text)


# ---- tables from their schema ----------------------------------------------------------------------------------------

QUANTITIES = {
    "Bandwidth": ["1 GB/s", "400 Gb/s", "0 GB/s", "1e-9 GB/s", "1e12 GB/s"],
    "CopyRate": [True, False, "20 GB/s", "0 GB/s", "1e12 GB/s"],
    "Bytes": ["8 B", "25 MiB", "0 B", "1 PB"],
    "Seconds": ["1 s", "30 min", "0 s", "1 us", "90 d", "1e9 d"],
    "Duration": ["2 min", "0 s", {"mean": "30 min", "median": "10 min"}, {"mean": "4 h", "law": "exponential"}],
    "Every": ["best", "30 min", "100 steps", "1 us", "1 step", "0 steps"],
    "Rate": [
        "6.5 per 1000 node-days",
        "1 per week",
        "1e6 per hour",
        "1 per 1e9 gpu-years",
        "0 per day",
        "3 per rack-day",
    ],
}
"""Of a type with a unit: what is meant, and what is hardly."""


def fitting(kind: inspect.Type) -> Any:
    """Values of a declared type: those of small runs, and the ends of its range."""
    if isinstance(kind, inspect.BoolType):
        return st.booleans()
    if isinstance(kind, inspect.LiteralType):
        return st.sampled_from(kind.values)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        ends = [end for end in (kind.ge, kind.gt, kind.le, kind.lt) if end is not None]
        return st.sampled_from([1, 2, 2, 4, 8, 3, *ends] + [0.5] * isinstance(kind, inspect.FloatType))
    if isinstance(kind, inspect.CustomType):
        return st.sampled_from(QUANTITIES[kind.cls.__name__])
    if isinstance(kind, inspect.UnionType):
        return st.one_of([fitting(one) for one in kind.types if not isinstance(one, inspect.NoneType)])
    if isinstance(kind, inspect.VarTupleType | inspect.ListType):
        return st.lists(fitting(kind.item_type), max_size=8)
    if isinstance(kind, inspect.StructType):
        return tables(kind.cls)
    return NASTY


@st.composite
def tables(
    draw: Any, struct: type[msgspec.Struct], usual: Any = None, there: Any = (), most: int = 5
) -> dict[str, Any]:
    """A table of a schema: what it needs and is not ``there``, and a few of its other fields; ``usual`` has strategies
    by field."""
    told = inspect.type_info(struct)
    usual = usual or {}
    assert isinstance(told, inspect.StructType)
    kinds = {field.encode_name: field.type for field in told.fields}
    needed = [field.encode_name for field in told.fields if field.required and field.encode_name not in there]
    others = [name for name in kinds if name not in needed]
    more = st.lists(st.sampled_from(others), max_size=most, unique=True) if others else st.just([])
    names = [*needed, *draw(more)]
    return {name: draw(usual[name] if name in usual else fitting(kinds[name])) for name in names}
