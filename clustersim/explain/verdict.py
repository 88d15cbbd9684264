"""The one sentence a reader in a hurry takes away: what a run came to, and what it loses most by."""

from __future__ import annotations

from collections.abc import Sequence

from clustersim.core.facts import RunFacts
from clustersim.core.units import format_bytes, format_time
from clustersim.explain.breakdown import breakdown
from clustersim.explain.cause_table import headline
from clustersim.explain.pieces import KERNELS, workers
from clustersim.explain.stalls import Causes, costliest
from clustersim.explain.step_words import StepLoss, losses

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
BESIDE_LOSSES = frozenset({"slow rank", "uneven experts", "calls", "host", "host copies", "idle device", "launch"})
"""Causes that no :func:`clustersim.explain.step_words.losses` tells: a slow rank is in many of its losses at once, and
what the host takes is neither bubble, transfer nor waiting."""


def verdict(facts: RunFacts, causes: Causes) -> str:
    """What the run came to, and what it loses most by, in one sentence."""
    step_losses = losses(causes.timeline, causes.where) if causes.where else []
    return f"{came_to(facts, (causes.cut.end - causes.cut.begin) / causes.steps)}; {_lost(causes, step_losses)}."


def came_to(facts: RunFacts, step: float) -> str:
    """What the run came to; ``step`` [s]."""
    text = f"{facts.what}: " if facts.what else ""
    text += f"{format_time(step)} a step"
    text += f", {facts.samples_per_s:,.1f} samples per second" if facts.samples_per_s else ""
    text += f" at {facts.mfu:.1%} of peak" if facts.mfu else ""
    lacking = [(facts.missing_bytes, "a GPU"), (facts.memory.host.missing_bytes, "a node's host")]
    more = " and ".join(f"{format_bytes(nbytes)} more memory than {who} has" for nbytes, who in lacking if nbytes)
    return text + (f", if it fitted, but it needs {more}" if more else "")


def _lost(causes: Causes, step_losses: Sequence[StepLoss]) -> str:
    worst = costliest(causes, 1)
    beside = next((charge for charge in costliest(causes) if charge.cause in BESIDE_LOSSES), None)
    if beside is not None and step_losses and causes.share(beside) > max(SMALL, step_losses[0].share):
        share = causes.share(beside)
        why = headline(causes, beside.cause, beside.subject)
    elif step_losses and step_losses[0].share >= SMALL:
        share = step_losses[0].share
        why = step_losses[0].why
    elif not worst:
        who = "ranks" if causes.on_cpu else "GPUs"
        return f"{who} compute all the time, and {_mostly(causes)}"
    else:
        share = causes.share(worst[0])
        why = headline(causes, worst[0].cause, _subject(causes))
    if share < SMALL:
        return f"{_mostly(causes)}, and the largest wait is small, {share:.1%}: {why}"
    return f"{share:.1%} of the step is lost because {why}"


def _mostly(causes: Causes) -> str:
    """What most of the step goes to where GPUs seldom wait: far from the peak they may be even so."""
    table = breakdown(causes.timeline, causes.cut)
    mean = table.over(workers(causes.timeline))
    longest = int(mean[: len(KERNELS)].argmax())
    return f"{mean[longest]:.1%} of the step goes to {DOING[KERNELS[longest]]}"


def _subject(causes: Causes) -> str:
    """What the costliest cause names; of links that are alike, one by its own name."""
    worst = costliest(causes, 1)[0]
    use = causes.timeline.links
    if "link" not in worst.cause or use is None or worst.link < 0:
        return worst.subject
    return f"{'links such as' if '#' in worst.subject else 'the link'} {use.link_names[worst.link]}"
