"""``clustersim new``: a commented file to start from, made from a few answers and ready to run."""

from __future__ import annotations

import functools
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.common import PATH
from clustersim.app.cli.machine_texts import changed_machine, mixed_machine
from clustersim.app.cli.machines import MachineChoice, as_written, machine_of, taken_for
from clustersim.app.cli.recipes import (
    MOST_MICRO_BATCH,
    OF_STRATEGY,
    RECIPES,
    USUAL,
    RecipePlace,
    batch_of,
    degrees_tried,
    kernels,
    offloading_settings,
    own_tables,
    recipe_text,
    settings,
    tokens_of,
)
from clustersim.app.cli.room import with_room
from clustersim.core.errors import ClusterSimError
from clustersim.core.outputs import fresh, writing
from clustersim.core.paths import data_path
from clustersim.core.texts import short
from clustersim.core.tomls import toml_value

if TYPE_CHECKING:
    from clustersim.training.parallel import ModelShape


def file_argument(command: Callable[..., None]) -> Callable[..., None]:
    """The file to write: an argument, or ``--out`` as every other command has it."""

    @functools.wraps(command)
    def called(file: Path | None, out: Path | None, **rest: object) -> None:
        """Call the command with the one of both that is given. Raises a usage error for both, and for none."""
        if file is not None and out is not None:
            raise click.UsageError(f"FILE ({file}) and --out ({out}) both name the file to write: leave one out")
        if file is None and out is None:
            raise click.UsageError("no file to write: name it, such as my.toml")
        command(file=file or out, **rest)

    argument = click.argument("file", type=PATH, required=False, metavar="FILE")
    return argument(click.option("--out", "-o", type=PATH, help="The file to write; the same as FILE.")(called))


GPU_HELP = "A GPU, such as H100, or a file of one: takes the shipped machine that has it, or has what it extends."
gpu_option = click.option("--gpu", help=GPU_HELP)
topology_option = click.option(
    "--topology", help="A machine, a shipped topology or a file; a --gpu beside it stands in its sockets."
)
model_option = click.option(
    "--model", "model_name", default="llama3-8b", help="A shipped model, a config.json or a .model.json."
)
NO_DEVICE = '# device = "..."             # another GPU in the same sockets; `clustersim list devices`\n'
"""The line of ``[cluster]`` where the machine keeps its own GPUs."""


@click.group(short_help="Write a commented scenario, topology, plan or sweep to start from.")
def new() -> None:
    """Write a commented file to start from, ready to run. What it may say else: clustersim describe --keys KIND."""


@new.command()
@file_argument
@gpu_option
@topology_option
@click.option("--nodes", type=click.IntRange(min=1), default=1, help="How many nodes it has.")
@model_option
@click.option("--strategy", help="A data-parallel strategy, in the recipe that has it.")
@click.option(
    "--recipe",
    type=click.Choice(list(RECIPES)),
    help="Whose way of training.  [the first of pytorch (DDP), torchtitan, deepspeed and megatron that fits]",
)
@click.option(
    "--tokens", type=click.FloatRange(min=1), help="Tokens to train on: adds the [campaign] table of a whole training."
)
def scenario(
    file: Path,
    gpu: str | None,
    topology: str | None,
    nodes: int,
    model_name: str,
    strategy: str | None,
    recipe: str | None,
    tokens: float | None,
) -> None:
    """A scenario for clustersim run: every field that matters of a framework's own recipe."""
    from clustersim import scenario as scenarios

    if strategy and recipe:
        raise click.UsageError("--recipe has its own strategy: leave --strategy out")
    if strategy and strategy not in OF_STRATEGY:
        raise ClusterSimError(
            f"--strategy {strategy!r}: a recipe has {', '.join(OF_STRATEGY)}; change the file for another"
        )
    machine = machine_of(gpu, topology)
    draft = ScenarioDraft(file, machine, nodes, model_name, tokens)
    recipes = [recipe or OF_STRATEGY[strategy or ""]] if recipe or strategy else list(USUAL)
    chosen = with_room(draft.texts(recipes), file, draft.offloading_texts(recipes))
    write_new(file, chosen.text, scenarios.load)
    if chosen.verdict is not None:
        click.echo(f"{chosen.verdict}\n{chosen.why}", err=not chosen.verdict.ok)
    _say_taken([gpu], [machine])


