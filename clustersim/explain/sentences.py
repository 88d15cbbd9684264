"""Causes in plain words, with numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from clustersim.core.units import format_bandwidth, format_bytes, format_time
from clustersim.explain.columns import columns_of
from clustersim.explain.pace import skews
from clustersim.explain.step_words import bubble_sentence

if TYPE_CHECKING:
    from clustersim.explain.charges import Charge
    from clustersim.explain.stalls import Causes
    from clustersim.explain.transfers import TransferFacts

UNLIKE = 0.1
"""Paces further apart than this are no accident of single steps."""

_PLAIN = {
    "slow rank": "Rank {holder} is slow: its kernels take {pace:.2f} times the median of its peers, and {ranks} ranks "
    "wait for it, longest rank {rank} at {op}, {worst} while rank {holder} was still in {held}.",
    "host copies": "Copies between host and GPU hold the GPU: rank {rank} waits {worst} for {moved}.",
    "host": "The GPU waits for the host: {op}, {worst} on rank {rank}.",
    "calls": "Host-bound: the host takes longer to call a layer's modules, their gradients and its collectives than "
    "GPUs to compute them, {op} {worst} on rank {rank}; a larger micro-batch, CUDA graphs, compiled layers, fewer "
    "stages or a faster CPU would help, a faster GPU would not. What it takes is usual of the framework; [measured] "
    "layer_time says what it is on your machine.",
    "idle device": "Launch-bound: GPUs have nothing queued, since the host launches kernels more slowly than they run; "
    "on rank {rank} for {worst} in all.",
    "launch": "Launch-bound: {share:.1%} of the time goes to ops whose kernels are shorter than the host takes to "
    "launch them, such as {op}; a larger batch, fused kernels or CUDA graphs would help, a faster GPU would not.",
}
"""Causes whose sentence is the same whatever else is known, with the names of :func:`_plain`."""
_PLAIN_ON_CPU = {
    "slow rank": "Rank {holder} is slow: its operators take {pace:.2f} times the median of its peers, and {ranks} "
    "ranks wait for it, longest rank {rank} at {op}, {worst} while rank {holder} was still in {held}.",
    "host copies": "Copies hold the rank: rank {rank} waits {worst} for {moved}.",
    "host": "The rank waits for the host: {op}, {worst} on rank {rank}.",
    "idle device": "Between operators nothing is recorded: Python, the data loader or what the profiler does not see; "
    "on rank {rank} for {worst} in all.",
    "launch": "{share:.1%} of the time goes to operators so short that calling them takes as long, such as {op}; a "
    "larger batch would help.",
}
"""The same where no GPU is."""


def sentence(found: Causes, charge: Charge) -> str:
    """One cause as a sentence: what, where, by how much, and what it costs."""
    said = _plain(found, charge) if charge.cause in _PLAIN else _WORDS.get(charge.cause, _unknown)(found, charge)
    step = format_time(found.length / found.steps)
    share = found.share(charge)
    unit = "rank" if found.on_cpu else "GPU"
    over = f"1 {unit}" if found.workers == 1 else f"{found.workers:,} {unit}s"
    return f"{said} Cost: {format_time(found.cost(charge))} of every {step} step ({share:.1%}), mean over {over}."


def _plain(found: Causes, charge: Charge) -> str:
    words = _PLAIN | _PLAIN_ON_CPU if found.on_cpu else _PLAIN
    return words[charge.cause].format(
        rank=charge.rank,
        ranks=len(charge.ranks),
        holder=charge.holder_rank,
        pace=found.pace[charge.holder_rank],
        worst=format_time(charge.worst),
        op=_op(found, charge.op),
        held=_op(found, charge.holder_op),
        moved=_op(found, charge.holder_op if charge.holder_op >= 0 else charge.op),
        share=found.share(charge),
    )


def _op(found: Causes, op: int) -> str:
    return f"'{found.timeline.ops[op].name}'" if op >= 0 else "nothing"


def _link(found: Causes, link: int) -> str:
    use = found.timeline.links
    return use.link_names[link] if use is not None and link >= 0 else "a link"


def _exposed(found: Causes, charge: Charge) -> str:
    return f"rank {charge.rank} waits {format_time(charge.worst)} for {_op(found, charge.op)} alone"


def _moving(found: Causes, charge: Charge) -> tuple[int, TransferFacts]:
    """The op whose transfer is charged, and what holds it: of the holder, where that is one."""
    op = charge.holder_op if charge.holder_op in found.facts else charge.op
    return op, found.facts[op]


def _narrow(found: Causes, charge: Charge) -> str:
    use = found.timeline.links
    if use is None or charge.link < 0 or found.facts.keys().isdisjoint({charge.op, charge.holder_op}):
        return _unknown(found, charge)
    _, fact = _moving(found, charge)
    bandwidth = float(use.link_bandwidth[charge.link])
    text = f"The link {_link(found, charge.link)} ({format_bandwidth(bandwidth)}) holds the transfers: "
    text += f"it lets {format_bandwidth(fact.alone)} of payload through"
    other, allowed = fact.runner_up
    if other >= 0 and np.isfinite(allowed):
        text += f", where the next narrowest, {_link(found, other)}, would let {allowed / fact.alone:.1f} times as much"
    return f"{text}; {_exposed(found, charge)}."


def _shared(found: Causes, charge: Charge) -> str:
    op, fact = _moving(found, charge)
    others = sharers(found, op, charge.link)
    said = "is shared with " + ", ".join(f"'{name}'" for name in others[:3])
    free = "alone"
    if not others and len(found.timeline.ops[op].detail.get("groups", ())) > 1:
        said = "is shared with other groups of the same op"
    elif not others:  # nobody else is there: the link itself changed (cluster.changes)
        said = "is slower for a while"
        free = "at the link's own rate"
    got = format_bandwidth(fact.rate)
    alone = format_bandwidth(min(fact.alone, fact.ceiling))
    return (
        f"The link {_link(found, charge.link)} {said}: {_op(found, op)} gets {got} of payload where {free} it would "
        f"get {alone}; {_exposed(found, charge)}."
    )


def sharers(found: Causes, op: int, link: int) -> list[str]:
    """Names of other ops that used a link while an op's transfers ran, the longest beside it first."""
    use = found.timeline.links
    if use is None or link < 0:
        return []
    crossing = np.array([bool((links == link).any()) for links, _ in use.loads], dtype=bool)
    of = use.transfer_op[use.segment_transfer]
    mine = of == op
    if not mine.any():
        return []
    begin = float(use.segment_start[mine].min())
    end = float(use.segment_end[mine].max())
    beside = np.minimum(use.segment_end, end) - np.maximum(use.segment_start, begin)
    others = ~mine & crossing[use.transfer_load[use.segment_transfer]] & (beside > 0)
    seconds = np.bincount(of[others], weights=beside[others], minlength=len(found.timeline.ops))
    order = np.argsort(-seconds, kind="stable")
    return [found.timeline.ops[i].name for i in order.tolist() if seconds[i] > 0]


