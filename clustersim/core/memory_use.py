"""What one GPU holds over a training step, part by part, and whether a device has room for it.

Said is what the framework has *allocated* at its peak, and the driver's context apart. The caching allocator has
*reserved* more of the driver than that, and ``nvidia-smi`` shows the reservation with all that is beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from clustersim.core import memory_parts
from clustersim.core.arrays import Floats
from clustersim.core.device import Device
from clustersim.core.host_memory import NOTHING, HostMemory, either, worse
from clustersim.core.memory_parts import part_label
from clustersim.core.memory_states import DOES_NOT_FIT, FITS, likelihood, verdict_of, worded
from clustersim.core.units import format_bytes

CONTEXT_BYTES = 0.8 * 2**30
"""CUDA context with its libraries' kernels: 0.8 GiB."""
FRAGMENTATION = (1.0, 1.12, 1.33)
"""Reserved over allocated bytes with room to spare, the least, the middle and the most: three sources have 1.10
(bigscience, Megatron-DeepSpeed on A100), 1.12 (torchao on MI300X) and 1.33 (torchtitan 2024 on H100;
tests/data/measurements)."""
LIBRARIES_BYTES = (0.3 * 2**30, 2.8 * 2**30, 2.8 * 2**30)
"""What NCCL's communicators and libraries hold beside context and allocator where ranks talk, the least, the middle and
the most that nvidia-smi shows: the buffers of one communicator, assumed, and what bigscience's rows have, twice
(Megatron-DeepSpeed, several a rank, 8 GPUs a node)."""
NEEDED_FRAGMENTATION = (1.0, 1.01, 1.19)
"""Reserved over allocated bytes where memory has run out. The allocator gives back the blocks that nobody uses before
it fails (c10/cuda/CUDACachingAllocator.cpp, ``release_cached_blocks``): what is left is room in blocks that are used in
part. None, the middle and the ninth decile of what PyTorch said of 14 runs that failed
(tests/data/out_of_memory.csv)."""
NEEDED_BESIDE_BYTES = (0.0, 0.7 * 2**30, 3.4 * 2**30)
"""What those runs could not have of their card beside context and allocator, the least, the middle and the ninth
decile: libraries, and what the driver keeps of the memory that a card is sold with."""
Three = tuple[float, float, float]
"""The least, the middle and the most of something."""
PRESSURE = 0.7
"""Share of a card's memory above which measured steps are 10-20 % slower (allocator retries)."""


