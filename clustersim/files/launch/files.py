"""Files of a launch -> what they say, option by option; whose they are is found by content."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import Table, json_table, short, shown, text_of, toml
from clustersim.core.yamls import yaml_table
from clustersim.files.launch import (
    colossal_words,
    environment,
    interpolation,
    json_comments,
    launchers,
    lightning_python,
    merged_sections,
    nanogpt_values,
    nemo_python,
    pods,
    shell,
    unread,
)
from clustersim.files.launch.launcher_sizes import Launch


@dataclass(frozen=True)
class OptionValue:
    """An option as a file has it: ``name`` as written, ``value``, and ``where``: file, and line where it has lines."""

    name: str
    value: Any
    where: str

    @property
    def as_written(self) -> str:
        """Name and value, of a switch the name alone."""
        return self.name if self.value == [] else f"{self.name} {shown(self.value)}"

    @property
    def is_on(self) -> bool:
        """Whether it is true: a switch alone, or a word that says so."""
        return self.value == [] or str(self.value).lower() in {"true", "1", "yes"}


_CHANGE = re.compile(r"(?:\+\+|\+)?[A-Za-z_][\w.]*=")
_OF_TITAN = re.compile(r"^from torchtitan\b(?s:.*)^def \w+\(\) -> \w+\.?Config:", re.MULTILINE)
PYTHON = "python"
"""The kind of torchtitan's registry of configurations, of which one is chosen later."""
HOSTS = "hosts"
"""The kind of a file that lists hosts with their slots: DeepSpeed's and Open MPI's."""
MODEL = "model"
"""The kind of a model's config.json, which lies beside launch files."""
_HOST = re.compile(r"[\w.-]+\s+slots\s*=\s*(\d{1,4})(\s+\S+)*|[\w.-]+:(\d{1,4})")
UNSET = "nothing in the script says what these are"
WRITTEN = "ConfigContainer.to_yaml of Megatron-Bridge, --to-yaml of NeMo-Run, --print_config of LightningCLI"
Key = tuple[str, str]
"""``args`` or ``config``, and the plain name."""


@dataclass
class Document:
    """One file.

    name : of the file. kind : ``shell``, ``toml``, ``json`` or ``yaml``. options : what it says.
    machine : what its launcher says of ``[cluster]``. notes : what was left out. program : of a script, what it trains
    with. overrides : what its command says of a configuration that it names, which counts against the file.
    written : configurations that a script writes itself. given : names of scripts beside it that it read or ran.
    alone : the launcher, where it starts ranks on its own node alone, unless somebody says more.
    text : of a program, whose options are not read yet, and of a YAML, whose comments may say how it is launched.
    environment : variables that a script hands to what it starts. nccl : those of NCCL that it sets. launch : its
    command taken apart; None of a file that is no script.
    """

    name: str
    kind: str
    options: dict[Key, OptionValue] = field(default_factory=dict)
    machine: dict[str, OptionValue] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    program: str = ""
    overrides: dict[Key, OptionValue] = field(default_factory=dict)
    written: list[Document] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    text: str = ""
    alone: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    nccl: dict[str, str] = field(default_factory=dict)
    launch: Launch | None = None

    @property
    def started_by(self) -> str:
        """The launcher of a script's command, or Python itself where none is; empty of a file that is no script."""
        option = self.options.get(("args", "launcher"))
        return "" if option is None else str(option.value).partition(" ")[0].rsplit("/", 1)[-1]


def documents(files: Sequence[str | Path | Document]) -> list[Document]:
    """Every file, read where it is not yet; those that a script writes itself come with it.

    A script that another one reads (``source``) or runs is followed there, and is no file of its own.
    Raises :class:`ScenarioError`.
    """
    texts = {str(file): text_of(Path(file), ScenarioError) for file in files if not isinstance(file, Document)}
    scripts = {Path(name).name: text for name, text in texts.items() if text.strip() and _kind(text, name) == "shell"}
    found: list[Document] = []
    failed: dict[str, ScenarioError] = {}
    for file in files:
        if isinstance(file, Document):
            found.append(file)
            continue
        name = str(file)
        others = {Path(key).name: text for key, text in texts.items() if key != name}
        try:
            found.append(document(texts[name], name, others))
        except ScenarioError as wrong:
            own = Path(name).name
            if len(texts) == 1 or not (own in scripts or any(own in text for text in scripts.values())):
                raise
            failed[own] = wrong  # one that only sets variables, or that another makes a file of, where that reads it
    inside = {name for file in found for name in file.given}
    for name, error in failed.items():
        if name not in inside:
            raise error
    found = [file for file in found if Path(file.name).name not in inside]
    names = {Path(file.name).name for file in found}
    found += [made for file in found for made in file.written if made.name not in names]
    _resolve_again(found)
    return sorted(found, key=lambda file: file.kind == HOSTS and len(found) > 1)


