"""What links allow each op's transfers, alone on them: those that a knob widens, and the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from clustersim.core.arrays import Bools, Ints
from clustersim.core.timeline import LinkUse, Timeline
from clustersim.explain.knobs import KNOB_NAMED, WIDER


class TransferRates:
    """What links allow each op's transfers: of several groups, the most favourable."""

    def __init__(self, timeline: Timeline) -> None:
        use = self.use = timeline.links
        self._sets: list[tuple[int, ...]] = [()]
        self._set_of = np.zeros(len(timeline.ops), dtype=np.int64)
        if use is not None and len(use.transfer_op):
            n = len(use.loads) + 1
            pairs = np.unique(use.transfer_op.astype(np.int64) * n + use.transfer_load)
            op, load = pairs // n, pairs % n
            first = np.flatnonzero(np.diff(op, prepend=-1))
            marks = np.random.default_rng(0).integers(2**63, size=n, dtype=np.uint64)
            _, place, alike = np.unique(np.add.reduceat(marks[load], first), return_index=True, return_inverse=True)
            ends = [*first[1:].tolist(), len(op)]
            self._sets += [tuple(load[first[k] : ends[k]].tolist()) for k in place.tolist()]
            self._set_of[op[first]] = alike + 1
        if use is not None:
            # Of functions: a cache of a method would hold this object, and the run with it.
            self._allowed = cache(partial(_allowed, use, cache(partial(_wider, use))))

    def set_of(self, ops: Ints) -> Ints:
        """(n,) int, equal for ops of the same loads."""
        return self._set_of[ops]

    def loads_of(self, op: int) -> tuple[int, ...]:
        """Loads of an op's transfers, ascending."""
        return self._sets[int(self._set_of[op])]

    def of(self, loads: tuple[int, ...], knob: str) -> tuple[float, float]:
        """Payload [bytes/s] that the links a knob widens allow, and all others; inf where there are none."""
        if self.use is None or not loads:
            return np.inf, np.inf
        allowed = [self._allowed(load, knob if knob in WIDER else "") for load in loads]
        return max(wide for wide, _ in allowed), max(narrow for _, narrow in allowed)


def _allowed(use: LinkUse, widened: Callable[[str], Bools], load: int, knob: str) -> tuple[float, float]:
    """Payload [bytes/s] that the links of a load allow: those a knob widens, and the others."""
    if not len(use.link_kinds):
        return np.inf, np.inf
    links, weights = use.loads[load]
    allowed = use.link_bandwidth[links] / weights
    chosen = widened(knob)[links] if knob else np.zeros(len(links), dtype=np.bool_)
    return float(allowed[chosen].min(initial=np.inf)), float(allowed[~chosen].min(initial=np.inf))


def _wider(use: LinkUse, knob: str) -> Bools:
    """(links,) bool: those a knob widens, of the links that anything crosses."""
    mask = np.zeros(len(use.link_bandwidth), dtype=np.bool_)
    crossed = np.unique(np.concatenate([links for links, _ in use.loads]))
    links = [i for i in crossed.tolist() if use.link_kinds[i] in KNOB_NAMED[knob].link_kinds]
    mask[links] = [WIDER[knob](use.link_kinds[i], use.link_names[i]) for i in links]
    return mask
