"""The rate of a server's own memory, by its generation of CPUs, and what processes reach of it."""

from __future__ import annotations

import math

import msgspec

from clustersim.core.topology import NodeType

STREAM_SHARE = 0.8
"""Share of nominal DRAM bandwidth that STREAM-like loops on all cores reach; 0.75 to 0.85 is usual."""

CHANNELS = {
    "bdw": (4, 2400e6),
    "skl": (6, 2666e6),
    "clx": (6, 2933e6),
    "icx": (8, 3200e6),
    "spr": (8, 4800e6),
    "emr": (8, 5600e6),
    "rome": (8, 3200e6),
    "milan": (8, 3200e6),
    "genoa": (12, 4800e6),
    "grace": (32, 2000e6),
}
"""CPU generation -> memory channels of a socket, transfers/s of each (8 bytes a transfer): the makers' specification
sheets. Grace's LPDDR5X is written as channels that give its 512 GB/s."""

USUAL = (6, 2933e6)
"""The same of a server whose CPU nobody names: Cascade Lake's, a prior."""


def host_bandwidth(node: NodeType) -> float:
    """Bytes/s that one socket of this node reads and writes together; a usual server where the model is not known."""
    channels, transfers = CHANNELS.get(node.cpu_model, USUAL)
    return STREAM_SHARE * 8.0 * channels * transfers


THREAD_RATE = 12e9
"""Bytes/s that one thread reads and writes of its own socket's memory: 12 GB/s of a Skylake server, in STREAM, which
needs many to fill its channels (AnandTech, "Sizing Up Servers", 2017)."""
REMOTE_SHARE = 0.6
"""Share of it that a thread has of the other socket's: its own is there in 0.54 to 0.64 of the time, by Intel's Memory
Latency Checker on five servers of two sockets (78 to 108 ns, and 130 to 196). Of several processes that nobody binds
one is likely to be there, and a step waits for the slowest."""
PROCESS_RATE = 55e9
"""Bytes/s that one process reads and writes however many threads it has: its memory is where it was first touched,
and its threads are elsewhere. The logs of four publishers come to 43 to 74 GB/s, and this is the middle; a server whose
memory gives its own socket 69 GB/s gives the other 34 (Memory Latency Checker). ``tests/test_offload_steps.py`` judges
it by publishers left out."""
LINKS = 2
"""Processes' worth that all processes of a node reach which nobody binds: half of what they read crosses the sockets'
link, which carries each way what holds one of them back."""


class HostWork(msgspec.Struct, frozen=True):
    """How the ranks of a node work on its memory.

    threads : of a rank, infinite for one a core; where nobody says, one of each of several ranks, as torchrun and
    accelerate set ``OMP_NUM_THREADS``, and all cores of a rank that is alone or has cores of its own.
    ranks : of the node. bound : each has cores of its own.
    """

    threads: float | None
    ranks: int
    bound: bool = False

    @property
    def active(self) -> float:
        """Threads of a rank; infinite for enough of them."""
        if self.threads is not None:
            return float(self.threads)
        return 1.0 if self.ranks > 1 and not self.bound else math.inf

    @property
    def thread_rate(self) -> float:
        """[bytes/s] that a thread of the slowest rank reads and writes."""
        return THREAD_RATE * (REMOTE_SHARE if self.ranks > 1 and not self.bound else 1.0)

    def rate(self, socket: float) -> float:
        """[bytes/s] that a rank reads and writes while all of its node do, of whose two sockets each has ``socket``.

        >>> [HostWork(*how).rate(100e9) / 1e9 for how in ((1, 8), (math.inf, 8), (16, 8, True), (None, 1))]
        [7.2, 13.75, 25.0, 55.0]
        """
        node = min(2, self.ranks) * socket
        if not self.bound:
            node = min(node, LINKS * PROCESS_RATE)
        return min(self.active * self.thread_rate, PROCESS_RATE, node / self.ranks)
