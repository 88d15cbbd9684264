"""What the ``nccl`` backend's time is made of: hops, how they blend with the bytes, and the host's floor.

Of what NCCL's tuner chooses; grouped sends and receives are :mod:`~clustersim.collectives.grouped_sends`.
"""

from __future__ import annotations

import math

from clustersim.cluster.routes import router
from clustersim.collectives.base import Group, bus_factor
from clustersim.collectives.nccl.constants import constants
from clustersim.collectives.nccl.ratings import generation_row
from clustersim.collectives.nccl.search import search
from clustersim.collectives.nccl.view import with_full_nics
from clustersim.collectives.paths import EDGE_CLASSES, PathLoads, placement
from clustersim.collectives.rccl_scripts import SCRIPTED_STEPS, scripted
from clustersim.core.costs import CommunicationCosts
from clustersim.core.transports import transport

ROOTED = frozenset({"broadcast", "reduce"})
"""Kinds with a root that the tuner chooses for."""


def norm(a: float, b: float, p: float) -> float:
    """``(a^p + b^p)^(1/p)``: a smooth maximum for a large p, more than the sum for p below 1."""
    return float((a**p + b**p) ** (1.0 / p))


def fill(p: float, hops: float, wire: float, costs: CommunicationCosts) -> float:
    """Seconds of the pipeline's filling and emptying, beyond hops plus bytes.

    ``(L^p + B^p)^(1/p) - L - B`` until the bytes take ``fill_span`` times the hops; from there on the pipeline is full.
    ``p`` : of :func:`blend`; above 1 some of hops and bytes is saved.
    """
    wire = min(wire, costs.fill_span * hops)
    return norm(hops, wire, p) - hops - wire


def blend(kind: str, algorithm: str, protocol: str, loads: PathLoads, group: Group, costs: CommunicationCosts) -> float:
    """The p by which hops and bytes are joined: below 1 where a pipeline fills, above where they overlap.

    Over NVLink a hop of LL has carried a line of every thread with its flag: 512 B and 512 KiB on eight H100s take an
    all_gather 10.3 and 13.6 us.
    Simple sends a ring's piece in two slices (nccl src/device/prims_simple.h), and some blocks wait while others move
    bytes: beside those of the links an all_reduce of 1, 8 and 64 MiB takes eight H800s 79, 42 and 29 us, of 8 and 32
    MiB four B200s 67 and 46 us; an all_gather of 64 and 128 MiB eight H100s 28 us, as many as its hops.
    """
    if placement(group).islands > 1:
        return over_nodes(kind, algorithm, protocol, group, costs)
    if protocol == "Simple" and algorithm == "ring" and kind in RINGS:
        return costs.simple_norm
    if protocol == "LL" and not over_pcie(loads):
        return costs.overlap_norm
    return min(costs.fill_norm, 1.0)


def over_nodes(kind: str, algorithm: str, protocol: str, group: Group, costs: CommunicationCosts) -> float:
    """:func:`blend` over a network: hops and bytes of a ring of LL128 or Simple add up.

    One channel's bytes are under way while another's are awaited, if the NIC reads GPU memory itself and asks for no
    receiver first; a broadcast or a reduce is a pipeline from end to end, and fills. Taken to hide hops behind bytes,
    ten of twelve publishers' rings were told too short; those over a plug-in whose threads hold messages do hide them.
    """
    net = transport(placement(group).net)
    if algorithm != "ring" or kind not in RINGS or protocol == "LL" or not net.direct or net.eager < math.inf:
        return min(costs.fill_norm, 1.0)
    return costs.overlap_norm if net.hides_hops else 1.0


def floored(device_time: float, floor: float, costs: CommunicationCosts) -> float:
    """Seconds [s] of a device time that the host may not keep up with."""
    return norm(device_time, floor, costs.floor_norm)


def host_floor(kind: str, group: Group, costs: CommunicationCosts, blocks: int = 0) -> float:
    """Seconds below which no collective of this launch mode comes back.

    Who drives a GPU writes down the work of its kernel's ``blocks`` before the launch; one process for all GPUs of a
    node does so, and launches, for one after the other, and each one's sends to and receives from all others.
    """
    block_s = costs.host_block[work_place(group)] * blocks
    if group.launch != "single_process":
        host = "rocm" if group.node_type.gpu.amd else group.node_type.cpu_vendor
        return costs.host_floor[host] + block_s
    pairs = costs.host_p2p_pair[work_place(group)] * (group.size - 1) if kind == "all_to_all" else 0.0
    launch = costs.host_floor_per_amd_gpu if group.node_type.gpu.amd else costs.host_floor_per_gpu
    return costs.host_single + (launch + block_s + pairs) * group.ranks_per_node


