"""Options of launch files -> fields of a scenario, by the rows of a framework's table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from clustersim.core import texts
from clustersim.core.errors import ScenarioError
from clustersim.core.texts import shown
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.interpolation import MISSING, referring, resolved_beside
from clustersim.files.launch.table import NOWHERE, FrameworkTable, LaunchOption, UnsetError, holds, load

SURE = 0.9
"""How alike an unknown option and a known one are that is taken for a slip of the pen."""
_SPLITS = re.compile(
    r"(_degree|parallel_size|parallelism|autotp_size|shard_size|replicate_size|(?:zero|deepspeed|ds)_stage|ulysses_size|ring_attn_size"
    r"|(?:^|[_.])(?:tp|pp|cp|sp|ep)_size)$"
)
"""Names of options that say how the work is split, which nobody may leave out."""
_AMOUNTS = re.compile(
    r"(?!.*(?:eval|val|valid|validation|test|dev|prompt|generation|decoder|encoder|retriever|dataset|tokenizer)_)(?:\w+_)?"
    r"(?:seq(?:uence)?_?len(?:gth)?|(?:context|ctx)_len(?:gth)?|block_size|batch_?size|bsz"
    r"|(?:grad(?:ient)?_)?acc(?:um(?:ulat(?:e|ion))?)?_(?:steps|every|iters)"
    r"|grad(?:ient)?_acc(?:um(?:ulat(?:e|ion))?)?)"
)
"""Names of options that say how long a sequence is or how many samples are taken, which nobody may leave out."""
_KINDS = {"zero_optimization.stage"}
"""Options that say what kind of strategy it is, and are one of its fields as well."""
SHARDED = ("strategy.data_parallel_shard_degree", "strategy.data_parallel_replicate_degree")
"""Fields that another strategy has not: an option of them is never left out."""
FIRST = ("strategy.kind", "strategy.version")
"""Fields that other rows' conditions ask for."""


class ScenarioFields(texts.Table):
    """Fields by dotted name, with who said each.

    unset : options whose value nothing sets, by name: where, what it lacks, the field.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by: dict[str, OptionValue] = {}
        self.settled: set[str] = set()
        self.unset: dict[str, tuple[str, str, str]] = {}

    def launch(self, field: str, option: OptionValue) -> None:
        """What a launcher says of the machine in numbers, which counts against a file's."""
        if str(option.value).isdecimal():
            self.say(field, option.value, option, over=True)

    def say(self, field: str, value: Any, option: OptionValue, *, over: bool = False) -> None:
        """Raises :class:`ScenarioError` where another option has said something else."""
        before = self.by.get(field)
        if over:
            self.settled.add(field)
        elif field in self.settled:
            return
        if before is not None and not over and self[field] != value:
            raise ScenarioError(
                f"{before.where}: {before.as_written} and {option.as_written} contradict each other: {field} would be "
                f"{shown(self[field])} and {shown(value)}; leave one out"
            )
        self[field], self.by[field] = value, option


def together(read: Sequence[Document]) -> dict[Key, OptionValue]:
    """The options of all files. Raises :class:`ScenarioError` where two say different things."""
    merged: dict[Key, OptionValue] = {}
    for file in read:
        for key, option in file.options.items():
            if key == ("args", "launcher"):
                continue
            before = merged.get(key)
            if before is not None and before.value != option.value:
                raise ScenarioError(
                    f"{before.where} and {option.where}: {option.name} is {shown(before.value)} in one and "
                    f"{shown(option.value)} in the other; say it once"
                )
            merged[key] = option
    for file in read:  # what a command says beside its file counts against the file
        merged.update(file.overrides)
    stated = {name: option.value for (at, name), option in merged.items() if at == "config"}
    for key, option in merged.items():
        if key[0] == "config" and referring(option.value):
            value = resolved_beside(option.value, key[1], stated, option.where)
            merged[key] = OptionValue(option.name, value, option.where)
    return merged


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


def refuse(
    table: FrameworkTable, options: Mapping[Key, OptionValue], programs: Sequence[tuple[str, str]], model: str | None
) -> None:
    """Raise :class:`ScenarioError` for what no scenario plays, and for a model that only a config.json tells.

    programs : (training script, where) of each command.
    """
    stated = [(option.where, option.name, key, option.value) for key, option in options.items()]
    stated += [(where, "the command", ("", "program"), name) for name, where in programs]
    beside = [refused for name in table.also for refused in load(name).refused_of_files()]
    for where, written, (at, name), value in stated:
        words = f"{name}={True if value == [] else value}"  # a flag that stands alone
        shown_value = "" if value in ([], True) else f" {shown(value)}"
        for glob, why in (*table.refused.items(), *(beside if at == "config" else ())):
            if fnmatchcase(words, glob):
                raise ScenarioError(f"{where}: {written}{shown_value} {why}")
        for glob, why in table.unsized.items():
            if model is None and fnmatchcase(words, glob):
                raise ScenarioError(
                    f"{where}: {written}{shown_value}: the model {why}, which sizes do not tell; describe it in a "
                    "config.json: --model PATH"
                )


