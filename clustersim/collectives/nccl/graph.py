"""What an attempt of the search asks for and finds, as NCCL's ncclTopoGraph: one algorithm's channels on one node."""

from __future__ import annotations

import msgspec

BALANCED_TREE, SPLIT_TREE, TREE, RING, NVLS, COLLNET_DIRECT = range(1, 7)
"""Patterns by NCCL's numbers. Balanced: a node's traffic enters at one GPU and leaves at two; TREE: all at one GPU."""


class ChannelGraph(msgspec.Struct, frozen=True):
    """Channels of one algorithm on one node: what an attempt asks for, and what it found.

    Parameters
    ----------
    pattern : one of the patterns above. min_channels, max_channels : what counts as a solution.
    bw_intra, bw_inter : [GB/s] per channel, between GPUs and to the NIC.
    type_intra, type_inter : worst path class, by its place in :data:`clustersim.core.topology.PATH_CLASSES`.
    same_channels : all channels visit the GPUs in one order.
    cross_nic : 0 enter and leave by one NIC, 2 alternate two NICs over pairs of channels.
    n_channels, hops : found; the tuner multiplies by n_channels. Kernels run on ``exec_channels`` of them.
    orders : per channel, GPUs in visiting order (heads only for NVLS). nets : per channel, ports in and out.
    """

    pattern: int
    min_channels: int = 1
    max_channels: int = 1
    bw_intra: float = 0.0
    bw_inter: float = 0.0
    type_intra: int = 0
    type_inter: int = 0
    same_channels: bool = True
    cross_nic: int = 0
    n_channels: int = 0
    hops: int = 0
    orders: tuple[tuple[int, ...], ...] = ()
    nets: tuple[tuple[int, int], ...] = ()


def better(candidate: ChannelGraph, best: ChannelGraph, n_gpus: int) -> bool:
    """Whether a layout replaces the best so far: more bandwidth, or the same with fewer hops."""
    if candidate.n_channels < candidate.min_channels:
        return False
    if candidate.pattern == NVLS:
        more = best.n_channels < candidate.n_channels <= n_gpus
        return more or candidate.n_channels * candidate.bw_inter > best.n_channels * best.bw_inter
    candidate_rate = candidate.n_channels * candidate.bw_intra
    theirs = best.n_channels * best.bw_intra
    if candidate_rate != theirs:
        return candidate_rate > theirs
    same_kind = candidate.pattern == best.pattern and candidate.cross_nic == best.cross_nic
    return same_kind and candidate.hops < best.hops


def hopeless(ask: ChannelGraph, best: ChannelGraph, most: int) -> bool:
    """Whether an attempt cannot find more bandwidth than the best so far."""
    if most < ask.min_channels:
        return True
    if ask.pattern in (NVLS, COLLNET_DIRECT) or not best.n_channels:
        return False
    return most * ask.bw_intra <= best.n_channels * best.bw_intra


_INTRA = (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3)
_INTER = (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12)
_INTRA_SM90 = (60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3)
_INTER_SM90 = (48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12)
_INTRA_SM100 = (90, 80, 70, 60, 50, 40, 30, 24, 20, 19, 18)
_INTER_SM100 = (96, 48, 45.1, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12)
"""Of :func:`speeds`."""


def speeds(sm: int, inter: bool) -> tuple[float, ...]:
    """GB/s per channel NCCL tries, fastest first (nccl src/graph/search.cc)."""
    if sm >= 100:
        return _INTER_SM100 if inter else _INTRA_SM100
    if sm >= 90:
        return _INTER_SM90 if inter else _INTRA_SM90
    return _INTER if inter else _INTRA
