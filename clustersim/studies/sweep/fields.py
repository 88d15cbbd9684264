"""Whether the fields that a sweep sets exist, and whether no two of its parts set the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.texts import Table
from clustersim.scenario.reading import Changes
from clustersim.scenario.schema import ScenarioFile
from clustersim.training.parallel import FIELDS, field_for
from clustersim.training.strategies import STRATEGIES


def check_fields(fixed: Changes, axes: Sequence[Sequence[str]], base: Table, path: str) -> None:
    """Raise :class:`ScenarioError` for a field that no scenario has, or that is set twice.

    fixed : of ``[set]``. axes : the fields of each. path : the file, for errors.
    """
    said: dict[str, str] = {}
    parts = [("$.set", list(fixed)), *((f"$.axes[{i}]", list(keys)) for i, keys in enumerate(axes))]
    for place, keys in parts:
        for key in keys:
            _check_exists(key, base, path, place)
            _check_once(key, said, path, place)
        said |= dict.fromkeys(keys, place)


def _check_exists(key: str, base: Table, path: str, place: str) -> None:
    first, *rest = key.removesuffix("+").split(".")
    tables = ScenarioFile.__struct_fields__
    if first not in tables:
        raise ScenarioError(
            f"{path}: no field {key!r} in a scenario; {nearest(first, tables)}; "
            f"write it like 'cluster.nodes' (at {place})"
        )
    if not rest:
        return
    if first == "parallel":
        known = {*FIELDS, *([rest[0]] if field_for(rest[0]) else [])}
    elif first == "strategy":  # every knob of any: the strategy may be an axis too
        known = {"kind"} | {name for row in STRATEGIES.values() for name in row.config.__struct_encode_fields__}
    else:
        table = next(field.type for field in msgspec.structs.fields(ScenarioFile) if field.name == first)
        known = {field.encode_name for field in msgspec.structs.fields(table)}
    if rest[0] not in known:
        raise ScenarioError(f"{path}: no field {key!r} in a scenario; {nearest(rest[0], known)} (at {place})")


def _check_once(key: str, said: Mapping[str, str], path: str, place: str) -> None:
    for other, there in said.items():
        longer = key.endswith("+") and other.endswith("+")
        if key.removesuffix("+") == other.removesuffix("+") and not (
            longer or (there == "$.set" and key.endswith("+"))
        ):
            raise ScenarioError(
                f"{path}: {key!r} is set by {there} already; to make a list longer write '{key.removesuffix('+')}+' "
                f"(at {place})"
            )
        if other.startswith(f"{key}."):
            raise ScenarioError(f"{path}: {key!r} would undo {other!r} of {there}; put it first (at {place})")
