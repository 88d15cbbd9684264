"""A run -> the logs that its job would have written: steps, the watchdog, the launcher, NCCL.

Lines as Megatron-LM and torchtitan log steps, PyTorch 2.13's ProcessGroupNCCL and torchrun log a hang, and NCCL 2.27
its communicators and lost ports: what :mod:`clustersim.files.traces.step_timers`, ``watchdog`` and ``nccl_debug`` read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np

from clustersim.core.timeline import Timeline, step_ends
from clustersim.engine.hang import Hang, RankCall
from clustersim.files.traces.recorder_writing import elements_of, group_key, group_names

PARTS = {"batch-generator": "input", "forward-compute": "forward", "optimizer": "optimizer"}
"""Megatron-LM's timers of what a rank does alone -> phases."""
_SAVING = "host stands still"
"""The op in which ranks save a checkpoint."""
_OPS = {"all_gather": "_ALLGATHER_BASE", "reduce_scatter": "_REDUCE_SCATTER_BASE", "all_to_all": "ALLTOALL_BASE"} | {
    "barrier": "ALLREDUCE"
}
SIGKILL = -9
SIGABRT = -6
OTHERS = "  <NO_OTHER_FAILURES>"


def megatron_steps(timeline: Timeline, steps: int, origin: float, saves: bool = False) -> Iterator[str]:
    """Lines of Megatron-LM with ``--log-timers-to-tensorboard`` off and timers of all ranks as the least and the most.

    steps : how many to log. origin : when the run began [s since 1970]. saves : ranks that stand still ahead of a step
        save a checkpoint, for which Megatron-LM stops the timer of iterations.
    """
    ended = step_ends(timeline).max(axis=1)
    alone = {name: _spent(timeline, phase) for name, phase in PARTS.items()}
    saving = _saving(timeline, steps, saves)
    for step in range(steps):
        took = ended[step] - (ended[step - 1] if step else 0.0) - saving[step]
        if saving[step]:
            yield f"  successfully saved checkpoint from iteration {step:7d} to /checkpoints"
            yield "(min, max) time across ranks (ms):"
            yield f"    save-checkpoint {'.' * 31}: ({saving[step] * 1e3:.2f}, {saving[step] * 1e3:.2f})"
        clock = _clock(origin + ended[step])
        yield (
            f" [{clock}] iteration {step + 1:8d}/ {len(ended):8d} | consumed samples: {8 * (step + 1):12d} | "
            f"elapsed time per iteration (ms): {took * 1e3:.1f} | learning rate: 1.0E-04 | global batch size: {8:5d} |"
        )
        yield "(min, max) time across ranks (ms):"
        for name, spent in alone.items():
            low, high = (1e3 * value for value in (spent[step].min(), spent[step].max()))
            yield f"    {name} {'.' * (46 - len(name))}: ({low:.2f}, {high:.2f})"


def torchtitan_steps(timeline: Timeline, steps: int, origin: float, saves: bool = False) -> Iterator[str]:
    """Lines of torchtitan, which tell a step by the time at which they are written; ``saves`` as for Megatron-LM."""
    ended = step_ends(timeline).max(axis=1)
    saving = _saving(timeline, steps, saves)
    for step in range(steps):
        before = ended[step - 1] if step else 0.0
        took = ended[step] - before
        if saving[step]:
            done = "Finished saving the checkpoint (or staging if async is enabled) in"
            yield f"{_titan(origin + before + saving[step])}{done} {saving[step]:.2f} seconds."
        yield (
            f"{_titan(origin + ended[step])}step: {step + 1:2d}  loss:  7.1234  memory: 20.12GiB(50.30%)  "
            f"tps: {2048 / took:,.0f}  tflops: 40.00  mfu: 30.00%"
        )


def _titan(moment: float) -> str:
    return f"[titan] {_clock(moment)},{round(moment % 1 * 1e3) % 1000:03d} - root - INFO - "


def _saving(timeline: Timeline, steps: int, saves: bool) -> list[float]:
    """Seconds that all ranks save a checkpoint ahead of each step."""
    seconds = [0.0] * steps
    spans = timeline.spans([0]) if saves else {"op": np.zeros(0, dtype=int)}
    for i, op in enumerate(spans["op"].tolist()):
        info = timeline.ops[op]
        if info.name == _SAVING and info.step < steps:
            seconds[info.step] = float(spans["end"][i] - spans["start"][i])
    return seconds


