"""What ranks called last, and so why they wait: who is missing, who is behind, what differs, or nobody at all.

Of a process group each rank counts what it called: who has not called what others have is missing, and who called
something else there does not match. A call is scheduled, then started by the GPU, then completed; where all called the
same, who has not started is behind on its own stream, and where all started and none ended no call is missing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import inf

from msgspec.structs import replace

from clustersim.core.errors import TraceError, few
from clustersim.core.limits import MOST_RANKS
from clustersim.core.texts import short
from clustersim.core.units import format_time
from clustersim.files.traces.hang_absent import nothing_waits
from clustersim.files.traces.hang_differences import SHIFTED, differences, differs_in, odd_ranks, shifted
from clustersim.files.traces.hang_messages import message_faults
from clustersim.files.traces.recorded_calls import SHOWN, Call, Dump, described, rank_list, wait_word
from clustersim.files.traces.told import CollectiveFault, HangReport

LISTED = 64
"""Ranks whose last call is listed."""
_UNSEEN = "an exception, out of memory, a machine that is down, or a process that hangs elsewhere"
LATE = 5.0
"""Seconds by which one rank calls later than another before it is told; clocks of machines agree better than that."""


def explained(source: str, dumps: Mapping[int, Dump], skipped: Mapping[str, int]) -> HangReport:
    """Why the ranks of these dumps wait: the causes first, then what follows from them, then each rank's last call."""
    waits = _waits(dumps)
    faults = [*_group_faults(dumps), *message_faults(dumps)]
    faults.sort(key=lambda fault: _rootedness(fault, waits))
    lines: list[str] = []
    for fault in faults:
        lines += [fault.text, *([fault.advice] if fault.advice else [])]
    lines += _circle(faults, waits)
    lines = [*_strangers(dumps), *lines]
    if not faults:
        lines += nothing_waits(dumps)
    last = {rank: dump.calls[-1] for rank, dump in sorted(dumps.items()) if dump.calls}
    for rank in list(last)[:LISTED]:
        lines.append(f"rank {rank}: {len(dumps[rank].calls)} calls recorded, last {described(last[rank])}")
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


def _rootedness(fault: CollectiveFault, waits: Mapping[int, Call]) -> tuple[bool, int, float]:
    """Causes before consequences: a rank that is missing here because it waits elsewhere is no cause, unless those wait
    for it here; of several, what ranks have waited in for longest."""
    ranks = fault.waiting if fault.cause == "none_started" else fault.look_at
    elsewhere = [rank in waits and waits[rank].group != fault.group for rank in ranks]
    since = (waits[rank].created for rank in fault.waiting if rank in waits and waits[rank].group == fault.group)
    return (
        bool(elsewhere) and all(elsewhere) and not fault.elsewhere,
        _ORDER.index(fault.cause),
        min(since, default=inf),
    )


def _circle(faults: Iterable[CollectiveFault], waits: Mapping[int, Call]) -> Iterator[str]:
    """Said where ranks wait for each other in different groups: they never called what others wait in, or it stands
    behind what they wait in."""
    blamed_fields = {"not_started": "look_at", "never_called": "missing", "no_peer": "missing"}
    blamed = {
        fault.group: getattr(fault, blamed_fields[fault.cause]) for fault in faults if fault.cause in blamed_fields
    }
    pairs = [(group, waits[rank].group if rank in waits else "") for group, ranks in blamed.items() for rank in ranks]
    if len(blamed) > 1 and all(waited_in in blamed and waited_in != group for group, waited_in in pairs):
        groups = ", ".join(map(repr, blamed))
        yield f"the ranks wait for each other in a circle: groups {groups} are called in different orders"


def _strangers(dumps: Mapping[int, Dump]) -> Iterator[str]:
    """Ranks that call in a group whose members, as the dumps tell them, they are not among."""
    for rank, dump in sorted(dumps.items()):
        for group in dict.fromkeys(call.group for call in dump.calls):
            name = group.partition(" ")[0]
            listed = {member for any_dump in dumps.values() for member in any_dump.members.get(name, ())}
            if listed and rank not in listed:
                members = few(sorted(listed), SHOWN)
                yield (
                    f"rank {rank} is not in group {group!r} as the dumps tell it ({members}), and calls in it: "
                    "are these dumps of one job?"
                )
                return


# ---- collectives -----------------------------------------------------------------------------------------------------


