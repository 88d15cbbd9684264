"""Capacity planning: which machine, how many, and how to train on it, within limits of money, time and memory."""

from __future__ import annotations

from pathlib import Path

from clustersim.economics import Power, Rates, costs, rates, watts_per_gpu
from clustersim.planner.answer import told, write
from clustersim.planner.campaigns import with_campaign
from clustersim.planner.options import Option, Searched, title
from clustersim.planner.pareto import dominates, front
from clustersim.planner.searching import How, search
from clustersim.planner.spec import PlanFile, from_table, load
from clustersim.sweeps.crews import Executor
from clustersim.texts import Plain


def plan(
    what: str | Path | PlanFile,
    out: str | Path,
    *,
    executor: Executor | None = None,
    jobs: int | None = None,
    exhaustive: bool = False,
    robust: bool = False,
) -> Plain:
    """Search the options of a plan, and say which are worth having and why.

    Parameters
    ----------
    what : a plan's file, the name of a shipped one, or a :class:`PlanFile`. out : a folder; what is simulated is kept
        there, so that a second call goes on. executor, jobs : as for :func:`clustersim.sweep`.
    exhaustive : simulate also what bounds rule out; the answer is the same. robust : say too what would be chosen if
        machines were as far from their predictions as published ones (:mod:`clustersim.planner.robust`).

    Returns the answer as :func:`told` gives it, which is also written to ``plan.json`` in ``out``.

    Raises :class:`clustersim.errors.ScenarioError` for a plan that cannot be read.
    """
    read, path = (what, Path("plan.toml")) if isinstance(what, PlanFile) else load(what)
    found = search(read, path, out, How(executor, jobs, exhaustive, robust))
    said = told(read, found, path)
    said = with_campaign(said, read)
    write(said, out)
    return said


__all__ = [
    "How", "Option", "PlanFile", "Power", "Rates", "Searched", "costs", "dominates", "from_table", "front", "load",
    "plan", "rates", "search", "title", "told", "watts_per_gpu", "with_campaign", "write",
]  # fmt: skip
