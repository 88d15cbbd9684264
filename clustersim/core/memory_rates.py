"""The rate of a server's own memory, by its generation of CPUs."""

from __future__ import annotations

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