def _group_faults(dumps: Mapping[int, Dump]) -> Iterator[CollectiveFault]:
    """Of each group, the first collective that did not end everywhere, or that differs between its ranks."""
    by_group: defaultdict[str, defaultdict[int, dict[int, Call]]] = defaultdict(lambda: defaultdict(dict))
    for rank, dump in dumps.items():
        for call in dump.calls:
            by_group[call.group][call.seq][rank] = call
    for group, by_seq in by_group.items():
        everybody = _everybody(group, by_seq, dumps)
        last = dict.fromkeys(dumps, 0)
        for seq in sorted(by_seq):
            last |= dict.fromkeys(by_seq[seq], seq)
        faults = [f for seq in sorted(by_seq) if (f := _fault(group, seq, by_seq, everybody, last, dumps))]
        # Gloo's threads tell an end late: what a rank ended later is the cause only where nothing else is.
        sound = (fault for fault in faults if not _told_late(fault, by_seq))
        if faults:
            yield next(sound, faults[0])


def _told_late(fault: CollectiveFault, by_seq: Mapping[int, Mapping[int, Call]]) -> bool:
    """Whether all who seem not to have ended it have ended a later call of the same group."""
    if fault.cause != "not_ended":
        return False
    later = [calls for seq, calls in by_seq.items() if seq > fault.seq]
    return all(any(rank in calls and calls[rank].done for calls in later) for rank in fault.look_at)


def _everybody(group: str, by_seq: Mapping[int, Mapping[int, Call]], dumps: Mapping[int, Dump]) -> set[int]:
    """The ranks of a group: as dumps tell, and of the default group all there are."""
    name, _, about = group.partition(" ")
    listed = {rank for dump in dumps.values() for rank in dump.members.get(name, ())}
    if listed:
        return listed
    if about == "default_pg" or (name == "0" and not about):
        every_group = {rank for dump in dumps.values() for ranks in dump.members.values() for rank in ranks}
        highest = max(every_group | set(dumps))
        if highest >= MOST_RANKS:
            raise TraceError(
                f"rank {short(str(highest))} is told of, and no job has more than {MOST_RANKS:,} ranks: the number at "
                "the end of a dump's name is its rank"
            )
        return set(range(highest + 1))
    return {rank for by_rank in by_seq.values() for rank in by_rank}


def _fault(
    group: str,
    seq: int,
    by_seq: Mapping[int, Mapping[int, Call]],
    everybody: set[int],
    last: Mapping[int, int],
    dumps: Mapping[int, Dump],
) -> CollectiveFault | None:
    """What is wrong with one collective; None where it ended everywhere. ``last`` : each rank's last one there."""
    by_rank = by_seq[seq]
    # A ring forgets its oldest calls: a rank is only missing from what is newer than its last one.
    recorded = sorted(everybody & set(dumps))
    gone = [rank for rank in recorded if last[rank] < seq and (last[rank] or not dumps[rank].forgot)]
    unseen = sorted(everybody - set(dumps))
    waiting = [rank for rank in sorted(by_rank) if not by_rank[rank].done]
    odd = odd_ranks(by_rank)
    if not waiting and not odd:
        return None
    usual = set(by_rank) - set(odd) or set(by_rank)
    first = by_rank[min(usual, key=lambda rank: (not by_rank[rank].name, rank))]
    callers = sorted(by_rank)
    text = f"group {group!r}, collective {seq}, {described(first)}: "
    tail = f"; no dump of {rank_list(unseen)}" if unseen else ""
    bare = CollectiveFault(group, seq, first.name, gone, callers, unseen, text, where=first.where)
    if gone and waiting:
        apart = f", and differ: {differences(by_rank)}" if odd else ""
        return replace(
            bare,
            text=f"{text}{rank_list(gone)} never called it; {rank_list(callers)} {wait_word(callers)}{apart}{tail}",
            cause="never_called",
            look_at=gone,
            elsewhere=all(_alone_elsewhere(rank, group, dumps) for rank in gone),
            advice=_advice_on_missing(gone, group, first, dumps),
        )
    if odd:
        return _mismatch(bare, by_seq, odd, first, tail)
    if unseen and not _some_started(by_rank, waiting):
        text = f"{text}{rank_list(callers)} called it and {wait_word(callers)}{tail}"
        advice = f"look at {rank_list(unseen)}, of which there is no dump: {_UNSEEN}{_lateness(by_rank)}"
        return replace(bare, text=text, cause="no_dump", look_at=unseen, advice=advice)
    ahead = [rank for rank in recorded if rank not in by_rank and last[rank] > seq]
    if ahead and not _some_started(by_rank, waiting):
        text += f"{rank_list(waiting)} did not end it; {rank_list(ahead)} {wait_word(ahead)} at a later one"
        advice = (
            f"look at {rank_list(waiting)}: others have ended it, unless these numbers are of different groups, which "
            "the lines would then not say"
        )
        return replace(bare, text=text + tail, cause="not_ended", look_at=waiting, advice=advice)
    return _by_progress(bare, by_rank, waiting, dumps)


