"""Every published log, calibrated as a user would: what its file predicts before and after, and of sizes left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from msgspec import Struct

from clustersim.calibrate.fit.of_logs import FEWEST, LogPlays, fit_log, held_out_rows, measured_spans
from clustersim.calibrate.validate_nccl import publisher
from clustersim.core.arrays import Floats
from clustersim.core.calibrated import Calibration, Provenance
from clustersim.core.ranges import of_collective, size_class
from clustersim.files import traces
from clustersim.files.traces.samples import Sample, Samples

SIZE_CLASSES = tuple(size_class(nbytes) for nbytes in (2.0**16, 2.0**25, 2.0**26))


class ClassErrors(Struct, frozen=True):
    """Median |relative error| of a log's rows of one class of sizes.

    Parameters
    ----------
    before, after : of all rows, with the machine's file and with the calibrated one.
    held_out_before, held_out_after : of rows whose sizes the calibrated file was not fitted to; nan without.
    """

    rows: int
    before: float
    after: float
    held_out_before: float
    held_out_after: float

    @property
    def worse(self) -> bool:
        """Whether the calibrated file predicts its own log worse, in tenths of a percent."""
        return round(self.after, 3) > round(self.before, 3)


class CalibratedLog(Struct, frozen=True):
    """A publisher's rows of one machine and one collective; ``structure`` : what explains them, if something does;
    ``share`` : as of :class:`clustersim.calibrate.fit.FitResult`."""

    publisher: str
    topology: str
    collective: str
    structure: str
    share: float
    classes: dict[str, ClassErrors]


def logs(table: str | Path) -> dict[tuple[str, str, str], Samples]:
    """A table's rows by publisher, machine and collective, where they are enough to be calibrated."""
    by_log: dict[tuple[str, str, str], list[Sample]] = {}
    samples = traces.read(table)
    assert isinstance(samples, Samples)
    for row in samples.rows:
        by_log.setdefault((publisher({"source": row.source}), row.topology, row.kind), []).append(row)
    return {key: Samples(tuple(rows), " ".join(key)) for key, rows in by_log.items() if len(rows) >= FEWEST}


def calibrated_log(key: tuple[str, str, str], samples: Samples) -> CalibratedLog:
    """One log, calibrated on all of its rows, and on each half of its sizes."""
    log_plays = LogPlays(samples, key[1])
    whole = fit_log(log_plays)
    fitted = whole.fitted
    held_out = held_out_rows(log_plays)
    columns = (*(np.abs(times / fitted.measured - 1.0) for times in (fitted.before, fitted.after)),)
    columns_held_out = (held_out.before, held_out.after)
    classes = {}
    for name in SIZE_CLASSES:
        rows = np.array(whole.times.classes) == name
        unseen = np.array(held_out.classes) == name
        if rows.any():
            medians = [_median(column[rows]) for column in columns]
            classes[name] = ClassErrors(int(rows.sum()), *medians, *(_median(c[unseen]) for c in columns_held_out))
    return CalibratedLog(*key, whole.explained.structure.words if whole.explained else "", fitted.share, classes)


class ClaimedRow(Struct, frozen=True):
    """A row that a calibrated file was not fitted to.

    Parameters
    ----------
    size_class : of its size. outside : why its log says nothing of it; empty where it does. half, most : whether it
        lies within the range that half, and nine in ten, are claimed to lie within.
    """

    size_class: str
    outside: str
    half: bool
    most: bool


def claimed_rows(fitted: LogPlays, rest: LogPlays) -> Iterator[ClaimedRow]:
    """Rows of one part of a log, predicted by what another part tells, beside what is claimed of them."""
    log_fit = fit_log(fitted)
    times = rest.played(log_fit.structure)
    provenance = Provenance(spans=tuple(measured_spans(log_fit.times)))
    calibration = Calibration(nccl=log_fit.fitted.told, provenance=provenance)
    for row, seconds in zip(times.rows, times.predict(log_fit.fitted.values).tolist(), strict=True):
        group = row.choice.group
        mine = replace(group.topology, name="calibrated", calibration=calibration)
        kind = row.choice.request.kind
        around = of_collective(mine, row.nbytes, group.n_nodes, kind, group.size, group.launch)
        far = abs(row.seconds / seconds - 1.0)
        yield ClaimedRow(size_class(row.nbytes), around.outside, far <= around.p50, far <= around.p90)


def _median(errors: Floats) -> float:
    return float(np.median(errors)) if len(errors) else float("nan")


class ClassSummary(Struct, frozen=True):
    """Medians over logs of a class of sizes; how many of them the calibrated file predicts worse."""

    size_class: str
    logs: int
    worse: int
    before: float
    after: float
    held_out_before: float
    held_out_after: float
    held_out_worse: int


def summaries(calibrated: Sequence[CalibratedLog]) -> Iterator[ClassSummary]:
    """A line for each class of sizes."""
    for name in SIZE_CLASSES:
        rows = [log.classes[name] for log in calibrated if name in log.classes]
        unseen = [row for row in rows if not np.isnan(row.held_out_after)]
        yield ClassSummary(
            name,
            len(rows),
            sum(row.worse for row in rows),
            *(_median(np.array([getattr(row, column) for row in rows])) for column in ("before", "after")),
            _median(np.array([row.held_out_before for row in unseen])),
            _median(np.array([row.held_out_after for row in unseen])),
            sum(row.held_out_after > row.held_out_before + 0.001 for row in unseen),
        )
