"""A sweep: a base scenario, and axes over any of its fields.

A file says, in TOML::

    base = "ddp_gpt2_xl_2x8_a100"     # a scenario, as `clustersim run` takes it

    [set]                             # for every scenario of the sweep
    run.steps = 3

    [[axes]]
    key = "cluster.nodes"
    values = [1, 2, 4, 8]             # or range = {start, stop, step|num}, or log = {start, stop, factor|num}

    [[axes]]
    name = "network"
    key = "cluster.changes+"
    [axes.values]                     # values with a label
    "as built" = []
    "nic x2" = [{match = "node*/nic* <-> leaf*", factor = 2}]

A value ``"${cluster.nodes}"``, alone or inside a table, is what that field holds in the same scenario.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from clustersim import scenario
from clustersim.core.cards import card
from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.limits import MOST_CASES, counted
from clustersim.core.tomls import flat
from clustersim.scenario import Scenario
from clustersim.scenario.file.reading import Changes, Table, convert, override, read_toml, shipped_or_file
from clustersim.studies.sweep.axes import AxisTable, Scalar, SweepAxis, axis
from clustersim.studies.sweep.fields import check_fields


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[question]``: what the sweep is to decide.

    Parameters
    ----------
    axis : the column whose values are the choices; the other axes are the cases in which one is chosen.
    value, against : is ``value`` worth having instead of ``against``? Without them: which is the best?
    choice : ``value`` in words, such as "2:1 oversubscription".
    """

    axis: str
    value: str | int | float | None = None
    against: str | int | float | None = None
    choice: str = ""

    def __post_init__(self) -> None:
        if (self.value is None) != (self.against is None):
            raise ValueError("value and against go together: the choice, and what it is compared with")


class SweepFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole file.

    Parameters
    ----------
    base : a scenario, by name or by path; a path starts at the sweep's own folder.
    title : of tables and pictures. set : fields that every scenario of the sweep has.
    axes : see :class:`~clustersim.studies.sweep.axes.AxisTable`; the grid is every combination, the last axis fastest.
    question : what its report answers. sample : only so many scenarios of the grid. seed : they are drawn with.
    """

    base: str
    title: str = ""
    set: Table = {}
    axes: list[AxisTable] = []
    question: Question | None = None
    sample: Annotated[int, Meta(ge=1, le=MOST_CASES)] | None = None
    seed: int = 0


@dataclass(frozen=True)
class SweepCase:
    """One scenario of a sweep. axes : column -> what a table shows. changes : field -> value, as for ``--set``."""

    axes: Mapping[str, Scalar]
    changes: Changes


@dataclass(frozen=True)
class Sweep:
    """A sweep that has been read.

    Parameters
    ----------
    name, title : of the sweep. path : its file, which errors name.
    base : the tables of the base scenario, ``base_path`` its file.
    fixed : field -> value, for every case. axes : the dimensions of the grid. question : what is to be decided.
    sample, seed : only so many cases of the grid; None means all.
    """

    name: str
    title: str
    path: Path
    base: Table
    base_path: Path
    fixed: Changes
    axes: tuple[SweepAxis, ...]
    sample: int | None = None
    seed: int = 0
    question: Question | None = None

    def __len__(self) -> int:
        return len(self.chosen)

    def __repr__(self) -> str:
        return f"<Sweep {self.name}: {len(self):,} scenarios over {', '.join(self.columns)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the base, and each axis."""
        axes = ((", ".join(sweep_axis.names), f"{len(sweep_axis.points):,} values") for sweep_axis in self.axes)
        return card(f"{self.title}: {len(self):,} scenarios", [("base", self.base_path.stem), *axes])

    @property
    def total(self) -> int:
        """Points of the whole grid: counted, not made."""
        return math.prod(len(sweep_axis.points) for sweep_axis in self.axes)

    @cached_property
    def chosen(self) -> range | list[int]:
        """Numbers of the grid's points that are taken, ascending."""
        if self.sample is None or self.sample >= self.total:
            return range(self.total)
        source = random.Random(self.seed)
        drawn = set[int]()
        if self.total <= sys.maxsize:
            return sorted(source.sample(range(self.total), self.sample))
        while len(drawn) < self.sample:
            drawn.add(source.randrange(self.total))
        return sorted(drawn)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the axes' columns."""
        return tuple(name for sweep_axis in self.axes for name in sweep_axis.names)

    def places(self, i: int) -> tuple[int, ...]:
        """Which point of each axis case ``i`` is at."""
        number = self.chosen[i]
        places = []
        for sweep_axis in reversed(self.axes):
            number, place = divmod(number, len(sweep_axis.points))
            places.append(place)
        return tuple(reversed(places))

    def case(self, i: int) -> SweepCase:
        """Case ``i``, from 0."""
        points = [sweep_axis.points[place] for sweep_axis, place in zip(self.axes, self.places(i), strict=True)]
        shown = {name: value for point in points for name, value in point.shown.items()}
        changes: Table = dict(self.fixed)
        for point in points:
            for key, value in point.changes.items():
                if key.endswith("+"):
                    _append(changes, key.removesuffix("+"), value, self.base)
                else:
                    changes[key] = value
        return SweepCase(shown, {key: _filled(value, changes, self) for key, value in changes.items()})

    def cases(self) -> Iterator[SweepCase]:
        """Every case, the last axis fastest."""
        return (self.case(i) for i in range(len(self)))

    def scenario(self, case: SweepCase) -> Scenario:
        """The scenario of a case. Raises :class:`ScenarioError` where it cannot be read."""
        return scenario.from_table(self.base, self.base_path, case.changes)


