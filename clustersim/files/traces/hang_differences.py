"""Where ranks called something else in one place: who is odd, and whether it differs in itself or is one off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from clustersim.files.traces.recorded_calls import Call, described, rank_list

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


def odd_ranks(here: Mapping[int, Call]) -> list[int]:
    """The ranks that called something else than most; all where no call is most ranks'; none where they agree."""
    here = {rank: call for rank, call in here.items() if call.name}
    count = Counter(_signature(call) for call in here.values())
    if len(count) < 2:
        return []
    (usual, times), (_, second) = count.most_common(2)
    if times == second:
        return sorted(here)
    return [rank for rank in sorted(here) if _signature(here[rank]) != usual]


def differs_in(seq: int, at: Mapping[int, Mapping[int, Call]], odd: list[int]) -> str:
    """How calls of odd ranks differ from what most called.

    ``order`` where they called next what others called here, and here what others call next; ``skipped`` where all that
    they call from here on is what others call one later, ``extra`` where it is the other way round; else what the calls
    themselves differ in: ``kind``, ``size`` or ``type``.
    """
    here = {rank: call for rank, call in at[seq].items() if call.name}
    usual = next((rank for rank in sorted(here) if rank not in odd), min(here))
    other = next(rank for rank in odd if _signature(here[rank]) != _signature(here[usual]))
    agree_later = _agree(at, seq + 2, usual, other, 0)
    if _agree(at, seq, usual, other, 1, most=1) and _agree(at, seq, other, usual, 1, most=1) and agree_later != 0:
        return "order"
    if len(odd) < len(here):  # else nobody knows who is odd
        for how, ahead, behind in (("skipped", usual, other), ("extra", other, usual)):
            if _agree(at, seq, ahead, behind, 1):
                return how
    ours, theirs = _signature(here[usual]), _signature(here[other])
    if ours[0] != theirs[0]:
        return "kind"
    return "type" if ours[1] != theirs[1] else "size"


def _agree(
    at: Mapping[int, Mapping[int, Call]], seq: int, ahead: int, behind: int, shift: int, most: int | None = None
) -> int | None:
    """How many calls of ``behind`` from ``seq`` on (``most`` of them) are those of ``ahead`` so many later; 0 where one
    is not, None where none can be compared."""
    count = 0
    while most is None or count < most:
        late_call = at.get(seq + count, {}).get(behind)
        early_call = at.get(seq + count + shift, {}).get(ahead)
        if late_call is None or early_call is None:
            break
        if _signature(late_call) != _signature(early_call) or _elsewhere(late_call, early_call):
            return 0
        count += 1
    return count or None


def _elsewhere(call: Call, early_call: Call) -> bool:
    """Whether two calls are known to be of different lines of code."""
    return bool(call.where and early_call.where) and call.where != early_call.where


SHIFTED = ("skipped", "extra")


def shifted(how: str, seq: int, odd: list[int], usual: Call) -> tuple[str, str]:
    """What happened, and what to look at, where the calls of ranks are those of others, one off (:data:`SHIFTED`)."""
    who = rank_list(odd)
    if how == "skipped":
        reach = f" before {usual.where}" if usual.where else ""
        verdict = f"{who} skipped it: what it calls from {seq} on is what others call from {seq + 1} on"
        return verdict, f"look at {who}{reach}: a branch, an exception that was caught, or a loader that only it has"
    verdict = f"{who} calls here what others do not: what it calls from {seq + 1} on is what others call from {seq} on"
    return verdict, f"look at {who}: a branch in which only it calls a collective"


def differences(here: Mapping[int, Call]) -> str:
    """Which ranks call what, in words; those that call alike together."""
    ways: dict[tuple[str, str, int, int], list[int]] = {}
    for rank, call in sorted(here.items()):
        ways.setdefault(_signature(call), []).append(rank)
    return "; ".join(f"{rank_list(ranks)}: {described(here[ranks[0]])}" for ranks in ways.values())
