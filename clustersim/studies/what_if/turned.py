"""A split model run again with one choice of ``[parallel]`` made otherwise: what micro-batches, chunks, another
schedule, another layout or other degrees would really save.

Each is a run of its own, never a bound; what cannot be (heads that do not divide, too few layers) is left out, and so
is every knob of a part that the run does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clustersim.core.errors import ClusterSimError
from clustersim.core.memory_states import UNLIKELY
from clustersim.core.memory_use import Verdict
from clustersim.core.texts import Plain, Table
from clustersim.core.timeline import Timeline
from clustersim.explain.advice import may_run_out
from clustersim.explain.step_words import unit_costs
from clustersim.scenario.file.reading import Changes
from clustersim.scenario.result import Result
from clustersim.scenario.run.running import Prepared
from clustersim.scenario.run.split_step import Split
from clustersim.studies.what_if.rerun import step_time
from clustersim.training.parallel import ParallelConfig

SHORT = 20_000
"""Spans of a run that is short enough to be run again a dozen times without being asked."""
FEW = 4_000
MOST = 1_000_000
"""And ops, whoever does them, up to so many spans: ops are what a run takes its time for, half a second at most."""
SAME = 0.001
"""Less than this is no change."""
SCHEDULE = "schedule"
"""The loss that another order of passes, or more of them, is made against."""
NO_ROOM = ", but it does not fit in memory"
"""What is said of a choice that memory has no room for."""


@dataclass(frozen=True)
class ChoiceChange:
    """One choice made otherwise: in words, and as ``--set`` would say it.

    ``mends`` : which loss of a step it is made against, a ``key`` of :class:`clustersim.explain.step_words.StepLoss`;
    empty where it is against none alone.
    """

    what: str
    changes: Changes
    mends: str = ""


@dataclass(frozen=True)
class ChoiceOutcome:
    """What a choice came to: ``saving``, a share of the time per sample, negative where that gets longer; ``step_s``,
    the step [s]; ``fits`` in memory, and where it may not, in words (``room``)."""

    choice: ChoiceChange
    saving: float
    step_s: float
    fits: bool
    room: str = ""

    @property
    def text(self) -> str:
        """In a sentence."""
        more = "less" if self.saving >= 0 else "more"
        saving_text = "nothing changes" if abs(self.saving) < SAME else f"{abs(self.saving):.1%} {more} time per sample"
        return f"{self.choice.what}: {saving_text}{self.room} (run again)"

    def to_dict(self) -> Plain:
        """Plain values."""
        return {
            "what": self.choice.what,
            "changes": dict(self.choice.changes),
            "saving": self.saving,
            "step_time_s": self.step_s,
            "fits": self.fits,
        }


def short(timeline: Timeline) -> bool:
    """Whether a run is short enough to be run again and again."""
    spans = int(timeline.per_op()["ranks"].sum())
    return spans <= SHORT or (len(timeline.ops) <= FEW and spans <= MOST)


def turned(prepared: Prepared, timeline: Timeline) -> list[ChoiceOutcome]:
    """Every choice of a split model made otherwise, what saves most first; empty for any other."""
    if prepared.split is None:
        return []
    now = step_time(timeline) / _samples(prepared)
    outcomes = []
    for choice in choices(prepared, timeline):
        try:
            result: Result = prepared.scenario.changed(choice.changes).run()
        except ClusterSimError:  # degrees that do not divide: no choice for this model and machine
            continue
        step = step_time(result.timeline)
        saving = 1.0 - step / _samples(result.prepared) / now
        outcomes.append(ChoiceOutcome(choice, saving, step, result.fits, _room(result.verdict)))
    return sorted(outcomes, key=lambda outcome: -outcome.saving)


def _room(verdict: Verdict) -> str:
    """That a choice has too little memory, or how likely; empty where it has room."""
    if not verdict.possible:
        return NO_ROOM
    return "" if verdict.runs_out < UNLIKELY else may_run_out(verdict.runs_out)


def choices(prepared: Prepared, timeline: Timeline) -> Iterator[ChoiceChange]:
    """What could be chosen otherwise about the parts that this run has."""
    parallel = prepared.scenario.file.parallel
    if parallel is None or prepared.split is None:
        return
    if parallel.pp > 1:
        yield from _of_pipeline(prepared, parallel, prepared.split, timeline)
    if parallel.tp > 1:
        yield from _of_tensors(parallel)
    if prepared.mesh.size("dp") > 1 and prepared.scenario.strategy.name != "fsdp":
        was = parallel.overlap_grad_reduce
        timing = "gradients reduced after backward" if was else "gradients reduced beside backward"
        yield ChoiceChange(f"{timing} (overlap_grad_reduce)", {"parallel.overlap_grad_reduce": not was}, "exposed DP")
    yield from _degrees(prepared, parallel)


def _of_pipeline(
    prepared: Prepared, parallel: ParallelConfig, split: Split, timeline: Timeline
) -> Iterator[ChoiceChange]:
    m = _micro_batches(prepared)
    name = split.schedule.name
    chunks = len(split.partition.stages[0].chunks)
    if name != "naive":
        yield ChoiceChange(
            f"{2 * m} micro-batches instead of {m}", _with_micro_batches(parallel, 2 * m, prepared), SCHEDULE
        )
    if name in {"1f1b", "interleaved_1f1b"} and parallel.layout is None:
        changes = {"parallel.schedule": "interleaved_1f1b", "parallel.vpp": 2 * chunks}
        yield ChoiceChange(f"{2 * chunks} chunks a stage (vpp) instead of {chunks}", changes, SCHEDULE)
    for schedule_name in ("1f1b", "zb_h1"):
        if name != schedule_name and split.schedule.synchronous:
            chunk_change = {"parallel.vpp": 1} if parallel.vpp is not None else {}
            yield ChoiceChange(
                f"schedule {schedule_name} instead of {name}",
                {"parallel.schedule": schedule_name, **chunk_change},
                SCHEDULE,
            )
    if chunks == 1 and (layout := balanced(timeline)) is not None:
        counts = ", ".join(map(str, layout))
        yield ChoiceChange(f"layers of the stages {counts} (layout)", {"parallel.layout": layout}, "imbalance")


def _of_tensors(parallel: ParallelConfig) -> Iterator[ChoiceChange]:
    was = parallel.sequence_parallel
    without = {"parallel.tp_overlap": "none"} if was and parallel.tp_overlap != "none" else {}
    yield ChoiceChange(
        f"{'without' if was else 'with'} sequence_parallel", {"parallel.sequence_parallel": not was, **without}
    )
    if parallel.tp_overlap == "none":
        changes: Table = {"parallel.tp_overlap": "userbuffers"}
        if not was:
            changes["parallel.sequence_parallel"] = True
        extra = "" if was else ", with sequence_parallel"
        yield ChoiceChange(
            f"tensor-parallel transfers beside their products (tp_overlap){extra}", changes, "exposed TP"
        )


def _degrees(prepared: Prepared, parallel: ParallelConfig) -> Iterator[ChoiceChange]:
    """Half of one degree; twice another, or as many more data-parallel ranks."""
    if prepared.scenario.strategy.name == "fsdp":
        return
    degrees = {"tp": parallel.tp, "pp": parallel.pp}
    for halved, doubled in (("tp", "pp"), ("pp", "tp")):
        if degrees[halved] < 2 or degrees[halved] % 2:
            continue
        half: Table = {f"parallel.{halved}": degrees[halved] // 2}
        m = _micro_batches(prepared)
        halve = m % 2 == 0 and parallel.global_batch_size is None
        batch = _with_micro_batches(parallel, m // 2, prepared) if halve else {}
        yield ChoiceChange(
            f"{halved} {degrees[halved] // 2} instead of {degrees[halved]}, dp twice", half | dict(batch)
        )
        twice = {f"parallel.{doubled}": 2 * degrees[doubled]}
        yield ChoiceChange(f"{halved} {degrees[halved] // 2} and {doubled} {2 * degrees[doubled]}", half | twice)


def _micro_batches(prepared: Prepared) -> int:
    return prepared.scenario.config.gradient_accumulation_steps


def _with_micro_batches(parallel: ParallelConfig, m: int, prepared: Prepared) -> Changes:
    """So many micro-batches, said where the scenario says them."""
    if parallel.global_batch_size is not None:
        return {"parallel.global_batch_size": parallel.global_batch_size * m // _micro_batches(prepared)}
    name = "strategy.gradient_accumulation_steps" if parallel.microbatches is None else "parallel.microbatches"
    return {name: m}


def _samples(prepared: Prepared) -> float:
    config = prepared.scenario.config
    return float(config.rank_samples * prepared.mesh.size("dp"))


def balanced(timeline: Timeline) -> list[int] | None:
    """Layers of each stage if layers moved from the slowest to the fastest stage until that helps no more; None where
    stages are as even as whole layers can be."""
    cost = unit_costs(timeline)
    numbered = {s: [c for name, c in units.items() if name.rpartition(".")[2].isdigit()] for s, units in cost.items()}
    layer = float(np.median([c for units in numbered.values() for c in units] or [0.0]))
    counts = [len(numbered[s]) for s in sorted(numbered)]
    busy = np.array([sum(cost[s].values()) for s in sorted(cost)])
    if layer <= 0:
        return None
    before = list(counts)
    while True:
        slow = int(np.argmax(busy))
        fast = int(np.argmin(busy))
        if counts[slow] < 1 or busy[fast] + layer >= busy[slow] * (1 - 1e-9):
            break
        counts[slow], counts[fast] = counts[slow] - 1, counts[fast] + 1
        busy[[slow, fast]] += [-layer, layer]
    return counts if counts != before else None
