"""How good predictions of any GPU are: kernels of a GPU that was left out, and steps with one own measurement known.

Kernels are those of ``../shared/measurements/kernels``, fitted and left out by ``tests/kernel_fit.py``. Steps are the
rows of a shared table that one publisher ran with nanotron, and every row beyond the smallest scale of its model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from clustersim.calibrate.score import Row as ScoredRow
from clustersim.calibrate.score import evaluate, predicted, read_table
from clustersim.core.texts import Table
from tests.evidence.expert_score import ABSENT, SHARED, ScoreLine, play
from tests.evidence.known_steps import gpus_of, known_rows
from tests.evidence.order import orders
from tests.evidence.step_rows import COLUMNS, publisher

if TYPE_CHECKING:
    from tests.kernel_fit import Errors, Judged

BIG, SMALL = "above 30 GFLOP", "below 1 GFLOP"
KERNELS: Mapping[str, tuple[tuple[str, float, float | None], ...]] = {
    "bf16": ((BIG, 0.07, 0.06), (SMALL, 0.20, None)),
    "fp8": ((BIG, 0.10, 0.09), (SMALL, 0.20, None)),
    "fp8_block": ((BIG, 0.10, 0.08), (SMALL, 0.20, None)),
    "nvfp4": ((BIG, 0.08, 0.08), (SMALL, 0.20, None)),
    "attention": (("above 10 GFLOP", 0.11, 0.09),),
    "mla": (("above 10 GFLOP", 0.15, None),),
    **{f"experts in {name}": ((BIG, 0.15, None),) for name in ("bf16", "fp8", "fp8_block", "nvfp4")},
    **{f"scan {name}": (("all", 0.15, None),) for name in ("gdn", "gdn_fused", "kda", "kda_fused")},
}
"""Kind -> classes that are aimed for, the median error with the GPU left out, and with ten of its rows known."""
BASES = ("all products", "bf16", "fp8", "fp8_block", "nvfp4", "attention")
"""Kinds that others begin from: fitted in any case."""


def kernel_lines() -> Iterator[ScoreLine]:
    """A line a kind and class; says so where the tables are absent. Fitting them all takes two minutes."""
    if not (SHARED / "kernels" / "gemm.csv.gz").exists():
        yield ScoreLine("kernels", ABSENT, "", float("nan"), False)
        return
    for kind, judged in judged_kernels(KERNELS):
        for label, target, own in KERNELS[kind]:
            yield kernel_line(f"{kind}, {label}", label, judged, (target, own))


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


def kernel_line(subject: str, label: str, judged: Judged, targets: tuple[float, float | None]) -> ScoreLine:
    """One class: in sample, left out, and with ten rows known."""
    target, own = targets
    parts = (("in sample", judged.in_sample), ("GPU left out", judged.left_out), ("ten rows known", judged.own_rows))
    reached = ", ".join(f"{name} {_error(errors, label)}" for name, errors in parts)
    aimed = f"{target:.0%} left out" + (f", {own:.0%} with ten" if own else "")
    met = judged.left_out[label].median <= target and (own is None or judged.own_rows[label].median <= own)
    return ScoreLine(subject, reached, aimed, judged.left_out[label].median, bool(met))


def _error(errors: Errors, label: str) -> str:
    return f"{errors[label].median:.1%} ({errors[label].high:.0%})"


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
