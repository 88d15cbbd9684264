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
    kept = {"not_started": "look_at", "never_called": "missing", "no_peer": "missing"}
    held = {fault.group: getattr(fault, kept[fault.cause]) for fault in faults if fault.cause in kept}
    pairs = [(group, waits[rank].group if rank in waits else "") for group, ranks in held.items() for rank in ranks]
    if len(held) > 1 and all(other in held and other != group for group, other in pairs):
        groups = ", ".join(map(repr, held))
        yield f"the ranks wait for each other in a circle: groups {groups} are called in different orders"


def _strangers(dumps: Mapping[int, Dump]) -> Iterator[str]:
    """Ranks that call in a group whose members, as the dumps tell them, they are not among."""
    for rank, dump in sorted(dumps.items()):
        for group in dict.fromkeys(call.group for call in dump.calls):
            name = group.partition(" ")[0]
            told = {member for each in dumps.values() for member in each.members.get(name, ())}
            if told and rank not in told:
                members = few(sorted(told), SHOWN)
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
    for group, at in by_group.items():
        everybody = _everybody(group, at, dumps)
        last = dict.fromkeys(dumps, 0)
        for seq in sorted(at):
            last |= dict.fromkeys(at[seq], seq)
        faults = [f for seq in sorted(at) if (f := _fault(group, seq, at, everybody, last, dumps))]
        # Gloo's threads tell an end late: what a rank ended later is the cause only where nothing else is.
        sound = (fault for fault in faults if not _told_late(fault, at))
        if faults:
            yield next(sound, faults[0])


def _told_late(fault: CollectiveFault, at: Mapping[int, Mapping[int, Call]]) -> bool:
    """Whether all who seem not to have ended it have ended a later call of the same group."""
    if fault.cause != "not_ended":
        return False
    later = [calls for seq, calls in at.items() if seq > fault.seq]
    return all(any(rank in calls and calls[rank].done for calls in later) for rank in fault.look_at)


def _everybody(group: str, at: Mapping[int, Mapping[int, Call]], dumps: Mapping[int, Dump]) -> set[int]:
    """The ranks of a group: as dumps tell, and of the default group all there are."""
    name, _, about = group.partition(" ")
    told = {rank for dump in dumps.values() for rank in dump.members.get(name, ())}
    if told:
        return told
    if about == "default_pg" or (name == "0" and not about):
        every_group = {rank for dump in dumps.values() for ranks in dump.members.values() for rank in ranks}
        highest = max(every_group | set(dumps))
        if highest >= MOST_RANKS:
            raise TraceError(
                f"rank {short(str(highest))} is told of, and no job has more than {MOST_RANKS:,} ranks: the number at "
                "the end of a dump's name is its rank"
            )
        return set(range(highest + 1))
    return {rank for here in at.values() for rank in here}


def _fault(
    group: str,
    seq: int,
    at: Mapping[int, Mapping[int, Call]],
    everybody: set[int],
    last: Mapping[int, int],
    dumps: Mapping[int, Dump],
) -> CollectiveFault | None:
    """What is wrong with one collective; None where it ended everywhere. ``last`` : each rank's last one there."""
    here = at[seq]
    # A ring forgets its oldest calls: a rank is only missing from what is newer than its last one.
    recorded = sorted(everybody & set(dumps))
    gone = [rank for rank in recorded if last[rank] < seq and (last[rank] or not dumps[rank].forgot)]
    unseen = sorted(everybody - set(dumps))
    waiting = [rank for rank in sorted(here) if not here[rank].done]
    odd = odd_ranks(here)
    if not waiting and not odd:
        return None
    usual = set(here) - set(odd) or set(here)
    first = here[min(usual, key=lambda rank: (not here[rank].name, rank))]
    callers = sorted(here)
    text = f"group {group!r}, collective {seq}, {described(first)}: "
    tail = f"; no dump of {rank_list(unseen)}" if unseen else ""
    bare = CollectiveFault(group, seq, first.name, gone, callers, unseen, text, where=first.where)
    if gone and waiting:
        return replace(
            bare,
            text=f"{text}{rank_list(gone)} never called it; {rank_list(callers)} {wait_word(callers)}{tail}",
            cause="never_called",
            look_at=gone,
            elsewhere=all(_alone_elsewhere(rank, group, dumps) for rank in gone),
            advice=_advice_on_missing(gone, group, first, dumps),
        )
    if odd:
        return _mismatch(bare, at, odd, first, tail)
    if unseen and not _some_started(here, waiting):
        text = f"{text}{rank_list(callers)} called it and {wait_word(callers)}{tail}"
        advice = f"look at {rank_list(unseen)}, of which there is no dump: {_UNSEEN}{_lateness(here)}"
        return replace(bare, text=text, cause="no_dump", look_at=unseen, advice=advice)
    ahead = [rank for rank in recorded if rank not in here and last[rank] > seq]
    if ahead and not _some_started(here, waiting):
        text += f"{rank_list(waiting)} did not end it; {rank_list(ahead)} {wait_word(ahead)} at a later one"
        advice = (
            f"look at {rank_list(waiting)}: others have ended it, unless these numbers are of different groups, which "
            "the lines would then not say"
        )
        return replace(bare, text=text + tail, cause="not_ended", look_at=waiting, advice=advice)
    return _by_progress(bare, here, waiting, dumps)


