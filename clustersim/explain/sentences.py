"""What a cause looked like in this run, in plain words with numbers: one function for each cause whose sentence depends
on what is known. :mod:`clustersim.explain.cause_table` says which cause has which."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clustersim.core.program import DATA_LOADER
from clustersim.core.units import format_bandwidth, format_bytes, format_time
from clustersim.explain.columns import columns_of
from clustersim.explain.pace import UNLIKE, skews, slow_ranks
from clustersim.explain.step_words import bubble_sentence
from clustersim.explain.transfers import sort_of

if TYPE_CHECKING:
    from clustersim.explain.booking import Charge
    from clustersim.explain.stalls import Causes
    from clustersim.explain.transfers import TransferFacts

LIMITING = "Communication kernels, not links,"
ALIKE = 0.97
"""What is said of a limit; and the share of what links let through from which on kernels that sustain less are alike:
neither made faster alone would help."""


def op_quoted(causes: Causes, op: int) -> str:
    """An op's name in quotes."""
    return f"'{causes.timeline.ops[op].name}'" if op >= 0 else "nothing"


def _link(causes: Causes, link: int) -> str:
    use = causes.timeline.links
    return use.link_names[link] if use is not None and link >= 0 else "a link"


def _exposed(causes: Causes, charge: Charge) -> str:
    return f"rank {charge.rank} waits {format_time(charge.worst)} for {op_quoted(causes, charge.op)} alone"


def _moving(causes: Causes, charge: Charge) -> tuple[int, TransferFacts]:
    """The op whose transfer is charged, and what holds it: of the holder, where that is one."""
    op = charge.holder_op if charge.holder_op in causes.facts else charge.op
    return op, causes.facts[op]


SEVERAL = 2.0
"""Payload over a link's rate above which it takes several links side by side: two ranks alone, of which each sends half
of what an all_gather yields, have no more on one."""


def narrow_link(causes: Causes, charge: Charge) -> str:
    """A link that holds transfers, and what the next narrowest would let through."""
    use = causes.timeline.links
    if use is None or charge.link < 0 or causes.facts.keys().isdisjoint({charge.op, charge.holder_op}):
        return unknown_limit(causes, charge)
    _, fact = _moving(causes, charge)
    bandwidth = float(use.link_bandwidth[charge.link])
    name = _link(causes, charge.link)
    several = fact.alone > SEVERAL * bandwidth
    text = (
        f"Links such as {name} ({format_bandwidth(bandwidth)} each) hold the transfers: they let "
        if several
        else f"The link {name} ({format_bandwidth(bandwidth)}) holds the transfers: it lets "
    )
    text += f"{format_bandwidth(fact.alone)} of payload through"
    if not several and fact.alone > bandwidth:
        text += ", of which it carries a part"
    next_link, allowed = fact.runner_up
    if next_link >= 0 and np.isfinite(allowed):
        times = f"{allowed / fact.alone:.1f} times"
        text += f", where the next narrowest, {_link(causes, next_link)}, would let {times} as much"
    return f"{text}; {_exposed(causes, charge)}."


def shared_link(causes: Causes, charge: Charge) -> str:
    """A link that others use at the same time, or that is slower for a while."""
    op, fact = _moving(causes, charge)
    link = charge.link
    neighbours = sharers(causes, op, link)
    changed = causes.timeline.links is not None and link in causes.timeline.links.changing
    if not neighbours and not changed:  # others are on another link of its way
        link, neighbours = _shared_elsewhere(causes, op, link)
    opening = f"The link {_link(causes, link)} is shared with " + ", ".join(f"'{name}'" for name in neighbours[:3])
    free = "alone"
    if changed:
        beside = f" and shared with '{neighbours[0]}'" if neighbours else ""
        opening = f"The link {_link(causes, link)} is slower for a while{beside}"
        free = "at the link's own rate"
    elif not neighbours and len(causes.timeline.ops[op].detail.get("groups", ())) > 1:
        opening = f"The link {_link(causes, link)} is shared with other groups of the same op"
    elif not neighbours:
        opening = "Something on its way is slower than it was planned for"
    got = format_bandwidth(fact.rate)
    alone = format_bandwidth(min(fact.alone, fact.ceiling))
    return (
        f"{opening}: {op_quoted(causes, op)} gets {got} of payload where {free} it would get {alone}; "
        f"{_exposed(causes, charge)}."
    )


