"""A planted incident -> the files that the tools of its job would have left, by kind of evidence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from clustersim.cluster import files as fabrics
from clustersim.collectives import backends
from clustersim.collectives.base import Group, Request
from clustersim.core.arrays import Floats, Ints
from clustersim.core.timeline import LinkUse, step_ends
from clustersim.core.topology import NIC, Topology
from clustersim.core.units import parse_nccl_version
from clustersim.engine.hang import Hang
from clustersim.files import slices
from clustersim.files.traces import (
    collective_writing,
    ib_ports,
    job_logs,
    link_counters,
    profile_writing,
    recorder_writing,
)
from clustersim.files.traces.told import GpuCounters, NicPort
from clustersim.scenario.file.incident_table import Incident
from clustersim.scenario.run.incidents import DOWN
from clustersim.scenario.run.misplaced import leaf_of
from clustersim.studies.exam.drawing import DIFFICULTIES, PlantedIncident, port_name

ORIGIN = 1_793_000_000.0
"""When every exam's run began [s since 1970]."""
SKEW = 0.005
"""Most that the clocks of two machines differ by [s]."""
TICK = 1e-9
"""Of a NIC's wait counter [s]; how long one is depends on the NIC."""
SIZES = (2**20, 2**23, 2**26, 2**29)
"""Bytes of the benchmark that was run on the machine before, and now."""
CLOCKS = {"V100-SXM2-32GB": 1530.0}
"""Boost clock of a GPU's SMs [MHz] (its data sheet); of others an A100's."""
BOOST = 1410.0
COOL = (52.0, 64.0)
"""Degrees C of GPUs at work, and of one that throttles."""
HOT = (84.0, 90.0)
ROW_REMAPPED = 63
"""The Xid of a row of memory that was remapped after an error (NVIDIA's Xid list)."""

TracesByKind = dict[str, list[Path]]


def write_traces(exam: PlantedIncident, folder: Path) -> TracesByKind:
    """Write what tools would have left; returns the files by kind of evidence.

    Of a run that hangs: dumps, logs of watchdogs and launchers; of one that goes on: profiles, what NCCL's inspector
    saw, and a benchmark of the machine from before and from now; of both: the log of steps, NCCL's log, counters of
    NICs and of GPUs, and the list of cables.
    """
    rng = np.random.default_rng([exam.seed, 7])
    hosts = exam.hosts
    seen = _seen(exam, rng)
    skew = {host: float(rng.uniform(-SKEW, SKEW)) for host in dict.fromkeys(hosts)}
    written = _of_hang(exam, exam.hang, folder, seen, rng) if exam.hang else _of_run(exam, folder, seen, skew)
    written["steps"] = _write(folder / "steps.log", _step_lines(exam, rng))
    ports = _ports(exam, rng)
    written["nccl"] = _write(folder / "nccl.log", job_logs.nccl_lines(hosts, _nics(exam, ports)))
    written["counters"] = link_counters.write_counters(ports, folder)
    written["gpus"] = link_counters.write_gpus(_gpus(exam, rng), folder)
    written["cabling"] = ib_ports.write_cabling(_cables(exam), folder / "ibnetdiscover.txt")
    if exam.hang is None:
        written["tests"] = list(_benchmarks(exam, folder, rng))
    return {kind: paths for kind, paths in written.items() if paths}


def _of_hang(
    exam: PlantedIncident, hang: Hang, folder: Path, seen: list[int], rng: np.random.Generator
) -> TracesByKind:
    pickled = bool(rng.integers(2))
    dumps = recorder_writing.write_dumps(hang, folder, seen, ORIGIN, pickled)
    watchdog = _write(folder / "watchdog.log", job_logs.watchdog_lines(hang, ORIGIN))
    launchers = job_logs.launcher_lines(hang, exam.hosts, ORIGIN)
    logs = [path for host, lines in launchers.items() for path in _write(folder / f"torchrun_{host}.log", lines)]
    return {"dumps": dumps, "watchdog": watchdog, "launcher": logs}


def _of_run(exam: PlantedIncident, folder: Path, seen: list[int], skew: dict[str, float]) -> TracesByKind:
    hosts = exam.hosts
    ends = step_ends(exam.timeline).max(axis=1)
    interval = float(np.median(np.diff(ends))) / collective_writing.DUMPS
    inspected = collective_writing.write_inspected(exam.timeline, folder, seen, hosts, interval, ORIGIN)
    profiles = profile_writing.write_profiles(exam.timeline, folder, seen, ORIGIN, hosts, skew)
    return {"profiles": profiles, "inspector": inspected}


