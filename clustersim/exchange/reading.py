"""Launch files -> a scenario: options by their rows, then the model, the batch and the machine, then the check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustersim.errors import ScenarioError
from clustersim.exchange import batches, shapes
from clustersim.exchange.files import Document, Key, Said, documents, framework_of
from clustersim.exchange.options import Fields, apply, others, together
from clustersim.exchange.settling import checked, machine, shorter
from clustersim.exchange.table import Table, holds, load
from clustersim.scenario import Scenario
from clustersim.scenario.reading import Table as Tables
from clustersim.scenario.splitting import PLAYED
from clustersim.tomls import nested

CONFIGURATIONS = (".json", ".yaml", ".yml")


@dataclass(frozen=True)
class Imported:
    """What launch files come to.

    Parameters
    ----------
    scenario : read and checked. tables : it as a file would say it. framework : whose files they were.
    notes : what was assumed or left out, in sentences. mapped : options that became fields. unplayed : those that
        change time or memory and are not played, with what is instead. ignored, unknown : those that change neither,
        and those that nobody knows.
    """

    scenario: Scenario
    tables: Tables
    framework: Table
    notes: tuple[str, ...]
    mapped: tuple[str, ...]
    unplayed: Mapping[str, str]
    ignored: tuple[str, ...]
    unknown: tuple[str, ...]


def read(
    files: Sequence[str | Path],
    cluster: Tables,
    *,
    framework: str | None = None,
    model: str | None = None,
    path: str | Path = "scenario.toml",
) -> Imported:
    """A scenario from launch files.

    Parameters
    ----------
    files : a script, or a configuration and the script that names it. cluster : fields of ``[cluster]`` that they do
        not say: ``topology``, and ``nodes`` where no launcher does. framework : whose files they are; found by content
        when absent. model : a shipped model or a config.json, where the files name none. path : of the scenario.

    Raises :class:`ScenarioError` naming file and option.
    """
    return interpreted(documents(files), cluster, framework=framework, model=model, path=path)


def interpreted(
    read: Sequence[Document],
    cluster: Tables,
    *,
    framework: str | None = None,
    model: str | None = None,
    path: str | Path = "scenario.toml",
    run: Tables | None = None,
) -> Imported:
    """As :func:`read`, of files that have been read; ``run`` : fields of ``[run]`` that no launch file has."""
    table = load(framework_of(read, framework))
    said, notes = together(read), [note for one in read for note in one.notes]
    fields = Fields()
    for one in read:
        for name, value in one.machine.items():
            fields.say(name, value.value, value, over=True)
    used = apply(table, said, fields, model)
    _complete(read, table, said, used)
    left = others(table, said, used)
    for name, value in table.fixed.items():
        fields.setdefault(name, value)
    notes += _model(fields, model, read[0].name)
    place, world = machine(fields, cluster, notes, read[0].name, Path(path).parent)
    tables = _tables(table, fields, place, world)
    tables["run"] = {**tables.get("run", {}), **(run or {})}
    made = checked(tables, Path(path), fields)
    said_tables, made = shorter(tables, made, Path(path))
    mapped = tuple(dict.fromkeys(said[key].name for key in said if key in used))
    return Imported(made, said_tables, table, tuple(notes), mapped, *left)


def _complete(read: Sequence[Document], table: Table, said: Mapping[Key, Said], used: set[Key]) -> None:
    """Raise :class:`ScenarioError` for files of somebody else, and for a script without the file that it names."""
    if not used:
        raise ScenarioError(f"{read[0].name}: holds no option of {table.title}; is it another framework's?")
    for key in (("args", "deepspeed_config"), ("args", "deepspeed"), ("args", "config_file")):
        if key in said and str(said[key].value).endswith(CONFIGURATIONS) and all(one.kind == "shell" for one in read):
            raise ScenarioError(f"{said[key].where}: {said[key].name} names {said[key].value}; give that file too")


def _model(fields: Fields, model: str | None, file: str) -> list[str]:
    """``[model]``'s name, from its sizes where no name is said; returns notes."""
    if model is not None:
        fields["model.hf_config" if model.endswith(".json") or "/" in model else "model.name"] = model
        return []
    if "model.name" in fields:
        return []
    found = shapes.model_for(file, {name[6:]: value for name, value in fields.items() if name.startswith("shape.")})
    by = fields.by.get("shape.layers")
    if by is not None:
        fields.by["model.name"] = by
    fields["model.name"] = found.name
    if found.options:
        fields["model.options"] = found.options
    return [found.note]


def _tables(table: Table, fields: Fields, place: Tables, world: int) -> Tables:
    """The scenario's tables; ``[parallel]`` where it has an effect."""
    kept = {name: value for name, value in fields.items() if not name.startswith(("shape.", "batch.", "cluster."))}
    degrees = ("tp", "pp", "cp", "ep")
    split = table.parallel == "always" or any(holds(name, fields) for name in degrees)
    split = split or any(fields.get(f"parallel.{name}") for name in PLAYED)
    kept |= batches.said(fields, world, split)
    if not split:
        kept = {name: value for name, value in kept.items() if not name.startswith("parallel.")}
    return {"cluster": place} | nested(kept)
