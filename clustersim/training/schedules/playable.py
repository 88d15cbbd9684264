"""Whether orders can be played at all: every pass exactly once, in a possible order on its rank, without a deadlock."""

from __future__ import annotations

from collections.abc import Iterator

from clustersim.core.errors import ScenarioError
from clustersim.training.schedules.base import Action, Order, Orders, Schedule
from clustersim.training.schedules.notation import text
from clustersim.training.schedules.play import chunk_count, turns, waits_for

_KINDS = "FBIW"


def check(orders: Orders, placement: str, microbatches: int, chunks: int | None = None) -> None:
    """Raise :class:`ScenarioError` unless the orders run all of ``microbatches`` on all chunks of all ranks.

    Every rank runs each micro-batch of each chunk forward once, then either B once, or I and after it W. ("both": each
    chunk sees half of the micro-batches, numbered from 0.) No pair holds two actions of one kind of pass. No rank waits
    for itself around other ranks. The error names the rank and the action.
    """
    per_order = microbatches // 2 if placement == "both" else microbatches
    count = chunk_count(orders) if chunks is None else chunks
    for rank, order in enumerate(orders):
        for problem in _problems(order, per_order, count):
            raise ScenarioError(f"pipeline rank {rank} {problem} (at $.parallel.schedule)")
    for _ in turns(orders, waits_for(placement, len(orders), count), apart=False):
        pass


SHIPPED = "clustersim."
"""Begins the modules whose orders tests hold to :func:`check`: to look at them in each run would take its time."""


def check_own(row: Schedule, orders: Orders, ranks: int, microbatches: int, chunks: int) -> None:
    """Check the orders of a schedule that this package does not have, which nobody else may have checked.

    Parameters
    ----------
    row : the schedule. orders : what it gave for ``ranks``, ``chunks`` and ``microbatches``, those of all steps where
        it is asynchronous.

    Raises :class:`ScenarioError` where they cannot be played, or leave something out.
    """
    if getattr(row.rule, "__module__", "").startswith(SHIPPED):
        return
    whole = isinstance(orders, tuple | list) and len(orders) == ranks
    if not whole or not all(isinstance(order, tuple | list) for order in orders):
        shown = f"{len(orders)} orders" if isinstance(orders, tuple | list) else repr(orders)
        raise ScenarioError(
            f"schedule {row.name!r} gives {shown} for {ranks} pipeline ranks; it is a tuple of one order a rank, and "
            "an order a tuple of places (at $.parallel.schedule)"
        )
    check(orders, row.placement, microbatches, chunks)


def _problems(order: Order, microbatches: int, chunks: int) -> Iterator[str]:
    """What is wrong on one rank, in words that follow its number."""
    seen: set[Action] = set()
    for place, slot in enumerate(order):
        if not slot or not all(isinstance(action, Action) for action in slot):
            yield f"has {slot!r} in place {place}; a place is a tuple of one Action, or of two that run together"
        if sorted(action.kind == "F" for action in slot) not in ([False], [True], [False, True]):
            yield f"runs {text((slot,))} together; a pair is one forward and one backward"
        for action in slot:
            yield from _problem(action, seen, microbatches, chunks)
            seen.add(action)
    for chunk in range(chunks):
        for microbatch in range(microbatches):
            missing = [kind for kind in "FBIW" if Action(kind, microbatch, chunk) not in seen]
            if "F" in missing or ("B" in missing and len(missing) > 1):
                wanted = "F" if "F" in missing else ("B" if "I" in missing and "W" in missing else missing[-1])
                yield f"never runs {wanted} of micro-batch {microbatch}, chunk {chunk}"


def _problem(action: Action, seen: set[Action], microbatches: int, chunks: int) -> Iterator[str]:
    kind, microbatch, chunk = action
    action_text = f"{kind} of micro-batch {microbatch}, chunk {chunk}"
    if kind not in _KINDS or not (0 <= microbatch < microbatches and 0 <= chunk < chunks):
        yield f"runs {action_text}, which is none of {microbatches} micro-batches of {chunks} chunks"
    before = {"F": "", "B": "F", "I": "F", "W": "I"}[kind]
    if before and Action(before, microbatch, chunk) not in seen:
        yield f"runs {action_text} before its {before}"
    against = {"F": "F", "B": "BI", "I": "BI", "W": "W"}[kind]
    if any(Action(opposite, microbatch, chunk) in seen for opposite in against):
        yield f"runs {action_text} a second time"
