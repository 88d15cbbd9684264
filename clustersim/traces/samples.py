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

KINDS = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "all_gather_base": "all_gather",
    "allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_object": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "broadcast": "broadcast",
    "broadcast_oop": "broadcast",
    "bcast": "broadcast",
    "reduce": "reduce",
    "reduce_oop": "reduce",
    "scatter": "scatter",
    "gather": "gather",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "alltoallv": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "sendrecv": "sendrecv",
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "irecv": "recv",
    "recvanysource": "recv",
    "barrier": "barrier",
}
"""What programs call a collective (lower case, without leading underscores) -> torch.distributed's word."""

DTYPES = {
    "float": "fp32", "float32": "fp32", "f32": "fp32", "fp32": "fp32", "half": "fp16", "float16": "fp16",
    "f16": "fp16", "fp16": "fp16", "c10::half": "fp16", "bfloat16": "bf16", "bf16": "bf16", "c10::bfloat16": "bf16",
    "double": "fp64", "float64": "fp64", "f64": "fp64", "fp64": "fp64", "int": "int32", "int32": "int32",
    "i32": "int32", "u32": "int32", "uint32": "int32", "long": "int64", "long int": "int64", "int64": "int64",
    "i64": "int64", "u64": "int64", "uint64": "int64", "byte": "uint8", "char": "uint8", "uint8": "uint8",
    "int8": "uint8", "unsigned char": "uint8", "signed char": "uint8", "bool": "uint8", "u8": "uint8", "i8": "uint8",
    "f8e4m3": "fp8", "f8e5m2": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}  # fmt: skip
"""What programs call an element type (lower case) -> ours; signed and unsigned of one width are one."""

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
    return (
        "single_process"
        if re.search(r"(single|one|1) process(?! (per|a) gpu)|-g (1\d|[2-9])", notes, re.IGNORECASE)
        else "process_per_gpu"
    )


@dataclass(frozen=True)
class Sample:
    """One measured collective.

    Parameters
    ----------
    kind : as :data:`clustersim.program.COLLECTIVES`, or ``"send"``, ``"sendrecv"``.
    nbytes : float [bytes], the full tensor, NCCL's S.
    seconds : float [s], out of place where both were measured. seconds_in_place : float [s], nan where not measured.
    ranks, nodes : of the group; 0 where the source does not say.
    launch : as :class:`clustersim.collectives.base.Group`; empty where not said.
    version : of NCCL, ``"2.28.3"``; empty where not said. env : settings that matter, ``"NCCL_ALGO=RING"``.
    skew : float [s], how much later the last rank came than the first, nan where not measured.
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

    Parameters
    ----------
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


class Sieve:
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
