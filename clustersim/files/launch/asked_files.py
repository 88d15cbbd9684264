"""Files that a launch names, which must be given too, and what its program trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from clustersim.core.errors import ScenarioError
from clustersim.files.launch.files import HOSTS, MODEL, PYTHON, WRITTEN, Document, Key, OptionValue
from clustersim.files.launch.open_questions import OpenQuestion
from clustersim.files.launch.table import FrameworkTable, load

CONFIGURATIONS = (".json", ".yaml", ".yml", ".toml")
ALWAYS = ("deepspeed_config_file", "deepspeed_config", "config_file")
"""Ends of options that name a file, whatever it is called."""
OF_DEEPSPEED = ("deepspeed", "deepspeed_config", "deepspeed_config_file")
"""Options that name DeepSpeed's configuration."""
FLAG = "deepspeed"
"""An option that may stand alone, so that what nothing sets behind it may be more options."""


def complete(
    read: Sequence[Document],
    table: FrameworkTable,
    options: Mapping[Key, OptionValue],
    used: set[Key],
    notes: list[str],
) -> None:
    """Raise :class:`ScenarioError` for files of somebody else, and where one names another that was not given."""
    tables = [table, *(load(name) for name in table.also)]
    known = {name for file in tables for name in file.files}
    named = [option for (_, key), option in options.items() if key in known and _is_file(key, option.value)]
    _told_by_name(read, options)
    given = [Path(file.name).name for file in read if file.kind not in {"shell", HOSTS, MODEL}]
    free = [name for name in given if not any(Path(option.where).name == name for option in named)]
    missing = []
    for option in named:
        file = Path(str(option.value)).name
        if file in free:
            free.remove(file)
        elif file not in given:
            missing.append(option)
    asked = []
    for option in missing:
        ending = Path(str(option.value)).suffix.replace("yml", "yaml")
        unset = str(option.value).startswith("$") and ending not in CONFIGURATIONS
        alike = (file for file in free if unset or Path(file).suffix.replace("yml", "yaml") == ending)
        instead = next(alike, None)
        if instead is None:
            asked.append(option)
            continue
        free.remove(instead)
        notes.append(f"{instead} is taken for {option.value}, which {option.name} names")
    _ask_for_files(asked)
    if not used:
        raise ScenarioError(f"{read[0].name}: holds no option of {table.title}; is it another framework's?")


def _ask_for_files(named: Sequence[OptionValue]) -> None:
    """Raise an error for files that were not given: a question beside others where they are DeepSpeed's, which says
    nothing of the model and the machine; alone where they may answer the others."""
    if not named:
        return
    words = " and ".join(f"{option.name} names {option.value}" for option in named)
    question = OpenQuestion(named[0].where, f"{words}; give {'that file' if len(named) == 1 else 'those files'} too")
    is_deepspeeds = all(option.name.lstrip("-").rsplit(".", 1)[-1] in OF_DEEPSPEED for option in named)
    raise question if is_deepspeeds else ScenarioError(str(question))


def _is_file(key: str, value: object) -> bool:
    """Whether an option that may name a file does, by the file's ending, or by what the option is."""
    if str(value).endswith(CONFIGURATIONS) or (key != FLAG and str(value).startswith("$")):
        return True
    flag = str(value).lower() in {"", "true", "false", "1", "0", "none"}
    return key.endswith(ALWAYS) and isinstance(value, str) and not flag and not value.lstrip().startswith("{")


def _told_by_name(read: Sequence[Document], options: Mapping[Key, OptionValue]) -> None:
    """Raise :class:`ScenarioError` for a configuration that a command names by a word, or that its script makes."""
    if any(file.kind in {"yaml", "json", PYTHON} for file in read):
        return
    for name in ("config_name", "accelerate_config", "config", "config_file", "deepspeed", "deepspeed_config"):
        option = options.get(("args", name))
        if option is None or str(option.value).endswith(CONFIGURATIONS):
            continue
        if isinstance(option.value, str) and not option.value.startswith("$") and option.value not in {"true", "1"}:
            raise ScenarioError(f"{option.where}: {option.name} names {option.value}; give that file too")
        if name == "deepspeed" and ("config", "zero_optimization.stage") not in options:
            stage = any(key[1].endswith(("zero_stage", "deepspeed_config")) for key in options)
            if not stage:
                raise ScenarioError(
                    f"{option.where}: {option.name} names no file: the script makes DeepSpeed's configuration itself; "
                    "give it as a .json file too"
                )


def refuse_overridden(read: Sequence[Document]) -> None:
    """Raise :class:`ScenarioError` for changes to a configuration that was not given: Hydra's of NeMo 1.x, beside the
    script, or what a recipe of Megatron-Bridge makes. What they leave is as it has it, not as the framework's defaults.
    """
    if any(file.kind != "shell" for file in read if file.kind not in {HOSTS, MODEL}):
        return
    for file in read:
        changed = next((value for (at, _), value in file.overrides.items() if at == "config"), None)
        named = next((option for (_, key), option in file.options.items() if key == "config_name"), None)
        if changed is not None and named is not None:
            raise ScenarioError(f"{named.where}: {named.name} names {named.value}; give that file too")
        if changed is not None:
            raise ScenarioError(
                f"{changed.where}: {changed.name} changes a configuration that {file.program or 'the script'} reads or "
                f"makes; give that too, as YAML ({WRITTEN}; conf/*.yaml of NeMo 1.x)"
            )


def trains(read: Sequence[Document], table: FrameworkTable, said: Mapping[Key, OptionValue]) -> str:
    """``decoder`` or ``encoder``, as the training script or the file's own name says.

    Raises :class:`ScenarioError` for one whose model no sizes tell.
    """
    programs = [(one.program.removesuffix(".py"), one.name) for one in read if one.program]
    programs += [(str(option.value), option.where) for (_, key), option in said.items() if key in table.says]
    for program, where in programs:
        trained = table.trains(program) or table.trains(program.rsplit(".", 1)[-1])
        if trained in {"decoder", "encoder"}:
            return trained
        if trained is not None:
            raise ScenarioError(
                f"{where}: {program} trains {trained}; describe its model in a config.json: --model PATH"
            )
    return ""
