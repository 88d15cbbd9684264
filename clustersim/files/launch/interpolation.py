"""``${...}`` in YAML files of Hydra and OmegaConf: what a node refers to, and what its resolvers work out.

OmegaConf itself is not asked: it knows none of the resolvers that NeMo registers, and stops at the first node that it
cannot resolve, where most of those are paths that change nothing.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import Table, short
from clustersim.files.launch.arithmetic import NO_NUMBER, number_of

DEPTH = 30
"""References of references; more go in a circle."""
MISSING = "???"
"""What OmegaConf has for a value that somebody must fill in."""
STAGES = ("training", "fine_tuning", "peft", "prompt_learning", "adapter_learning", "ia3_learning", "evaluation")
"""Under which NeMo-Framework-Launcher puts a file of this kind (``conf/training/...``): its own nodes are said so."""

Path: TypeAlias = tuple[str, ...]


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number) or abs(number) >= 2**53:
        return None
    return int(number) if number == int(number) and not (isinstance(value, float) and value != int(value)) else number


def _product(values: Sequence[Any]) -> Any:
    return math.prod(values)


RESOLVERS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "multiply": _product,
    "mul": _product,
    "sum": sum,
    "add": sum,
    "plus": sum,
    "subtract": lambda values: values[0] - sum(values[1:]),
    "minus": lambda values: values[0] - sum(values[1:]),
    "sub": lambda values: values[0] - sum(values[1:]),
    "divide": lambda values: values[0] / math.prod(values[1:]),
    "div": lambda values: values[0] / math.prod(values[1:]),
    "int_div": lambda values: values[0] // values[1],
    "floor_div": lambda values: values[0] // values[1],
    "divide_floor": lambda values: values[0] // values[1],
    "divide_ceil": lambda values: -(-values[0] // values[1]),
    "ceil_div": lambda values: -(-values[0] // values[1]),
    "div_up": lambda values: -(-values[0] // values[1]),
    "max": max,
    "min": min,
}
"""What NeMo's launcher, Megatron-Bridge and others register, of numbers alone."""


SUMS = ("eval", "math", "calc")
"""Resolvers of whole expressions, of which sums of numbers are worked out."""


def _summed(text: str) -> Any:
    """A sum of numbers; None for anything else."""
    try:
        return number_of(ast.parse(text.strip(), mode="eval").body) if len(text) < 200 else None
    except (SyntaxError, *NO_NUMBER, RecursionError, MemoryError):
        return None