def _spent(timeline: Timeline, phase: str) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """(steps, ranks) [s] that ranks spend in ops of a phase."""
    step = np.array([op.step for op in timeline.ops])
    of_phase = np.array([op.phase == phase and op.kind == "compute" for op in timeline.ops])
    spans = timeline.spans()
    chosen = of_phase[spans["op"]]
    spent = np.zeros((int(step.max()) + 1, timeline.world_size))
    np.add.at(spent, (step[spans["op"][chosen]], spans["rank"][chosen]), (spans["end"] - spans["start"])[chosen])
    return spent


def watchdog_lines(hang: Hang, origin: float) -> Iterator[str]:
    """What the watchdogs of all ranks write: of the first to time out, and of those that it tells to dump."""
    fired = {int(a.who.split()[1]): a.at for a in hang.alarms if a.watchdog == "c10d watchdog" and a.at is not None}
    transport = [a.at for a in hang.alarms if a.watchdog.startswith("NCCL's") and a.at is not None]
    first = min(fired, key=lambda rank: (fired[rank], rank), default=-1)
    names = group_names(hang)
    for rank, at in sorted(fired.items(), key=lambda pair: (pair[1], pair[0])):
        pending = next(call for call in hang.calls[rank] if call.ended is None)
        error = transport[0] if transport and transport[0] < at else None
        head = f"[rank{rank}]:[E{_day(origin + (at if error is None else error))} ProcessGroupNCCL.cpp"
        number, about = names[group_key(pending)]
        group = f"[PG ID {number} PG GUID {number}({about}) Rank {rank}]"
        seq = _seq(hang.calls[rank], pending)
        if error is None:
            ran = round((at - pending.created) * 1e3) + 17
            yield (
                f"{head}:685] {group} Watchdog caught collective operation timeout: "
                f"{_work(hang, pending, seq)} ran for {ran} milliseconds before timing out."
            )
        last = max(_seq(hang.calls[rank], call) for call in hang.calls[rank] if call.group == pending.group)
        yield (
            f"{head}:2267] {group} Exception (either an error or timeout) detected "
            f"by watchdog at work: {seq}, last enqueued NCCL work: {last}, last completed NCCL work: {seq - 1}."
        )
    for rank in sorted(set(hang.calls) - set(fired) - set(hang.silent)):
        if first >= 0:
            yield (
                f"[rank{rank}]:[E{_day(origin + fired[first] + 1)} ProcessGroupNCCL.cpp:1807] [PG ID 0 PG GUID "
                f"0(default_pg) Rank {rank}] Received a dump signal due to a collective timeout from rank {first} and "
                "we will try our best to dump the debug info."
            )


def _work(hang: Hang, call: RankCall, seq: int) -> str:
    name = _OPS.get(call.kind, call.kind.replace("_", "").upper())
    inputs, outputs = elements_of(call)
    timeout = round(hang.timeout * 1e3)
    return f"WorkNCCL(SeqNum={seq}, OpType={name}, NumelIn={inputs}, NumelOut={outputs}, Timeout(ms)={timeout})"


def _seq(calls: Sequence[RankCall], wanted: RankCall) -> int:
    """Its number among the calls of its group of ranks, as the process group counts."""
    of_group = [call.op for call in calls if call.group == wanted.group and call.peer < 0]
    return 1 + of_group.index(wanted.op) if wanted.op in of_group else wanted.seq


def launcher_lines(hang: Hang, hosts: Sequence[str], origin: float) -> Mapping[str, list[str]]:
    """host -> what torchrun writes there when the job is over: whose process ended first, and how."""
    fired = {int(a.who.split()[1]): a.at for a in hang.alarms if a.watchdog == "c10d watchdog" and a.at is not None}
    dead = hang.ranks[0] if hang.kind == "dead_rank" else -1
    told: dict[str, list[str]] = {}
    for host in dict.fromkeys(hosts):
        here = [rank for rank, name in enumerate(hosts) if name == host]
        if dead in here:
            told[host] = _failed(dead, here.index(dead), host, SIGKILL, origin + hang.at)
            continue
        ended = sorted((fired[rank], rank) for rank in here if rank in fired)
        if ended:
            at, rank = ended[0]
            told[host] = _failed(rank, here.index(rank), host, SIGABRT, origin + at)
    return told


