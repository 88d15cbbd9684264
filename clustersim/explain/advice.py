"""What-ifs as advice on one run: in words of what its strategy has, and only where its memory has room for them."""

from __future__ import annotations

from clustersim.core.facts import RunFacts
from clustersim.core.memory_states import (
    DOES_NOT_FIT,
    FITS,
    MAY_RUN_OUT,
    UNLIKELY,
    likelihood,
    running_out,
    verdict_of,
)
from clustersim.core.units import format_bytes
from clustersim.explain.knobs import KNOB_NAMED
from clustersim.explain.stalls import ROOM_UNKNOWN

BUCKETS = KNOB_NAMED["bucket size"].turned
IN_PLACE_OF_BUCKETS = {"fsdp": "another number of blocks a unit (blocks_per_unit)"}
"""What strategies that have no buckets reduce gradients by: FSDP gathers and reduces its units, a block each by
default."""
NO_ROOM = "would not fit"
"""What is said of advice that memory has no room for."""
OF_SAMPLES = ("activations", "logits")
"""Parts of memory that grow with the samples of a micro-batch."""


def in_own_words(text: str, facts: RunFacts) -> str:
    """A what-if of buckets, told in words of the run's own strategy."""
    strategy = facts.inputs.get("strategy", {})
    kind = strategy.get("kind", "") if isinstance(strategy, dict) else ""
    return text.replace(BUCKETS, IN_PLACE_OF_BUCKETS.get(str(kind), BUCKETS))


def needed_with(facts: RunFacts, factor: float) -> float:
    """The least [bytes] that the fullest GPU needs with ``factor`` times the samples a micro-batch; 0 where its memory
    is not known."""
    memory = facts.memory
    if not memory.device_bytes:
        return 0.0
    return sum(memory.by.values()) + (factor - 1.0) * sum(memory.by.get(part, 0.0) for part in OF_SAMPLES)


def state_with(facts: RunFacts, factor: float) -> tuple[str, float]:
    """One of the states of the fullest GPU's memory with ``factor`` times the samples a micro-batch, and how likely it
    runs out; what allocator and libraries take besides is taken to grow as what is held does."""
    memory = facts.memory
    held = sum(memory.by.values())
    needed = needed_with(facts, factor)
    if not held or not needed:
        return FITS, 0.0
    more = needed / held
    least, most = memory.shown_range_bytes
    shown = memory.shown_bytes * more
    share = likelihood((least * more, most * more), shown, memory.device_bytes)
    return verdict_of(needed, shown, memory.device_bytes), share


def room_words(facts: RunFacts, factor: float) -> str | None:
    """Whether memory has room for ``factor`` times the samples a micro-batch, as it stands behind advice to take more;
    None where it has none, so that nobody advises them."""
    if not facts.memory.device_bytes:
        return ROOM_UNKNOWN
    state, share = state_with(facts, factor)
    if state == DOES_NOT_FIT:
        return None
    twice = f"x{factor:g}"
    return f"{twice}, memory: {running_out(share)}" if share > UNLIKELY else f"{twice} fits in memory"


BUT_RUNS_OUT = ", but it may run out of memory"


def may_run_out(share: float) -> str:
    """What stands behind advice whose memory may run out, so likely."""
    return f"{BUT_RUNS_OUT} (likelihood {share:.0%})"


def roomy(text: str, state: str, needed: float, device: float, runs_out: float = 0.0) -> str:
    """A what-if of memory with its verdict, which takes the place of an earlier one of a rougher look.

    text : what it would save. state : of :mod:`clustersim.core.memory_states`. needed, device : [bytes], asked and
    there. runs_out : how likely.

    >>> roomy("batch x2 would save 5.0%", "fits", 1.0, 2.0)
    'batch x2 would save 5.0%'
    >>> roomy("batch x2 would save 5.0%" + may_run_out(0.91), "may run out", 1.9, 2.0, 0.9)
    'batch x2 would save 5.0%, but it may run out of memory (likelihood 90%)'
    >>> roomy("batch x2 would save 5.0%", "fits", 1.6, 2.0, 0.4)
    'batch x2 would save 5.0%, but it may run out of memory (likelihood 40%)'
    >>> roomy("batch x2 would save 5.0%", "does not fit", 2**34, 2**33)
    'batch x2 would not fit in memory: it needs at least 16 GiB of 8 GiB'
    """
    text = text.partition(BUT_RUNS_OUT)[0]
    if state == DOES_NOT_FIT:
        turned = text.partition(" would save ")[0]
        return f"{turned} {NO_ROOM} in memory: it needs at least {format_bytes(needed)} of {format_bytes(device)}"
    if state == MAY_RUN_OUT or runs_out > UNLIKELY:
        return text + may_run_out(runs_out)
    return text
