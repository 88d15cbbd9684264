"""Whether the fields that a sweep sets exist, and whether no two of its parts set the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from clustersim.core.errors import ScenarioError, nearest
from clustersim.scenario.file.reading import Changes
from clustersim.scenario.file.schema import ScenarioFile
from clustersim.training.parallel import FIELDS, field_for
from clustersim.training.strategies import STRATEGIES


def check_fields(fixed: Changes, axes: Sequence[Sequence[str]], path: str) -> None:
    """Raise :class:`ScenarioError` for a field that no scenario has, or that is set twice.

    fixed : of ``[set]``. axes : the fields of each. path : the file, for errors.
    """
    places_of: dict[str, str] = {}
    parts = [("$.set", list(fixed)), *((f"$.axes[{i}]", list(keys)) for i, keys in enumerate(axes))]
    for place, keys in parts:
        for key in keys:
            _check_exists(key, path, place)
            _check_once(key, places_of, path, place)
        places_of |= dict.fromkeys(keys, place)


def _check_exists(key: str, path: str, place: str) -> None:
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
        known_names = {*FIELDS, *([rest[0]] if field_for(rest[0]) else [])}
    elif first == "strategy":  # every knob of any: the strategy may be an axis too
        known_names = {"kind"} | {name for row in STRATEGIES.values() for name in row.config.__struct_encode_fields__}
    else:
        table = next(field.type for field in msgspec.structs.fields(ScenarioFile) if field.name == first)
        known_names = {field.encode_name for field in msgspec.structs.fields(table)}
    if rest[0] not in known_names:
        raise ScenarioError(f"{path}: no field {key!r} in a scenario; {nearest(rest[0], known_names)} (at {place})")


def _check_once(key: str, places_of: Mapping[str, str], path: str, place: str) -> None:
    for other_key, other_place in places_of.items():
        longer = key.endswith("+") and other_key.endswith("+")
        if key.removesuffix("+") == other_key.removesuffix("+") and not (
            longer or (other_place == "$.set" and key.endswith("+"))
        ):
            raise ScenarioError(
                f"{path}: {key!r} is set by {other_place} already; to make a list longer write "
                f"'{key.removesuffix('+')}+' (at {place})"
            )
        if other_key.startswith(f"{key}."):
            raise ScenarioError(f"{path}: {key!r} would undo {other_key!r} of {other_place}; put it first (at {place})")
