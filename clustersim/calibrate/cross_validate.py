"""How well constants predict what they were not fitted to: the error that may be expected of a new machine.

Six questions over tables of logs (a log is all that one publisher measured on one machine, in one launch mode):

- ``half``: a user's own logs: fitted on every other size of each case, the sizes between are predicted;
- ``scale``: fitted on a log's runs of up to 4 nodes, its larger ones are predicted (its largest, where none is above);
- ``platform``: a whole machine is predicted from what all others say of its kind, and nothing of its own;
- ``publisher``: everything that one publisher measured is predicted from what all others did, on whatever machine;
- ``transport``: as ``platform``, with all machines of its transport left out;
- ``three-numbers``: ``platform``, and three numbers of each log: 8 bytes and 1 MiB on its smallest scale, 1 GiB on the
  next (of all_reduce where the log has it, and of the sizes that it has the nearest).

The form of the time law and the documented values were written by people who had seen most of these tables, so errors
of ``platform`` are what a machine of known kinds of links may expect, not a blind test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from clustersim.calibrate.fit import MeasuredCollective, NcclTimes, fit
from clustersim.calibrate.fit.learn import LearnedConstants, learn, with_learned
from clustersim.calibrate.nccl_tables import measured_rows
from clustersim.calibrate.score import (
    PredictedRow,
    Row,
    Score,
    SkippedRow,
    grouped,
    predicted,
    score,
    scored,
)
from clustersim.calibrate.validate_nccl import DIMENSIONS, measured, publisher
from clustersim.collectives.costs import costs_of_kind
from clustersim.collectives.fitted.trusted import trusted_machine
from clustersim.collectives.nccl_backend import choice, seconds
from clustersim.core.arrays import Bools
from clustersim.core.costs import CommunicationCosts
from clustersim.core.errors import ClusterSimError, nearest
from clustersim.core.texts import Table

MOST_NODES = 4
"""Largest runs that ``scale`` is fitted on."""

FEWEST = 3
"""Rows that a fit needs to be one."""

NUMBERS = (2.0**3, 2.0**20, 2.0**30)
"""Sizes [bytes] of ``three-numbers``, the last of them on the next scale."""

Pair = tuple[Table, MeasuredCollective]
Split = tuple[list[Pair], list[Pair]]
"""Rows to fit, rows to predict."""
Told = Callable[[int, int], None]


class Pairs(list[Pair]):
    """Rows that can be predicted, and what all of them together teach of kinds: learned once for all holdouts."""

    @cached_property
    def learned(self) -> LearnedConstants:
        """Each operator's machine with factors of its own."""
        machines = [f"{row['topology']} of {publisher(row)}" for row, _ in self]
        return learn([measurement for _, measurement in self], machines)


def cross_validate(
    path: str | Path | Sequence[str | Path], holdout: str, tell: Told = lambda done, total: None
) -> Score:
    """The error on rows that were held out.

    Parameters
    ----------
    path : a table or several (:mod:`clustersim.calibrate.nccl_tables`). holdout : one of :data:`HOLDOUTS`.
    tell : told how many of how many fits are done.

    Raises :class:`ClusterSimError` for another holdout, and where the table has nothing to hold out.
    """
    return cross_validations(path, (holdout,), tell)[holdout]


def cross_validations(
    path: str | Path | Sequence[str | Path], holdouts: Sequence[str], told: Told = lambda done, total: None
) -> dict[str, Score]:
    """:func:`cross_validate` in several ways, which learn from the same rows once."""
    for holdout in holdouts:
        if holdout not in HOLDOUTS:
            raise ClusterSimError(f"no cross-validation {holdout!r}; {nearest(holdout, HOLDOUTS)}")
    pairs = Pairs()
    skipped: list[Row] = []
    paths = [path] if isinstance(path, str | Path) else path
    for row in measured_rows(paths):
        try:
            seconds, request, group = measured(row)
            pairs.append((row, MeasuredCollective(seconds, choice(request, group), row["case_id"])))
        except (ValueError, ClusterSimError) as error:
            skipped.append(SkippedRow(row, str(error)))
    scores: dict[str, Score] = {}
    for holdout in holdouts:
        rule = HOLDOUTS[holdout]
        results = [*skipped, *rule.rows(pairs, told)]
        if not predicted(results):
            names = ", ".join(map(str, paths))
            raise ClusterSimError(f"{names}: nothing to hold out for {holdout!r}: {rule.needs}")
        scores[holdout] = score(results, DIMENSIONS)
    return scores


def _result(pair: Pair, predicted: float) -> PredictedRow:
    row, measurement = pair
    return scored(row, measurement.seconds, predicted)


def _logs(pairs: Iterable[Pair]) -> Iterable[list[Pair]]:
    """Rows of one machine, publisher and launch mode: what one user would have in hand."""
    return grouped(pairs, lambda p: (p[0]["topology"], publisher(p[0]), p[1].choice.group.launch)).values()


# ------------------------------------------------------------------------------------------------ a user's own logs


def _fitted(splits: Callable[[list[Pair]], Iterator[Split]]) -> Callable[[Pairs, Told], Iterator[Row]]:
    """Rows that a fit to some of their own log predicts."""

    def rows(pairs: Pairs, tell: Told) -> Iterator[Row]:
        """A row for each unknown pair; a skipped one where too few are left to fit."""
        every = list(splits(pairs))
        for i, (training_pairs, unknown) in enumerate(every):
            tell(i, len(every))
            if len(training_pairs) < FEWEST:
                yield from (SkippedRow(row, f"fewer than {FEWEST} rows to fit") for row, _ in unknown)
                continue
            fitted = fit(NcclTimes(tuple(measurement for _, measurement in training_pairs)))
            times = NcclTimes(tuple(measurement for _, measurement in unknown)).predict(fitted.values)
            yield from (_result(pair, time) for pair, time in zip(unknown, times.tolist(), strict=True))

    return rows