@dataclass(frozen=True, eq=False)
class MemoryCourse:
    """Memory over a step: bytes by part at each moment.

    Parameters
    ----------
    moments : ``("fwd embedding", ..., "bwd embedding", "optimizer")``. parts : key of each part that the framework
        allocates -> (moments,) float [bytes].
    """

    moments: tuple[str, ...]
    parts: dict[str, Floats]

    @classmethod
    def of(cls, moments: tuple[str, ...], columns: memory_parts.PartColumns, gpu: Device | None = None) -> MemoryCourse:
        """With the parts that follow from these columns (:func:`clustersim.core.memory_parts.all_parts`)."""
        return cls(moments, memory_parts.all_parts(columns, gpu))

    @property
    def total(self) -> Floats:
        """(moments,) float [bytes], of the framework's allocator."""
        total: Floats = np.sum(list(self.parts.values()), axis=0)
        return total

    @property
    def peak(self) -> int:
        """Index of the fullest moment."""
        return int(np.argmax(self.total))


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one GPU over a step.

    The largest of each part is an attribute of its key, such as ``use.activations``.

    Parameters
    ----------
    course : what the framework allocates, part by part.
    context : of the driver, outside the allocator. communicates : it talks to other ranks, whose libraries take memory.
    flat : of the workspace, what needs a block of its own: no room among the smaller ones that passes have given back.
    where : whose memory it is, where ranks differ: ``"stage 0"``.
    host_bytes : what it keeps in its node's host memory, beside all of this.
    """

    course: MemoryCourse
    context: float = CONTEXT_BYTES
    communicates: bool = True
    flat: float = 0.0
    where: str = ""
    host_bytes: float = 0.0

    if not TYPE_CHECKING:  # there a name that is misspelt is to be found

        def __getattr__(self, name: str) -> float:
            if name.startswith("_") or name == "course" or name not in self.course.parts:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.largest(name)

    def __repr__(self) -> str:
        """Short, for a notebook: the fields hold every moment of a step."""
        of = f" of {self.where}" if self.where else ""
        total = format_bytes(self.total)
        return f"<MemoryUse{of}: {total} at {self.peak}, {format_bytes(self.allocated)} of it allocated>"

    def largest(self, part: str) -> float:
        """Bytes of a part that the framework allocates, when it has most."""
        return float(self.course.parts[part].max())

    @property
    def allocated(self) -> float:
        """Peak of the framework's allocator [bytes]."""
        return float(self.course.total[self.course.peak])

    @property
    def peak(self) -> str:
        """The moment of the peak, such as ``"bwd layers.31"``."""
        return self.course.moments[self.course.peak]

    @property
    def model_states(self) -> float:
        """Parameters, gradients and optimizer states [bytes], as the ZeRO paper counts them (arXiv:1910.02054)."""
        return sum(self.largest(part) for part in memory_parts.keys_of("states"))

    @property
    def total(self) -> float:
        """``allocated`` and the context [bytes]."""
        return self.allocated + self.context

    @property
    def reserved(self) -> float:
        """What the caching allocator takes from the driver [bytes], as ``torch.cuda.max_memory_reserved``: the middle
        of :attr:`reserved_range`."""
        return FRAGMENTATION[1] * self._blocks

    @property
    def reserved_range(self) -> tuple[float, float]:
        """The least that a step can do with, and the most that was seen [bytes]."""
        return self.allocated, FRAGMENTATION[2] * self._blocks

    @property
    def _blocks(self) -> float:
        return max(self.allocated, float(self.course.total[:-1].max()) + self.flat)

    @property
    def shown(self) -> float:
        """What ``nvidia-smi`` shows with room to spare [bytes]: the middle of :attr:`shown_range`."""
        return self._taken(FRAGMENTATION, self._libraries)[1]

    @property
    def shown_range(self) -> tuple[float, float]:
        """The least and the most of it [bytes]."""
        least, _, most = self._taken(FRAGMENTATION, self._libraries)
        return least, most

    @property
    def needed(self) -> float:
        """What a step cannot do without [bytes], when the allocator has given back all that it can: the middle of
        :attr:`needed_range`. A card that has less runs out of memory."""
        return self._taken(NEEDED_FRAGMENTATION, NEEDED_BESIDE_BYTES)[1]

    @property
    def needed_range(self) -> tuple[float, float]:
        """The least and the most of it [bytes]."""
        least, _, most = self._taken(NEEDED_FRAGMENTATION, NEEDED_BESIDE_BYTES)
        return least, most

    @property
    def _libraries(self) -> Three:
        return LIBRARIES_BYTES if self.communicates else (0.0, 0.0, 0.0)

    def _taken(self, shares: Three, beside: Three) -> Three:
        """Of a card [bytes]: the least, where a block of its own finds room among the others; the middle and the most,
        where it does not."""
        blocks = (self.allocated, shares[1] * self._blocks, shares[2] * self._blocks)
        return _with_driver(blocks, self.context, beside)

    def parts(self) -> dict[str, float]:
        """Bytes by part, each at its own largest, the largest first."""
        values = {name: self.largest(name) for name in self.course.parts} | {"context": self.context}
        return dict(sorted(values.items(), key=lambda item: -item[1]))

    def at_peak(self) -> dict[str, float]:
        """Bytes by part at the fullest moment, the largest first; they add up to ``total``."""
        values = {name: float(column[self.course.peak]) for name, column in self.course.parts.items()}
        return dict(sorted((values | {"context": self.context}).items(), key=lambda item: -item[1]))

    def fits(self, device: Device, host: HostMemory | None = None) -> Verdict:
        """Whether a device has room, and the ``host`` of a node for what its ranks keep there."""
        spare = device.memory_bytes - self.total
        return Verdict(device.name, spare, self.total / device.memory_bytes, self, host or NOTHING)


def runs_out_at_least(total: float, room: float) -> float:
    """How likely a step on several GPUs takes more memory than one has, where only what it needs is known.

    Blocks of their own may add to it (:attr:`MemoryUse.flat`).

    Parameters
    ----------
    total : :attr:`MemoryUse.total` [bytes]. room : the GPU's memory [bytes].
    """
    allocated = total - CONTEXT_BYTES
    least_share, share, most_share = NEEDED_FRAGMENTATION
    blocks = (least_share * allocated, share * allocated, most_share * allocated)
    least, likely, most = _with_driver(blocks, CONTEXT_BYTES, NEEDED_BESIDE_BYTES)
    return likelihood((least, most), likely, room)