@dataclass(frozen=True)
class ScenarioDraft:
    """A scenario that is to be written: where, on what, and of which model."""

    file: Path
    machine: MachineChoice
    nodes: int
    model: str
    tokens: float | None

    def texts(self, recipes: Sequence[str]) -> Iterator[str]:
        """The settings of these recipes, in turn, the fastest first.

        Plain data parallelism keeps no recomputation in reserve where another recipe follows.
        """
        place = self._place()
        for recipe in recipes:
            if recipe == "megatron" != recipes[0] and place.shape is None:
                continue  # which has nothing to split
            for values in settings(recipe, place):
                if recipe == USUAL[0] != recipes[-1] and values["kept"] != "none":
                    break
                yield self._filled(recipe, recipe_text(recipe, place, values))

    def offloading_texts(self, recipes: Sequence[str]) -> Iterator[str]:
        """The settings of these recipes that leave a part to the host, for models that fit in no other way."""
        place = self._place()
        for recipe in recipes:
            for values in offloading_settings(recipe, place):
                yield self._filled(recipe, recipe_text(recipe, place, values))

    def _place(self) -> RecipePlace:
        shape = shape_of_model(self.model, self.file) if has_tokens(self.model) else None
        return place_of(self.machine, self.nodes, shape)

    def _filled(self, recipe: str, tables: str) -> str:
        return _filled(
            "scenario",
            file=short(self.file.name),
            title=RECIPES[recipe],
            machine=self.machine.label,
            topology=as_written(self.machine.topology, self.file),
            device=self.machine.device_line(self.file) or NO_DEVICE,
            nodes=self.nodes,
            model=self.model,
            model_line=model_line(self.model, self.file),
            length=length_line(self.model, self.file),
            recipe=tables,
            campaign="" if self.tokens is None else _filled("campaign", tokens=f"{self.tokens:g}"),
        )


def shape_of_model(name: str, file: Path) -> ModelShape:
    """A model's sizes, with samples of the length that :func:`length_line` writes."""
    from clustersim.scenario import from_table
    from clustersim.scenario.run.parts import shape_of

    table = tomllib.loads(f"{model_line(name, file)}\n{length_line(name, file)}")
    tables = {"cluster": {"topology": "hgx-h100"}, "model": table, "strategy": {"kind": "ddp"}}
    return shape_of(from_table(tables, file))


def length_line(name: str, file: Path) -> str:
    """The line of ``[model]`` with tokens of a sample; nothing for what reads none, or whose length is its own."""
    from clustersim.scenario import from_table
    from clustersim.scenario.run.parts import model_of

    if not has_tokens(name):
        return ""
    table = tomllib.loads(model_line(name, file))
    tables = {"cluster": {"topology": "hgx-h100"}, "model": table, "strategy": {"kind": "ddp"}}
    longest = model_of(from_table(tables, file)).seq_len
    return f"seq_len = {longest}               # the config's longest, at most 8192: long contexts are trained last\n"


def _filled(draft: str, /, **values: object) -> str:
    """A shipped draft of a file, with these values in it."""
    text = (data_path("data") / "new" / f"{draft}.txt").read_text("utf-8")
    return Template(text).substitute(values).rstrip() + "\n"