def _kernels(found: Causes, charge: Charge) -> str:
    _, fact = _moving(found, charge)
    ceiling = format_bandwidth(fact.ceiling)
    alone = format_bandwidth(fact.alone)
    if not np.isfinite(fact.alone):  # processes of one host
        return (
            f"The host's own work limits {_op(found, charge.op)}: its processes pass {ceiling} of payload on, and no "
            f"link is between them; {_exposed(found, charge)}."
        )
    return (
        f"Communication kernels, not links, limit {_op(found, charge.op)}: they sustain {ceiling} of payload where the "
        f"links would let {alone} through; {_exposed(found, charge)}."
    )


def _latency(found: Causes, charge: Charge) -> str:
    ops = found.timeline.ops
    op = charge.op if charge.op in found.facts else charge.holder_op
    fact = found.facts[op]
    info = ops[op]
    what = "Messages" if info.kind in {"send", "recv"} else "Collectives"
    text = f"{what} like {_op(found, op)} are latency-bound: {format_bytes(info.nbytes)} take "
    text += f"{format_time(fact.seconds)}, of which {format_time(fact.latency)} is latency"
    if np.isfinite(fact.alone) and fact.latency > 0:
        text += f"; bandwidth matters above {format_bytes(fact.latency * min(fact.alone, fact.ceiling))}"
    alike = sum(ops[i].step == info.step and other.limit == "latency" for i, other in found.facts.items())
    text += f". A step has {alike} of them" + (", one behind the other on the communicator" if alike > 1 else "")
    queued = queue_seconds(found, op)
    if queued > 0:
        text += f" (this one queued for {format_time(queued)})"
    return text + f"; {_exposed(found, charge)}."


