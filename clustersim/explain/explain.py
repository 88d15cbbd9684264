"""A run explained: one verdict, and everything that backs it, as sentences and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from clustersim.core.arrays import Columns
from clustersim.core.facts import UNKNOWN, RunFacts
from clustersim.core.texts import Plain
from clustersim.core.timeline import Timeline
from clustersim.core.units import format_time
from clustersim.explain.advice import in_own_words, room_words, roomy
from clustersim.explain.bounds import warnings
from clustersim.explain.breakdown import Breakdown, breakdown
from clustersim.explain.cause_kinds import cause_kinds, subjects
from clustersim.explain.cause_table import sentence
from clustersim.explain.critical_path import CriticalPath, critical_path
from clustersim.explain.knobs import FACTOR, KNOBS
from clustersim.explain.metrics import a_step, step_word
from clustersim.explain.mixture import MixtureSeconds, mixture
from clustersim.explain.pieces import KERNELS, Pieces, workers
from clustersim.explain.stalls import Causes, causes, stalls
from clustersim.explain.step_words import LossRemedy, rest
from clustersim.explain.step_words import shares as step_shares
from clustersim.explain.verdict import verdict
from clustersim.explain.waterfall import Waterfall, waterfall
from clustersim.explain.whatif import unused, whatif

WORTH_A_WORD = 0.005
"""Shares below this are told together, as the rest."""
NOTHING = 5e-4
"""A cause that costs less than this share prints as 0.0 %, and is left to the table."""
KNOWN = 0.98
"""A critical path shorter than this share of a step is a part of one: traces do not say what everything waits for."""


@dataclass(frozen=True, eq=False)
class Explanation:
    """A ``verdict`` in one sentence, ``shares`` of the time, the ``causes`` that cost most, the critical ``path``,
    ``bounds`` of what knobs would save, ``warnings``, whose times it is about (``ranks``); the tables they were read
    off; the ``waterfall`` from peak to MFU; and of a mixture of experts, what these cost (``mixture``);
    ``charged`` : what all of it was read off."""

    verdict: str
    shares: str
    causes: list[str]
    path: list[str]
    bounds: list[str]
    warnings: list[str]
    ranks: str
    breakdown: Breakdown
    stalls: Columns
    whatif: Columns
    critical_path: CriticalPath
    waterfall: list[Waterfall]
    mixture: MixtureSeconds | None = None
    charged: Causes | None = None

    def __repr__(self) -> str:
        return f"<Explanation: {self.verdict}>"

    def to_dict(self) -> Plain:
        """Plain values."""
        names = ("verdict", "shares", "causes", "path", "bounds", "warnings", "ranks", "stalls", "whatif")
        tables = {"waterfall": [row.to_dict() for row in self.waterfall]}
        experts = {} if self.mixture is None else {"mixture": self.mixture.to_dict()}
        return {name: getattr(self, name) for name in names} | tables | experts


def explain(timeline: Timeline, facts: RunFacts = UNKNOWN, *, top: int = 10, bounded: bool = True) -> Explanation:
    """Explain the steady state of a run, with its ``top`` causes. Where it is not ``bounded``, the what-if bounds are
    left out: they take as long as the rest together."""
    all_causes = replace(causes(timeline), room=room_words(facts))
    shares = breakdown(timeline, all_causes.cut)
    table = stalls(all_causes, top)
    path = critical_path(timeline)
    bounds = _bounds(timeline, facts, bounded)
    falls = waterfall(timeline, facts, all_causes.cut)
    return Explanation(
        verdict=verdict(facts, all_causes, savings_of(bounds)),
        shares=_shares(timeline, shares, all_causes),
        causes=_sentences(all_causes, top),
        path=_path(path, shares.step_time_s, a_step(timeline)),
        bounds=bounds["text"].tolist(),
        warnings=warnings(timeline, facts),
        ranks=_ranks(all_causes.cut),
        breakdown=shares,
        stalls=table,
        whatif=bounds,
        critical_path=path,
        waterfall=falls,
        mixture=mixture(timeline, facts, all_causes.cut, falls[0]),
        charged=all_causes,
    )


def _sentences(causes: Causes, top: int) -> list[str]:
    """The costliest causes, each in a sentence: transfers of one kind over one dimension that the same kernels limit,
    such as dispatch and combine, forward and backward, are told once, with what they cost together."""
    sentences: list[tuple[float, str]] = []
    for kind in cause_kinds(causes):
        if kind.first.cause == "kernels" and len(kind.charges) > 1:
            together = f"Of {subjects(causes, kind)}, this is the costliest; all cost {kind.share:.1%} of a step."
            sentences.append((kind.share, f"{sentence(causes, kind.first)} {together}"))
        else:
            sentences += [(causes.share(charge), sentence(causes, charge)) for charge in kind.charges]
    sentences.sort(key=lambda pair: -pair[0])
    return [text for i, (share, text) in enumerate(sentences[:top]) if i == 0 or share >= NOTHING]


def savings_of(bounds: Columns) -> dict[str, float]:
    """By knob, what it saves of a step at most."""
    return dict(zip(bounds["knob"].tolist(), bounds["saving"].tolist(), strict=True))


def weighed_again(
    explanation: Explanation, facts: RunFacts, again: Mapping[str, float], remedies: Sequence[LossRemedy] = ()
) -> Explanation:
    """The explanation with its verdict by what knobs really save, where they were turned in a run of their own.

    again : by knob, the share of a step that it saved. remedies : of a split model's losses, choices made otherwise.
    """
    if not (again or remedies) or explanation.charged is None:
        return explanation
    savings = savings_of(explanation.whatif) | dict(again)
    return replace(explanation, verdict=verdict(facts, explanation.charged, savings, remedies, again))


def _bounds(timeline: Timeline, facts: RunFacts, bounded: bool) -> Columns:
    """What knobs would save at most; empty where nobody asks, or the run was measured."""
    if not bounded or timeline.source != "simulated":
        return {"text": np.zeros(0, dtype=str), "saving": np.zeros(0), "knob": np.zeros(0, dtype=str)}
    idle = unused(timeline)
    table = whatif(timeline, factor=FACTOR, knobs=tuple(k for k in KNOBS if k not in idle), peak_flops=facts.peak_flops)
    texts = [in_own_words(text, facts) for text in table["text"].tolist()]
    texts = [
        roomy(text, facts.memory.doubled, facts.memory.device_bytes) if knob == "batch" else text
        for knob, text in zip(table["knob"].tolist(), texts, strict=True)
    ]
    return table | {"text": np.array(texts)}


def _ranks(cut: Pieces) -> str:
    world = len(cut.class_of)
    shown = len(cut.ranks)
    if cut.sampled:
        return (
            f"{shown:,} of {world:,} stand for all where states and stalls are told: every pace, the slowest, the "
            f"fastest, and those waited for most; sums, paces and links are of all {world:,}"
        )
    if shown == world:
        return f"all {world:,}" if world > 1 else "the only one"
    return f"all {world:,}, which are {shown:,} when those that do the same at the same times count once"


def _shares(timeline: Timeline, table: Breakdown, all_causes: Causes) -> str:
    mean = table.over(workers(timeline))
    order = np.argsort(-mean, kind="stable")
    states = {table.states[i]: float(mean[i]) for i in order.tolist()}
    told = {name: share for name, share in states.items() if share >= WORTH_A_WORD}
    parts = [f"{name} {share:.1%}" for name, share in told.items()] + rest(told.values())
    sentence = f"{', '.join(parts)}, of a {format_time(table.step_time_s)} {step_word(timeline)}"
    if rows := all_causes.where:
        kernels = {name: share for name, share in states.items() if name in KERNELS}
        sentence = step_shares(rows[0], kernels, states["host"])
    hidden = table.hidden_over(workers(timeline))
    tail = f"; {format_time(hidden)} of communication{a_step(timeline)} is hidden behind compute" if hidden > 0 else ""
    late = late_words(all_causes)
    return f"{sentence}{tail}{f'; {late}' if late else ''}"


def late_words(all_causes: Causes) -> str:
    """What of the exposed transfer faster links do not save, since a slow rank lets it begin late; empty for little."""
    late = all_causes.late_exposed / (all_causes.workers * all_causes.length or 1.0)
    if late < WORTH_A_WORD:
        return ""
    return f"of the exposed transfer {late:.1%} began late for a slow rank's sake, and no faster link saves it"


def reach(path: CriticalPath, step: float, per: str) -> str:
    """How long a critical path is a step, and whether it is a part of one, of ``step`` [s]; ``per`` : behind a time."""
    length = sum(path.by_kind.values())
    if length < KNOWN * step:
        return f"of {format_time(length)}{per}, as far back as it can be followed"
    return f"of {format_time(length)}{per}"


def _path(path: CriticalPath, step: float, per: str) -> list[str]:
    total = sum(path.by_kind.values())
    if total <= 0:
        return []
    told = ((kind, seconds / total) for kind, seconds in path.by_kind.items())
    parts = [f"{kind} {share:.1%}" for kind, share in told if share >= NOTHING]
    lines = [f"{', '.join(parts[:6])} (shares of the path, {reach(path, step, per)})"]
    links = [f"{name} {format_time(seconds)}" for name, seconds in path.by_link.items() if seconds > 1e-4 * total]
    return lines + ([f"links on it: {', '.join(links[:3])}"] if links else [])