def apply(
    table: FrameworkTable, options: Mapping[Key, OptionValue], fields: ScenarioFields, model: str | None
) -> set[Key]:
    """Put what the rows say into ``fields``; returns what was read."""
    used: set[Key] = set()
    rows = list(table.every())
    known_keys = {(str(row.at), row.option) for row in rows}
    for later in (False, True):  # conditions ask for degrees, which have none themselves
        now = [row for row in rows if bool(row.when and row.field not in FIRST) == later]
        unsaid: list[LaunchOption] = []
        for row in now:
            said = False
            for key, option, field in _matching(row, options, table, known_keys):
                used.add(key)
                given = model is not None and row.field == "model.name"  # which counts instead
                if holds(row.when, fields) and not given:
                    said |= _say(row, field, option, fields)
                elif row.field in SHARDED and _above_one(option.value):
                    raise ScenarioError(
                        f"{option.where}: {option.name} {shown(option.value)} shards or copies what nothing here "
                        "shards; say FSDP of version 2 (distributed_type: FSDP, fsdp_version: 2), or leave it out"
                    )
            unsaid += [] if said else [row]  # one that says what the scenario has anyway is said, too
        for row in unsaid:
            given = model is not None and row.field == "model.name"
            if row.default is not None and row.field not in fields and holds(row.when, fields) and not given:
                value = row.read(row.default)
                if value is not None:
                    fields[row.field] = value
    _refuse_unset(fields)
    return used


def _refuse_unset(fields: ScenarioFields) -> None:
    """Raise :class:`ScenarioError` for the options whose values nothing sets, all at once."""
    if not fields.unset:
        return
    where = next(iter(fields.unset.values()))[0]
    told = [(f"{'' if at == where else f'{at}: '}{name}", why) for name, (at, why, _) in fields.unset.items()]
    is_alike = len(told) > 1 and all(why.endswith(f" is {NOWHERE}") for _, why in told)
    alike = ", ".join(f"{name} {why.removesuffix(f' is {NOWHERE}')}" for name, why in told)
    lacking = f"{alike} are {NOWHERE}" if is_alike else "; ".join(f"{name}: {why}" for name, why in told)
    values = "its value" if len(told) == 1 else "their values"
    model = ", or give --model" if any(field == "model.name" for *_, field in fields.unset.values()) else ""
    raise ScenarioError(f"{where}: {lacking}; write {values}{model}")


def _say(row: LaunchOption, field: str, option: OptionValue, fields: ScenarioFields) -> bool:
    """Put an option's value into ``fields``; whether it has one."""
    if option.value == "auto" and field.startswith(("batch.", "strategy.", "model.", "run.")) and row.type != "text":
        if field.startswith("strategy.zero_optimization."):
            fields.say(field, option.value, option)  # which the strategy's own reader tells what it would be
        if field == "strategy.kind":  # which HfTrainerDeepSpeedConfig fills in of nothing (transformers)
            raise ScenarioError(
                f"{option.where}: {option.name} auto is filled in by accelerate's zero_stage, and no file has it; "
                "write the value"
            )
        return False  # filled in by the Trainer, whose arguments say it
    if option.value == MISSING:
        if field.startswith("cluster."):
            return False
        raise ScenarioError(f"{option.where}: {option.name} is {MISSING}, which somebody must fill in; write its value")
    try:
        value = row.read(option.value)
    except UnsetError as unset:
        fields.unset.setdefault(option.name, (option.where, str(unset), field))
        return True
    except ScenarioError as wrong:
        raise ScenarioError(f"{option.where}: {option.name}: {wrong}") from None
    if value is not None:
        fields.say(field, value, option, over=row.over)
    return True


def _matching(
    row: LaunchOption, options: Mapping[Key, OptionValue], table: FrameworkTable, known_keys: set[tuple[str, str]]
) -> Iterator[tuple[Key, OptionValue, str]]:
    """(key, option, field) of every option that a row is about."""
    if "+" in row.option:
        parts = [(row.at, name) for name in row.option.split("+")]
        if all(part in options for part in parts):
            both = [options[part] for part in parts]
            joined = OptionValue(
                " and ".join(option.name for option in both),
                " ".join(str(option.value) for option in both),
                both[0].where,
            )
            yield from ((part, joined, row.field) for part in parts)
    elif row.option.endswith(".*"):
        own = {name for at, name in known_keys if at == row.at and name not in _KINDS}
        judged = _judged_below(table, row.option[:-1])
        for key, option in options.items():
            below = key[0] == row.at and key[1].startswith(row.option[:-1]) and key[1] not in own
            if below and not any(fnmatchcase(key[1], glob) for glob in judged):
                yield key, option, row.field[:-1] + key[1][len(row.option) - 1 :]
    else:
        for key, option in options.items():
            if _names(key, table, known_keys) == (row.at, row.option):
                yield key, option, row.field