def _resolve_again(read: Sequence[Document]) -> None:
    """References of files to what commands beside them say: variables of the environment, and fields that a command
    gives another value. Changes the options of ``read``."""
    variables = {name: value for file in read for name, value in file.environment.items()}
    given = {key[1]: option.value for file in read for key, option in file.overrides.items() if key[0] == "config"}
    for file in read:
        if file.kind != "yaml" or "${" not in file.text or not (variables or given):
            continue
        table = interpolation.beside(yaml_table(file.text, file.name, ScenarioError), variables, given)
        for path, value in interpolation.resolved(table, file.name):
            before = file.options.get(("config", path))
            if before is not None and before.value != value:
                file.options["config", path] = OptionValue(path, value, file.name)


def document(text: str, name: str, others: Mapping[str, str] | None = None) -> Document:
    """One file's text. ``others`` : texts of scripts beside it, by file name.

    Raises :class:`ScenarioError` for what is no configuration of any of these forms.
    """
    if "\0" in text or not text.strip():
        raise ScenarioError(f"{name}: holds a NUL character; is it a text?" if text.strip() else f"{name}: is empty")
    if Path(name).suffix == ".py":
        return _of_program(text, name)
    kind = _kind(text, name)
    if kind == "shell":
        return _of_script(text, name, others or {})
    if kind == HOSTS:
        return _of_hosts(text, name)
    if kind == "yaml" and (pods.is_job(text) or pods.is_task(text)):
        return _of_pods(text, name, others or {})
    reader = {"json": json_table, "toml": toml, "yaml": yaml_table}[kind]
    table = reader(json_comments.plain(text) if kind == "json" else text, name, ScenarioError)
    if kind == "json" and isinstance(table.get("architectures"), list) and "model_type" in table:
        return Document(name, MODEL)
    parsed = Document(name, kind, text=text if kind in {"yaml", "toml"} else "")
    templates = tuple(f"{key}." for key in merged_sections.templates(text)) if kind == "yaml" else ()
    for path, value in interpolation.resolved(table, name) if kind == "yaml" else _flat(table):
        if not path.startswith(templates):
            parsed.options["config", path] = OptionValue(path, value, name)
    return parsed


def _of_program(text: str, name: str) -> Document:
    """A Python file, of which values are read and nothing is run. Raises :class:`ScenarioError` for one that holds no
    configuration."""
    if "Trainer.Config(" in text or _OF_TITAN.search(text):
        return Document(name, PYTHON, text=text)
    if (tree := _tree(text)) is not None:
        for reader in (_of_lightning, _of_nanogpt, _of_nemo):
            if (configuration := reader(tree, name)) is not None:
                set_there = environment.set_by(tree)
                configuration.notes += [f"{name}: {note}" for note in environment.unplayed(set_there)]
                configuration.nccl = environment.of_nccl(set_there)
                return configuration
        assigned = (target for line in tree.body if isinstance(line, ast.Assign) for target in line.targets)
        other = unread.of_file("", {target.id: "" for target in assigned if isinstance(target, ast.Name)})
        if other is not None:
            raise ScenarioError(f"{name}: {other.refusal}")
    if "configurator.py" in text:
        raise ScenarioError(
            f"{name}: is nanoGPT's program; give a file of its config/, or the command that runs it with --n_layer and "
            "its kin"
        )
    raise ScenarioError(
        f"{name}: is a program, and none is run; give the configuration that it makes ({WRITTEN}), or the "
        "arguments of a script"
    )


def _tree(text: str) -> ast.Module | None:
    """A program's tree; None where it is no Python, or too deep for one."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _of_lightning(tree: ast.Module, name: str) -> Document | None:
    """A script that makes a Lightning Trainer, as its YAML; None for another program."""
    parsed = Document(name, "yaml")
    try:
        if not lightning_python.is_script(tree):
            return None
        for path, value in lightning_python.options(tree, name):
            parsed.options["config", path] = OptionValue(path, value, name)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if ("config", "trainer.strategy.class_path") in parsed.options:
        del parsed.options["config", "trainer.strategy"]
    if ("config", "optimizer.class_path") not in parsed.options:
        parsed.notes.append(f"{name}: no optimizer is read of it: AdamW")
    return parsed


def _of_nanogpt(tree: ast.Module, name: str) -> Document | None:
    """A file of nanoGPT's ``config/``; None for another program."""
    if not nanogpt_values.is_configuration(tree):
        return None
    parsed = Document(name, "yaml")
    for path, value in {"nanogpt.file": name, **nanogpt_values.options(tree, name)}.items():
        parsed.options["config", path] = OptionValue(path, value, name)
    return parsed


