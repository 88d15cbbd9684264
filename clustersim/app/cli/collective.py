"""``clustersim collective``: what nccl-tests would print on a machine you may not have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from clustersim.app.cli.common import BACKEND, json_option, print_json, working
from clustersim.core.errors import ClusterSimError, nearest
from clustersim.core.limits import MOST_VALUES, counted
from clustersim.core.program import DTYPE_BYTES, REDUCING, ROOTED, SPLIT, Collective, one_collective
from clustersim.core.texts import short
from clustersim.core.units import parse_message_size, parse_nccl_version

if TYPE_CHECKING:
    from clustersim.collectives.base import Group, Request
    from clustersim.collectives.nccl_why import Alternative
    from clustersim.core.mesh import Mesh
    from clustersim.core.topology import Topology

NAMES = "all_reduce all_gather reduce_scatter broadcast reduce scatter gather all_to_all send sendrecv barrier"
KINDS = {**{name: name for name in NAMES.split()}, "alltoall": "all_to_all"}
TYPES = {"fp32": "float", "fp16": "half", "bf16": "bfloat16", "fp64": "double", "uint8": "uint8", "fp8": "f8e4m3"}
# nccl-tests' own columns, widths and units (src/util.cu); ours stand where it prints the in-place results.
COLUMNS = (
    ("size", "(B)", 12),
    ("count", "(elements)", 12),
    ("type", "", 8),
    ("redop", "", 6),
    ("root", "", 6),
    ("time", "(us)", 7),
    ("algbw", "(GB/s)", 6),
    ("busbw", "(GB/s)", 6),
    ("#wrong", "", 6),
    ("bound", "(us)", 8),
    ("algo", "", 9),
    ("proto", "", 6),
    ("nch", "", 3),
)


NEWEST = 2, 28
"""NCCL's version, where neither an option nor a log says it."""


class CollectiveOptions(msgspec.Struct):
    """The options, by their names; ``started`` : what is to be said of ``launch`` and ``nccl_version``."""

    size: str | None
    minbytes: str | None
    maxbytes: str | None
    stepfactor: int | None
    stepbytes: str | None
    dtype: str
    redop: str
    root: int
    algorithm: str | None
    protocol: str | None
    channels: int | None
    backend: str | None
    fidelity: Literal["flow", "chunk"]
    launch: Literal["process_per_gpu", "single_process", "threads"]
    nccl_version: tuple[int, int]
    why: bool
    environment: tuple[str, ...] = ()
    started: str = ""
    untold: tuple[str, ...] = ()


class CollectiveRow(msgspec.Struct, frozen=True):
    """A line: what was timed, how long it takes, and what was chosen for it."""

    collective: str
    size_bytes: int
    count: int
    dtype: str
    redop: str
    root: int
    time_us: float
    algbw_GBps: float
    busbw_GBps: float
    lower_bound_us: float
    algorithm: str
    protocol: str
    channels: int
    notes: list[str]
    fidelity: str
    alternatives: tuple[Any, ...] | msgspec.UnsetType = msgspec.UNSET