def _mismatch(
    bare: CollectiveFault, by_seq: Mapping[int, Mapping[int, Call]], odd: list[int], first: Call, tail: str
) -> CollectiveFault:
    """That some ranks, the ``odd`` ones, called something else than the ``first`` of the others."""
    by_rank = by_seq[bare.seq]
    lines = ", ".join(dict.fromkeys(by_rank[rank].where for rank in odd if by_rank[rank].where))
    who = f"{rank_list(odd)} at {lines}" if lines else rank_list(odd)
    advice = f"look at {who}: every rank must call the same collective, of one size and type"
    text = f"{bare.text}ranks differ: {differences(by_rank)}{tail}"
    how = differs_in(bare.seq, by_seq, odd)
    if how in SHIFTED:
        verdict, advice = shifted(how, bare.seq, odd, first)
        text = f"{bare.text}{verdict}; {differences(by_rank)}{tail}"
    return replace(
        bare,
        text=text,
        cause="differs",
        look_at=odd,
        where=lines or first.where,
        advice=advice,
        differs_in=how,
        called=described(by_rank[odd[0]]),
    )


def _alone_elsewhere(rank: int, group: str, dumps: Mapping[int, Dump]) -> bool:
    """Whether a rank waits in a call of another group, whose other ranks wait for it in this one."""
    last = dumps[rank].calls[-1] if dumps[rank].calls else None
    if last is None or last.done or last.group == group:
        return False
    waits = _waits(dumps)
    members = dumps[rank].members.get(last.group.partition(" ")[0]) or frozenset(dumps)
    peers = (members & set(dumps)) - {rank}
    return bool(peers) and all(peer in waits and waits[peer].group == group for peer in peers)


def _unlisted(group: str, dumps: Mapping[int, Dump]) -> bool:
    """Whether no dump says which ranks a group has."""
    return len(_everybody(group, {}, dumps)) == 0


def _some_started(by_rank: Mapping[int, Call], waiting: Iterable[int]) -> bool:
    """Whether of those that called it some have started it, and others have not."""
    started = {by_rank[rank].started for rank in waiting}
    return {True, False} <= started


_NEEDS_ALL = (
    "all_reduce",
    "allreduce",
    "all_gather",
    "allgather",
    "reduce_scatter",
    "barrier",
    "all_to_all",
    "alltoall",
)
"""Collectives that end on no rank before all have started: each needs something of each."""


