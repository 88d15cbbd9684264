"""Sends and receives that did not end: whose other end was never called, differs, or hangs as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from clustersim.files.traces.recorded_calls import Dump, Message, described, rank_list
from clustersim.files.traces.told import CollectiveFault


def message_faults(dumps: Mapping[int, Dump]) -> Iterator[CollectiveFault]:
    """Sends and receives that have not ended, and whose other end has not been called, or differs."""
    reported: set[tuple[str, int, int]] = set()
    for rank, dump in sorted(dumps.items()):
        for message in dump.messages:
            if message.call.done:
                continue
            peer = _global_rank(message, dumps)
            pair = message.call.group, min(rank, peer), max(rank, peer)
            if pair not in reported:
                reported.add(pair)
                yield _message_fault(rank, peer, message, dumps)
            break  # what it called later waits for this one


def _global_rank(message: Message, dumps: Mapping[int, Dump]) -> int:
    """A place in a group as a rank of the job."""
    name = message.call.group.partition(" ")[0]
    members = sorted({rank for dump in dumps.values() for rank in dump.members.get(name, ())})
    return members[message.peer] if message.peer < len(members) else message.peer


def _message_fault(rank: int, peer: int, message: Message, dumps: Mapping[int, Dump]) -> CollectiveFault:
    call = message.call
    text = f"group {call.group!r}, {described(call)}: rank {rank} waits for rank {peer}"
    sender = rank if message.way == "send" else peer
    called = f"a message that rank {sender} sends"
    bare = CollectiveFault(
        call.group, call.seq, call.name, [], [rank], [], text, where=call.where, look_at=[peer], called=called
    )
    if peer not in dumps:
        advice = f"look at rank {peer}, of which there is no dump"
        return replace(bare, no_dump=[peer], text=f"{text}; no dump of rank {peer}", cause="no_dump", advice=advice)
    counterpart = _counterpart(rank, peer, message, dumps)
    if counterpart is None:
        verb = "sent" if message.way == "recv" else "posted a receive"
        calls = [*dumps[peer].calls, *(end_rank.call for end_rank in dumps[peer].messages)]
        newest = max(calls, key=lambda end_rank: end_rank.created, default=None)
        doing = f"; its last call is {described(newest)} of group {newest.group!r}" if newest else ""
        return replace(
            bare,
            missing=[peer],
            text=f"{text}, which has not {verb}",
            cause="no_peer",
            advice=f"look at rank {peer}{doing}",
        )
    both = sorted((rank, peer))
    if (counterpart.call.elements, counterpart.call.dtype) != (call.elements, call.dtype):
        text = f"{text}; the ends differ: rank {peer}: {described(counterpart.call)}"
        advice = f"look at {rank_list(both)}: both ends must be of one size and type"
        return replace(bare, text=text, cause="differs", look_at=both, advice=advice)
    behind = [end_rank for end_rank, end in ((rank, message), (peer, counterpart)) if end.call.started is False]
    if len(behind) == 1:
        advice = f"look at {rank_list(behind)}: the GPU is busy with, or waits for, what its streams hold before"
        text = f"{text}; {rank_list(behind)} enqueued its end and did not start it"
        return replace(bare, text=text, cause="not_started", look_at=behind, advice=advice)
    return replace(
        bare,
        text=f"{text}; both ends were called and did not end",
        cause="stuck_together",
        look_at=both,
        advice=f"look at the network between {rank_list(both)}, and at their GPUs: both ends were called",
    )


def _counterpart(rank: int, peer: int, message: Message, dumps: Mapping[int, Dump]) -> Message | None:
    """The other end: the one with the same place among all of its direction between the two."""
    opposite = "recv" if message.way == "send" else "send"
    own = _between(rank, message.way, peer, message, dumps)
    theirs = _between(peer, opposite, rank, message, dumps)
    if dumps[rank].forgot or dumps[peer].forgot:
        return next((candidate for candidate in theirs if not candidate.call.done), None)
    position = own.index(message)
    return theirs[position] if position < len(theirs) else None


def _between(rank: int, way: str, peer: int, message: Message, dumps: Mapping[int, Dump]) -> list[Message]:
    of_group = (sent for sent in dumps[rank].messages if sent.call.group == message.call.group and sent.way == way)
    return [sent for sent in of_group if _global_rank(sent, dumps) == peer]
