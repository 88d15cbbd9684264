"""What-ifs as advice on one run: in words of what its strategy has, and only where its memory has room for them."""

from __future__ import annotations

from clustersim.core.facts import DoubledBatch, RunFacts
from clustersim.core.memory_states import DOES_NOT_FIT, UNLIKELY, running_out
from clustersim.core.units import format_bytes
from clustersim.explain.knobs import KNOB_NAMED
from clustersim.explain.stalls import ROOM_UNKNOWN

BUCKETS = KNOB_NAMED["bucket size"].turned
IN_PLACE_OF_BUCKETS = {"fsdp": "another number of blocks a unit (blocks_per_unit)"}
"""What strategies that have no buckets reduce gradients by: FSDP gathers and reduces its units, a block each by
default."""
NO_ROOM = "would not fit"
"""What is said of advice that memory has no room for."""


def in_own_words(text: str, facts: RunFacts) -> str:
    """A what-if of buckets, told in words of the run's own strategy."""
    strategy = facts.inputs.get("strategy", {})
    kind = strategy.get("kind", "") if isinstance(strategy, dict) else ""
    return text.replace(BUCKETS, IN_PLACE_OF_BUCKETS.get(str(kind), BUCKETS))


def room_words(facts: RunFacts) -> str | None:
    """Whether memory has room for twice the samples a micro-batch, as it stands behind advice to take more; None where
    it has none, so that nobody advises them."""
    doubled = facts.memory.doubled
    if doubled is None:
        return ROOM_UNKNOWN
    if doubled.state == DOES_NOT_FIT:
        return None
    likely = doubled.runs_out >= UNLIKELY
    return f"x2, memory: {running_out(doubled.runs_out)}" if likely else "x2 fits in memory"


BUT_RUNS_OUT = ", but it may run out of memory"


def may_run_out(share: float) -> str:
    """What stands behind advice whose memory may run out, so likely."""
    return f"{BUT_RUNS_OUT} ({running_out(share)})"


def roomy(text: str, doubled: DoubledBatch | None, device: float) -> str:
    """A what-if of twice the samples a micro-batch with the verdict on its memory; ``device`` : bytes a GPU has.

    >>> saves = "batch x2 would save 5.0%"
    >>> roomy(saves, None, 0.0), roomy(saves, DoubledBatch(1.0, "fits", 0.0), 2.0)
    ('batch x2 would save 5.0%', 'batch x2 would save 5.0%')
    >>> roomy(saves, DoubledBatch(1.9, "may run out", 0.9), 2.0)
    'batch x2 would save 5.0%, but it may run out of memory (likelihood of running out 90%)'
    >>> roomy(saves, DoubledBatch(2.0**34, "does not fit", 1.0), 2.0**33)
    'batch x2 would not fit in memory: it needs at least 16 GiB of 8 GiB'
    >>> roomy(saves, DoubledBatch(1.0, "does not fit", 1.0, "host memory does not fit: ..."), 2.0)
    'batch x2 would not fit: host memory does not fit: ...'
    """
    if doubled is None:
        return text
    if doubled.state == DOES_NOT_FIT:
        needed = f"it needs at least {format_bytes(doubled.needed_bytes)} of {format_bytes(device)}"
        why = f": {doubled.host}" if doubled.host else f" in memory: {needed}"
        return f"{text.partition(' would save ')[0]} {NO_ROOM}{why}"
    if doubled.runs_out >= UNLIKELY:
        return text + may_run_out(doubled.runs_out)
    return text
