"""One table per framework: which option is which field of a scenario. Reading and writing use the same row."""

from __future__ import annotations

import math
import re
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

import msgspec

from clustersim.core import texts
from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.limits import MOST_LAYERS
from clustersim.core.paths import data_path
from clustersim.core.texts import shown, toml
from clustersim.files.frameworks import NAMES as NAMES
from clustersim.files.launch.shell_expand import SUM

Kind = Literal["int", "number", "text", "flag", "texts", "each", "ints", "positive", "any", "window", "stages"]

BOTH_SIDES = 2
"""Numbers of a window: tokens before, and behind."""
_WORDS = {
    "int": "a whole number",
    "number": "a number",
    "text": "a word",
    "flag": "true or false",
    "positive": "a number",
    "texts": "words",
    "each": "a word, or one for each layer",
    "ints": "whole numbers",
    "any": "a value",
    "stages": "layers of each pipeline stage, such as 4,4,4,4",
    "window": "tokens before and behind, such as 4095,0",
}


class LaunchOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One option.

    Parameters
    ----------
    option : its name: of the script's arguments with ``_`` and without dashes, of a file the dotted path; two joined
        by ``+`` are read as their values with a space between; ``a.*`` stands for everything below ``a``.
    field : dotted, of the scenario's tables, or of ``shape`` (the model's sizes) and ``batch`` (samples).
    type : of the option's value; ``positive`` is a number for true and 0 for false, ``each`` a word for all layers or
        one for each; ``window`` is Megatron's: tokens that one attends to before itself and behind; ``stages`` is
        MindSpeed's: layers of each pipeline stage, which become a layout.
    map : (option's value, field's value) pairs; a pair without the second says nothing of the field.
    open : values that ``map`` does not have are taken as they are.
    default : the option's value where nothing is said; None says nothing.
    when : what must hold for the option to matter, see :func:`holds`.
    at : ``args`` (a script's) or ``config`` (a file's); the table's own when absent.
    over : it settles the field whatever other options said. write : false for other names of what another row writes.
    on : what ``positive`` is written as.
    """

    option: str
    field: str
    type: Kind = "text"
    map: tuple[tuple[Any, ...], ...] | None = None
    open: bool = False
    default: Any = None
    when: str = ""
    at: Literal["", "args", "config"] = ""
    over: bool = False
    write: bool = True
    on: float = 1.0

    def read(self, value: Any) -> Any:
        """The field's value for an option's. Raises :class:`ScenarioError` for one of another type or choice."""
        typed = _typed(_below(value) if self.field == "model.name" else value, self.type)
        if self.map is None:
            return typed
        for option, *mapped in self.map:
            if _same(option, typed):
                return mapped[0] if mapped else None
        if self.open:
            return typed
        choices = ", ".join(str(pair[0]) for pair in self.map)
        other = "; of another model give the config.json: --model PATH" if self.field == "model.name" else ""
        raise ScenarioError(f"{shown(value)} is not a choice that is played; known: {choices}{other}")

    def written(self, value: Any) -> Any:
        """The option's value for a field's; None where it has no word for it, or nothing to say."""
        if value is None and self.default is None:
            return None
        if self.map is not None:
            for option, *mapped in self.map:
                if _same(mapped[0] if mapped else None, value):
                    return option
            return value if self.open else None
        if self.type == "positive":
            return None if value is None else self.on if value else 0.0
        if self.type == "window":
            return f"{value - 1},0" if value else None
        listed = isinstance(value, list | tuple)
        if self.type in {"texts", "ints"} and value is not None and not listed:
            return [value]
        return None if self.type == "text" and listed else value


class FrameworkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A framework's words.

    Parameters
    ----------
    name, title, version : of the framework; the version says what release the names are of, and what was checked.
    document : how its configuration is written. writes : whether :func:`clustersim.files.launch.written` does.
    kinds : strategies it can launch. parallel : whether ``[parallel]`` is always there, or only where it has an effect.
    fixed : fields that its runs have whatever the file says. program : what its script's command begins with.
    rows : see :class:`LaunchOption`. also : rows of other tables by name (globs), as arguments of its script.
    explicit : options (globs) that are written where they are its defaults too: of a release that is not fixed, what
        time and memory depend on is said.
    beside : options that are written beside others, ``option=value`` (a glob) of these and ``option=value`` of those,
        or a flag: what is played there.
    marks : keys (globs) that tell its files from others'. leaf : keys are known by the last part of their path.
    unplayed : options (globs), or ``option=value`` (globs), that change time or memory and are not played, with what is
        played instead.
    ignored : options (globs) that change neither, as far as a step of a healthy run goes.
    programs : what a training script, or what a file says that it is (globs), trains: ``decoder``, ``encoder``, or a
        sentence on why no sizes tell it. says : keys of a file that name it.
    files : options that name a further file, which must be given too. aliases : other names of options.
    one_process : its script is one rank, where no launcher starts it. asks_for_passes : it refuses a global batch where
        nothing says how many samples a pass holds. asks_for_length : its samples are as long as its data, so that
        somebody must say how long.
    refused : what no scenario plays, ``option=value`` (globs; ``program`` is the training script), and what it does.
    unsized : options of a model that its sizes do not tell (globs), and what it has: a config.json must.
    notes : what is assumed of every run of the framework, said each time.
    """

    name: str
    title: str
    version: str
    document: Literal["shell", "toml", "json", "yaml"]
    kinds: tuple[str, ...]
    rows: tuple[LaunchOption, ...]
    writes: bool = True
    parallel: Literal["always", "split"] = "split"
    fixed: texts.Table = {}
    program: str = ""
    also: dict[str, tuple[str, ...]] = {}
    explicit: tuple[str, ...] = ()
    beside: dict[str, str] = {}
    marks: tuple[str, ...] = ()
    leaf: bool = False
    one_process: bool = False
    asks_for_passes: bool = False
    asks_for_length: bool = False
    dashes: bool = True
    unplayed: dict[str, str] = {}
    ignored: tuple[str, ...] = ()
    programs: dict[str, str] = {}
    says: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    aliases: dict[str, str] = {}
    refused: dict[str, str] = {}
    unsized: dict[str, str] = {}
    notes: tuple[str, ...] = ()

    def trains(self, program: str) -> str | None:
        """What a program trains, by this table or those it takes rows from; None for one that no table has."""
        tables = [self, *(load(name) for name in self.also)]
        known = (said for one in tables for glob, said in one.programs.items() if fnmatchcase(program, glob))
        return next(known, None)

    def refused_of_files(self) -> tuple[tuple[str, str], ...]:
        """What no scenario plays of its files, where another framework's launch has them beside its own."""
        of_files = self.document != "shell" and not self.leaf
        return tuple((glob, why) for glob, why in self.refused.items() if of_files and not glob.startswith("program="))

    def says_default(self, option: str) -> bool:
        """Whether an option is written where it has its default."""
        return any(fnmatchcase(option, glob) for glob in self.explicit)

    def every(self) -> tuple[LaunchOption, ...]:
        """Its rows, each with its place, and those it takes from others; its own have the say."""
        home: Literal["args", "config"] = "args" if self.document == "shell" or self.leaf else "config"
        all_rows = [row if row.at else msgspec.structs.replace(row, at=home) for row in self.rows]
        stated = {(row.at, row.option) for row in all_rows}
        for name, globs in self.also.items():
            rows = (row for row in load(name).every() if any(fnmatchcase(row.option, glob) for glob in globs))
            # Of another's file, which may lie beside its own, options are read but not written.
            all_rows += [
                msgspec.structs.replace(row, write=row.write and row.at == "args")
                for row in rows
                if (row.at, row.option) not in stated
            ]
        return tuple(all_rows)


