"""``clustersim new``: a commented file to start from, made from a few answers and ready to run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import click

from clustersim.errors import ClusterSimError
from clustersim.outputs import fresh

file_argument = click.argument("file", type=click.Path(path_type=Path))
gpu_option = click.option("--gpu", help="A GPU, such as H100: the machine is the shipped one that carries it.")
topology_option = click.option("--topology", help="A machine by name or file, instead of --gpu.")
model_option = click.option(
    "--model", "model_name", default="llama3-8b", show_default=True, help="A shipped name, or a config.json."
)


@click.group(short_help="Write a commented scenario, topology, plan or sweep to start from.")
def new() -> None:
    """Write a commented file to start from, ready to run. What it may say else: clustersim describe --keys KIND."""


@new.command()
@file_argument
@gpu_option
@topology_option
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True)
@model_option
@click.option("--strategy", help="ddp where the model fits so, else fsdp, when absent.")
def scenario(
    file: Path, gpu: str | None, topology: str | None, nodes: int, model_name: str, strategy: str | None
) -> None:
    """A scenario for clustersim run."""
    from clustersim import scenario as scenarios

    machine = _machine(gpu, topology)
    kind = strategy or ("ddp" if _fits(machine, model_name) else "fsdp")
    text = f'''# {model_name} on {nodes} node(s) of {machine}: `clustersim run {file.name}`.

[cluster]
topology = "{machine}"        # `clustersim list topologies`, or a file of your own
nodes = {nodes}
# device = "..."             # another GPU in the same sockets; `clustersim list devices`
# changes = [{{match = "node0/nic0", bandwidth = "100 Gb/s"}}]   # parts degraded, or gone: remove = true

[model]
{_model(model_name, file)}
dtype = "{_dtype(machine)}"               # of the matrix products
{"attention = " + chr(34) + "flash" + chr(34) if _has_tokens(model_name) else ""}
activation_checkpointing = "{"none" if kind == "ddp" else "full"}"   # "none"; "full" or "selective" save memory

[strategy]
kind = "{kind}"{" " * (15 - len(kind))}      # `clustersim list strategies`
micro_batch_size = 1
gradient_accumulation_steps = 1

# [parallel]                 # splits the model over ranks
# tp = 8
# pp = 2
# global_batch_size = 128

[run]
steps = 3
seed = 0
'''
    write_new(file, text, scenarios.load)


@new.command()
@file_argument
@gpu_option
@topology_option
@click.option("--nics", metavar="8x400Gb/s", help="NICs of a node, and the line rate of each.")
@click.option("--oversubscription", type=click.FloatRange(min=1), help="Bandwidth down from a leaf switch over up.")
def topology(
    file: Path, gpu: str | None, topology: str | None, nics: str | None, oversubscription: float | None
) -> None:
    """A machine, as a few changes to a shipped one, for clustersim check and cluster.topology."""
    from clustersim import fabrics

    base = _machine(gpu, topology)
    parts = [
        f"# A machine of your own, as changes to {base}: `clustersim check {file.name} --nodes 4`.",
        "# Keys: `clustersim describe --keys topology`; every number has a source.",
        "",
        f'name = "{file.stem}"',
        f'title = "{base}, changed"',
        f'extends = "{base}"',
        *(_nics(nics, base) if nics else []),
    ]
    if oversubscription:
        parts += ["", "[fabric]", 'kind = "fat_tree"', f"oversubscription = {oversubscription}", 'source = "..."']
    write_new(file, "\n".join(parts) + "\n", lambda path: fabrics.load(str(path)))


def _nics(text: str, base: str) -> list[str]:
    from clustersim import fabrics

    found = re.fullmatch(r"(\d+)\s*x\s*(.+)", text.strip())
    if found is None:
        raise ClusterSimError(f"--nics {text!r}: write a number and a rate, such as 8x400Gb/s")
    machine = fabrics.load(base)
    count, has = int(found[1]), sum(kind == "nic" for kind in machine.vertex_kinds)
    if not 1 <= count <= has:
        raise ClusterSimError(f"--nics {text!r}: {base} has {has} NICs; extend a machine with at least {count}")
    rate = re.sub(r"(?<=\d)(?=[A-Za-z])", " ", found[2].strip())
    vertices = ["", "[[node.vertices]]", f'names = "nic[0-{count - 1}]"', 'kind = "nic"']
    removed = [f'remove = ["nic[{count}-{has - 1}]"]'] if count < has else []
    return ["", "[node]", *removed, *vertices, f'bandwidth = "{rate}"', 'source = "..."']


@new.command()
@file_argument
@gpu_option
@topology_option
@click.option("--nodes", type=click.IntRange(min=1), multiple=True, default=(4, 8), show_default=True)
@model_option
def plan(file: Path, gpu: str | None, topology: str | None, nodes: tuple[int, ...], model_name: str) -> None:
    """A plan for clustersim plan: which strategy, and how many GPUs."""
    from clustersim.planner.spec import load

    machine = _machine(gpu, topology)
    text = f'''# Which strategy for {model_name}, and how many GPUs? `clustersim plan {file.name} --out DIR`.

title = "{model_name} on {machine}"

[model]
{_model(model_name, file)}
dtype = "{_dtype(machine)}"

[[machines]]                 # one table for each kind of machine
topology = "{machine}"
nodes = {list(nodes)}
# usd_per_gpu_hour = 2.5

[batch]
samples = [256, 1024]        # of a step, over all ranks: at least, at most

[limits]
memory_margin = 0.05         # share of a GPU's memory that stays free
# tokens = 1e12              # to train on; then also
# deadline = "30 d"
# budget_usd = 1e6

[try]
micro_batch_size = [1, 2, 4]
activation_checkpointing = ["none", "full"]

[[try.strategies]]           # any knob may be a list of values
kind = "fsdp"
data_parallel_replicate_degree = [1, 2]

[[try.strategies]]
kind = "zero"
zero_optimization = {{ stage = [1, 2, 3] }}
'''
    write_new(file, text, load)


@new.command()
@file_argument
@click.option("--base", default="ddp_gpt2_xl_2x8_a100", show_default=True, help="The scenario it starts from.")
def sweep(file: Path, base: str) -> None:
    """A sweep for clustersim sweep: one scenario, many values."""
    from clustersim.sweeps.spec import load

    text = f'''# {base}, over nodes and networks: `clustersim sweep {file.name} --out DIR --report page.html`.

base = "{base}"

[set]                        # of every scenario of the sweep
run.steps = 3

[[axes]]
key = "cluster.nodes"
values = [1, 2, 4]           # or range = {{start = 1, stop = 8, step = 1}}, log = {{start = 1, stop = 8, factor = 2}}

[[axes]]
name = "network"
key = "cluster.changes+"     # + makes a list longer
[axes.values]
"as built" = []
"half the rate" = [{{match = "node*/nic*", factor = 0.5}}]
'''
    write_new(file, text, load)


def _machine(gpu: str | None, topology: str | None) -> str:
    """The topology asked for; of a GPU, the plainest shipped machine that carries it."""
    from clustersim import fabrics
    from clustersim.device import device_from_text
    from clustersim.paths import shipped

    if topology is not None:
        fabrics.load(topology, nodes=1)
        return topology
    wanted = device_from_text(gpu or "H100").name
    carry = [name for name in shipped("topologies") if _devices(name) == {wanted}]
    if not carry:
        raise ClusterSimError(f"--gpu {gpu}: no shipped machine carries {wanted}; clustersim list topologies")
    plain = f"hgx-{wanted.split('-')[0].lower()}"
    return min(carry, key=lambda name: (name != plain, not name.startswith(("dgx", "hgx", "pcie")), len(name)))


def _devices(topology: str) -> set[str]:
    from clustersim import fabrics

    return {kind.device for kind in fabrics.load(topology, nodes=1).node_types}


def _dtype(topology: str) -> str:
    """bf16, or fp16 on GPUs without it."""
    from clustersim.device import device

    return "bf16" if all("bf16" in device(name).peak for name in _devices(topology)) else "fp16"


def _model(name: str, file: Path) -> str:
    """The line of ``[model]`` that names it; a path is written relative to the file."""
    from clustersim.models.catalog import model

    path = Path(name)
    if path.suffix != ".json" and not path.is_dir():
        return f'name = "{model(name).name}"'
    import os

    return f'hf_config = "{os.path.relpath(path, file.parent)}"'


def _has_tokens(name: str) -> bool:
    from clustersim.models.catalog import file

    return file(name) is not None


def _fits(machine: str, name: str) -> bool:
    """Whether parameters, gradients and Adam's states (16 bytes a parameter) leave 40 % of a GPU for the rest."""
    from clustersim.device import device
    from clustersim.models.catalog import model

    smallest = min(device(kind).memory_bytes for kind in _devices(machine))
    return 16 * model(name).parameters < 0.6 * smallest


def write_new(file: Path, text: str, load: Callable[[Path], object], *, said: bool = True) -> None:
    """The file, if it can be read back as what it is; an existing one is left alone."""
    if file.exists():
        raise ClusterSimError(f"{file}: is there already; choose another name")
    if file.suffix != ".toml":
        raise ClusterSimError(f"{file}: these files end in .toml")
    try:
        with fresh(file) as path:
            path.write_text(re.sub(r"\n\n\n+", "\n\n", text), encoding="utf-8")
            load(path)
    except OSError as error:
        raise ClusterSimError(f"{file}: cannot be written: {error.strerror or error}") from None
    if said:
        click.echo(f"wrote {file}")
