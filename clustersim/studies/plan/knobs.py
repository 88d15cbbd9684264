"""What may be tried of ``[parallel]``: each knob a value, a list of values, a range, or left to the search.

``tp = 8`` is fixed, ``tp = [4, 8]`` are choices, ``{ from = 1, to = 16, times = 2 }`` and
``{ from = 1, to = 5, step = 2 }`` are ranges, and ``"search"`` is what model and machine allow: powers of 2 that
fit into a node (tp), divisors of the layers (pp, vpp), divisors of the experts (ep), every choice of a setting. A knob
of a dimension whose degree is 1 is left out, so that ``sequence_parallel = true`` means where there is tensor
parallelism. Of lists beside each other only those combinations are options that the model allows.
"""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from clustersim.core.dims import powers_of_two
from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.limits import MOST_VALUES, counted
from clustersim.core.texts import Table, data_table, shown
from clustersim.training.parallel import ModelShape, ParallelConfig, check
from clustersim.training.parallel.config import AtLeastOne

SEARCH = "search"
OWN_PARALLEL = "parallel"
"""In a table of ``[[try.strategies]]``: of ``[parallel]``, what that strategy alone has, such as its framework."""
DEGREES = ("tp", "pp", "cp", "ep")
"""Of ``[parallel]``, those that name an option."""
MOST_STAGES = 64
MOST_CHUNKS = 16
MOST_CP = 16
"""Largest pp, vpp and cp that are searched where nobody says how far."""
OF_DIMENSION: Mapping[str, str] = data_table("parallel_fields")["dimension"]
"""Knobs that mean nothing where a dimension has degree 1."""


def combinations(tried: Table, shape: ModelShape, per_node: int, file: str) -> list[Table]:
    """Every ``[parallel]`` table that is to be tried, equal ones once, in order; ``[{}]`` for none.

    Parameters
    ----------
    tried : knob -> what may be tried. shape : the model's sizes. per_node : GPUs of the largest node. file : the
        plan's file.

    Raises :class:`ScenarioError` for an unknown knob, a range that is none, and too many tables.
    """
    values = {name: list(_values(name, entry, shape, per_node, tried, file)) for name, entry in tried.items()}
    total = 1
    for name, choices in values.items():
        _check(name, choices, file)
        total *= len(choices)
    counted(total, MOST_VALUES, f"{file}: $.try.parallel: tables", ScenarioError)
    tables: dict[str, Table] = {}
    for chosen in itertools.product(*values.values()):
        combination = dict(zip(values, chosen, strict=True))
        table = {name: value for name, value in combination.items() if value is not None and meant(name, combination)}
        tables.setdefault(repr(table), table)
    return list(_possible(list(tables.values()), shape))


def _possible(tables: Sequence[Table], shape: ModelShape) -> Iterator[Table]:
    """Those of the tables that the model allows on some number of GPUs, and those with a value that it never allows:
    such a value is refused in the answer, with the reason, but lists in which each value is right with some other
    (vpp 2 beside pp 4 of 40 layers, not beside pp 8) make options of these alone."""
    allowed = [_allows(table, shape) for table in tables]
    right = {
        (name, repr(value))
        for table, allows in zip(tables, allowed, strict=True)
        for name, value in table.items()
        if allows
    }
    for table, allows in zip(tables, allowed, strict=True):
        if allows or any((name, repr(value)) not in right for name, value in table.items()):
            yield table


def _allows(table: Table, shape: ModelShape) -> bool:
    """Whether a model of these sizes can be split so; what cannot be read is for its option to say."""
    try:
        parallel = msgspec.convert(table, ParallelConfig)
    except msgspec.ValidationError:
        return True
    experts = (parallel.tp if parallel.etp is None else parallel.etp) * parallel.ep
    try:
        check(parallel, shape, parallel.pp * math.lcm(parallel.tp * parallel.cp, experts))
    except ScenarioError:
        return False
    return True


