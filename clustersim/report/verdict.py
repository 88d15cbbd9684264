"""The one sentence a reader in a hurry takes away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clustersim.analysis.step_words import Loss
from clustersim.units import format_bytes, format_time

Facts = Mapping[str, Any]

CAUSE_WORDS = {
    "link": "a link that is too narrow ({subject})",
    "shared link": "a link that transfers share ({subject})",
    "kernels": "communication kernels that cannot fill the links",
    "latency": "the latency of collectives",
    "late start": "communication that starts late",
    "slow rank": "a slow rank ({subject})",
    "jitter": "waiting for whichever rank is last",
    "parameter server": "the parameter server",
    "schedule": "bubbles of the schedule itself",
    "late launch": "hosts that launch at different times",
    "host copies": "copies between host and GPU",
    "host": "waiting for the host",
    "idle device": "GPUs with nothing queued",
    "launch": "kernels shorter than their launches",
}
USEFUL = 0.02
"""Share of a step below which a loss is not worth a planner's time."""


def verdict(facts: Facts, world_size: int, table: Facts, lost: Facts, told: Sequence[Loss] = ()) -> str:
    """What the run came to, and what it loses most by.

    Parameters
    ----------
    facts : of the saved run; may be empty. world_size : its ranks. table : of ``breakdown``.
    lost : of ``stalls``, worst first. told : of a pipeline, its losses in words, worst first, instead.
    """
    return f"{_what(facts, world_size, table)}{_memory(facts)}; {_told(told) or _loss(lost)}."


def _what(facts: Facts, world_size: int, table: Facts) -> str:
    step = format_time(float(table["step_time_s"]))
    if not facts.get("model"):
        return f"A step of these {world_size:,} ranks takes {step}"
    gpus = facts.get("gpus", world_size)
    text = f"{facts['model']} on {gpus:,} {facts.get('device', 'GPU')} with {facts.get('strategy', '?')}: {step} a step"
    if facts.get("samples_per_s"):
        text += f", {facts['samples_per_s']:,.1f} samples per second"
    return text + (f" at {facts['mfu']:.1%} of peak" if facts.get("mfu") else "")


def _memory(facts: Facts) -> str:
    if facts.get("fits", True):
        return ""
    missing = float((facts.get("memory") or {}).get("missing_bytes") or 0.0)
    return f", if it fitted, but it needs {format_bytes(missing)} more memory than a GPU has"


def _subject(lost: Facts) -> str:
    """The costliest link by name, of all that are alike; else what the cause names."""
    link = str(lost["link_name"][0])
    return f"such as {link}" if "link" in str(lost["cause"][0]) and link else str(lost["subject"][0])


def _told(told: Sequence[Loss]) -> str:
    if not told or told[0].share < USEFUL:
        return ""
    return f"{told[0].share:.1%} of the step is lost because {told[0].why}"


def _loss(lost: Facts) -> str:
    if not len(lost["cause"]):
        return "nothing is lost"
    cause, share = str(lost["cause"][0]), float(lost["share"][0])
    words = CAUSE_WORDS.get(cause, cause).format(subject=_subject(lost))
    if share < USEFUL:
        return f"little is lost, most of it ({share:.1%}) to {words}"
    return f"the largest loss, {share:.1%} of the step, is {words}"