def _step_lines(exam: PlantedIncident, rng: np.random.Generator) -> Iterator[str]:
    lines = job_logs.megatron_steps if rng.integers(2) else job_logs.torchtitan_steps
    steps = len(step_ends(exam.timeline)) if exam.hang is None else exam.hang.steps
    return lines(exam.timeline, steps, ORIGIN, exam.incident["kind"] == "blocking_checkpoint")


def _seen(exam: PlantedIncident, rng: np.random.Generator) -> list[int]:
    """The ranks of which there are dumps or profiles."""
    world = len(exam.hosts)
    count = max(2, round(DIFFICULTIES[exam.difficulty].seen * world))
    return sorted(int(rank) for rank in rng.permutation(world)[:count])


def _write(path: Path, lines: Iterable[str]) -> list[Path]:
    text = "\n".join(lines)
    if not text:
        return []
    slices.replace_file(path, (text + "\n").encode())
    return [path]


# ---- NICs and GPUs ---------------------------------------------------------------------------------------------------


def _row(exam: PlantedIncident) -> Incident | None:
    """The incident as the scenario has it; None where nothing goes wrong."""
    return next(iter(exam.prepared.scenario.file.incident), None)


def _nic_names(exam: PlantedIncident) -> list[str]:
    """NICs of the machines in use, as the machine has them."""
    topology = exam.prepared.topology
    names = zip(topology.vertex_names, topology.vertex_kinds, strict=True)
    return [name for name, kind in names if kind == NIC and name.partition("/")[0] in set(exam.hosts)]


def _nics(exam: PlantedIncident, ports: Iterable[NicPort]) -> job_logs.JobNics:
    devices = {host: [port.device for port in ports if port.host == host] for host in dict.fromkeys(exam.hosts)}
    kind = exam.incident["kind"]
    return job_logs.JobNics(
        devices,
        lost=exam.port if kind == "dead_link" else "",
        far=(exam.port,) if kind == "far_nic" else (),
        without_gdr=(f"node{exam.incident['node']}",) if kind == "gdr_off" else (),
    )


def _cables(exam: PlantedIncident) -> dict[str, str]:
    topology = exam.prepared.topology
    leaves = {name: leaf_of(topology, topology.vertex_names.index(name)) for name in _nic_names(exam)}
    return {port_name(name): topology.vertex_names[leaf] for name, leaf in leaves.items()}


def _ports(exam: PlantedIncident, rng: np.random.Generator) -> list[NicPort]:
    """Every NIC of the machines in use as its counters stand at the end; one of a hard exam went down once before."""
    until = exam.timeline.makespan if exam.hang is None else exam.hang.at
    nics = _nic_names(exam)
    before = int(rng.integers(len(nics))) if exam.difficulty == "hard" else -1
    return [_port(exam, name, until, int(i == before)) for i, name in enumerate(nics)]


def _port(exam: PlantedIncident, name: str, until: float, downs: int) -> NicPort:
    host, _, nic = name.partition("/nic")
    incident = _row(exam)
    kind = incident.kind if incident is not None and incident.link == name else ""
    rate, out, back = _line(exam.prepared.topology, name)
    use = exam.timeline.links
    left = float(incident.left or 1.0) if incident is not None and kind == "slow_link" else 1.0
    if incident is not None and kind == "flapping_link" and incident.every is not None:
        downs += 1 + int((until - incident.since) / incident.every)
    return NicPort(
        host=host,
        device=f"mlx5_{nic}",
        port=1,
        state=link_counters.DOWN if kind == "dead_link" else link_counters.ACTIVE,
        rate=rate * left,
        downs=downs + (kind == "dead_link"),
        sent=0.0 if use is None else _crossed(use, out, until),
        received=0.0 if use is None else _crossed(use, back, until),
        waited=round(_waited(exam, out) / TICK),
    )


def _line(topology: Topology, name: str) -> tuple[float, Ints, Ints]:
    """Line rate of a NIC's port, and its links out and back."""
    net = np.array([kind == "net" for kind in topology.link_kinds])
    vertex = list(topology.vertex_names).index(name)
    out = np.flatnonzero(net & (topology.link_src == vertex))
    back = np.flatnonzero(net & (topology.link_dst == vertex))
    return float(topology.link_bandwidth[out].sum()), out, back


