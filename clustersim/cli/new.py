"""``clustersim new``: a commented file to start from, made from a few answers and ready to run."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import click

from clustersim.cli.common import PATH
from clustersim.cli.new_parts import as_written, dtype_of, fits, has_tokens, machine_of, model_line, write_new
from clustersim.errors import ClusterSimError

file_argument = click.argument("file", type=PATH)
gpu_option = click.option("--gpu", help="A GPU, such as H100: takes the shipped machine that has it.")
topology_option = click.option("--topology", help="A machine, a shipped topology or a file, instead of --gpu.")
model_option = click.option("--model", "model_name", default="llama3-8b", help="A shipped model, or a config.json.")


CAMPAIGN = """
[campaign]                   # the weeks of it: `clustersim campaign`
tokens = {tokens:g}
failures = "llama3"          # rates of 16,384 H100s; `clustersim list failures` has others, and yours are inputs

[campaign.detection]
report = "1 min"             # until a failure that something reports is noticed
timeout = "10 min"           # until a silent one is

[campaign.recovery]
policy = "replace"           # or requeue, shrink, drop_replica
restart = "5 min"

[[campaign.checkpoints]]
every = "best"               # or "30 min", "100 steps"
tier = "storage"

[campaign.storage]
write = "100 GB/s"
read = "100 GB/s"