def _half(pairs: list[Pair]) -> Iterator[Split]:
    for log in _logs(pairs):
        training_pairs = []
        unknown = []
        for case in grouped(log, lambda p: p[0]["case_id"]).values():
            case.sort(key=lambda p: p[1].nbytes)
            training_pairs += case[::2]
            unknown += case[1::2]
        if unknown:
            yield training_pairs, unknown


def _scale(pairs: list[Pair]) -> Iterator[Split]:
    for log in _logs(pairs):
        nodes = np.array([p[1].choice.group.n_nodes for p in log])
        limit = min(MOST_NODES, int(nodes.max()) - 1)
        training_pairs = [p for p, n in zip(log, nodes.tolist(), strict=True) if n <= limit]
        if training_pairs:
            yield training_pairs, [p for p, n in zip(log, nodes.tolist(), strict=True) if n > limit]


# ------------------------------------------------------------------------------------------------ others' machines


def _left_out(
    label: Callable[[Pair], str],
    predict: Callable[[list[Pair], Callable[[MeasuredCollective], CommunicationCosts]], Iterator[Row]],
) -> Callable[[Pairs, Told], Iterator[Row]]:
    """Rows of one label after another, predicted from what the others say of kinds."""

    def rows(pairs: Pairs, tell: Told) -> Iterator[Row]:
        """A row for each pair, label by label; none where there is one label only."""
        labels = np.array([label(pair) for pair in pairs])
        folds = list(dict.fromkeys(labels.tolist()))
        if len(folds) < 2:
            return
        tell(0, len(folds) + 1)
        learned = pairs.learned
        for i, fold in enumerate(folds):
            tell(i + 1, len(folds) + 1)
            fold_pairs = [pair for pair, own in zip(pairs, (labels == fold).tolist(), strict=True) if own]
            yield from predict(fold_pairs, _kinds(learned, labels == fold))

    return rows


def _kinds(learned: LearnedConstants, held_out: Bools) -> Callable[[MeasuredCollective], CommunicationCosts]:
    """Constants of a machine of which nothing is known but its kind."""
    values = learned.without(held_out)
    return lambda measurement: with_learned(costs_of_kind(measurement.choice.group), values)


def _blind(pairs: list[Pair], kind: Callable[[MeasuredCollective], CommunicationCosts]) -> Iterator[Row]:
    yield from (_result(pair, seconds(pair[1].choice, kind(pair[1]))) for pair in pairs)


def _three(pairs: list[Pair], kind: Callable[[MeasuredCollective], CommunicationCosts]) -> Iterator[Row]:
    """Each log with three of its own numbers, which are not predicted."""
    for log in _logs(pairs):
        numbers = _numbers(log)
        machine, _ = trusted_machine([n.choice for n in numbers], [n.seconds for n in numbers], kind(numbers[0]), {})
        yield from (_result(pair, seconds(pair[1].choice, machine.costs)) for pair in log if pair[1] not in numbers)


def _numbers(log: Sequence[Pair]) -> list[MeasuredCollective]:
    """The rows of a log that a user would time first: see the module's docstring."""
    free = [
        measurement
        for row, measurement in log
        if "NCCL_ALGO" not in row.get("env", "") and "NCCL_PROTO" not in row.get("env", "")
    ]
    free = free or [measurement for _, measurement in log]
    first = min(
        free, key=lambda measurement: (_KINDS.index(measurement.choice.request.kind), measurement.choice.group.n_nodes)
    )
    same_kind = [measurement for measurement in free if measurement.choice.request.kind == first.choice.request.kind]
    scales = sorted({(measurement.choice.group.n_nodes, measurement.choice.group.size) for measurement in same_kind})
    sizes_at = (scales[0], scales[0], scales[min(1, len(scales) - 1)])
    chosen: list[MeasuredCollective] = []
    for size, scale in zip(NUMBERS, sizes_at, strict=True):
        at_scale = [
            measurement
            for measurement in same_kind
            if (measurement.choice.group.n_nodes, measurement.choice.group.size) == scale
        ]
        nearest_one = min(at_scale, key=lambda measurement: abs(np.log(measurement.nbytes / size)))
        chosen += [nearest_one] if nearest_one not in chosen else []
    return chosen


_KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "sendrecv",
    "send",
    "scatter",
    "gather",
)


def _transport(pair: Pair) -> str:
    """What a row's machine is joined by, or that it stands alone."""
    return pair[1].choice.group.node_type.net


@dataclass(frozen=True)
class Holdout:
    """A way to hold rows out: ``rows`` gives them predicted, ``needs`` says what a table must have for it."""

    rows: Callable[[Pairs, Told], Iterable[Row]]
    needs: str


HOLDOUTS: Mapping[str, Holdout] = {
    "half": Holdout(_fitted(_half), "a case needs two sizes at least"),
    "scale": Holdout(_fitted(_scale), "a log needs runs of different numbers of nodes"),
    "platform": Holdout(_left_out(lambda p: str(p[0]["topology"]), _blind), "the table needs several machines"),
    "publisher": Holdout(_left_out(lambda p: publisher(p[0]), _blind), "the tables need several publishers"),
    "transport": Holdout(_left_out(_transport, _blind), "the table needs machines of several transports"),
    "three-numbers": Holdout(_left_out(lambda p: str(p[0]["topology"]), _three), "the table needs several machines"),
}
"""Ways to hold rows out."""
