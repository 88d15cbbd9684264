"""How well constants fitted to some measurements predict others: the error that may be expected of a new machine.

Three questions, each over all logs of a table (a log is all that one publisher measured on one machine, in one launch
mode):

- ``half``: a user's own logs: fitted on every other size of each case, the sizes between are predicted;
- ``scale``: fitted on a log's runs of up to 4 nodes, its larger ones are predicted (its largest, where none is above);
- ``platform``: fitted jointly on all other machines, a whole machine is predicted.

The defaults that a fit starts from, and the form of the time law, have seen most of these tables, so errors of
``platform`` are what a machine of known kinds of links may expect, not a blind test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clustersim.calibration.fit import Measured, NcclTimes, fit
from clustersim.calibration.score import Row, read_table, score
from clustersim.calibration.validate_nccl import COLUMNS, DIMENSIONS, measured
from clustersim.collectives.nccl_backend import choice
from clustersim.errors import ClusterSimError, nearest

MOST_NODES = 4
"""Largest runs that ``scale`` is fitted on."""

FEWEST = 3
"""Rows that a fit needs to be one."""

Pair = tuple[Row, Measured]
Split = tuple[list[Pair], list[Pair]]
"""Rows to fit, rows to predict."""


def cross_validate(
    path: str | Path, holdout: str, told: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """The error on rows that were held out; the result is :func:`clustersim.calibration.score.score`'s.

    Parameters
    ----------
    path : a table in the columns of ``nccl_tests.csv``. holdout : ``"half"``, ``"scale"`` or ``"platform"``.
    told : told how many of how many fits are done.

    Raises :class:`ClusterSimError` for another holdout, and where the table has nothing to hold out.
    """
    if holdout not in HOLDOUTS:
        raise ClusterSimError(f"no cross-validation {holdout!r}; {nearest(holdout, HOLDOUTS)}")
    pairs, results = [], []
    for row in read_table(path, COLUMNS):
        try:
            seconds, request, group = measured(row)
            pairs.append((row, Measured(seconds, choice(request, group), row["case_id"])))
        except (ValueError, ClusterSimError) as error:
            results.append({**row, "skipped": str(error)})
    splits = list(HOLDOUTS[holdout](pairs))
    for i, (known, unknown) in enumerate(splits):
        told(i, len(splits))
        if len(known) < FEWEST:
            results += [{**row, "skipped": f"fewer than {FEWEST} rows to fit"} for row, _ in unknown]
        else:
            results += _predicted(known, unknown, joint=holdout == "platform")
    if not any("predicted" in row for row in results):
        raise ClusterSimError(f"{path}: nothing to hold out for {holdout!r}: {_NEEDS[holdout]}")
    return score(results, DIMENSIONS)


def _predicted(known: list[Pair], unknown: list[Pair], *, joint: bool) -> Iterator[Row]:
    found = fit(NcclTimes(tuple(one for _, one in known), joint), choosy=not joint)
    times = NcclTimes(tuple(one for _, one in unknown), joint).predict(found.values)
    for (row, one), seconds in zip(unknown, times.tolist(), strict=True):
        error = seconds / one.seconds - 1.0
        yield {**row, "measured": one.seconds, "predicted": seconds, "rel_error": error}


def _grouped(pairs: Iterable[Pair], key: Callable[[Pair], object]) -> dict[object, list[Pair]]:
    found: dict[object, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(key(pair), []).append(pair)
    return found


def _logs(pairs: Iterable[Pair]) -> Iterable[list[Pair]]:
    """Rows of one machine, publisher and launch mode: what one user would have in hand."""
    return _grouped(pairs, lambda p: (p[0]["topology"], _publisher(p[0]), p[1].choice.group.launch)).values()


def _publisher(row: Row) -> str:
    """Whose log it is: the host and first two folders of its address, or all that the row says."""
    source = str(row.get("source", ""))
    return "/".join(source.split("/")[:5]) if "://" in source else source


def _half(pairs: list[Pair]) -> Iterator[Split]:
    for log in _logs(pairs):
        known, unknown = [], []
        for case in _grouped(log, lambda p: p[0]["case_id"]).values():
            case.sort(key=lambda p: p[1].nbytes)
            known += case[::2]
            unknown += case[1::2]
        if unknown:
            yield known, unknown


def _scale(pairs: list[Pair]) -> Iterator[Split]:
    for log in _logs(pairs):
        nodes = np.array([p[1].choice.group.n_nodes for p in log])
        limit = min(MOST_NODES, int(nodes.max()) - 1)
        known = [p for p, n in zip(log, nodes.tolist(), strict=True) if n <= limit]
        if known:
            yield known, [p for p, n in zip(log, nodes.tolist(), strict=True) if n > limit]


def _platform(pairs: list[Pair]) -> Iterator[Split]:
    platforms = _grouped(pairs, lambda p: p[0]["topology"])
    for left_out, unknown in platforms.items():
        known = [p for name, mine in platforms.items() if name != left_out for p in mine]
        if known:
            yield known, unknown


HOLDOUTS: Mapping[str, Callable[[list[Pair]], Iterator[Split]]] = {
    "half": _half,
    "scale": _scale,
    "platform": _platform,
}
"""Ways to hold rows out."""

_NEEDS = {
    "half": "a case needs two sizes at least",
    "scale": "a log needs runs of different numbers of nodes",
    "platform": "the table needs several machines",
}