@click.command(short_help="Time a collective, as nccl-tests prints it.")
@click.argument("kind")
@click.option("--topology", required=True, help="The machine: a shipped topology, or a .toml file.")
@click.option("--nodes", type=click.IntRange(min=1), default=1, help="How many nodes.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="Ranks on each node.  [all its GPUs]")
@click.option("--size", help="One message size, such as 1GiB (the full tensor, as nccl-tests counts).")
@click.option("-b", "--minbytes", help="First size of a sweep.")
@click.option("-e", "--maxbytes", help="Last size of a sweep.")
@click.option("-f", "--stepfactor", type=click.IntRange(min=2), help="Factor between two sizes.  [2]")
@click.option("-i", "--stepbytes", help="Bytes between two sizes, instead of a factor.")
@click.option("-d", "--dtype", type=click.Choice(sorted(TYPES)), default="fp32", help="Of the elements.")
@click.option(
    "-o",
    "--op",
    "redop",
    type=click.Choice(["sum", "prod", "min", "max", "avg"]),
    default="sum",
    help="How ranks' elements are joined.",
)
@click.option("-r", "--root", type=click.IntRange(min=0), default=0, help="The rank that sends to all, or gets all.")
@click.option("--algorithm", help="Force one, as NCCL_ALGO or coll_tuned_*_algorithm do.")
@click.option("--protocol", help="Force one, as NCCL_PROTO does: LL, LL128 or Simple; of mpi: vader, tcp or ucx.")
@click.option(
    "--env", "environment", multiple=True, metavar="NAME=VALUE", help="A variable of NCCL, such as NCCL_P2P_LEVEL=SYS."
)
@click.option("--channels", type=click.IntRange(min=1), help="Force a number, as NCCL_MIN_ and NCCL_MAX_NCHANNELS do.")
@click.option(
    "--backend",
    type=BACKEND,
    help="The library; mpi_cuda is Open MPI with CUDA support.  [nccl; gloo where there is no GPU]",
)
@click.option(
    "--fidelity",
    type=click.Choice(["flow", "chunk"]),
    default="flow",
    help="Play a collective as one flow, or every transfer of it, which is slower.",
)
@click.option(
    "--launch",
    type=click.Choice(["process_per_gpu", "single_process", "threads"]),
    help="Who drives the GPUs of a node.  [process_per_gpu; of a calibrated machine as its log]",
)
@click.option(
    "--why",
    is_flag=True,
    help="Say what else NCCL could run: its own estimate of each, ours, and why each is not chosen.",
)
@click.option(
    "--nccl-version", help="The NCCL whose choices are predicted.  [2.28; of a calibrated machine as its log]"
)
@json_option
def collective(kind: str, topology: str, nodes: int, gpus_per_node: int | None, as_json: bool, **options: Any) -> None:
    """Time one collective over every rank. KIND is all_reduce, all_gather, reduce_scatter, broadcast, reduce, scatter,
    gather, all_to_all, send (rank 0 to 1), sendrecv (every rank to the next) or barrier."""
    from clustersim.cluster import files as fabrics
    from clustersim.collectives import fitted as fitting
    from clustersim.collectives.backends import usual_backend
    from clustersim.collectives.started import started_as_measured

    version_text = options["nccl_version"]
    version = None if version_text is None else parse_nccl_version(version_text)
    launch = options["launch"]
    usual = {"launch": launch or "process_per_gpu", "nccl_version": version or NEWEST}
    settings = CollectiveOptions(**options | usual)
    name = KINDS.get(kind.removesuffix("_perf"))
    if name is None:
        raise ClusterSimError(f"no collective {kind!r}; {nearest(kind, KINDS)}")
    nbytes = [0] if name == "barrier" else list(sizes(settings))
    machine = _as_set(fitting.load(topology, nodes=nodes), settings)
    mesh = fabrics.mesh(machine, nodes=nodes, nproc_per_node=gpus_per_node)
    settings.backend = settings.backend or usual_backend(machine, mesh.gpus)
    if settings.environment and settings.backend != "nccl":
        raise ClusterSimError(f"--env is of NCCL's variables; the backend here is {settings.backend!r}")
    if settings.why and settings.backend != "nccl":
        raise ClusterSimError(f"--why is about what NCCL chooses; the backend here is {settings.backend!r}")
    if settings.backend == "nccl":
        start = started_as_measured(machine, name, nodes, launch or "", version)
        settings.launch = start.launch
        settings.nccl_version = start.version
        settings.started = start.words
    with working(f"{name} over {mesh.world_size} ranks of {machine.name}"):
        rows = [_row(name, float(size), machine, mesh, settings) for size in nbytes]
        rows[-1].notes.extend(_at_other_rates(name, rows[-1], machine, mesh, settings))
    if as_json:
        plain = msgspec.to_builtins(rows)
        print_json({"topology": machine.name, "nodes": nodes, "ranks": mesh.world_size, "rows": plain})
    else:
        _print(rows, machine, nodes, mesh.world_size)


def _as_set(machine: Topology, settings: CollectiveOptions) -> Topology:
    """The machine as NCCL's variables have it used, whose pins go into the settings. Raises :class:`ClusterSimError`
    for what is no variable, and for one beside the option that says the same."""
    from clustersim.collectives.nccl.settings import checked

    variables: dict[str, str] = {}
    for word in settings.environment:
        name, equals, value = word.partition("=")
        if not equals:
            raise ClusterSimError(f"--env {short(word)}: write NAME=VALUE, such as NCCL_P2P_LEVEL=SYS")
        variables[name] = value
    asked = checked(variables)
    for option, own, other in (
        ("--algorithm", settings.algorithm, asked.algorithm),
        ("--protocol", settings.protocol, asked.protocol),
    ):
        if own is not None and other is not None:
            raise ClusterSimError(f"{option} {own} and --env say the same; leave one out")
    settings.algorithm = settings.algorithm or asked.algorithm
    settings.protocol = settings.protocol or asked.protocol
    settings.untold = asked.notes
    return asked.on(machine)


def sizes(settings: CollectiveOptions) -> Iterator[int]:
    """Message sizes [bytes], as nccl-tests' ``-b -e -f -i`` make them; its default is 32 MiB alone."""
    size = settings.size
    first = settings.minbytes
    last = settings.maxbytes
    if size is not None and (first or last):
        raise ClusterSimError("write either --size or a sweep (--minbytes, --maxbytes), not both")
    low = parse_message_size(size or first or last or "32M")
    high = parse_message_size(size or last or first or "32M")
    if high < low:
        raise ClusterSimError(f"--maxbytes {last} is below --minbytes {first}")
    step = parse_message_size(settings.stepbytes) if settings.stepbytes else 0
    if step and settings.stepfactor:
        raise ClusterSimError("write either --stepfactor or --stepbytes, not both")
    if step:
        counted((high - low) // step + 1, MOST_VALUES, f"--stepbytes {settings.stepbytes}: sizes", ClusterSimError)
    while low <= high:
        yield low
        low = low + step if step else low * (settings.stepfactor or 2)


def _row(kind: str, nbytes: float, topology: Topology, mesh: Mesh, settings: CollectiveOptions) -> CollectiveRow:
    from clustersim.collectives import backends
    from clustersim.collectives.base import Group, Request
    from clustersim.collectives.nccl_why import why

    request = Request(
        kind,
        nbytes,
        dtype=settings.dtype,
        redop=settings.redop,
        root=settings.root,
        algorithm=settings.algorithm,
        protocol=settings.protocol,
    )
    group = Group(topology, mesh.gpus, settings.launch, settings.nccl_version)
    plan = backends.plan(request, group, backend=settings.backend or "nccl", n_channels=settings.channels)
    seconds = plan.time(topology.link_bandwidth)
    if settings.fidelity == "chunk":
        seconds = _chunked(request, group, mesh, settings)
    rate = nbytes / seconds if seconds else 0.0
    return CollectiveRow(
        collective=kind,
        size_bytes=int(nbytes),
        count=int(nbytes) // DTYPE_BYTES[settings.dtype] // (mesh.world_size if kind in SPLIT else 1),
        dtype=settings.dtype,
        redop=settings.redop if kind in REDUCING else "none",
        root=settings.root if kind in ROOTED else -1,
        time_us=seconds * 1e6,
        algbw_GBps=rate / 1e9,
        busbw_GBps=rate * plan.bus_factor / 1e9,
        lower_bound_us=plan.lower_bound * 1e6,
        algorithm=plan.algorithm,
        protocol=plan.protocol,
        channels=plan.n_channels,
        notes=list(_notes(request, group, settings, plan.algorithm)),
        fidelity=settings.fidelity,
        alternatives=why(request, group) if settings.why else msgspec.UNSET,
    )


def _notes(request: Request, group: Group, settings: CollectiveOptions, algorithm: str) -> Iterator[str]:
    """What is assumed of the machine, and how far NCCL's times may be off."""
    from clustersim.collectives.nccl.ratings import KINDS
    from clustersim.core.ranges import collective_words, of_collective

    yield from (f"assumed: {text}" for text in group.topology.assumed)
    if settings.backend == "nccl" and request.nbytes:
        yield from settings.untold
        if settings.started:
            yield settings.started
        if settings.algorithm is not None and algorithm not in KINDS.get(request.kind, (algorithm,)):
            yield f"trust: not known: NCCL has no {algorithm} of {request.kind}, and ranges are of what it runs"
            return
        around = of_collective(group.topology, request.nbytes, group.n_nodes, request.kind, group.size, group.launch)
        yield collective_words(around, request.nbytes, request.kind, group.n_nodes)


RATES = (100, 200, 400)
"""Gb/s of NICs for which a collective is told where the file does not say theirs."""


def _at_other_rates(
    kind: str, row: CollectiveRow, topology: Topology, mesh: Mesh, settings: CollectiveOptions
) -> Iterator[str]:
    """What it would be with NICs of another rate, where theirs is assumed and machines are joined."""
    from clustersim.cluster import files as fabrics

    if topology.n_nodes < 2 or not any("--nics" in text for text in topology.assumed):
        return
    rate_texts = []
    for rate in RATES:
        try:
            changed = fabrics.change(topology, fabrics.Change("*/nic*", bandwidth=rate * 1e9 / 8))
        except ClusterSimError:
            return
        row_there = _row(kind, float(row.size_bytes), changed, mesh, settings)
        rate_texts.append(f"{rate} Gb/s {row_there.busbw_GBps:.4g} GB/s by {row_there.algorithm}")
    yield f"bus bandwidth by the rate of the NICs: {', '.join(rate_texts)}"


def _chunked(request: Request, group: Group, mesh: Mesh, settings: CollectiveOptions) -> float:
    """Seconds when every step of the algorithm is played by itself."""
    from clustersim import engine
    from clustersim.collectives import backends

    if request.kind in {"send", "sendrecv"}:
        raise ClusterSimError(f"--fidelity chunk is for collectives; a {request.kind} has one step")
    op = Collective(
        request.kind,
        request.kind,
        request.nbytes,
        mesh.world_group(),
        dtype=request.dtype,
        redop=request.redop,
        root=request.root,
        algorithm=request.algorithm,
        protocol=request.protocol,
    )
    timeline = engine.simulate(
        one_collective(op),
        group.topology,
        mesh,
        planner=lambda wanted, on: backends.plan(wanted, on, settings.backend or "nccl", settings.channels),
        fidelity="chunk",
        launch=group.launch,
        nccl_version=group.nccl_version,
    )
    return timeline.makespan


def _print(rows: list[CollectiveRow], machine: Topology, nodes: int, ranks: int) -> None:
    click.echo(f"# {rows[0].collective} on {machine.name}: {nodes} node(s), {ranks} ranks (predicted)")
    click.echo("#" + " " * 54 + "out-of-place")
    click.echo("#" + _line([name for name, _, _ in COLUMNS])[1:])
    click.echo("#" + _line([unit for _, unit, _ in COLUMNS])[1:])
    for row in rows:
        request_cells = (row.size_bytes, row.count, TYPES[row.dtype], row.redop, row.root)
        rates = (_time(row.time_us), f"{row.algbw_GBps:.2f}", f"{row.busbw_GBps:.2f}", "N/A", _time(row.lower_bound_us))
        click.echo(_line([*request_cells, *rates, row.algorithm, row.protocol, row.channels]))
        if row.alternatives is not msgspec.UNSET:
            _print_alternatives(row.alternatives, machine.collective_library)
    average = sum(row.busbw_GBps for row in rows) / len(rows)
    click.echo(f"# Avg bus bandwidth    : {average:g}")
    for note in dict.fromkeys(note for row in rows for note in row.notes):
        click.echo(f"# {note}")


def _print_alternatives(alternatives: Sequence[Alternative], library: str) -> None:
    """One line for each, as comments beside nccl-tests' table."""
    heads = f"{'algo':>15s} {'proto':>6s} {f'{library} says':>10s} {'predicted':>10s}"
    click.echo(f"#{heads}  (us)")
    for alternative in alternatives:
        times = (
            " " * 9 + "-" if value is None else f"{_time(value):>10s}"
            for value in (alternative.tuner_us, alternative.ours_us)
        )
        click.echo(f"#{alternative.algorithm:>15s} {alternative.protocol:>6s} {' '.join(times)}  {alternative.verdict}")


def _line(cells: Sequence[str | int]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, (_, _, width) in zip(cells, COLUMNS, strict=True)).rstrip()


def _time(microseconds: float) -> str:
    """As nccl-tests prints a time: fewer decimals the longer it is."""
    return f"{microseconds:.0f}" if microseconds >= 10000 else f"{microseconds:.{1 if microseconds >= 100 else 2}f}"
