"""What clustersim costs on this machine, beside what was aimed for and what others take for the same work.

Every row is a process of its own, started as a person would start it: the figures are CPU seconds (user and system) and
peak memory of the whole process, import included. Seconds depend on the machine and on what else it does, so each run
of a row comes with a :func:`unit` measured just before it, and targets are in units. The peers' figures were measured
once, on a 2-core machine, each tool as its authors ship it, for the same cluster and bytes (8 GPUs a node, 450 GB/s
NVLink, one 50 GB/s NIC a GPU).
"""

from __future__ import annotations

import compileall
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import simpy

import clustersim

GIB = 2.0**30
MIB = 2.0**20

PATIENCE = 300.0
"""Seconds after which a row is given up, as the peers were."""


@dataclass(frozen=True)
class BenchCase:
    """One line of the table.

    Parameters
    ----------
    name : how it is asked for. what : the work, in words.
    arguments : of ``clustersim``; or empty, where ``job`` names a function of :data:`JOBS` run in a process of its own.
    target : [units], CPU of the process, or of each of ``per`` pieces of work in it. memory : [bytes], None for none.
    peer : what others take. differs : what the models compared do not share.
    """

    name: str
    what: str
    target: float
    arguments: tuple[str, ...] = ()
    job: str = ""
    memory: float | None = None
    peer: str = ""
    differs: str = ""
    per: int = 1


_RING = ("all_reduce", "--topology", "hgx-h100", "--size", "1GiB", "--algorithm", "ring")
_FLOW = "they simulate every step of the ring as an event; here it is one flow that the chunk rows are tested against"
_CHUNK = "both play every send of one flat ring; theirs has no route through a node's NVSwitches"
_ONE = ("--fidelity", "chunk", "--channels", "1")
_SCENARIO = "fsdp_llama3_405b_2048x8_h100"
_SPLIT = "tp8_pp16_llama3_405b_2048x8_h100"


def _ring(nodes: int, target: float, peer: str, *, chunk: bool = False, memory: float = 400 * MIB) -> BenchCase:
    ranks = nodes * 8
    more = _ONE if chunk else ()
    return BenchCase(
        f"ring-{'chunk-' if chunk else ''}{ranks}",
        f"1 GiB ring all-reduce, {'every chunk' if chunk else 'flow'}, {ranks:,} ranks",
        target,
        ("collective", *_RING, "--nodes", str(nodes), *more, "--json"),
        memory=memory,
        peer=peer,
        differs=_CHUNK if chunk else _FLOW,
    )


def _run(scenario: str, *changes: str) -> tuple[str, ...]:
    overrides = (word for change in changes for word in ("--set", change))
    return ("run", scenario, *overrides, "--json")


def _split(name: str, variant: str, target: float, memory: float, *changes: str) -> BenchCase:
    work = f"405B as TP 8 x PP 16 x DP 128, 16,384 GPUs, full Timeline and summary, {variant}"
    return BenchCase(f"split-16384{name}", work, target, _run(_SPLIT, *changes), memory=memory, peer="none")


