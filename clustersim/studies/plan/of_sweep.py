"""What a sweep answers: the best choice in every case, or what a choice costs; and what is worth having."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from clustersim.core.economics import rates_by_name
from clustersim.core.errors import ClusterSimError
from clustersim.core.ranges import VAGUE, of_step, off_by, within
from clustersim.core.units import format_change
from clustersim.studies.plan.options import at_worst
from clustersim.studies.plan.pareto import front
from clustersim.studies.plan.swept import SweptCase, SweptRows
from clustersim.studies.sweep.axes import Scalar


class ScoredScenario(msgspec.Struct, frozen=True):
    """A scenario that fits: its ``family`` among those that are compared, ``rate`` [tokens/s or samples/s], relative
    ``error``, and whether it is among the best; ``usd_per_1e9`` None without a price."""

    option: str
    family: str
    machine: str
    gpus: int
    rate: float
    error: float
    usd_per_1e9: float | None
    kwh_per_1e9: float
    best: bool


class Decision(msgspec.Struct, frozen=True):
    """What a sweep comes to, in a sentence; ``head`` and ``cases`` are the table behind it, ``front`` the scenarios by
    speed, fastest first."""

    verdict: str
    head: list[str]
    cases: list[list[str]]
    front: list[ScoredScenario]
    warnings: list[str]
    assumptions: list[str]


def answer(swept: SweptRows) -> Decision:
    """The whole answer."""
    question = swept.question
    if question is not None and question.value is not None:
        choice = question.choice or swept.called(question.value)
        verdict, head, cases = _worth(swept, question.value, question.against, choice)
    elif swept.axis is not None:
        verdict, head, cases = _which(swept)
    else:
        verdict = _fastest(swept)
        head = []
        cases = []
    sections = list(_front(swept)), list(_warnings(swept)), list(_assumptions(swept))
    return Decision(verdict, head, cases, *sections)


Told = tuple[str, list[str], list[list[str]]]


def _which(swept: SweptRows) -> Told:
    """The best choice: those that no case knows a better one than, within what predictions are off; of what fits in
    memory, in the cases in which anything does."""
    choices = list(dict.fromkeys(row for case in swept.cases for row in case.rows))
    roomy = {case.words: swept.roomy(case) for case in swept.possible}
    fastest = {words: _fastest_of(swept, rows) for words, rows in roomy.items()}
    near = [
        choice
        for choice in choices
        if all(choice in rows and swept.alike(rows[choice], rows[fastest[words]]) for words, rows in roomy.items())
    ]
    where_text = f"in all {len(roomy)} cases" if len(roomy) > 1 else "here"
    if len(roomy) < len(swept.cases):
        where_text = f"{where_text if len(roomy) > 1 else 'in the one case'} in which anything fits"
    if len(near) == 1:
        sentence = f"{swept.called(near[0])} is the fastest, or as fast as can be told, {where_text}"
    elif near:
        either = f"{', '.join(map(swept.called, near[:-1]))} or {swept.called(near[-1])}"
        sentence = f"{either}: {where_text} they differ by less than predictions are off"
    else:
        won = Counter(swept.called(value) for value in fastest.values()).most_common()
        sentence = "No choice is best everywhere: " + ", ".join(
            f"{name} is the fastest in {n} case{'s' * (n > 1)}" for name, n in won
        )
    rest = "".join(f"; {_how_slow(swept, choice, roomy, fastest)}" for choice in choices if choice not in near)
    head = ["case", "fastest", f"{swept.unit}/s", *map(str, choices)]
    verdict = f"{sentence[0].upper()}{sentence[1:]}{rest}."
    return verdict, head, [_case_row(swept, case, choices, fastest) for case in swept.cases]


def _fastest_of(swept: SweptRows, rows: Mapping[Scalar, int]) -> Scalar:
    """The value of the fastest of some rows."""
    return max(rows, key=lambda value: swept.rate[rows[value]])


def _case_row(swept: SweptRows, case: SweptCase, choices: Sequence[Scalar], fastest: Mapping[str, Scalar]) -> list[str]:
    """A case, its fastest choice that fits, and what each choice loses against that; where nothing fits, against the
    fastest as it was timed."""
    first = fastest.get(case.words)
    best = float(swept.rate[case.rows[first]] if first is not None else swept.rate[list(case.rows.values())].max())
    cells = []
    for choice in choices:
        row = case.rows.get(choice)
        lost = _change(None if row is None else 1 - float(swept.rate[row]) / best)
        cells.append(lost if row is None or swept.fits[row] else f"{lost}, does not fit")
    return [case.words, "nothing fits" if first is None else str(first), f"{best:,.0f}", *cells]


def _how_slow(
    swept: SweptRows, choice: Scalar, roomy: Mapping[str, Mapping[Scalar, int]], fastest: Mapping[str, Scalar]
) -> str:
    """How much slower than the fastest a choice is at worst, and where; in how many cases it does not fit."""
    times = {
        words: float(swept.rate[rows[fastest[words]]] / swept.rate[rows[choice]])
        for words, rows in roomy.items()
        if choice in rows
    }
    full = sum(choice in case.rows and choice not in roomy[case.words] for case in swept.possible)
    does_not = f" does not fit in {full} of {len(roomy)} cases" if len(roomy) > 1 else " does not fit"
    name = swept.called(choice)
    if not times:
        return f"{name}{does_not if full else ' has no result'}"
    worst = max(times, key=lambda label: times[label])
    slower = f"{name} takes up to {times[worst]:.3g} times as long ({worst})" if worst else f"{name} is slower"
    if full and times[worst] == 1.0:
        slower = f"{name} is the fastest wherever it fits"
    return f"{slower}, and{does_not}" if full else slower


def _worth(swept: SweptRows, value: Any, against: Any, choice: str) -> Told:
    """What a choice costs of the throughput in each case, and all other choices beside it."""
    values = sorted({row for case in swept.cases for row in case.rows if row != against}, key=str)
    lost = {value: _losses(swept, value, against) for value in values}
    losses = lost.get(value) or {}
    if not losses:
        raise ClusterSimError(f"no case has a result for both {value!r} and {against!r} of {swept.axis}")
    worst = max(losses, key=lambda label: losses[label])
    error = max(map(swept.error, range(len(swept.rate))))
    cheap = [label for label in losses if losses[label] <= error]
    most = max(losses[worst], 0.0)
    least = max(min(losses.values()), 0.0)
    costs_it = f"{choice} costs {least:.1%} to {most:.1%} of the throughput (most: {worst})"
    if len(cheap) == len(losses):
        sentence = (
            f"Yes, once it saves more than {most:.1%} of the machine's price: {costs_it}, less than predictions are "
        )
        sentence += f"off (+-{error:.1%})"
    elif cheap:
        sentence = (
            f"Yes in {len(cheap)} of {len(losses)} cases, where it costs less than predictions are off "
            f"(+-{error:.1%}); "
        )
        sentence += f"in the others once it saves more of the machine's price than it costs: {costs_it}"
    else:
        sentence = f"Only where it saves more of the machine's price than it costs: {costs_it}"
    head = ["case", *map(str, values)]
    rows = [
        [case.words, *(_change(lost[value].get(case.words)) for value in values)]
        for case in swept.cases
        if any(case.words in lost[value] for value in values)
    ]
    return f"{sentence}{_in_money(swept, most)}.", head, rows


def _losses(swept: SweptRows, value: Any, against: Any) -> dict[str, float]:
    """Share of the throughput that a value loses, by case that has both."""
    return {
        case.words: 1.0 - float(swept.rate[case.rows[value]] / swept.rate[case.rows[against]])
        for case in swept.cases
        if value in case.rows and against in case.rows
    }


def _change(lost: float | None) -> str:
    return "" if lost is None else format_change(-lost)


def _in_money(swept: SweptRows, share: float) -> str:
    """A share of the price of the largest machine, in money an hour."""
    i = int(np.argmax(swept.table["gpus"]))
    price = rates_by_name(str(swept.table["device"][i])).usd_per_gpu_hour
    if price is None or share <= 0:
        return ""
    hour = price * float(swept.table["gpus"][i])
    gpus = f"{swept.table['gpus'][i]:,.0f} GPUs"
    return f"; {share:.1%} is {share * hour:,.0f} of the {hour:,.0f} USD an hour that {gpus} cost"


def _fastest(swept: SweptRows) -> str:
    """Without a question: the best row, of those that fit where any does, and the worst."""
    room = swept.fits if swept.fits.any() else ~swept.fits
    best = int(np.argmax(np.where(room, swept.rate, -np.inf)))
    worst = int(np.argmin(np.where(room, swept.rate, np.inf)))
    that_fit = " that fit" if room.sum() < len(room) else ""
    error = swept.error(best)
    return (
        f"The fastest of {int(room.sum()):,} scenarios{that_fit} is {swept.said(best, swept.axes)}: "
        f"{swept.rate[best]:,.0f} {swept.unit}/s +-{error:.0%}, "
        f"{swept.rate[best] / swept.rate[worst]:.2f} times the slowest ({swept.said(worst, swept.axes)})."
    )


def _front(swept: SweptRows) -> Iterator[ScoredScenario]:
    """Rows that fit, fastest first, and whether no other beats them in speed, cost, GPUs and energy at once, errors
    counted; none where models differ, or all have as many GPUs."""
    table = swept.table
    if len(np.unique(table["model"])) > 1 or len(np.unique(table["gpus"])) < 2:
        return
    fits = np.flatnonzero(table["fits"]).tolist()
    spent = {i: swept.costs(i) for i in fits}
    # Speed, cost, GPUs and energy, each at the worse end of its error; smaller is better.
    plain = {
        i: (-float(swept.rate[i]), np.inf if usd is None else usd, float(table["gpus"][i]), spent[i].kwh_per_sample)
        for i, usd in ((i, spent[i].usd_per_sample) for i in fits)
    }
    unbeaten = {fits[k] for k in front([at_worst(plain[i], swept.error(i)) for i in fits])}
    for i in sorted(fits, key=lambda i: -swept.rate[i]):
        usd = spent[i].usd_per_sample
        kwh = spent[i].kwh_per_sample
        yield ScoredScenario(
            option=swept.said(i, swept.axes),
            family=str(table[swept.axis or "strategy"][i]),
            machine=str(table["topology"][i]),
            gpus=int(table["gpus"][i]),
            rate=float(swept.rate[i]),
            error=swept.error(i),
            usd_per_1e9=None if usd is None else usd * 1e9,
            kwh_per_1e9=kwh * 1e9,
            best=i in unbeaten,
        )


def _warnings(swept: SweptRows) -> Iterator[str]:
    if swept.failed:
        yield f"{swept.failed:,} scenarios have no result; the table says why"
    full = int((~swept.table["fits"]).sum())
    if full:
        yield f"{full:,} scenarios do not fit in memory; they are timed as if they did"
    for kind in swept.kinds:
        if of_step(kind).p50 > VAGUE:
            yield off_by(kind)


def _assumptions(swept: SweptRows) -> Iterator[str]:
    for name in dict.fromkeys(swept.table["device"].tolist()):
        gpu_rates = rates_by_name(str(name))
        if gpu_rates.usd_per_gpu_hour is None:
            limit = gpu_rates.sources["power limit"]
            yield f"{name}: no price known, so nothing is said of its cost; power limit {limit}"
        else:
            yield f"{name}: {gpu_rates.usd_per_gpu_hour:g} USD per GPU-hour ({gpu_rates.sources['price']})"
    yield f"{within()}; the input pipeline, failures and checkpoints are not counted"
