"""What a sweep answers: the best choice in every case, or what a choice costs; and what is worth having."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustersim import sweeps
from clustersim.arrays import Floats
from clustersim.economics import costs, rates
from clustersim.errors import ClusterSimError
from clustersim.planner.options import at_worst
from clustersim.planner.pareto import front
from clustersim.ranges import alike, as_of, of_step
from clustersim.units import format_change

Columns = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """One combination of the axes that are not in question.

    Parameters
    ----------
    words : of it. rows : value in question -> number of its row in the table, those that have a result.
    """

    words: str
    rows: Mapping[Any, int]


@dataclass(frozen=True, eq=False)
class Swept:
    """A sweep's rows with a result. axes : columns that vary. question : as in the file, None where it asks none."""

    title: str
    table: Columns
    axes: tuple[str, ...]
    question: Mapping[str, Any] | None
    failed: int

    @cached_property
    def axis(self) -> str | None:
        """The column in question; without a question the first whose values are words."""
        if self.question is not None:
            return str(self.question["axis"])
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
    def cases(self) -> list[Case]:
        """In the order of the grid."""
        found: dict[str, dict[Any, int]] = {}
        for i in range(len(self.rate)):
            words = self.said(i, [name for name in self.axes if name != self.axis])
            value = None if self.axis is None else self.table[self.axis][i].item()
            found.setdefault(words, {})[value] = i
        return [Case(words, rows) for words, rows in found.items()]

    def said(self, i: int, names: Sequence[str] | None = None) -> str:
        """A row by its axes."""
        shown = ((name, self.table[name][i].item()) for name in names or ())
        return ", ".join(str(v) if name == self.axis and isinstance(v, str) else worded(name, v) for name, v in shown)

    def kind(self, i: int) -> str:
        """Of a row's strategy."""
        return str(self.table["strategy"][i])

    def alike(self, i: int, j: int) -> bool:
        """Whether two rows differ by less than their predictions are off."""
        return alike(self.kind(i), float(self.rate[i]), self.kind(j), float(self.rate[j]))


def worded(name: str, value: Any) -> str:
    """A value of an axis for people.

    >>> worded("cluster.nodes", 4), worded("NIC", "25 Gb/s"), worded("strategy.micro_batch_size", 2)
    ('4 nodes', 'NIC 25 Gb/s', 'micro batch size 2')
    """
    last = name.rsplit(".", 1)[-1].replace("_", " ")
    if last in {"nodes", "gpus", "steps"}:
        return f"{value:,} {last if value != 1 else last[:-1]}"
    return f"{last} {value:g}" if isinstance(value, int | float) else f"{last} {value}"


def load(folder: str | Path) -> Swept:
    """The sweep in a folder. Raises :class:`ClusterSimError` where there is none, or no row has a result."""
    about, table = sweeps.about(folder), sweeps.read(folder)
    good = table["error"] == "" if "error" in table else np.zeros(0, dtype=bool)
    if not good.any():
        raise ClusterSimError(f"{folder}: no row of this sweep has a result")
    kept = {name: column[good] for name, column in table.items()}
    varied = tuple(name for name in about["axes"] if len(np.unique(kept[name])) > 1)
    return Swept(about["title"], kept, varied, about.get("question"), int((~good).sum()))


def answer(swept: Swept) -> dict[str, Any]:
    """The whole answer.

    Returns a dict: ``verdict``, a sentence; ``title``, ``unit``; ``head`` and ``cases``, the table behind the verdict;
    ``front``, rows with ``option``, ``gpus``, ``rate``, ``error``, ``usd_per_1e9`` (None without a price),
    ``kwh_per_1e9`` and ``best``; ``warnings``; ``assumptions``.
    """
    asked = swept.question or {}
    if asked.get("value") is not None:
        verdict, head, cases = _worth(
            swept, asked["value"], asked["against"], str(asked.get("choice") or asked["value"])
        )
    elif swept.axis is not None:
        verdict, head, cases = _which(swept)
    else:
        verdict, head, cases = _fastest(swept), [], []
    return {
        "title": swept.title,
        "verdict": verdict,
        "unit": swept.unit,
        "head": head,
        "cases": cases,
        "front": list(_front(swept)),
        "warnings": list(_warnings(swept)),
        "assumptions": list(_assumptions(swept)),
    }


