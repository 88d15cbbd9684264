"""Small tools the algorithm files share: writing a schedule transfer by transfer, joining traffic, pipeline depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from clustersim.collectives.base import Group, Traffic, TransferSchedule
from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import ProgramError, nearest

PIECE = 128 * 2**10
"""Bytes of one pipelined piece, near the textbook's best, sqrt(bytes rate latency / hops), of some ten hops of a
microsecond at 50 GB/s. NCCL's Simple slots hold up to 512 KiB (4 MiB in 8 steps, src/include/collectives.h)."""

MAX_PIECES = 256
"""Deepest pipeline of a chunk replay; beyond it the fill hardly matters and the event count only grows."""


class RailChannel(NamedTuple):
    """The NIC index a transfer uses where it leaves the node (-1: the sender's nearest), and the channel it is on."""

    rail: int
    channel: int


ANY_WAY = RailChannel(-1, 0)


class ScheduleWriter:
    """Collects transfers in order; :meth:`done` freezes them into a :class:`TransferSchedule`."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, bool, int, int]] = []
        self._after: list[Sequence[int]] = []
        self._lanes: dict[tuple[int, int, int], int] = {}

    def send(
        self,
        src: int,
        dst: int,
        chunk: int,
        *,
        after: Sequence[int] = (),
        reduce: bool = False,
        way: RailChannel = ANY_WAY,
    ) -> int:
        """Add one transfer and return its id. ``after`` names transfers that must have arrived."""
        rail, channel = way
        lane = self._lanes.setdefault((src, dst, channel), len(self._lanes))
        self._rows.append((src, dst, chunk, reduce, rail, lane))
        self._after.append(after)
        return len(self._rows) - 1

    def done(self, chunk_fraction: Floats) -> TransferSchedule:
        """The schedule, over pieces of these fractions of S."""
        table = np.array(self._rows, dtype=np.int64).reshape(-1, 6)
        src, dst, chunk, reduce, rail, lane = (np.ascontiguousarray(column) for column in table.T)
        ptr = np.concatenate([[0], np.cumsum([len(a) for a in self._after], dtype=np.int64)])
        flat = np.array([t for a in self._after for t in a], dtype=np.int64)
        return TransferSchedule(
            src, dst, chunk, len(chunk_fraction), reduce.astype(bool), ptr, flat, rail, chunk_fraction, lane
        )


Part = tuple[Ints, Ints, Floats | float, Ints | int]
"""Some edges of a traffic: ``(src, dst, fraction, rail)``; the last two may be one number for all."""


def traffic_of(parts: Sequence[Part], steps: int, net_steps: int, rounds: Sequence[int] | None = None) -> Traffic:
    """All the edges together; ``rounds``: one per part."""
    sizes = [len(part[0]) for part in parts]
    empty = np.empty(0, dtype=np.int64)
    return Traffic(
        src=np.concatenate([empty, *(part[0] for part in parts)]),
        dst=np.concatenate([empty, *(part[1] for part in parts)]),
        fraction=np.concatenate([np.empty(0), *(np.broadcast_to(p[2], n) for p, n in zip(parts, sizes, strict=True))]),
        rail=np.concatenate([empty, *(np.broadcast_to(p[3], n) for p, n in zip(parts, sizes, strict=True))]),
        steps=steps,
        net_steps=net_steps,
        round=np.repeat(np.asarray(rounds, dtype=np.int64), sizes) if rounds is not None else empty,
    )


def pieces(nbytes: float) -> int:
    """Into how many pieces a pipelined stream of ``nbytes`` is cut."""
    return max(1, min(MAX_PIECES, math.ceil(nbytes / PIECE)))


def least_sent(kind: str, n: int, n_islands: int = 1) -> tuple[float, float]:
    """(sent, received) per byte of S, the mean over ``n`` members, of algorithms that move no byte twice.

    It is what nccl-tests' bus bandwidth counts (nccl-tests doc/PERFORMANCE.md): of all_reduce, a reduce-scatter and an
    all-gather. Raises :class:`ProgramError` for a kind that it has no count for.

    >>> least_sent("all_reduce", 8), least_sent("gather", 8)
    ((1.75, 1.75), (0.109375, 0.109375))
    """
    share = (n - 1) / n
    counts = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"), share)
    counts |= {"all_reduce": 2.0 * (n - 1) / n, "sendrecv": 1.0, "send": 1.0 / n, "barrier": 0.0}
    counts |= dict.fromkeys(("scatter", "gather"), (n - 1) / n**2)  # all but its own part leaves, or reaches, the root
    if kind not in counts:
        raise ProgramError(f"no count of bytes for {kind!r}; {nearest(kind, counts)}")
    return counts[kind], counts[kind]


def everyone(group: Group) -> Ints:
    """(n,) positions of all members."""
    return np.arange(group.size, dtype=np.int64)
