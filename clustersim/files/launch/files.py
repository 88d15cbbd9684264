"""Files of a launch -> what they say, option by option; whose they are is found by content."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import Table, json_table, short, shown, text_of, toml, yaml_table
from clustersim.files.launch import shell
from clustersim.files.launch.table import NAMES, load

LAUNCHER = {
    "nnodes": "cluster.nodes",
    "num_nodes": "cluster.nodes",
    "num_machines": "cluster.nodes",
    "nodes": "cluster.nodes",
    "nproc_per_node": "cluster.gpus_per_node",
    "num_gpus": "cluster.gpus_per_node",
    "gpus_per_node": "cluster.gpus_per_node",
    "num_processes": "cluster.world",
}
"""What torchrun, deepspeed, accelerate launch and Slurm say of the machine."""


@dataclass(frozen=True)
class OptionValue:
    """An option as a file has it: ``name`` as written, ``value``, and ``where``: file, and line where it has lines."""

    name: str
    value: Any
    where: str


Key = tuple[str, str]
"""``args`` or ``config``, and the plain name."""


@dataclass
class Document:
    """One file.

    name : of the file. kind : ``shell``, ``toml``, ``json`` or ``yaml``. options : what it says.
    machine : what its launcher says of ``[cluster]``. notes : what was left out.
    """

    name: str
    kind: str
    options: dict[Key, OptionValue] = field(default_factory=dict)
    machine: dict[str, OptionValue] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def documents(files: Sequence[str | Path | Document]) -> list[Document]:
    """Every file, read where it is not yet. Raises :class:`ScenarioError`."""
    return [
        one if isinstance(one, Document) else document(text_of(Path(one), ScenarioError), str(one)) for one in files
    ]


def document(text: str, name: str) -> Document:
    """One file's text. Raises :class:`ScenarioError` for what is no configuration of any of these forms."""
    if "\0" in text or not text.strip():
        raise ScenarioError(f"{name}: holds a NUL character; is it a text?" if text.strip() else f"{name}: is empty")
    kind = _kind(text)
    if kind == "shell":
        return _of_script(text, name)
    reader = {"json": json_table, "toml": toml, "yaml": yaml_table}[kind]
    table = reader(text, name, ScenarioError)
    made = Document(name, kind)
    for path, value in _flat(table):
        made.options["config", path] = OptionValue(path, _resolved(value, table), name)
    return made


def _kind(text: str) -> str:
    start = text.lstrip()
    if start.startswith("{"):
        return "json"
    arguments = re.search(r"^[^#\n]*(?<![\w-])--[a-z][\w-]*", text, re.MULTILINE)
    if start.startswith("#!") or (arguments and not re.search(r"^[\w.]+:(\s|$)", text, re.MULTILINE)):
        return "shell"
    return "toml" if re.search(r"^\s*\[[\w.]+\]\s*(#.*)?$", text, re.MULTILINE) else "yaml"


def _flat(table: Table, at: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every leaf; what is null says nothing."""
    for key, value in table.items():
        # Megatron-LM's tests write arguments as keys.
        path = at + (key[2:].replace("-", "_") if str(key).startswith("--") else str(key))
        if isinstance(value, Mapping):
            yield from _flat(dict(value), f"{path}.")
        elif value is not None and value != "???":
            yield path, value


def _resolved(value: Any, table: Table) -> Any:
    """A value with an interpolation ``${model.x}`` of OmegaConf looked up, once."""
    found = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
    if found is None:
        return value
    here: Any = table
    for part in found[1].strip(".").split("."):
        here = here.get(part) if isinstance(here, Mapping) else None
    return value if here is None else here


def _of_script(text: str, name: str) -> Document:
    script = shell.script(text, name)
    made = Document(name, "shell", notes=script.notes)
    words, arguments = _parted(script.command)
    for key, said in _options([*script.directives, *words], text, name):
        if key in LAUNCHER:
            made.machine.setdefault(LAUNCHER[key], said)
        elif key == "config_file":
            made.options["args", key] = said
    left: list[str] = []
    for key, said in _options(arguments, text, name, left):
        before = made.options.get(("args", key))
        if before is not None and before.value != said.value:
            raise ScenarioError(
                f"{said.where}: {said.name} is there twice, with {_shown(before.value)} and "
                f"{_shown(said.value)}; say it once"
            )
        made.options["args", key] = said
    if left:
        made.notes.append(f"{name}: nothing in the script says what these are: {', '.join(left)}")
    made.options["args", "launcher"] = OptionValue("launcher", " ".join(words[:2]), name)
    return made


def _parted(command: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's words, and the training script's."""
    for i, word in enumerate(command):
        if word.endswith(".py"):
            return command[:i], command[i + 1 :]
        if word == "-m" and i + 1 < len(command):
            return command[:i], command[i + 2 :]
    return [], command


def _options(
    words: list[str], text: str, name: str, left: list[str] | None = None
) -> Iterator[tuple[str, OptionValue]]:
    i = 0
    while i < len(words):
        word = words[i]
        i = i + 1
        if not word.startswith("--") or word == "--":
            if left is not None and word.startswith("$"):
                left.append(word)
            continue
        option, equals, value = word.partition("=")
        values: list[str] = [value] if equals else []
        while i < len(words) and not equals and not words[i].startswith("--"):
            values = [*values, words[i]]
            i = i + 1
        if left is not None:  # an unset variable behind a value was one of more options
            left += [word for word in values if word.startswith("$")]
            values = [word for word in values if not word.startswith("$")] or values[:1]
        line = text[: text.find(option)].count("\n") + 1
        where = f"{name} (line {line})" if option in text else name
        yield option[2:].replace("-", "_"), OptionValue(option, values[0] if len(values) == 1 else values, where)


def _shown(value: Any) -> str:
    return shown(" ".join(value) if isinstance(value, list) else value)


def framework_of(read: Sequence[Document], asked: str | None = None) -> str:
    """Whose files these are, by content. Raises :class:`ScenarioError` where nothing or too much tells."""
    if asked is not None:
        return load(asked).name
    found = {name for one in read for name in [_whose(one)] if name}
    for host in ("accelerate", "deepspeed"):  # which read each other's files, and Megatron's arguments
        if host in found:
            return host
    if len(found) == 1:
        return found.pop()
    files = ", ".join(short(one.name) for one in read)
    what = "are of " + " and ".join(sorted(found)) if found else "hold no option that tells whose they are"
    raise ScenarioError(f"{files}: {what}; say --from {'|'.join(NAMES)}")


def _whose(one: Document) -> str | None:
    names = [name for _, name in one.options]
    launcher = str(one.options[key].value) if (key := ("args", "launcher")) in one.options else ""
    if launcher.startswith("accelerate"):
        return "accelerate"
    for name in ("accelerate", "nemo", "deepspeed", "torchtitan", "megatron"):
        globs = load(name).marks
        if (one.kind == "toml") == (name == "torchtitan") and any(
            fnmatchcase(option, glob)
            or fnmatchcase(option, f"{glob}.*")
            or (name == "megatron" and option.rsplit(".", 1)[-1] == glob)
            for option in names
            for glob in globs
        ):
            return name
    return "deepspeed" if launcher.startswith("deepspeed") else None
