"""What no single field of a ``[campaign]`` table can say is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clustersim.campaign.causes import Cause
from clustersim.errors import ScenarioError
from clustersim.scenario.campaign_schema import CampaignTable

if TYPE_CHECKING:
    from clustersim.campaign.job import Job


def check(table: CampaignTable, job: Job, causes: Sequence[Cause]) -> None:
    """Spares, timeouts, policies and names that do not go together. Raises :class:`ScenarioError`."""
    spares = table.nodes.spares
    if spares is not None and spares > job.nodes:
        raise ScenarioError(
            f"spares = {spares:,} are more than the job's {job.nodes:,} node(s) (at $.campaign.nodes.spares)"
        )
    if spares is not None and any(one.loses and one.repair is None for one in causes):
        raise ScenarioError(
            "spares run out, so say when lost nodes are back: repair = '2 d' (at $.campaign.nodes.repair)"
        )
    if table.detection.timeout is None and any(one.silent for one in causes):
        name = next(one.name for one in causes if one.silent)
        raise ScenarioError(f"nothing reports {name!r}; say when it is noticed (at $.campaign.detection.timeout)")
    if table.recovery.policy in ("drop_replica", "shrink") and job.copies < 2:
        raise ScenarioError(
            f"policy = {table.recovery.policy!r} of a job whose replicas of the model ({job.replicas:,}) keep one copy "
            "of the optimizer states; use 'replace' (at $.campaign.recovery.policy)"
        )
    names = [one.name for one in table.degraded]
    if len(set(names)) < len(names):
        raise ScenarioError("two tables of one name (at $.campaign.degraded)")
