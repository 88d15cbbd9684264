"""A changed scenario to take away: as the command that plays it, and as a file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from clustersim.explore.fence import files_of
from clustersim.scenario import Scenario
from clustersim.scenario.reading import override
from clustersim.tomls import toml_text, toml_value


def command(name: str, changes: Sequence[str]) -> str:
    """The command line that plays a scenario with these ``--set`` texts."""
    return shlex.join(["clustersim", "run", name, *(word for text in changes for word in ("--set", text))])


def saved(scenario: Scenario) -> str:
    """The scenario with its changes as TOML."""
    told = (f"# {key}{' is gone' if one is None else f' = {toml_value(one)}'}" for key, one in scenario.changes.items())
    head = [f"# {scenario.name}{', changed:' if scenario.changes else ''}", *told]
    if any(str(name).endswith((".toml", ".json", ".csv")) for name in files_of(scenario).values()):
        head.append(f"# Its paths start in the folder of {scenario.path.name}.")
    return "\n".join(head) + "\n" + toml_text(override(scenario.table, scenario.changes))
