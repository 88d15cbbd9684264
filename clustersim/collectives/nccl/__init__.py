"""What NCCL would choose: channels from its topology search, algorithm and protocol from its tuner."""

from __future__ import annotations

from clustersim.collectives.nccl.derive import system_of
from clustersim.collectives.nccl.graph import Graph
from clustersim.collectives.nccl.ratings import KINDS, Rating, ratings
from clustersim.collectives.nccl.search import exec_channels, search, search_channels
from clustersim.collectives.nccl.tuner import Candidate, candidates, channels_used, choose
from clustersim.collectives.nccl.view import Asked, Nic, NodeView, Slot, System

__all__ = [
    "KINDS",
    "Asked",
    "Candidate",
    "Graph",
    "Nic",
    "NodeView",
    "Rating",
    "Slot",
    "System",
    "candidates",
    "channels_used",
    "choose",
    "exec_channels",
    "ratings",
    "search",
    "search_channels",
    "system_of",
]
