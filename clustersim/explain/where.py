"""Where a step went, in three words that mean one thing everywhere, so that it adds up to the step.

* *Exposed transfer*: nothing computes, and a transfer is moving; by the dimension it runs over (TP, CP, EP, PP, DP).
* *Waiting for a peer*: nothing computes and nothing moves, because another rank of the same stage has not come to the
  collective yet; by dimension. Under EP it is what uneven loads of experts cost.
* *Bubble*: nothing computes, because another pipeline stage has nothing for this one yet. Its parts are those of
  :mod:`clustersim.explain.pipeline`: ``fill``, ``drain`` and ``gaps`` would be there with equal stages and free
  messages, ``imbalance`` is the wait for a slower stage, ``uneven`` for single passes that took longer and messages on
  their way, and ``tail`` is outside the passes: ranks that are done wait at the gradient norm or for the step's end.
  ``host`` is what of these two is there because the host of another stage is late, with its input for example: no more
  than the own work of that host takes longer than this stage's.

What is left is ``compute`` and ``other`` (the host, its copies), and ``unseen`` of a measured run: before a rank's
first span and behind its last, where profilers began and ended at other times. Of an asynchronous schedule, whose steps
overlap, ``drain`` is the end of the run, and ``imbalance`` what the busiest stage has to do more. Costs no run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.memo import kept_with_first
from clustersim.core.op_infos import of_each
from clustersim.core.timeline import Timeline
from clustersim.explain import pipeline
from clustersim.explain.breakdown import NOT_RECORDED, ROUNDING, steady_pieces
from clustersim.explain.dimensions import DIMENSIONS, dimension
from clustersim.explain.metrics import SteadyWindow, rest_of_step, steady_window
from clustersim.explain.pace import MOST_SPANS, RankClasses
from clustersim.explain.pieces import PieceRule, Pieces, PieceState, own_work_of_host, pieces, workers
from clustersim.explain.plays import TimedAction, edges, expected

BUBBLES = ("fill", "drain", "gaps", "imbalance", "uneven", "tail", "host")
"""The parts of a bubble."""
AT_ONCE = 2**18
"""Spans of ranks that are looked at together."""
NOTABLE = 0.01
"""Share of the window: a host that is so much later than another is told."""
WORDS = {
    "compute": "compute",
    "exposed": "exposed transfer",
    "waiting": "waiting for a peer",
    "bubble": "bubble",
    "other": "host, other",
    "unseen": NOT_RECORDED,
}
"""What every table calls the groups."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a step, mean over the ranks of a stage, or over all that train (``stage`` -1).

    ``exposed`` and ``waiting`` by :data:`~clustersim.explain.dimensions.DIMENSIONS`, ``bubble`` by :data:`BUBBLES`;
    what is nothing is not in them. ``unseen`` is what a profiler did not record.
    """

    stage: int
    compute: float
    other: float
    exposed: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)
    bubble: dict[str, float] = field(default_factory=dict)
    unseen: float = 0.0

    @property
    def groups(self) -> dict[str, float]:
        """Seconds by the keys of :data:`WORDS`; they add up to :attr:`step`."""
        return {
            "compute": self.compute,
            "exposed": sum(self.exposed.values()),
            "waiting": sum(self.waiting.values()),
            "bubble": sum(self.bubble.values()),
            "other": self.other,
            "unseen": self.unseen,
        }

    @property
    def step(self) -> float:
        """The step [s]."""
        return sum(self.groups.values())

    def parts(self) -> Iterator[tuple[str, str, float]]:
        """(key of :data:`WORDS`, part or "", seconds) of everything that is not nothing."""
        yield "compute", "", self.compute
        for key in ("exposed", "waiting", "bubble"):
            for name, seconds in getattr(self, key).items():
                yield key, name, seconds
        if self.other:
            yield "other", "", self.other
        if self.unseen:
            yield "unseen", "", self.unseen

    def to_dict(self) -> dict[str, float]:
        """Plain values, as ``clustersim run --json`` has them."""
        split = {
            f"{name}_s": getattr(self, key)
            for key, name in (("exposed", "exposed_transfer"), ("waiting", "waiting_for_peer"), ("bubble", "bubble"))
        }
        alone = {"compute_s": self.compute, "other_s": self.other}
        unseen = {"not_recorded_s": self.unseen} if self.unseen else {}
        return {"stage": self.stage, "step_s": self.step, **alone, **unseen, **split}


@kept_with_first(maxsize=None)
def where(timeline: Timeline) -> list[StageSeconds]:
    """The mean over all ranks that train, then, of a pipeline, a row per stage; of the steady state."""
    window = steady_window(timeline)
    if pipeline.has_pipeline(timeline):
        rows = [_with_unseen(timeline, window, row) for row in _of_stages(timeline, window)]
        return [_row(-1, np.mean(rows, axis=0)), *(_row(s, row) for s, row in enumerate(rows))]
    cut = steady_pieces(timeline)
    train = np.zeros(timeline.world_size)
    train[workers(timeline)] = 1.0
    weight = np.bincount(cut.class_of, weights=train, minlength=len(cut.ranks))
    return [_row(-1, weight @ _sums(cut, _columns(timeline, cut)) / (weight.sum() * window.done))]


def told_apart(figures: dict[str, Any], row: StageSeconds) -> dict[str, Any]:
    """:func:`clustersim.explain.metrics.summary` of a split model's run, in which no bubble counts as communication.

    Its ``exposed_transfer_s`` and ``waiting_for_peer_s`` become those of ``row`` (all ranks), and
    ``exposed_communication_s`` their sum; ``bubble_s`` is new, and ``idle_s`` what is left.
    """
    step = figures["step_time_s"]
    groups = row.groups
    exposed = groups["exposed"] + groups["waiting"]
    bubble = groups["bubble"]
    idle = rest_of_step(step, figures["compute_s"], exposed, bubble)
    shares = {"exposed_communication": exposed / step, "bubble": bubble / step, "idle": idle / step}
    return figures | {
        "exposed_communication_s": exposed,
        "exposed_transfer_s": groups["exposed"],
        "waiting_for_peer_s": groups["waiting"],
        "bubble_s": bubble,
        "idle_s": idle,
        "phase_shares": figures["phase_shares"] | shares,
    }


COLUMNS = (
    ("compute", ""),
    ("other", ""),
    *(("exposed", name) for name in DIMENSIONS),
    *(("waiting", name) for name in DIMENSIONS),
    *(("bubble", name) for name in BUBBLES),
    ("unseen", ""),
)
"""What a row of numbers is of."""
_COMPUTE, _OTHER, _EXPOSED, _WAITING = 0, 1, 2, 2 + len(DIMENSIONS)
_BUBBLE = _WAITING + len(DIMENSIONS)
_FILL, _DRAIN, _GAPS, _IMBALANCE, _UNEVEN, _TAIL, _HOST = (_BUBBLE + k for k in range(len(BUBBLES)))
_UNSEEN = _BUBBLE + len(BUBBLES)


def _row(stage: int, seconds: Floats) -> StageSeconds:
    by_state: dict[str, dict[str, float]] = {key: {} for key in WORDS}
    for (key, name), value in zip(COLUMNS, seconds.tolist(), strict=True):
        if value > 0:
            by_state[key][name] = value
    compute, other_s, unseen = (by_state[key].get("", 0.0) for key in ("compute", "other", "unseen"))
    return StageSeconds(stage, compute, other_s, by_state["exposed"], by_state["waiting"], by_state["bubble"], unseen)


def _columns(timeline: Timeline, cut: Pieces) -> Ints:
    """(pieces,) the column each belongs to; a bubble is ``tail`` so far, where its rank's list is over ``drain``."""
    dim = _dimensions(timeline)[cut.op]
    bubble = cut.state == PieceState.BUBBLE
    return np.select(
        [
            cut.computes,
            cut.state == PieceState.EXPOSED,
            cut.state == PieceState.STALL,
            bubble & (cut.why == PieceRule.NOTHING),
            bubble,
        ],
        [_COMPUTE, _EXPOSED + dim, _WAITING + dim, _DRAIN, _TAIL],
        _OTHER,
    )