WORK_IN_ARGUMENTS = (2, 22)
"""NCCL whose work travels among its kernel's arguments (src/enqueue.cc, ncclDevWorkStorageTypeArgs)."""


def work_place(group: Group) -> str:
    """Where a kernel's work is written down: a key of ``host_block``."""
    return "queue" if group.nccl_version < WORK_IN_ARGUMENTS else "arguments"


def kernel_start(kind: str, group: Group, costs: CommunicationCosts) -> float:
    """Seconds from one kernel to the first step of the next."""
    base = costs.rooted_base if kind in ROOTED else costs.base
    return base * costs.base_generation[placement(group).age]


SHARP_LATENCY = {"nvls": 18e-6, "collnet_direct": 31e-6, "collnet_chain": 30e-6}
"""Seconds through a network that reduces and back (nccl src/graph/tuning.cc, hardware latencies of the network)."""


USUAL_HEADS = 8
"""GPUs behind the switches that reduce where ``nvls_latency`` is fitted. Each is the head of a slice that all others
wait for (nccl src/transport/nvls.cc, nHeads): two operators' racks of 64 and 72 GPUs take 0.2 to 0.3 ms, not 0.07."""


def hop_time(
    kind: str, algorithm: str, protocol: str, loads: PathLoads, group: Group, costs: CommunicationCosts
) -> float:
    """Seconds of hops in sequence: L of the module docstring of costs."""
    group_placement = placement(group)
    inner = inner_hop(loads, protocol, group, costs)
    extra = costs.net_extra[group_placement.net] * (2.0 if protocol == "Simple" else 1.0)
    outer = costs.hop[f"net/{protocol}"] + extra
    levels = math.log2(group_placement.islands)
    if algorithm == "tree":
        return 2.0 * ((group_placement.per_island - 1) * inner + costs.tree_levels * levels * outer)
    through_switches = costs.nvls_latency * costs.hop_generation[f"{group_placement.age}/Simple"]
    through_switches *= max(1.0, group_placement.per_island / USUAL_HEADS)
    if algorithm == "nvls":
        return through_switches + (SHARP_LATENCY["nvls"] if group_placement.islands > 1 else 0.0)
    if algorithm == "collnet_direct":
        return 2.0 * inner + SHARP_LATENCY[algorithm]
    if algorithm == "collnet_chain":
        return 2.0 * (group_placement.per_island - 1) * inner + SHARP_LATENCY[algorithm]
    if algorithm == "nvls_tree":
        return through_switches + 2.0 * levels * (costs.nvls_tree_hop + costs.net_extra[group_placement.net])
    if algorithm == "pat":
        return levels * outer + costs.hop["net/LL"] * math.sqrt(group.size)
    steps = float(loads.steps - loads.net_steps)
    if protocol == "Simple" and group_placement.islands == 1 and kind in RINGS:
        steps += costs.simple_ends
    hops = steps * inner + loads.net_steps * outer
    if group_placement.islands > 1:
        hops *= costs.ring_net.get(protocol, 1.0)
    return hops * (costs.rooted_overlap[protocol] if kind in ROOTED else 1.0)


LEAST_PIECE = {"LL": 16.0, "Simple": 512.0}
"""Bytes of a ring's smallest piece (NCCL src/device/all_reduce.h: chunks are rounded up to 16 bytes of LL, and to 8
bytes of each thread that copies of Simple, of which a block has 64 at least)."""


def busy_steps(
    kind: str, algorithm: str, protocol: str, nbytes: float, group: Group, costs: CommunicationCosts
) -> float:
    """Share of an all_reduce's hops that are left where the payload is too small for a piece for every rank.

    Whoever has an empty piece waits for no flag, or for no fence, and adds nothing up: 13.0 us instead of 16.9 on eight
    H100s (dgxc), 7.7 instead of 9.4 on four GH200s (Alps), from 16 bytes to 1 KiB. Of Simple the three all_reduces that
    are published take 52, 47 and 60 us from 256 bytes on and 61, 57 and 68 from 16 KiB, their all_gathers the same.
    """
    if (kind, algorithm) != ("all_reduce", "ring") or protocol not in costs.empty_steps:
        return 1.0
    if scripted(protocol, nbytes, group):
        return SCRIPTED_STEPS / (2.0 * (group.size - 1))
    return 1.0 - costs.empty_steps[protocol] * max(0.0, 1.0 - nbytes / (LEAST_PIECE[protocol] * group.size))


