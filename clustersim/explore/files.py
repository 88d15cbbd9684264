"""A changed scenario to take away: as the command that plays it, and as a file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clustersim.explore.fence import files_of
from clustersim.scenario import Scenario
from clustersim.scenario.reading import override


def command(name: str, changes: Sequence[str]) -> str:
    """The command line that plays a scenario with these ``--set`` texts."""
    return shlex.join(["clustersim", "run", name, *(word for text in changes for word in ("--set", text))])


def saved(scenario: Scenario) -> str:
    """The scenario with its changes as TOML."""
    told = (f"# {key}{' is gone' if one is None else f' = {toml_text(one)}'}" for key, one in scenario.changes.items())
    head = [f"# {scenario.name}{', changed:' if scenario.changes else ''}", *told]
    if any(str(name).endswith((".toml", ".json", ".csv")) for name in files_of(scenario).values()):
        head.append(f"# Its paths start in the folder of {scenario.path.name}.")
    lines = [*head, *_tables(override(scenario.table, scenario.changes), "")]
    return "\n".join(lines) + "\n"


def _tables(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """A table's own values, then the tables inside it."""
    own = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    if path and own:
        yield f"\n[{path}]"
    yield from (f"{_key(name)} = {toml_text(value)}" for name, value in own.items())
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _tables(value, f"{path}.{_key(name)}" if path else _key(name))


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name)


def toml_text(value: object) -> str:
    """A value as TOML writes it on one line.

    >>> toml_text([{"match": "node0/nic0", "factor": 0.5}])
    '[{match = "node0/nic0", factor = 0.5}]'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {toml_text(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)
