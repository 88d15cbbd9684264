"""The one sentence a reader in a hurry takes away: what a run came to, and what it loses most by."""

from __future__ import annotations

from collections.abc import Sequence

from clustersim.core.facts import RunFacts
from clustersim.core.units import format_bytes, format_time
from clustersim.explain.breakdown import breakdown
from clustersim.explain.pieces import KERNELS, workers
from clustersim.explain.stalls import Causes, costliest
from clustersim.explain.step_words import StepLoss, losses

HEADLINES = {
    "link": "{subject} cannot carry more",
    "shared link": "transfers share {subject}",
    "kernels": "communication kernels limit {subject}",
    "latency": "collectives are too small: latency, not bandwidth, limits {subject}",
    "late start": "communication starts too late in backward",
    "slow rank": "{subject} is slow, and everybody waits for it",
    "jitter": "ranks wait for the slowest",
    "parameter server": "workers wait for the parameter server",
    "schedule": "GPUs idle by the schedule's own structure",
    "late launch": "ranks arrive at collectives at different times, because their hosts launch late",
    "host copies": "GPUs wait for copies from and to the host",
    "host": "GPUs wait for the host ({subject})",
    "calls": "it is host-bound: the host calls layers more slowly than GPUs compute them; larger micro-batches, CUDA "
    "graphs, compiled layers or fewer stages help",
    "idle device": "it is launch-bound: GPUs idle with nothing queued",
    "launch": "it is launch-bound: the host launches kernels more slowly than they run",
    "unknown": "communication is exposed",
}
"""Why, after "because"."""
HEADLINES_ON_CPU = {
    "schedule": "ranks idle by the schedule's own structure",
    "host copies": "ranks wait for copies",
    "host": "ranks wait for the host ({subject})",
    "idle device": "between operators nothing is recorded",
    "launch": "operators are so short that calling them takes as long",
}
"""The same where no GPU is."""
DOING = {
    "compute-bound": "compute-bound kernels",
    "memory-bound": "memory-bound kernels",
    "launch-bound": "launching kernels",
    "recomputation": "repeated forwards",
    "optimizer": "the optimizer",
}
"""What most of a step goes to in which GPUs seldom wait."""
SMALL = 0.03
"""A run whose costliest cause costs less than this share of the step seldom waits."""


def verdict(facts: RunFacts, found: Causes) -> str:
    """What the run came to, and what it loses most by, in one sentence."""
    told = losses(found.timeline, found.where) if found.where else []
    return f"{came_to(facts, (found.cut.end - found.cut.begin) / found.steps)}; {_lost(found, told)}."


def came_to(facts: RunFacts, step: float) -> str:
    """What the run came to; ``step`` [s]."""
    said = f"{facts.what}: " if facts.what else ""
    said += f"{format_time(step)} a step"
    said += f", {facts.samples_per_s:,.1f} samples per second" if facts.samples_per_s else ""
    said += f" at {facts.mfu:.1%} of peak" if facts.mfu else ""
    missing = format_bytes(facts.missing_bytes)
    return said + (f", if it fitted, but it needs {missing} more memory than a GPU has" if facts.missing_bytes else "")


def _lost(found: Causes, told: Sequence[StepLoss]) -> str:
    worst = costliest(found, 1)
    if told and told[0].share >= SMALL:
        share = told[0].share
        why = told[0].why
    elif not worst:
        who = "ranks" if found.on_cpu else "GPUs"
        return f"{who} compute all the time, and {_mostly(found)}"
    else:
        words = HEADLINES | HEADLINES_ON_CPU if found.on_cpu else HEADLINES
        share = found.share(worst[0])
        why = words[worst[0].cause].format(subject=_subject(found))
    if share < SMALL:
        return f"{_mostly(found)}, and the largest wait is small, {share:.1%}: {why}"
    return f"{share:.1%} of the step is lost because {why}"


def _mostly(found: Causes) -> str:
    """What most of the step goes to where GPUs seldom wait: far from the peak they may be even so."""
    table = breakdown(found.timeline, found.cut)
    mean = table.shares[workers(found.timeline)].mean(axis=0)
    longest = int(mean[: len(KERNELS)].argmax())
    return f"{mean[longest]:.1%} of the step goes to {DOING[KERNELS[longest]]}"


def _subject(found: Causes) -> str:
    """What the costliest cause names; of links that are alike, one by its own name."""
    worst = costliest(found, 1)[0]
    use = found.timeline.links
    if "link" not in worst.cause or use is None or worst.link < 0:
        return worst.subject
    return f"{'links such as' if '#' in worst.subject else 'the link'} {use.link_names[worst.link]}"
