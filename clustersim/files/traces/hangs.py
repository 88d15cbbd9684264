"""What ranks called last, and so why they wait: who is missing, who is behind, what differs, or nobody at all.

Of a process group each rank counts what it called: who has not called what others have is missing, and who called
something else there does not match. A call is scheduled, then started by the GPU, then completed; where all called the
same, who has not started is behind on its own stream, and where all started and none ended no call is missing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from clustersim.core.errors import few
from clustersim.core.texts import short
from clustersim.core.units import format_time
from clustersim.files.traces.told import CollectiveFault, HangReport

SHOWN = 8
"""Ranks named in a line."""
LISTED = 64
"""Ranks whose last call is listed."""
LATE = 5.0
"""Seconds by which one rank calls later than another before it is told; clocks of machines agree better than that."""


@dataclass(frozen=True)
class Call:
    """A collective as a rank called it.

    seq : counts within its group. name : empty where a dump does not tell. sizes : of inputs, in words.
    inputs, outputs : elements of all tensors.
    started : None where the backend does not tell. where : the job's own line of code.
    created : float [s]. timeout : float [s], 0 where not told.
    """

    group: str
    seq: int
    name: str
    sizes: str
    dtype: str
    done: bool
    where: str
    started: bool | None = None
    inputs: int = 0
    outputs: int = 0
    created: float = 0.0
    timeout: float = 0.0

    @property
    def kind(self) -> str:
        """What it is called, without the backend."""
        return self.name.rpartition(":")[2]

    @property
    def elements(self) -> int:
        """Of a message, whose one end has inputs and the other outputs, or both the same."""
        return max(self.inputs, self.outputs)


@dataclass(frozen=True)
class Message:
    """A ``send`` to or a ``recv`` from ``peer``, by its place in the group."""

    call: Call
    way: str
    peer: int


@dataclass(frozen=True)
class Dump:
    """What one rank recorded; ``members`` of groups by name; ``forgot`` : whether its oldest calls are overwritten."""

    calls: tuple[Call, ...]
    messages: tuple[Message, ...] = ()
    members: Mapping[str, frozenset[int]] = field(default_factory=dict)
    forgot: bool = False


def explained(source: str, dumps: Mapping[int, Dump], skipped: Mapping[str, int]) -> HangReport:
    """Why the ranks of these dumps wait: the causes first, then what follows from them, then each rank's last call."""
    waits = _waits(dumps)
    faults = [*_group_faults(dumps), *_message_faults(dumps)]
    faults.sort(key=lambda fault: _rootedness(fault, waits))
    lines: list[str] = []
    for fault in faults:
        lines += [fault.text, *([fault.advice] if fault.advice else [])]
    lines += _circle(faults, waits)
    if not faults:
        lines = ["no rank is behind: every group's ranks called the same collectives, and all of them ended"]
    last = {rank: dump.calls[-1] for rank, dump in sorted(dumps.items()) if dump.calls}
    for rank in list(last)[:LISTED]:
        lines.append(f"rank {rank}: {len(dumps[rank].calls)} calls recorded, last {_described(last[rank])}")
    if len(last) > LISTED:
        lines.append(f"... and {len(last) - LISTED} more ranks")
    return HangReport(source, lines, sorted(dumps), faults, skipped)


def _waits(dumps: Mapping[int, Dump]) -> dict[int, Call]:
    """The first call of each rank that has not ended."""
    first: dict[int, Call] = {}
    for rank, dump in dumps.items():
        calls = [*dump.calls, *(message.call for message in dump.messages)]
        pending = [call for call in calls if not call.done]
        if pending:
            first[rank] = min(pending, key=lambda call: call.created)
    return first


_ORDER = ("no_dump", "never_called", "no_peer", "differs", "not_started", "none_started", "not_ended", "stuck_together")


def _rootedness(fault: CollectiveFault, waits: Mapping[int, Call]) -> tuple[bool, int]:
    """Causes before consequences: a rank that is missing here because it waits elsewhere is no cause."""
    elsewhere = [rank in waits and waits[rank].group != fault.group for rank in fault.look_at]
    return bool(elsewhere) and all(elsewhere), _ORDER.index(fault.cause)


def _circle(faults: Iterable[CollectiveFault], waits: Mapping[int, Call]) -> Iterator[str]:
    """Said where ranks wait for each other in different groups."""
    missing_ones = [fault for fault in faults if fault.missing]
    if len({fault.group for fault in missing_ones}) < 2:
        return
    if all(rank in waits for fault in missing_ones for rank in fault.missing):
        groups = ", ".join(repr(fault.group) for fault in missing_ones)
        yield f"the ranks wait for each other in a circle: groups {groups} are called in different orders"