@kept_with_first(maxsize=None)
def _dimensions(timeline: Timeline) -> Ints:
    """(n_ops + 1,) the dimension of each op, and that of no op."""
    of_op = of_each(timeline.ops, lambda op: DIMENSIONS.index(dimension(op)) if op.kind != "compute" else 0, np.int64)
    return np.append(of_op, DIMENSIONS.index("step end"))


def _sums(cut: Pieces, column: Ints) -> Floats:
    """(ranks of the cut, columns) seconds; ``column`` : of each piece."""
    n = len(COLUMNS)
    flat = np.bincount(cut.owner * n + column, weights=cut.seconds, minlength=n * len(cut.ranks))
    return flat.astype(np.float64).reshape(len(cut.ranks), n)


# --- pipelines ------------------------------------------------------------------------------------------------------


def _replicas(timeline: Timeline) -> tuple[Ints, Ints]:
    """(replicas, stages) ranks of pipelines that differ, and how many are alike; of too many, some stand for all."""
    kinds, count = pipeline.replicas(timeline)
    spans_per_rank = int(timeline.per_op()["ranks"].sum()) / timeline.world_size * kinds.shape[1]
    most = max(1, int(MOST_SPANS / max(spans_per_rank, 1.0)))
    if len(kinds) > most:
        parts = np.array_split(np.arange(len(kinds)), most)
        middle = [int(part[len(part) // 2]) for part in parts]
        kinds = kinds[middle]
        count = np.array([int(count[part].sum()) for part in parts])
    return kinds, count


def _of_stages(timeline: Timeline, window: SteadyWindow) -> list[Floats]:
    """Per stage its row, seconds a step."""
    replicas, count = _replicas(timeline)
    ranks = np.unique(replicas)
    sums, host, waits = _of_ranks(timeline, window, ranks)
    done = pipeline.actions(timeline, ranks.tolist(), window.steps.tolist())
    held_up = _held_up(host[np.searchsorted(ranks, replicas)].max(axis=0))
    held_up[held_up < NOTABLE * (window.end - window.begin)] = 0.0
    rows = [np.zeros(len(COLUMNS)) for _ in range(replicas.shape[1])]
    weights = (count / count.sum() / len(window.steps)).tolist()
    done_by = [pipeline.by_replica(done[s], replicas) for s in window.steps.tolist() if s in done]
    for k, weight in enumerate(weights):
        steps = [of_replicas[k] for of_replicas in done_by]
        places = np.searchsorted(ranks, replicas[k])
        for stage, row in enumerate(_of_replica(steps, sums[places], [waits[i] for i in places.tolist()])):
            rows[stage] += weight * _with_hosts(row, float(held_up[stage]))
    return rows


def _of_ranks(timeline: Timeline, window: SteadyWindow, ranks: Ints) -> tuple[Floats, Floats, list[Floats]]:
    """Of each of some ranks in the window its row of seconds, what it waits for its own host [s], and its bubbles;
    a part of the ranks at once."""
    nobody = np.zeros(timeline.world_size, dtype=np.int64)
    spans = int(timeline.per_op()["ranks"].sum()) * len(ranks) // timeline.world_size
    own = np.append(of_each(timeline.ops, own_work_of_host, np.bool_), False)  # the last one is no op's
    sums, host, waits = [], [], []
    for some in np.array_split(ranks, min(len(ranks), 1 + spans // AT_ONCE)):
        cut = pieces(timeline, window.begin, window.end, RankClasses(some, nobody, True))
        column = _columns(timeline, cut)
        sums.append(_sums(cut, column))
        host.append(_host_seconds(cut, own))
        waits += _waits(cut, column)
    return np.concatenate(sums), np.concatenate(host), waits


def _host_seconds(cut: Pieces, own: Bools) -> Floats:
    """(ranks of the cut,) seconds in which each waits for its own host's work. ``own`` : whether ops are that."""
    waits = own[cut.op] & (cut.state == PieceState.HOST)
    return np.bincount(cut.owner[waits], weights=cut.seconds[waits], minlength=len(cut.ranks)).astype(np.float64)


def _held_up(host: Floats) -> Floats:
    """(stages,) seconds that the slowest host takes longer than that of each stage; ``host`` : what each takes."""
    longer: Floats = host.max(initial=0.0) - host
    return longer


def _with_hosts(row: Floats, held_up: float) -> Floats:
    """A stage's row with what it waits for another stage's host told apart from ``tail`` and ``uneven``."""
    told = row.copy()
    for column in (_TAIL, _UNEVEN):
        seconds = min(float(told[column]), held_up - float(told[_HOST]))
        told[column] -= seconds
        told[_HOST] += seconds
    return told


def _with_unseen(timeline: Timeline, window: SteadyWindow, row: Floats) -> Floats:
    """A stage's row with what a profiler did not record of the window there."""
    left = window.step_time - float(row.sum())
    if timeline.source != "simulated" and left > ROUNDING * window.step_time:
        row[_UNSEEN] = left
    return row


def _waits(cut: Pieces, column: Ints) -> list[Floats]:
    """Per rank of the cut (n, 2) begin and end [s] of its bubbles."""
    bubble = column >= _BUBBLE
    spans = np.stack([cut.start[bubble], cut.stop[bubble]], axis=1)
    ends = np.searchsorted(cut.owner[bubble], np.arange(len(cut.ranks) + 1))
    return [spans[a:b] for a, b in pairwise(ends.tolist())]


def _of_replica(steps: list[list[TimedAction]], sums: Floats, waits: list[Floats]) -> Floats:
    """(stages, columns) seconds of one replica: its bubbles shared out over their parts."""
    moved = sums.copy()
    edges_of = [edges(step) for step in steps]
    if any(a[0][-1] > b[0][0] + 1e-9 for a, b in pairwise(edges_of)):
        return _overlapping(moved)
    moved[:, _TAIL] += moved[:, _DRAIN]
    moved[:, _DRAIN] = 0.0
    for step, inside in zip(steps, edges_of, strict=True):
        ideal = expected(step)
        for stage, ends in inside.items():
            fill, gaps, drain = (_covered(waits[stage], a, b) for a, b in pairwise(ends))
            ideal_stage = ideal[stage]
            parts = min(fill, ideal_stage.fill), min(drain, ideal_stage.drain), min(gaps, ideal_stage.gaps)
            excess = fill + gaps + drain - sum(parts)
            less = ideal_stage.fill + ideal_stage.drain + ideal_stage.gaps - sum(parts)
            uneven = min(excess, max(0.0, ideal_stage.uneven + less))
            moved[stage, [_FILL, _DRAIN, _GAPS, _IMBALANCE, _UNEVEN]] += [*parts, uneven, excess - uneven]
            moved[stage, _TAIL] -= fill + gaps + drain
    moved[:, _TAIL] = np.where(moved[:, _TAIL] < 1e-12 * moved.sum(axis=1), 0.0, moved[:, _TAIL])
    return moved


def _overlapping(moved: Floats) -> Floats:
    """Steps of an asynchronous schedule follow each other without a gap: the busiest stage sets the pace."""
    busy = moved[:, :_BUBBLE].sum(axis=1)
    waits = moved[:, _TAIL].copy()
    moved[:, _IMBALANCE] = np.minimum(waits, busy.max() - busy)
    moved[:, _UNEVEN], moved[:, _TAIL] = waits - moved[:, _IMBALANCE], 0.0
    return moved


def _covered(spans: Floats, begin: float, end: float) -> float:
    inside = np.minimum(spans[:, 1], end) - np.maximum(spans[:, 0], begin)
    return float(np.maximum(inside, 0.0).sum())