def _judged_below(table: FrameworkTable, prefix: str) -> list[str]:
    """Options (globs) below a prefix of which a list says that they are not played, or change nothing."""
    tables = (table, *map(load, table.also))
    names = (glob.partition("=")[0] for one in tables for glob in (*one.unplayed, *one.ignored))
    return [name for name in names if name.startswith(prefix)]


def _names(key: Key, table: FrameworkTable, known_keys: set[tuple[str, str]]) -> tuple[str, str]:
    """The row's name of an option: in a file whose keys are known by their ends, the longest end that is one."""
    section, name = key
    if section == "args" or (section, name) in known_keys:
        return section, name
    parts = name.split(".")
    ends = (".".join(parts[i:]) for i in range(len(parts))) if table.leaf else iter([name])
    return next((("args", end) for end in ends if ("args", end) in known_keys), (section, name))


def others(
    table: FrameworkTable, stated_options: Mapping[Key, OptionValue], used: set[Key]
) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """Options that no row is about: unplayed, with what is instead; ignored; unknown. Raises for one that is nearly a
    known one."""
    unplayed: dict[str, str] = {}
    ignored = []
    unknown = []
    tables = [table, *(load(name) for name in table.also)]
    reasons = {glob: why for one in reversed(tables) for glob, why in one.unplayed.items()}
    of_values = [glob for glob in reasons if "=" in glob]
    idle = _idle(table, tables)
    for key, option in stated_options.items():
        names = [key[1], key[1].rsplit(".", 1)[-1]] if table.leaf else [key[1]]
        if key in used or (table.leaf and key[0] == "config" and option.value in (False, "false", [])):
            continue
        glob = _closest([f"{name}={option.value}" for name in names], of_values) or _closest(names, reasons)
        off = glob in names and option.value in (False, "false", "False")  # one that is off changes nothing
        near_idle = _closest(names, idle)
        is_idle = bool(near_idle) and glob not in names and "=" not in glob and _letters(near_idle) >= _letters(glob)
        if key[0] == "args" and not glob:
            _refuse_amount(key[1], option, table)
        if off or is_idle:
            ignored.append(option.name)
        elif glob:
            unplayed[option.name] = reasons[glob]
        else:
            _refuse_slip(key[1], option, table)
            unknown.append(option.name)
    return unplayed, tuple(ignored), tuple(unknown)


def _idle(table: FrameworkTable, tables: Sequence[FrameworkTable]) -> list[str]:
    """Options (globs) that change nothing, and those that do with other values than a file has."""
    valued = [*table.refused, *table.unsized, *(glob for one in tables for glob, _ in one.refused_of_files())]
    valued += [glob for one in tables for glob in one.unplayed if "=" in glob]
    return [glob for one in tables for glob in one.ignored] + [glob.partition("=")[0] for glob in valued]


def _refuse_amount(name: str, option: OptionValue, table: FrameworkTable) -> None:
    """Raise :class:`ScenarioError` for a name that nobody knows of a length or a number of samples."""
    if str(option.value).isdecimal() and _AMOUNTS.fullmatch(name):
        raise ScenarioError(
            f"{option.where}: {option.name} {str(option.value)[:40]} would say how long a sequence is or how many "
            f"samples are taken, and is no option of {table.version}; say it in its words, or leave it out"
        )


def _refuse_slip(name: str, option: OptionValue, table: FrameworkTable) -> None:
    """Raise :class:`ScenarioError` for a name that nobody knows and that is nearly a known one, or tells a split."""
    if near := get_close_matches(name, [row.option for row in table.every()], 1, SURE):
        likely = f"--{near[0].replace('_', '-')}" if option.name.startswith("--") else near[0]
        raise ScenarioError(f"{option.where}: no option {option.name}; did you mean {likely}?")
    if _SPLITS.search(name) and _above_one(option.value):
        raise ScenarioError(
            f"{option.where}: {option.name} {shown(option.value)} would split the work, and is no option of "
            f"{table.version}; say it in its words, or leave it out"
        )


def _closest(words: Sequence[str], globs: Iterable[str]) -> str:
    """The glob that is met and has the most letters, so that a name counts against a family of names; empty for none.

    >>> _closest(["data_efficiency.enabled"], ["data_*", "data_efficiency.*", "*"])
    'data_efficiency.*'
    """
    met = (glob for glob in globs if any(fnmatchcase(word, glob) for word in words))
    return max(met, key=_letters, default="")


def _letters(glob: str) -> int:
    """How much of a name a glob tells."""
    return len(glob.replace("*", ""))


def _above_one(value: Any) -> bool:
    return str(value).isdecimal() and int(str(value)[:9]) > 1
