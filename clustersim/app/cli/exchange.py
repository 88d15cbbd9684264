"""``clustersim import`` and ``clustersim export-config``: training frameworks' launch files in and out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.common import OUT_FILE, PATH, json_option, option_option, print_json, set_option
from clustersim.app.cli.new import write_new
from clustersim.core.errors import ClusterSimError
from clustersim.core.outputs import together, writing
from clustersim.core.tomls import toml_text
from clustersim.files.frameworks import NAMES, WRITTEN

if TYPE_CHECKING:
    from clustersim.files.launch import LaunchFiles, LaunchImport

UNPLAYED = "data, tokenizer, learning rate, how many steps to train"
"""What every launch says and no step takes longer for."""


@click.command("import", short_help="Make a scenario of a framework's launch files.")
@click.argument("files", nargs=-1, required=True, type=PATH)
@click.option("-o", "--out", "out", required=True, type=OUT_FILE, help="The scenario to write: a .toml file.")
@click.option("--from", "framework", type=click.Choice(NAMES), help="Whose files they are.  [found by their content]")
@click.option("--topology", help="The machine, a shipped topology or a file: launch files do not say it.")
@click.option("--nodes", type=click.IntRange(1, 10_000_000), help="How many nodes, where no launcher says it.")
@click.option("--gpus-per-node", type=click.IntRange(1, 10_000_000), help="Ranks on each node.  [all its GPUs]")
@click.option("--model", help="A shipped model or a config.json, where the files name none.")
@click.option("--seq-len", type=click.IntRange(1, 100_000_000), help="Tokens of a sample, where no file says it.")
@json_option
def import_(
    files: tuple[Path, ...],
    out: Path,
    framework: str | None,
    topology: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    model: str | None,
    seq_len: int | None,
    as_json: bool,
) -> None:
    """Make a scenario of FILES: a Megatron-LM script or YAML, a torchtitan TOML or its config_registry.py with the
    script that names one, a DeepSpeed JSON with the script that is launched with it, an accelerate YAML with the
    Trainer's arguments (TRL, axolotl, LLaMA-Factory, ms-swift), a program that takes a recipe of NeMo 2, the YAML of
    NeMo, Megatron-Bridge, torchtune, GPT-NeoX, nanotron, llm-foundry, OLMo, LitGPT, LightningCLI or NeMo Automodel, the
    TOML of prime-rl, an experiment of Primus with its presets, a config/*.py of nanoGPT, or the finetuning command of
    OpenRLHF, verl, Llama Cookbook or Colossal-AI.

    Options that change time or memory become fields, or are named with what is played instead; what contradicts is an
    error. Nothing in a script is run.
    """
    from clustersim import scenario
    from clustersim.files import launch as exchange

    machine = {"topology": _beside(topology, out), "nodes": nodes, "gpus_per_node": gpus_per_node}
    imported = exchange.read(files, machine, framework=framework, model=_beside(model, out), path=out, seq_len=seq_len)
    notes = list(_told(imported))
    about = f"From {', '.join(file.name for file in files)} of {imported.framework.title}: `clustersim run {out.name}`."
    comment = "".join(f"# {' '.join(line.split())}\n" for line in (about, *notes))
    write_new(out, comment + "\n" + toml_text(imported.tables), scenario.load, said=not as_json)
    if as_json:
        print_json(
            {
                "framework": imported.framework.name,
                "version": imported.framework.version,
                "scenario": imported.tables,
                "notes": imported.notes,
                "mapped": imported.mapped,
                "not_played": imported.unplayed,
                "unknown": imported.unknown,
                "ignored": imported.ignored,
                "wrote": str(out),
            }
        )
    else:
        click.echo("\n".join(notes))


def _beside(path: str | None, out: Path) -> str | None:
    """A path as the scenario has it, whose paths start at its own folder; names stay."""
    if path is None or not (path.endswith((".toml", ".json")) or "/" in path):
        return path
    beside = os.path.relpath(path, out.parent)
    return beside if "/" in beside else f"./{beside}"


def _told(imported: LaunchImport) -> list[str]:
    lines = [f"options read: {len(imported.mapped)}, by their names in {imported.framework.version}", *imported.notes]
    lines += [f"not played: {name}: {why}" for name, why in imported.unplayed.items()]
    if imported.unknown:
        lines.append(f"unknown options, left out: {len(imported.unknown)}: {', '.join(imported.unknown)}")
    if imported.ignored:
        lines.append(f"options that change neither time nor memory, left out: {len(imported.ignored)}")
    return lines


@click.command("export-config", short_help="Write a scenario as a framework's launch files.")
@click.argument("scenario")
@click.option("--to", "to", required=True, type=click.Choice(WRITTEN), help="The framework that reads them.")
@click.option("-o", "--out", "out", type=OUT_FILE, help="The file to write.  [printed]")
@option_option
@set_option
@json_option
def export_config(
    scenario: str, to: str, out: Path | None, place: int | None, changes: tuple[str, ...], as_json: bool
) -> None:
    """Write SCENARIO (a file, a shipped name, or the folder of a plan) as the launch files of a framework.

    What the framework has no word for is named, with what it would be instead: the files are read back to find it.
    """
    from clustersim.app.cli.named import named_scenario
    from clustersim.files import launch as exchange
    from clustersim.scenario import parse_overrides

    edited = named_scenario(scenario, place=place)[0].changed(parse_overrides(changes))
    exported = exchange.written(edited, to, out.stem if out else "launch")
    wrote = _write(exported, out) if out else []
    if as_json:
        print_json(
            {
                "framework": to,
                "version": exported.framework.version,
                "texts": exported.texts,
                "wrote": wrote,
                "no_word_for": exported.wordless,
                "not_written": exported.machine,
            }
        )
        return
    if out is None:
        for name, text in exported.texts.items():
            click.echo(f"# ---- {name}\n{text}" if len(exported.texts) > 1 else text, nl=False)
    for line in [f"wrote {name}" for name in wrote]:
        click.echo(line)
    if exported.machine:
        click.echo(f"not written, of the machine and of the play: {', '.join(exported.machine)}", err=out is None)
    click.echo(f"not written, as no scenario has them: {UNPLAYED}", err=out is None)
    for line in exported.wordless:
        click.echo(f"{exported.framework.title} has no word for {line}", err=out is None)


def _write(exported: LaunchFiles, out: Path) -> list[str]:
    """The files, together; existing ones are left alone."""
    names = list(exported.texts)
    if out.name not in names:
        raise ClusterSimError(f"{out}: these files end in {Path(names[0]).suffix}")
    for name in names:
        if (out.parent / name).exists():
            raise ClusterSimError(f"{out.parent / name}: is there already; choose another name")
    with writing(out), together(out.parent) as path_of:
        for name, text in exported.texts.items():
            path_of(name).write_text(text, encoding="utf-8")
    return [str(out.parent / name) for name in names]
