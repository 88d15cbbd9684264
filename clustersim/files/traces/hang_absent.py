"""What dumps say of a job where none of their calls is waited in: what they cover, and what they do not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from clustersim.files.traces.recorded_calls import Dump, rank_list

ALL_ENDED = "no rank is behind: every group's ranks called the same collectives, and all of them ended"
NO_CALLS = "the dumps hold no calls, so nothing of them tells who waits for whom"


def nothing_waits(dumps: Mapping[int, Dump]) -> Iterator[str]:
    """Lines on dumps without a fault: whether all ranks called as much, and of which ranks there is no dump."""
    if not any(dump.calls or dump.messages for dump in dumps.values()):
        yield NO_CALLS
    else:
        uneven = list(_uneven(dumps))
        yield from uneven or [ALL_ENDED]
    members = {rank for dump in dumps.values() for ranks in dump.members.values() for rank in ranks}
    if absent := sorted(members - dumps.keys()):
        yield f"no dump of {rank_list(absent)}, of which nothing is known: look there, or give the dumps of all ranks"


def _uneven(dumps: Mapping[int, Dump]) -> Iterator[str]:
    """Groups whose ranks ended different last collectives: they are not of one moment, or a rank has not come back."""
    last: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for rank, dump in dumps.items():
        for call in dump.calls:
            last[call.group][rank] = max(call.seq, last[call.group].get(rank, 0))
    for group, by_rank in last.items():
        most = max(by_rank.values())
        behind = sorted(rank for rank, seq in by_rank.items() if seq < most)
        if behind:
            fewest = min(by_rank.values())
            yield (
                f"group {group!r}: all recorded calls ended, and the last of {rank_list(behind)} is {fewest} where "
                f"others' is {most}: look there, unless the dumps were taken at different times"
            )
