"""One axis of a sweep: which values, of which fields.

A field is named as ``--set`` names it, ``"cluster.nodes"``; a whole table too, ``"strategy"``. A ``+`` at the end means
that a list is made longer instead of replaced: ``"cluster.changes+"``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from clustersim.core.errors import ScenarioError
from clustersim.core.limits import MOST_VALUES, counted
from clustersim.core.texts import Table
from clustersim.core.tomls import flat
from clustersim.scenario.file.reading import Changes

Number: TypeAlias = int | float
Scalar: TypeAlias = str | int | float | bool
Above0: TypeAlias = Annotated[float, Meta(gt=0)] | Annotated[int, Meta(gt=0)]


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``range = {start = 1, stop = 8, step = 1}``: evenly spaced, ``stop`` included; or ``num`` of them.

    Parameters
    ----------
    start, stop : the first and the last. step : from one to the next. num : how many, instead.
    """

    start: Number
    stop: Number
    step: Number | None = None
    num: Annotated[int, Meta(ge=2, le=100_000)] | None = None

    def __post_init__(self) -> None:
        if (self.step is None) == (self.num is None):
            raise ValueError("write one of step and num")
        if self.step is not None and (self.step == 0 or (self.stop - self.start) / self.step < 0):
            raise ValueError(f"a step of {self.step} does not lead from {self.start} to {self.stop}")

    def values(self, where: str) -> list[Number]:
        """Whole numbers where start and step are; ``where`` names the axis in an error."""
        if self.step is not None:
            # A last step that misses stop by rounding alone is on it.
            count = int((self.stop - self.start) / self.step + 1e-9) + 1
            counted(count, MOST_VALUES, f"{where}.range: values", ScenarioError)
            return [self.start + i * self.step for i in range(count)]
        count = self.num or 2
        ends = (self.start, self.stop)
        values = [self.start + i * (self.stop - self.start) / (count - 1) for i in range(count)]
        integral = all(isinstance(end, int) for end in ends)
        return [round(value) if integral and value == round(value) else value for value in values]


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``log = {start = 1, stop = 64, factor = 2}``: each is ``factor`` times the one before; or ``num`` of them.

    Parameters
    ----------
    start, stop : the first and the last. factor : from one to the next. num : how many, instead.
    """

    start: Above0
    stop: Above0
    factor: Above0 | None = None
    num: Annotated[int, Meta(ge=2, le=100_000)] | None = None

    def __post_init__(self) -> None:
        if (self.factor is None) == (self.num is None):
            raise ValueError("write one of factor and num")
        if self.factor is not None and (self.factor == 1 or (self.factor > 1) != (self.stop >= self.start)):
            raise ValueError(f"a factor of {self.factor} does not lead from {self.start} to {self.stop}")

    def values(self, where: str) -> list[Number]:
        """Whole numbers, each once, where start and stop are; ``where`` names the axis in an error."""
        count = self.num or 2
        if self.factor is not None:
            steps = math.log(self.stop / self.start) / math.log(self.factor)
            counted(steps, MOST_VALUES, f"{where}.log: values", ScenarioError)
        factor = self.factor or (self.stop / self.start) ** (1 / (count - 1))
        values: list[Number] = []
        while (len(values) < count) if self.num else self._reached(self.start * factor ** len(values), factor):
            values.append(self.start * factor ** len(values))
        integral = isinstance(self.start, int) and isinstance(self.stop, int)
        return list(dict.fromkeys(round(value) for value in values)) if integral else values

    def _reached(self, value: float, factor: float) -> bool:
        return value <= self.stop * (1 + 1e-9) if factor > 1 else value >= self.stop * (1 - 1e-9)


class Between(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``{low = 1, high = 100, log = true}``: drawn evenly, whole numbers where both ends are; ``log``: evenly in it."""

    low: Number
    high: Number
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"cannot draw {'logarithmically ' if self.log else ''}from {self.low} to {self.high}")

    def draw(self, source: random.Random) -> Number:
        """One value."""
        if isinstance(self.low, int) and isinstance(self.high, int) and not self.log:
            return source.randint(self.low, self.high)
        value = (
            self.low * (self.high / self.low) ** source.random() if self.log else source.uniform(self.low, self.high)
        )
        return round(value) if isinstance(self.low, int) and isinstance(self.high, int) else value


class AxisTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[[axes]]``: one dimension of the grid, in one of three forms.

    Parameters
    ----------
    key : the field, with one of ``values``, ``range`` and ``log``. values : a list, or a table of labels and values.
    zip : fields and lists of the same length, taken together.
    random : fields and what they are drawn from, a list or a :class:`Between`. num : of draws. seed : of the draws.
    name : of the column; the field's own path if absent. labels : what the column shows instead of values.
    """

    key: str | None = None
    values: list[Any] | Table | None = None
    range: Range | None = None
    log: Log | None = None
    zip: Table | None = None
    random: Table | None = None
    num: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    seed: int = 0
    name: str | None = None
    labels: list[str] | None = None

    def __post_init__(self) -> None:
        forms = [name for name in ("key", "zip", "random") if getattr(self, name) is not None]
        if len(forms) != 1:
            raise ValueError(f"write one of key, zip and random, not {' and '.join(forms) or 'none'}")
        given = [name for name in ("values", "range", "log") if getattr(self, name) is not None]
        if len(given) != (forms == ["key"]):
            raise ValueError(
                f"a key needs one of values, range and log, not {' and '.join(given) or 'none'}"
                if forms == ["key"]
                else f"{given[0]} belongs to a key, not to {forms[0]}"
            )
        if (self.num is not None) != (forms == ["random"]):
            raise ValueError(
                "random needs num, the number of draws" if forms == ["random"] else "num belongs to random"
            )


@dataclass(frozen=True)
class AxisPoint:
    """One value of an axis. shown : column -> what a table shows. changes : field -> value, as for ``--set``."""

    shown: Mapping[str, Scalar]
    changes: Changes


@dataclass(frozen=True)
class SweepAxis:
    """An axis in full. names : its columns. keys : the fields it sets. points : its values, in order."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    points: tuple[AxisPoint, ...]


def axis(table: AxisTable, where: str) -> SweepAxis:
    """The axis of a table; ``where`` names it in an error. Raises :class:`ScenarioError`."""
    columns = _columns(table, where)
    labels = table.labels
    length = len(next(iter(columns.values())))
    if isinstance(table.values, dict):
        labels = list(table.values) if labels is None else labels
    if labels is not None and (len(labels) != length or len(set(labels)) != length):
        raise ScenarioError(f"{where}.labels: {len(labels)} labels for {length} values; one for each, all different")
    if labels is None and table.name is not None and len(columns) > 1:
        raise ScenarioError(f"{where}.name: {table.name!r} for {len(columns)} fields needs labels to show")
    points = []
    for i in range(length):
        changes = {key: values[i] for key, values in columns.items()}
        if labels is not None:
            shown: dict[str, Scalar] = {table.name or next(iter(columns)): labels[i]}
        else:
            shown = {(table.name or key): as_scalar(value) for key, value in changes.items()}
        points.append(AxisPoint(shown, changes))
    return SweepAxis(tuple(points[0].shown), tuple(columns), tuple(points))


def _columns(table: AxisTable, place: str) -> dict[str, list[Any]]:
    if table.key is not None:
        spec = table.range or table.log
        values = spec.values(place) if spec else table.values
        columns = {table.key: list(values.values() if isinstance(values, dict) else values or [])}
        if not columns[table.key]:
            raise ScenarioError(f"{place}.values: no values for {table.key!r}; write at least one")
        return columns
    if table.zip is not None:
        return _zipped(flat(table.zip), place)
    return _drawn(flat(table.random or {}, leaf=("low", "high")), table, place)


def _zipped(columns: Table, place: str) -> dict[str, list[Any]]:
    for key, values in columns.items():
        if not isinstance(values, list) or not values:
            raise ScenarioError(f"{place}.zip: {values!r} of {key!r} must be a list of values")
    lengths = {key: len(values) for key, values in columns.items()}
    if len(set(lengths.values())) != 1:
        lengths_text = ", ".join(f"{key} has {length}" for key, length in lengths.items()) or "there are none"
        raise ScenarioError(f"{place}.zip: lists of one length are taken together; {lengths_text}")
    return columns


def _drawn(fields: Table, table: AxisTable, place: str) -> dict[str, list[Any]]:
    source = random.Random(table.seed)
    if not fields:
        raise ScenarioError(f'{place}.random: no fields; write them like "cluster.nodes" = [1, 2, 4]')
    ways = {key: _way(spec, f"{place}.random.{key}") for key, spec in fields.items()}
    columns: dict[str, list[Any]] = {key: [] for key in ways}
    for _ in range(table.num or 1):
        for key, drawing in ways.items():
            columns[key].append(drawing.draw(source) if isinstance(drawing, Between) else source.choice(drawing))
    return columns


def _way(spec: Any, place: str) -> Between | Sequence[Any]:
    if isinstance(spec, list) and spec:
        return spec
    try:
        return msgspec.convert(spec, Between)
    except msgspec.ValidationError as error:
        raise ScenarioError(
            f"{place}: {spec!r}: {error}; write a list, or {{low = 1, high = 100, log = true}}"
        ) from None


def as_scalar(value: Any) -> Scalar:
    """What a table shows of a value: itself, or one line of text."""
    if isinstance(value, str | int | float | bool):
        return value
    return msgspec.json.encode(value, order="sorted", enc_hook=str).decode()