def _failed(rank: int, local: int, host: str, code: int, at: float) -> list[str]:
    name = {SIGKILL: "SIGKILL", SIGABRT: "SIGABRT"}[code]
    pid = 4000 + rank
    return [
        f"E{_day(at)} 1 torch/distributed/elastic/multiprocessing/api.py:1003] failed (exitcode: {code}) local_rank: "
        f"{local} (pid: {pid}) of binary: /usr/bin/python3",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "=" * 51,
        "train.py FAILED",
        "-" * 51,
        "Failures:",
        OTHERS,
        "-" * 51,
        "Root Cause (first observed failure):",
        "[0]:",
        f"  time      : {datetime.fromtimestamp(at, UTC):%Y-%m-%d_%H:%M:%S}",
        f"  host      : {host}",
        f"  rank      : {rank} (local_rank: {local})",
        f"  exitcode  : {code} (pid: {pid})",
        "  error_file: <N/A>",
        f"  traceback : Signal {-code} ({name}) received by PID {pid}",
        "=" * 51,
    ]


class JobNics(NamedTuple):
    """The NICs of a job as NCCL saw them: host -> its devices; ``lost``, a port that went down (``"node0/mlx5_0"``);
    ``far``, NICs at another socket than the GPUs beside them; machines ``without_gdr``."""

    devices: Mapping[str, Sequence[str]]
    lost: str = ""
    far: tuple[str, ...] = ()
    without_gdr: tuple[str, ...] = ()


def nccl_lines(hosts: Sequence[str], nics: JobNics) -> Iterator[str]:
    """What ``NCCL_DEBUG=INFO`` writes: who is where, which NICs there are, whether they reach GPU memory, and a port
    that went down.

    hosts : name of each rank's machine.
    """
    yield f"{hosts[0]}:4000:4100 [0] NCCL INFO NCCL version 2.27.5+cuda12.9"
    nodes = list(dict.fromkeys(hosts))
    seen: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        local = seen[host] = seen.get(host, -1) + 1
        head = f"{host}:{4000 + rank}:{4100 + rank} [{local}] NCCL"
        used = " ".join(f"[{i}]{device}:1/IB" for i, device in enumerate(nics.devices[host]))
        if used:
            yield f"{head} INFO NET/IB : Using {used} [RO]; OOB eth0:10.0.0.{nodes.index(host) + 1}<0>"
            yield f"{head} INFO Using network IB"
            yield from _gpu_direct(head, host, local, nics)
        yield (
            f"{head} INFO ncclCommInitRankConfig comm 0x5581 rank {rank} nranks {len(hosts)} cudaDev {local} nvmlDev "
            f"{local} busId {local:x}000 commId 0x9d7 - Init COMPLETE"
        )
    if nics.lost:
        yield from _lost_port(hosts, nodes, nics.lost)


def _gpu_direct(head: str, host: str, local: int, nics: JobNics) -> Iterator[str]:
    """Whether a GPU's process sends from GPU memory by its NIC (NCCL's distances: 4 is PIX, 5 PXB, 8 SYS)."""
    devices = list(nics.devices[host])
    own = f"mlx5_{local}"
    device = own if own in devices else devices[local % len(devices)]
    i = devices.index(device)
    pair = f"GPU {local:x}000 / HCA {i}"
    if host in nics.without_gdr:
        yield f"{head} INFO NET/IB : GPU Direct RDMA Disabled for HCA {i} '{device}'"
    elif f"{host}/{device}" in nics.far:
        yield f"{head} INFO GPU Direct RDMA Disabled for {pair} (distance 8 > 5)"
    else:
        yield f"{head} INFO GPU Direct RDMA Enabled for {pair} (distance 4 <= 5), read 0 mode Default"


def _lost_port(hosts: Sequence[str], nodes: Sequence[str], lost: str) -> Iterator[str]:
    host, _, device = lost.partition("/")
    first = hosts.index(host)
    yield f"{host}:{4000 + first}:{4200 + first} [0] NCCL WARN NET/IB : {device}:1 Got async event : port error"
    for other in nodes:
        rank = hosts.index(other)
        peer = f"10.0.0.{1 + (nodes.index(other) + 1) % len(nodes)}<47513>"
        yield (
            f"{other}:{4000 + rank}:{4300 + rank} [0] NCCL WARN NET/IB: Got completion from peer {peer} with "
            f"status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) vendor_err=129 hca {device}"
        )


def _clock(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S}"


def _day(moment: float) -> str:
    """As c10's logger writes a time: month, day, and nine digits of a second."""
    return f"{datetime.fromtimestamp(moment, UTC):%m%d %H:%M:%S}.{round(moment % 1 * 1e9) % 10**9:09d}"
