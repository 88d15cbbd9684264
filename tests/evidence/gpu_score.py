"""How good predictions of any GPU are: kernels of a GPU that was left out, and steps with one own measurement known.

Kernels are those of ``../shared/measurements/kernels``, fitted and left out by ``tests/kernel_fit.py``. Steps are the
rows of a shared table that one publisher ran with nanotron, and every row beyond the smallest scale of its model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from clustersim.calibrate.score import PredictedRow, evaluate, grouped, predicted, read_table, statistics
from clustersim.calibrate.score import Row as ScoredRow
from clustersim.core.texts import Table
from tests.evidence.evidence import PARTS, SPLIT, STEPS
from tests.evidence.expert_score import ABSENT, SHARED, ScoreLine, play
from tests.evidence.known_steps import gpus_of, known_rows
from tests.evidence.order import orders
from tests.evidence.step_rows import COLUMNS, publisher
from tests.evidence.validate_steps import validate_steps

if TYPE_CHECKING:
    from tests.kernel_errors import Errors, Judged


@dataclass(frozen=True)
class KernelTarget:
    """What is aimed for of one class of kernels: the median error with the GPU left out, its 90th percentile, and the
    median with ten rows of that GPU known; None where nothing is."""

    label: str
    median: float
    high: float | None = None
    own: float | None = None

    def __str__(self) -> str:
        tail = f" ({self.high:.0%})" if self.high else ""
        return f"{self.median:.0%}{tail} left out" + (f", {self.own:.0%} with ten" if self.own else "")

    def met(self, judged: Judged) -> bool:
        """Whether the errors of a kind are within."""
        out = judged.left_out[self.label]
        tail = self.high is None or out.high <= self.high
        return (
            out.median <= self.median and tail and (self.own is None or judged.own_rows[self.label].median <= self.own)
        )


BIG, SMALL = "above 30 GFLOP", "below 1 GFLOP"
KERNELS: Mapping[str, tuple[KernelTarget, ...]] = {
    "bf16": (KernelTarget(BIG, 0.07, 0.16, 0.06), KernelTarget(SMALL, 0.20)),
    "fp8": (KernelTarget(BIG, 0.10, 0.26, 0.09), KernelTarget(SMALL, 0.20)),
    "fp8_block": (KernelTarget(BIG, 0.10, 0.28, 0.08), KernelTarget(SMALL, 0.20)),
    "nvfp4": (KernelTarget(BIG, 0.08, 0.22, 0.08), KernelTarget(SMALL, 0.20)),
    "attention": (KernelTarget("above 10 GFLOP", 0.11, 0.30, 0.09),),
    "mla": (KernelTarget("above 10 GFLOP", 0.15),),
    "experts": tuple(KernelTarget(f"in {name}, {BIG}", 0.15) for name in ("bf16", "fp8", "fp8_block", "nvfp4")),
    **{f"scan {name}": (KernelTarget("all", 0.15),) for name in ("gdn", "gdn_fused", "kda", "kda_fused")},
}
"""Kind -> classes that are aimed for."""
BASES = ("all products", "bf16", "fp8", "fp8_block", "nvfp4", "attention")
"""Kinds that others begin from: fitted in any case."""


def kernel_lines() -> Iterator[ScoreLine]:
    """A line a kind and class; says so where the tables are absent. Fitting them all takes two minutes."""
    if not (SHARED / "kernels" / "gemm.csv.gz").exists():
        yield ScoreLine("kernels", ABSENT, "", float("nan"), False)
        return
    for kind, judged in judged_kernels(KERNELS):
        for target in KERNELS[kind]:
            yield kernel_line(f"{kind}, {target.label}", judged, target)


def judged_kernels(kinds: Iterable[str]) -> Iterator[tuple[str, Judged]]:
    """Each kind, fitted in sample and with one GPU after the other left out."""
    folder = str(Path(__file__).resolve().parents[1])
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import kernel_fit
    import kernel_forms
    from kernel_rows import GPUS

    known: dict[str, kernel_fit.Fitted] = {}
    without: dict[str, dict[str, kernel_fit.Fitted]] = {name: {} for name in GPUS}
    wanted = set(kinds)
    for kind in kernel_forms.KINDS:
        if kind.name in wanted or kind.name in BASES:
            judged = kernel_fit.judge(kind, known, without, leave_out=True)
            known[kind.name] = judged.fitted
            if kind.name in wanted:
                yield kind.name, judged


def kernel_line(subject: str, judged: Judged, target: KernelTarget) -> ScoreLine:
    """One class: in sample, left out, and with ten rows known."""
    parts = (("in sample", judged.in_sample), ("GPU left out", judged.left_out), ("ten rows known", judged.own_rows))
    reached = ", ".join(f"{name} {_error(errors, target.label)}" for name, errors in parts)
    return ScoreLine(subject, reached, str(target), judged.left_out[target.label].median, target.met(judged))


def _error(errors: Errors, label: str) -> str:
    return f"{errors[label].median:.1%} ({errors[label].high:.0%})"


# ---- Published steps ------------------------------------------------------------------------------------------------

SHIPPED = Path(__file__).resolve().parents[1] / "data" / "measurements"
PUBLISHED: Mapping[str, tuple[float, float]] = {
    "steps, ddp": (0.066, 0.003),
    "steps, fsdp": (0.031, 0.003),
    "steps, single": (0.064, 0.003),
    "split models, dense, A100": (0.043, 0.003),
    "split models, dense, H100": (0.047, 0.003),
    "split models, mixture of experts, H100": (0.09, 0.0),
}
"""Part of the published steps -> the median error that it had, or that is aimed for, and how much worse it may be."""


def published_lines() -> Iterator[ScoreLine]:
    """The parts of the shipped tables of steps, every row played in sample."""
    for name in (STEPS, SPLIT):
        rows = predicted(validate_steps(SHIPPED / f"{name}.csv.gz").rows)
        parts = grouped(rows, lambda row, part=PARTS[name]: part(row.cells))
        for subject, (aim, slack) in PUBLISHED.items():
            if subject in parts:
                yield published_line(subject, parts[subject], aim, slack)


def published_line(subject: str, rows: list[PredictedRow], aim: float, slack: float) -> ScoreLine:
    """Median and 90th percentile over cases of one part."""
    stats = statistics(rows)
    middle, high = stats.median_abs_rel_error or 0.0, stats.p90_abs_rel_error or 0.0
    reached = f"in sample {middle:.1%} ({high:.0%}) of {stats.n_cases} cases"
    met = round(middle, 3) <= aim + slack + 1e-9
    return ScoreLine(subject, reached, f"{aim:.1%}" + (f" + {100 * slack:.1f} points" if slack else ""), middle, met)


# ---- Steps -----------------------------------------------------------------------------------------------------------


def nanotron_lines(most_gpus: int) -> Iterator[ScoreLine]:
    """nanotron's rows on up to so many GPUs: with nothing measured, and with one step of each model on one node."""
    path = SHARED / "training_steps_hybrid.csv"
    if not path.exists():
        yield ScoreLine("nanotron rows", ABSENT, "", float("nan"), False)
        return
    every = [row for row in read_table(path, COLUMNS) if publisher(row) == "nanotron"]
    rows = [row for row in every if gpus_of(row) <= most_gpus]
    scope = f"on up to {most_gpus} GPUs, {len(rows)} of {len(every)} rows"
    yield step_line(f"nanotron, nothing measured ({scope})", evaluate(rows, play), 0.20)
    known = known_rows(rows)
    yield step_line(f"nanotron, one step a model on one node known ({scope})", known, 0.12)
    yield order_line(known)


