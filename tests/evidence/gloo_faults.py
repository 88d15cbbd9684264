"""Real jobs of this machine's torch over Gloo with a planted fault, and what our diagnosis makes of what they leave.

Each job is four processes under torchrun that add up tensors again and again. One of them does what it should not; the
others wait until a timeout of their own, and then every process that can writes what its Flight Recorder holds. Calls
that differ end processes of Gloo at once, so there the odd one calls first, and the recorder is written before anybody
waits. Gloo has no kernels: kinds of GPUs and links are not among these.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from clustersim.core.errors import ClusterSimError, TraceError
from clustersim.studies.diagnosis import diagnose
from clustersim.studies.exam import ExamAnswer, graded

RANKS = 4
KINDS = ("missing_call", "stopped_rank", "dead_rank", "other_kind", "other_size", "other_type", "other_order")
TIMEOUT = 6.0
"""Seconds that a collective of the job may take."""
LONGEST = 180.0
"""Seconds after which a job is given up."""

JOB = """
import datetime, os, signal, sys, threading, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json

kind, odd, at, folder, timeout = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5])
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20 * timeout))

def dump():
    path = os.path.join(folder, f"trace_rank_{rank}.json")
    part = os.path.join(folder, f".{rank}")
    with open(part, "wb") as file:
        file.write(_dump_fr_trace_json(True, False))
    os.replace(part, path)

def watch():
    while time.monotonic() - last[0] < timeout:
        time.sleep(0.05)
    dump()
    time.sleep(timeout)
    os.abort()  # as NCCL's watchdog does

last = [time.monotonic()]
dist.all_reduce(torch.ones(8))
threading.Thread(target=watch, daemon=True).start()

def calls(step):
    big, small = torch.ones(1024), torch.ones(256)
    if step != at or rank != odd:
        return [lambda: add(big), lambda: add(small)]
    if kind == "other_kind":
        return [lambda: dist.broadcast(big, 0, async_op=True), lambda: add(small)]
    if kind == "other_size":
        return [lambda: add(torch.ones(512)), lambda: add(small)]
    if kind == "other_type":
        return [lambda: add(big.double()), lambda: add(small)]
    return [lambda: add(small), lambda: add(big)]

def add(tensor):
    return dist.all_reduce(tensor, async_op=True)

for step in range(at + 3):
    if step == at:
        time.sleep(0.5)  # Gloo's threads tell late that earlier calls have ended
    if step == at and rank != odd and kind.startswith("other_"):
        while not os.path.exists(os.path.join(folder, f"trace_rank_{odd}.json")):
            time.sleep(0.02)
    if step == at and rank == odd and kind == "missing_call":
        time.sleep(100 * timeout)
    if step == at and rank == odd and kind == "stopped_rank":
        os.kill(os.getpid(), signal.SIGSTOP)
    if step == at and rank == odd and kind == "dead_rank":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        works = [call() for call in calls(step)]
        if step == at and kind.startswith("other_"):
            dump()
        for work in works:
            work.wait()
    except Exception as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        time.sleep(100 * timeout)
    last[0] = time.monotonic()
time.sleep(100 * timeout)
"""


class RealFault(msgspec.Struct, frozen=True):
    """A real job's planted fault, what the diagnosis said of it, and how sure it was; ``files`` that the job left."""

    right: ExamAnswer
    given: ExamAnswer
    confidence: float
    files: int

    @property
    def is_right(self) -> bool:
        """Cause and place."""
        grade = graded(self.given, self.right)
        return grade.cause and grade.place


def real_faults(kinds: tuple[str, ...] = KINDS, times: int = 1) -> Iterator[RealFault]:
    """Run each fault so many times, on another rank each time. Raises :class:`ClusterSimError` without torch."""
    for kind in kinds:
        for again in range(times):
            yield real_fault(kind, (1 + again + kinds.index(kind)) % RANKS)


def real_fault(kind: str, rank: int) -> RealFault:
    """One job. Raises :class:`ClusterSimError` where it leaves nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.py").write_text(JOB)
        left = folder / "left"
        left.mkdir()
        run_job(folder / "job.py", [kind, str(rank), "5", str(left), str(TIMEOUT)], left / "torchrun.log")
        try:
            answer = diagnose([left])
        except TraceError as error:
            raise ClusterSimError(f"a job with {kind} of rank {rank}: {error}") from None
        first = answer.suspects[0]
        given = ExamAnswer(first.kind, first.rank, first.host, first.port)
        return RealFault(ExamAnswer(kind, rank=rank), given, first.confidence, len(list(left.iterdir())))


def run_job(program: Path, words: list[str], log: Path) -> None:
    """Run a program under torchrun, and keep what the launcher says where it says which process ended."""
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": "200", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    try:
        done = subprocess.run(
            [*launch, str(program), *words], env=env, capture_output=True, text=True, check=False, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        raise ClusterSimError(f"a job of torchrun did not end within {LONGEST:g} s") from None
    if "Root Cause" in done.stderr:
        log.write_text(done.stderr)
