"""Capacity planning: which machine, how many, and how to train on it, within limits of money, time and memory."""

from __future__ import annotations

from pathlib import Path

from clustersim.core.economics import GpuRates, Power, costs, rates, watts_per_gpu
from clustersim.core.texts import Table
from clustersim.scenario.file.plan_option import FILE, option_of
from clustersim.studies.plan.answer import kept, told
from clustersim.studies.plan.campaigns import with_campaign
from clustersim.studies.plan.options import PlanOption, SearchResult, title
from clustersim.studies.plan.pareto import dominates, front
from clustersim.studies.plan.rows import PlanAnswer
from clustersim.studies.plan.searching import SearchOptions, folder_for, search
from clustersim.studies.plan.spec import PlanFile, from_table, load
from clustersim.studies.sweep.crews import Executor


def plan(
    what: str | Path | Table | PlanFile,
    out: str | Path,
    *,
    executor: Executor | None = None,
    jobs: int | None = None,
    exhaustive: bool = False,
    robust: bool = False,
) -> PlanAnswer:
    """Search the options of a plan, and say which are worth having and why.

    Parameters
    ----------
    what : a plan's file, its tables as a dict, the name of a shipped one, or a :class:`PlanFile`. out : a folder; what
        is simulated is kept there, so that a second call goes on. executor, jobs : as for :func:`clustersim.sweep`.
    exhaustive : simulate also what bounds rule out; the answer is the same. robust : say too what would be chosen if
        machines were as far from their predictions as published ones (:mod:`clustersim.studies.plan.robust`).

    Returns the answer, which is also written to ``plan.json`` in ``out``.

    Raises :class:`clustersim.core.errors.ScenarioError` for a plan that cannot be read.
    """
    read, path = (what, Path("plan.toml")) if isinstance(what, PlanFile) else load(what)
    searched = search(read, path, out, SearchOptions(executor, jobs, exhaustive, robust))
    result = with_campaign(told(read, searched, path), read, searched)
    folder_for(read, path, out).write(FILE, kept(result, Path(out)))
    return result


__all__ = [
    "FILE",
    "GpuRates",
    "PlanAnswer",
    "PlanFile",
    "PlanOption",
    "Power",
    "SearchOptions",
    "SearchResult",
    "costs",
    "dominates",
    "folder_for",
    "from_table",
    "front",
    "kept",
    "load",
    "option_of",
    "plan",
    "rates",
    "search",
    "title",
    "told",
    "watts_per_gpu",
    "with_campaign",
]
