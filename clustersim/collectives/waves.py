"""A schedule told wave by wave: what a chunk replay needs of millions of transfers, without listing them.

A ring of four thousand members makes 33 million sends, but at any step only one a member, and each waits for nothing
but what its sender got in the step before. So a schedule can be written as *waves* of transfers, at most one on each
lane, and as *slots*, which hold when a piece has arrived where it will be sent on from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from clustersim.core.arrays import Floats, Ints


class Wave(NamedTuple):
    """Some transfers, at most one on each lane; columns of k elements.

    transfer : (k,) int, places in the :class:`~clustersim.collectives.base.TransferSchedule`. lane : which lanes.
    takes, puts : (k,) int, the slot that each waits for, and the slot it fills when it arrives.
    adds : what it brings is added to what was there, so the slot is filled when both are.
    """

    transfer: Ints
    lane: slice
    takes: Ints
    puts: Ints
    adds: bool


class Waves(msgspec.Struct, frozen=True, eq=False):
    """A schedule as waves.

    Parameters
    ----------
    src, dst, rail : (L,) int, of each lane, as in :class:`~clustersim.collectives.base.TransferSchedule`.
    fraction : (L,) float, of S, that a transfer on this lane moves.
    n_slots, n_transfers : int.
    each : makes the waves, from the first; on every lane its transfers come in their order.
    """

    src: Ints
    dst: Ints
    rail: Ints
    fraction: Floats
    n_slots: int
    n_transfers: int
    each: Callable[[], Iterator[Wave]]
