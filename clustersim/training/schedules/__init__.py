"""Pipeline schedules: (stages, chunks, micro-batches) -> what each pipeline rank runs, in order. One file each.

:data:`SCHEDULES` has a row for each, :func:`schedule` finds one by any system's name for it, and its
:meth:`~clustersim.training.schedules.base.Schedule.order` gives the orders; :func:`from_csv` reads one from a file.
:func:`text` and :func:`parse` write and read an order, :func:`check` says whether it can be played, and :func:`times`
plays it with free transfers. Gradient accumulation is the schedule of one stage:

>>> [text(order) for order in schedule("1F1B").order(1, 1, 3)]
['F0 B0 F1 B1 F2 B2']
>>> [text(order) for order in schedule("1F1B").order(2, 1, 3)]
['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
"""

from __future__ import annotations

import re

from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.row_table import RowTable
from clustersim.training.schedules.base import (
    Action,
    Order,
    Orders,
    PassCosts,
    Schedule,
    ScheduleOption,
    Slot,
    rank_and_chunk,
    stage_of,
)
from clustersim.training.schedules.beside import beside
from clustersim.training.schedules.dualpipe import DUALPIPE
from clustersim.training.schedules.dualpipev import DUALPIPEV
from clustersim.training.schedules.gpipe import GPIPE
from clustersim.training.schedules.interleaved import INTERLEAVED
from clustersim.training.schedules.interleaved_zero_bubble import INTERLEAVED_ZERO_BUBBLE
from clustersim.training.schedules.looped_bfs import LOOPED_BFS
from clustersim.training.schedules.naive import NAIVE
from clustersim.training.schedules.notation import text
from clustersim.training.schedules.one_f_one_b import ONE_F_ONE_B
from clustersim.training.schedules.pipedream import PIPEDREAM, PIPEDREAM_2BW
from clustersim.training.schedules.play import ScheduleTimes, times
from clustersim.training.schedules.playable import check
from clustersim.training.schedules.torch_csv import from_csv
from clustersim.training.schedules.v_pattern import V_HALF, V_MIN
from clustersim.training.schedules.zbv import ZBV
from clustersim.training.schedules.zbv_torch import ZBV_TORCH
from clustersim.training.schedules.zero_bubble import ZB_2P, ZB_H1

_ROWS = (
    NAIVE,
    GPIPE,
    ONE_F_ONE_B,
    INTERLEAVED,
    LOOPED_BFS,
    INTERLEAVED_ZERO_BUBBLE,
    ZB_H1,
    ZB_2P,
    ZBV,
    ZBV_TORCH,
    V_HALF,
    V_MIN,
    DUALPIPE,
    DUALPIPEV,
    PIPEDREAM,
    PIPEDREAM_2BW,
)


def _bare(name: str) -> str:
    """A name without what systems write differently: case, hyphens, underscores."""
    return re.sub(r"[-_\s]", "", name).lower()


def _bare_names(row: Schedule) -> dict[str, None]:
    """Each name that a schedule is found by, once."""
    return dict.fromkeys(_bare(name) for name in (*row.aliases, row.name))


SCHEDULES = RowTable("clustersim.schedules", "schedule", Schedule, _ROWS, names=_bare_names)
_BY_BARE_NAME = {_bare(name): row for row in _ROWS for name in (*row.aliases, row.name)}


def schedule(name: str) -> Schedule:
    """The schedule of this name or of another system's name for it. Raises :class:`ScenarioError` with the nearest.

    >>> schedule("ZB-H1").name, schedule("Interleaved1F1B").name, schedule("ZBVZeroBubble").name
    ('zb_h1', 'interleaved_1f1b', 'zbv_torch')
    """
    bare = _bare(name)
    if bare in _BY_BARE_NAME:
        return _BY_BARE_NAME[bare]
    if name in SCHEDULES:  # one of another package, by its own name: no other is imported
        return SCHEDULES[name]
    for row in SCHEDULES.values():
        if bare in _bare_names(row):
            return row
    schedule_names = [word for row in SCHEDULES.values() for word in (row.name, *row.aliases)]
    raise ScenarioError(f"no pipeline schedule {name!r}; {nearest(name, schedule_names)} (at $.parallel.schedule)")


__all__ = [
    "SCHEDULES",
    "Action",
    "Order",
    "Orders",
    "PassCosts",
    "Schedule",
    "ScheduleOption",
    "ScheduleTimes",
    "Slot",
    "beside",
    "check",
    "from_csv",
    "rank_and_chunk",
    "schedule",
    "stage_of",
    "text",
    "times",
]
