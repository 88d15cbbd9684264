"""A whole training instead of a step: weeks with failures, checkpoints and slow hosts, as a distribution.

Closed forms (:mod:`renewal`, :mod:`maxima`, :mod:`pools`) answer where they are exact; with those of
``tests/campaign_laws.py`` they check the simulation.
"""

from __future__ import annotations

from clustersim.studies.campaign.answer import (
    FILE,
    CampaignAnswer,
    CampaignOutcome,
    LedgerPart,
    answer,
    folder_for,
    outcome,
)
from clustersim.studies.campaign.batches import CampaignOptions
from clustersim.studies.campaign.job import Campaign, Job
from clustersim.studies.campaign.ledger import GOODPUTS, PARTS, Percentiles, ReplicaRuns
from clustersim.studies.campaign.many import play
from clustersim.studies.campaign.replica import Replica, replica

__all__ = [
    "FILE",
    "GOODPUTS",
    "PARTS",
    "Campaign",
    "CampaignAnswer",
    "CampaignOptions",
    "CampaignOutcome",
    "Job",
    "LedgerPart",
    "Percentiles",
    "Replica",
    "ReplicaRuns",
    "answer",
    "folder_for",
    "outcome",
    "play",
    "replica",
]
