"""``clustersim new``: a commented file to start from, made from a few answers and ready to run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from clustersim.app.cli.common import OUT_FILE, PATH
from clustersim.app.cli.drafts import PlanDraft, ScenarioDraft, filled, length_line, model_line
from clustersim.app.cli.machine_texts import changed_machine, mixed_machine
from clustersim.app.cli.machines import MachineChoice, as_written, machine_of, taken_for
from clustersim.app.cli.recipes import OF_STRATEGY, RECIPES, USUAL
from clustersim.app.cli.room import with_room
from clustersim.core import gpu_file
from clustersim.core.device_names import device_from_text
from clustersim.core.errors import ClusterSimError
from clustersim.core.outputs import fresh, writing
from clustersim.core.texts import short
from clustersim.core.tomls import toml_value


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

    argument = click.argument("file", type=OUT_FILE, required=False, metavar="FILE")
    return argument(click.option("--out", "-o", type=OUT_FILE, help="The file to write; the same as FILE.")(called))


GPU_HELP = "A GPU, such as H100, or a file of one: takes the shipped machine that has it, or has what it extends."
gpu_option = click.option("--gpu", help=GPU_HELP)
topology_option = click.option(
    "--topology", help="A machine, a shipped topology or a file; a --gpu beside it stands in its sockets."
)
model_option = click.option(
    "--model", "model_name", default="llama3-8b", help="A shipped model, a config.json or a .model.json."
)

length_option = click.option(
    "--seq-len",
    type=click.IntRange(min=1, max=10_000_000),
    help="Tokens of a sample; long ones are shared out by context parallelism.  [the config's, at most 8192]",
)


@click.group(short_help="Write a commented scenario, topology, plan or sweep to start from.")
def new() -> None:
    """Write a commented file to start from, ready to run. What it may say else: clustersim describe --keys KIND."""


@new.command()
@file_argument
@gpu_option
@topology_option
@click.option("--nodes", type=click.IntRange(min=1), default=1, help="How many nodes it has.")
@model_option
@length_option
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
    seq_len: int | None,
    strategy: str | None,
    recipe: str | None,
    tokens: float | None,
) -> None:
    """A scenario for clustersim run: every field that matters of a framework's own recipe."""
    from clustersim import scenario as scenarios
    from clustersim.scenario.run.parts import left_out

    if strategy is not None and recipe:
        raise click.UsageError("--recipe has its own strategy: leave --strategy out")
    if strategy is not None and strategy not in OF_STRATEGY:
        raise ClusterSimError(
            f"--strategy {strategy!r}: a recipe has {', '.join(OF_STRATEGY)}; change the file for another"
        )
    machine = machine_of(gpu, topology)
    draft = ScenarioDraft(file, machine, nodes, model_name, tokens, seq_len)
    recipes = [recipe or OF_STRATEGY[strategy or ""]] if recipe or strategy else list(USUAL)
    chosen = with_room(draft.texts(recipes), file, draft.offloading_texts(recipes))
    write_new(file, chosen.text, scenarios.load)
    if chosen.verdict is not None:
        click.echo(f"{chosen.verdict}\n{chosen.why}", err=not chosen.verdict.ok)
    click.echo("".join(f"{note}\n" for note in left_out(scenarios.load(str(file)))), nl=False)
    _say_taken([gpu], [machine])


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
        if topology is not None or mix or oversubscription:
            raise click.UsageError("--from tells the whole machine; only --gpu and --nics may be said beside it")
        own = MachineChoice("", gpu or "").device_table()
        text = topology_text(given, gpu, nics_asked(nics) if nics else None) + "".join(f"{line}\n" for line in own)
    elif mix:
        if gpu is not None or topology is not None or nics:
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
@length_option
@click.option("--tokens", type=click.FloatRange(min=1), help="Tokens to train on: the answer then has days and USD.")
def plan(
    file: Path,
    gpus: tuple[str, ...],
    topologies: tuple[str, ...],
    nodes: tuple[int, ...],
    model_name: str,
    seq_len: int | None,
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
    text = filled(
        "plan",
        file=short(file.name),
        model=model_name,
        model_line=model_line(model_name, file),
        length=length_line(model_name, file, seq_len),
        machines=" or ".join(machine.label for machine in machines),
        tables=tables,
        tokens="# tokens = 1e12 " if tokens is None else f"tokens = {tokens:g}   ",
        **PlanDraft(file, model_name, machines, nodes, seq_len).values(),
    )
    write_new(file, text, load)
    _say_taken(gpus, taken)


def _say_taken(gpus: Sequence[str | None], machines: Sequence[MachineChoice]) -> None:
    """What each ``--gpu`` was taken for, where it could be something else."""
    for text in (taken_for(gpu, machine) for gpu, machine in zip(gpus, machines, strict=True)):
        if text:
            click.echo(text)


@new.command()
@file_argument
@click.option("--like", default="H200", help="The shipped GPU that it is like.")
def device(file: Path, like: str) -> None:
    """A GPU of your own, for clustersim run --gpu, cluster.device and [device] of a topology."""

    base = device_from_text(like)
    peaks = ", ".join(f'{dtype} = "{rate / 1e12:.6g} TFLOP/s"' for dtype, rate in base.peak.items())
    text = filled(
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

    write_new(file, filled("sweep", file=short(file.name), base=base), load)


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