Told = tuple[str, list[str], list[list[str]]]


def _which(swept: Swept) -> Told:
    """The best choice: those that no case knows a better one than, within what predictions are off."""
    choices = list(dict.fromkeys(one for case in swept.cases for one in case.rows))
    fastest = {case.words: max(case.rows, key=lambda value: swept.rate[case.rows[value]]) for case in swept.cases}
    near = [
        one
        for one in choices
        if all(one in case.rows and swept.alike(case.rows[one], case.rows[fastest[case.words]]) for case in swept.cases)
    ]
    where = f"in all {len(swept.cases)} cases" if len(swept.cases) > 1 else "here"
    if len(near) == 1:
        said = f"{near[0]} is the fastest, or as fast as can be told, {where}"
    elif near:
        said = f"{_either(near)}: {where} they differ by less than predictions are off"
    else:
        won = Counter(str(value) for value in fastest.values()).most_common()
        said = "No choice is best everywhere: " + ", ".join(f"{name} is the fastest in {n} cases" for name, n in won)
    rest = "".join(f"; {_how_slow(swept, one, fastest)}" for one in choices if one not in near)
    head = ["case", "fastest", f"{swept.unit}/s", *map(str, choices)]
    rows = []
    for case in swept.cases:
        best = float(swept.rate[case.rows[fastest[case.words]]])
        losses = [
            _change(1 - float(swept.rate[case.rows[one]]) / best if one in case.rows else None) for one in choices
        ]
        rows.append([case.words, str(fastest[case.words]), f"{best:,.0f}", *losses])
    return f"{said[0].upper()}{said[1:]}{rest}.", head, rows


def _either(names: Sequence[Any]) -> str:
    return f"{', '.join(map(str, names[:-1]))} or {names[-1]}"


def _how_slow(swept: Swept, choice: Any, fastest: Mapping[str, Any]) -> str:
    """How much slower than the fastest a choice is at worst, and where."""
    times = {
        case.words: float(swept.rate[case.rows[fastest[case.words]]] / swept.rate[case.rows[choice]])
        for case in swept.cases
        if choice in case.rows
    }
    worst = max(times, key=lambda words: times[words])
    return f"{choice} takes up to {times[worst]:.3g} times as long ({worst})" if worst else f"{choice} is slower"


def _worth(swept: Swept, value: Any, against: Any, choice: str) -> Told:
    """What a choice costs of the throughput in each case, and all other choices beside it."""
    values = sorted({one for case in swept.cases for one in case.rows if one != against}, key=str)
    lost = {one: _losses(swept, one, against) for one in values}
    mine = lost.get(value) or {}
    if not mine:
        raise ClusterSimError(f"no case has a result for both {value!r} and {against!r} of {swept.axis}")
    worst = max(mine, key=lambda words: mine[words])
    error = max(of_step(kind).p50 for kind in set(swept.table["strategy"].tolist()))
    cheap = [words for words in mine if mine[words] <= error]
    most = max(mine[worst], 0.0)
    least = max(min(mine.values()), 0.0)
    costs_it = f"{choice} costs {least:.1%} to {most:.1%} of the throughput (most: {worst})"
    if len(cheap) == len(mine):
        said = f"Yes, once it saves more than {most:.1%} of the machine's price: {costs_it}, less than predictions are "
        said += f"off (+-{error:.1%})"
    elif cheap:
        said = (
            f"Yes in {len(cheap)} of {len(mine)} cases, where it costs less than predictions are off (+-{error:.1%}); "
        )
        said += f"in the others once it saves more of the machine's price than it costs: {costs_it}"
    else:
        said = f"Only where it saves more of the machine's price than it costs: {costs_it}"
    head = ["case", *map(str, values)]
    rows = [
        [case.words, *(_change(lost[one].get(case.words)) for one in values)]
        for case in swept.cases
        if any(case.words in lost[one] for one in values)
    ]
    return f"{said}{_in_money(swept, most)}.", head, rows


def _losses(swept: Swept, value: Any, against: Any) -> dict[str, float]:
    """Share of the throughput that a value loses, by case that has both."""
    return {
        case.words: 1.0 - float(swept.rate[case.rows[value]] / swept.rate[case.rows[against]])
        for case in swept.cases
        if value in case.rows and against in case.rows
    }


