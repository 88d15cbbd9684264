"""Options of launch files -> fields of a scenario, by the rows of a framework's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from clustersim.core import texts
from clustersim.core.errors import ScenarioError
from clustersim.core.texts import shown
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.interpolation import MISSING
from clustersim.files.launch.table import FrameworkTable, LaunchOption, holds, load

SURE = 0.9
"""How alike an unknown option and a known one are that is taken for a slip of the pen."""
_KINDS = {"zero_optimization.stage"}
"""Options that say what kind of strategy it is, and are one of its fields as well."""
FIRST = ("strategy.kind", "strategy.version")
"""Fields that other rows' conditions ask for."""


class ScenarioFields(texts.Table):
    """Fields by dotted name, with who said each."""

    def __init__(self) -> None:
        super().__init__()
        self.by: dict[str, OptionValue] = {}

    def say(self, field: str, value: Any, said: OptionValue, *, over: bool = False) -> None:
        """Raises :class:`ScenarioError` where another option has said something else."""
        before = self.by.get(field)
        if before is not None and not over and self[field] != value:
            raise ScenarioError(
                f"{before.where}: {before.name} {shown(before.value)} and {said.name} {shown(said.value)} contradict "
                f"each other: {field} would be {shown(self[field])} and {shown(value)}; leave one out"
            )
        self[field], self.by[field] = value, said


def together(read: Sequence[Document]) -> dict[Key, OptionValue]:
    """The options of all files. Raises :class:`ScenarioError` where two say different things."""
    found: dict[Key, OptionValue] = {}
    for one in read:
        for key, said in one.options.items():
            if key == ("args", "launcher"):
                continue
            before = found.get(key)
            if before is not None and before.value != said.value:
                raise ScenarioError(
                    f"{before.where} and {said.where}: {said.name} is {shown(before.value)} in one and "
                    f"{shown(said.value)} in the other; say it once"
                )
            found[key] = said
    for one in read:  # what a command says beside its file counts against the file
        found.update(one.overrides)
    return found


def renamed(said: Mapping[Key, OptionValue], table: FrameworkTable) -> dict[Key, OptionValue]:
    """Options by the names that rows have, where a framework takes others for the same. Raises for two values."""
    names = {name: right for one in (table, *map(load, table.also)) for name, right in one.aliases.items()}
    found: dict[Key, OptionValue] = {}
    for (at, name), option in said.items():
        key = at, names.get(name, name)
        before = found.get(key)
        if before is not None and before.value != option.value:
            raise ScenarioError(
                f"{option.where}: {before.name} and {option.name} are one option, with {shown(before.value)} and "
                f"{shown(option.value)}; say it once"
            )
        found[key] = option
    return found


def apply(
    table: FrameworkTable, said: Mapping[Key, OptionValue], fields: ScenarioFields, model: str | None
) -> set[Key]:
    """Put what the rows say into ``fields``; returns what was read."""
    used: set[Key] = set()
    rows = [row for row in table.every() if not (model and row.field == "model.name")]
    known = {(str(row.at), row.option) for row in rows}
    for later in (False, True):  # conditions ask for degrees, which have none themselves
        now = [row for row in rows if bool(row.when and row.field not in FIRST) == later]
        for row in now:
            for key, one, field in _matching(row, said, table, known):
                used.add(key)
                if holds(row.when, fields):
                    _say(row, field, one, fields)
        for row in now:
            if row.default is not None and row.field not in fields and holds(row.when, fields):
                value = row.read(row.default)
                if value is not None:
                    fields[row.field] = value
    return used


def _say(row: LaunchOption, field: str, said: OptionValue, fields: ScenarioFields) -> None:
    if said.value == "auto" and field.startswith(("batch.", "strategy.", "model.", "run.")) and row.type != "text":
        if field.startswith("strategy.zero_optimization."):
            fields.say(field, said.value, said)  # which the strategy's own reader tells what it would be
        return  # filled in by the Trainer, whose arguments say it
    if said.value == MISSING:
        if field.startswith("cluster."):
            return
        raise ScenarioError(f"{said.where}: {said.name} is {MISSING}, which somebody must fill in; write its value")
    try:
        value = row.read(said.value)
    except ScenarioError as wrong:
        raise ScenarioError(f"{said.where}: {said.name}: {wrong}") from None
    if value is not None:
        fields.say(field, value, said, over=row.over)


def _matching(
    row: LaunchOption, said: Mapping[Key, OptionValue], table: FrameworkTable, known: set[tuple[str, str]]
) -> Iterator[tuple[Key, OptionValue, str]]:
    """(key, option, field) of every option that a row is about."""
    if "+" in row.option:
        parts = [(row.at, name) for name in row.option.split("+")]
        if all(part in said for part in parts):
            both = [said[part] for part in parts]
            joined = OptionValue(
                " and ".join(one.name for one in both), " ".join(str(one.value) for one in both), both[0].where
            )
            yield from ((part, joined, row.field) for part in parts)
    elif row.option.endswith(".*"):
        own = {name for at, name in known if at == row.at and name not in _KINDS}
        for key, one in said.items():
            if key[0] == row.at and key[1].startswith(row.option[:-1]) and key[1] not in own:
                yield key, one, row.field[:-1] + key[1][len(row.option) - 1 :]
    else:
        for key, one in said.items():
            if _names(key, table, known) == (row.at, row.option):
                yield key, one, row.field


def _names(key: Key, table: FrameworkTable, known: set[tuple[str, str]]) -> tuple[str, str]:
    """The row's name of an option: in a file whose keys are known by their ends, the longest end that is one."""
    at, name = key
    if at == "args" or (at, name) in known:
        return at, name
    parts = name.split(".")
    ends = (".".join(parts[i:]) for i in range(len(parts))) if table.leaf else iter([name])
    return next((("args", end) for end in ends if ("args", end) in known), (at, name))


def others(
    table: FrameworkTable, said: Mapping[Key, OptionValue], used: set[Key]
) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """Options that no row is about: unplayed, with what is instead; ignored; unknown. Raises for one that is nearly a
    known one."""
    unplayed: dict[str, str] = {}
    ignored = []
    unknown = []
    options = [row.option for row in table.every()]
    tables = [table, *(load(name) for name in table.also)]
    reasons = [one.unplayed.items() for one in tables]
    idle = [glob for one in tables for glob in one.ignored]
    for key, one in said.items():
        names = {key[1], key[1].rsplit(".", 1)[-1]} if table.leaf else {key[1]}
        if key in used or (table.leaf and key[0] == "config" and one.value in (False, "false", [])):
            continue
        told = (w for each in reasons for name in sorted(names) for glob, w in each if fnmatchcase(name, glob))
        why = next(told, None)
        if any(fnmatchcase(name, glob) for name in names for glob in idle):
            ignored.append(one.name)
        elif why is not None:
            unplayed[one.name] = why
        elif near := get_close_matches(key[1], options, 1, SURE):
            likely = f"--{near[0].replace('_', '-')}" if one.name.startswith("--") else near[0]
            raise ScenarioError(f"{one.where}: no option {one.name}; did you mean {likely}?")
        else:
            unknown.append(one.name)
    return unplayed, tuple(ignored), tuple(unknown)
