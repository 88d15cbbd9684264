"""Launch files -> a scenario: options by their rows, then the model, the batch and the machine, then the check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clustersim.files.launch import adapters, batches, torchtitan
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.implied import settled
from clustersim.files.launch.launch_parts import LaunchParts, launched, parts_of
from clustersim.files.launch.open_questions import OpenQuestion, OpenQuestions
from clustersim.files.launch.options import ScenarioFields, apply
from clustersim.files.launch.scenario_tables import checked, machine, shorter, tables_of
from clustersim.files.launch.table import FrameworkTable
from clustersim.scenario import Scenario
from clustersim.scenario.file.reading import Table as Tables
from clustersim.scenario.run.parts import model_of, transformer_of

SIXTEEN = ("bf16.enabled", "fp16.enabled")
"""Of DeepSpeed's file."""


@dataclass(frozen=True)
class LaunchImport:
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
    framework: FrameworkTable
    notes: tuple[str, ...]
    mapped: tuple[str, ...]
    unplayed: Mapping[str, str]
    ignored: tuple[str, ...]
    unknown: tuple[str, ...]


def read(
    files: Sequence[str | Path | Document],
    cluster: Tables,
    *,
    framework: str | None = None,
    model: str | None = None,
    path: str | Path = "scenario.toml",
    run: Tables | None = None,
    seq_len: int | None = None,
) -> LaunchImport:
    """A scenario from launch files.

    Parameters
    ----------
    files : a script, or a configuration and the script that names it. cluster : fields of ``[cluster]`` that they do
        not say: ``topology``, and ``nodes`` where no launcher does. framework : whose files they are; found by content
        when absent. model : a shipped model or a config.json, where the files name none. path : of the scenario.
        run : fields of ``[run]`` that no launch file has. seq_len : tokens of a sample, where the files do not say it.

    Raises :class:`ScenarioError` naming file and option.
    """
    parts = parts_of(files, framework, model, Path(path))
    parts.notes += launched(parts, cluster)
    used = apply(parts.table, parts.options, parts.fields, parts.model)
    questions = OpenQuestions()
    with questions.gathered():
        parts.notes += _length(parts, seq_len)
    left = settled(parts, used, questions)
    with questions.gathered():
        place, world = machine(parts.fields, cluster, parts.notes, parts.files[0].name, parts.folder)
    questions.ask()
    batches.ask_for_passes(parts.fields, parts.table)
    result, tables = _made(parts, place, world, run or {})
    parts.notes += _unsaid(parts.fields, result)
    parts.notes += _undecided(parts.fields, parts.options)
    parts.notes += _kernels_taken(parts, result)
    if parts.table.name == "torchtitan":
        parts.notes += torchtitan.wide_experts(parts.options, result)
    mapped = tuple(dict.fromkeys(parts.options[key].name for key in parts.options if key in used))
    return LaunchImport(result, tables, parts.table, tuple(parts.notes), mapped, *left)


def _made(parts: LaunchParts, place: Tables, world: int, run: Tables) -> tuple[Scenario, Tables]:
    """The scenario, checked, and its tables without what holds anyway; ``place`` : of ``[cluster]``."""
    if parts.table.name == "torchtitan":
        torchtitan.fill(parts.fields, world)
    tables = tables_of(parts.table, parts.fields, place, world)
    tables["run"] = {**tables.get("run", {}), **run}
    check = partial(checked, tables, parts.path, parts.fields, parts.table, parts.files)
    result = adapters.passed_over(tables, parts.notes, check) if parts.table.name == "accelerate" else check()
    tables, result = shorter(tables, result, parts.path)
    return result, tables


def _length(parts: LaunchParts, seq_len: int | None) -> list[str]:
    """The length of a sample that is asked for; a question where the framework has none without its data."""
    if seq_len is not None:
        return _asked_length(parts.fields, seq_len)
    if parts.table.asks_for_length and "model.seq_len" not in parts.fields:
        words = "no file says how long a sample is, which the data decides; say --seq-len"
        raise OpenQuestion(parts.files[0].name, words)
    return []


def _asked_length(fields: ScenarioFields, seq_len: int) -> list[str]:
    """Put the length of a sample that is asked for into the fields; a note where a file says another."""
    by = fields.by.get("model.seq_len")
    before = fields.get("model.seq_len")
    fields.say("model.seq_len", seq_len, OptionValue("--seq-len", seq_len, "the command"), over=True)
    if by is None or before == seq_len:
        return []
    return [f"seq_len = {seq_len:,} as asked for; {by.where}: {by.name} says {before:,}"]


def _unsaid(fields: ScenarioFields, scenario: Scenario) -> list[str]:
    """Notes on the length of a sequence and the samples of a pass where nobody says them."""
    notes = []
    sizes = ("batch.micro", "batch.local", "batch.global")
    if not any(name in fields.by for name in sizes):
        usual = next((fields[name] for name in sizes if name in fields), 1)
        notes.append(f"no file says how many samples a rank takes at once: {usual}")
    tokens = model_of(scenario).seq_len
    if tokens and "model.seq_len" not in fields:
        notes.append(f"no file says how long a sequence is: {tokens:,} tokens are taken (or say --seq-len)")
    return notes


def _undecided(fields: ScenarioFields, options: Mapping[Key, OptionValue]) -> list[str]:
    """A note where DeepSpeed's file leaves its arithmetic to a Trainer whose arguments are not there."""
    auto = [option for key, option in options.items() if key[1] in SIXTEEN and option.value == "auto"]
    if not auto or "model.dtype" in fields:
        return []
    names = " and ".join(option.name for option in auto)
    return [f"{auto[0].where}: {names} auto is what --bf16 or --fp16 of the Trainer says, and no file has it: fp32"]


def _kernels_taken(parts: LaunchParts, scenario: Scenario) -> list[str]:
    """Notes on kernels and recomputation that a script of Hugging Face's models decides, where no option says them: as
    ``attn_implementation`` and ``gradient_checkpointing`` of transformers are by default."""
    is_megatron_script = parts.table.name == "deepspeed" and "shape.layers" in parts.fields
    if (
        parts.table.name not in {"deepspeed", "accelerate"}
        or is_megatron_script
        or scenario.file.model.file is not None
    ):
        return []
    taken = []
    if transformer_of(scenario) is not None and not _is_said(parts, "model.attention"):
        taken.append("attention is fused, by the kernel that PyTorch picks (SDPA)")
    if not _is_said(parts, "model.implementation"):
        others = "other kernels" if taken else "kernels"
        taken.append(f"{others} are as PyTorch runs them op by op")
    if not _is_said(parts, "model.activation_checkpointing"):
        taken.append("no layer is computed again")
    return [f"no file says otherwise: {'; '.join(taken)}"] if taken else []


def _is_said(parts: LaunchParts, field: str) -> bool:
    """Whether an option of any row about this field is in the files, with whatever value."""
    names = {row.option for row in parts.table.every() if row.field == field}
    return field in parts.fields.by or any(name in names for _, name in parts.options)
