"""What launch files say, before a scenario is made of it: options by the names of a framework's table, and ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clustersim.files.launch import (
    automodel,
    colossal,
    cookbook,
    litgpt,
    megatron_swift,
    nanogpt,
    nemo_precision,
    openrlhf,
    prime_rl,
    primus,
    recipes,
    titan_python,
    torchtitan,
    torchtune,
    trainer,
    verl,
)
from clustersim.files.launch.files import HOSTS, MODEL, Document, Key, OptionValue, documents
from clustersim.files.launch.launcher_sizes import VISIBLE
from clustersim.files.launch.options import ScenarioFields, refuse, renamed, together
from clustersim.files.launch.table import FrameworkTable, load
from clustersim.files.launch.whose import framework_of
from clustersim.scenario.file.reading import Table as Tables

_WORDS = (litgpt, nanogpt, nemo_precision, openrlhf, cookbook, verl, colossal, megatron_swift, automodel, prime_rl)
"""Frameworks whose options are brought to their table's names."""


@dataclass
class LaunchParts:
    """What launch files say, while a scenario is made of it.

    Parameters
    ----------
    files, table : as they were read, and the words of their framework. options : what the files say, by place and name.
    path : of the scenario. model : its name or config.json as the scenario has it; None where sizes are said instead.
    fields : of the scenario, by dotted path, so far. notes : what was assumed or left out so far.
    """

    files: list[Document]
    table: FrameworkTable
    options: dict[Key, OptionValue]
    path: Path
    model: str | None
    fields: ScenarioFields
    notes: list[str]

    @property
    def folder(self) -> Path:
        """Of the scenario, whose paths start there."""
        return self.path.parent


def parts_of(
    files: Sequence[str | Path | Document], framework: str | None, model: str | None, path: Path
) -> LaunchParts:
    """The options of all files, as the framework's table names them; the model's config.json, where one is given."""
    read_files, framework = primus.unfolded(documents(files), framework)
    recipes.unstaged(read_files)
    table = load(framework_of(read_files, framework))
    trainer.arranged(read_files, table)
    recipes.arranged(read_files, table)
    titan_python.arranged(read_files, table)
    options = renamed(together(read_files), table)
    notes = []
    for framework_words in _WORDS:
        notes += framework_words.arranged(read_files, options, table)
    notes += primus.arranged(options, table, model)
    refuse(table, options, [(file.program, file.name) for file in read_files if file.program], model)
    notes += [*table.notes, *(note for file in read_files for note in file.notes)]
    notes += torchtitan.arranged(options, table)
    notes += torchtune.arranged(read_files, options, table)
    config = next((file.name for file in read_files if file.kind == MODEL), None)
    if config is not None and model is None:
        model = f"./{os.path.relpath(config, path.parent)}"
    return LaunchParts(read_files, table, options, path, model, ScenarioFields(), notes)


def launched(parts: LaunchParts, cluster: Tables) -> list[str]:
    """The fields that launchers and lists of hosts say; returns notes."""
    for file in sorted(parts.files, key=lambda file: file.kind != HOSTS):  # a command may use a part of the hosts
        for name, value in file.machine.items():
            parts.fields.launch(name, value)
    notes = _alone(parts.files, parts.fields, cluster)
    return notes + _unlaunched(parts.files, parts.table, parts.fields, cluster)


def _alone(read: Sequence[Document], fields: ScenarioFields, cluster: Tables) -> list[str]:
    """One node, where a launcher starts ranks on its own alone and nobody says more; returns a note."""
    starter = next((file for file in read if file.alone), None)
    if starter is None or cluster.get("nodes") or {"cluster.nodes", "cluster.world"} & fields.keys():
        return []
    fields["cluster.nodes"] = 1
    return [f"{starter.name}: one node, as {starter.alone} starts ranks on the node that it runs on; or say --nodes"]


def _unlaunched(read: Sequence[Document], table: FrameworkTable, fields: ScenarioFields, cluster: Tables) -> list[str]:
    """A note where no launcher starts a script, and nobody says how many ranks there are."""
    visible = next((ranks for file in read if (ranks := _seen(file)) is not None), None)
    known = {"cluster.gpus_per_node", "cluster.world"} & fields.keys() and visible is None
    if known or cluster.get("gpus_per_node") or not table.one_process:
        return []
    taken = "all GPUs of each node" if visible is None else f"the GPUs of {visible.name}"
    for file in read:
        if file.started_by.startswith("python") and file.program:
            return [
                f"{file.name}: no launcher starts {file.program}, which alone is one rank; {taken} are "
                "taken as if one did: of one GPU say --nodes 1 --gpus-per-node 1"
            ]
    return []


def _seen(file: Document) -> OptionValue | None:
    """Several GPUs that a process sees, and of which nobody says that each is a rank."""
    ranks = file.machine.get("cluster.gpus_per_node")
    return ranks if ranks is not None and ranks.name in VISIBLE and str(ranks.value) != "1" else None