# ---- collectives -----------------------------------------------------------------------------------------------------


def _group_faults(dumps: Mapping[int, Dump]) -> Iterator[CollectiveFault]:
    """Of each group, the first collective that did not end everywhere, or that differs between its ranks."""
    by_group: defaultdict[str, defaultdict[int, dict[int, Call]]] = defaultdict(lambda: defaultdict(dict))
    for rank, dump in dumps.items():
        for call in dump.calls:
            by_group[call.group][call.seq][rank] = call
    for group, at in by_group.items():
        everybody = _everybody(group, at, dumps)
        fault = next((f for seq in sorted(at) if (f := _fault(group, seq, at, everybody, dumps))), None)
        if fault is not None:
            yield fault


def _everybody(group: str, at: Mapping[int, Mapping[int, Call]], dumps: Mapping[int, Dump]) -> set[int]:
    """The ranks of a group: as dumps tell, and of the default group all there are."""
    name, _, about = group.partition(" ")
    told = {rank for dump in dumps.values() for rank in dump.members.get(name, ())}
    if told:
        return told
    if about == "default_pg" or (name == "0" and not about):
        every_group = {rank for dump in dumps.values() for ranks in dump.members.values() for rank in ranks}
        return set(range(max(every_group | set(dumps)) + 1))
    return {rank for here in at.values() for rank in here}


def _fault(
    group: str, seq: int, at: Mapping[int, Mapping[int, Call]], everybody: set[int], dumps: Mapping[int, Dump]
) -> CollectiveFault | None:
    """What is wrong with one collective; None where it ended everywhere."""
    here = at[seq]
    # A ring forgets its oldest calls: a rank is only missing from what is newer than its last one.
    last = {rank: max((s for s, calls in at.items() if rank in calls), default=0) for rank in dumps}
    gone = [
        rank
        for rank in sorted(everybody & set(dumps))
        if last[rank] < seq and not (dumps[rank].forgot and not last[rank])
    ]
    unseen = sorted(everybody - set(dumps))
    waiting = [rank for rank in sorted(here) if not here[rank].done]
    odd = _odd_ranks(here)
    if not waiting and not odd:
        return None
    first = here[min(set(here) - set(odd) or here)]
    callers = sorted(here)
    text = f"group {group!r}, collective {seq}, {_described(first)}: "
    tail = f"; no dump of {_ranks(unseen)}" if unseen else ""
    bare = CollectiveFault(group, seq, first.name, gone, callers, unseen, text, where=first.where)
    if gone and waiting:
        return replace(
            bare,
            text=f"{text}{_ranks(gone)} never called it; {_ranks(callers)} {_wait(callers)}{tail}",
            cause="never_called",
            look_at=gone,
            advice=_advice_on_missing(gone, group, first, dumps),
        )
    if odd:
        where = ", ".join(dict.fromkeys(here[rank].where for rank in odd if here[rank].where))
        at_code = f" at {where}" if where else ""
        advice = f"look at {_ranks(odd)}{at_code}: every rank must call the same collective, of one size and type"
        text = f"{text}ranks differ: {_differences(here)}{tail}"
        return replace(bare, text=text, cause="differs", look_at=odd, where=where or first.where, advice=advice)
    if unseen:
        return replace(
            bare,
            text=f"{text}{_ranks(callers)} called it and {_wait(callers)}{tail}",
            cause="no_dump",
            look_at=unseen,
            advice=f"look at {_ranks(unseen)}, of which there is no dump: an exception, out of memory, a machine "
            f"that is down, or a process that hangs elsewhere{_lateness(here)}",
        )
    return _by_progress(bare, here, waiting, dumps)