def _of_nemo(tree: ast.Module, name: str) -> Document | None:
    """A program that takes a recipe of NeMo 2, as its YAML; None for another program."""
    try:
        if not nemo_python.is_program(tree):
            return None
        options, notes = nemo_python.options(tree, name)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    parsed = Document(name, "yaml", notes=notes)
    for path, value in options.items():
        parsed.options["config", path] = OptionValue(path, value, name)
    return parsed


def _kind(text: str, name: str) -> str:
    start = (json_comments.plain(text) if Path(name).suffix == ".json" else text).lstrip()
    if _hosts(text):
        return HOSTS
    if Path(name).suffix in shell.SCRIPTS or re.search(r"^#SBATCH\s", text, re.MULTILINE):
        return "shell"
    if start.startswith("{") and Path(name).suffix not in {".yml", ".yaml"}:  # of which JSON is a part
        return "json"
    arguments = re.search(r"^[^#\n]*(?<![\w-])--[a-z][\w-]*", text, re.MULTILINE)
    if start.startswith("#!") or (arguments and not re.search(r"^[\w.]+:(\s|$)", text, re.MULTILINE)):
        return "shell"
    return "toml" if re.search(r"^\s*\[[\w.]+\]\s*(#.*)?$", text, re.MULTILINE) else "yaml"


def _hosts(text: str) -> list[tuple[str, int]]:
    """Hosts with their slots, where a text is such a list."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    matches = [_HOST.fullmatch(line) for line in lines if line]
    return [(match[0].split()[0], int(match[1] or match[3])) for match in matches if match] if all(matches) else []


def _of_hosts(text: str, name: str) -> Document:
    """What a list of hosts says of the machine. Raises :class:`ScenarioError` where nodes differ."""
    parsed = Document(name, HOSTS)
    hosts = dict(_hosts(text))
    slots = sorted(set(hosts.values()))
    if len(slots) != 1:
        raise ScenarioError(
            f"{name}: its hosts have {', '.join(map(str, slots))} slots; say --nodes and --gpus-per-node"
        )
    parsed.machine["cluster.nodes"] = OptionValue("hosts", str(len(hosts)), name)
    parsed.machine["cluster.gpus_per_node"] = OptionValue("slots", str(slots[0]), name)
    return parsed


def _of_pods(text: str, name: str, others: Mapping[str, str]) -> Document:
    """The script that a job's pods run; how many they are counts where the script does not say it in numbers."""
    job = pods.job(text, name) if pods.is_job(text) else pods.task(text, name)
    parsed = _of_script(job.text, name, others)
    for field_name, count in (("cluster.nodes", job.nodes), ("cluster.gpus_per_node", job.ranks)):
        before = parsed.machine.get(field_name)
        if count and (before is None or not str(before.value).isdecimal()):
            parsed.machine[field_name] = OptionValue("replicas" if "nodes" in field_name else "GPUs", str(count), name)
    return parsed


