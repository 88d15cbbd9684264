"""A planted incident -> the folder of an exam: files that tools would have left, the question, the sealed answer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from clustersim.core.errors import ClusterSimError
from clustersim.core.outputs import writing
from clustersim.core.timeline import LinkUse, step_ends
from clustersim.core.topology import NIC
from clustersim.files.traces import base, job_logs, link_counters, profile_writing, recorder_writing
from clustersim.files.traces.told import NicPort
from clustersim.studies.exam.drawing import DIFFICULTIES, PlantedIncident
from clustersim.studies.exam.sealing import answer_of, sealed

ORIGIN = 1_793_000_000.0
"""When every exam's run began [s since 1970]."""
SKEW = 0.005
"""Most that the clocks of two machines differ by [s]."""
QUESTION = "question.txt"
ANSWER = "answer.sealed"
FILES = "files"

TracesByKind = dict[str, list[Path]]


def write_exam(exam: PlantedIncident, folder: Path) -> TracesByKind:
    """Write the exam into a folder that is not there yet: ``files/``, ``question.txt`` and ``answer.sealed``.

    Raises :class:`ClusterSimError` where the folder is there, or cannot be written.
    """
    if folder.exists():
        raise ClusterSimError(f"{folder}: is there already; name a folder that is not (at --out)")
    with writing(folder):
        (folder / FILES).mkdir(parents=True)
        kept = write_traces(exam, folder / FILES)
        base.replace_file(folder / QUESTION, _question(exam).encode())
        base.replace_file(folder / ANSWER, sealed(answer_of(exam), exam.seed))
    return kept


def write_traces(exam: PlantedIncident, folder: Path) -> TracesByKind:
    """Write what tools would have left; returns the files by kind of evidence.

    Of a run that hangs: dumps, logs of watchdogs and launchers; of one that goes on: profiles; of both: the log of
    steps, NCCL's log, counters of NICs.
    """
    rng = np.random.default_rng([exam.seed, 7])
    hosts = exam.hosts
    seen = _seen(exam, rng)
    skew = {host: float(rng.uniform(-SKEW, SKEW)) for host in dict.fromkeys(hosts)}
    kept: TracesByKind = {}
    if exam.hang is None:
        profiles = profile_writing.write_profiles(exam.timeline, folder, seen, ORIGIN, hosts, skew)
        kept["profiles"] = profiles
    else:
        kept["dumps"] = recorder_writing.write_dumps(exam.hang, folder, seen, ORIGIN)
        kept["watchdog"] = _write(folder / "watchdog.log", job_logs.watchdog_lines(exam.hang, ORIGIN))
        launchers = job_logs.launcher_lines(exam.hang, hosts, ORIGIN)
        kept["launcher"] = [
            path for host, said in launchers.items() for path in _write(folder / f"torchrun_{host}.log", said)
        ]
    megatron = bool(rng.integers(2))
    steps = len(step_ends(exam.timeline)) if exam.hang is None else exam.hang.steps
    log = job_logs.megatron_steps if megatron else job_logs.torchtitan_steps
    kept["steps"] = _write(folder / "steps.log", log(exam.timeline, steps, ORIGIN))
    ports = _ports(exam, rng)
    devices = {host: [port.device for port in ports if port.host == host] for host in dict.fromkeys(hosts)}
    lost = exam.port if exam.incident["kind"] == "dead_link" else ""
    kept["nccl"] = _write(folder / "nccl.log", job_logs.nccl_lines(hosts, devices, lost))
    kept["counters"] = link_counters.write_counters(ports, folder)
    return {kind: paths for kind, paths in kept.items() if paths}


def _seen(exam: PlantedIncident, rng: np.random.Generator) -> list[int]:
    """The ranks of which there are dumps or profiles."""
    world = len(exam.hosts)
    count = max(2, round(DIFFICULTIES[exam.difficulty].seen * world))
    return sorted(int(rank) for rank in rng.permutation(world)[:count])


def _write(path: Path, lines: Iterable[str]) -> list[Path]:
    base.replace_file(path, ("\n".join(lines) + "\n").encode())
    return [path]


def _ports(exam: PlantedIncident, rng: np.random.Generator) -> list[NicPort]:
    """Every NIC of the machines in use as its counters stand at the end; one of a hard exam went down once before."""
    topology = exam.prepared.topology
    until = exam.timeline.makespan if exam.hang is None else exam.hang.at
    nodes = set(exam.hosts)
    names = zip(topology.vertex_names, topology.vertex_kinds, strict=True)
    nics = [name for name, kind in names if kind == NIC and name.partition("/")[0] in nodes]
    before = int(rng.integers(len(nics))) if exam.difficulty == "hard" else -1
    return [_port(exam, name, until, int(i == before)) for i, name in enumerate(nics)]


def _port(exam: PlantedIncident, name: str, until: float, downs: int) -> NicPort:
    host, _, nic = name.partition("/nic")
    struck = exam.incident.get("link") == name
    kind = exam.incident["kind"] if struck else ""
    rate, sent, received = _moved(exam, name, until)
    left = 1.0
    for incident in exam.prepared.scenario.file.incident if struck else ():
        left *= float(incident.left or 1.0) if kind == "slow_link" else 1.0
        if incident.every is not None:
            downs += 1 + int((until - incident.since) / incident.every)
    return NicPort(
        host=host,
        device=f"mlx5_{nic}",
        port=1,
        state=link_counters.DOWN if kind == "dead_link" else link_counters.ACTIVE,
        rate=rate * left,
        downs=downs + (kind == "dead_link"),
        sent=sent,
        received=received,
    )


def _moved(exam: PlantedIncident, name: str, until: float) -> tuple[float, float, float]:
    """Line rate of a NIC's port, and the bytes it has sent and received by a moment."""
    topology = exam.prepared.topology
    net = np.array([kind == "net" for kind in topology.link_kinds])
    vertex = list(topology.vertex_names).index(name)
    out = np.flatnonzero(net & (topology.link_src == vertex))
    back = np.flatnonzero(net & (topology.link_dst == vertex))
    rate = float(topology.link_bandwidth[out].sum())
    use = exam.timeline.links
    return (rate, 0.0, 0.0) if use is None else (rate, _crossed(use, out, until), _crossed(use, back, until))


def _crossed(use: LinkUse, links: np.ndarray[tuple[int], np.dtype[np.int64]], until: float) -> float:
    weight = np.array([float(weights[np.isin(crossed, links)].sum()) for crossed, weights in use.loads])
    seconds = np.clip(np.minimum(use.segment_end, until) - use.segment_start, 0.0, None)
    return (
        float((seconds * use.segment_rate * weight[use.transfer_load[use.segment_transfer]]).sum())
        if len(weight)
        else 0.0
    )


def _question(exam: PlantedIncident) -> str:
    world = len(exam.hosts)
    machines = len(set(exam.hosts))
    what = "makes this job slow" if exam.hang is None else "makes this job hang"
    return (
        f"A job of {world} ranks on {machines} machines. What {what}, and where? The files that its tools left are in "
        f"{FILES}/.\n\nWrite your answer as JSON, the kind of the fault and the rank, host or port where it is:\n"
        '{"kind": "slow_gpu", "rank": 3}\n{"kind": "slow_host", "host": "node1"}\n'
        '{"kind": "dead_link", "port": "node0/mlx5_0"}\n'
        "and let it be graded: clustersim incident grade FOLDER ANSWER\n\n"
        "Kinds: `clustersim describe --keys scenario` lists them at incident[].kind.\n"
    )
