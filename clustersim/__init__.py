"""clustersim: a discrete-event simulator of distributed training on GPU clusters, checked against measurements.

>>> import clustersim
>>> result = clustersim.load("ddp_resnet50_1x8_v100").run()  # doctest: +SKIP
>>> result.summary["step_time_s"]  # doctest: +SKIP

Names are looked up when first used, so importing the package loads none of its parts.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from clustersim.core.views import register_view
from clustersim.old_paths import OldPaths

if TYPE_CHECKING:
    from clustersim import collectives, engine
    from clustersim import explain as analysis
    from clustersim import model as models
    from clustersim.app import plots
    from clustersim.cluster import files as fabrics
    from clustersim.collectives.base import Group, Plan, Request
    from clustersim.core import units
    from clustersim.core.dims import Dims
    from clustersim.core.errors import ClusterSimError
    from clustersim.core.mesh import Mesh
    from clustersim.core.model import Model, StepCost
    from clustersim.core.program import Collective, Compute, Program, Recv, Role, Send
    from clustersim.core.timeline import Timeline
    from clustersim.core.topology import Topology
    from clustersim.engine import simulate
    from clustersim.explain.metrics import summary
    from clustersim.files import traces
    from clustersim.model import from_hf
    from clustersim.model.seconds import step_cost
    from clustersim.scenario import Scenario, load
    from clustersim.studies import sweep as sweeps
    from clustersim.studies.plan import plan
    from clustersim.studies.sweep import sweep
    from clustersim.training import strategies
    from clustersim.training.strategies import STRATEGIES

sys.meta_path.insert(0, OldPaths())

VIEWS = {
    "picture": "clustersim.app.plots:picture",
    "picture_file": "clustersim.app.plots:picture_file",
    "report": "clustersim.app.report:write_report",
    "run_file": "clustersim.files.traces.saved:save_run",
}
"""Who shows a result, and where."""

for _name, _home in VIEWS.items():
    register_view(_name, _home)

_HOME = {
    name: home
    for home, names in {
        "collectives.base": "Group Plan Request",
        "core.dims": "Dims",
        "core.errors": "ClusterSimError",
        "core.mesh": "Mesh",
        "core.model": "Model StepCost",
        "core.program": "Collective Compute Program Recv Role Send",
        "core.timeline": "Timeline",
        "core.topology": "Topology",
        "engine": "simulate",
        "explain.metrics": "summary",
        "model": "from_hf",
        "model.seconds": "step_cost",
        "scenario": "Scenario load",
        "studies.plan": "plan",
        "studies.sweep": "sweep",
        "training.strategies": "STRATEGIES",
    }.items()
    for name in names.split()
}
_MODULES = {
    "analysis": "explain",
    "collectives": "collectives",
    "engine": "engine",
    "fabrics": "cluster.files",
    "models": "model",
    "plots": "app.plots",
    "strategies": "training.strategies",
    "sweeps": "studies.sweep",
    "traces": "files.traces",
    "units": "core.units",
}

__all__ = [
    "STRATEGIES",
    "ClusterSimError",
    "Collective",
    "Compute",
    "Dims",
    "Group",
    "Mesh",
    "Model",
    "Plan",
    "Program",
    "Recv",
    "Request",
    "Role",
    "Scenario",
    "Send",
    "StepCost",
    "Timeline",
    "Topology",
    "analysis",
    "collectives",
    "engine",
    "fabrics",
    "from_hf",
    "load",
    "models",
    "plan",
    "plots",
    "simulate",
    "step_cost",
    "strategies",
    "summary",
    "sweep",
    "sweeps",
    "traces",
    "units",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("clustersim")
    if name in _HOME:
        value = getattr(import_module(f"clustersim.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f"clustersim.{_MODULES[name]}")
    raise AttributeError(f"module 'clustersim' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is public, with what Python keeps of any module: what this one is made with is nobody's to use."""
    of_python = (name for name in globals() if name.startswith("__"))
    return sorted({*of_python, *__all__, "__version__", "testing"})