_HAS = {"experts": "shape.experts.count", "latent": "shape.mla", "grouped": "shape.grouped"}


class UnsetError(ScenarioError):
    """A value that a variable holds which nothing sets."""


@cache
def load(name: str) -> FrameworkTable:
    """The table of a framework. Raises :class:`ScenarioError` for a name that has none."""
    if name not in NAMES:
        raise ScenarioError(f"no table of launch options {shown(name)}; {nearest(name, NAMES)}")
    path = data_path("data") / "exchange" / f"{name}.toml"
    return msgspec.convert(toml(path.read_text("utf-8"), str(path), ScenarioError), FrameworkTable)


def holds(when: str, fields: texts.Table) -> bool:
    """Whether a row's condition does: empty; a degree (``tp``) above 1; ``experts``; ``latent`` or
    ``grouped`` attention; ``fp8``, the arithmetic; ``fsdp``, a strategy, with
    ``fsdp1`` and ``fsdp2`` its versions; with ``!`` before it, the contrary."""
    if when.startswith("!"):
        return not holds(when[1:], fields)
    if not when:
        return True
    if when == "fp8":
        return fields.get("model.dtype") == when
    if when in _HAS:
        return bool(fields.get(_HAS[when]))
    kind = fields.get("strategy.kind")
    if when.startswith("fsdp") and when != "fsdp":
        return kind == "fsdp" and fields.get("strategy.version", 2) == int(when[-1])
    if when in {"fsdp", "zero", "ddp"}:
        return bool(kind == when)
    return int(fields.get(f"parallel.{when}") or 1) > 1


