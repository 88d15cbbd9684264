"""Bounds on what an attempt of the search can find, from capacities alone, so that hopeless attempts are not walked."""

from __future__ import annotations

import math

from clustersim.collectives.nccl.layout import COLLNET_DIRECT, NVLS, RING, Layout
from clustersim.collectives.nccl.view import C2C, NVL, PIX, SYS
from clustersim.collectives.nccl.wiring import Wiring


def most_channels(wires: Wiring, ask: Layout) -> int:
    """No more channels than this can be laid at the speeds asked for."""
    most = ask.max_channels
    if ask.pattern in (NVLS, COLLNET_DIRECT):
        return most
    if wires.n_nets:
        whole = max(int(ask.bw_inter), 1e-3)
        most = min(most, sum(int(nic.bandwidth // whole) for nic in wires.view.nics), _by_entry(wires, ask))
    if wires.n_gpus > 1:
        most = min(most, _by_gpu(wires, ask), _by_socket(wires, ask))
    return most


def _fits(capacity: float, speed: float) -> int:
    return math.floor(round(capacity * 1000) / round(speed * 1000))


def _by_entry(wires: Wiring, ask: Layout) -> int:
    """Every channel comes in from a NIC at some GPU, never over NVLink."""
    doors = [link for g in range(wires.n_gpus) for link in wires.out["gpu", g] if wires.link_kind[link] != NVL]
    return sum(_fits(wires.bandwidth[link], ask.bw_inter) for link in doors)


def _by_gpu(wires: Wiring, ask: Layout) -> int:
    """Every channel leaves all GPUs for another, but the last of an open chain."""
    room = []
    for g in range(wires.n_gpus):
        usable = [
            link
            for link in wires.out["gpu", g]
            if wires.link_kind[link] == NVL or ask.type_intra >= (C2C if wires.link_kind[link] == C2C else PIX)
        ]
        room.append(sum(_fits(wires.bandwidth[link], ask.bw_intra) for link in usable))
    if ask.pattern == RING and not wires.n_nets:
        return min(room)
    return sum(room) // (wires.n_gpus - 1)


def _by_socket(wires: Wiring, ask: Layout) -> int:
    """Without NVLink, a channel that visits GPUs of several sockets crosses between them."""
    sockets = {wires.socket_of(g) for g in range(wires.n_gpus)}
    if len(sockets) < 2 or wires.has_nvlink:
        return ask.max_channels
    crossings = sum(
        _fits(wires.bandwidth[link], ask.bw_intra)
        for link in range(len(wires.bandwidth))
        if wires.link_kind[link] == SYS
    )
    home = 1 if ask.pattern == RING and not wires.n_nets else 0
    return crossings // (len(sockets) - 1 + home)


def hopeless(ask: Layout, best: Layout, most: int) -> bool:
    """Whether an attempt cannot find more bandwidth than the best so far."""
    if most < ask.min_channels:
        return True
    if ask.pattern in (NVLS, COLLNET_DIRECT) or not best.n_channels:
        return False
    return most * ask.bw_intra <= best.n_channels * best.bw_intra
