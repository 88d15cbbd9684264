"""Why a GPU did not do useful work: every such instant charged to one cause, the causes that cost most first.

An instant of a rank that is not useful compute is charged to

* ``link``, ``shared link``, ``changed link``, ``kernels``, ``latency``: a transfer runs and nothing computes beside it;
  which of them is what holds that transfer (:mod:`clustersim.explain.transfers`).
* ``late start``: as above, but the network had been idle in this step's backward for as long before the first gradients
  came: had they come as they were made, that much of what is exposed could have been hidden.
* ``slow rank``, ``jitter``: it waits for a peer that still computes. A rank whose kernels take longer than its role's
  median over the whole window is slow, unless only longer transfers beside them are the reason; otherwise paces differ
  from step to step. To ``slow rank`` is charged, too, what is exposed of a transfer because it began late for that
  rank's sake (:mod:`clustersim.explain.late_peers`). ``uneven experts``: as both, where the rank computes longer in
  passes of experts, which get more tokens than others.
* ``parameter server``: it waits for a server, or for its link. ``schedule``: it waits for a peer by the schedule's own
  structure (a pipeline's bubble), or its list is over. ``late launch``: it waits for a peer whose device is idle too.
* ``host copies``, ``host``: copies to and from the host, its optimizer, its input; ``idle device``: nothing is queued.
* ``launch``: kernels run that are shorter than the time the host takes to launch them: what that takes beyond them.

A wait for a rank that itself waits is followed to the end of the chain (:mod:`clustersim.explain.chase`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clustersim.core.arrays import Columns, Floats
from clustersim.core.timeline import WITHOUT_GPU, Timeline
from clustersim.explain.booking import Charge
from clustersim.explain.breakdown import steady_pieces
from clustersim.explain.charges import ChargeBook
from clustersim.explain.late_start import LateStart, late_starts
from clustersim.explain.metrics import steady_window
from clustersim.explain.pace import pace_ratios
from clustersim.explain.pieces import Pieces, workers
from clustersim.explain.pipeline import has_pipeline
from clustersim.explain.transfers import TransferFacts, transfer_facts
from clustersim.explain.where import StageSeconds, where

ROOM_UNKNOWN = "where memory has room"
"""What is said of larger micro-batches where nobody knows the memory."""


@dataclass(frozen=True, eq=False)
class Causes:
    """All charges of a window, costliest first, with what explains them.

    ``steps`` in the window; ``facts`` per transferring op; ``pace`` (world_size,) kernels' time over the role's median;
    ``late`` per step, what a late start of its communication exposes (:mod:`clustersim.explain.late_start`);
    ``late_exposed`` [s], of all ranks together, what is exposed of transfers that began late for a slow rank's sake;
    ``room`` : whether memory has room for larger micro-batches, in words; None where it has none.
    """

    timeline: Timeline
    cut: Pieces
    steps: float
    charges: list[Charge]
    facts: dict[int, TransferFacts]
    pace: Floats
    late: dict[int, LateStart]
    late_exposed: float = 0.0
    room: str | None = ROOM_UNKNOWN

    @cached_property
    def where(self) -> list[StageSeconds]:
        """Where a step of a pipeline went; empty for a run without stages."""
        return where(self.timeline) if has_pipeline(self.timeline) else []

    @property
    def on_cpu(self) -> bool:
        """Whether the run was profiled where no GPU is."""
        return bool(self.timeline.stats.get(WITHOUT_GPU))

    @cached_property
    def workers(self) -> int:
        """How many ranks costs are means over: servers do not train."""
        return len(workers(self.timeline))

    @cached_property
    def length(self) -> float:
        """Seconds of the window, the same for every rank."""
        return max(self.cut.end - self.cut.begin, 0.0)

    def cost(self, charge: Charge) -> float:
        """Seconds of a step, mean over the ranks that train."""
        return charge.seconds / (self.workers * self.steps)

    def share(self, charge: Charge) -> float:
        """Of a step; what a window of no length lost is nothing."""
        return self.cost(charge) * self.steps / self.length if self.length > 0 else 0.0


def causes(timeline: Timeline) -> Causes:
    """Charge every instant of the steady state that is no useful compute to its cause."""
    cut = steady_pieces(timeline)
    steps = steady_window(timeline).done
    facts = transfer_facts(timeline)
    pace = pace_ratios(timeline)
    book = ChargeBook(timeline, cut, facts, pace)
    book.charge_all()
    late = late_starts(timeline, cut)
    book.move_late_starts(late)
    charges = sorted(book.charges.values(), key=lambda c: (-c.seconds, c.cause, c.subject))
    return Causes(timeline, cut, steps, charges, facts, pace, late, book.late_exposed)


def costliest(causes: Causes, top: int | None = None) -> list[Charge]:
    """The charges that cost anything, the costliest first."""
    return [c for c in causes.charges if c.seconds > 0][:top]


def stalls(causes: Causes, top: int | None = 10) -> Columns:
    """The causes that cost most, worst first.

    Returns columns ``cause`` (one of those above), ``subject`` (a link, a rank, a sort of op), ``cost_s`` float [s
    per step, mean over ranks], ``share`` float of the step, ``count`` of pieces, ``ranks`` how many ranks it touches;
    of the costliest piece ``op``, ``op_name``, ``rank``, ``worst_s`` [s], ``worst_begin``, ``worst_end`` [s],
    ``holder_rank``, ``holder_op`` (-1: none), ``link`` (id, -1: none), ``link_name``; and ``text``, the sentence.
    """
    from clustersim.explain.cause_table import sentence

    timeline = causes.timeline
    chosen = costliest(causes, top)
    names = timeline.links.link_names if timeline.links is not None else ()
    columns: Columns = {
        name: np.array([getattr(c, source) for c in chosen])
        for name, source in (
            ("cause", "cause"),
            ("subject", "subject"),
            ("count", "count"),
            ("op", "op"),
            ("rank", "rank"),
            ("worst_s", "worst"),
            ("worst_begin", "begin"),
            ("worst_end", "end"),
            ("holder_rank", "holder_rank"),
            ("holder_op", "holder_op"),
            ("link", "link"),
        )
    }
    return columns | {
        "cost_s": np.array([causes.cost(c) for c in chosen]),
        "share": np.array([causes.share(c) for c in chosen]),
        "ranks": np.array([len(c.ranks) for c in chosen]),
        "op_name": np.array([timeline.ops[c.op].name if c.op >= 0 else "" for c in chosen]),
        "link_name": np.array([names[c.link] if c.link >= 0 else "" for c in chosen]),
        "text": np.array([sentence(causes, c) for c in chosen]),
    }
