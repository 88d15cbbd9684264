"""How long a CPU library's work takes on the host: calls, messages, bytes moved between processes, added and copied.

A CPU does everything here, so everything is work for its cores: a collective ends when its longest chain of messages is
through, or when the cores of the busiest node have done the work of all ranks on it, whichever is later:

    T = calls call + sum over legs of messages (message + (calls - 1) turn) + posts post message
        + wire + touched (1/reduce + m/memory) + scratch/fault
    wire = sum over legs of max(links, moved (1/stream + m/memory + b)),   m = max(0, 1 - cache/footprint)

A leg is a round of the collective; Gloo's message and stream are TCP's, MPI's those of the leg's path (shared memory or
a network, eager or by rendezvous). ``turn`` is how long a message waits for each other rank on its core; ``posts`` are
further messages of one process in the same leg, which do not wait for each other; b is (calls - 1) turn / BOX where
messages pass vader's fast boxes, else 0. m is the part of the bytes that the last-level cache no longer holds;
``footprint`` are the buffers of all ranks of a node. ``touched`` is what a process adds (the ring's c = a + b) and
copies (PyTorch flattens the lists of all_gather and gather, and clones the input of reduce_scatter;
ProcessGroupGloo.cpp); ``scratch`` are those temporaries where they are so large that malloc maps fresh pages for every
call (glibc: from 32 MiB on, DEFAULT_MMAP_THRESHOLD_MAX).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from clustersim.core.costs import GlooCosts, MpiCosts

BOX = 4096.0
"""Bytes of vader's fast box between two processes (btl_vader_fbox_size): whoever has filled it waits for the other."""


@dataclass(frozen=True)
class HostRound:
    """A round.

    Parameters
    ----------
    link : seconds per byte of S on the narrowest link. moved : bytes of S that the busiest process, or core, moves
        between processes, in and out together.
    messages : one after another. posts : further ones beside them. path : by which way, where there are several.
    """

    link: float
    moved: float
    messages: float = 0.0
    posts: float = 0.0
    path: str = ""


class HostWork(msgspec.Struct, frozen=True):
    """What one collective asks of the hosts; no constant is in it.

    Parameters
    ----------
    kind : of the collective. nbytes : float [bytes], S.
    calls : how many calls a core serves, at least 1: ranks to a core.
    legs : its rounds; messages on the longest chain or on a core.
    touched, scratch, footprint : float [bytes], see the module.
    """

    kind: str
    nbytes: float
    calls: float
    legs: tuple[HostRound, ...]
    touched: float
    scratch: float
    footprint: float


def wire(work: HostWork, costs: GlooCosts | MpiCosts) -> float:
    """Seconds per byte of S on links and between processes."""
    missed = _missed(work, costs) / costs.memory
    full = (work.calls - 1.0) * _by(costs.turn, "vader") / BOX
    return sum(
        max(leg.link, leg.moved * (1.0 / _by(costs.stream, leg.path) + missed + full * (leg.path == "vader/eager")))
        for leg in work.legs
    )


def seconds(work: HostWork, costs: GlooCosts | MpiCosts) -> float:
    """Seconds of the collective, alone on its machine."""
    touch = 1.0 / costs.reduce + _missed(work, costs) / costs.memory
    post = costs.post if isinstance(costs, MpiCosts) else 1.0
    messages = 0.0
    for leg in work.legs:
        message_s = _by(costs.message, leg.path)
        wait = (work.calls - 1.0) * _by(costs.turn, leg.path.partition("/")[0])
        messages += leg.messages * (message_s + wait) + leg.posts * message_s * post
    return (
        work.calls * costs.call[work.kind]
        + messages
        + wire(work, costs) * work.nbytes
        + work.touched * touch
        + work.scratch / costs.fault
    )


def _by(constant: float | Mapping[str, float], path: str) -> float:
    return constant if isinstance(constant, float) else constant[path]


def _missed(work: HostWork, costs: GlooCosts | MpiCosts) -> float:
    return max(0.0, 1.0 - costs.cache / work.footprint) if work.footprint else 0.0
