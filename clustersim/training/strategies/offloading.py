"""What FSDP and ZeRO do on the host: copies between it and the GPUs, and an optimizer that runs there."""

from __future__ import annotations

import math
from typing import Literal, Protocol

import msgspec

from clustersim.core.errors import ProgramError, UnitError
from clustersim.core.memory_rates import HostWork
from clustersim.core.mesh import Mesh
from clustersim.core.mix import Mix
from clustersim.core.model import StepCost
from clustersim.core.program import HOST_STREAM, Compute
from clustersim.core.units import parse_bandwidth
from clustersim.training.parallel.config import AtLeastOne
from clustersim.training.strategies import base

D2H_STREAM = "d2h"
H2D_STREAM = "h2d"
"""Copies from and to the device, which PCIe carries at once."""
GRADIENTS_BACK_STREAM = "h2d gradients"
"""Gradients that come back from the host to be added to, beside parameters that are fetched."""
ON_HOST = "optimizer on the CPU"
"""What the optimizer of an offload is called."""
PAGEABLE_PASSES = 2
"""Of every byte that is copied between a GPU and memory that is not page-locked: the driver's thread reads and writes
it on its way through a page-locked buffer. DeepSpeed's issue 6695 has 5.4 and 5.9 GB/s, where PCIe carries 32."""


A_THREAD_A_CORE: Literal["all"] = "all"
"""What OpenMP starts of each rank where nobody sets ``OMP_NUM_THREADS``."""
HostThreads = AtLeastOne | Literal["all"]
"""Threads of a rank: a number, or one a core."""


class HostKnobs(Protocol):
    """What a strategy's configuration says of the host."""

    @property
    def pcie_bandwidth(self) -> str | None:
        """Of one GPU in one direction."""

    @property
    def dram_bandwidth(self) -> str | None:
        """Of a node."""

    @property
    def host_threads(self) -> HostThreads | None:
        """Of a rank."""

    @property
    def bind_cores(self) -> bool:
        """Whether each rank has cores of its own."""


class Host(msgspec.Struct, frozen=True):
    """The CPU's side of an offload.

    to_host, from_host : [bytes/s] of one GPU's copies. pageable : of those whose memory is not page-locked, at the
    most. rate : [bytes/s] that one rank reads and writes while all of its node do.
    """

    to_host: float
    from_host: float
    pageable: float
    rate: float

    def copy(
        self,
        ops: base.OpList,
        name: str,
        nbytes: float,
        stream: str,
        after: tuple[int, ...],
        *,
        pinned: bool = True,
    ) -> int:
        """:func:`pinned_copy` at these rates, or at those of memory that is not page-locked."""
        most = math.inf if pinned else self.pageable
        rates = min(self.to_host, most), min(self.from_host, most)
        return pinned_copy(ops, name, nbytes, rates, stream, after)

    def update(self, ops: base.OpList, nbytes: float, after: tuple[int, ...]) -> int:
        """The optimizer on the CPU, and what a framework does there beside it, which read and write so many bytes of a
        rank."""
        return ops.add(Compute(ON_HOST, nbytes / self.rate, HOST_STREAM, after, "optimizer", "host", step=ops.step))


def pinned_copy(
    ops: base.OpList, name: str, nbytes: float, rates: tuple[float, float], stream: str, after: tuple[int, ...]
) -> int:
    """A pinned copy between host and device, beside everything else; ``rates`` : [bytes/s] to the host and from it.
    Raises :class:`ProgramError` at no rate."""
    to_host, from_host = rates
    rate = to_host if stream == D2H_STREAM else from_host
    if not rate:
        raise ProgramError(f"{name}: no rate of copies; give pcie_bandwidth, or the costs' host_copy_rates")
    seconds = nbytes / rate
    mix = Mix(memory=seconds)
    return ops.add(Compute(name, seconds, stream, after, "memcpy", "memory", 0.0, nbytes, ops.step, mix=mix))


def check_host(knobs: HostKnobs) -> None:
    """Raise ValueError naming the knob that is no bandwidth."""
    for name, text in (("pcie_bandwidth", knobs.pcie_bandwidth), ("dram_bandwidth", knobs.dram_bandwidth)):
        try:
            parse_bandwidth("1 B/s" if text is None else text)
        except UnitError as error:
            raise ValueError(f"{name}: {error}") from None


def work_of(mesh: Mesh, knobs: HostKnobs) -> HostWork:
    """How a node's ranks work on its memory."""
    threads = math.inf if knobs.host_threads == A_THREAD_A_CORE else knobs.host_threads
    return HostWork(threads, mesh.nproc_per_node, knobs.bind_cores)


def host_of(mesh: Mesh, cost: StepCost, knobs: HostKnobs) -> Host:
    """A :class:`Host` from what is given, and from what the machine's own links, memory and threads give where that is
    absent."""
    work = work_of(mesh, knobs)
    rate = work.rate(cost.host_bandwidth)
    if knobs.dram_bandwidth is not None:
        rate = parse_bandwidth(knobs.dram_bandwidth) / work.ranks
    if knobs.pcie_bandwidth is None:
        return Host(*cost.host_copy_rates, work.thread_rate / PAGEABLE_PASSES, rate)
    own = parse_bandwidth(knobs.pcie_bandwidth)
    return Host(own, own, math.inf, rate)