@new.command()
@file_argument
@gpu_option
@topology_option
@click.option(
    "--mix",
    multiple=True,
    metavar="hgx-a100:2",
    help="A machine and how many nodes of it; repeat it for a mixed cluster.",
)
@click.option("--nics", metavar="8x400Gb/s", help="NICs of a node, and the line rate of each.")
@click.option(
    "--oversubscription",
    type=click.FloatRange(min=1),
    help="Of leaf switches: bandwidth down to nodes over bandwidth up.",
)
@click.option(
    "--from",
    "given",
    type=PATH,
    multiple=True,
    help="What NCCL, nvidia-smi topo -m, rocm-smi or lstopo wrote, and ibstat or nvlink -s (clustersim list formats).",
)
def topology(
    file: Path,
    gpu: str | None,
    topology: str | None,
    mix: tuple[str, ...],
    nics: str | None,
    oversubscription: float | None,
    given: tuple[Path, ...],
) -> None:
    """A machine, as a few changes to a shipped one or as NCCL found it, for clustersim check and cluster.topology."""
    from clustersim.cluster import files as fabrics
    from clustersim.cluster.files.boards import nics_asked
    from clustersim.cluster.files.nccl_xml import topology_text

    taken: list[MachineChoice] = []
    if given:
        if topology or mix or oversubscription:
            raise click.UsageError("--from tells the whole machine; only --gpu and --nics may be said beside it")
        own = MachineChoice("", gpu or "").device_table()
        text = topology_text(given, gpu, nics_asked(nics) if nics else None) + "".join(f"{line}\n" for line in own)
    elif mix:
        if gpu or topology or nics:
            raise click.UsageError("--mix says which machines: leave --gpu, --topology and --nics out")
        text = mixed_machine(file, mix, oversubscription)
    else:
        taken.append(machine_of(gpu, topology))
        text = changed_machine(file, taken[0], nics, oversubscription)
    write_new(file, text, lambda path: fabrics.load(str(path)))
    _say_taken([gpu for _ in taken], taken)
    for line in fabrics.load(str(file)).assumed if given else ():
        click.echo(f"assumed: {line}")


@new.command()
@file_argument
@click.option("--gpu", "gpus", multiple=True, help=f"{GPU_HELP} May be repeated.")
@click.option(
    "--topology", "topologies", multiple=True, help="A machine, a shipped topology or a file. May be repeated."
)
@click.option(
    "--nodes", type=click.IntRange(min=1), multiple=True, default=(4, 8), help="Nodes to try; may be repeated."
)
@model_option
@click.option("--tokens", type=click.FloatRange(min=1), help="Tokens to train on: the answer then has days and USD.")
def plan(
    file: Path,
    gpus: tuple[str, ...],
    topologies: tuple[str, ...],
    nodes: tuple[int, ...],
    model_name: str,
    tokens: float | None,
) -> None:
    """A plan for clustersim plan: which machine, which strategy, and how many GPUs."""
    from clustersim.studies.plan.spec import load

    taken = [machine_of(gpu, None) for gpu in gpus]
    machines = [*taken, *(machine_of(None, topology) for topology in topologies)]
    machines = list(dict.fromkeys(machines)) or [machine_of(None, None)]
    tables = "\n".join(
        f'''[[machines]]                 # one table for each kind of machine
topology = "{as_written(machine.topology, file)}"
{machine.device_line(file)}nodes = {list(nodes)}
# usd_per_gpu_hour = 2.5     # yours, instead of a list price
'''
        for machine in machines
    )
    text = _filled(
        "plan",
        file=short(file.name),
        model=model_name,
        model_line=model_line(model_name, file),
        length=length_line(model_name, file),
        machines=" or ".join(machine.label for machine in machines),
        tables=tables,
        tokens="# tokens = 1e12 " if tokens is None else f"tokens = {tokens:g}   ",
        **PlanDraft(file, model_name, machines, nodes).values(),
    )
    write_new(file, text, load)
    _say_taken(gpus, taken)


def _say_taken(gpus: Sequence[str | None], machines: Sequence[MachineChoice]) -> None:
    """What each ``--gpu`` was taken for, where it could be something else."""
    for text in (taken_for(gpu, machine) for gpu, machine in zip(gpus, machines, strict=True)):
        if text:
            click.echo(text)