def _by_progress(
    bare: CollectiveFault, here: Mapping[int, Call], waiting: list[int], dumps: Mapping[int, Dump]
) -> CollectiveFault:
    """Of a collective that all ranks called alike: who has not started or not ended it."""
    idle = [rank for rank in waiting if here[rank].started is False]
    running = [rank for rank in sorted(here) if here[rank].started]
    ended = [rank for rank in sorted(here) if here[rank].done]
    late = _elsewhere(here) + _lateness(here)
    if idle and running:
        verdict = f"{_ranks(idle)} enqueued it and did not start it; {_ranks(running)} did"
        advice = f"look at {_ranks(idle)}: the GPU is busy with, or waits for, what its streams hold before"
        advice += _before(idle, here, dumps) + late
        return replace(bare, text=bare.text + verdict, cause="not_started", look_at=idle, advice=advice)
    if idle:
        verdict = f"all ranks enqueued it and none started it ({few(idle, SHOWN)})"
        advice = (
            "look at what every GPU does before it, a kernel or another group's collective: no call is missing here"
        )
        advice += _before(idle, here, dumps) + late
        return replace(bare, text=bare.text + verdict, cause="none_started", advice=advice)
    if ended:
        verdict = f"{_ranks(waiting)} started it and did not end it; {_ranks(ended)} did"
        advice = f"look at {_ranks(waiting)}: its GPU (Xid errors in dmesg, nvidia-smi), its NIC and its process{late}"
        return replace(bare, text=bare.text + verdict, cause="not_ended", look_at=waiting, advice=advice)
    word = "started" if running else "called"
    verdict = f"all ranks {word} it and none ended it ({few(waiting, SHOWN)})"
    advice = (
        "look at the network and the GPUs: no call is missing and none differs; links and counters of NICs (ibstat, "
        "ethtool -S), Xid errors in dmesg, NCCL_DEBUG=INFO, and whether the job has more ranks than these dumps"
        f"{_timeout(here)}{late}"
    )
    return replace(bare, text=bare.text + verdict, cause="stuck_together", advice=advice)


def _before(ranks: Iterable[int], here: Mapping[int, Call], dumps: Mapping[int, Dump]) -> str:
    """What of other groups these ranks have not ended before this call."""
    for rank in ranks:
        calls = [*dumps[rank].calls, *(message.call for message in dumps[rank].messages)]
        for call in calls:
            if not call.done and call.group != here[rank].group and call.created <= here[rank].created:
                return f": on rank {rank} {_described(call)} of group {call.group!r} has not ended"
    return ""


def _advice_on_missing(gone: list[int], group: str, wanted: Call, dumps: Mapping[int, Dump]) -> str:
    waits = _waits(dumps)
    parts: list[str] = []
    for rank in gone[:SHOWN]:
        mine = [call for call in dumps[rank].calls if call.group == group]
        ended = f"its last call there is {mine[-1].seq}, {_described(mine[-1])}" if mine else "it called nothing there"
        if rank in waits and waits[rank].group != group:
            other = waits[rank]
            ended += f"; it waits itself in group {other.group!r}, collective {other.seq}, {_described(other)}"
        elif rank in waits:
            ended += ", which has not ended"
        parts.append(f"rank {rank}: {ended}")
    reach = f" before {wanted.where}" if wanted.where else ""
    return (
        f"look at {_ranks(gone)}{reach}: its own stack (py-spy dump), an exception, a branch or a data loader that "
        f"only it has; {'; '.join(parts)}{_timeout({0: wanted})}"
    )


def _elsewhere(here: Mapping[int, Call]) -> str:
    """Who called the same from another line of code than most: two programs that happen to agree so far."""
    count = Counter(call.where for call in here.values() if call.where)
    if len(count) < 2:
        return ""
    usual = count.most_common(1)[0][0]
    others = [rank for rank, call in sorted(here.items()) if call.where and call.where != usual]
    lines = ", ".join(dict.fromkeys(here[rank].where for rank in others))
    return f"; {_ranks(others)} called it at {lines}, others at {usual}"


def _timeout(here: Mapping[int, Call]) -> str:
    seconds = max(call.timeout for call in here.values())
    return f"; the watchdog ends it after {format_time(seconds)}" if seconds else ""


def _lateness(here: Mapping[int, Call]) -> str:
    """Who called it much later than the first."""
    created = {rank: call.created for rank, call in here.items() if call.created}
    if len(created) < 2:
        return ""
    latest = max(created, key=lambda rank: created[rank])
    behind = created[latest] - min(created.values())
    return f"; rank {latest} called it {format_time(behind)} after the first" if behind > LATE else ""


# ---- what differs ----------------------------------------------------------------------------------------------------

_UNEVEN_INPUTS = ("alltoall", "all_to_all", "scatter")
_UNEVEN_OUTPUTS = ("alltoall", "all_to_all", "gather")


def _signature(call: Call) -> tuple[str, str, int, int]:
    """What must be the same on all ranks: a root alone has the list that it scatters or gathers, and parts of an
    all_to_all may be of any size."""
    kind = call.kind.lstrip("_")
    inputs = -1 if kind.startswith(_UNEVEN_INPUTS) else call.inputs
    outputs = -1 if kind.startswith(_UNEVEN_OUTPUTS) else call.outputs
    if kind.startswith(("reduce_scatter", "_reduce_scatter")):
        outputs = call.outputs
    return call.name, call.dtype, inputs, outputs