def _crossed(use: LinkUse, links: Ints, until: float) -> float:
    """Bytes that have crossed links by a moment."""
    weight = np.array([float(weights[np.isin(crossed, links)].sum()) for crossed, weights in use.loads])
    seconds = np.clip(np.minimum(use.segment_end, until) - use.segment_start, 0.0, None)
    moved = seconds * use.segment_rate * weight[use.transfer_load[use.segment_transfer]] if len(weight) else seconds
    return float(moved.sum())


def _waited(exam: PlantedIncident, out: Ints) -> float:
    """Seconds that a port had something to send and got no credit: while a link that its transfers cross further on has
    less left, for the share that is not left."""
    use = exam.timeline.links
    incident = _row(exam)
    if use is None or incident is None or incident.left is None or incident.link is None or incident.hangs:
        return 0.0
    struck = np.array(fabrics.links_of(exam.prepared.topology, incident.link), dtype=np.int64)
    both = [bool(np.isin(crossed, struck).any() and np.isin(crossed, out).any()) for crossed, _ in use.loads]
    hit = np.array(both, dtype=np.bool_)[use.transfer_load[use.segment_transfer]]
    begins = np.maximum(use.segment_start, incident.since)
    seconds = np.clip(np.minimum(use.segment_end, incident.until) - begins, 0.0, None)
    return float(seconds[hit].sum()) * (1.0 - incident.left)


def _gpus(exam: PlantedIncident, rng: np.random.Generator) -> list[GpuCounters]:
    """Every GPU as it stands at the end; one of a hard exam is warm, and one has mended its memory once before."""
    incident = _row(exam)
    hard = exam.difficulty == "hard"
    world = len(exam.hosts)
    warm, mended = (int(rng.integers(world)) if hard else -1 for _ in range(2))
    local: dict[str, int] = {}
    gpus = []
    for rank, host in enumerate(exam.hosts):
        local[host] = local.get(host, -1) + 1
        kind = incident.kind if incident is not None and incident.rank == rank else ""
        slower = incident.slowdown if incident is not None and kind in ("slow_gpu", "hot_gpu") else None
        stalled = kind == "ecc_stall"
        hot = kind == "hot_gpu"
        gpus.append(
            GpuCounters(
                host=host,
                gpu=local[host],
                clock=round(CLOCKS.get(exam.prepared.device.name, BOOST) / float(slower or 1.0)),
                temperature=round(float(rng.uniform(*(HOT if hot else COOL))) + 8.0 * (rank == warm)),
                remapped=int(stalled) + int(rank == mended),
                xid=ROW_REMAPPED if stalled else 0,
            )
        )
    return gpus


# ---- benchmarks ------------------------------------------------------------------------------------------------------


def _benchmarks(exam: PlantedIncident, folder: Path, rng: np.random.Generator) -> Iterator[Path]:
    """An all_reduce over the job's GPUs, from when all was well and from now; times scatter by a per cent or two."""
    device = exam.prepared.device.name
    before = exam.healthy
    now = exam.prepared.topology
    rates = {"before": before.link_bandwidth, "now": _rates_now(exam)}
    for name, topology in (("before", before), ("now", now)):
        version = parse_nccl_version(exam.prepared.scenario.file.run.nccl_version)
        group = Group(topology, exam.prepared.mesh.gpus, nccl_version=version)
        times = []
        for size in SIZES:
            seconds = backends.plan(Request("all_reduce", float(size)), group).time(rates[name])
            times.append((size, seconds * math.exp(rng.normal(0.0, 0.01))))
        lines = collective_writing.nccl_tests_lines("all_reduce", exam.hosts, device, times)
        yield from _write(folder / f"nccl_tests_{name}.log", lines)


def _rates_now(exam: PlantedIncident) -> Floats:
    """Bandwidth of each link in the mean, as a benchmark of some seconds finds it."""
    topology = exam.prepared.topology
    incident = _row(exam)
    if incident is None or incident.link is None or incident.kind not in ("slow_link", "flapping_link", "congestion"):
        return topology.link_bandwidth
    left = DOWN if incident.left is None else incident.left
    if incident.every is not None and incident.lasts is not None:
        left = 1.0 - (1.0 - left) * float(incident.lasts / incident.every)
    rates = topology.link_bandwidth.copy()
    rates[fabrics.links_of(topology, incident.link)] *= left
    return rates
