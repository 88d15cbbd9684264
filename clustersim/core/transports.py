"""What carries messages between nodes: one row for each transport that NCCL and its plug-ins have.

A topology names its transport (``[node] net``); everything the models know of it is in its row. The numbers are what a
new machine of this transport gets: documented values, moved towards the published tables where there are any
(``clustersim.collectives.fitted.priors`` has the documented values and how wide they are). What a machine was measured
to do itself (``net_share``, ``[calibration]``, ``[measured]``) comes on top of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

US = 1e-6
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
    reported: float = 0.0
    reported_fast: float = 0.0
    protocols: tuple[str, ...] = ("LL", "LL128", "Simple")


_OFI = "aws-ofi-nccl src/platform-aws.cpp"

TRANSPORTS: Mapping[str, Transport] = {
    "ib": Transport("InfiniBand verbs", "nccl src/transport/net_ib.cc reports no latency; six published platforms"),
    "ib_host": Transport(
        "InfiniBand verbs without GPUDirect, through host memory",
        "nccl src/transport/net.cc where no nv_peer_mem is loaded: host buffers, and a copy more, 2 us assumed; "
        "a switch's one port to its CPU then carries what its NIC sends and what it receives",
        hop=2.0 * US,
        direct=False,
    ),
    "roce": Transport("RoCE", "the same verbs as InfiniBand; a few per cent for Ethernet headers assumed", share=0.95),
    "opa": Transport(
        "Omni-Path 100 by verbs",
        "bigscience-workshop/bigscience experiments/bandwidth (Jean Zay, NCCL 2.7 and 2.10 over verbs): no GPUDirect, "
        "5.0 to 5.3 of a NIC's 12.5 GB/s in three of four tables, 6.8 in one; onloading to the CPU assumed, 2 us",
        hop=2.0 * US,
        share=0.9,
        nic_rate=5.2e9,
        direct=False,
    ),
    "slingshot": Transport(
        "Slingshot by libfabric (CXI)",
        "Alps and Polaris, whose trees slow down at messages of 8 KiB (of 16 by fi_cxi(7), FI_CXI_RDZV_THRESHOLD), and "
        "whose rings take 3 to 8 us a message of LL and 5 to 15 of Simple",
        hop=1.05 * US,
        share=0.9,
        eager=2.0**13,
        rendezvous=5.06 * US,
        in_turn=True,
    ),
    "efa": Transport(
        "EFA with RDMA writes (P5 and later)",
        f"{_OFI}: protocol RDMA, 75 us told to the tuner, 35 us from P5en on; above 8 KiB (eager_max_size) a write "
        "waits for its receiver's word. Two publishers' tables of P5, one of 16 to 256 GPUs "
        "(crazyguitar/aws-gpu-communication-benchmark data/nccl_all_reduce.csv). EFAv3 and later, from P5en on: 35 % "
        "less latency than P5, as AWS announced P5en",
        hop=18.5 * US,
        hop_fast=0.65 * 18.5 * US,
        share=0.9,
        eager=2.0**13,
        rendezvous=2.75 * US,
        bundled=True,
        reported=75 * US,
        reported_fast=35 * US,
    ),
    "efa_sendrecv": Transport(
        "EFA with sends and receives (P4d, P4de)",
        f"{_OFI}: protocol SENDRECV, 75 us told to the tuner, Simple alone, as a message's bytes come in any order; a "
        "long message is read by its receiver; a hop of half a round trip more than RDMA assumed. All_reduces of 1 GiB "
        "reach 30 to 33 of 50 GB/s: aws-samples/aws-efa-eks README (2 nodes, NCCL 2.8), NVIDIA/nccl issue 527 (3, 4)",
        hop=20.0 * US,
        share=0.64,
        eager=2.0**13,
        bundled=True,
        reported=75 * US,
        reported_fast=35 * US,
        protocols=("Simple",),
    ),
    "efa_host": Transport(
        "EFA without GPUDirect, through host memory (P3dn, G5)",
        f"{_OFI}: gdr_required false, protocol SENDRECV, 150 us told to the tuner on P3dn and 75 us on G5",
        hop=35.0 * US,
        share=0.75,
        direct=False,
        bundled=True,
        reported=150 * US,
        reported_fast=75 * US,
    ),
    "tcpx": Transport(
        "GPUDirect-TCPX (A3 High)",
        "container-engine-accelerators gpudirect-tcpx: NCCL_PROTO=Simple; two publishers' tables of A3 High",
        hop=228 * US,
        share=0.791,
        protocols=("Simple",),
    ),
    "tcpxo": Transport(
        "GPUDirect-TCPXO, FasTrak (A3 Mega)",
        "one published table of A3 Mega",
        hop=26.0 * US,
        share=0.901,
    ),
    "tcp": Transport(
        "TCP sockets through host memory",
        "nccl src/transport/net_socket.cc: a thread and a socket for each channel's peer outside AWS (2 threads of 8) "
        "and Google (4 threads); 20 Gb/s a stream and two channels a NIC; two published tables of p3dn",
        hop=44.6 * US,
        share=0.9,
        nic_rate=5.0e9,
        direct=False,
    ),
}
"""By the name a topology gives it; ``none`` there means nodes that nothing joins."""


def transport(net: str) -> Transport:
    """The row of a node type's ``net``; InfiniBand's for ``"none"``, which only names nodes that stand alone."""
    return TRANSPORTS["ib" if net == "none" else net]