def _mismatch(
    bare: CollectiveFault, at: Mapping[int, Mapping[int, Call]], odd: list[int], first: Call, tail: str
) -> CollectiveFault:
    """That some ranks, the ``odd`` ones, called something else than the ``first`` of the others."""
    here = at[bare.seq]
    where = ", ".join(dict.fromkeys(here[rank].where for rank in odd if here[rank].where))
    who = f"{rank_list(odd)} at {where}" if where else rank_list(odd)
    advice = f"look at {who}: every rank must call the same collective, of one size and type"
    text = f"{bare.text}ranks differ: {differences(here)}{tail}"
    how = differs_in(bare.seq, at, odd)
    if how in SHIFTED:
        verdict, advice = shifted(how, bare.seq, odd, first)
        text = f"{bare.text}{verdict}; {differences(here)}{tail}"
    return replace(
        bare,
        text=text,
        cause="differs",
        look_at=odd,
        where=where or first.where,
        advice=advice,
        differs_in=how,
        called=described(here[odd[0]]),
    )


def _alone_elsewhere(rank: int, group: str, dumps: Mapping[int, Dump]) -> bool:
    """Whether a rank waits in a call of another group, whose other ranks wait for it in this one."""
    last = dumps[rank].calls[-1] if dumps[rank].calls else None
    if last is None or last.done or last.group == group:
        return False
    waits = _waits(dumps)
    members = dumps[rank].members.get(last.group.partition(" ")[0]) or frozenset(dumps)
    others = (members & set(dumps)) - {rank}
    return bool(others) and all(other in waits and waits[other].group == group for other in others)


def _unlisted(group: str, dumps: Mapping[int, Dump]) -> bool:
    """Whether no dump says which ranks a group has."""
    return len(_everybody(group, {}, dumps)) == 0


def _some_started(here: Mapping[int, Call], waiting: Iterable[int]) -> bool:
    """Whether of those that called it some have started it, and others have not."""
    started = {here[rank].started for rank in waiting}
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
    bare: CollectiveFault, here: Mapping[int, Call], waiting: list[int], dumps: Mapping[int, Dump]
) -> CollectiveFault:
    """Of a collective that all ranks called alike: who has not started or not ended it."""
    idle = [rank for rank in waiting if here[rank].started is False]
    running = [rank for rank in sorted(here) if here[rank].started]
    ended = [rank for rank in sorted(here) if here[rank].done]
    late = _elsewhere(here) + _lateness(here)
    if idle and ended and here[ended[0]].kind.lstrip("_").startswith(_NEEDS_ALL):
        verdict = f"{rank_list(idle)} has it as not started, and {rank_list(ended)} ended it, which takes all ranks"
        advice = (
            f"look at the watchdog of {rank_list(idle)}, which notes what starts and ends: it is stuck (a call of "
            "CUDA, the GIL), or the dump was taken earlier; the collective itself ran there"
        )
        return replace(bare, text=bare.text + verdict, cause="not_ended", look_at=idle, advice=advice + late)
    if idle and running:
        verdict = f"{rank_list(idle)} enqueued it and did not start it; {rank_list(running)} did"
        advice = f"look at {rank_list(idle)}: the GPU is busy with, or waits for, what its streams hold before"
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
        verdict = f"{rank_list(waiting)} started it and did not end it; {rank_list(ended)} did"
        advice = (
            f"look at {rank_list(waiting)}: its GPU (Xid errors in dmesg, nvidia-smi), its NIC and its process{late}"
        )
        return replace(bare, text=bare.text + verdict, cause="not_ended", look_at=waiting, advice=advice)
    if len(here) == 1 and _unlisted(bare.group, dumps):
        verdict = f"{rank_list(waiting)} called it and waits; which other ranks are in the group is not told here"
        advice = f"look at the files of the group's other ranks: who of them has not called it{late}"
        return replace(bare, text=bare.text + verdict, cause="no_dump", advice=advice)
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
                return f": on rank {rank} {described(call)} of group {call.group!r} has not ended"
    return ""


def _advice_on_missing(gone: list[int], group: str, wanted: Call, dumps: Mapping[int, Dump]) -> str:
    waits = _waits(dumps)
    parts: list[str] = []
    for rank in gone[:SHOWN]:
        mine = [call for call in dumps[rank].calls if call.group == group]
        ended = f"its last call there is {mine[-1].seq}, {described(mine[-1])}" if mine else "it called nothing there"
        if rank in waits and waits[rank].group != group:
            other = waits[rank]
            ended += f"; it waits itself in group {other.group!r}, collective {other.seq}, {described(other)}"
        elif rank in waits:
            ended += ", which has not ended"
        parts.append(f"rank {rank}: {ended}")
    reach = f" before {wanted.where}" if wanted.where else ""
    return (
        f"look at {rank_list(gone)}{reach}: its own stack (py-spy dump), an exception, a branch or a data loader that "
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
    return f"; {rank_list(others)} called it at {lines}, others at {usual}"


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