def resolved(table: Table, name: str) -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every leaf of a file; what is null says nothing, what cannot be resolved stays as it is.

    Raises :class:`ScenarioError` where nodes refer to each other in a circle.
    """
    for path, value in _leaves(table, ()):
        result = _value(value, path[:-1], table, name, 0)
        for inner, leaf in _leaves(result, path) if isinstance(result, Mapping) else [(path, result)]:
            if leaf is not None:
                yield ".".join(_plain(part) for part in inner), leaf


def referring(value: Any) -> bool:
    """Whether a value refers to another, or is worked out by a resolver.

    >>> referring("${oc.decode:8}"), referring("${GPUS}"), referring(8)
    (True, False, False)
    """
    return isinstance(value, str) and re.search(r"\$\{[^}]*[.:][^}]*\}", value) is not None


def resolved_beside(value: str, key: str, stated: Mapping[str, Any], name: str) -> Any:
    """What a value that a command gives refers to, among values by dotted path; itself where nothing tells.

    ``key`` : the dotted path that it is given for. Raises :class:`ScenarioError` for a reference to itself.
    """
    table: Table = {}
    for path, leaf in stated.items():
        *above, last = path.split(".")
        level = table
        for part in above:
            below = level.setdefault(part, {})
            level = below if isinstance(below, dict) else {}
        level.setdefault(last, leaf)
    return _value(value, tuple(key.split("."))[:-1], table, name, 0)


def beside(table: Table, environment: Mapping[str, str], given: Mapping[str, Any]) -> Table:
    """A file's table with variables of the environment where it asks for them, and with the fields that a command
    gives by dotted path, so that what refers to them has their values."""
    changed: Table = _with_environment(table, environment)
    for path, value in given.items():
        *above, last = path.split(".")
        level = changed
        for part in above:
            below = level.get(part)
            level = below if isinstance(below, dict) else {}
        if last in level:
            level[last] = value
    return changed


def _with_environment(value: Any, environment: Mapping[str, str]) -> Any:
    """A value whose ``${oc.env:NAME}`` and ``${oc.env:NAME,default}`` are those variables that are set."""
    if isinstance(value, Mapping):
        return {key: _with_environment(below, environment) for key, below in value.items()}
    if isinstance(value, list):
        return [_with_environment(below, environment) for below in value]
    if not isinstance(value, str):
        return value
    match = _ASKED.search(value)
    while match is not None:
        end = _end(value, match.start())
        variable = environment.get(match[1])
        if variable is not None and end > 0:
            value = f"{value[: match.start()]}{variable}{value[end:]}"
            match = _ASKED.search(value, match.start() + len(variable))
        else:
            match = _ASKED.search(value, match.end())
    return value


_ASKED = re.compile(r"\$\{\s*(?:oc\.)?env:\s*(\w+)")
"""Where a value asks for a variable of the environment."""


def _plain(part: str) -> str:
    # Megatron-LM's tests write arguments as keys.
    return part[2:].replace("-", "_") if part.startswith("--") else part


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    for key, below in value.items():
        if isinstance(below, Mapping):
            yield from _leaves(below, (*path, str(key)))
        elif below is not None:
            yield (*path, str(key)), below


def _value(value: Any, place: Path, table: Table, name: str, depth: int) -> Any:
    """A value with what it refers to; ``at`` : the node that it stands in."""
    if isinstance(value, list):
        return [_value(item, place, table, name, depth) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth > DEPTH:
        raise ScenarioError(f"{name}: {'.'.join(place)}: {short(value)!r} refers to itself")
    text = value.strip()
    if text.startswith("${") and _end(text, 0) == len(text):
        referred = _reference(text[2:-1].strip(), place, table, name, depth + 1)
        return value if referred is None else referred
    text_so_far = ""
    i = 0
    while i < len(value):
        end = _end(value, i) if value.startswith("${", i) else -1
        if end < 0:
            text_so_far += value[i]
            i += 1
            continue
        referred = _reference(value[i + 2 : end - 1].strip(), place, table, name, depth + 1)
        text_so_far += value[i:end] if referred is None or isinstance(referred, Mapping | list) else str(referred)
        i = end
    return text_so_far


def _end(text: str, start: int) -> int:
    """Behind the bracket that closes the one at ``start``; -1 where none does."""
    open_ = 0
    for i in range(start, len(text)):
        open_ += text[i] == "{"
        open_ -= text[i] == "}"
        if text[i] == "}" and open_ == 0:
            return i + 1
    return -1


def _reference(inside: str, place: Path, table: Table, name: str, depth: int) -> Any:
    """What ``${inside}`` is; None where nothing here tells."""
    resolver = re.fullmatch(r"([A-Za-z_][\w.]*)\s*:(.*)", inside, re.DOTALL)
    if resolver:
        return _worked_out(resolver[1], _arguments(resolver[2]), place, table, name, depth)
    inside = str(_value(inside, place, table, name, depth)) if "${" in inside else inside
    dots = len(inside) - len(inside.lstrip("."))
    parts = [part for part in re.split(r"[.\[\]]", inside) if part]
    # One dot is the node that the reference stands in, each further one the node above.
    root: Path = place[: len(place) - (dots - 1)] if dots and dots - 1 <= len(place) else ()
    referred, home = _looked_up(table, (*root, *parts) if dots else tuple(parts))
    if referred is None and not dots and parts and parts[0] in STAGES:
        referred, home = _looked_up(table, tuple(parts[1:]))
    if isinstance(referred, str) and "${" in referred:
        result = _value(referred, home, table, name, depth)
        return None if isinstance(result, str) and "${" in result else result
    if isinstance(referred, Mapping):
        return {key: _value(below, home, table, name, depth) for key, below in referred.items()}
    return referred


def _looked_up(table: Table, path: Path) -> tuple[Any, Path]:
    entry: Any = table
    for part in path:
        if isinstance(entry, list) and part.isdecimal() and int(part) < len(entry):
            entry = entry[int(part)]
        else:
            entry = entry.get(part) if isinstance(entry, Mapping) else None
    return entry, path[:-1]


def _arguments(text: str) -> list[str]:
    """Split at commas outside brackets."""
    pieces = [""]
    open_ = 0
    for char in text:
        open_ += char in "{[("
        open_ -= char in "}])"
        if char == "," and not open_:
            pieces.append("")
        else:
            pieces[-1] += char
    return [piece.strip() for piece in pieces]


NOTHING = ("null", "None", "???", None)
"""What OmegaConf and NeMo write where nothing is meant."""


def _unquoted(value: Any) -> Any:
    """An argument of a resolver, which may stand in quotes.

    >>> _unquoted("'8'"), _unquoted('"a b"'), _unquoted("it's")
    ('8', 'a b', "it's")
    """
    quoted = isinstance(value, str) and len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value


def _decoded(value: Any) -> Any:
    """A text as OmegaConf's ``oc.decode`` reads it: a number, a truth value, a list of them, or a text; None for
    nothing, and for what is not resolved.

    >>> _decoded("8"), _decoded("true"), _decoded("[1, 'a']"), _decoded("null"), _decoded("${left}")
    (8, True, [1, 'a'], None, None)
    """
    text = _unquoted(value.strip()) if isinstance(value, str) else value
    if text in NOTHING or str(text).startswith("$"):
        return None
    if isinstance(text, str) and text.startswith("[") and text.endswith("]"):
        return [_decoded(part) for part in _arguments(text[1:-1]) if part]
    number = _number(text)
    return number if number is not None else {"true": True, "false": False}.get(str(text).lower(), text)


def _worked_out(resolver: str, arguments: list[str], place: Path, table: Table, name: str, depth: int) -> Any:
    values = [_unquoted(_value(argument, place, table, name, depth)) for argument in arguments]
    if resolver in {"oc.env", "env"}:
        return values[1] if len(values) > 1 and values[1] not in NOTHING else None
    if resolver in {"oc.select", "oc.deprecated"} and values and isinstance(values[0], str):
        referred, home = _looked_up(table, tuple(values[0].split(".")))
        if referred is not None:
            return _value(referred, home, table, name, depth)
        return values[1] if resolver == "oc.select" and len(values) > 1 else None
    if resolver in {"oc.decode", "int", "float"} and values:
        return _decoded(values[0])
    if resolver in SUMS and len(values) == 1:
        return _number(_summed(str(values[0]).strip("'\"")))
    numbers = [_number(value) for value in values]
    work = RESOLVERS.get(resolver)
    if work is None or None in numbers:
        return None
    try:
        return _number(work([number for number in numbers if number is not None]))
    except (ZeroDivisionError, IndexError, OverflowError, TypeError):
        return None