ROWS = (
    _ring(128, 0.7, "ASTRA-sim hierarchical 0.8 s, 81 MiB; SimGrid 19.8 s, 45 MiB"),
    _ring(512, 0.9, "ASTRA-sim hierarchical 23 s, 747 MiB"),
    _ring(2048, 1.0, "ASTRA-sim hierarchical killed at 300 s, 10.9 GiB"),
    _ring(8, 0.5, "ASTRA-sim flat 0.04 s", chunk=True),
    _ring(128, 1.2, "ASTRA-sim flat 3.6 units, 354 MiB; SimGrid 9.5 to 15, 62 MiB", chunk=True, memory=120 * MIB),
    _ring(512, 15.0, "ASTRA-sim flat 177 units, 5.4 GiB", chunk=True, memory=GIB),
    BenchCase(
        "hierarchical-chunk-1024",
        "1 GiB hierarchical all-reduce, every chunk, 1,024 ranks",
        1.2,
        ("collective", *_RING[:-1], "hierarchical", "--nodes", "128", *_ONE, "--json"),
        memory=150 * MIB,
        peer="ASTRA-sim 2-D 0.85 units, 82 MiB",
        differs=_CHUNK,
    ),
    BenchCase(
        "ddp-1024",
        "Llama-3-8B DDP, three steps, 1,024 GPUs, contention on",
        1.5,
        _run("ddp_llama3_8b_128x8_h100"),
        peer="ASTRA-sim 41 s; Simulon killed at 120 s (512 GPUs)",
        differs="they take compute times from a trace; here they are computed from the layers",
    ),
    BenchCase(
        "fsdp-16384",
        "Llama-3-405B FSDP2, two steps, 16,384 GPUs, each at its own pace, Timeline kept",
        2.0,
        _run(_SCENARIO, "run.jitter=0.02"),
        memory=500 * MIB,
        peer="none finishes",
    ),
    BenchCase(
        "hsdp-16384",
        "the same as HSDP, shards of 256 x 64 replicas, one step",
        10.0,
        _run("hsdp_llama3_405b_2048x8_h100"),
        memory=GIB,
        peer="none",
    ),
    _split("", "each at its own pace", 15.0, 1.5 * GIB, "run.jitter=0.02"),
    _split(
        "-64",
        "64 micro-batches, each at its own pace",
        30.0,
        2 * GIB,
        "run.jitter=0.02",
        "parallel.global_batch_size=8192",
    ),
    _split("-steady", "all at one pace", 4.0, GIB, "run.jitter=0.0"),
    BenchCase(
        "ddp-100000",
        "Llama-3-8B DDP, one step, 100,000 GPUs",
        12.0,
        _run("ddp_llama3_8b_128x8_h100", "cluster.nodes=12500", "run.steps=1"),
        memory=2 * GIB,
        peer="none",
    ),
    BenchCase(
        "start-64",
        "start-up: one collective on 64 ranks",
        0.2,
        ("collective", *_RING, "--nodes", "8", "--json"),
        peer="-",
    ),
    BenchCase(
        "ps-async-256",
        "parameter server, asynchronous, 256 workers, 100 steps",
        9.0,
        _run("ps_async_32x8_v100"),
        memory=600 * MIB,
        peer="none has parameter servers",
    ),
    BenchCase(
        "thousand-64",
        "1,000 scenarios of 64 GPUs, two DDP steps, through the Python API, each",
        0.012,
        job="thousand",
        per=1000,
        peer="Calculon 0.012 s each",
        differs="Calculon adds up closed forms: no network, no overlap but a factor, no timeline",
    ),
    BenchCase("graph-2048", "the graph of 2,048 nodes, with routes", 1.0, job="graph", memory=300 * MIB, peer="-"),
)
"""The table. A row that this installation cannot play says why instead of a figure."""


def thousand() -> None:
    """A thousand different scenarios, one after another, each with its figures: the reason to run one."""
    from clustersim import scenario

    for i in range(1000):
        changes = {
            "cluster.nodes": 8,
            "run.steps": 2,  # the first has one bucket: DDP does not know the order yet
            "strategy.micro_batch_size": 1 + i % 20,
            "strategy.bucket_cap_mb": 5 + i // 20,
        }
        _ = scenario.load("ddp_gpt2_xl_2x8_a100", changes).run().summary


def graph() -> None:
    """Build 2,048 nodes and look up a way from the first GPU to one of every node."""
    from clustersim.cluster import files as fabrics
    from clustersim.cluster.routes import router

    topology = fabrics.load("hgx-h100", nodes=2048)
    routes = router(topology)
    gpus = topology.gpus.tolist()
    for gpu in gpus[8::8]:
        routes.route(gpus[0], gpu, 0, -1)


JOBS: dict[str, Callable[[], None]] = {"thousand": thousand, "graph": graph}
"""Rows that no command plays."""


def command(row: BenchCase) -> list[str]:
    """The process a row is, as an argument list."""
    if row.job:
        return [sys.executable, "-c", f"from tests.evidence import bench; bench.JOBS[{row.job!r}]()"]
    return [sys.executable, "-m", "clustersim", *row.arguments]


@dataclass(frozen=True)
class ProcessCost:
    """What a process took: CPU seconds, user and system; peak memory [bytes]; and its last word where it failed."""

    seconds: float
    memory: float
    error: str = ""


