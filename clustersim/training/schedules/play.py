"""A schedule played with given durations and free transfers: when every action starts and ends.

The closed little world of the schedules' papers. It gives what their tables state (makespan, bubble, skew), serves as a
lower bound of a real step, and finds orders that cannot run. Messages, overlap and contention are the engine's.

An action waits for the action before it on its rank and for its input:

* F of stage s for F of stage s-1; B or I of stage s for B or I of stage s+1, of the last stage for its own F;
* W for I of its own chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import msgspec

from clustersim.core.errors import ScenarioError
from clustersim.training.schedules.base import (
    UNIT,
    Action,
    Orders,
    PassCosts,
    Slot,
    rank_and_chunk,
    stage_count,
    stage_of,
)
from clustersim.training.schedules.notation import text

Span = tuple[float, float]
"""Start and end of an action, in the unit of the durations."""
PairCost = Callable[[float, float], float]
"""How long two actions take beside each other, from what each takes alone."""
Place = tuple[str, int, int]
"""F, B or W (I counts as B, which waits for the same and is waited for by the same), rank and chunk."""

MAKES = {"F": "F", "B": "B", "I": "B", "W": "W"}


class ScheduleTimes(msgspec.Struct, frozen=True):
    """When each action ran: ``spans[rank][k]`` is of ``actions[rank][k]``, the rank's k-th, pairs taken apart.

    ``busy``: for how long each rank computed.
    """

    actions: tuple[tuple[Action, ...], ...]
    spans: tuple[tuple[Span, ...], ...]
    busy: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """From 0, when every rank may start, until the last rank ends."""
        return max(rank[-1][1] for rank in self.spans)


def times(
    orders: Orders, placement: str, durations: PassCosts | Sequence[PassCosts] = UNIT, pair: PairCost | None = None
) -> ScheduleTimes:
    """When everything ends if every rank runs its list in order, each action as soon as its input is there.

    Parameters
    ----------
    durations : of every chunk, or of each global stage (:func:`~clustersim.training.schedules.base.stage_of`).
    pair : None runs the two actions of a pair one after the other as they are written, each as soon as it may; a
        function makes a pair one thing that starts when both inputs are there and takes ``pair(first, second)``:
        ``operator.add`` if nothing is gained by running them beside each other, ``max`` if everything is.

    Raises :class:`ScenarioError` where ranks wait for each other forever, naming one and the action it never gets to.
    """
    p = len(orders)
    chunks = chunk_count(orders)
    costs = _of_each(durations, stage_count(placement, p, chunks))
    waits = waits_for(placement, p, chunks)
    clocks = [0.0] * p
    busy = [0.0] * p
    ended: dict[tuple[Place, int], float] = {}
    spans: list[list[Span]] = [[] for _ in range(p)]
    for rank, unit in turns(orders, waits, apart=pair is None):
        lengths = [costs[stage_of(placement, rank, action.chunk, p)].of(action.kind) for action in unit]
        length = pair(*lengths) if pair is not None and len(unit) == 2 else lengths[0]
        start = max([clocks[rank], *(ended[source] for source in sources(rank, unit, waits))])
        clocks[rank] = start + length
        busy[rank] += length
        for action in unit:
            spans[rank].append((start, clocks[rank]))
            ended[(MAKES[action.kind], rank, action.chunk), action.microbatch] = clocks[rank]
    return ScheduleTimes(tuple(tuple(chain(*order)) for order in orders), tuple(map(tuple, spans)), tuple(busy))


def _of_each(durations: PassCosts | Sequence[PassCosts], stages: int) -> Sequence[PassCosts]:
    costs = [durations] * stages if isinstance(durations, PassCosts) else durations
    if len(costs) != stages:
        raise ScenarioError(f"{len(costs)} durations for {stages} stages; give one Costs for each stage")
    return costs


def chunk_count(orders: Orders) -> int:
    """Chunks on each rank of these orders."""
    return 1 + max(action.chunk for order in orders for slot in order for action in slot)


def waits_for(placement: str, p: int, chunks: int) -> dict[Place, Place | None]:
    """For each pass of each chunk the pass of the same micro-batch that it needs; None for the first forward."""
    last = stage_count(placement, p, chunks) - 1
    table: dict[Place, Place | None] = {}
    for rank in range(p):
        for chunk in range(chunks):
            stage = stage_of(placement, rank, chunk, p)
            before = ("F", *rank_and_chunk(placement, stage - 1, p, chunk)) if stage > 0 else None
            after = ("B", *rank_and_chunk(placement, stage + 1, p, chunk)) if stage < last else ("F", rank, chunk)
            table |= {("F", rank, chunk): before, ("B", rank, chunk): after, ("W", rank, chunk): ("B", rank, chunk)}
    return table


def sources(rank: int, unit: Slot, waits: dict[Place, Place | None]) -> list[tuple[Place, int]]:
    """The passes, with their micro-batches, that must have ended before these actions of a rank may start."""
    origins = ((waits[MAKES[action.kind], rank, action.chunk], action.microbatch) for action in unit)
    return [(place, microbatch) for place, microbatch in origins if place is not None]


def turns(orders: Orders, waits: dict[Place, Place | None], apart: bool = True) -> Iterator[tuple[int, Slot]]:
    """Every action with its rank, each after what it waits for and in its rank's order; pairs taken apart or whole.

    Which order it is among independent actions depends on no duration. Raises :class:`ScenarioError` on a deadlock.
    """
    lists = [[(action,) for slot in order for action in slot] if apart else list(order) for order in orders]
    done: set[tuple[Place, int]] = set()
    waiting: dict[tuple[Place, int], list[int]] = {}
    next_unit = [0] * len(lists)
    awake = list(range(len(lists)))
    while awake:
        rank = awake.pop()
        while next_unit[rank] < len(lists[rank]):
            unit = lists[rank][next_unit[rank]]
            missing = next((source for source in sources(rank, unit, waits) if source not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, unit
            next_unit[rank] += 1
            for action in unit:
                result = (MAKES[action.kind], rank, action.chunk), action.microbatch
                done.add(result)
                awake += waiting.pop(result, ())
    for rank, position in enumerate(next_unit):
        if position < len(lists[rank]):
            raise ScenarioError(_stuck(rank, lists[rank][position], next(s for s, r in waiting.items() if rank in r)))


def _stuck(rank: int, unit: Slot, missing: tuple[Place, int]) -> str:
    (kind, stuck_rank, chunk), microbatch = missing
    return (
        f"the order deadlocks: pipeline rank {rank} never gets to {text((unit,))}, which waits for "
        f"{kind} of micro-batch {microbatch}, chunk {chunk}, on rank {stuck_rank} (at $.parallel.schedule)"
    )
