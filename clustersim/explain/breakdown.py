"""Where the time went: every instant of every GPU in exactly one state, so that shares add up to 100 %.

* An *exposed transfer* is time in which a GPU runs no kernel because a transfer is running. A trace shows one NCCL
  kernel for it and for the wait for a late peer before it, so that what Megatron-LM and PyTorch HTA call exposed (or
  non-overlapped) communication is both together; here the wait is a state of its own. Communication beside a kernel is
  *hidden* and costs only what the kernel loses to it; it is counted beside the states, not among them.
* *Bubble* is time a GPU is idle by the schedule's structure: a pipeline stage whose neighbours have nothing for it
  yet, or one whose own list is over. The *bubble fraction* is bubble time over the whole step (GPipe, Huang et al.
  2019, where p stages and m micro-batches give (p-1)/(m+p-1); Megatron-LM, Narayanan et al. 2021, divides by the ideal
  time without bubbles, (p-1)/m, which is this fraction f as f/(1-f)).
* *Waiting for a peer* is any other wait: ranks that run one op list can be apart only because one is slower, or is
  itself held; :func:`clustersim.explain.stalls.stalls` says which.
* *Not recorded* is the part of a measured run's window before a rank's first span and behind its last: profilers begin
  and end at other times on each rank, and shares are of the one window that the run has.
"""

from __future__ import annotations

import msgspec
import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.memo import kept_with_first
from clustersim.core.op_infos import kind_of, kinds
from clustersim.core.timeline import Timeline
from clustersim.explain.metrics import steady_window
from clustersim.explain.pieces import STATES, Pieces, by_class, pieces, ranks_with_spans

NOT_RECORDED = "not recorded"
"""The state of a measured rank before its first span and behind its last."""
ROUNDING = 1e-9
"""Share of a window that is no time of its own."""


class Breakdown(msgspec.Struct, frozen=True, eq=False):
    """Where the time went.

    states : (k,) str. rank : (w,) int. seconds : (w, k) float [s per step]. shares : (w, k) float, 1 in every row's
    sum, 0 of a rank that a measured run has nothing of. hidden_communication_s : (w,) float [s per step], a transfer
    runs beside a kernel. begin, end : the window [s].
    steps : how many it holds.
    """

    states: list[str]
    rank: Ints
    seconds: Floats
    shares: Floats
    hidden_communication_s: Floats
    begin: float
    end: float
    steps: float

    @property
    def step_time_s(self) -> float:
        """Seconds of a step."""
        return max(self.end - self.begin, 0.0) / self.steps

    def over(self, ranks: Ints) -> Floats:
        """(k,) float: shares of the time of these ranks together."""
        seconds = self.seconds[ranks].sum(axis=0)
        total = float(seconds.sum())
        together: Floats = seconds / total if total > 0 else seconds
        return together

    def hidden_over(self, ranks: Ints) -> float:
        """Seconds a step of a mean rank of these that a transfer runs beside a kernel; what rounds sums is none."""
        seconds = float(self.hidden_communication_s[ranks].mean())
        return seconds if seconds > ROUNDING * self.step_time_s else 0.0

    @property
    def mean(self) -> Floats:
        """(k,) float: shares of all ranks' time."""
        return self.over(self.rank)


def breakdown(timeline: Timeline, cut: Pieces | None = None) -> Breakdown:
    """Seconds and shares of each state, per rank, in the steady state, or in the window of a partition (``cut``)."""
    cut = cut or steady_pieces(timeline)
    n = len(cut.ranks)
    n_steps = steps_between(timeline, cut.begin, cut.end)
    of_class = _by_state(timeline, cut)
    hidden = np.bincount(cut.owner, weights=cut.seconds * (cut.beside >= 0), minlength=n)
    states = list(STATES)
    if timeline.source != "simulated":
        unseen = _not_recorded(timeline, cut, of_class)
        if unseen.any():
            states.append(NOT_RECORDED)
            of_class = np.column_stack([of_class, unseen])
    totals = of_class.sum(axis=1, keepdims=True)
    share = np.divide(of_class, totals, out=np.zeros_like(of_class), where=totals > 0)
    shares = share[cut.class_of]
    return Breakdown(
        states=states,
        rank=np.arange(timeline.world_size),
        seconds=(of_class / n_steps)[cut.class_of],
        shares=shares,
        hidden_communication_s=(hidden / n_steps)[cut.class_of],
        begin=cut.begin,
        end=cut.end,
        steps=n_steps,
    )


def _not_recorded(timeline: Timeline, cut: Pieces, of_class: Floats) -> Floats:
    """(ranks of the cut,) seconds of the window that no state has, of ranks that were measured."""
    length = cut.end - cut.begin
    measured = np.isin(cut.ranks, ranks_with_spans(timeline))
    unseen: Floats = np.where(measured, length - of_class.sum(axis=1), 0.0)
    return np.where(unseen > ROUNDING * length, unseen, 0.0)


def _by_state(timeline: Timeline, cut: Pieces) -> Floats:
    """(ranks of the cut, states) seconds; of an op's kernels each in its own state."""
    n = len(cut.ranks)
    k = len(STATES)
    computes = cut.computes
    rest = ~cut.computes
    seconds_of = np.bincount(cut.owner[rest] * k + cut.state[rest], weights=cut.seconds[rest], minlength=n * k)
    infos = kinds(timeline.ops)
    info_of = kind_of(timeline.ops)[cut.op[computes]]
    share = np.zeros((len(infos), k))
    for i in np.unique(info_of).tolist():
        for state, part in by_class(infos[i]).items():
            share[i, state] = part
    columns = [
        np.bincount(cut.owner[computes], weights=cut.seconds[computes] * share[info_of, state], minlength=n)
        for state in range(k)
    ]
    return seconds_of.astype(np.float64).reshape(n, k) + np.stack(columns, axis=1)


@kept_with_first(maxsize=1)
def steady_pieces(timeline: Timeline) -> Pieces:
    """The partition of the steady state: causes, tables and pictures read it."""
    window = steady_window(timeline)
    return pieces(timeline, window.begin, window.end)


def steps_between(timeline: Timeline, begin: float, end: float) -> float:
    """How many steps end inside a window, at least 1; where workers have paces of their own, so many as a mean worker
    does in as long."""
    if timeline.own_paces:
        return (end - begin) / steady_window(timeline).step_time
    ends = timeline.per_op()["end"]
    if not np.isfinite(ends).any():
        return 1
    steps = timeline.op_steps
    last = np.full(int(steps.max()) + 1, -np.inf)
    np.maximum.at(last, steps, ends)
    return max(1, int(((last > begin) & (last <= end * (1 + 1e-12))).sum()))