_PARENT = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[2:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=float(sys.argv[1]))
used = resource.getrusage(resource.RUSAGE_CHILDREN)
said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
print(used.ru_utime + used.ru_stime, used.ru_maxrss, done.returncode, *said)
"""
"""A process that does nothing but start another: a child's peak memory counts from what its parent had, and a bare
interpreter has less than any run."""


def measure(arguments: Sequence[str]) -> ProcessCost:
    """Run a process to its end. Raises :class:`OSError` where it cannot be started."""
    wrapped = [sys.executable, "-S", "-c", _PARENT, str(PATIENCE), *arguments]
    # A session of its own: a run that is given up takes whatever it started with it.
    parent = subprocess.Popen(
        wrapped, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        report, problems = parent.communicate()
    except BaseException:
        os.killpg(parent.pid, signal.SIGKILL)
        raise
    if "TimeoutExpired" in problems:
        return ProcessCost(0.0, 0.0, f"killed after {PATIENCE:g} s")
    if parent.returncode:
        return ProcessCost(0.0, 0.0, (problems.strip().splitlines() or ["it could not be started"])[-1])
    seconds, peak, code, *message_words = report.split(maxsplit=3)
    unit = 1 if sys.platform == "darwin" else 1024
    error = (message_words[0].strip() if message_words else f"exit code {code}") if int(code) else ""
    return ProcessCost(float(seconds), float(peak) * unit, error)


def unit() -> float:
    """[CPU s] of a million bare SimPy timeouts, here and now: what a unit is."""
    clock = simpy.Environment()

    def tick() -> Iterator[simpy.Event]:
        for _ in range(1_000_000):
            yield clock.timeout(1.0)

    clock.process(tick())  # type: ignore[arg-type]
    begin = time.process_time()
    clock.run()
    return time.process_time() - begin


class BenchResult(msgspec.Struct, frozen=True):
    """A row with its figures: seconds [CPU s] also in units of ``unit`` s, memory [bytes]; None where it cannot be
    played, for the ``error``."""

    name: str
    work: str
    seconds: float | None
    unit: float
    units: float | None
    target: float
    memory: float | None
    target_memory: float | None
    peer: str
    differs: str
    error: str


def play(row: BenchCase, repeats: int = 5) -> BenchResult:
    """A row with its figures: medians of ``repeats`` runs."""
    # As installing does: where Python may not write bytecode, every process would compile what it imports.
    compileall.compile_dir(Path(clustersim.__file__).parent, quiet=2)
    costs = []
    units = []
    for _ in range(repeats):
        units.append(unit())
        costs.append(measure(command(row)))
        if costs[-1].error:
            break
    error = costs[-1].error
    seconds = statistics.median(cost.seconds for cost in costs) / row.per
    memory = statistics.median(cost.memory for cost in costs)
    unit_s = statistics.median(units)
    took = (None, None, None) if error else (seconds, seconds / unit_s, memory)
    return BenchResult(
        row.name, row.what, took[0], unit_s, took[1], row.target, took[2], row.memory, row.peer, row.differs, error
    )


FIT_NODES = (1, 4, 16, 64, 256, 1024, 2048)


class CostFit(msgspec.Struct, frozen=True):
    """How the cost of a run grows with ranks x ops.

    Parameters
    ----------
    ranks, ops, seconds : columns, a run each: of one rank's list of ops; CPU, of the simulation alone.
    fixed, per_rank_op : [s], the least-squares line. r2 : how well it fits.
    exponent : slope of log seconds over log ranks x ops between the two largest runs; 1 is linear.
    """

    ranks: list[int]
    ops: list[int]
    seconds: list[float]
    fixed: float
    per_rank_op: float
    r2: float
    exponent: float


def fit(nodes: Sequence[int] = FIT_NODES) -> CostFit:
    """How the cost of a run grows with ranks x ops: FSDP2 of Llama-3-8B, every GPU at its own pace."""
    from clustersim import scenario

    ranks = []
    ops = []
    took = []
    changes = {"model.name": "llama3-8b", "run.jitter": 0.02, "run.steps": 1}
    for n in nodes:
        prepared = scenario.load(_SCENARIO, {**changes, "cluster.nodes": n}).prepare()
        prepared.run()  # plans and routes are per machine, and kept
        begin = time.process_time()
        prepared.run()
        took.append(time.process_time() - begin)
        ranks.append(prepared.program.world_size)
        ops.append(sum(len(role.ops) for role in prepared.program.roles))
    size = np.array(ranks) * np.array(ops)
    seconds = np.array(took)
    slope, fixed = np.polyfit(size, seconds, 1)
    left = seconds - (fixed + slope * size)
    exponent = np.log(seconds[-1] / seconds[-2]) / np.log(size[-1] / size[-2])
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    r2 = 1.0 - float((left**2).sum()) / spread if spread else 1.0
    return CostFit(ranks, ops, took, float(fixed), float(slope), r2, float(exponent))