def _change(lost: float | None) -> str:
    return "" if lost is None else format_change(-lost)


def _in_money(swept: Swept, share: float) -> str:
    """A share of the price of the largest machine, in money an hour."""
    i = int(np.argmax(swept.table["gpus"]))
    price = rates(str(swept.table["device"][i])).usd_per_gpu_hour
    if price is None or share <= 0:
        return ""
    hour = price * float(swept.table["gpus"][i])
    gpus = f"{swept.table['gpus'][i]:,.0f} GPUs"
    return f"; {share:.1%} is {share * hour:,.0f} of the {hour:,.0f} USD an hour that {gpus} cost"


def _fastest(swept: Swept) -> str:
    """Without a question: the best and the worst row."""
    best, worst = int(np.argmax(swept.rate)), int(np.argmin(swept.rate))
    error = of_step(swept.kind(best)).p50
    return (
        f"The fastest of {len(swept.rate):,} scenarios is {swept.said(best, swept.axes)}: {swept.rate[best]:,.0f} "
        f"{swept.unit}/s +-{error:.0%}, {swept.rate[best] / swept.rate[worst]:.2f} times the slowest "
        f"({swept.said(worst, swept.axes)})."
    )


def _front(swept: Swept) -> Iterator[dict[str, Any]]:
    """Rows that fit, fastest first, and whether no other beats them in speed, cost, GPUs and energy at once, errors
    counted; none where models differ, or all have as many GPUs."""
    table = swept.table
    if len(np.unique(table["model"])) > 1 or len(np.unique(table["gpus"])) < 2:
        return
    spent = [_costs(swept, i) for i in range(len(swept.rate))]
    points = [
        at_worst(
            (
                -float(swept.rate[i]),
                np.inf if one["usd_per_sample"] is None else one["usd_per_sample"],
                float(table["gpus"][i]),
                float(one["kwh_per_sample"] or 0.0),
            ),
            of_step(swept.kind(i)).p50,
        )
        for i, one in enumerate(spent)
    ]
    fits = [i for i in range(len(points)) if bool(table["fits"][i])]
    kept = {fits[k] for k in front([points[i] for i in fits])}
    for i in sorted(fits, key=lambda i: -swept.rate[i]):
        usd, kwh = spent[i]["usd_per_sample"], spent[i]["kwh_per_sample"]
        yield {
            "option": swept.said(i, swept.axes),
            "family": swept.kind(i) if swept.axis is None else str(table[swept.axis][i]),
            "machine": str(table["topology"][i]),
            "gpus": int(table["gpus"][i]),
            "rate": float(swept.rate[i]),
            "error": of_step(swept.kind(i)).p50,
            "usd_per_1e9": None if usd is None else usd * 1e9,
            "kwh_per_1e9": None if kwh is None else kwh * 1e9,
            "best": i in kept,
        }


def _costs(swept: Swept, i: int) -> dict[str, float | None]:
    result = {name: float(swept.table[name][i]) for name in ("step_time_s", "compute_s", "exposed_communication_s")}
    return costs(rates(str(swept.table["device"][i])), int(swept.table["gpus"][i]), float(swept.rate[i]), result)


def _warnings(swept: Swept) -> Iterator[str]:
    if swept.failed:
        yield f"{swept.failed:,} scenarios have no result; the table says why"
    full = int((~swept.table["fits"]).sum())
    if full:
        yield f"{full:,} scenarios do not fit in memory; they are timed as if they did"
    for kind in sorted(set(swept.table["strategy"].tolist())):
        known = of_step(kind)
        if known.p50 > 0.10:
            yield f"half of {known.rows} published {kind} steps were off by more than {known.p50:.0%}"


def _assumptions(swept: Swept) -> Iterator[str]:
    for name in dict.fromkeys(swept.table["device"].tolist()):
        known = rates(str(name))
        if known.usd_per_gpu_hour is None:
            yield f"{name}: no price known, so nothing is said of its cost"
        else:
            yield f"{name}: {known.usd_per_gpu_hour:g} USD per GPU-hour ({known.sources['price']})"
    everything = of_step("all")
    yield (
        f"+-: half of {everything.rows} published steps lay within it, by kind of strategy (validated {as_of()}); the "
        "input pipeline, failures and checkpoints are not counted"
    )
