"""Pipeline schedules: (stages, chunks, micro-batches) -> what each pipeline rank runs, in order. One file each.

:data:`SCHEDULES` has a row for each, :func:`schedule` finds one by any system's name for it, and its
:meth:`~clustersim.schedules.base.Schedule.order` gives the orders; :func:`from_csv` reads one from a file. :func:`text`
and :func:`parse` write and read an order, :func:`check` says whether it can be played, and :func:`times` plays it with
free transfers. Gradient accumulation is the schedule of one stage:

>>> [text(order) for order in schedule("1F1B").order(1, 1, 3)]
['F0 B0 F1 B1 F2 B2']
>>> [text(order) for order in schedule("1F1B").order(2, 1, 3)]
['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
"""

from clustersim.schedules.base import Action, Costs, Option, Order, Orders, Schedule, Slot, rank_and_chunk, stage_of
from clustersim.schedules.beside import beside
from clustersim.schedules.notation import parse, text
from clustersim.schedules.play import Times, times
from clustersim.schedules.playable import check
from clustersim.schedules.registry import SCHEDULES, schedule
from clustersim.schedules.torch_csv import from_csv

__all__ = [
    "SCHEDULES", "Action", "Costs", "Option", "Order", "Orders", "Schedule", "Slot", "Times", "beside", "check",
    "from_csv", "parse", "rank_and_chunk", "schedule", "stage_of", "text", "times",
]  # fmt: skip
