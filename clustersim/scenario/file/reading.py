"""TOML text -> frozen Structs, and one clear error for what is wrong: file, field path, value, nearest right name."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from clustersim.core.errors import ClusterSimError, ScenarioError, nearest, nearest_name
from clustersim.core.file_kinds import taken_for
from clustersim.core.paths import data_path, shipped
from clustersim.core.texts import Table as Table
from clustersim.core.texts import at_path, check, choices_of, fields_of, plain_file, short, shown, text_of, there, toml

T = TypeVar("T", bound=msgspec.Struct)
Changes: TypeAlias = Mapping[str, object]
"""Dotted field -> value, as ``--set`` says them; None takes the field away."""


class OptionKey(str):
    """A dotted field of :data:`Changes` that came from ``--set``: an error names the option. Of another it names the
    changes of a Python caller."""

    __slots__ = ()


def source_of(key: str) -> str:
    """What a caller wrote to change a field.

    >>> source_of("cluster.nodes"), source_of(OptionKey("cluster.nodes"))
    ('changes cluster.nodes', '--set cluster.nodes')
    """
    return f"--set {key}" if isinstance(key, OptionKey) else f"changes {key}"


EXCLUSIVE = (
    ("model.hf_config", "model.name"),
    ("model.file", "model.name"),
    ("model.file", "model.hf_config"),
    ("run.variation", "run.jitter"),
    ("parallel.microbatches", "parallel.global_batch_size"),
)
"""Of each pair only one may be there: setting one takes the other away."""
BY_FIELD = ("cluster", "model", "run")
"""Tables that a change sets field by field; ``strategy`` and ``parallel`` name a kind or a split, and are set whole."""
TOPOLOGY = "cluster.topology"
DEVICE = "cluster.device"


def shipped_or_file(path: str | Path, noun: str) -> Path:
    """The file of a ``noun``, such as ``"sweep"``, by path or by shipped name, where the noun may be left out: files in
    ``scenarios/`` that are no scenarios begin with what they are. Raises :class:`ScenarioError`."""
    return file_of(path, noun, [name for name in shipped("scenarios") if name.startswith(f"{noun}_")])


def file_of(path: str | Path, noun: str, shipped_names: Sequence[str]) -> Path:
    """The file of a ``noun``, by path or by one of the ``shipped_names`` shipped names. Raises
    :class:`ScenarioError`."""
    text = str(path)
    if there(text):
        plain_file(Path(text), ScenarioError)
        return Path(text)
    for name in (text, f"{noun}_{text}"):
        if name in shipped_names:
            return data_path("scenarios") / f"{name}.toml"
    if text.endswith(".toml") or "/" in text:
        raise ScenarioError(f"{short(text)}: no such file; shipped {noun}s need no path: {', '.join(shipped_names)}")
    raise ScenarioError(f"no {noun} {shown(text)}; {nearest(text, shipped_names)}")


def read_toml(path: Path) -> Table:
    """The tables of a TOML file. Raises :class:`ScenarioError` naming file, line and column."""
    return copy.deepcopy(_parsed(text_of(path, ScenarioError), str(path)))


@lru_cache(maxsize=64)
def _parsed(text: str, source: str) -> Table:
    return toml(text, source, ScenarioError)


def parse_overrides(texts: Iterable[str]) -> Table:
    """``["cluster.nodes=4"]`` -> ``{"cluster.nodes": 4}``: values are TOML; a bare word is taken as text.

    >>> parse_overrides(["cluster.nodes=4", "model.dtype=bf16", "run.fidelity='flow'"])
    {'cluster.nodes': 4, 'model.dtype': 'bf16', 'run.fidelity': 'flow'}

    Nothing after the sign takes a field away, or a table:

    >>> parse_overrides(["model.seq_len=", "campaign="])
    {'model.seq_len': None, 'campaign': None}

    A list of tables is set as a whole:

    >>> parse_overrides(["incident=[{kind = 'dead_rank', rank = 3, at = '2 s'}]"])
    {'incident': [{'kind': 'dead_rank', 'rank': 3, 'at': '2 s'}]}
    """
    overrides: Table = {}
    for text in texts:
        key, equals, value = text.partition("=")
        least = "+" if value.strip() and value.strip()[0] != "[" else "*"  # a whole table is taken away, or a list
        if not equals or not re.fullmatch(rf"[\w-]+(\.[\w-]+){least}", key.strip()):
            raise ScenarioError(f"--set {short(text)}: write it as table.key=value, like cluster.nodes=4")
        overrides[OptionKey(key.strip())] = _value(text, value.strip()) if value.strip() else None
    return overrides


def _value(text: str, value: str) -> object:
    try:
        table = tomllib.loads(f"value = {value}\n")
    except tomllib.TOMLDecodeError as error:
        # A shell eats quotes, so --set model.dtype=bf16 must mean the text; a broken list or table must not.
        if value and value[0] not in "[{\"'":
            return value
        raise ScenarioError(f"--set {short(text)}: the value is not TOML: {error}") from None
    except (ValueError, RecursionError):
        raise ScenarioError(f"--set {short(text)}: the value is larger or deeper than any field holds") from None
    if set(table) != {"value"}:
        raise ScenarioError(f"--set {short(text)}: one value only")
    check(table["value"], f"--set {short(text)}", ScenarioError)
    return table["value"]


def excluded(changes: Changes) -> set[str]:
    """Fields that what is set takes away."""
    return {
        excluded_key
        for pair in EXCLUSIVE
        for set_key, excluded_key in (pair, pair[::-1])
        if changes.get(set_key) is not None
    }


def by_field(changes: Changes) -> Table:
    """Changes with the tables of :data:`BY_FIELD` as their fields: what they do not say stays as the file has it.

    >>> by_field({"cluster": {"nodes": 4}, "strategy": {"kind": "fsdp"}})
    {'cluster.nodes': 4, 'strategy': {'kind': 'fsdp'}}
    """
    fields: Table = {}
    for key, value in changes.items():
        if key in BY_FIELD and isinstance(value, Mapping) and value:
            fields |= {type(key)(f"{key}.{name}"): inner for name, inner in value.items()}
        else:
            fields[key] = value
    return fields


def override(table: Table, changes: Changes) -> Table:
    """A copy of ``table`` with dotted keys set; tables on the way are made. A number steps into an array.

    None takes a field, a table or an item of an array away, and so does the other of two that exclude each other, which
    is not set itself. Another machine comes with its own GPUs: what the table says of the device was about the machine
    it names.
    """
    result = copy.deepcopy(table)
    gone = {name: None for name in excluded(changes) if name not in changes}
    cluster = result.get("cluster")
    if isinstance(cluster, dict) and changes.get(TOPOLOGY, cluster.get("topology")) != cluster.get("topology"):
        gone |= {DEVICE: None} if DEVICE not in changes else {}
    emptied = []
    for key, value in (dict(changes) | gone).items():
        value_at: Any = result
        *parents, last = key.split(".")
        for part in parents:
            if value is None and isinstance(value_at, dict) and part not in value_at:
                break  # what is not there cannot be taken away
            value_at = _step(value_at, part, key)
        else:
            if isinstance(value_at, list):
                value_at[_index(value_at, last, key)] = copy.deepcopy(value)
                emptied += [value_at] if value is None else []
            elif not isinstance(value_at, dict):
                raise ScenarioError(f"{source_of(key)}: {parents[-1]!r} holds the value {shown(value_at)}, not a table")
            elif value is None:
                value_at.pop(last, None)
            else:
                value_at[last] = copy.deepcopy(value)  # a table of the caller's is not written into
    for items in emptied:  # at the end: indices are those of the file
        items[:] = [item for item in items if item is not None]
    return result


def _step(container: Any, part: str, key: str) -> Any:
    if isinstance(container, list):
        return container[_index(container, part, key)]
    if isinstance(container, dict):
        return container.setdefault(part, {})
    raise ScenarioError(f"{source_of(key)}: nothing named {part!r} inside the value {shown(container)}")


def _index(items: list[Any], part: str, key: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise ScenarioError(f"{source_of(key)}: {part!r} is not an index of an array of {len(items)}")
    return int(part)


def convert(
    table: Table,
    struct: type[T],
    file: str,
    root: str = "$",
    changed: Iterable[str] = (),
    dec_hook: Callable[[type, object], object] | None = None,
) -> T:
    """``table`` as a Struct of this type.

    Parameters
    ----------
    file : str, said first in an error. root : str, the field path of ``table`` in that file, ``"$.strategy"``.
    changed : dotted keys of :data:`Changes`, which an error names instead of the file.
    dec_hook : msgspec's, for types with a unit.

    Raises :class:`ScenarioError`.
    """
    try:
        return msgspec.convert(table, struct, dec_hook=dec_hook)
    except msgspec.ValidationError as error:
        raise _explain(str(error), table, struct, file, root, changed) from None


def _explain(message: str, table: Table, struct: type, file: str, root: str, changed: Iterable[str]) -> ScenarioError:
    problem, _, tail = message.partition(" - at `$")
    path = tail.rstrip("`")
    value, kind = at_path(table, struct, path)
    if root == "$" and not changed and (other := taken_for(table, fields_of(struct))):
        return ScenarioError(f"{file}: {other}")
    if match := re.fullmatch(r"Object contains unknown field `(.*)`", problem):
        name = match.group(1)
        table_at = f"{root}{path}".removeprefix("$.")
        known = fields_of(kind) or ["nothing"]
        home = _home_of(name, struct) if root == "$" and nearest_name(name, known) is None else ""
        near = home or nearest(name, known)
        wrong = f"unknown field {shown(name)} = {shown(value.get(name))}; {near}"
        kind_key = next((key for key in changed if key == f"{table_at}.kind" and name != "kind"), None)
        if kind_key is not None:  # the file's fields are those of another kind
            nothing = "=" if isinstance(kind_key, OptionKey) else " = None"
            wrong += f"; {source_of(type(kind_key)(f'{table_at}.{name}'))}{nothing} takes it away"
        path += f".{short(name)}"
        changed_key = next((key for key in changed if key.startswith(f"{root}{path}.".removeprefix("$."))), None)
        if changed_key is not None:  # the table is there by a change alone
            return ScenarioError(f"{source_of(changed_key)}: {wrong} (at {root}{path})")
    elif match := re.fullmatch(r"Object missing required field `(.*)`", problem):
        wrong = f"missing field {match.group(1)!r}; a table here holds {', '.join(fields_of(kind) or ['nothing'])}"
        table_at = f"{root}{path}".removeprefix("$.")
        of_table = [key for key in changed if key.startswith(f"{table_at}.")]
        if of_table and {key.removeprefix(f"{table_at}.").partition(".")[0] for key in of_table} == {*value}:
            return ScenarioError(f"{source_of(of_table[0])}: beside it, {wrong} (at {root}{path})")
    elif problem.startswith("Invalid enum value"):
        wrong = f"{shown(value)} is not a choice; {nearest(str(value), choices_of(kind))}"
    elif problem.startswith("Expected"):
        wrong = f"{shown(value)} does not fit: {_plain(problem)}"
    else:
        wrong = problem  # of a type with a unit, or a table's own check
    full = root + path
    return ScenarioError(f"{_source(file, full, changed)}: {wrong} (at {full})")


def _home_of(name: str, file: type) -> str:
    """Where a field belongs that another table of this kind of file has; nothing where none has it."""
    tables = {table.encode_name: table.type for table in msgspec.structs.fields(file)}
    tables |= getattr(file, "READ_LATER", {})
    homes = [f"[{table}]" for table, kind in tables.items() if name in fields_of(kind)]
    return f"it is a field of {' and of '.join(homes)}" if homes else ""


def _plain(problem: str) -> str:
    """msgspec's ``Expected `int | null`, got `str``` in the words of a TOML file."""
    type_words = {"null": "nothing", "str": "text in quotes", "bool": "true or false", "int": "a whole number"}
    type_words |= {"float": "a number", "object": "a table", "array": "an array"}
    text = re.sub(r"`([^`]*)`", lambda m: " or ".join(type_words.get(w, w) for w in m.group(1).split(" | ")), problem)
    return text[:1].lower() + text[1:]


@contextmanager
def place(file: str, field: str, changed: Iterable[str] = ()) -> Iterator[None]:
    """Say in which file and field an error of a lower layer was caused; arguments as in :func:`convert`."""
    try:
        yield
    except ClusterSimError as error:
        text = str(error)
        match = re.search(r"\(at (\$[^)]*)\)", text)
        source = f"{_source(file, match.group(1) if match else field, changed)}: "
        text = text if match else f"{text} (at {field})"
        raise ScenarioError(text if text.startswith(source) else source + text) from None  # of a place within a place


def _source(file: str, field: str, changed: Iterable[str]) -> str:
    """What set this field, or something it is part of; else the file."""
    key = field.removeprefix("$.")
    option = next((name for name in changed if key == name or key.startswith((f"{name}.", f"{name}["))), None)
    return source_of(option) if option else file