def load(path: str | Path | Table) -> Sweep:
    """A sweep from a file, a shipped one by name, or its tables. Raises :class:`ScenarioError`."""
    if isinstance(path, dict):
        return from_table(path)
    sweep_path = shipped_or_file(path, "sweep")
    return from_table(read_toml(sweep_path), sweep_path)


def from_table(table: Table, path: str | Path = "sweep.toml") -> Sweep:
    """A sweep from the tables themselves; ``path`` is what errors name and where relative paths start."""
    path = Path(path)
    file = convert(table, SweepFile, str(path))
    beside = path.parent / file.base
    try:
        base_path = scenario.find(beside if beside.is_file() else file.base)
        base = read_toml(base_path)
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error} (at $.base)") from None
    axes = tuple(axis(table, f"{path}: $.axes[{i}]") for i, table in enumerate(file.axes))
    title = file.title or path.stem.removeprefix("sweep_").replace("_", " ")
    sweep = Sweep(path.stem, title, path, base, base_path, flat(file.set), axes, file.sample, file.seed, file.question)
    taken = min(sweep.total, file.sample or sweep.total)
    counted(taken, MOST_CASES, f"{path}: $.axes: scenarios of the grid, or its sample,", ScenarioError)
    check_fields(sweep.fixed, [sweep_axis.keys for sweep_axis in axes], str(path))
    for name in sweep.columns:
        if sweep.columns.count(name) > 1:
            raise ScenarioError(f"{path}: two axes have the column {name!r}; give one a name (at $.axes)")
    _check_question(sweep)
    return sweep


def _append(changes: Table, key: str, value: Any, base: Table) -> None:
    """Make the list at ``key`` longer: what ``changes`` says of it, or else the base scenario."""
    longer = value if isinstance(value, list) else [value]
    if key not in changes:
        current: Any = override(base, changes)
        for part in key.split("."):
            current = current.get(part, []) if isinstance(current, dict) else []
        changes[key] = current
    changes[key] = [*changes[key], *longer]


def _filled(value: Any, changes: Changes, sweep: Sweep) -> Any:
    """A value whose ``"${cluster.nodes}"`` are what those fields hold in this case."""
    if isinstance(value, dict):
        return {key: _filled(item, changes, sweep) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, changes, sweep) for item in value]
    match = re.fullmatch(r"\$\{([\w.-]+)\}", value) if isinstance(value, str) else None
    if match is None:
        return value
    current: Any = override(sweep.base, changes)
    for part in match.group(1).split("."):
        current = current.get(part) if isinstance(current, dict) else None
    if current is None or current == value:
        raise ScenarioError(
            f"{sweep.path}: {value!r} stands for a field that neither the base scenario nor the sweep sets; "
            "write it like '${cluster.nodes}'"
        )
    return current


def _check_question(sweep: Sweep) -> None:
    question = sweep.question
    if question is None:
        return
    if question.axis not in sweep.columns:
        raise ScenarioError(
            f"{sweep.path}: no axis {question.axis!r}; {nearest(question.axis, sweep.columns)} (at $.question.axis)"
        )
    values = {point.shown.get(question.axis): None for sweep_axis in sweep.axes for point in sweep_axis.points}
    for name in ("value", "against"):
        given = getattr(question, name)
        if given is not None and given not in values:
            suggestion = nearest(str(given), [str(value) for value in values if value is not None])
            raise ScenarioError(
                f"{sweep.path}: axis {question.axis!r} has no value {given!r}; {suggestion} (at $.question.{name})"
            )