def _odd_ranks(here: Mapping[int, Call]) -> list[int]:
    """The ranks that called something else than most; all where no call is most ranks'; none where they agree."""
    here = {rank: call for rank, call in here.items() if call.name}
    count = Counter(_signature(call) for call in here.values())
    if len(count) < 2:
        return []
    (usual, times), (_, second) = count.most_common(2)
    if times == second:
        return sorted(here)
    return [rank for rank in sorted(here) if _signature(here[rank]) != usual]


def _differences(here: Mapping[int, Call]) -> str:
    ways: dict[tuple[str, str, int, int], list[int]] = {}
    for rank, call in sorted(here.items()):
        ways.setdefault(_signature(call), []).append(rank)
    return "; ".join(f"{_ranks(ranks)}: {_described(here[ranks[0]])}" for ranks in ways.values())


# ---- messages --------------------------------------------------------------------------------------------------------


def _message_faults(dumps: Mapping[int, Dump]) -> Iterator[CollectiveFault]:
    """Sends and receives that have not ended, and whose other end has not been called, or differs."""
    told: set[tuple[str, int, int]] = set()
    for rank, dump in sorted(dumps.items()):
        for message in dump.messages:
            if message.call.done:
                continue
            peer = _global_rank(message, dumps)
            pair = message.call.group, min(rank, peer), max(rank, peer)
            if pair not in told:
                told.add(pair)
                yield _message_fault(rank, peer, message, dumps)
            break  # what it called later waits for this one


def _global_rank(message: Message, dumps: Mapping[int, Dump]) -> int:
    """A place in a group as a rank of the job."""
    name = message.call.group.partition(" ")[0]
    members = sorted({rank for dump in dumps.values() for rank in dump.members.get(name, ())})
    return members[message.peer] if message.peer < len(members) else message.peer


def _message_fault(rank: int, peer: int, message: Message, dumps: Mapping[int, Dump]) -> CollectiveFault:
    call = message.call
    text = f"group {call.group!r}, {_described(call)}: rank {rank} waits for rank {peer}"
    bare = CollectiveFault(call.group, call.seq, call.name, [], [rank], [], text, where=call.where, look_at=[peer])
    if peer not in dumps:
        advice = f"look at rank {peer}, of which there is no dump"
        return replace(bare, no_dump=[peer], text=f"{text}; no dump of rank {peer}", cause="no_dump", advice=advice)
    other = _counterpart(rank, peer, message, dumps)
    if other is None:
        verb = "sent" if message.way == "recv" else "posted a receive"
        calls = [*dumps[peer].calls, *(each.call for each in dumps[peer].messages)]
        newest = max(calls, key=lambda each: each.created, default=None)
        doing = f"; its last call is {_described(newest)} of group {newest.group!r}" if newest else ""
        return replace(
            bare,
            missing=[peer],
            text=f"{text}, which has not {verb}",
            cause="no_peer",
            advice=f"look at rank {peer}{doing}",
        )
    both = sorted((rank, peer))
    if (other.call.elements, other.call.dtype) != (call.elements, call.dtype):
        text = f"{text}; the ends differ: rank {peer}: {_described(other.call)}"
        advice = f"look at {_ranks(both)}: both ends must be of one size and type"
        return replace(bare, text=text, cause="differs", look_at=both, advice=advice)
    return replace(
        bare,
        text=f"{text}; both ends were called and did not end",
        cause="stuck_together",
        look_at=both,
        advice=f"look at the network between {_ranks(both)}, and at their GPUs: both ends were called",
    )


def _counterpart(rank: int, peer: int, message: Message, dumps: Mapping[int, Dump]) -> Message | None:
    """The other end: the one with the same place among all of its direction between the two."""
    way = "recv" if message.way == "send" else "send"
    mine = _between(rank, message.way, peer, message, dumps)
    theirs = _between(peer, way, rank, message, dumps)
    if dumps[rank].forgot or dumps[peer].forgot:
        return next((other for other in theirs if not other.call.done), None)
    at = mine.index(message)
    return theirs[at] if at < len(theirs) else None


def _between(rank: int, way: str, peer: int, message: Message, dumps: Mapping[int, Dump]) -> list[Message]:
    of_group = (one for one in dumps[rank].messages if one.call.group == message.call.group and one.way == way)
    return [one for one in of_group if _global_rank(one, dumps) == peer]


# ---- words -----------------------------------------------------------------------------------------------------------


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {few(ranks, SHOWN)}"


def _wait(ranks: list[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _described(call: Call) -> str:
    if not call.name:
        return "a collective that the dump does not name"
    return short(f"{call.name} of {call.sizes} {call.dtype}" + (f" ({call.where})" if call.where else ""))
