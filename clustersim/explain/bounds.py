"""What physics allows: a lower bound beside every collective and every step, and what deserves a warning.

A collective's bound is its bytes over the narrowest cut of the machine (:mod:`clustersim.collectives.bounds`; the plan
carries it). A step's is the larger of a rank's FLOPs over peak and the bounds of the collectives that one of its
streams does one after another. A result that beats a bound is a bug, and is said to be one.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from clustersim.core.arrays import Columns, Floats
from clustersim.core.blocks import AT_ONCE
from clustersim.core.facts import UNKNOWN, RunFacts
from clustersim.core.op_infos import kind_of, kinds, of_each
from clustersim.core.timeline import Timeline
from clustersim.core.units import format_bytes, format_time
from clustersim.explain.hotspots import hotspots
from clustersim.explain.last_rank import last_to_most
from clustersim.explain.pace import by_experts, pace_ratios, peers_named
from clustersim.explain.pieces import workers
from clustersim.explain.transfers import sort_of

EXACT = 1e-6
"""Relative slack for rounding."""
BUSY = 0.95
BUSY_TIME = 0.1
"""A link this full for this share of the time is worth a warning."""
SLOW = 1.05
"""So is a rank whose kernels take this many times the median."""
DOUBLED = 1.5
"""From here on that is told as a multiple: "100% slower" is read as a halved rate as well as a doubled time."""
NEAR = 0.95
"""And memory this full."""


def bounds(timeline: Timeline, *, peak_flops: float | None = None) -> dict[str, Columns]:
    """Lower bounds and how near the run comes to them.

    peak_flops : float [FLOP/s] of one GPU; without it a step is bounded by its communication alone.

    Returns two tables. ``collectives``, a row per op that transfers and has a bound: ``name``, ``seconds`` (its fastest
    transfer), ``bound`` [s], ``reached`` (bound over seconds). ``steps``: ``step``, ``seconds`` (from the end of the
    step before), ``compute_bound``, ``communication_bound``, ``bound`` [s], ``reached``.
    """
    fastest = _fastest(timeline)
    lower_bound = of_each(timeline.ops, lambda op: op.detail.get("lower_bound", np.nan), np.float64)
    has = np.flatnonzero(~np.isnan(lower_bound) & np.isfinite(fastest))
    bound = lower_bound[has]
    seconds = fastest[has]
    reached = np.divide(bound, seconds, out=np.zeros(len(has)), where=seconds > 0)
    names = of_each(timeline.ops, lambda op: op.name, np.str_)[has]
    collectives = {"name": names, "seconds": seconds, "bound": bound, "reached": reached}
    return {"collectives": collectives, "steps": _steps(timeline, peak_flops)}


def _fastest(timeline: Timeline) -> Floats:
    """(n_ops,) float [s], the shortest span of each op from start to end; inf where there is none."""
    shortest = np.full(len(timeline.ops), np.inf)
    _, op, _, _, start, end = timeline._rows()
    np.minimum.at(shortest, op, end - start)
    for blocks in timeline.shelf.columns:
        _, start_of, end_of = blocks.which
        everyone = np.arange(len(blocks.ranks))
        step = max(1, AT_ONCE // len(everyone))
        for first in range(0, len(blocks.op), step):
            chunk = slice(first, first + step)
            took = blocks.stacked(end_of[chunk], everyone) - blocks.stacked(start_of[chunk], everyone)
            np.minimum.at(shortest, blocks.op[chunk], np.minimum.reduce(took, axis=0))
    return shortest


def _steps(timeline: Timeline, peak: float | None) -> Columns:
    ops = timeline.ops
    infos = kinds(ops)
    number = kind_of(ops)
    ends = timeline.per_op()["end"]
    step = timeline.op_steps
    step_numbers = np.unique(step[np.isfinite(ends)]) if len(ops) else np.zeros(0, dtype=np.int64)
    last = np.array([float(ends[step == s].max()) for s in step_numbers.tolist()])
    seconds = np.diff(last, prepend=0.0)
    compute = np.zeros(len(step_numbers))
    sent = np.zeros(len(step_numbers))
    for k, s in enumerate(step_numbers.tolist()):
        flops = defaultdict[str, float](float)
        waits = defaultdict[tuple[str, str], float](float)
        for i in np.flatnonzero((step == s) & np.isfinite(ends)).tolist():
            op = infos[number.item(i)]
            flops[op.role] += op.flops
            groups = op.detail.get("groups")
            # An op that only some ranks of its role take part in may wait for nobody on the others.
            if op.kind != "compute" and groups is not None and np.asarray(groups).size >= timeline.world_size:
                waits[op.role, op.stream] += float(op.detail.get("lower_bound", 0.0))
        compute[k] = max(flops.values(), default=0.0) / peak if peak else 0.0
        sent[k] = max(waits.values(), default=0.0)
    bound = np.maximum(compute, sent)
    # Ranks may begin a step before the last one has ended the step before: only the sum over steps is safe.
    reached = np.divide(bound, seconds, out=np.zeros(len(step_numbers)), where=seconds > 0)
    names = ("step", "seconds", "compute_bound", "communication_bound", "bound", "reached")
    return dict(zip(names, (step_numbers, seconds, compute, sent, bound, reached), strict=True))


def warnings(timeline: Timeline, facts: RunFacts = UNKNOWN) -> list[str]:
    """What deserves attention, in words."""
    return [
        *_beaten(timeline, facts.peak_flops),
        *_busy_links(timeline),
        *_slow_ranks(timeline),
        *_memory(facts.peak_memory_bytes, facts.memory.device_bytes),
        *left_out(timeline),
    ]


UNCOUNTED = "its time is in no figure"
"""How the reason ends for which a reader of profiles left out what the GPU did."""


def transfers_unknown(timeline: Timeline) -> bool:
    """Whether collectives were seen and none could be read: what is transferring, and who waits, is then not nothing,
    but not known."""
    return any(UNCOUNTED in name for name in timeline.stats) and all(op.kind == "compute" for op in timeline.ops)


def left_out(timeline: Timeline) -> list[str]:
    """What the GPU did and a profile does not tell enough of: shares are of the rest."""
    reasons = {name.removeprefix("skipped: "): count for name, count in timeline.stats.items() if UNCOUNTED in name}
    return [f"left out {int(count)}: {reason}; shares are of the rest" for reason, count in reasons.items()]


def _beaten(timeline: Timeline, peak: float | None) -> list[str]:
    table = bounds(timeline, peak_flops=peak)
    sentences = []
    per_collective = table["collectives"]
    steps = table["steps"]
    for k in np.flatnonzero(per_collective["seconds"] < per_collective["bound"] * (1 - EXACT)).tolist():
        took = format_time(float(per_collective["seconds"][k]))
        least = format_time(float(per_collective["bound"][k]))
        sentences.append(
            f"{per_collective['name'][k]!r} took {took}, less than the {least} its bytes need at the narrowest cut: a "
            f"bug"
        )
    total = float(steps["seconds"].sum())
    least_total = float(steps["bound"].sum())
    if total < least_total * (1 - EXACT):
        sentences.append(
            f"all steps took {format_time(total)}, less than their bound of {format_time(least_total)}: a bug"
        )
    return sentences[:3]


def _busy_links(timeline: Timeline) -> list[str]:
    table = hotspots(timeline, top=200)
    if not table:
        return []
    full = (table["heat"] > BUSY).mean(axis=1)
    sorts: dict[tuple[str, frozenset[str]], list[int]] = {}
    for k in np.argsort(-full, kind="stable").tolist():
        if full[k] >= BUSY_TIME:
            users = frozenset(name for name in table["users"][k].tolist() if name)
            sorts.setdefault((sort_of(table["name"][k]), users), []).append(k)
    return [_busy_sort(table, full, members) for members in sorts.values()][:3]


def _busy_sort(table: Columns, full: Floats, members: list[int]) -> str:
    """Of links of one sort that the same ops fill, the fullest first: its share of the time, and theirs."""
    k = members[0]
    users = " and ".join(repr(name) for name in table["users"][k].tolist() if name)
    text = f"{table['name'][k]} is more than {BUSY:.0%} full for {full[k]:.0%} of the time, by {users}"
    others = int(table["alike"][members].sum()) - 1
    if not others:
        return text
    text += f"; so are {others:,} links like it" if others > 1 else "; so is 1 link like it"
    least = f"{full[members[-1]]:.0%}"
    return text if least == f"{full[k]:.0%}" else f"{text}, for {least} at the least"


def _slow_ranks(timeline: Timeline) -> list[str]:
    ratio = pace_ratios(timeline)
    train = workers(timeline)
    slow = train[ratio[train] > SLOW]
    worst = slow[np.argsort(-ratio[slow], kind="stable")]
    if not len(worst):
        return []
    rank = int(worst[0])
    peers = peers_named(timeline, rank)
    theirs = f"{peers}'" if peers.endswith("s") else f"{peers}'s"
    last = last_to_most(timeline) if timeline.source != "simulated" else None
    if last is not None and last.rank != rank:
        longer = f"kernels of rank {rank} take {ratio[rank] - 1:.0%} longer than {theirs}"
        return [f"{longer}, but collectives wait for another: {last}"]
    why = ", by the tokens that its experts get" if by_experts(timeline)[rank] else ""
    text = f"rank {rank} is {ratio[rank] - 1:.0%} slower than {peers}{why}"
    if ratio[rank] >= DOUBLED:
        text = f"kernels of rank {rank} take {ratio[rank]:.2f} times {theirs}{why}"
    text += f"; {len(worst) - 1:,} more ranks are more than {SLOW - 1:.0%} slower" if len(worst) > 1 else ""
    return [text if last is None else f"{text}; {last}"]


def _memory(used: float | None, device: float) -> list[str]:
    if not used or not device or used < NEAR * device:
        return []
    if used > device:
        return [f"memory: {format_bytes(used)} are needed and a GPU has {format_bytes(device)}: it would not run"]
    return [f"memory: {format_bytes(used)} of {format_bytes(device)} are used: within 5% of the limit"]
