"""From a GPU's peak to the MFU: every second of a step in one class, so that they add up to it exactly.

Shares are of the time of all GPUs that train (of a row of a stage: of its GPUs), steady state. From the top down:

* ``bubble``, ``waiting``, ``exposed``, ``host``: nothing computes; as in :mod:`clustersim.explain.breakdown`.
* ``optimizer``: its kernels. ``again``: repeated forwards (activation checkpointing), with all their kernels.
* ``uneven``: kernels take longer than at their GPU's usual pace: slow GPUs, jitter, uneven loads of experts; and
  ``beside`` what they lose to transfers that run beside them. Both in the mean, so that luck may make them negative.
* ``launch``: the fixed cost of kernels, and of the host where it launches them more slowly than they run.
* ``memory``: kernels limited by memory traffic (norms, activations, casts, copies of gradients), and ``products``:
  those limited by arithmetic (matrix products, convolutions, attention): what they take beyond their FLOPs at peak.
  ``kernels`` is time of kernels whose class nobody knows, as in a profiler's trace.
* ``masked``: FLOPs that an MFU counts and nobody executes (half of causal attention, PaLM's convention), so that it is
  negative. What is left is ``useful``: the model's FLOPs at the dense peak in the run's dtype, which is the MFU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.facts import UNKNOWN, RunFacts
from clustersim.core.memo import kept_with_first
from clustersim.core.mix import Mix
from clustersim.core.op_infos import of_each, takes_sms
from clustersim.core.program import COMPUTE_STREAM
from clustersim.core.texts import Plain
from clustersim.core.timeline import Timeline
from clustersim.explain import pipeline
from clustersim.explain.breakdown import steady_pieces
from clustersim.explain.metrics import steady_window
from clustersim.explain.pieces import PieceRule, Pieces, workers

WORDS = {
    "bubble": "bubble",
    "waiting": "waiting for a peer",
    "exposed": "exposed transfer",
    "host": "host",
    "optimizer": "optimizer",
    "again": "recomputation",
    "uneven": "slow or uneven GPUs",
    "beside": "transfers beside kernels",
    "launch": "launch of kernels",
    "memory": "memory-bound kernels",
    "kernels": "kernels",
    "products": "matrix products below peak",
    "masked": "masked, but counted by MFU",
}
"""What every table calls the losses, from the top down."""
KEYS = (*WORDS, "useful")
"""What a second of a step can be."""
_MIX = tuple(KEYS.index(key) for key in ("useful", "products", "memory", "launch", "again", "products"))
"""Where the fields of a :class:`clustersim.core.mix.Mix` go; the FLOPs it has at peak are ``useful`` or ``masked``."""
_OF_STATE = ("kernels", "memory", "launch", "again", "optimizer", "exposed", "waiting", "bubble", "host")
"""What an instant in each :class:`~clustersim.explain.pieces.PieceState` counts as, in their order."""


@dataclass(frozen=True)
class Waterfall:
    """Seconds of a step by class, mean over the GPUs of a stage, or over all that train (``stage`` -1).

    ``lost`` has the keys of :data:`WORDS`, in their order, without those that are nothing; with ``useful`` they add up
    to ``step``.
    """

    stage: int
    step: float
    useful: float
    lost: Mapping[str, float]

    @property
    def mfu(self) -> float:
        """What is left of the peak."""
        return self.useful / self.step if self.step else 0.0

    def to_dict(self) -> Plain:
        """Plain values, in seconds of a step."""
        return {"stage": self.stage, "step_s": self.step, "useful_s": self.useful, "lost_s": dict(self.lost)}


def waterfall(timeline: Timeline, facts: RunFacts = UNKNOWN, cut: Pieces | None = None) -> list[Waterfall]:
    """All GPUs that train, then, of a pipeline, a row per stage.

    facts : with MFU and HFU, whose ratio says what an MFU counts beside what is executed (of a stage the same as of
        all). Without them nothing is ``masked``, and ``useful`` is what is executed for the first time.
    cut : the partition of the steady state, where the caller has it already.
    """
    whole = steady_pieces(timeline)
    cut = cut or whole
    window = steady_window(timeline)
    steady = window.steps
    of_rank = (_steady_sums(timeline) if cut is whole else _sums(timeline, cut)) / window.done
    train = workers(timeline)
    groups = [(-1, train), *(enumerate(pipeline.stages(timeline)) if pipeline.has_pipeline(timeline) else ())]
    weights = ((s, np.bincount(cut.class_of[r], minlength=len(cut.ranks)) / len(r)) for s, r in groups)
    rows = [(stage, weight @ of_rank) for stage, weight in weights]
    counted = 1.0
    executed = float(rows[0][1][KEYS.index("useful")])
    if facts.peak_flops and facts.mfu and facts.hfu and executed > 0:
        chosen = set(steady.tolist())
        flops = of_each(timeline.ops, lambda op: op.flops if op.step in chosen else 0.0, np.float64)
        op_flops = flops * timeline.per_op()["ranks"]
        counted = (
            facts.mfu / facts.hfu * float(op_flops.sum() / (len(train) * len(steady))) / facts.peak_flops / executed
        )
    return [_row(stage, seconds, counted) for stage, seconds in rows]


STAGES_AT_MOST = 8
"""Of more, some stand in a table for all: the first, the last, and those between at equal distances."""


def table(rows: Sequence[Waterfall]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Percent of the time as texts: heads of the columns (all GPUs, then stages), and (word, cells) from 100 % at the
    top to the MFU. Both are empty where no FLOPs are known."""
    if not rows or rows[0].useful <= 0:
        return [], []
    stages = list(rows[1:])
    last = STAGES_AT_MOST - 1
    if len(stages) > STAGES_AT_MOST:
        stages = [stages[i * (len(stages) - 1) // last] for i in range(STAGES_AT_MOST)]
    shown = [rows[0], *stages]
    lines = [("peak", ["100.0"] * len(shown))]
    for key, word in WORDS.items():
        shares = [100 * row.lost.get(key, 0.0) / row.step for row in shown]
        if any(abs(share) >= LEAST for share in shares):
            lines.append((word, [f"{-share:+.1f}" if abs(share) >= LEAST else "" for share in shares]))
    lines.append(("MFU", [f"{100 * row.mfu:.1f}" for row in shown]))
    return ["all", *(str(row.stage) for row in stages)], lines


def pace_note(lines: Sequence[tuple[str, list[str]]]) -> str:
    """Why kernels take less in these lines of :func:`table` than where the time goes; empty where they do not."""
    if not {WORDS["uneven"], WORDS["beside"]} & {word for word, _ in lines}:
        return ""
    return f"kernels ({WORDS['again']} too) count at their usual pace: what they take longer has its own lines"


LEAST = 0.05
"""Percent of the time below which a loss is no line."""


def _row(stage: int, seconds: Floats, counted: float) -> Waterfall:
    lost = dict(zip(KEYS, seconds.tolist(), strict=True))
    step = float(seconds.sum())
    executed = lost.pop("useful")
    lost["masked"] = executed * (1.0 - counted)
    return Waterfall(stage, step, executed * counted, {key: s for key, s in lost.items() if s})


@kept_with_first(maxsize=1)
def _steady_sums(timeline: Timeline) -> Floats:
    """:func:`_sums` of the steady state, for the page, its picture and the answer alike."""
    return _sums(timeline, steady_pieces(timeline))


def _sums(timeline: Timeline, cut: Pieces) -> Floats:
    """(ranks of the cut, keys) seconds of the window."""
    ops = timeline.ops
    n = len(cut.ranks)
    seconds = cut.seconds
    sums = np.zeros((n, len(KEYS)))
    has_mix = _and_none(of_each(ops, lambda op: op.mix is not None, np.bool_))[cut.op] & (cut.computes)
    of_state = np.array([KEYS.index(key) for key in _OF_STATE])
    np.add.at(sums, (cut.owner[~has_mix], of_state[cut.state[~has_mix]]), seconds[~has_mix])
    who = cut.owner[has_mix]
    op = cut.op[has_mix]
    spent = seconds[has_mix]
    parts = of_each(ops, lambda op_info: msgspec.structs.astuple(op_info.mix or Mix()), np.float64)
    mix = parts.reshape(len(ops), len(_MIX))
    usual = mix.sum(axis=1)
    took = seconds_of_ops(timeline, cut, who, op)
    alone = spent * np.divide(usual[op], took, out=np.ones(len(op)), where=took > 0)
    updates = of_each(ops, lambda op_info: op_info.phase == "optimizer", np.bool_)[op]
    share = np.divide(mix, usual[:, None], out=np.zeros_like(mix), where=usual[:, None] > 0)
    steps = np.flatnonzero(~updates)
    for column, key in enumerate(_MIX):
        np.add.at(sums[:, key], who[steps], share[op[steps], column] * alone[steps])
    np.add.at(sums[:, KEYS.index("optimizer")], who[updates], alone[updates])
    beside = _beside(timeline, cut)
    sums[:, KEYS.index("beside")] = beside
    sums[:, KEYS.index("uneven")] = np.bincount(who, weights=spent - alone, minlength=n) - beside
    return sums


def _and_none(of_op: Bools) -> Bools:
    """(n_ops + 1,) bool: the same, and for the place -1, which is no op, false."""
    return np.append(of_op, False)


def seconds_of_ops(timeline: Timeline, cut: Pieces, who: Ints, op: Ints) -> Floats:
    """Seconds that each piece's op took on its rank, from start to end; ``who`` ascends. Ranks are looked at a few at a
    time: all spans of a long run together are a gigabyte."""
    asked = np.zeros(len(timeline.ops), dtype=np.bool_)
    asked[op] = True
    first = np.searchsorted(who, np.arange(len(cut.ranks) + 1)).tolist()
    took = np.zeros(len(op))
    for sheet in timeline.sheets(cut.ranks, of_ops=asked):
        lasted = sheet.end - sheet.start
        for row, place in enumerate(np.searchsorted(cut.ranks, sheet.ranks).tolist()):
            own = slice(first[place], first[place + 1])
            took[own] = lasted[row, np.searchsorted(sheet.op, op[own])]
    return took


def _beside(timeline: Timeline, cut: Pieces) -> Floats:
    """(ranks of the cut,) seconds that kernels lose to collectives beside them, by the engine's own rule: a share of
    the time both are busy (:attr:`clustersim.core.program.Program.overlap_slowdown`)."""
    on_main = of_each(timeline.ops, lambda op: op.stream == COMPUTE_STREAM, np.bool_)
    main = _and_none(on_main)[cut.op] & (cut.why == PieceRule.KERNEL)
    both = main & _and_none(of_each(timeline.ops, takes_sms, np.bool_))[cut.beside]
    hidden = np.bincount(cut.owner[both], weights=cut.seconds[both], minlength=len(cut.ranks))
    return float(timeline.stats.get("overlap_slowdown", 0.0)) * hidden.astype(np.float64)
