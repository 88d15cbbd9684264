"""Pipeline schedules: (stages, chunks, micro-batches) -> what each pipeline rank runs, in order. One file each.

:data:`SCHEDULES` has a row for each, :func:`schedule` finds one by any system's name for it, and its
:meth:`~clustersim.schedules.base.Schedule.order` gives the orders. Gradient accumulation is the schedule of one stage:

>>> from clustersim.schedules.text import text
>>> [text(order) for order in schedule("1F1B").order(1, 1, 3)]
['F0 B0 F1 B1 F2 B2']
>>> [text(order) for order in schedule("1F1B").order(2, 1, 3)]
['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
"""

from clustersim.schedules.base import Action, Costs, Option, Order, Orders, Schedule, Slot, rank_and_chunk, stage_of
from clustersim.schedules.registry import SCHEDULES, schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Option",
    "Order",
    "Orders",
    "Schedule",
    "Slot",
    "rank_and_chunk",
    "schedule",
    "stage_of",
]