LARGEST = (0.0, 0.56, 1.03, 1.42, 1.77, 2.07)
"""Expected largest of 1, 2, 4, ... 32 draws from a standard normal distribution."""


def slowest(algorithm: str, protocol: str, blocks: int, group: Group, costs: CommunicationCosts) -> float:
    """How much longer than one block's hops those of the slowest of a kernel's blocks take.

    LL's payloads up to 2 KiB have one block, and of 32 KiB sixteen: a tree over two nodes takes 36 and 45 us on B200,
    35 and 46 on A100, over four of H100 36 and 49. Simple's up to 32 KiB have one, and synchronise twice a step: inside
    a node an all_gather of 256 B, 128 KiB and 1 MiB takes eight V100s 34, 53 and 67 us, eight H800s 34, 46 and 61; and
    so do those of a switch that reduces, 197 and 291 us for 1 KiB and 1 MiB on two racks of GB200. Simple's others over
    a network are paced by NICs. LL128 always has many.
    """
    inside = algorithm == "ring" and placement(group).islands == 1
    paced = protocol == "Simple" and not (inside or algorithm in ("nvls", "nvls_tree"))
    if protocol not in costs.block_spread or paced or blocks < 2:
        return 1.0
    return 1.0 + costs.block_spread[protocol] * LARGEST[min(int(math.log2(blocks)), len(LARGEST) - 1)]


SLOT = 2.0**16
"""Bytes of a message of LL at most (nccl src/include/device.h: 512 threads, 8 lines of 16 bytes each)."""


def rendezvous(algorithm: str, protocol: str, nbytes: float, group: Group, costs: CommunicationCosts) -> float:
    """Seconds that a tree's messages above the transport's eager limit wait for their receivers, hop after hop.

    ``nbytes`` : of the payload, a block's share. LL sends a flag with every word, and the host looks at each: 5, 8 and
    17 us a hop for 8, 16 and 32 KiB on two nodes of Polaris. Longer ones follow each other.
    """
    place = placement(group)
    limit = transport(place.net).eager
    message = nbytes * (2.0 if protocol == "LL" else 1.0)
    if algorithm != "tree" or protocol == "Simple" or message < limit:
        return 0.0
    hops = 2.0 * costs.tree_levels * math.log2(place.islands)
    return hops * costs.rendezvous[place.net] * min(message, 0.5 * SLOT) / limit


LATE = 0.02
"""Chance that a node of a ring is late even for a tiny message. Rings of 8 nodes keep up (Polaris: 60 us for 31), those
of 128 and 256 never do (3.9 ms for 511 messages, 8.0 ms for 1,023): the slowest edge paces all."""


def message_time(
    algorithm: str, protocol: str, nbytes: float, blocks: int, loads: PathLoads, group: Group, costs: CommunicationCosts
) -> float:
    """Seconds that a ring's messages are handled one after the other, over a transport that waits for receivers.

    Every step of every block is a message; Simple's wait twice, for their receiver and the flush. One that takes its
    NIC longer than that finds its receiver ready. ``nbytes`` : of the payload, a block's share.
    """
    place = placement(group)
    simple = protocol == "Simple"
    handshake = costs.rendezvous[place.net] * (2.0 if simple else 1.0)
    if algorithm != "ring" or not transport(place.net).in_turn:
        return 0.0
    message = nbytes * (2.0 if protocol == "LL" else 1.0) / group.size
    # A slower NIC beside others has fewer channels or none: it keeps none of their receivers ready.
    fastest = 1e9 * max(nic.bandwidth for view in place.system.views for nic in view.nics)
    if message >= handshake * fastest:
        return 0.0
    # The fuller its slot, the likelier it is that a receiver is late; Simple's messages are always larger.
    late = 1.0 if simple else min(max(message / SLOT, LATE), 1.0)
    return (1.0 - (1.0 - late) ** place.islands) * loads.steps * blocks * handshake


