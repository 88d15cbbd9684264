"""PipeDream: 1F1B that is never flushed, so that no stage idles once the pipeline is full (arXiv 1806.03377; SOSP'19).

Between two steps 1F1B waits until every backward has come home. PipeDream does not: micro-batches of the next step
enter at once, and each stage applies a gradient as soon as it has it. Two things are paid for the missing bubble:

* **Memory.** A micro-batch must meet in its backward the weights of its forward, so a stage keeps ("stashes") one
  version of its weights for each micro-batch in flight: p-r versions on stage r.
* **Staleness.** While a micro-batch is on its way to the last stage and back, stage r applies p-1-r other updates. Its
  gradient is that much older than the weights it changes: the first stage's most, the last stage's not at all.

PipeDream-2BW (arXiv 2006.09503) adds gradients up over the m >= p micro-batches of a step before it updates. No more
than one update then happens while a micro-batch is in flight, so two versions are enough on every stage
("double-buffered weights"), and by always using the older one every stage is late by exactly one update: W(t+1) =
W(t) - lr * grad(W(t-1)).

The bubble is that of one fill and one drain for the whole run, not for each step. ``steps`` is how many steps of m
micro-batches follow each other; micro-batch k belongs to step k // m.
"""

from __future__ import annotations

from clustersim.training.schedules.base import Orders, Schedule, ScheduleOption
from clustersim.training.schedules.gpipe import fill_and_drain
from clustersim.training.schedules.one_f_one_b import in_flight, one_f_one_b

STEPS = ScheduleOption("steps", int, 1, "how many steps follow each other without a flush between them", 1)


def pipedream(p: int, chunks: int, m: int, steps: int) -> Orders:
    """1F1B over the micro-batches of all steps."""
    return one_f_one_b(p, chunks, m * steps)


def _peak(rank: int, p: int, chunks: int, m: int, steps: int) -> int:
    return in_flight(rank, p, chunks, m * steps)


PIPEDREAM = Schedule(
    "pipedream",
    pipedream,
    synchronous=False,
    accumulates=False,
    options=(STEPS,),
    bubble=fill_and_drain,
    peak=_peak,
    versions=lambda rank, p: p - rank,
    staleness=lambda rank, p: p - 1 - rank,
)
PIPEDREAM_2BW = Schedule(
    "pipedream_2bw",
    pipedream,
    synchronous=False,
    aliases=("2BW",),
    options=(STEPS,),
    microbatches=lambda p, m, options: m >= p,
    needs="at least pp micro-batches between two updates",
    bubble=fill_and_drain,
    peak=_peak,
    versions=lambda rank, p: 2,
    staleness=lambda rank, p: 1,
)