[campaign.nodes]
spares = 1
repair = "12 h"
"""
"""How long and how dear a training is depends on these."""


@click.group(short_help="Write a commented scenario, topology, plan or sweep to start from.")
def new() -> None:
    """Write a commented file to start from, ready to run. What it may say else: clustersim describe --keys KIND."""


@new.command()
@file_argument
@gpu_option
@topology_option
@click.option("--nodes", type=click.IntRange(min=1), default=1, help="How many nodes it has.")
@model_option
@click.option("--strategy", help="A data-parallel strategy.  [ddp where the model fits, else fsdp]")
@click.option(
    "--tokens", type=click.FloatRange(min=1), help="Tokens to train on: adds the [campaign] table of a whole training."
)
def scenario(
    file: Path, gpu: str | None, topology: str | None, nodes: int, model_name: str, strategy: str | None,
    tokens: float | None,
) -> None:  # fmt: skip
    """A scenario for clustersim run."""
    from clustersim import scenario as scenarios

    written = partial(_scenario, file, machine_of(gpu, topology), nodes, model_name, tokens)
    text = written(strategy or "ddp")
    if strategy is None and not fits(text, file):
        text = written("fsdp")
    write_new(file, text, scenarios.load)


def _scenario(file: Path, machine: str, nodes: int, model_name: str, tokens: float | None, kind: str) -> str:
    return f'''# {model_name} on {nodes} node(s) of {machine}: `clustersim run {file.name}`.

[cluster]
topology = "{as_written(machine, file)}"        # `clustersim list topologies`, or a file of your own
nodes = {nodes}
# device = "..."             # another GPU in the same sockets; `clustersim list devices`
# changes = [{{match = "node0/nic0", bandwidth = "100 Gb/s"}}]   # parts degraded, or gone: remove = true

[model]
{model_line(model_name, file)}
dtype = "{dtype_of(machine)}"               # of the matrix products
{"attention = " + chr(34) + "flash" + chr(34) if has_tokens(model_name) else ""}
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
{"" if tokens is None else CAMPAIGN.format(tokens=tokens)}'''


@new.command()
@file_argument
@gpu_option
@topology_option
@click.option("--mix", multiple=True, metavar="hgx-a100:2",
              help="A machine and how many nodes of it; repeat it for a mixed cluster.")  # fmt: skip
@click.option("--nics", metavar="8x400Gb/s", help="NICs of a node, and the line rate of each.")
@click.option("--oversubscription", type=click.FloatRange(min=1),
              help="Of leaf switches: bandwidth down to nodes over bandwidth up.")  # fmt: skip
@click.option(
    "--from", "found", type=PATH, help="A file with what NCCL (NCCL_TOPO_DUMP_FILE) or nvidia-smi topo -m wrote."
)
def topology(
    file: Path, gpu: str | None, topology: str | None, mix: tuple[str, ...], nics: str | None,
    oversubscription: float | None, found: Path | None,
) -> None:  # fmt: skip
    """A machine, as a few changes to a shipped one or as NCCL found it, for clustersim check and cluster.topology."""
    from clustersim import fabrics
    from clustersim.fabrics.nccl_xml import topology_text

    if found is not None:
        if topology or mix or nics or oversubscription:
            raise click.UsageError("--from tells the whole machine; only --gpu may be said beside it")
        text = topology_text(found, gpu)
    elif mix:
        if gpu or topology or nics:
            raise click.UsageError("--mix says which machines: leave --gpu, --topology and --nics out")
        text = _mixed(file, mix, oversubscription)
    else:
        text = _changed(file, machine_of(gpu, topology), nics, oversubscription)
    write_new(file, text, lambda path: fabrics.load(str(path)))


def _changed(file: Path, base: str, nics: str | None, oversubscription: float | None) -> str:
    """A shipped machine with other NICs, or another network."""
    parts = [
        f"# A machine of your own, as changes to {base}: `clustersim check {file.name} --nodes 4`.",
        "# Keys: `clustersim describe --keys topology`; every number has a source.",
        "",
        f'name = "{file.stem}"',
        f'title = "{base}, changed"',
        f'extends = "{as_written(base, file)}"',
        *(_nics(nics, base) if nics else []),
    ]
    parts += _fabric(oversubscription) if oversubscription else []
    return "\n".join(parts) + "\n"


def _mixed(file: Path, mix: tuple[str, ...], oversubscription: float | None) -> str:
    """A cluster of several kinds of nodes."""
    parts = [
        f"# Nodes of several kinds, each rank at its own GPU's pace: `clustersim check {file.name}`.",
        "",
        f'name = "{file.stem}"',
    ]
    for text in mix:
        machine, colon, count = text.rpartition(":")
        if not colon or not count.isdecimal() or not int(count):
            raise ClusterSimError(f"--mix {text!r}: write a machine and how many nodes of it, such as hgx-a100:2")
        parts += ["", "[[nodes]]", f'type = "{as_written(machine_of(None, machine), file)}"', f"count = {int(count)}"]
    return "\n".join([*parts, *_fabric(oversubscription or 1.0)]) + "\n"


def _fabric(oversubscription: float) -> list[str]:
    return ["", "[fabric]", 'kind = "fat_tree"', f"oversubscription = {oversubscription}", 'source = "..."']


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
    # Spread over the sockets and switches of the machine, as a maker would: the first ones may all be on one CPU.
    kept = [i * has // count for i in range(count)]
    gone = [i for i in range(has) if i not in kept]
    removed = [f'remove = ["{_numbered(gone)}"]'] if gone else []
    vertices = ["", "[[node.vertices]]", f'names = "{_numbered(kept)}"', 'kind = "nic"']
    return ["", "[node]", *removed, *vertices, f'bandwidth = "{rate}"', 'source = "..."']


def _numbered(which: list[int]) -> str:
    """NICs by name, as a topology writes several."""
    if len(which) == 1:
        return f"nic{which[0]}"
    together = which[-1] - which[0] == len(which) - 1
    return f"nic[{which[0]}-{which[-1]}]" if together else f"nic[{','.join(map(str, which))}]"


@new.command()
@file_argument
@click.option(
    "--gpu", "gpus", multiple=True, help="A GPU, such as H100: takes the shipped machine that has it. May be repeated."
)
@click.option(
    "--topology", "topologies", multiple=True, help="A machine, a shipped topology or a file. May be repeated."
)
@click.option(
    "--nodes", type=click.IntRange(min=1), multiple=True, default=(4, 8), help="Nodes to try; may be repeated."
)
@model_option
@click.option("--tokens", type=click.FloatRange(min=1), help="Tokens to train on: the answer then has days and USD.")
def plan(
    file: Path, gpus: tuple[str, ...], topologies: tuple[str, ...], nodes: tuple[int, ...], model_name: str,
    tokens: float | None,
) -> None:  # fmt: skip
    """A plan for clustersim plan: which machine, which strategy, and how many GPUs."""
    from clustersim.planner.spec import load

    machines = [*(machine_of(gpu, None) for gpu in gpus), *(machine_of(None, one) for one in topologies)]
    machines = list(dict.fromkeys(machines)) or [machine_of(None, None)]
    tables = "\n".join(
        f'''[[machines]]                 # one table for each kind of machine
topology = "{as_written(machine, file)}"
nodes = {list(nodes)}
# usd_per_gpu_hour = 2.5     # yours, instead of a list price
'''
        for machine in machines
    )
    dtype = "bf16" if all(dtype_of(machine) == "bf16" for machine in machines) else "fp16"
    text = f'''# Which strategy for {model_name}, and how many GPUs? `clustersim plan {file.name} --out DIR`.

title = "{model_name} on {" or ".join(machines)}"

[model]
{model_line(model_name, file)}
dtype = "{dtype}"

{tables}
[batch]
samples = [256, 1024]        # of a step, over all ranks: at least, at most

[limits]
memory_margin = 0.05         # share of a GPU's memory that stays free
{"# tokens = 1e12 " if tokens is None else f"tokens = {tokens:g}   "}             # to train on; then also
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
@click.option("--base", default="ddp_gpt2_xl_2x8_a100", help="The scenario it starts from.")
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
