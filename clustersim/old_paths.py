"""Import paths of before the twelve rooms: each answers with what is at the new one, and one DeprecationWarning.

They go with the next release. Nothing in the package itself imports by an old path.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OLD_PATHS = {
    "analysis": "explain",
    "arrays": "core.arrays",
    "blocks": "core.blocks",
    "builder": "training.builder",
    "byte_matrix": "core.byte_matrix",
    "calibrated": "core.calibrated",
    "calibration": "calibrate",
    "calibration.replay_peers": "studies.replay.replay_peers",
    "calibration.replay_program": "studies.replay.replay_program",
    "calibration.replay_scale": "studies.replay.replay_scale",
    "calibration.trace_replay": "studies.replay.trace_replay",
    "campaign": "studies.campaign",
    "cards": "core.cards",
    "cli": "app.cli",
    "compute": "model.seconds",
    "costs": "core.costs",
    "device": "core.device",
    "dims": "core.dims",
    "economics": "core.economics",
    "errors": "core.errors",
    "exchange": "files.launch",
    "explore": "app.explore",
    "fabrics": "cluster.files",
    "facts": "core.facts",
    "files.traces.base": "files.slices",
    "files.traces.perfetto": "files.chrome_trace",
    "fitting": "collectives.fitted",
    "flows": "engine.flows",
    "holding": "core.holding",
    "label": "core.label",
    "lessons": "app.lessons",
    "limits": "core.limits",
    "memo": "core.memo",
    "memory": "training.memory",
    "memory_use": "core.memory_use",
    "mesh": "core.mesh",
    "mix": "core.mix",
    "models": "model",
    "outputs": "core.outputs",
    "parallel": "training.parallel",
    "partition": "training.partition",
    "paths": "core.paths",
    "planner": "studies.plan",
    "plots": "app.plots",
    "program": "core.program",
    "ranges": "core.ranges",
    "report": "app.report",
    "routing": "cluster.routes",
    "scenario.altered": "scenario.run.altered",
    "scenario.beside_published": "scenario.result.beside_published",
    "scenario.campaign_schema": "scenario.file.campaign_schema",
    "scenario.campaign_units": "scenario.file.campaign_units",
    "scenario.comparison": "studies.what_if.comparison",
    "scenario.exchange": "studies.what_if.exchange",
    "scenario.folded": "studies.what_if.folded",
    "scenario.hanging": "scenario.run.hanging",
    "scenario.held": "scenario.run.held",
    "scenario.identity": "scenario.run.identity",
    "scenario.incident_table": "scenario.file.incident_table",
    "scenario.incidents": "scenario.run.incidents",
    "scenario.memory_table": "studies.what_if.memory_table",
    "scenario.mesh_table": "scenario.run.mesh_table",
    "scenario.misplaced": "scenario.run.misplaced",
    "scenario.otherwise": "studies.what_if.otherwise",
    "scenario.parts": "scenario.run.parts",
    "scenario.plan_option": "scenario.file.plan_option",
    "scenario.ran": "scenario.result.trust",
    "scenario.reading": "scenario.file.reading",
    "scenario.replicas": "scenario.run.replicas",
    "scenario.rerun": "studies.what_if.rerun",
    "scenario.running": "scenario.run.running",
    "scenario.schema": "scenario.file.schema",
    "scenario.sketch": "studies.what_if.sketch",
    "scenario.split_step": "scenario.run.split_step",
    "scenario.splitting": "scenario.file.splitting",
    "scenario.spread": "studies.what_if.spread",
    "scenario.timed": "scenario.run.timed",
    "scenario.trained": "scenario.run.trained",
    "scenario.turned": "studies.what_if.turned",
    "schedules": "training.schedules",
    "sensitivity": "studies.sensitivity",
    "sheets": "core.sheets",
    "strategies": "training.strategies",
    "sweeps": "studies.sweep",
    "texts": "core.texts",
    "timeline": "core.timeline",
    "tomls": "core.tomls",
    "topology": "core.topology",
    "traces": "files.traces",
    "traces.base": "files.slices",
    "traces.perfetto": "files.chrome_trace",
    "transports": "core.transports",
    "units": "core.units",
    "variation": "core.variation",
}
"""Old path -> new path, both below ``clustersim``; of a package, of all that is in it, too."""

_warned: set[str] = set()


def new_path(old: str) -> str | None:
    """The full new path of a full old one; None where it is no old path.

    >>> new_path("clustersim.analysis.metrics"), new_path("clustersim.engine")
    ('clustersim.explain.metrics', None)
    """
    inside = old.removeprefix("clustersim.")
    parts = inside.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in OLD_PATHS:
            return f"clustersim.{OLD_PATHS[prefix]}{inside[len(prefix) :]}"
    return None


class OldPaths(MetaPathFinder, Loader):
    """Finder of modules by their old paths, and the loader of what it finds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for an old path; None for any other name."""
        if not fullname.startswith("clustersim.") or new_path(fullname) is None:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> None:
        """None: the import system makes an empty one, which :meth:`exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module at the new path where the old one was asked for, and say so once."""
        old = module.__name__
        new = new_path(old)
        if new is None:
            raise ImportError(f"no module {old!r}", name=old)
        if old not in _warned:
            _warned.add(old)
            warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(new)
