"""What happened inside stretches, laid out op by op once the run is over: rows and blocks, and transfers on links."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.blocks import Block
from clustersim.core.blocks import Column as BlockColumn
from clustersim.engine.columns import highest, lowest
from clustersim.engine.inside import StretchPlans, StretchTimes
from clustersim.engine.order import OpTask
from clustersim.engine.pairs import OpKey
from clustersim.engine.planning import GroupPlans
from clustersim.engine.sites import Site

Segments = tuple[Ints, Floats, Floats, Floats]
"""Transfer, start, end and rate."""


def begun(task: OpTask) -> Floats:
    """(groups,), or (1,) where all agree: when a stretch began [s]."""
    start = task.start
    if not isinstance(start, np.ndarray):
        return np.array([start])
    return start[task.meets[0][1].leaders] if len(start) == task.n else start


def inside_of(task: OpTask) -> StretchTimes:
    """What happens inside a stretch, which its site is told where it hangs on when each rank began it."""
    site = task.meets[0][0]
    plans = cast(StretchPlans, site.plans)
    if not plans.begun_apart:
        return cast(StretchTimes, plans.inside)
    if site.played is None:
        site.played = plans.begun_apart.plans(plans, plans.begun_apart.of(task.ready, task.start, None))
    return cast(StretchTimes, cast(StretchPlans, site.played).inside)


def agreed(task: OpTask, start: Floats) -> tuple[Floats, Floats, Floats] | None:
    """Ready, start and end of the ops of a stretch, (ops,) each [s]; None where ranks differ."""
    inside = inside_of(task)
    if isinstance(task.ready, np.ndarray) or len(start) > 1 or inside.times.shape[1] > 1:
        return None
    times = start + inside.times[np.array(inside.which), 0].T
    times[0, 0] = task.ready
    if inside.begun_apart:
        times[1, 0] = task.ready
    return times[0], times[1], times[2]


def blocks(task: OpTask, start: Floats, first: int) -> Iterator[Block]:
    """The ops of a stretch; ``first`` is the row of the first. What they are counted from the begin of the stretch is
    the same arrays wherever it is played again."""
    inside = inside_of(task)
    side = task.meets[0][1]
    base = _column(start, side.meeting_of if len(start) > 1 else None)
    facts = (
        (inside.low + start).min(axis=1).tolist(),
        (inside.high + start).max(axis=1).tolist(),
        (inside.mean + start.mean()).tolist(),
    )
    made = [
        BlockColumn(values, None, low, high, mean, base)
        if low < high
        else BlockColumn(np.array([low]), None, low, high, low)
        for values, low, high, mean in zip(inside.rows, *facts, strict=True)
    ]
    ranks = task.role.ranks
    for k, (ready, began, ended) in enumerate(inside.which):
        came = made[ready] if k else _column(np.atleast_1d(task.ready), None)
        started = came if inside.begun_apart and not k else made[began]
        yield Block(first + k, ranks, (came, started, made[ended]))


def _column(values: Floats, of: Ints | None) -> BlockColumn:
    low, high = lowest(values), highest(values)
    if low == high:
        return BlockColumn(values[:1].copy(), None, low, high, low)
    return BlockColumn(values, of, low, high, float(values.mean()))


class LaidTransfers(NamedTuple):
    """What was moved, with stretches told by their collectives.

    owners : an op that is played and the place inside it, if it is a stretch, and counts : how many meetings it has.
    meeting : of each transfer the meeting, in the order of these. load : its load. more : flows of stretches.
    """

    segments: Segments
    owners: list[tuple[OpKey, int]]
    counts: list[int]
    meeting: Ints | slice
    load: Ints
    more: int


def transfers(
    sites: tuple[Site, ...], segments: Segments, meeting: Ints | slice, load: Ints, start: Floats
) -> LaidTransfers:
    """``segments``, ``meeting``, ``load`` : of what was played. ``start`` : when each meeting began [s]."""
    owners: list[tuple[OpKey, int]] = []
    counts: list[int] = []
    for site in sites:
        inside = _inside(site)
        places = inside.collectives if inside else (0,)
        owners += [(site.sides[0].key, place) for place in places]
        counts += [len(site.ranks)] * len(places)
    laid = [site for site in sites if _inside(site)]
    if not laid:
        return LaidTransfers(segments, owners, counts, meeting, load, 0)
    size = np.array([len(site.ranks) for site in sites])
    times = np.array([len(inside.collectives) if (inside := _inside(site)) else 1 for site in sites])
    first = np.cumsum(size * times) - size * times
    shift = np.repeat(first - (np.cumsum(size) - size), size)
    parts: list[Segments] = [(segments[0] + shift[segments[0]], *segments[1:])]
    first_of = {site.first: number for site, number in zip(sites, first.tolist(), strict=True)}
    alike: dict[int, list[Site]] = {}
    for site in laid:
        alike.setdefault(id(site.plans), []).append(site)
    for some in alike.values():
        parts.append(_segments(some, [first_of[site.first] for site in some], start))
    columns_of = [[*column] for column in zip(*parts, strict=True)]
    del parts  # they are as long as a run: each column goes as soon as it is sorted
    more = sum(map(len, columns_of[0])) - len(segments[0])
    order = np.argsort(np.concatenate(columns_of[0]), kind="stable")
    ids, began, ended, rate = (np.concatenate(columns_of.pop(0))[order] for _ in range(4))
    of_each = [each.load for site in sites for each in _plans(site)]
    return LaidTransfers((ids, began, ended, rate), owners, counts, slice(None), np.concatenate(of_each), more)


def _plans(site: Site) -> tuple[GroupPlans, ...]:
    inside = _inside(site)
    return inside.plans if inside else (site.plans,)


def _inside(site: Site) -> StretchTimes | None:
    return site.plans.inside if isinstance(site.plans, StretchPlans) else None


def _segments(sites: list[Site], first: list[int], start: Floats) -> Segments:
    """What the collectives of stretches of one kind moved, each at the rate it has alone."""
    inside = cast(StretchTimes, _inside(sites[0]))
    shape = (len(sites), *inside.begin.shape)
    begun_at = np.stack([start[site.first : site.first + shape[2]] for site in sites])[:, None]
    begin, end = begun_at + inside.begin, begun_at + inside.end
    ids = np.array(first)[:, None, None] + np.arange(shape[1] * shape[2]).reshape(shape[1:])
    nbytes = np.stack([each.nbytes for each in inside.plans])
    moves = (nbytes > 0) & (end > begin)
    rate = np.broadcast_to(np.stack([each.alone for each in inside.plans]), shape)
    return ids[moves], begin[moves], end[moves], rate[moves]