def _shared_elsewhere(causes: Causes, op: int, link: int) -> tuple[int, list[str]]:
    """Another link of an op's transfers that others use at the same time, the one with the least bandwidth first, and
    their names; ``link`` and nobody where there is none."""
    use = causes.timeline.links
    if use is None:
        return link, []
    own_loads = np.unique(use.transfer_load[use.transfer_op == op])
    crossed = np.unique(np.concatenate([use.loads[i][0] for i in own_loads.tolist()] or [np.zeros(0, dtype=np.int64)]))
    seen: set[str] = set()
    for crossed_link in crossed[np.argsort(use.link_bandwidth[crossed], kind="stable")].tolist():
        sort = sort_of(use.link_names[crossed_link])
        if sort not in seen and (neighbours := sharers(causes, op, crossed_link)):
            return crossed_link, neighbours
        seen.add(sort)
    return link, []


def sharers(causes: Causes, op: int, link: int) -> list[str]:
    """Names of other ops that used a link while an op's transfers ran, the longest beside it first."""
    use = causes.timeline.links
    if use is None or link < 0:
        return []
    crossing = np.array([bool((links == link).any()) for links, _ in use.loads], dtype=bool)
    op_of = use.transfer_op[use.segment_transfer]
    own = op_of == op
    if not own.any():
        return []
    begin = float(use.segment_start[own].min())
    end = float(use.segment_end[own].max())
    beside = np.minimum(use.segment_end, end) - np.maximum(use.segment_start, begin)
    foreign = ~own & crossing[use.transfer_load[use.segment_transfer]] & (beside > 0)
    seconds = np.bincount(op_of[foreign], weights=beside[foreign], minlength=len(causes.timeline.ops))
    order = np.argsort(-seconds, kind="stable")
    return [causes.timeline.ops[i].name for i in order.tolist() if seconds[i] > 0]


def limited_by_kernels(causes: Causes, charge: Charge) -> str:
    """Communication kernels that sustain less than the links, or the work of one host."""
    _, fact = _moving(causes, charge)
    ceiling = format_bandwidth(fact.ceiling)
    alone = format_bandwidth(fact.alone)
    if not np.isfinite(fact.alone):  # processes of one host
        return (
            f"The host's own work limits {op_quoted(causes, charge.op)}: its processes pass {ceiling} of payload on, "
            f"and no link is between them; {_exposed(causes, charge)}."
        )
    subject = "Communication kernels and links alike" if fact.ceiling > ALIKE * fact.alone else LIMITING
    return (
        f"{subject} limit {op_quoted(causes, charge.op)}: kernels sustain {ceiling} of payload "
        f"where the links would let {alone} through; {_exposed(causes, charge)}."
    )


def latency_bound(causes: Causes, charge: Charge) -> str:
    """Messages too small for bandwidth to matter."""
    ops = causes.timeline.ops
    op = charge.op if charge.op in causes.facts else charge.holder_op
    fact = causes.facts[op]
    info = ops[op]
    subject = "Messages" if info.kind in {"send", "recv"} else "Collectives"
    text = f"{subject} like {op_quoted(causes, op)} are latency-bound: {format_bytes(info.nbytes)} take "
    text += f"{format_time(fact.seconds)}, of which {format_time(fact.latency)} is latency"
    if np.isfinite(fact.alone) and fact.latency > 0:
        text += f"; bandwidth matters above {format_bytes(fact.latency * min(fact.alone, fact.ceiling))}"
    rank = charge.rank if op == charge.op else charge.holder_rank
    alike = _latency_bound_calls(causes, op, rank)
    in_line = len(alike) > 1 and len({ops[i].stream for i in alike}) == 1
    text += f". Rank {rank} has {len(alike):,} of them a step"
    text += ", one behind the other on the communicator" if in_line else ""
    queued = queue_seconds(causes, op)
    if queued > 0:
        text += f" (this one queued for {format_time(queued)})"
    return text + f"; {_exposed(causes, charge)}."


