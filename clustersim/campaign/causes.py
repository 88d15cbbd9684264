"""Causes of failure: shipped sets with their sources, and each as one process of the whole job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from clustersim.campaign.pools import weibull_scale
from clustersim.errors import ScenarioError, nearest
from clustersim.paths import data_path
from clustersim.scenario.campaign_schema import CampaignTable, FailureCause
from clustersim.scenario.campaign_units import Duration, Rate
from clustersim.scenario.reading import convert, read_toml
from clustersim.units import quantity

FILE = "campaign_failures.toml"


class CauseSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shipped set of causes: what it is of, in words, and where its figures are from."""

    title: str
    source: str
    failures: tuple[FailureCause, ...]


class _Sets(msgspec.Struct, frozen=True):
    sets: dict[str, CauseSet]


@lru_cache(maxsize=1)
def sets() -> dict[str, CauseSet]:
    """Every shipped set by name."""
    path = data_path("data") / FILE
    return convert({"sets": read_toml(path)}, _Sets, FILE, dec_hook=quantity).sets


@dataclass(frozen=True)
class Cause:
    """One way in which the whole job fails.

    The job's failures by this cause are a power-law process: ``(t/scale)^shape`` are expected until t, which is Poisson
    for shape 1. Its first failure is the first of all its units, Weibull with this shape, exactly; a unit that was
    repaired goes on as old as the others.

    Parameters
    ----------
    scale : [s]; infinite for one that never happens. scope, silent, detect, repair : as in the table, with its
        defaults. loses : nodes.
    """

    name: str
    scale: float
    shape: float = 1.0
    scope: str = "node"
    loses: int = 1
    silent: float = 0.0
    detect: Duration | None = None
    repair: Duration | None = None

    def expected(self, time: float) -> float:
        """Failures expected in so long [s]."""
        return float((time / self.scale) ** self.shape)

    def following(self, time: Any, chance: Any) -> Any:
        """When the next failure after ``time`` [s] is; ``chance`` : an exponential variable of mean 1."""
        if math.isinf(self.scale):
            return time + math.inf
        return self.scale * ((time / self.scale) ** self.shape + chance) ** (1.0 / self.shape)


def causes_of(table: CampaignTable, job: Any) -> tuple[Cause, ...]:
    """The causes of a campaign. Raises :class:`ScenarioError` for an unknown set, or racks of no size."""
    failures = table.failures
    if isinstance(failures, str):
        if failures not in sets():
            raise ScenarioError(f"no failures {failures!r}; {nearest(failures, sets())} (at $.campaign.failures)")
        failures = sets()[failures].failures
    return tuple(_cause(one, table, job, f"$.campaign.failures[{i}]") for i, one in enumerate(failures))


def _cause(one: FailureCause, table: CampaignTable, job: Any, at: str) -> Cause:
    units = 1 if one.scope == "job" else _nodes_of(one.scope, table, f"{at}.scope")
    return Cause(
        one.name, scale_of(one.rate, table, job, f"{at}.rate", one.shape), one.shape, one.scope,
        0 if one.scope == "job" else min(units, job.nodes), one.silent, one.detect,
        one.repair if one.repair is not None else table.nodes.repair,
    )  # fmt: skip


def scale_of(rate: Rate, table: CampaignTable, job: Any, at: str, shape: float = 1.0) -> float:
    """Scale [s] of the process of all units of a job: ``eta n^(-1/k)``; infinite at rate 0."""
    per_unit = float(rate) * table.factor
    if per_unit <= 0:
        return math.inf
    units = {"job": 1, "gpu": job.gpus}.get(rate.of) or math.ceil(job.nodes / _nodes_of(rate.of, table, at))
    return float(weibull_scale(shape, 1.0 / per_unit) * units ** (-1.0 / shape))


def _nodes_of(what: str, table: CampaignTable, at: str) -> int:
    """Nodes of a node, rack or switch."""
    size = 1 if what == "node" else getattr(table.nodes, what)
    if size is None:
        raise ScenarioError(f"how many nodes has a {what}? write campaign.nodes.{what} (at {at})")
    return int(size)
