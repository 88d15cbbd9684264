"""One machine's constants from a few of its numbers, given those of its kind.

A number such as "8 bytes over two nodes take 38 us" says something of a host, of hops and of a network at once. It
moves what the whole machine has more of than its kind (factors) and single constants, each as far as its prior lets it
(:mod:`clustersim.collectives.fitted.priors`), and with them every other collective, size and scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property

import msgspec
import numpy as np

from clustersim.collectives.fitted.bayes import Floats, Posterior, posterior
from clustersim.collectives.fitted.priors import priors
from clustersim.collectives.nccl_backend import NcclChoice, seconds_of
from clustersim.core.calibrated import Constant
from clustersim.core.costs import CommunicationCosts, flat, most_of, with_tables

LAW_ERRORS = ((2.0**12, 0.1), (2.0**16, 0.2), (2.0**25, 0.25), (np.inf, 0.03))
"""Up to so many bytes, what the law is unsure of with its machine known, in ln: where protocols change, it is the
choice that is wrong, and one size there says little of others."""

CERTAIN = 1.96
"""Standard deviations of a 95 % interval."""

MOVED = 0.005
"""Part of its kind's value by which a constant that is said to have stayed differs at most."""


class FewNumbers(msgspec.Struct, frozen=True, eq=False, dict=True):
    """What a machine's own numbers say of it.

    Parameters
    ----------
    base : constants of its kind. found : of them and of its factors, by how much ln(value) moved.
    names : of the constants that may move, sorted as the columns of ``found`` after the factors.
    """

    base: CommunicationCosts
    found: Posterior
    names: tuple[str, ...]

    @cached_property
    def costs(self) -> CommunicationCosts:
        """The machine's constants."""
        return moved_costs(self.base, self.names, self.found.moved)

    @property
    def factors(self) -> dict[str, float]:
        """By how much the machine differs from its kind as a whole: 1.3 is 30 % more."""
        factors = priors().factors
        return dict(zip(factors, np.exp(self.found.moved[: len(factors)]).tolist(), strict=True))

    @property
    def constants(self) -> dict[str, Constant]:
        """The constants that moved, each with its 95 % interval."""
        before = flat(self.base)
        after = flat(self.costs)
        shape = _mixing(self.names)
        spread = np.sqrt(np.einsum("ij,jk,ik->i", shape, self.found.covariance, shape))
        out = {}
        for name, sd in zip(_moving(self.names), spread.tolist(), strict=True):
            value = after[name]
            if abs(value - before[name]) > MOVED * before[name]:
                most = most_of(name)
                high = min(value * float(np.exp(CERTAIN * sd)), max(most, value))
                out[name] = Constant(value, value * float(np.exp(-CERTAIN * sd)), high)
        return out


def few_numbers(choices: Sequence[NcclChoice], seconds: Sequence[float], base: CommunicationCosts) -> FewNumbers:
    """The constants that numbers of one machine make most likely.

    Parameters
    ----------
    choices : what NCCL picks for each number's collective. seconds : (n,) measured. base : constants of its kind.
    """
    names, spread = _columns(base)
    moves = _Moves(base, names)

    def log_times(moved: Floats) -> Floats:
        """(rows,) float: logarithms of the predicted seconds, constants moved so far."""
        times = np.array(list(seconds_of(choices, moves.costs(moved))))
        return np.asarray(np.log(times), dtype=np.float64)

    count = len(priors().factors)
    estimate = posterior(log_times, np.log(np.array(seconds)), _law_errors(choices), spread, first=count)
    return FewNumbers(base, estimate, names)


class Expected(msgspec.Struct, frozen=True, eq=False):
    """What machines of a kind take for some collectives, and how they differ.

    Parameters
    ----------
    log_seconds : (n,) ln(seconds) of the kind. covariance : (n, n) of ln(seconds) between machines, and of the law.
    """

    log_seconds: Floats
    covariance: Floats


DRAWS = 64
"""Machines that are drawn for :class:`Expected`, in pairs on either side of their kind."""