def order_line(rows: list[ScoredRow]) -> ScoreLine:
    """In how many panels of comparable rows the fastest is predicted as the fastest."""
    panels = orders(rows)
    best = sum(panel.best for panel in panels)
    share = best / len(panels) if panels else float("nan")
    lost = np.median([panel.lost for panel in panels]) if panels else float("nan")
    reached = f"{best} of {len(panels)} panels, the pick loses {lost:.1%} (median)"
    return ScoreLine("nanotron, best of each panel", reached, "80 %", share, bool(share >= 0.8))


def known_lines(tables: Iterable[Path], most_gpus: int) -> Iterator[ScoreLine]:
    """Steps of every source with the smallest scale of each model known: all of them, then by source."""
    rows = [row for path in tables if path.exists() for row in known_rows(_steps(path), most_gpus)]
    yield step_line(f"steps on up to {most_gpus} GPUs, one own measurement known", rows, 0.05, 0.15)
    sources = {publisher(row.cells) for row in predicted(rows)}
    for source in sorted(sources):
        part = [row for row in rows if publisher(row.cells) == source]
        yield step_line(f"  {source}", part, None)


def _steps(path: Path) -> list[Table]:
    """Rows of a table but nanotron's, whose sweeps vary all at once and have lines of their own."""
    return [row for row in read_table(path, COLUMNS) if publisher(row) != "nanotron"]


def step_line(subject: str, rows: list[ScoredRow], target: float | None, high: float | None = None) -> ScoreLine:
    """Median and 90th percentile of rows that were played, and how many were not."""
    played = predicted(rows)
    if not played:
        return ScoreLine(subject, f"none of {len(rows)} rows could be played", "", float("nan"), False)
    errors = np.array([row.rel_error for row in played])
    middle, p90 = np.percentile(np.abs(errors), (50, 90))
    reached = f"median {middle:.1%} ({np.median(errors):+.1%}), p90 {p90:.1%} of {len(played)} of {len(rows)}"
    aimed = "" if target is None else f"{target:.0%}" + (f" / {high:.0%}" if high else "")
    met = target is None or (middle <= target and (high is None or p90 <= high))
    return ScoreLine(subject, reached, aimed, float(middle), bool(met))
