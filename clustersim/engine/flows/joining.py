"""Who is joined with whom by tight slots: whom a change of rates may concern, and what each takes there.

Two ways with one answer: class by class; and as columns of all active classes at once, where several cross many slots,
as collectives do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence
from typing import cast

import numpy as np

from clustersim.core.arrays import Bools, Floats
from clustersim.engine.flows.classes import FULL, ClassFlows
from clustersim.engine.flows.fairshare import fill, level

AS_COLUMNS_FROM = 8
"""Active classes that cross many slots from which columns of all are sooner looked at than one after another.
(Infinitely many: never.)"""


class JoinedClasses:
    """Active classes of a network by the slots that they cross.

    active : of the network, in order of becoming so. crossing : classes by watched slot. demands : of each slot, what
    is asked of it.
    """

    def __init__(
        self, active: Mapping[ClassFlows, None], crossing: Mapping[int, Mapping[ClassFlows, None]], demands: Floats
    ) -> None:
        self._active = active
        self._crossing = crossing
        self._demands = demands
        # The same: a few are looked at sooner one by one.
        self._one_by_one = cast("MutableSequence[float]", demands.data)

    def rates(self, touched: set[int], taken: Floats) -> dict[ClassFlows, float]:
        """Rates of the classes at these slots and of whoever they are joined with, in order [bytes/s].

        ``taken`` : what is not there of each slot.
        """
        if sum([flow_class.many for flow_class in self._active]) >= AS_COLUMNS_FROM:
            return self._by_columns(touched, taken)
        asked = self._one_by_one
        joined: dict[ClassFlows, list[tuple[int, float]]] = {}
        seen = set(touched)
        slots = touched
        while slots:
            more: set[int] = set()
            for flow_class in self._at(slots):
                if flow_class in joined:
                    continue
                n = len(flow_class.flows)
                takes = joined[flow_class] = [
                    (slot, weight * n) for slot, weight in flow_class.crossed(self._demands) if asked[slot] > FULL
                ]
                more.update([slot for slot, _ in takes])
            slots = more - seen
            seen |= slots
        if not joined:
            return {}
        classes = sorted(joined, key=_number) if len(joined) > 1 else list(joined)
        return dict(zip(classes, level([(each.ceiling, joined[each]) for each in classes], taken), strict=True))

    def _at(self, slots: set[int]) -> Iterable[ClassFlows]:
        """Classes at some of these slots."""
        if len(slots) < len(self._active):
            return [flow_class for slot in slots for flow_class in self._crossing.get(slot, ()) if flow_class.flows]
        return [flow_class for flow_class in self._active if not slots.isdisjoint(flow_class.slot_list)]

    def _by_columns(self, touched: set[int], taken: Floats) -> dict[ClassFlows, float]:
        """The same of all active classes at once."""
        classes = sorted((flow_class for flow_class in self._active if flow_class.slot_list), key=_number)
        counts = np.array([len(flow_class.slot_list) for flow_class in classes], dtype=np.int64)
        if not classes:
            return {}
        slots = np.concatenate([flow_class.slots for flow_class in classes])
        starts = np.cumsum(counts) - counts
        tight: Bools = self._demands[slots] > FULL
        reached = np.zeros(len(self._demands), dtype=np.bool_)
        reached[np.fromiter(touched, np.int64, len(touched))] = True
        joined = np.zeros(len(classes), dtype=np.bool_)
        fresh = np.logical_or.reduceat(reached[slots], starts)
        while fresh.any():
            joined |= fresh
            reached[slots[np.repeat(fresh, counts) & tight]] = True
            fresh = np.logical_or.reduceat(reached[slots], starts) & ~joined
        chosen = np.repeat(joined, counts) & tight
        those = [flow_class for flow_class, is_joined in zip(classes, joined.tolist(), strict=True) if is_joined]
        if not those:
            return {}
        flows = np.repeat([float(len(flow_class.flows)) for flow_class in classes], counts)
        weights = np.concatenate([flow_class.weights for flow_class in classes]) * flows
        ptr = np.cumsum(np.concatenate([[0], np.add.reduceat(chosen, starts, dtype=np.int64)[joined]]))
        ceilings = np.array([flow_class.ceiling for flow_class in those])
        return dict(zip(those, fill(ptr, slots[chosen], weights[chosen], ceilings, taken), strict=True))


def _number(flow_class: ClassFlows) -> int:
    return flow_class.number