def _by_progress(
    bare: CollectiveFault, by_rank: Mapping[int, Call], waiting: list[int], dumps: Mapping[int, Dump]
) -> CollectiveFault:
    """Of a collective that all ranks called alike: who has not started or not ended it."""
    idle = [rank for rank in waiting if by_rank[rank].started is False]
    running = [rank for rank in sorted(by_rank) if by_rank[rank].started]
    ended = [rank for rank in sorted(by_rank) if by_rank[rank].done]
    late = _elsewhere(by_rank) + _lateness(by_rank)
    if idle and ended and by_rank[ended[0]].kind.lstrip("_").startswith(_NEEDS_ALL):
        verdict = f"{rank_list(idle)} has it as not started, and {rank_list(ended)} ended it, which takes all ranks"
        advice = (
            f"look at the watchdog of {rank_list(idle)}, which notes what starts and ends: it is stuck (a call of "
            "CUDA, the GIL), or the dump was taken earlier; the collective itself ran there"
        )
        return replace(bare, text=bare.text + verdict, cause="not_ended", look_at=idle, advice=advice + late)
    if idle and running:
        verdict = f"{rank_list(idle)} enqueued it and did not start it; {rank_list(running)} did"
        advice = f"look at {rank_list(idle)}: the GPU is busy with, or waits for, what its streams hold before"
        advice += _before(idle, by_rank, dumps) + late
        return replace(bare, text=bare.text + verdict, cause="not_started", look_at=idle, advice=advice)
    if idle:
        verdict = f"all ranks enqueued it and none started it ({few(idle, SHOWN)})"
        advice = (
            "look at what every GPU does before it, a kernel or another group's collective: no call is missing here"
        )
        advice += _before(idle, by_rank, dumps) + late
        return replace(bare, text=bare.text + verdict, cause="none_started", advice=advice)
    if ended:
        word = "called" if all(by_rank[rank].started is None for rank in waiting) else "started"
        verdict = f"{rank_list(waiting)} {word} it and did not end it; {rank_list(ended)} did"
        advice = (
            f"look at {rank_list(waiting)}: its GPU (Xid errors in dmesg, nvidia-smi), its NIC and its process{late}"
        )
        return replace(bare, text=bare.text + verdict, cause="not_ended", look_at=waiting, advice=advice)
    if len(by_rank) == 1 and _unlisted(bare.group, dumps):
        verdict = f"{rank_list(waiting)} called it and waits; which other ranks are in the group is not told here"
        advice = f"look at the files of the group's other ranks: who of them has not called it{late}"
        return replace(bare, text=bare.text + verdict, cause="no_dump", advice=advice)
    word = "started" if running else "called"
    verdict = f"all ranks {word} it and none ended it ({few(waiting, SHOWN)})"
    advice = (
        "look at the network and the GPUs: no call is missing and none differs; links and counters of NICs (ibstat, "
        "ethtool -S), Xid errors in dmesg, NCCL_DEBUG=INFO, and whether the job has more ranks than these dumps"
        f"{_timeout(by_rank)}{late}"
    )
    return replace(bare, text=bare.text + verdict, cause="stuck_together", advice=advice)


def _before(ranks: Iterable[int], by_rank: Mapping[int, Call], dumps: Mapping[int, Dump]) -> str:
    """What of other groups these ranks have not ended before this call."""
    for rank in ranks:
        calls = [*dumps[rank].calls, *(message.call for message in dumps[rank].messages)]
        for call in calls:
            if not call.done and call.group != by_rank[rank].group and call.created <= by_rank[rank].created:
                return f": on rank {rank} {described(call)} of group {call.group!r} has not ended"
    return ""


def _advice_on_missing(gone: list[int], group: str, wanted: Call, dumps: Mapping[int, Dump]) -> str:
    waits = _waits(dumps)
    parts: list[str] = []
    for rank in gone[:SHOWN]:
        own_calls = [call for call in dumps[rank].calls if call.group == group]
        ended = (
            f"its last call there is {own_calls[-1].seq}, {described(own_calls[-1])}"
            if own_calls
            else "it called nothing there"
        )
        if rank in waits and waits[rank].group != group:
            pending = waits[rank]
            ended += f"; it waits itself in group {pending.group!r}, collective {pending.seq}, {described(pending)}"
        elif rank in waits:
            ended += ", which has not ended"
        parts.append(f"rank {rank}: {ended}")
    reach = f" before {wanted.where}" if wanted.where else ""
    return (
        f"look at {rank_list(gone)}{reach}: its own stack (py-spy dump), an exception, a branch or a data loader that "
        f"only it has; {'; '.join(parts)}{_timeout({0: wanted})}"
    )


def _elsewhere(by_rank: Mapping[int, Call]) -> str:
    """Who called the same from another line of code than most: two programs that happen to agree so far."""
    count = Counter(call.where for call in by_rank.values() if call.where)
    if len(count) < 2:
        return ""
    usual = count.most_common(1)[0][0]
    unusual = [rank for rank, call in sorted(by_rank.items()) if call.where and call.where != usual]
    lines = ", ".join(dict.fromkeys(by_rank[rank].where for rank in unusual))
    return f"; {rank_list(unusual)} called it at {lines}, others at {usual}"


def _timeout(by_rank: Mapping[int, Call]) -> str:
    seconds = max(call.timeout for call in by_rank.values())
    return f"; the watchdog ends it after {format_time(seconds)}" if seconds else ""


def _lateness(by_rank: Mapping[int, Call]) -> str:
    """Who called it much later than the first."""
    created = {rank: call.created for rank, call in by_rank.items() if call.created}
    if len(created) < 2:
        return ""
    latest = max(created, key=lambda rank: created[rank])
    behind = created[latest] - min(created.values())
    return f"; rank {latest} called it {format_time(behind)} after the first" if behind > LATE else ""
