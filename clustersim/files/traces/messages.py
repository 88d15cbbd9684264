"""Messages between the stages of a pipeline, as both ends saw them.

A profile has a receive from when it was posted, which may be long before anybody needs it, and Gloo's sends and
receives until somebody waits for them, which may be at the end of the step. So a rank waits for a message only from the
end of its last work before the receive was over; a message is on its way from when both ends were posted; and how long
it took is known where its receiver was waiting by then.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from clustersim.core.op_infos import OpDetail
from clustersim.core.program import COMM_STREAM
from clustersim.core.timeline import OpInfo
from clustersim.files.traces.profiled import RankCollective, RankTrace, ScheduledAction

Key: TypeAlias = tuple[object, ...]
"""What a communication is called on every rank of its group."""
Row: TypeAlias = tuple[Key, OpInfo, int, float, float, float]


@dataclass(frozen=True)
class _MessageTimes:
    """``posted`` [s] by the later of its ends, ``came`` its receiver to wait, and ``over``; nan: not measured."""

    posted: float
    came: float
    over: float

    @property
    def took(self) -> float | None:
        """Seconds on its way; None where one end was not measured, or it may have arrived before anybody looked."""
        return self.over - self.posted if self.came <= self.posted <= self.over else None


def messages(traces: Sequence[RankTrace], zero: Mapping[int, float]) -> Iterator[Row]:
    """Both ends of every message; ``zero`` [s] is what a rank's clock shows at the beginning.

    Of each its op, its rank, and when [s] that came, when it could begin, and when it was over.
    """
    doing_now = [(t.rank, seen, seen.doing) for t in traces for seen in t.seen if seen.doing]
    place = _replicas({rank: doing.stage for rank, _, doing in doing_now})
    ends: defaultdict[Key, dict[str, tuple[int, RankCollective]]] = defaultdict(dict)
    for rank, seen, doing in doing_now:
        ends[_between(seen, doing, place[rank])][seen.kind] = rank, seen
    work = {t.rank: sorted(work.end for work in t.work) for t in traces}
    for rank, seen, doing in doing_now:
        message = _message(ends[_between(seen, doing, place[rank])], work, zero)
        key = (seen.kind, rank, seen.step, doing)
        info = _info(seen, doing, message)
        if seen.kind == "recv":
            start = (
                min(max(message.came, message.posted), message.over)
                if message.posted == message.posted
                else message.came
            )
            yield key, info, rank, message.came, start, message.over
        else:
            posted = message.posted if message.posted == message.posted else seen.start - zero[rank]
            yield key, info, rank, posted, posted, posted + (message.took or 0.0)


def _message(
    both: Mapping[str, tuple[int, RankCollective]], work: Mapping[int, list[float]], zero: Mapping[int, float]
) -> _MessageTimes:
    posted = max(seen.start - zero[rank] for rank, seen in both.values()) if len(both) == 2 else math.nan
    if "recv" not in both:
        return _MessageTimes(posted, math.nan, math.nan)
    rank, received = both["recv"]
    position = bisect.bisect_right(work[rank], received.end) - 1
    came = max(received.start, work[rank][position]) if position >= 0 else received.start
    return _MessageTimes(posted, came - zero[rank], received.end - zero[rank])


def _replicas(stage_of: Mapping[int, int]) -> dict[int, int]:
    """Each rank's place within its stage: equal places are one replica of the model."""
    count: defaultdict[int, int] = defaultdict(int)
    place = {}
    for rank in sorted(stage_of):
        place[rank] = count[stage_of[rank]]
        count[stage_of[rank]] += 1
    return place


def _between(seen: RankCollective, doing: ScheduledAction, replica: int) -> Key:
    return seen.step, doing.label.action, doing.label.microbatch, doing.boundary, replica


def _info(seen: RankCollective, doing: ScheduledAction, message: _MessageTimes) -> OpInfo:
    content = "activations" if doing.label.action == "F" else "gradients"
    detail: OpDetail = {"group_size": 2, "dtype": seen.dtype}
    if message.took is not None:
        detail |= {"transfer_s": message.took, "skew_s": message.posted - message.came}
    return OpInfo(
        f"{seen.kind} {content} {doing.label.microbatch}",
        seen.kind,
        f"{COMM_STREAM} pp",
        "communication",
        "communication",
        seen.nbytes,
        step=seen.step,
        detail=detail,
        label=doing.label,
        stage=doing.stage,
    )
