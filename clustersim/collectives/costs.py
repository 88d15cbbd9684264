"""Which constants hold for a group: those of the time models, with what its own machine was measured to do."""

from __future__ import annotations

from functools import lru_cache

from clustersim.calibrated import Calibration
from clustersim.collectives.base import Group
from clustersim.costs import COSTS, GLOO_COSTS, Costs, GlooCosts, overlaid


def costs_of(group: Group) -> Costs:
    """NCCL's constants on the group's machine.

    The share of its NICs that a topology file gives (``[node] net_share``) replaces the transport's; what is fitted to
    the machine's own measurements (``[calibration]``) replaces both.
    """
    machine = group.node_type
    return _nccl(machine.net, machine.net_share, group.topology.calibration)


def gloo_costs_of(group: Group) -> GlooCosts:
    """Gloo's constants on the group's machine."""
    return _gloo(group.topology.calibration)


# A calibration is one object per loaded topology and hashes by identity, so two machines never share an entry.
@lru_cache(maxsize=64)
def _nccl(net: str, net_share: float, calibration: Calibration | None) -> Costs:
    known = {f"net_share.{net}": net_share} if net_share and net in COSTS.net_share else {}
    return overlaid(COSTS, known | (calibration.values("nccl") if calibration else {}))


@lru_cache(maxsize=64)
def _gloo(calibration: Calibration | None) -> GlooCosts:
    return overlaid(GLOO_COSTS, calibration.values("gloo")) if calibration else GLOO_COSTS
