"""A schedule from a CSV file as PyTorch takes it (torchtitan's ``pipeline_parallel_schedule_csv``).

The format is that of ``_PipelineScheduleRuntime._load_csv`` with ``format="compute_only"`` (pytorch 2.13,
torch/distributed/pipelining/schedules.py): row r is pipeline rank r, a cell is an action as stage, kind and
micro-batch (``0F1``, ``1B2``, ``2I3``, ``3W0``; a pair ``(0F7;7B3)OVERLAP_F_B``), an empty cell is a step in which
the rank waits. Stages are global ones; which rank holds which follows from the rows and must be one of the
placements.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import csv_rows, text_of
from clustersim.training.schedules.base import Action, Orders, Placement, Schedule, rank_and_chunk, stage_of
from clustersim.training.schedules.playable import check

_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_NO_COMPUTE = re.compile(r"\d*(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


def from_csv(path: str | Path) -> Schedule:
    """A schedule whose orders are those of this file, for as many ranks, chunks and micro-batches as it has.

    Raises :class:`ScenarioError` naming the file, the row and the cell that cannot be read, or the rank and the action
    that cannot be played.
    """
    content = text_of(Path(path), ScenarioError)
    rows = [
        [_cell(cell.strip(), f"{path}: row {row}, cell {column}") for column, cell in enumerate(cells) if cell.strip()]
        for row, cells in enumerate(csv_rows(content, str(path), ScenarioError))
        if cells
    ]
    if not rows or not all(rows):
        raise ScenarioError(f"{path}: every pipeline rank needs a row with an action (at $.parallel.schedule_csv)")
    return _schedule(rows, path)


def _schedule(rows: Sequence[Sequence[Sequence[Action]]], path: str | Path) -> Schedule:
    p = len(rows)
    actions = [action for row in rows for slot in row for action in slot]
    m = 1 + max(action.microbatch for action in actions)
    stages = 1 + max(action.chunk for action in actions)
    placement = _placement(rows, stages, path)
    orders: Orders = tuple(
        tuple(tuple(a._replace(chunk=rank_and_chunk(placement, a.chunk, p)[1]) for a in slot) for slot in row)
        for row in rows
    )
    try:
        check(orders, placement, m, stages // p)
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}".replace("$.parallel.schedule)", "$.parallel.schedule_csv)")) from None

    def rule(given_p: int, chunks: int, given_m: int) -> Orders:
        """The orders of the file, for its own number of ranks only."""
        if given_p != p:
            raise ScenarioError(f"{path} is a schedule of {p} pipeline ranks, not {given_p} (at $.parallel.pp)")
        return orders

    return Schedule(
        f"the schedule of {path}",
        rule,
        placement=placement,
        chunks=stages // p,
        splits_backward=any(action.kind == "I" for action in actions),
        microbatches=lambda _, given, options: given == m,
        needs=f"exactly its {m}",
    )


def _cell(cell: str, cell_place: str) -> tuple[Action, ...]:
    """One action or a pair, with the *stage* in the place of the chunk."""
    pair = _PAIR.fullmatch(cell)
    parts = [_CELL.fullmatch(part.strip()) for part in (pair.groups() if pair else (cell,))]
    if _NO_COMPUTE.fullmatch(cell):
        raise ScenarioError(
            f"{cell_place}: {cell!r} computes nothing; leave such actions out, they follow from the order "
            "(at $.parallel.schedule_csv)"
        )
    actions = tuple(Action(part[2], int(part[3]), int(part[1])) for part in parts if part)
    if len(actions) < len(parts):
        raise ScenarioError(
            f"{cell_place}: cannot read {cell!r} as an action; write stage, kind and micro-batch like '0F1', '1B2', "
            f"'2I3', '3W0', or '(0F7;7B3)OVERLAP_F_B' (at $.parallel.schedule_csv)"
        )
    return actions


def _placement(rows: Sequence[Sequence[Sequence[Action]]], stages: int, path: str | Path) -> Placement:
    """The placement by which every row has its own stages."""
    p = len(rows)
    if stages % p:
        raise ScenarioError(f"{path}: {stages} stages do not divide over {p} rows (at $.parallel.schedule_csv)")
    chunks_held = [{action.chunk for slot in row for action in slot} for row in rows]
    tried: tuple[Placement, ...] = ("loop", "v")
    for placement in tried:
        if all(chunks_held[rank] <= {stage_of(placement, rank, c, p) for c in range(stages // p)} for rank in range(p)):
            return placement
    rank = next(r for r in range(p) if not chunks_held[r] <= {stage_of("loop", r, c, p) for c in range(stages // p)})
    loop, v = ([stage_of(kind, rank, chunk, p) for chunk in range(stages // p)] for kind in tried)
    raise ScenarioError(
        f"{path}: row {rank} has the stages {sorted(chunks_held[rank])}; right would be {loop} (going round) or {v} "
        f"(as a V) in all rows (at $.parallel.schedule_csv)"
    )
