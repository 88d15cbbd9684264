"""No path outside what was opened: a page may name what is shipped, and the files that its scenario names itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clustersim.errors import ScenarioError
from clustersim.models.catalog import catalog
from clustersim.paths import shipped
from clustersim.scenario import Scenario
from clustersim.texts import shown

FILES = ("cluster.topology", "model.hf_config", "model.name", "parallel.schedule_csv", "parallel.routing.file")
"""Every field by which a scenario reads a file, as in :class:`clustersim.sweeps.row.Fingerprints`."""


def check(asked: Scenario, opened: Scenario) -> None:
    """Raise :class:`ScenarioError` where a scenario names a file that the one which was opened does not.

    It looks at what was read, however it was said: by a dotted key, a whole table, or another framework's name.
    """
    mine, own = asked.inputs(), opened.inputs()
    known = {"cluster.topology": shipped("topologies"), "model.name": catalog()}
    for field in FILES:
        name = _at(mine, field)
        if name is not None and name != _at(own, field) and name not in known.get(field, ()):
            what = "names nothing that is shipped" if field in known else "is a file"
            raise ScenarioError(
                f"--set {field}: {shown(name)} {what}, and explore reads no file but its own scenario's; "
                f"`clustersim run` takes it (at $.{field})"
            )


def _at(table: Any, field: str) -> object:
    for part in field.split("."):
        table = table.get(part) if isinstance(table, Mapping) else None
    return table