def _below(value: Any) -> Any:
    """A model's path without the folder that a variable holds, whose last parts name the model.

    >>> _below("$HOME/models/Qwen/Qwen3-8B"), _below("${ROOT}/$NAME"), _below("$NAME")
    ('models/Qwen/Qwen3-8B', '${ROOT}/$NAME', '$NAME')
    """
    found = re.fullmatch(r"\$\{?\w+\}?/([^$]+)", value) if isinstance(value, str) else None
    return found[1] if found else value


def _same(first: Any, second: Any) -> bool:
    """Equal, and not because 1 is true."""
    return bool(first == second) and isinstance(first, bool) == isinstance(second, bool)


NOWHERE = "set nowhere in the script"


def _unset(value: str) -> str:
    """What a script's word lacks.

    >>> _unset("${TP}"), _unset("${2}")
    ("'${TP}' is set nowhere in the script", '$2 is an argument of the script, which nobody says')
    >>> _unset("${sum:1}"), _unset("${command}")
    ('is a sum with $1, an argument of the script, which nobody says', 'is what a command prints that is not run')
    """
    total = SUM.fullmatch(value)
    name = total[1] if total else value.strip("${}")
    if name.isdecimal():
        argument = "an argument of the script, which nobody says"
        return f"is a sum with ${name}, {argument}" if total else f"${name} is {argument}"
    if name == "command":
        printed = "what a command prints that is not run"
        return f"is a sum with {printed}" if total else f"is {printed}"
    if name == "arithmetic":
        return "is a sum that is not worked out"
    nowhere = f"is {NOWHERE}"
    return f"is a sum with {name}, which {nowhere}" if total else f"{shown(value)} {nowhere}"


def _typed(value: Any, kind: Kind) -> Any:
    """A value as its option has it: scripts give words, files values. Raises :class:`ScenarioError`."""
    typed = _one(value, kind)
    if typed is None:
        if isinstance(value, str) and value.startswith("$"):
            raise UnsetError(_unset(value))
        raise ScenarioError(f"{shown(value)} does not fit: expected {_WORDS[kind]}")
    return typed


def _one(value: Any, kind: Kind) -> Any:
    if kind == "window":
        return _window(value)
    if kind == "stages":
        return _layout(value)
    if kind in {"texts", "each", "ints"}:
        items = value if isinstance(value, list | tuple) else [value]
        items_typed = [_one(item, "int" if kind == "ints" else "text") for item in items]
        return (
            None if None in items_typed else items_typed[0] if kind == "each" and len(items_typed) == 1 else items_typed
        )
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if kind == "any":
        return value
    if kind == "flag":
        truth = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        alone = value == [] or (isinstance(value, str) and value.startswith("$"))  # or options that nothing sets
        return True if alone else value if isinstance(value, bool) else truth.get(str(value).lower())
    if kind == "text":
        plain = isinstance(value, str | int | float) and not str(value).startswith("$")
        return (str(value) if not isinstance(value, bool) else str(value).lower()) if plain else None
    return _number(value, kind)


def _window(value: Any) -> int | None:
    """Tokens that a decoder's window has: those before and the token itself; 0 for all.

    >>> _window("4095,0"), _window("(127, 0)"), _window([-1, 0]), _window("wide")
    (4096, 128, 0, None)
    """
    parts = value.strip("()").split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    numbers: list[int | None] = [_number(part, "int") for part in parts]
    before = numbers[0]
    if before is None or None in numbers or len(numbers) != BOTH_SIDES:
        return None
    return max(before + 1, 0)


def _layout(value: Any) -> str | None:
    """Layers of each pipeline stage as Megatron's ``--pipeline-model-parallel-layout``, embedding and loss at its ends.

    >>> _layout("2,1"), _layout(["1", "1"]), _layout("2,x")
    ('Ett|tL', 'Et|tL', None)
    """
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    layers = [_number(part, "int") for part in parts]
    if any(count is None or not 0 <= count <= MOST_LAYERS for count in layers):
        return None
    return "E" + "|".join("t" * count for count in layers) + "L"


def _number(value: Any, kind: Kind) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number) or abs(number) >= 2**63 or (kind == "int" and number != int(number)):
        return None
    return int(number) if kind == "int" else number > 0 if kind == "positive" else number
