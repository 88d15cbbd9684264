"""Flows that begin and end together, as one.

Where nothing is drawn at random, a hundred groups reach the same collective at one instant, each on links of its own:
a hundred flows with one ceiling and one payload. While no slot that any of them crosses is tight, all go at their
ceiling, and end together. Such a *bundle* is one entry of its class and one sum over columns of slots, however many
flows it has. Once a slot of it is watched (:mod:`clustersim.engine.flows.network`), it is taken apart.
"""

from __future__ import annotations

import numpy as np

from clustersim.core.arrays import Ints
from clustersim.engine.flows.classes import SlotShare

BUNDLED_FROM = 8
"""Flows from which a bundle is sooner done than each by itself. (Infinitely many: no flow is bundled.)"""

_NO_SLOTS = np.zeros(0, dtype=np.int64)
_NO_WEIGHTS = np.zeros(0)


class BundleWay:
    """What flows of several loads take together, one flow of each.

    members : what each takes. slots, asks : the slots that any of them crosses, and the part of each that all take at
    their ceilings. slot_set : the same slots. ceiling : [bytes/s] of each, or 0.0 where they differ: no bundle.
    """

    def __init__(self, members: list[SlotShare]) -> None:
        self.members = members
        ceilings = {share.ceiling for share in members}
        self.ceiling = ceilings.pop() if len(ceilings) == 1 else 0.0
        crossed = np.concatenate([share.slots for share in members])
        self.slots: Ints = np.unique(crossed)
        asks = np.concatenate([share.asks for share in members])
        self.asks = np.bincount(np.searchsorted(self.slots, crossed), asks, len(self.slots)).astype(np.float64)
        self.slot_set: set[int] = set(self.slots.tolist())


class FlowBundle(SlotShare):
    """Flows under way together; to its class it is one flow, of a way that crosses no watched slot.

    transfers : who they are, ascending, each on the way of the same place in ``way.members``. nbytes : payload of each.
    """

    __slots__ = ("nbytes", "transfers", "way")

    def __init__(self, transfers: Ints, way: BundleWay, nbytes: float) -> None:
        super().__init__(_NO_SLOTS, _NO_WEIGHTS, way.ceiling, 1)
        self.transfers = transfers
        self.way = way
        self.nbytes = nbytes

    def has(self, transfer: int) -> bool:
        """Whether a transfer is one of them."""
        place = int(np.searchsorted(self.transfers, transfer))
        return place < len(self.transfers) and self.transfers.item(place) == transfer
