"""A sweep's rows as a plan looks at them: what varies, what is in question, and how fast each row is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from clustersim.core.arrays import Bools, Columns, Floats
from clustersim.core.economics import RunningCosts, costs, rates_by_name, watts_per_gpu
from clustersim.core.errors import ClusterSimError
from clustersim.core.ranges import alike
from clustersim.studies import sweep as sweeps
from clustersim.studies.sweep.spec import Question

MUTE = frozenset({"none", "no", "off", "on", "yes", "true", "false", "auto", "default", "all"})
"""Words that a sentence cannot begin with: "none does not fit" is about nothing."""


@dataclass(frozen=True)
class SweptCase:
    """One combination of the axes that are not in question.

    words : of it. rows : value in question -> number of its row in the table, those that have a result.
    """

    words: str
    rows: Mapping[Any, int]


@dataclass(frozen=True, eq=False)
class SweptRows:
    """A sweep's rows with a result. axes : columns that vary. question : as in the file, None where it asks none."""

    title: str
    table: Columns
    axes: tuple[str, ...]
    question: Question | None
    failed: int

    @cached_property
    def axis(self) -> str | None:
        """The column in question; without a question the first whose values are words."""
        if self.question is not None:
            return self.question.axis
        return next((name for name in self.axes if self.table[name].dtype.kind == "U"), None)

    @cached_property
    def unit(self) -> str:
        """``"tokens"``, or ``"samples"`` where a model has no tokens."""
        return "samples" if np.isnan(self.table["tokens_per_s"]).any() else "tokens"

    @cached_property
    def rate(self) -> Floats:
        """(rows,) tokens/s or samples/s of the whole machine."""
        return np.asarray(self.table[f"{self.unit}_per_s"], dtype=np.float64)

    @cached_property
    def cases(self) -> list[SweptCase]:
        """In the order of the grid."""
        cases: dict[str, dict[Any, int]] = {}
        for i in range(len(self.rate)):
            label = self.said(i, [name for name in self.axes if name != self.axis])
            value = None if self.axis is None else self.table[self.axis][i].item()
            cases.setdefault(label, {})[value] = i
        return [SweptCase(label, rows) for label, rows in cases.items()]

    @cached_property
    def fits(self) -> Bools:
        """(rows,) whether a row's memory is enough: others are timed as if it were."""
        return np.asarray(self.table["fits"], dtype=np.bool_)

    def roomy(self, case: SweptCase) -> Mapping[Any, int]:
        """The rows of a case that fit, by value in question; all of them where none does."""
        return {value: row for value, row in case.rows.items() if self.fits[row]} or case.rows

    @cached_property
    def possible(self) -> list[SweptCase]:
        """The cases in which anything fits; all of them where that is none."""
        return [case for case in self.cases if self.fits[list(case.rows.values())].any()] or self.cases

    def said(self, i: int, names: Sequence[str] | None = None) -> str:
        """A row by its axes."""
        shown = ((name, self.table[name][i].item()) for name in names or ())
        return ", ".join(str(v) if name == self.axis and isinstance(v, str) else worded(name, v) for name, v in shown)

    def called(self, value: Any) -> str:
        """A value in question as the subject of a sentence: by its own name, such as ``fsdp``, or with its axis where
        it says nothing alone, as numbers and ``none`` do."""
        speaks = isinstance(value, str) and value.lower() not in MUTE
        return value if speaks or self.axis is None else worded(self.axis, value)

    def error(self, i: int) -> float:
        """How far steps like a row's are off: half of the published ones lay within."""
        return float(self.table["off_by"][i])

    @cached_property
    def kinds(self) -> list[str]:
        """Which published steps rows are like."""
        return sorted(set(self.table["steps_like"].tolist()))

    def costs(self, i: int) -> RunningCosts:
        """What a row costs."""
        gpu_rates = rates_by_name(str(self.table["device"][i]))
        times = (float(self.table[name][i]) for name in ("step_time_s", "compute_s", "exposed_communication_s"))
        return costs(gpu_rates, int(self.table["gpus"][i]), float(self.rate[i]), watts_per_gpu(gpu_rates, *times))

    def alike(self, i: int, j: int) -> bool:
        """Whether two rows differ by less than their predictions are off."""
        return alike(float(self.rate[i]), float(self.rate[j]), max(self.error(i), self.error(j)))


def worded(name: str, value: Any) -> str:
    """A value of an axis for people.

    >>> worded("cluster.nodes", 4), worded("NIC", "25 Gb/s"), worded("strategy.micro_batch_size", 2)
    ('4 nodes', 'NIC 25 Gb/s', 'micro batch size 2')
    >>> worded("parallel.sequence_parallel", True)
    'sequence parallel true'
    """
    last = name.rsplit(".", 1)[-1].replace("_", " ")
    if last in {"nodes", "gpus", "steps"}:
        return f"{value:,} {last if value != 1 else last[:-1]}"
    if isinstance(value, bool):
        return f"{last} {str(value).lower()}"
    return f"{last} {value:g}" if isinstance(value, int | float) else f"{last} {value}"


def load(folder: str | Path) -> SweptRows:
    """The sweep in a folder. Raises :class:`ClusterSimError` where there is none, or no row has a result."""
    about = sweeps.about(folder)
    table = sweeps.read(folder)
    good = table["error"] == "" if "error" in table else np.zeros(0, dtype=bool)
    if not good.any():
        raise ClusterSimError(f"{folder}: no row of this sweep has a result")
    good_columns = {name: column[good] for name, column in table.items()}
    varied = tuple(name for name in about.axes if len(np.unique(good_columns[name])) > 1)
    return SweptRows(about.title, good_columns, varied, about.question, int((~good).sum()))