def _latency_bound_calls(causes: Causes, op: int, rank: int) -> list[int]:
    """Ops of one rank and the step of ``op`` that are latency-bound as it is: messages, or collectives of its kind.

    A message is an op at both ends, and each pipeline stage has its own op for what all stages do: only what the rank
    calls itself counts.
    """
    ops = causes.timeline.ops
    info = ops[op]
    kinds = {"send", "recv"} if info.kind in {"send", "recv"} else {info.kind}
    alike = (
        i
        for i, fact in causes.facts.items()
        if fact.limit == "latency" and ops[i].step == info.step and ops[i].kind in kinds
    )
    columns = columns_of(causes.timeline)
    return [i for i in alike if rank in columns.of(i).ranks]


def queue_seconds(causes: Causes, op: int) -> float:
    """Seconds an op was kept from starting by the op before it on its stream, on the first rank that runs it."""
    timeline = causes.timeline
    own = columns_of(timeline).of(op)
    if not len(own.ranks):
        return 0.0
    spans = timeline.spans([int(own.ranks[0])])
    ends = dict(zip(spans["op"].tolist(), spans["end"].tolist(), strict=True))
    needs = [ends[i] for i in timeline.ops[op].after if i in ends]
    return max(0.0, float(own.ready[0]) - max(needs)) if needs else 0.0


def late_start(causes: Causes, charge: Charge) -> str:
    """Gradients that wait although the network is idle."""
    info = causes.timeline.ops[charge.op]
    fact = causes.late[info.step]
    part = fact.idle / fact.backward if fact.backward > 0 else 0.0
    return (
        f"Communication starts late: {op_quoted(causes, charge.op)} ({format_bytes(info.nbytes)}) is the first to send "
        f"gradients, {format_time(fact.idle)} ({part:.0%} of backward) after the first of them were made, while the "
        f"network was idle; {format_time(charge.worst)} of what is exposed after backward could have been hidden there."
    )


def uneven_experts(causes: Causes, charge: Charge) -> str:
    """Ranks that wait for those whose experts get more tokens than others."""
    holder_text = ""
    if charge.holder_op >= 0:
        spans = columns_of(causes.timeline).of(charge.holder_op)
        took = spans.end - spans.start
        own = took[spans.ranks == charge.holder_rank]
        holder_text = f" while rank {charge.holder_rank} was still in {op_quoted(causes, charge.holder_op)}"
        if len(own) and np.median(took) > 0:
            holder_text += f", which takes it {float(own.max() / np.median(took)):.2f} times as long as the median rank"
    waiters = "ranks wait" if len(charge.ranks) > 1 else "a rank waits"
    return (
        f"Routing is skewed: some experts get more tokens than others, and {waiters} for those that hold them, longest "
        f"rank {charge.rank} at {op_quoted(causes, charge.op)}, {format_time(charge.worst)}{holder_text}; "
        "balanced routing (an auxiliary loss, a capacity) would help, faster links would not."
    )


def waits_for_host(causes: Causes, charge: Charge) -> str:
    """A GPU that waits for its host, and where only some hosts take so long, ranks that wait for theirs."""
    held = charge.holder_op >= 0
    op, rank = (charge.holder_op, charge.holder_rank) if held else (charge.op, charge.rank)
    spans = columns_of(causes.timeline).of(op)
    took = spans.end - spans.start
    own = took[spans.ranks == rank]
    worst = float(own.max()) if held and len(own) else charge.worst
    waits = f"The {'rank' if causes.on_cpu else 'GPU'} waits for"
    loads = causes.timeline.ops[op].name == DATA_LOADER
    text = f"{waits} its data loader, " if loads else f"{waits} the host: {op_quoted(causes, op)}, "
    text += f"{format_time(worst)} on rank {rank}"
    others = took[spans.ranks != rank]
    usual = float(np.median(took if len(took) > 2 else others)) if len(others) else worst  # of two, the other one's
    if len(charge.ranks) > 1 and worst > UNUSUAL * usual:
        text += f", where the median rank takes {format_time(usual)}; the others wait for it"
    elif held and not len(others):  # a stage's only rank
        text += "; the others wait for it"
    return f"{text}."