def over_pcie(loads: PathLoads) -> bool:
    """Whether any step inside a node leaves NVLink."""
    return any(loads.by_class[EDGE_CLASSES.index(path)].any() for path in ("pcie", "shm"))


def inner_hop(loads: PathLoads, protocol: str, group: Group, costs: CommunicationCosts) -> float:
    """Seconds of a step inside a node. Over PCIe the bus sets it, whatever the GPU's generation."""
    if over_pcie(loads):
        return costs.hop[f"pcie/{protocol}"]
    return costs.hop[f"nvlink/{protocol}"] * costs.hop_generation[f"{placement(group).age}/{protocol}"]


MESH_OVER_NODES = 1.07
"""Of what AMD's links carry of a ring in one node, what they carry of one over nodes, whose eight rings cross each link
once each way and not twice: 357 GB/s of busbw on two nodes of MI300X, 351 on two to eight of MI325X, 319 on one of
either (tests/data/amd_collectives.csv)."""


def kernel_ceiling(kind: str, group: Group, algorithm: str, protocol: str, costs: CommunicationCosts) -> float:
    """Payload bytes/s kernels sustain: a ring's across nodes no more than inside one, a tree's as NCCL measured."""
    group_placement = placement(group)
    if algorithm == "tree" and group_placement.islands > 1:
        return _tree_ceiling(protocol, group)
    egress = router(group.topology).nvlink_egress(int(group.gpus[0]))
    if algorithm != "ring" or group_placement.islands == 1 or group_placement.per_island == 1 or egress == 0:
        return math.inf
    share = costs.share[f"nvlink/{protocol}"] * costs.share_generation[group_placement.age]
    share *= MESH_OVER_NODES if group_placement.age == "amd" else 1.0
    return share * egress / bus_factor(kind, group.size)


def _tree_ceiling(protocol: str, group: Group) -> float:
    """Payload bytes/s of a tree's channels over nodes (nccl src/graph/tuning.cc, bandwidths per channel by generation
    and nodes, which are measured; half of them, since each byte goes up and down).

    A slow NIC makes the search lay narrower channels and more of them. Blocks that wait for a NIC lift no cap: they
    count for as many as there would be if every NIC filled its slot."""
    place, caps = placement(group), constants(group.nccl_version)
    age, nodes = generation_row(place.system.sm), min(place.islands, 3) - 1
    cap = caps.tree[age][nodes]
    if protocol == "LL128":
        cap = min(cap, caps.tree_ll128[age][nodes])
    laid = min(search(system)["tree"].n_channels for system in (place.system, with_full_nics(place.system)))
    return 0.5e9 * cap * laid


RINGS = frozenset({"all_reduce", "all_gather", "reduce_scatter"})


def start_and_end(kind: str, algorithm: str, loads: PathLoads, group: Group, costs: CommunicationCosts) -> float:
    """How many times longer than its bytes on the links a collective inside one NVLink domain takes.

    A ring's blocks begin with a send and end with a receive, one direction idle; an all_to_all copies its own part.
    Both are work of multiprocessors that no link hides, so that they take the longer beside their links' bytes the
    more of those a multiprocessor serves (:func:`beside_links`).
    MeasuredCollective on 2, 4 and 8 GPUs of A100, H100 and B200 nodes, in place as out of place.
    """
    if placement(group).islands > 1 or group.size < 2:
        return 1.0
    if algorithm == "ring" and kind in RINGS:
        return 1.0 + costs.ring_ends * beside_links(group) / max(loads.steps, 1)
    return 1.0 + costs.own_copy * beside_links(group) / (group.size - 1) if kind == "all_to_all" else 1.0


USUAL_LINK_BYTES = 1.92
"""Bytes of its links a clock that each multiprocessor of an A100 (1.97) and of an H100 (1.87) serves."""


def beside_links(group: Group) -> float:
    """How much longer than on an A100 or an H100 a multiprocessor's work takes, relative to its links' bytes.

    Of a B200, whose links are twice an H100's with hardly more multiprocessors, 1.7; of an H800 0.4. Over PCIe and
    between AMD's compute units, which are others, 1.
    """
    gpu = int(group.gpus[0])
    device = group.node_type.gpu
    egress = router(group.topology).nvlink_egress(gpu)
    clocks = device.sms * device.clock
    if egress == 0 or clocks == 0 or not device.sm:
        return 1.0
    return egress / clocks / USUAL_LINK_BYTES
