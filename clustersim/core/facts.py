"""What a Timeline does not know of its run: the names of what was run, its figures, its memory and its mesh."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from clustersim.core import figures
from clustersim.core.arrays import Floats
from clustersim.core.host_memory import HostMemory
from clustersim.core.memory_states import likelihood
from clustersim.core.paths import plain
from clustersim.core.texts import Plain, Table


class DoubledBatch(msgspec.Struct, frozen=True):
    """What a run would need with twice the samples a micro-batch: ``needed_bytes`` of the fullest GPU; the ``state``
    (:mod:`clustersim.core.memory_states`) of the memory that has less room, a GPU's or a host's; how likely one of them
    ``runs_out``; and what a ``host`` lacks, in words, where a GPU has room and it has not."""

    needed_bytes: float
    state: str
    runs_out: float
    host: str = ""


class Memory(msgspec.Struct, frozen=True):
    """Of the fullest GPU: bytes it has, and is short of; what holds them at the peak; and that in a sentence.

    needed_bytes, needed_range_bytes : what the step cannot do without, and the least and the most of it. host : the
    memory of a node's host. doubled : with twice the samples a micro-batch; None where nobody laid that out.
    """

    device_bytes: float = 0.0
    missing_bytes: float = 0.0
    needed_bytes: float = 0.0
    needed_range_bytes: tuple[float, float] = (0.0, 0.0)
    by: dict[str, float] = {}
    message: str = ""
    host: HostMemory = HostMemory()
    doubled: DoubledBatch | None = None

    @property
    def runs_out(self) -> float:
        """How likely the GPU has less than is taken."""
        return likelihood(self.needed_range_bytes, self.needed_bytes, self.device_bytes)


class MemoryMoments(msgspec.Struct, frozen=True):
    """Memory over a step: bytes by what holds them, at each of the ``moments``, or at all of them the same."""

    moments: list[str]
    parts: dict[str, list[float] | float]

    def columns(self) -> dict[str, Floats]:
        """By part (moments,) float [bytes]."""
        return {
            name: np.broadcast_to(np.asarray(part, dtype=np.float64), len(self.moments))
            for name, part in self.parts.items()
        }


class DimensionGroups(msgspec.Struct, frozen=True):
    """Who is in a group with whom along a dimension.

    Parameters
    ----------
    name : such as ``"dp x cp"``. degree : members of a group. links : what they talk over, in words. first : the ranks
    of rank 0's group. of_rank : the group of each rank; None where those are too many.
    """

    name: str
    degree: int
    links: list[str]
    first: list[int]
    of_rank: list[int] | None


class MeshMap(msgspec.Struct, frozen=True):
    """How many ranks there are, how many on a machine, and their groups by dimension."""

    world: int
    per_node: int
    dims: list[DimensionGroups]


class RunFacts(msgspec.Struct, frozen=True):
    """What is said of a run beside its Timeline; None, 0 or empty for what nobody knows.

    Figures have the names of ``clustersim run --json``: ``peak_flops`` [FLOP/s] of one GPU, rates a second, bytes of
    one GPU, and ``slowest_step_s`` [s], where workers have paces of their own; ``figures`` has all of
    :data:`clustersim.core.figures.FIGURES` by key. ``stage_memory`` and ``mesh`` are of a split model; ``inputs`` is
    every field of the scenario.
    """

    title: str = ""
    model: str = ""
    gpus: int = 0
    device: str = ""
    strategy: str = ""
    peak_flops: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    slowest_step_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    bytes_sent_per_gpu: float | None = None
    peak_memory_bytes: float | None = None
    figures: dict[str, float] = {}
    fits: bool = True
    memory: Memory = Memory()
    memory_course: MemoryMoments | None = None
    stage_memory: list[MemoryMoments] = []
    mesh: MeshMap | None = None
    inputs: Table = {}
    notes: list[str] = []

    @classmethod
    def of(cls, values: Mapping[str, object]) -> RunFacts:
        """From what ``clustersim run --json`` prints, and more."""
        known_fields: Plain = {name: values[name] for name in cls.__struct_fields__ if name in values}
        known_fields.setdefault("figures", figures.known(values))
        return msgspec.convert(plain(known_fields), cls)

    @property
    def what(self) -> str:
        """What was run, on how many GPUs."""
        return f"{self.model} on {self.gpus:,} {self.device} ({self.strategy})" if self.model else ""

    @property
    def missing_bytes(self) -> float:
        """That a GPU's memory is too small by."""
        return 0.0 if self.fits else self.memory.missing_bytes


UNKNOWN = RunFacts()
"""Of a run of which nothing is said."""