@dataclass(frozen=True)
class PlanDraft:
    """A plan that is to be written: of which model, on which machines and how many nodes of each."""

    file: Path
    model: str
    machines: Sequence[MachineChoice]
    nodes: Sequence[int]

    def values(self) -> dict[str, str]:
        """What depends on model and machines: numbers, kernels, the batch, and degrees."""
        shape = shape_of_model(self.model, self.file) if has_tokens(self.model) else None
        dtype = "bf16" if all(machine.dtype == "bf16" for machine in self.machines) else "fp16"
        places = [place_of(machine, max(self.nodes), shape) for machine in self.machines]
        least, most = batch_of(shape, max(place.nodes * place.per_node for place in places))
        eight = shape is not None and any(machine.has_fp8 for machine in self.machines)
        tried = degrees_tried(places)
        micro = [size for size in places[0].micro_batches[::-1] if size <= MOST_MICRO_BATCH]
        return {
            "dtype": dtype,
            "dtypes": json.dumps([dtype, "fp8"] if eight else [dtype]),
            "kernels": kernels(shape),
            "least": str(least),
            "most": str(most),
            "batch": tokens_of(least, most, shape),
            "micro": str(sorted({*micro[-3:]} if shape is None else {*micro[-2:], 1, 2})),
            "parallel": tried,
            **own_tables(tried),
        }


def place_of(machine: MachineChoice, nodes: int, shape: ModelShape | None) -> RecipePlace:
    """A machine of so many nodes, for a model of this shape."""
    from clustersim.cluster import files as fabrics

    per_node = max(1, sum(kind == "gpu" for kind in fabrics.load(machine.topology).vertex_kinds))
    return RecipePlace(shape, machine.dtype, nodes, per_node)


@new.command()
@file_argument
@click.option("--like", default="H200", help="The shipped GPU that it is like.")
def device(file: Path, like: str) -> None:
    """A GPU of your own, for clustersim run --gpu, cluster.device and [device] of a topology."""
    from clustersim.core import gpu_file
    from clustersim.core.device_names import device_from_text

    base = device_from_text(like)
    peaks = ", ".join(f'{dtype} = "{rate / 1e12:.6g} TFLOP/s"' for dtype, rate in base.peak.items())
    text = _filled(
        "device",
        file=short(file.name),
        name=toml_value(file.stem),
        base=base.name,
        arch=base.arch,
        memory=f"{base.memory_bytes / 2**30:.6g} GiB",
        bandwidth=f"{base.memory_bandwidth / 1e9:.6g} GB/s",
        peaks=peaks,
        sms=base.sms,
        clock=f"{base.clock / 1e6:.0f} MHz",
        l2=f"{base.l2 / 2**20:.6g} MiB",
        nvlinks=base.nvlink_links,
        tdp=f"{base.tdp:.6g}",
    )
    write_new(file, text, gpu_file.load)


@new.command()
@file_argument
@click.option("--base", default="ddp_gpt2_xl_2x8_a100", help="The scenario it starts from.")
def sweep(file: Path, base: str) -> None:
    """A sweep for clustersim sweep: one scenario, many values."""
    from clustersim.studies.sweep.spec import load

    write_new(file, _filled("sweep", file=short(file.name), base=base), load)


def model_line(name: str, file: Path) -> str:
    """The line of ``[model]`` that names it; a path is written relative to the file."""
    from clustersim.model.named_models import is_model_file, model

    path = Path(name)
    if is_model_file(path):
        return f'file = "{os.path.relpath(path, file.parent)}"'
    if path.suffix != ".json" and not path.is_dir():
        return f'name = "{model(name).name}"'
    return f'hf_config = "{os.path.relpath(path, file.parent)}"'


def has_tokens(name: str) -> bool:
    """Whether a model reads text."""
    from clustersim.model.named_models import file, is_model_file

    return not is_model_file(Path(name)) and file(name) is not None


def write_new(file: Path, text: str, load: Callable[[Path], object], *, said: bool = True) -> None:
    """The file, if it can be read back as what it is; an existing one is left alone."""
    if file.exists():
        raise ClusterSimError(f"{file}: is there already; choose another name")
    if file.suffix != ".toml":
        raise ClusterSimError(f"{file}: these files end in .toml")
    with writing(file), fresh(file) as path:
        path.write_text(re.sub(r"\n\n\n+", "\n\n", text), encoding="utf-8")
        load(path)
    if said:
        click.echo(f"wrote {file}")
