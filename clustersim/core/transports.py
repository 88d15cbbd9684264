"""What carries messages between nodes: one row for each transport that NCCL and its plug-ins have.

A topology names its transport (``[node] net``); everything the models know of it is in its row of
``data/transports.toml``. The numbers are what a new machine of this transport gets: documented values, moved towards
the published tables where there are any (``clustersim.collectives.fitted.priors`` has the documented values and how
wide they are). What a machine was measured to do itself (``net_share``, ``[calibration]``, ``[measured]``) comes on top
of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from clustersim.core.texts import Table, data_table

US = 1e-6
_US = "_us"
"""Ending of a field in microseconds."""
FAST_NIC = 24e9
"""bytes/s: NICs of 200 Gb/s and above are of a later generation than those of 100; some transports are faster there."""


class Transport(msgspec.Struct, frozen=True):
    """A way between nodes.

    Parameters
    ----------
    title : for people.
    source : where its numbers are from.
    hop : float [s], what it adds to a hop of InfiniBand verbs (twice for the Simple protocol, which waits for a flush);
        ``hop_fast`` the same of NICs of 200 Gb/s and above, where they are another generation.
    share : float, of a NIC's line rate that collectives reach.
    eager, rendezvous : float [bytes], [s]. A message above the first waits for its receiver, which takes the second
        at every hop of a tree, longer for a longer one. A ring's bytes do not move while its hops are waited for.
    in_turn : and a ring's messages wait one after the other.
    nic_rate : float [bytes/s], that one NIC's streams reach however fast the NIC is.
    direct : NICs read and write GPU memory without the CPU (GPUDirect).
    bundled : the plug-in makes one device of the NICs on a PCIe switch.
    reported : float [s], the latency the plug-in tells NCCL's tuner; ``reported_fast`` for NICs of 200 Gb/s and above.
    hides_hops : a ring's bytes move while its hops are waited for, which the plug-in's own threads take.
    protocols : those its vendor lets NCCL use.
    """

    title: str
    source: str
    hop: float = 0.0
    share: float = 0.96
    eager: float = math.inf
    rendezvous: float = 0.0
    hop_fast: float = 0.0
    in_turn: bool = False
    nic_rate: float = math.inf
    direct: bool = True
    bundled: bool = False
    hides_hops: bool = False
    reported: float = 0.0
    reported_fast: float = 0.0
    protocols: tuple[str, ...] = ("LL", "LL128", "Simple")


def _row(entry: Table) -> Transport:
    times = {name.removesuffix(_US): value * US for name, value in entry.items() if name.endswith(_US)}
    return msgspec.convert(entry | times, Transport)


TRANSPORTS: Mapping[str, Transport] = {name: _row(entry) for name, entry in data_table("transports").items()}
"""By the name a topology gives it; ``none`` there means nodes that nothing joins."""


def transport(net: str) -> Transport:
    """The row of a node type's ``net``; InfiniBand's for ``"none"``, which only names nodes that stand alone."""
    return TRANSPORTS["ib" if net == "none" else net]
