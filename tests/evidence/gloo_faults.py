"""Real jobs of this machine's torch over Gloo with a planted fault, and what our diagnosis makes of what they leave.

Each job is four processes under torchrun that add up tensors again and again. One of them does what it should not: the
others wait until a timeout of their own, and then every process that can writes what its Flight Recorder holds; or, of
faults that slow a job down, PyTorch's profiler writes what it saw on every rank. Gloo has neither GPUs nor NICs: a slow
GPU is a slow processor there, and links are not among these. The programs are in :mod:`tests.evidence.gloo_jobs`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from clustersim.core.errors import ClusterSimError, TraceError
from clustersim.scenario.file.incident_table import KINDS
from clustersim.studies.diagnosis import diagnose
from clustersim.studies.exam import ExamAnswer, graded
from tests.evidence.gloo_jobs import REAL_FAULTS

RANKS = 4
TIMEOUT = 4.0
"""Seconds that a collective of the job may take."""
LONGEST = 180.0
"""Seconds after which a job is given up."""


class RealFault(msgspec.Struct, frozen=True):
    """A real job's planted fault, what the diagnosis said of it, and how sure it was; ``files`` that the job left."""

    fault: str
    right: ExamAnswer
    given: ExamAnswer
    confidence: float
    files: int

    @property
    def is_right(self) -> bool:
        """Cause and place."""
        return graded(self.given, self.right).is_right


def real_faults(faults: Iterable[str] = tuple(REAL_FAULTS), times: int = 1) -> Iterator[RealFault]:
    """Run each fault so many times, on another rank each time. Raises :class:`ClusterSimError` without torch."""
    for number, fault in enumerate(faults):
        for again in range(times):
            yield real_fault(fault, (1 + again + number) % RANKS)


def real_fault(fault: str, rank: int) -> RealFault:
    """One job; one that leaves nothing that says anything is answered by nothing."""
    row = REAL_FAULTS[fault]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.py").write_text(row.program)
        left = folder / "left"
        left.mkdir()
        run_job(folder / "job.py", [fault, str(rank), "3", str(left), str(TIMEOUT)], left / "torchrun.log")
        place = None if KINDS[row.kind].widely else rank
        right = ExamAnswer(row.kind, rank=place)
        files = len(list(left.iterdir()))
        try:
            first = diagnose([left]).suspects[0]
        except TraceError:
            return RealFault(fault, right, ExamAnswer("nothing"), 0.0, files)
        given = ExamAnswer(first.kind, first.rank, first.host, first.port)
        return RealFault(fault, right, given, first.confidence, files)


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
