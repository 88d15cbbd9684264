"""Whether predictions put configurations in the order in which they were measured.

Who picks degrees and schedule by simulation needs the best to come first, however far all times are off. Rows are
compared that differ in these alone: one source's software, model, GPUs and samples per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from clustersim.calibrate.score import PredictedRow, Row, Score, grouped, predicted
from clustersim.core.arrays import Floats
from tests.evidence.step_rows import publisher

SAME = (
    "model",
    "layers",
    "framework",
    "gpu",
    "gpus",
    "seq_len",
    "global_batch",
    "precision",
    "recompute",
    "tp_overlap",
)
"""What compared rows have in common, beside their source."""

CONFIGURED = (
    "tp",
    "pp",
    "cp",
    "ep",
    "vpp",
    "schedule",
    "pp_layout",
    "micro_batch_per_gpu",
    "seq_parallel",
    "zero_stage",
    "fsdp",
    "recompute_detail",
    "a2a_dispatcher",
    "precision_recipe",
    "other",
)
"""What may differ between them: rows equal in this too are one configuration, measured more than once."""


@dataclass(frozen=True)
class RowOrder:
    """How one set of comparable rows was ordered.

    Parameters
    ----------
    source : prefix of its rows' case_id. what : model, GPUs, batch. n : configurations.
    best : whether the predicted best is the measured best. lost : what the predicted best takes more than that.
    spearman : rank correlation.
    """

    source: str
    what: str
    n: int
    best: bool
    lost: float
    spearman: float


def orders(rows: Iterable[Row]) -> list[RowOrder]:
    """Every set of two or more comparable rows that were predicted (:func:`clustersim.calibrate.score.evaluate`).

    Rows of one configuration are one, at their medians: what a later release gained is no choice of degrees.
    """
    orders_found = []
    sets = grouped(predicted(rows), lambda row: (publisher(row.cells), *_cells(row, SAME)))
    for key, set_rows in sets.items():
        took, foretold = _of_configurations(set_rows)
        if len(np.unique(took)) > 1:
            pick = float(took[int(np.argmin(foretold))])
            set_name = f"{key[1]}, {key[3]}, {key[5]} GPUs, batch {key[7]}"
            lost = pick / float(took.min()) - 1
            orders_found.append(RowOrder(key[0], set_name, len(foretold), lost == 0, lost, spearman(took, foretold)))
    return orders_found


SAME_COLLECTIVE = ("collective", "dtype", "size_bytes", "ranks")
"""What collectives have in common of which it is asked where they are fastest."""
SYSTEM = ("topology", "nodes", "nccl_version", "env")
"""What may differ between them: the machine, and NCCL's version and settings."""


def system_orders(rows: Iterable[Row]) -> list[RowOrder]:
    """Every set of one collective of one size on as many ranks, measured on several machines or with several settings;
    its source is ``"collectives"``."""
    orders_found = []
    for key, set_rows in grouped(predicted(rows), lambda row: _cells(row, SAME_COLLECTIVE)).items():
        took, foretold = _of_configurations(set_rows, SYSTEM)
        if len(np.unique(took)) > 1:
            lost = float(took[int(np.argmin(foretold))]) / float(took.min()) - 1
            rank = spearman(took, foretold)
            orders_found.append(RowOrder("collectives", " ".join(key), len(took), lost == 0, lost, rank))
    return orders_found


def _cells(row: PredictedRow, columns: Iterable[str]) -> tuple[str, ...]:
    return tuple(row.cells.get(column, "") for column in columns)


def _of_configurations(rows: Sequence[PredictedRow], configured: Sequence[str] = CONFIGURED) -> Floats:
    """(2, n) medians over the rows of each configuration, of what was measured and of what was predicted."""
    configurations = grouped(rows, lambda row: _cells(row, configured))
    return np.array(
        [
            np.median([(row.measured, row.predicted) for row in configuration], axis=0)
            for configuration in configurations.values()
        ]
    ).T


def spearman(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> float:
    """Rank correlation; equal values share the mean of their ranks; 0 where one side is all equal.

    >>> spearman([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    ranks = [_ranks(np.asarray(values, dtype=np.float64)) for values in (first, second)]
    a, b = (r - r.mean() for r in ranks)
    scale = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / scale if scale else 0.0


def _ranks(values: Floats) -> Floats:
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = ((last - counts + 1 + last) / 2)[which]
    return ranks


class OrderSummary(msgspec.Struct, frozen=True):
    """How some sets were ordered: how many, of how many rows; the share whose best is found; the mean rank correlation
    over sets of three and more; and the mean, median and 90th percentile of what the predicted best loses."""

    n_sets: int
    n_rows: int
    best_found: float
    spearman: float
    lost: float
    lost_p50: float
    lost_p90: float


class OrderedScore(Score, frozen=True, kw_only=True):
    """A validation's result with the ``order`` of comparable rows, by source and of ``"all"``."""

    order: dict[str, OrderSummary]


def ordered(result: Score) -> OrderedScore:
    """The result of a validation of steps, with the order of its configurations."""
    return OrderedScore(result.overall, result.by, result.rows, order=by_source(orders(result.rows)))


def by_source(row_orders: Sequence[RowOrder]) -> dict[str, OrderSummary]:
    """Per source and for ``"all"``."""
    parts = {"all": list(row_orders), **grouped(row_orders, lambda order: order.source)}
    return {name: _together(part) for name, part in parts.items() if part}


def _together(part_orders: Sequence[RowOrder]) -> OrderSummary:
    several = [order.spearman for order in part_orders if order.n > 2]
    lost = [order.lost for order in part_orders]
    return OrderSummary(
        n_sets=len(part_orders),
        n_rows=sum(order.n for order in part_orders),
        best_found=float(np.mean([order.best for order in part_orders])),
        spearman=float(np.mean(several)) if several else float("nan"),
        lost=float(np.mean(lost)),
        lost_p50=float(np.median(lost)),
        lost_p90=float(np.percentile(lost, 90)),
    )
