"""Into how many parts NCCL splits what is sent to a peer inside a node, each carried by a channel of its own.

``ncclTopoComputeP2pChannels`` lays the channels (nccl src/graph/paths.cc), ``addP2pToPlan`` splits the bytes over them
(src/enqueue.cc; before 2.13 ``getP2pChunkSize`` of src/group.cc). Of eight H100s a peer has four channels until a part
is of 16 MiB, then more: 32, 64, 128 and 256 MiB take 422, 820, 826 and 898 us. NCCL 2.7 opens one for every 2 MiB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from clustersim.collectives.nccl.search import exec_channels, search
from clustersim.collectives.nccl.view import NodeView, System

LL_THRESHOLD = 2.0**14
"""Bytes up to which a peer's go by LL (NCCL_P2P_LL_THRESHOLD).

Sends over a network share one pool of buffers, which is Simple's: their connections have none of LL's, whatever the
size (src/transport/net.cc; NCCL_NET_SHARED_BUFFERS, on unless a user says otherwise)."""
LL_SINCE = (2, 14)
LL_BY_CHANNELS = ((2, 22), (2, 29))
"""Versions from and before which the threshold counts as often as a peer may have channels: A100s with 2.27 send 512
KiB by LL, H100s with 2.29 do not send 64 KiB by it."""
LL_SLOT = 2.0**16
SLOT = 2.0**19
PCIE_SLOT = 2.0**17
"""Bytes of a slot: of LL's buffers (src/include/device.h), and of sends within a node, all over NVLink or not
(src/init.cc: NCCL_P2P_NVL_CHUNKSIZE, NCCL_P2P_PCI_CHUNKSIZE)."""
PARTS = (((2, 13), 1 / 8, 32.0), ((2, 8), 1.0, 4.0), ((0, 0), 4.0, math.inf))
"""Of a slot, the smallest part and the largest before channels double, by the version from which it holds."""
SHARED_SINCE = (2, 8)
"""Since when a peer's bytes open no more channels than leave some to each of the others, until parts are large."""
EVEN_SINCE = (2, 22)
"""Since when parts are alike; before, all but the last are whole multiples of the smallest."""
OTHER_CHANNELS = 2
"""Channels for a peer that NVLink does not reach."""


@dataclass(frozen=True)
class P2pParts:
    """What one peer's bytes are split into.

    Parameters
    ----------
    protocol : ``"LL"`` or ``"Simple"``. channels : how many carry a part each. nbytes : [bytes] of the largest part.
    """

    protocol: str
    channels: int
    nbytes: float


def parts_of(nbytes: float, size: int, system: System, version: tuple[int, int]) -> P2pParts:
    """How ``nbytes`` for one peer are split inside a node.

    Parameters
    ----------
    nbytes : float [bytes], for one peer. size : ranks of the communicator. version : (major, minor) of NCCL.
    """
    laid, most = p2p_channels(system)
    usual = most
    while version >= SHARED_SINCE and usual * size > laid and usual > 1:
        usual //= 2
    by_channels = LL_BY_CHANNELS[0] <= version < LL_BY_CHANNELS[1]
    if version >= LL_SINCE and nbytes <= LL_THRESHOLD * (most if by_channels else 1):
        smallest, largest = LL_SLOT / 8, LL_SLOT * 32
        return _split("LL", nbytes, (smallest if by_channels else nbytes, largest), usual, most)
    slot = SLOT if all(map(_only_nvlink, system.views)) else PCIE_SLOT
    smallest, largest = next((low * slot, high * slot) for since, low, high in PARTS if version >= since)
    parts = _split("Simple", nbytes, (smallest, largest), usual, most)
    if version >= EVEN_SINCE:
        return parts
    return replace(parts, nbytes=min(math.ceil(parts.nbytes / smallest) * smallest, nbytes))


def _split(protocol: str, nbytes: float, sizes: tuple[float, float], usual: int, most: int) -> P2pParts:
    """``sizes`` : of the smallest part, and of the largest before channels double."""
    smallest, largest = sizes
    channels = min(usual, max(math.ceil(nbytes / max(smallest, 1.0)), 1))
    while nbytes / channels > largest and channels <= most // 2:
        channels *= 2
    return P2pParts(protocol, channels, nbytes / channels)


@lru_cache(maxsize=1024)
def p2p_channels(system: System) -> tuple[int, int]:
    """Channels that sends and receives have together, and those of one peer."""
    laid = exec_channels(system, search(system))
    return _power_of_two(laid), _power_of_two(min(laid, *map(_reaching, system.views)))


def _reaching(view: NodeView) -> int:
    """Channels for a peer: two for each NVLink on the way to the one with the fewest."""
    if view.nvswitch_links:
        return 2 * view.nvswitch_links
    return max(2 * _fewest_links(view), OTHER_CHANNELS)


def _only_nvlink(view: NodeView) -> bool:
    return bool(view.nvswitch_links or _fewest_links(view))


def _fewest_links(view: NodeView) -> int:
    """NVLinks between the two GPUs that have the fewest, 0 where a pair has none."""
    pairs = [(a, b) for a in range(len(view.gpus)) for b in range(a)]
    return min((view.nvlinks[a][b] for a, b in pairs), default=0) if view.nvlinks else 0


def _power_of_two(count: int) -> int:
    """The least power of two that is no less than a count."""
    return 1 << max(count - 1, 0).bit_length()