def _flat(table: Table, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every leaf; what is null says nothing."""
    for key, value in table.items():
        # Megatron-LM's tests write arguments as keys.
        path = prefix + (key[2:].replace("-", "_") if str(key).startswith("--") else str(key))
        if isinstance(value, Mapping):
            yield from _flat(dict(value), f"{path}.")
        elif value is not None and value != "???":
            yield path, value


def _of_script(text: str, name: str, others: Mapping[str, str]) -> Document:
    """A script's command. Raises :class:`ScenarioError` for one of a framework that is not read."""
    script = shell.script(text, name, others)
    other = unread.of_command(script.command)
    if other is not None:
        raise ScenarioError(f"{name}: {other.refusal}")
    launch = launchers.taken(script.command, script.directives, script.variables)
    parsed = Document(name, "shell", notes=script.notes, program=launch.program, given=script.read, alone=launch.alone)
    set_for_all = {**script.variables, **environment.among(script.command)}
    parsed.notes += [f"{name}: {note}" for note in [*launch.notes, *environment.unplayed(set_for_all)]]
    parsed.environment = environment.handed_on(text, script.variables)
    parsed.nccl = environment.of_nccl(set_for_all)
    parsed.launch = launch
    for field_name, (option, value) in launch.machine.items():
        parsed.machine[f"cluster.{field_name}"] = OptionValue(option, value, _where(option, text, name))
    for option, given in launch.options.items():
        key = ("args", option) if option == "config_file" else ("config", option)
        target = parsed.options if option == "config_file" else parsed.overrides
        target[key] = OptionValue(option, given, name)
    if colossal_words.is_benchmark(launch.program, script.command):
        launch.arguments = colossal_words.spelt_out(launch.arguments)
    _arguments(launch.arguments, text, parsed)
    parsed.options["args", "launcher"] = OptionValue(
        "launcher", " ".join([tool for tool, _ in launch.tools] or script.command[:2]), name
    )
    for file, lines in script.written.items():
        if re.search(r"\.(json|ya?ml|toml)$", file) or _hosts(lines):
            inner = document(_UNTOLD.sub("", lines), file)
            parsed.written.append(inner)
            if untold := sorted(set(_UNTOLD.findall(lines))):
                parsed.notes.append(f"{name}: what {', '.join(untold)} adds to {short(file)} only running tells")
    return parsed


_UNTOLD = re.compile(r"^[ \t]*(\$\{\w+\})[ \t]*$", re.MULTILINE)
"""A line of a file that a script writes, of which nobody says what it holds: a list of data sets that a loop makes."""


def _arguments(arguments: list[str], text: str, made: Document) -> None:
    """Arguments of the training script: options, and ``key=value`` of a configuration that it names."""
    name = made.name
    left: list[str] = []
    for key, said in _options(arguments, text, name, left):
        if "." in key:
            made.overrides["config", key] = OptionValue(said.name, said.value, said.where)
            continue
        before = made.options.get(("args", key))
        if before is not None and before.value != said.value:  # as argparse reads it
            made.notes.append(
                f"{said.where}: {said.name} is there twice, with {_shown(before.value)} and {_shown(said.value)}; the "
                "last one counts"
            )
        made.options["args", key] = said
    for word in left:
        if changed := re.fullmatch(r"(?:\+\+|\+)?([A-Za-z_][\w.@/]*)=(.*)", word, re.DOTALL):
            value = _plain(changed[2])
            made.overrides["config", changed[1]] = OptionValue(changed[1], value, _where(changed[1], text, name))
        elif re.search(r"\.(ya?ml|json|toml)$", word) or (word.endswith(".py") and made.program.endswith("train.py")):
            made.options["args", "config"] = OptionValue("config", word, name)
    if unset := list(dict.fromkeys(word for word in left if word.startswith("$"))):
        made.notes.append(f"{name}: {UNSET}: {', '.join(unset)}")


def _plain(text: str) -> Any:
    """A word as a YAML value."""
    words = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    if re.fullmatch(r"\[[^\[\]]*\]", text):
        return [part.strip() for part in text[1:-1].split(",") if part.strip()]
    return text


def _where(option: str, text: str, name: str) -> str:
    """The file, and the line where the option first stands."""
    for spelt in (option, option.replace("-", "_").replace("__", "--", 1)):
        if option and spelt in text:
            return f"{name} (line {text[: text.find(spelt)].count(chr(10)) + 1})"
    return name


def _options(
    arguments: list[str], text: str, name: str, left: list[str] | None = None
) -> Iterator[tuple[str, OptionValue]]:
    i = 0
    while i < len(arguments):
        word = arguments[i]
        i = i + 1
        if not word.startswith("--") or word == "--":
            if left is not None:
                left.append(word)
            continue
        option, equals, value = word.partition("=")
        values: list[str] = [value] if equals else []
        while i < len(arguments) and not equals and not arguments[i].startswith("--"):
            values = [*values, arguments[i]]
            i = i + 1
        if left is not None:  # an unset variable behind a value was one of more options
            more = [word for at, word in enumerate(values) if word.startswith("$") or (at and _CHANGE.match(word))]
            left += more
            values = [word for word in values if word not in more] or values[:1]
        said = OptionValue(option, values[0] if len(values) == 1 else values, _where(option, text, name))
        yield option[2:].replace("-", "_"), said


def _shown(value: Any) -> str:
    return shown(" ".join(value) if isinstance(value, list) else value)
