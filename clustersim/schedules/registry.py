"""All schedules by name. A new one is one file and one row; the contract suite picks it up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from clustersim.errors import ScenarioError, nearest
from clustersim.schedules.base import Schedule
from clustersim.schedules.dualpipe import DUALPIPE
from clustersim.schedules.dualpipev import DUALPIPEV
from clustersim.schedules.gpipe import GPIPE
from clustersim.schedules.interleaved import INTERLEAVED
from clustersim.schedules.interleaved_zero_bubble import INTERLEAVED_ZERO_BUBBLE
from clustersim.schedules.looped_bfs import LOOPED_BFS
from clustersim.schedules.naive import NAIVE
from clustersim.schedules.one_f_one_b import ONE_F_ONE_B
from clustersim.schedules.pipedream import PIPEDREAM, PIPEDREAM_2BW
from clustersim.schedules.v_pattern import V_HALF, V_MIN
from clustersim.schedules.zbv import ZBV
from clustersim.schedules.zbv_torch import ZBV_TORCH
from clustersim.schedules.zero_bubble import ZB_2P, ZB_H1

_ROWS = (
    NAIVE, GPIPE, ONE_F_ONE_B, INTERLEAVED, LOOPED_BFS, INTERLEAVED_ZERO_BUBBLE, ZB_H1, ZB_2P, ZBV, ZBV_TORCH,
    V_HALF, V_MIN, DUALPIPE, DUALPIPEV, PIPEDREAM, PIPEDREAM_2BW,
)  # fmt: skip

SCHEDULES: Mapping[str, Schedule] = MappingProxyType({row.name: row for row in _ROWS})


def _bare(name: str) -> str:
    """A name without what systems write differently: case, hyphens, underscores."""
    return re.sub(r"[-_\s]", "", name).lower()


_BY_BARE_NAME = {_bare(name): row for row in _ROWS for name in (*row.aliases, row.name)}


def schedule(name: str) -> Schedule:
    """The schedule of this name or of another system's name for it. Raises :class:`ScenarioError` with the nearest.

    >>> schedule("ZB-H1").name, schedule("Interleaved1F1B").name, schedule("ZBVZeroBubble").name
    ('zb_h1', 'interleaved_1f1b', 'zbv_torch')
    """
    try:
        return _BY_BARE_NAME[_bare(name)]
    except KeyError:
        known = [*SCHEDULES, *(alias for row in _ROWS for alias in row.aliases)]
        raise ScenarioError(f"no pipeline schedule {name!r}; {nearest(name, known)} (at $.parallel.schedule)") from None
