"""What waits for what, as an execution trace tells it by the memory that operators touch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from clustersim.traces.profiled import RankTrace, Seen, Work

LATE = 50e-6
"""Seconds by which clocks of a process and of its device may differ."""


def needs(trace: RankTrace) -> Iterator[tuple[Work | Seen, Work | Seen]]:
    """Who waits for whom: a collective for what each stream did last with its memory, and a stream, once, for a
    collective whose memory it touches. What had not ended by then was not waited for: numbers of memory are used again.
    """
    both: list[Work | Seen] = [*trace.work, *trace.seen]
    items = [(one.told, i, one) for i, one in enumerate(both) if one.told]
    worked: defaultdict[int, dict[str, Work]] = defaultdict(dict)
    met: dict[int, Seen] = {}
    known: defaultdict[str, set[int]] = defaultdict(set)
    for told, _, one in sorted(items, key=lambda item: (item[0].order, item[1])):
        found: dict[object, Work | Seen] = {}
        for storage in sorted(told.storages):
            if isinstance(one, Seen):
                for stream, work in worked[storage].items():
                    found[stream] = max(work, found.get(stream, work), key=_order)
                met[storage] = one
            else:
                if storage in met and id(met[storage]) not in known[one.stream]:
                    found[id(met[storage])] = met[storage]
                worked[storage][one.stream] = one
        for other in found.values():
            if other.end <= one.start + LATE:
                known[one.stream if isinstance(one, Work) else ""].add(id(other))
                yield one, other


def _order(one: Work | Seen) -> int:
    return one.told.order if one.told else -1


def longest(trace: RankTrace) -> dict[int, Work]:
    """The longest kernel of each operator, by its order: FLOPs and bytes are the operator's, not each kernel's."""
    found: dict[int, Work] = {}
    for work in trace.work:
        if work.told:
            found[work.told.order] = max(found.get(work.told.order, work), work, key=lambda w: w.end - w.start)
    return found