UNUSUAL = 2.0
"""A host that takes so many times the median one's time is late by itself."""


def jitter(causes: Causes, charge: Charge) -> str:
    """Ranks with paces of their own, or that differ from step to step."""
    spread = float(np.ptp(causes.pace))
    longest = f"longest rank {charge.rank} at {op_quoted(causes, charge.op)}, {format_time(charge.worst)}"
    if spread > UNLIKE:
        kinds = "machines with other work" if causes.on_cpu else "GPUs of several kinds"
        kinds += " or ranks with more work"
        if any(charge.cause == "uneven experts" for charge in causes.charges):
            kinds = "ranks whose experts get more tokens"
        return (
            f"Ranks have paces of their own (means within {spread:.1%}), as {kinds} have: "
            f"the faster ones wait for the slower, {longest}."
        )
    # A chase may lead back to whoever waits: a rank that is late to one meeting for the sake of an earlier one.
    whom = f" for rank {charge.holder_rank}" if charge.holder_rank not in (-1, charge.rank) else ""
    always = "" if slow_ranks(causes.timeline, causes.pace).any() else ", none is always slow"
    return (
        f"Ranks differ from step to step{always} (means within {spread:.1%}): everybody waits for the last, "
        f"{longest}{whom}."
    )


def parameter_server(causes: Causes, charge: Charge) -> str:
    """A server that holds its workers."""
    fact = causes.facts.get(charge.op)
    meets = causes.timeline.ops[charge.op].detail.get("meets", ())
    text = f"The parameter server holds {len(charge.ranks)} ranks: rank {charge.rank} spends "
    text += f"{format_time(charge.worst)} in {op_quoted(causes, charge.op)}"
    if charge.holder_op >= 0:
        text += f" while the server is busy with {op_quoted(causes, charge.holder_op)}"
    elif meets:
        text += f" with the server's {op_quoted(causes, int(meets[0]))}"
    if fact is not None and fact.link >= 0:
        text += f", {format_bandwidth(fact.rate)} over {_link(causes, fact.link)}"
        if fact.limit == "shared link":
            text += f", shared by all of them (alone: {format_bandwidth(min(fact.alone, fact.ceiling))})"
    return text + "."


def schedule_bubble(causes: Causes, charge: Charge) -> str:
    """What a schedule's own structure leaves empty."""
    if sentence := bubble_sentence(causes.timeline, causes.where) if causes.where else "":
        return sentence
    place = f"before {op_quoted(causes, charge.op)}" if charge.op >= 0 else "at the end of its list"
    return (
        f"Bubble: by the schedule itself {len(charge.ranks)} ranks have nothing to do for a while, longest rank "
        f"{charge.rank}, {format_time(charge.worst)} {place}."
    )


def late_launch(causes: Causes, charge: Charge) -> str:
    """Ranks whose hosts launch late, seen by others that wait."""
    spread = skews(causes.timeline)
    spread = spread[np.isfinite(spread)]
    idle = "which ran nothing" if causes.on_cpu else "whose GPU was idle"
    text = (
        f"Ranks reach collectives at different times because their hosts launch late: rank {charge.rank} waits "
        f"{format_time(charge.worst)} at {op_quoted(causes, charge.op)} for rank {charge.holder_rank}, {idle}"
    )
    if not len(spread):
        return text + "."
    low = format_time(float(spread.min()))
    high = format_time(float(spread.max()))
    return f"{text}; from first to last arrival it is {low} to {high}."


def unknown_limit(causes: Causes, charge: Charge) -> str:
    """A transfer that nothing known limits."""
    return f"Communication is exposed: {_exposed(causes, charge)}; what limits it is not known."