def expected_times(choices: Sequence[NcclChoice], base: CommunicationCosts) -> Expected:
    """Times of machines whose constants and factors differ from ``base`` as the priors let them."""
    names, spread = _columns(base)
    draws = np.random.default_rng(0).standard_normal((DRAWS // 2, len(spread))) * spread
    usual: Floats = np.log(np.array(list(seconds_of(choices, base))))
    moves = _Moves(base, names)
    machines = [np.log(list(seconds_of(choices, moves.costs(by)))) for by in (*draws, *-draws)]
    apart = np.array(machines) - usual
    return Expected(usual, apart.T @ apart / DRAWS + np.diag(_law_errors(choices) ** 2))


def _columns(base: CommunicationCosts) -> tuple[tuple[str, ...], Floats]:
    """Names of the constants that may move, and (k,) how far factors and they do, in ln."""
    values = flat(base)
    constants = priors().constants
    names = tuple(name for name in constants if values[name] > 0)
    spread = [*(factor.spread for factor in priors().factors.values()), *(constants[name].spread for name in names)]
    return names, np.array(spread)


def _law_errors(choices: Sequence[NcclChoice]) -> Floats:
    """(n,) what the law is unsure of with its machine known, in ln."""
    sizes = (chosen.request.nbytes for chosen in choices)
    return np.array([next(error for most, error in LAW_ERRORS if nbytes <= most) for nbytes in sizes])


def moved_costs(base: CommunicationCosts, names: Sequence[str], moved: Floats) -> CommunicationCosts:
    """Constants after the factors and ``names`` moved by these logarithms; a share stays a share."""
    return _Moves(base, tuple(names)).costs(moved)


class _Moves:
    """The constants of one machine wherever ``names`` and the factors move them: a fit asks thousands of times."""

    def __init__(self, base: CommunicationCosts, names: tuple[str, ...]) -> None:
        self.base = base
        before = flat(base)
        moving = _moving(names)
        columns = {name: place for place, name in enumerate(names, len(priors().factors))}
        self.before = np.array([before[name] for name in moving])
        self.most = np.maximum([most_of(name) for name in moving], self.before)
        # One column more, which nothing moves: that of constants which only factors move.
        self.own = np.array([columns.get(name, len(columns) + len(priors().factors)) for name in moving])
        self.factors = [np.array([factor in _factors_of(name) for name in moving]) for factor in priors().factors]
        self.tables: dict[str, tuple[list[str], list[int]]] = {}
        self.single: list[tuple[str, int]] = []
        for place, name in enumerate(moving):
            head, _, key = name.partition(".")
            if key:
                keys, places = self.tables.setdefault(head, ([], []))
                keys.append(key)
                places.append(place)
            else:
                self.single.append((name, place))

    def costs(self, moved: Floats) -> CommunicationCosts:
        """Where the columns, factors first, moved by these logarithms."""
        together = np.zeros(len(self.before))
        for multiplied, by in zip(self.factors, moved.tolist(), strict=False):
            together += multiplied * by
        by = np.append(moved, 0.0)[self.own] + together
        values = np.minimum(self.before * np.exp(by), self.most).tolist()
        tables = {
            head: dict(zip(keys, [values[place] for place in places], strict=True))
            for head, (keys, places) in self.tables.items()
        }
        return with_tables(self.base, tables, {name: values[place] for name, place in self.single})


@cache
def _factors_of(name: str) -> tuple[str, ...]:
    return tuple(factor for factor, row in priors().factors.items() if row.moves(name))


_ALL = tuple(flat(CommunicationCosts()))


@cache
def _moving(names: tuple[str, ...]) -> tuple[str, ...]:
    """Constants that a factor or their own column moves, in the order of :class:`CommunicationCosts`."""
    listed = frozenset(names)
    return tuple(name for name in _ALL if name in listed or _factors_of(name))


def _mixing(names: tuple[str, ...]) -> Floats:
    """(constants, columns) which columns each moving constant adds up."""
    columns = (*priors().factors, *names)
    rows = [[column in (name, *_factors_of(name)) for column in columns] for name in _moving(names)]
    return np.array(rows, dtype=np.float64)
