"""Whether a node's host has room for what its ranks keep there: states of an offload, and activations between passes.

What is counted: parameters, gradients, masters and optimizer states that left the GPUs, and activations that wait for
backward, of all ranks of a node. What is not: the operating system, data loaders, and a model that each process builds
or reads whole before it is shared out.

That last is where DeepSpeed's own estimate of stages 1 and 2 is higher (``estimate_zero2_model_states_mem_needs``:
``max(4 * total_gpus, 16)`` bytes a parameter, times its factor): 4 bytes a parameter and rank are what ``__init__`` of
stage_1_and_2.py has on the host for a while, a copy of every 16-bit parameter (``cpu_data``) and a flat one of all of
them (``flattened_buffer``). It frees both before the first step, and only the ranks of a node share a host, where the
estimate takes those of all nodes. Of stage 3 it is lower by the 16-bit buffer of gradients that an offloaded optimizer
has (``estimate_zero3_model_states_mem_needs``: 16 bytes a parameter, 18 with parameters on the host).
"""

from __future__ import annotations

import msgspec

from clustersim.core.memory_states import DOES_NOT_FIT, FITS, UNKNOWN, likelihood, verdict_of, worded
from clustersim.core.texts import Plain
from clustersim.core.units import format_bytes

BUFFERS = (1.0, 1.5, 2.0)
"""Taken of the host over what is kept there, the least, the middle and the most. The middle is what DeepSpeed's
estimators ask for, buffers included (deepspeed/runtime/zero/stage3.py, ``estimate_zero3_model_states_mem_needs``,
``additional_buffer_factor``). The most is that of memory which is pinned tensor by tensor: PyTorch rounds a pinned
block up to a power of two (aten/src/ATen/core/CachingHostAllocator.h, ``allocate``)."""

KEY = "node.host_memory of the topology"
"""Where a topology file says what its hosts have."""


class HostMemory(msgspec.Struct, frozen=True):
    """What the ranks of the node that asks most keep on its host, and what the host has.

    kept_bytes : 0 where nothing is on a host. room_bytes : the host's memory; None where no file says it.
    """

    kept_bytes: float = 0.0
    room_bytes: float | None = None

    @property
    def likely_bytes(self) -> float:
        """With buffers, as DeepSpeed's estimators ask [bytes]."""
        return BUFFERS[1] * self.kept_bytes

    @property
    def range_bytes(self) -> tuple[float, float]:
        """The least and the most that is taken [bytes]."""
        return BUFFERS[0] * self.kept_bytes, BUFFERS[2] * self.kept_bytes

    @property
    def state(self) -> str:
        """One of the states of a GPU's memory, or that nobody knows; empty where nothing is on the host."""
        if not self.kept_bytes:
            return ""
        if self.room_bytes is None:
            return UNKNOWN
        return verdict_of(self.kept_bytes, self.room_bytes, self.runs_out)

    @property
    def lacks_room(self) -> bool:
        """Whether its verdict is worse than that it fits; an unknown one is not."""
        return worse(FITS, self) != FITS

    @property
    def runs_out(self) -> float:
        """How likely more is taken than there is; 0 where nobody knows what there is, and 1 where it surely is."""
        if not self.kept_bytes or self.room_bytes is None:
            return 0.0
        return likelihood(self.range_bytes, self.likely_bytes, self.room_bytes)

    @property
    def uncertain(self) -> bool:
        """Whether nobody knows that it has room for the most that is expected."""
        return self.state == UNKNOWN or 0.0 < self.runs_out < 1.0

    @property
    def missing_bytes(self) -> float:
        """That the host is too small by, at the least."""
        return max(0.0, self.kept_bytes - self.room_bytes) if self.room_bytes is not None else 0.0

    def to_dict(self) -> Plain:
        """Plain values, for ``clustersim run --json``."""
        return {**msgspec.structs.asdict(self), "verdict": self.state, "message": self.in_words}

    @property
    def in_words(self) -> str:
        """One sentence; empty where nothing is on the host."""
        if not self.kept_bytes:
            return ""
        amount = f"{format_bytes(self.kept_bytes)} a node, about {format_bytes(self.likely_bytes)} with buffers"
        if self.room_bytes is None:
            return f"host memory unknown: needs {amount}, and no file says what a node has ({KEY} does)"
        word = worded(self.state, self.range_bytes, self.likely_bytes, self.room_bytes)
        return f"host memory {word}: needs {amount}, of {format_bytes(self.room_bytes)} ({KEY})"


NOTHING = HostMemory()
"""Of ranks that keep all they have on their GPUs."""


def worse(gpu: str, host: HostMemory) -> str:
    """The one verdict on both memories: the GPU's state, or the host's where that is worse.

    An unknown host leaves the GPU's state as it is, which whoever prints it adds :attr:`HostMemory.in_words` to.

    >>> worse("fits", HostMemory(3e12, 2e12)), worse("may run out", HostMemory(1e12)), worse("fits", HostMemory())
    ('does not fit', 'may run out', 'fits')
    """
    if host.state == DOES_NOT_FIT or gpu == DOES_NOT_FIT:
        return DOES_NOT_FIT
    return gpu if host.state in {"", UNKNOWN, FITS} else host.state


def either(gpu: float, host: HostMemory) -> float:
    """How likely one of both memories runs out; ``gpu`` : the likelihood of the GPU's."""
    return 1.0 - (1.0 - gpu) * (1.0 - host.runs_out)