def _with_driver(blocks: Three, context: float, beside: Three) -> Three:
    """What is taken of a card [bytes], the least, the middle and the most, where the allocator's ``blocks`` are."""
    least, middle, most = (nbytes + context + more for nbytes, more in zip(blocks, beside, strict=True))
    return least, middle, most


@dataclass(frozen=True)
class Verdict:
    """Whether a step fits on a device, and what its ranks keep on the host in a node.

    Parameters
    ----------
    device : its name. spare : bytes left; negative is how much is missing. share : of the memory that is used.
    use : what holds it. host : the memory of a node's host.
    """

    device: str
    spare: float
    share: float
    use: MemoryUse
    host: HostMemory = NOTHING

    @property
    def room(self) -> float:
        """The device's memory [bytes]."""
        return self.spare + self.use.total

    @property
    def reserved(self) -> Three:
        """What the allocator takes [bytes], the least, the middle and the most: no more than there is, where the step
        may fit at all."""
        least, most = self.use.reserved_range
        return self._held_to(self.room - self.use.context, (least, self.use.reserved, most))

    @property
    def shown(self) -> Three:
        """The same of what ``nvidia-smi`` shows."""
        least, most = self.use.shown_range
        return self._held_to(self.room, (least, self.use.shown, most))

    def _held_to(self, room: float, taken: Three) -> Three:
        least, middle, most = (min(nbytes, room) if self.spare >= 0 else nbytes for nbytes in taken)
        return least, middle, most

    @property
    def of_device(self) -> str:
        """The state of the device's memory alone."""
        return verdict_of(self.use.total, self.room, self.device_runs_out)

    @property
    def state(self) -> str:
        """One of :data:`FITS`, :data:`MAY_RUN_OUT` and :data:`DOES_NOT_FIT`, of the memory that has less room."""
        return worse(self.of_device, self.host)

    @property
    def in_words(self) -> str:
        """The device's state, and how likely the step runs out of its memory where it may."""
        return worded(self.of_device, self.use.needed_range, self.use.needed, self.room)

    @property
    def ok(self) -> bool:
        """Whether it fits, with what allocator and libraries take besides."""
        return self.state == FITS

    @property
    def possible(self) -> bool:
        """Whether it may fit."""
        return self.state != DOES_NOT_FIT

    @property
    def device_runs_out(self) -> float:
        """How likely a step takes more memory than the device has."""
        return likelihood(self.use.needed_range, self.use.needed, self.room)

    @property
    def runs_out(self) -> float:
        """The same of device or host."""
        return either(self.device_runs_out, self.host)

    @property
    def uncertain(self) -> bool:
        """Whether it may fit, and the most that is expected of either memory does not, or a host is unknown."""
        return self.possible and (self.use.needed_range[1] > self.room or self.host.uncertain)

    @property
    def pressed(self) -> bool:
        """Whether it fits, but so tightly that real steps slow down."""
        return self.of_device != DOES_NOT_FIT and self.share > PRESSURE

    def __str__(self) -> str:
        """The state of the device, by how much, and the three largest holders; the host's ahead of it where that is
        worse, else behind it."""
        parts_text = (self._device_text(), self.host.in_words)
        return "; ".join(part for part in (parts_text[::-1] if self.host.lacks_room else parts_text) if part)

    def _device_text(self) -> str:
        """One sentence of the device's memory."""
        holders_text = ", ".join(
            f"{part_label(name)} {format_bytes(n)}" for name, n in list(self.use.at_peak().items())[:3]
        )
        place_text = f" ({self.use.where})" if self.use.where else ""
        if self.of_device == DOES_NOT_FIT:
            return (
                f"does not fit on {self.device}{place_text}: {format_bytes(-self.spare)} too much; held by "
                f"{holders_text}"
            )
        tight = "; above 70 % full, real steps are slower" if self.pressed else ""
        if self.use.needed_range[1] > self.room:
            most = f"with what allocator and libraries take besides about {format_bytes(self.use.needed)}{tight}"
            return (
                f"{self.in_words} on {self.device}{place_text}: needs {format_bytes(self.use.total)} of "
                f"{format_bytes(self.room)}, {most}; held by {holders_text}"
            )
        spare = f"{format_bytes(self.spare)} to spare ({self.share:.0%} used{tight})"
        return f"{self.in_words} on {self.device}{place_text} with {spare}; {holders_text}"
