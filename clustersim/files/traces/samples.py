"""Samples: how long collectives took by themselves, as a benchmark measured them.

A :class:`Sample` is one row of such a benchmark. Bandwidths are nccl-tests': ``algbw = S / t`` and ``busbw = algbw x
factor`` (nccl-tests doc/PERFORMANCE.md), S being the full tensor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from clustersim.collectives.base import bus_factor

_NAMES = {
    "all_reduce": "all_reduce allreduce allreduce_coalesced",
    "all_gather": "all_gather allgather all_gather_base allgather_base all_gather_into_tensor all_gather_object "
    "all_gather_into_tensor_coalesced allgather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter reducescatter reduce_scatter_base reduce_scatter_tensor "
    "reduce_scatter_tensor_coalesced",
    "broadcast": "broadcast broadcast_oop bcast",
    "reduce": "reduce reduce_oop",
    "scatter": "scatter",
    "gather": "gather",
    "all_to_all": "alltoall all_to_all alltoallv all_to_allv alltoall_base all_to_all_single",
    "sendrecv": "sendrecv",
    "send": "send isend",
    "recv": "recv irecv recvanysource",
    "barrier": "barrier",
}
"""torch.distributed's word for a collective -> what programs call it (lower case, without leading underscores)."""
KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}

_TYPES = {
    "fp32": "float float32 f32 fp32",
    "fp16": "half float16 f16 fp16 c10::half",
    "bf16": "bfloat16 bf16 c10::bfloat16",
    "fp64": "double float64 f64 fp64",
    "int32": "int int32 i32 u32 uint32",
    "int64": "long int64 i64 u64 uint64",
    "uint8": "byte char uint8 int8 bool u8 i8",
    "fp8": "f8e4m3 f8e5m2 fp8_e4m3 fp8_e5m2 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu",
}
"""Our element types -> what programs call them (lower case); signed and unsigned of one width are one."""
DTYPES = {name: ours for ours, names in _TYPES.items() for name in names.split()}
DTYPES |= {"long int": "int64", "unsigned char": "uint8", "signed char": "uint8"}

FASTEST_BUS = 2e12
"""busbw [bytes/s] no fabric of today reaches (NVLink5: 0.9e12 a direction, NVLS under twice that): beyond it, a row's
time or size is not what its column says."""


def kind_of(name: str) -> str | None:
    """The collective a program calls ``name`` (``"_allgather_base"``, ``"alltoall_perf"``), or None.

    >>> kind_of("_reduce_scatter_base"), kind_of("alltoall_perf"), kind_of("gemm")
    ('reduce_scatter', 'all_to_all', None)
    """
    return KINDS.get(name.strip().lower().lstrip("_").removesuffix("_").removesuffix("_perf"))


def dtype_of(name: str) -> str | None:
    """The element type a program calls ``name``, or None."""
    return DTYPES.get(name.strip().lower())


def launch_mode(notes: str) -> str:
    """How nccl-tests was started, as the notes of a row tell it.

    >>> launch_mode("8 threads 1 process"), launch_mode("-g 8 one process"), launch_mode("")
    ('threads', 'single_process', 'process_per_gpu')
    """
    if re.search(r"\bthreads\b", notes):
        return "threads"
    alone = re.search(r"(single|one|1) process(?! (per|a) gpu)|-g (1\d|[2-9])", notes, re.IGNORECASE)
    return "single_process" if alone else "process_per_gpu"


_SAYS_LAUNCH = re.compile(r"mpirun|srun|slurm|torchrun|process(es)? (per|a) gpu|-g 1\b", re.IGNORECASE)


def told_launch(notes: str, env: str) -> str:
    """:func:`launch_mode`, where the notes and settings of a row say it; empty where they do not."""
    mode = launch_mode(notes)
    return mode if mode != "process_per_gpu" or _SAYS_LAUNCH.search(f"{notes} {env}") else ""


