"""The constants of the time models: what a hop, a launch, a protocol, a socket cost on real machines.

:class:`CommunicationCosts` is NCCL's, :class:`GlooCosts` Gloo's, :class:`MpiCosts` Open MPI's. A constant has a flat
name: its field, and in tables a dot and the key, such as ``hop.net/Simple``. A machine may have values of its own
(:mod:`clustersim.core.calibrated`).

NCCL's own tuner model ranks algorithms well but is 1.3 to 3 times optimistic below 32 MiB, because it is built to
choose, not to predict. Here algorithm and protocol are chosen as NCCL chooses them, and the time of what was chosen is

    T = (H^6 + D^6)^(1/6),   D = base + L + B + F,   F = (L^p + min(B, c L)^p)^(1/p) - L - min(B, c L)

with H the host floor (how fast processes can launch), L the hops in sequence, B the bytes over the achieved rate of the
narrowest link, and F the filling of the pipeline, which stops growing once B is c times L. Where bytes move while hops
are waited for (LL over NVLink, rings of Simple in a node), p is above 1 and F below 0; rings whose NICs read GPU memory
have p = 1. Hops of LL, and in a node of Simple, grow with the blocks of a kernel, of which the slowest counts.

Constants belong to a link kind, a protocol, a GPU generation, a transport, a CPU or a launch mode; none to one machine.
They start from documented values (:mod:`clustersim.collectives.fitted.priors`) and are moved a little by public tables
(P100 to GB200), in which every operator's machine may differ from its kind as a whole, beyond what all do, and counts
by the root of its series (:mod:`clustersim.calibrate.fit.learn`). How near they predict what a publisher measured with
whom nothing was fitted is what ``clustersim validate nccl TABLES --cross-validate publisher`` prints, and README.md
shows. Inside a node a ring takes ``ring_ends`` of a step beyond its steps, and with the
Simple protocol the latency of ``simple_ends``.

Sends and receives (all_to_all, scatter, gather) have D = ((base + one hop)^p + B^p)^(1/p), inside a node with B of the
links joined with that of the channels that carry a peer's parts, over a network with a hop more for every further eight
peers, and a host floor that grows with the peers, since each needs a send and a receive posted. A program's launches
run ahead, so the engine plays their D alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, TypeVar

from clustersim.core.transports import TRANSPORTS

US = 1e-6


def _frozen(values: dict[str, float]) -> Mapping[str, float]:
    return MappingProxyType(values)


def _table(**values: float) -> Mapping[str, float]:
    return field(default_factory=lambda: _frozen(dict(values)))


@dataclass(frozen=True, eq=False)
class CommunicationCosts:
    """Constants of the time model. Times in seconds, shares of line rate without unit.

    Edge classes are ``nvlink`` (any direct GPU link), ``pcie`` (peer to peer), ``shm`` (through host memory) and
    ``net``. Keys are ``class/protocol``.
    """

    # Hops (Hopper): one step of a ring or one level of a tree, synchronisation included.
    hop: Mapping[str, float] = _table(**{
        "nvlink/LL": 0.95 * US, "nvlink/LL128": 1.65 * US, "nvlink/Simple": 2.76 * US,
        "pcie/LL": 1.5 * US, "pcie/LL128": 2.5 * US, "pcie/Simple": 6.1 * US,
        "net/LL": 3.81 * US, "net/LL128": 6.69 * US, "net/Simple": 20.1 * US,
    })  # fmt: skip
    # NVLink hops by GPU generation and protocol, relative to Hopper. AMD's, and its share of links, from rccl-tests of
    # MI300X, MI325X and MI355X (tests/data/amd_collectives.csv).
    hop_generation: Mapping[str, float] = _table(
        **{
            f"{age}/{protocol}": factor
            for age, factors in {
                "pascal": (1.3, 1.5, 1.3),
                "volta": (1.31, 1.62, 1.19),
                "ampere": (1.17, 1.44, 1.54),
                "hopper": (1.0, 1.0, 1.0),
                "blackwell": (1.31, 1.27, 1.21),
                "amd": (1.6, 1.25, 1.1),
            }.items()
            for protocol, factor in zip(("LL", "LL128", "Simple"), factors, strict=True)
        }
    )
    # How soon a kernel's first block starts after the one before it, by generation, relative to Hopper.
    base_generation: Mapping[str, float] = _table(
        pascal=1.0, volta=1.02, ampere=1.28, hopper=1.0, blackwell=1.37, amd=1.0
    )
    # Added to every hop over a transport (twice for Simple, which also waits for the flush).
    net_extra: Mapping[str, float] = _table(**{name: row.hop for name, row in TRANSPORTS.items()})
    # Of the hops of a ring's all_reduce, what steps save whose piece of a tiny payload is empty (LL, Simple).
    empty_steps: Mapping[str, float] = _table(LL=0.254, Simple=0.164)
    # Of the hops of a ring over several nodes: Simple's steps are pipelined, LL128's slowest of sixteen blocks counts.
    ring_net: Mapping[str, float] = _table(LL128=1.53, Simple=0.688)
    # Of the hops of broadcast and reduce, whose repetitions overlap in a benchmark.
    rooted_overlap: Mapping[str, float] = _table(LL=0.5, LL128=0.5, Simple=0.511)
    # Share of the line rate a protocol's payload reaches.
    share: Mapping[str, float] = _table(**{
        "nvlink/LL": 0.347, "nvlink/LL128": 0.744, "nvlink/Simple": 0.803,
        "pcie/LL": 0.35, "pcie/LL128": 0.7, "pcie/Simple": 0.76,
        "shm/LL": 0.35, "shm/LL128": 0.5, "shm/Simple": 0.497,
        "net/LL": 0.31, "net/LL128": 0.929, "net/Simple": 1.0,
    })  # fmt: skip
    share_generation: Mapping[str, float] = _table(
        pascal=1.01, volta=1, ampere=0.992, hopper=1, blackwell=0.998, amd=0.91
    )
    # Share of a NIC's line rate that its transport reaches.
    net_share: Mapping[str, float] = _table(**{name: row.share for name, row in TRANSPORTS.items()})
    # Of a message above the transport's eager limit, which waits for its receiver.
    rendezvous: Mapping[str, float] = _table(**{name: row.rendezvous for name, row in TRANSPORTS.items()})
    # Of a step's bytes: inside a node a ring's blocks send first and receive last, with nothing in the other direction,
    # so R ranks take R - 1 steps and this. Two ranks feel it most: 1.38 of the time of their one step. It is work of
    # multiprocessors, of an A100's or an H100's; it counts for more where each serves faster links
    # (nccl_terms.beside_links).
    ring_ends: float = 0.4
    # Steps more that Simple waits for there: its first fills a slot with nothing to receive, its last empties one.
    simple_ends: float = 2.12
    own_copy: float = 0.194  # of a peer's bytes, as ring_ends: an all_to_all copies its own part, which crosses no link
    tree_share: float = 0.807
    # Of NVLink's line rate through a switch that reduces. No fitted row has it in a node of Blackwells: theirs
    # is what two clouds' published logs of eight come to, 835 GB/s of busbw (B200) and 840 (GB200, two trays) at 8 GiB.
    nvls_share: Mapping[str, float] = _table(hopper=0.683, blackwell=0.604)
    nvls_tree_share: float = 0.921
    # Of a NIC's line rate that streams reach which the network's switches add up: published all_reduces with SHARP are
    # 1.2 to 1.5 of NVLSTree's rate, not the twice that the bytes would give.
    sharp_share: float = 0.7
    tree_levels: float = 1.21  # network hops per log2(nodes), each way
    nvls_latency: float = 14.2 * US  # of one block, and of eight GPUs at most
    nvls_tree_hop: float = 13.0 * US
    # Point to point (all_to_all, send): parts of a peer's bytes, each on a channel (collectives/nccl/p2p_parts.py).
    p2p_share: float = 0.783
    p2p_net_share: float = 0.926
    send_share: float = 0.879
    p2p_norm: float = 0.65
    p2p_channel_norm: float = 2.64  # by which a peer's channels and the links are joined
    # Of one block; those before Ampere are not measured, and taken as an A100's; AMD's is not used.
    p2p_channel_rate: Mapping[str, float] = _table(
        pascal=14.6e9, volta=14.6e9, ampere=14.6e9, hopper=22.2e9, blackwell=26.7e9, amd=14.3e9
    )
    # Host.
    base: float = 5.12 * US
    rooted_base: float = 4.86 * US
    # One process per GPU, by CPU: how soon a launch on every rank comes back; of AMD's GPUs on any (MI300X).
    host_floor: Mapping[str, float] = _table(
        intel=5.96 * US, amd=8.97 * US, power=8.24 * US, arm=6.31 * US, rocm=13 * US
    )
    # One process drives all GPUs of a node: once for the group, and for each GPU's launch.
    host_single: float = 5.21 * US
    host_floor_per_gpu: float = 3.63 * US
    host_floor_per_amd_gpu: float = 5.2 * US  # HIP's: one process took 43 to 54 us of eight, by two publishers
    # For each block of a GPU's kernel: NCCL before 2.22 writes its work of 512 bytes into a queue in host memory, since
    # then a batch of 16 bytes among the kernel's arguments (src/enqueue.cc, ncclDevWorkStorageTypeArgs).
    host_block: Mapping[str, float] = _table(queue=0.21 * US, arguments=0.051 * US)
    # Of an all_to_all, for each GPU's send to and receive from each other: eight A100s of an older NCCL take 87 us.
    # Since work travels among the arguments as of host_p2p_peer: two RTX 4090s take 12 us, eight H20s 58, as predicted.
    host_p2p_pair: Mapping[str, float] = _table(queue=0.943 * US, arguments=0.312 * US)
    # One process per GPU, sends and receives, beyond a launch: grouping them, and posting each peer's pair, which costs
    # little since a batch of them travels among the kernel's arguments (keys as of host_block).
    host_p2p: float = 1.61 * US
    host_p2p_peer: Mapping[str, float] = _table(queue=3.3 * US, arguments=0.312 * US)
    fill_norm: float = 0.704
    simple_norm: float = 1.17  # where Simple's blocks wait and move by turns: rings inside a node
    overlap_norm: float = 1.22  # where bytes move while hops are waited for: LL over NVLink
    # By how much the hops of a kernel's blocks differ.
    block_spread: Mapping[str, float] = _table(LL=0.148, Simple=0.405)
    fill_span: float = 30.3  # bytes over hops beyond which the pipeline is full
    floor_norm: float = 6.0
    scale_net: float = 0.0065  # network bytes grow by this per doubling of nodes beyond two


GENERATIONS = {60: "pascal", 61: "pascal", 37: "pascal", 70: "volta", 75: "volta"}


def generation(sm: int) -> str:
    """GPU generation the constants are kept for, from the compute capability (0 for AMD)."""
    if sm == 0:
        return "amd"
    if sm in GENERATIONS:
        return GENERATIONS[sm]
    if sm < 70:
        return "pascal"
    return "ampere" if sm < 90 else "hopper" if sm < 100 else "blackwell"


@dataclass(frozen=True)
class GlooCosts:
    """Constants of the host path; the law is :mod:`clustersim.collectives.host_law`.

    Fitted to ``clustersim capture`` of 2 and of 4 ranks on the 2 cores of a cloud VM that had other work (PyTorch 2.13,
    loopback, fastest loop of three rounds of each size, 8 B to 16 MiB, all kinds; tests/data/gloo). With half of the
    sizes held out the median error is 4 % at 2 ranks and 14 % at 4, each with constants of its own, and 8 % with one
    set for both; repeats of a row differ by 15 and 28 %. ``fault`` is from longer sweeps of the same machine, ``send``
    is taken as ``sendrecv``, and ``copy`` is not fitted: it needs a GPU.

    Parameters
    ----------
    call : float [s], once per collective, by kind: PyTorch hands it to a worker thread and is woken when it is done;
        kinds differ by the tensors that PyTorch flattens, splits and copies.
    message : float [s], per message: two thread wake-ups and the kernel's TCP path.
    turn : float [s] a message waits for each other rank that shares its core.
    stream : float [bytes/s] one process moves through sockets, in and out together: one epoll thread copies it all.
    memory : float [bytes/s] of what the cache no longer holds, on top. cache : float [bytes] of a node that hold it.
    reduce : float [bytes/s] of adding and copying on the calling thread.
    fault : float [bytes/s] of memory that is mapped afresh.
    copy : float [s], to launch and wait for one copy between GPU and host.
    """

    call: Mapping[str, float] = _table(
        all_reduce=56e-6,
        all_gather=103e-6,
        reduce_scatter=110e-6,
        all_to_all=67e-6,
        broadcast=58e-6,
        reduce=60e-6,
        scatter=65e-6,
        gather=91e-6,
        send=65e-6,
        sendrecv=65e-6,
        barrier=65e-6,
    )
    message: float = 41e-6
    turn: float = 92e-6
    stream: float = 4.8e9
    memory: float = 7.3e9
    cache: float = 5.2e6
    reduce: float = 20e9
    fault: float = 1e9
    copy: float = 12e-6


@dataclass(frozen=True)
class MpiCosts:
    """Constants of the host path under Open MPI 4.1; the law is :mod:`clustersim.collectives.host_law`.

    Paths are ``transport/protocol``. ``vader`` is shared memory: up to the eager limit a message is copied in and out,
    beyond it the receiver copies once (CMA), or both copy fragments where that is not allowed. ``tcp`` and ``ucx``
    (verbs) send at once up to theirs, and beyond it ask the receiver first.

    Fitted to ``clustersim capture --backend mpi`` of 2 and of 4 ranks on the 2 cores of a cloud VM with six to eight
    times the work that it has cores for (Open MPI 4.1.4, default and forced algorithms; tests/data/mpi, whose held-out
    errors ``clustersim calibrate`` prints). ``ucx`` is assumed, of the size usual for verbs: nothing here was measured
    with it; ``fault`` and ``copy`` are Gloo's.

    Parameters
    ----------
    call : float [s], once per collective, by kind. message : float [s], one message on a path, from send to received.
    post : share of ``message`` that a further message of the same round takes.
    turn : float [s] a message waits for each other rank that shares its core, by transport.
    stream : float [bytes/s] one process moves on a path, in and out together.
    memory, cache, reduce, fault, copy : as of :class:`GlooCosts`.
    """

    call: Mapping[str, float] = _table(
        all_reduce=0.62e-6,
        all_gather=0.66e-6,
        reduce_scatter=0.77e-6,
        all_to_all=0.81e-6,
        broadcast=0.43e-6,
        reduce=0.68e-6,
        scatter=0.52e-6,
        gather=0.66e-6,
        send=0.77e-6,
        sendrecv=0.77e-6,
        barrier=0.15e-6,
    )
    message: Mapping[str, float] = _table(
        **{
            "vader/eager": 0.27e-6,
            "vader/single": 6.7e-6,
            "vader/fragments": 8.3e-6,
            "tcp/eager": 8.9e-6,
            "tcp/rendezvous": 11e-6,
            "ucx/eager": 1.6e-6,
            "ucx/rendezvous": 4e-6,
        }
    )
    post: float = 0.62
    turn: Mapping[str, float] = _table(vader=1.6e-6, tcp=11e-6, ucx=1.6e-6)
    stream: Mapping[str, float] = _table(
        **{
            "vader/eager": 1.4e9,
            "vader/single": 9.3e9,
            "vader/fragments": 11e9,
            "tcp/eager": 1.9e9,
            "tcp/rendezvous": 1.5e9,
            "ucx/eager": 10e9,
            "ucx/rendezvous": 50e9,
        }
    )
    memory: float = 2e9
    cache: float = 6.1e6
    reduce: float = 26e9
    fault: float = 1e9
    copy: float = 12e-6


COSTS = CommunicationCosts()
GLOO_COSTS = GlooCosts()
MPI_COSTS = MpiCosts()

_SECONDS = (
    "hop", "net_extra", "nvls_latency", "nvls_tree_hop", "base", "rooted_base", "host_floor", "host_single",
    "host_floor_per_gpu", "host_floor_per_amd_gpu", "host_block", "host_p2p", "host_p2p_pair",
    "host_p2p_peer", "rendezvous", "call", "message", "turn", "copy",
)  # fmt: skip
_UNITS = {**dict.fromkeys(_SECONDS, "s"), "cache": "B"}
_UNITS |= dict.fromkeys(("p2p_channel_rate", "stream", "memory", "reduce", "fault"), "B/s")

AnyCosts = TypeVar("AnyCosts", bound=CommunicationCosts | GlooCosts | MpiCosts)


def unit(name: str) -> str:
    """``"s"``, ``"B/s"``, ``"B"``, or ``""`` for a share, of a constant by its flat name.

    >>> unit("hop.net/Simple"), unit("stream"), unit("share.net/LL")
    ('s', 'B/s', '')
    """
    return _UNITS.get(name.split(".", 1)[0], "")


def flat(costs: CommunicationCosts | GlooCosts | MpiCosts) -> dict[str, float]:
    """Every constant by its flat name.

    >>> flat(COSTS)["net_share.ib"], flat(GLOO_COSTS)["call.barrier"]
    (0.96, 6.5e-05)
    """
    values: dict[str, float] = {}
    for cost_field in fields(costs):
        value = getattr(costs, cost_field.name)
        if isinstance(value, Mapping):
            values |= {f"{cost_field.name}.{key}": float(item) for key, item in value.items()}
        else:
            values[cost_field.name] = float(value)
    return values


def most_of(name: str) -> float:
    """The largest value that a constant can have: 1 for a part of something, by its flat name.

    >>> most_of("net_share.ib"), most_of("empty_steps.LL"), most_of("base")
    (1.0, 1.0, inf)
    """
    return 1.0 if "share" in name or name.startswith("empty_steps") else math.inf


def overlaid(costs: AnyCosts, values: Mapping[str, float]) -> AnyCosts:
    """The constants with some replaced, by flat name. Raises KeyError for a name that is none of them.

    >>> overlaid(COSTS, {"base": 5e-6, "net_share.ib": 0.9}).net_share["ib"]
    0.9
    """
    tables: dict[str, dict[str, float]] = {}
    single: dict[str, float] = {}
    for name, value in values.items():
        head, _, key = name.partition(".")
        if not key:
            single[head] = value
        elif key in getattr(costs, head):
            tables.setdefault(head, {})[key] = value
        else:
            raise KeyError(name)
    return with_tables(costs, tables, single)


def with_tables(costs: AnyCosts, tables: Mapping[str, Mapping[str, float]], single: Mapping[str, float]) -> AnyCosts:
    """:func:`overlaid` where names are taken apart already: of tables some entries, and single constants, replaced.

    >>> with_tables(COSTS, {"net_share": {"ib": 0.9}}, {"base": 5e-6}).net_share["ib"]
    0.9
    """
    changed: Any = {head: _frozen({**getattr(costs, head), **values}) for head, values in tables.items()}
    return replace(costs, **changed | dict(single))
