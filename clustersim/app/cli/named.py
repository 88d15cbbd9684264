"""What a command is asked of by name: a scenario's file, a shipped one, or an option of a plan's folder."""

from __future__ import annotations

from pathlib import Path

from clustersim import scenario as scenarios
from clustersim.core.errors import ScenarioError
from clustersim.core.texts import is_folder
from clustersim.scenario import Scenario
from clustersim.scenario.file.plan_option import option_of
from clustersim.scenario.file.reading import Changes


def named_scenario(name: str, overrides: Changes | None = None, place: int | None = None) -> tuple[Scenario, str]:
    """A scenario by file or name, or an option of the front of a plan's folder, from 1; and its title.

    Raises :class:`ScenarioError` where there is none, or where an option is asked of what is no plan's folder.
    """
    if is_folder(name):
        return option_of(Path(name), place or 1, overrides)
    if place is not None:
        raise ScenarioError(f"--option {place}: {name} is no folder that clustersim plan --out wrote")
    loaded = scenarios.load(name, overrides)
    return loaded, loaded.title
