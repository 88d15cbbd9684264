"""clustersim: a discrete-event simulator of distributed training on GPU clusters, checked against measurements.

>>> import clustersim
>>> result = clustersim.load("ddp_resnet50_1x8_v100").run()  # doctest: +SKIP
>>> result.summary["step_time_s"]  # doctest: +SKIP

Names are looked up when first used, so importing the package loads none of its parts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clustersim import analysis, collectives, engine, fabrics, models, plots, strategies, sweeps, traces, units
    from clustersim.analysis.metrics import summary
    from clustersim.collectives.base import Group, Plan, Request
    from clustersim.compute import step_cost
    from clustersim.dims import Dims
    from clustersim.engine import simulate
    from clustersim.errors import ClusterSimError
    from clustersim.mesh import Mesh
    from clustersim.model import Model, StepCost
    from clustersim.models import from_hf
    from clustersim.planner import plan
    from clustersim.program import Collective, Compute, Program, Recv, Role, Send
    from clustersim.scenario import Scenario, load
    from clustersim.strategies import STRATEGIES
    from clustersim.sweeps import sweep
    from clustersim.timeline import Timeline
    from clustersim.topology import Topology

_HOME = {
    name: home
    for home, names in {
        "analysis.metrics": "summary",
        "collectives.base": "Group Plan Request",
        "compute": "step_cost",
        "dims": "Dims",
        "engine": "simulate",
        "errors": "ClusterSimError",
        "mesh": "Mesh",
        "model": "Model StepCost",
        "models": "from_hf",
        "planner": "plan",
        "program": "Collective Compute Program Recv Role Send",
        "scenario": "Scenario load",
        "strategies": "STRATEGIES",
        "sweeps": "sweep",
        "timeline": "Timeline",
        "topology": "Topology",
    }.items()
    for name in names.split()
}
_MODULES = (
    "analysis",
    "collectives",
    "engine",
    "fabrics",
    "models",
    "plots",
    "strategies",
    "sweeps",
    "traces",
    "units",
)

__all__ = [
    "STRATEGIES", "ClusterSimError", "Collective", "Compute", "Dims", "Group", "Mesh", "Model", "Plan", "Program",
    "Recv", "Request", "Role", "Scenario", "Send", "StepCost", "Timeline", "Topology", "analysis", "collectives",
    "engine", "fabrics", "from_hf", "load", "models", "plan", "plots", "simulate", "step_cost", "strategies", "summary",
    "sweep", "sweeps", "traces", "units",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("clustersim")
    if name in _HOME:
        value = getattr(import_module(f"clustersim.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f"clustersim.{name}")
    raise AttributeError(f"module 'clustersim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
