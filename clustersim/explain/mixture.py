"""What experts cost a step: dispatch, combine, imbalance, the host and exposed data parallelism apart, so that they add
up to the step with all the rest.

The classes of :mod:`clustersim.explain.waterfall`, whose exposed transfers and waits are told apart by what they carry:

* ``dispatch``, ``combine``: tokens on their way to experts and back, and their gradients, with nothing that computes.
* ``imbalance``: waiting for the rank with the fullest experts, and kernels that take longer than the mean rank's.
* ``host``: launches and calls that kernels wait for.
* ``data_parallel``: gradients and parameters that nothing hides.
* ``compute``: everything that is computed; ``others``: other exposed transfers and waits; ``bubble``: of a pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from clustersim.core.facts import UNKNOWN, RunFacts
from clustersim.core.op_infos import kinds, of_each
from clustersim.core.texts import Plain
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.core.units import format_time
from clustersim.explain.breakdown import steady_pieces
from clustersim.explain.dimensions import dimension
from clustersim.explain.metrics import steady_window
from clustersim.explain.pieces import Pieces, PieceState, workers
from clustersim.explain.waterfall import Waterfall, waterfall

WORDS: Mapping[str, str] = {
    "compute": "compute",
    "dispatch": "dispatch",
    "combine": "combine",
    "imbalance": "imbalance",
    "host": "host and launch of kernels",
    "data_parallel": "exposed data parallelism",
    "others": "other transfers and waits",
    "bubble": "bubble",
}
"""What a second of a step of a mixture of experts can be, and what tables call it."""
_TOKENS = re.compile(r"^\w+ (dispatch|combine)\b")
_HOST = ("launch", "host")
_APART = (*_HOST, "exposed", "waiting", "bubble", "uneven")


@dataclass(frozen=True)
class MixtureSeconds:
    """Seconds of a step by the keys of :data:`WORDS`, mean over the GPUs that train; they add up to ``step``."""

    step: float
    parts: Mapping[str, float]

    def to_dict(self) -> Plain:
        """Plain values."""
        return {"step_s": self.step, "parts_s": dict(self.parts)}

    @property
    def headed(self) -> str:
        """In a line, with what it is."""
        return f"what experts cost: {self}"

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """(word, share of the step, seconds) of every part."""
        return [(WORDS[key], f"{s / self.step:.1%}", format_time(s)) for key, s in self.parts.items()]

    def __str__(self) -> str:
        shares = (f"{WORDS[key]} {seconds / self.step:.1%}" for key, seconds in self.parts.items())
        return ", ".join(shares)


def carries(op: OpInfo) -> str:
    """``"dispatch"`` or ``"combine"`` of an op that moves tokens; ``""`` of another.

    >>> carries(OpInfo("all_to_all dispatch gradient layers.3", "all_to_all", "ep"))
    'dispatch'
    """
    named = _TOKENS.match(op.name) if op.kind != "compute" else None
    return named.group(1) if named else ""


def mixture(
    timeline: Timeline, facts: RunFacts = UNKNOWN, cut: Pieces | None = None, fall: Waterfall | None = None
) -> MixtureSeconds | None:
    """Of the steady state of a run; None where no tokens travel to experts.

    cut, fall : the partition of the steady state and the waterfall of all GPUs, where the caller has them already.
    """
    if not any(map(carries, kinds(timeline.ops))):
        return None
    cut = cut or steady_pieces(timeline)
    fall = fall or waterfall(timeline, facts, cut)[0]
    exposed = _by_key(timeline, cut, PieceState.EXPOSED)
    waiting = _by_key(timeline, cut, PieceState.STALL)
    lost = dict(fall.lost)
    parts = dict.fromkeys(WORDS, 0.0)
    parts["compute"] = fall.useful + sum(seconds for key, seconds in lost.items() if key not in _APART)
    parts["host"] = sum(lost.get(key, 0.0) for key in _HOST)
    parts["bubble"] = lost.get("bubble", 0.0)
    parts["imbalance"] = lost.get("uneven", 0.0) + sum(waiting.get(key, 0.0) for key in ("dispatch", "combine"))
    for key in ("dispatch", "combine"):
        parts[key] = exposed.get(key, 0.0)
    parts["data_parallel"] = exposed.get("DP", 0.0) + waiting.get("DP", 0.0)
    named_s = (
        parts["dispatch"] + parts["combine"] + parts["data_parallel"] + parts["imbalance"] - lost.get("uneven", 0.0)
    )
    parts["others"] = lost.get("exposed", 0.0) + lost.get("waiting", 0.0) - named_s
    return MixtureSeconds(fall.step, {key: seconds for key, seconds in parts.items() if abs(seconds) > 0})


def _by_key(timeline: Timeline, cut: Pieces, state: PieceState) -> dict[str, float]:
    """Seconds of a step in a state by what is moved or waited for, mean over the GPUs that train."""
    words = of_each(timeline.ops, lambda op: carries(op) or (dimension(op) if op.kind != "compute" else ""), np.str_)
    keys: list[str] = words.tolist()
    train = np.zeros(timeline.world_size)
    train[workers(timeline)] = 1.0
    weight = np.bincount(cut.class_of, weights=train, minlength=len(cut.ranks))
    weight = weight / (weight.sum() * steady_window(timeline).done)
    inside = (cut.state == state) & (cut.op >= 0)
    seconds = np.bincount(cut.op[inside], weights=(cut.seconds * weight[cut.owner])[inside], minlength=len(keys))
    sums: dict[str, float] = {}
    for op in np.flatnonzero(seconds).tolist():
        sums[keys[op]] = sums.get(keys[op], 0.0) + float(seconds[op])
    return sums