def own_parallel(strategy: Table) -> Table:
    """What a strategy that is tried has of ``[parallel]`` for itself alone.

    Raises :class:`ScenarioError` for what is no table, an unknown field, and a degree, which every strategy is tried
    with.
    """
    own = strategy.get(OWN_PARALLEL, {})
    field = f"$.try.strategies.{OWN_PARALLEL}"
    if not isinstance(own, dict):
        raise ScenarioError(f"parallel = {shown(own)}: expected a table of fields of [parallel] (at {field})")
    for name, value in own.items():
        if name in DEGREES:
            raise ScenarioError(
                f"{name} = {shown(value)}: degrees are tried with every strategy; write {name} in [try.parallel] "
                f"(at {field}.{name})"
            )
        if name not in ParallelConfig.__struct_fields__:
            suggestion = nearest(name, ParallelConfig.__struct_fields__)
            raise ScenarioError(f"unknown field {name!r} = {shown(value)}; {suggestion} (at {field}.{name})")
    return own


def _check(name: str, choices: Sequence[Any], file: str) -> None:
    """Raise :class:`ScenarioError` for a degree or count that is none: the space is made before any table is read."""
    if AtLeastOne not in _types(name):
        return
    for value in choices:
        if value is not None and (type(value) is not int or value < 1):
            raise ScenarioError(
                f"{file}: {name} = {shown(value)}: expected a whole number of at least 1 (at $.try.parallel.{name})"
            )


def meant(name: str, table: Table) -> bool:
    """Whether a knob means something in a table: it is of no dimension, or that is split."""
    return name not in OF_DIMENSION or (table.get(OF_DIMENSION[name]) or 1) > 1


def _values(name: str, entry: Any, shape: ModelShape, per_node: int, tried: Table, where: str) -> Iterator[Any]:
    field = f"$.try.parallel.{name}"
    if name not in ParallelConfig.__struct_fields__:
        suggestion = nearest(name, ParallelConfig.__struct_fields__)
        raise ScenarioError(f"{where}: unknown field {name!r} = {entry!r}; {suggestion} (at {field})")
    if entry == SEARCH:
        yield from _searched(name, shape, per_node, tried, where)
    elif isinstance(entry, dict) and set(entry) <= {"from", "to", "times", "step"}:
        yield from _ranged(entry, f"{where}: {name} = {dict(entry)!r}", field)
    elif isinstance(entry, list):
        yield from entry
    else:
        yield entry


def _ranged(bounds: Table, subject: str, field: str) -> Iterator[int]:
    range_keys = {"from", "to", "step"}, {"from", "to", "times"}
    whole_numbers = all(isinstance(value, int) and value >= 1 for value in bounds.values())
    if set(bounds) not in range_keys or not whole_numbers or bounds.get("times", 2) < 2:
        raise ScenarioError(
            f"{subject}: a range is written {{ from = 1, to = 8, times = 2 }}, or with step (at {field})"
        )
    value = bounds["from"]
    while value <= bounds["to"]:
        yield value
        value = value * bounds["times"] if "times" in bounds else value + bounds["step"]


def _searched(name: str, shape: ModelShape, per_node: int, tried: Table, file: str) -> Sequence[Any]:
    """What the model and the machine allow."""
    ends = sum(tried.get(f"account_for_{end}_in_pipeline_split") is True for end in ("embedding", "loss"))
    degrees: dict[str, Sequence[Any]] = {
        "tp": powers_of_two(per_node),
        "cp": powers_of_two(MOST_CP),
        "pp": _divisors(shape.layers + ends, MOST_STAGES),
        "vpp": _divisors(shape.layers + ends, MOST_CHUNKS),
        "ep": _divisors(shape.experts, shape.experts) or [1],
        "etp": powers_of_two(per_node),
        "order": ["megatron", "llama3"],
        "schedule": [None, "zb_h1"],
    }
    if name in degrees:
        return degrees[name]
    flat = _types(name)
    if bool in flat:
        return [False, True]
    literal = next((choice_type for choice_type in flat if typing.get_origin(choice_type) is typing.Literal), None)
    if literal is None:
        raise ScenarioError(f"{file}: {name} cannot be left to the search; list values (at $.try.parallel.{name})")
    return [*([None] if type(None) in flat else []), *typing.get_args(literal)]


def _types(name: str) -> list[Any]:
    """A knob's type, and what it is made of; nothing for what is no field of :class:`ParallelConfig`."""
    kinds = (field.type for field in msgspec.structs.fields(ParallelConfig) if field.name == name)
    return [member for kind in kinds for member in (kind, *typing.get_args(kind))]


def _divisors(number: int, most: int) -> list[int]:
    """
    >>> _divisors(12, 6)
    [1, 2, 3, 4, 6]
    """
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