def queue_seconds(found: Causes, op: int) -> float:
    """Seconds an op was kept from starting by the op before it on its stream, on the first rank that runs it."""
    timeline = found.timeline
    mine = columns_of(timeline).of(op)
    if not len(mine.ranks):
        return 0.0
    spans = timeline.spans([int(mine.ranks[0])])
    ends = dict(zip(spans["op"].tolist(), spans["end"].tolist(), strict=True))
    needs = [ends[i] for i in timeline.ops[op].after if i in ends]
    return max(0.0, float(mine.ready[0]) - max(needs)) if needs else 0.0


def _late_start(found: Causes, charge: Charge) -> str:
    info = found.timeline.ops[charge.op]
    fact = found.late[info.step]
    part = fact.idle / fact.backward if fact.backward > 0 else 0.0
    return (
        f"Communication starts late: {_op(found, charge.op)} ({format_bytes(info.nbytes)}) is the first to send "
        f"gradients, {format_time(fact.idle)} ({part:.0%} of backward) after the first of them were made, while the "
        f"network was idle; {format_time(charge.worst)} of what is exposed after backward could have been hidden there."
    )


def _jitter(found: Causes, charge: Charge) -> str:
    spread = float(np.ptp(found.pace))
    longest = f"longest rank {charge.rank} at {_op(found, charge.op)}, {format_time(charge.worst)}"
    if spread > UNLIKE:
        kinds = "machines with other work" if found.on_cpu else "GPUs of several kinds"
        return (
            f"Ranks have paces of their own (means within {spread:.1%}), as {kinds}: the faster ones wait for the "
            f"slower, {longest}."
        )
    whom = f" for rank {charge.holder_rank}" if charge.holder_rank >= 0 else ""
    return (
        f"Ranks differ from step to step, none is always slow (means within {spread:.1%}): everybody waits for the "
        f"last, {longest}{whom}."
    )


def _server(found: Causes, charge: Charge) -> str:
    fact = found.facts.get(charge.op)
    meets = found.timeline.ops[charge.op].detail.get("meets", ())
    text = f"The parameter server holds {len(charge.ranks)} ranks: rank {charge.rank} spends "
    text += f"{format_time(charge.worst)} in {_op(found, charge.op)}"
    if charge.holder_op >= 0:
        text += f" while the server is busy with {_op(found, charge.holder_op)}"
    elif meets:
        text += f" with the server's {_op(found, int(meets[0]))}"
    if fact is not None and fact.link >= 0:
        text += f", {format_bandwidth(fact.rate)} over {_link(found, fact.link)}"
        if fact.limit == "shared link":
            text += f", shared by all of them (alone: {format_bandwidth(min(fact.alone, fact.ceiling))})"
    return text + "."


def _schedule(found: Causes, charge: Charge) -> str:
    if said := bubble_sentence(found.timeline, found.where) if found.where else "":
        return said
    where = f"before {_op(found, charge.op)}" if charge.op >= 0 else "at the end of its list"
    return (
        f"Bubble: by the schedule itself {len(charge.ranks)} ranks have nothing to do for a while, longest rank "
        f"{charge.rank}, {format_time(charge.worst)} {where}."
    )


def _late_launch(found: Causes, charge: Charge) -> str:
    spread = skews(found.timeline)
    spread = spread[np.isfinite(spread)]
    idle = "which ran nothing" if found.on_cpu else "whose GPU was idle"
    text = (
        f"Ranks reach collectives at different times because their hosts launch late: rank {charge.rank} waits "
        f"{format_time(charge.worst)} at {_op(found, charge.op)} for rank {charge.holder_rank}, {idle}"
    )
    if not len(spread):
        return text + "."
    low = format_time(float(spread.min()))
    high = format_time(float(spread.max()))
    return f"{text}; from first to last arrival it is {low} to {high}."


def _unknown(found: Causes, charge: Charge) -> str:
    return f"Communication is exposed: {_exposed(found, charge)}; what limits it is not known."


_WORDS: dict[str, Callable[[Causes, Charge], str]] = {
    "link": _narrow,
    "shared link": _shared,
    "kernels": _kernels,
    "latency": _latency,
    "late start": _late_start,
    "jitter": _jitter,
    "parameter server": _server,
    "schedule": _schedule,
    "late launch": _late_launch,
}