@dataclass(frozen=True)
class Sample:
    """One measured collective.

    Parameters
    ----------
    kind : as :data:`clustersim.core.program.COLLECTIVES`, or ``"send"``, ``"sendrecv"``.
    nbytes : float [bytes], the full tensor, NCCL's S.
    seconds : float [s], out of place where both were measured. seconds_in_place : float [s], nan where not measured.
    ranks, nodes : of the group; 0 where the source does not say.
    launch : as :class:`clustersim.collectives.base.Group`; empty where not said.
    version : of NCCL, ``"2.28.3"``; empty where not said. env : settings that matter, ``"NCCL_ALGO=RING"``.
    skew : float [s], how much later the last rank came than the first, nan where not measured; ``last`` : that rank,
        -1 where not known.
    fastest : float [s], of the repeats, nan where not measured: what a machine with other work on it could do.
    at_once : how many groups ran this collective at the same time.
    count : how many repeats ``seconds`` is the mean of; 0 where not said.
    device, platform : the GPU, and the machine in words.
    source : the file and line, or the address, of the row. case : rows with one case belong together.
    topology : the machine as topology files name it; empty where the source does not say.
    """

    kind: str
    nbytes: float
    seconds: float
    ranks: int = 0
    dtype: str = "fp32"
    redop: str = ""
    nodes: int = 0
    seconds_in_place: float = float("nan")
    skew: float = float("nan")
    last: int = -1
    launch: str = ""
    version: str = ""
    env: str = ""
    fastest: float = float("nan")
    at_once: int = 1
    count: int = 0
    device: str = ""
    platform: str = ""
    source: str = ""
    case: str = ""
    topology: str = ""

    @property
    def algbw(self) -> float:
        """S / t [bytes/s]."""
        return self.nbytes / self.seconds

    @property
    def busbw(self) -> float:
        """algbw times nccl-tests' factor [bytes/s]; nan where the number of ranks is not known."""
        return self.algbw * bus_factor(self.kind, self.ranks) if self.ranks else float("nan")


@dataclass(frozen=True, eq=False)
class Samples:
    """Measured collectives of one or several files.

    rows : the samples. source : where they are from.
    skipped : what was left out, reason -> how many rows. notes : what a reader should know of the rest.
    """

    rows: tuple[Sample, ...]
    source: str
    skipped: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """One array per field, and ``busbw`` [bytes/s]; the dict goes straight into ``pandas.DataFrame``."""
        names = [f.name for f in fields(Sample)]
        return {name: np.array([getattr(row, name) for row in self.rows]) for name in (*names, "busbw")}


class SampleSieve:
    """Collects samples; what cannot be one is counted with its reason."""

    def __init__(self) -> None:
        self.rows: list[Sample] = []
        self.skipped: Counter[str] = Counter()

    def skip(self, reason: str) -> None:
        """Leave one row out."""
        self.skipped[reason] += 1

    def add(self, row: Sample, stated_busbw: float = float("nan")) -> None:
        """Keep a row that can be true; ``stated_busbw`` [bytes/s] is what the source itself says of it."""
        if not (np.isfinite(row.seconds) and row.seconds > 0):
            return self.skip("a time that is not above zero")
        if not (np.isfinite(row.nbytes) and row.nbytes >= 0):
            return self.skip("a size below zero")
        if row.nbytes == 0 and row.kind != "barrier":
            return self.skip("a size of zero")
        busbw = row.busbw if row.ranks else row.algbw
        if busbw > FASTEST_BUS:
            return self.skip(f"an impossible bus bandwidth (above {FASTEST_BUS / 1e9:.0f} GB/s)")
        # Printed with two decimals, so small ones say little.
        if row.ranks > 1 and stated_busbw > 0.5e9 and abs(stated_busbw / busbw - 1.0) > 0.05:
            return self.skip("a bus bandwidth that is not size/time times nccl-tests' factor for its ranks")
        self.rows.append(row)
        return None

    def done(self, source: str, notes: Iterable[str] = ()) -> Samples:
        """The samples that were kept."""
        return Samples(tuple(self.rows), source, dict(self.skipped), tuple(notes))


def joined(parts: Iterable[Samples]) -> Samples:
    """Samples of several files as one."""
    parts = list(parts)
    skipped: Counter[str] = Counter()
    for part in parts:
        skipped.update(part.skipped)
    rows = tuple(row for part in parts for row in part.rows)
    return Samples(rows, ", ".join(p.source for p in parts), dict(skipped), tuple(n for p in parts for n in p.notes))
