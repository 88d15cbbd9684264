"""No path outside what was opened: a page may name what is shipped, and the files that its scenario names itself."""

from __future__ import annotations

from clustersim.core import gpu_file
from clustersim.core.errors import ScenarioError
from clustersim.core.paths import shipped
from clustersim.core.texts import shown
from clustersim.model.named_models import catalog
from clustersim.scenario import Scenario

FILES = (
    "cluster.topology",
    "cluster.device",
    "model.hf_config",
    "model.file",
    "model.name",
    "parallel.schedule_csv",
    "parallel.routing.file",
)
"""Every field by which a scenario reads a file, as in :class:`clustersim.scenario.run.identity.Fingerprints`."""


def check(edited: Scenario, opened: Scenario) -> None:
    """Raise :class:`ScenarioError` where a scenario names a file that the one which was opened does not.

    It looks at what was read, however it was said: by a dotted key, a whole table, or another framework's name.
    """
    own = files_of(opened)
    shipped_names = {"cluster.topology": shipped("topologies"), "model.name": catalog()}
    for field, name in files_of(edited).items():
        # The file's own name may be another file where it is said again: from the working folder, not beside the file.
        changed = any(field == key or field.startswith(f"{key}.") for key in edited.changes)
        if name is not None and (changed or name != own[field]) and name not in shipped_names.get(field, ()):
            problem = "names nothing that is shipped" if field in shipped_names else "is a file"
            raise ScenarioError(
                f"--set {field}: {shown(name)} {problem}, and explore reads no file but its own scenario's; "
                f"`clustersim run` takes it (at $.{field})"
            )


def files_of(scenario: Scenario) -> dict[str, str | None]:
    """What each of :data:`FILES` says; None where it says nothing."""
    cluster = scenario.file.cluster
    model = scenario.file.model
    split = scenario.file.parallel
    names = (split.schedule_csv, split.routing.file) if split else (None, None)
    gpu = cluster.device if cluster.device and gpu_file.is_own(cluster.device) else None  # else a shipped one
    return dict(zip(FILES, (cluster.topology, gpu, model.hf_config, model.file, model.name, *names), strict=True))
