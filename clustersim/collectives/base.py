"""The nouns of collectives: the request, the group on its machine, channels, traffic, schedules, and the plan.

A *backend* (``nccl``, or ``ideal``, the textbook) chooses algorithm, protocol and channels for a :class:`Request` on a
:class:`Group`; the algorithm says which member sends how much to which (:class:`Traffic`) and, for chunk fidelity, in
which order (:class:`TransferSchedule`); routes turn traffic into the link loads of the :class:`Plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec
import numpy as np

from clustersim.collectives.waves import Waves
from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.byte_matrix import ByteMatrix
from clustersim.core.collective_kinds import ExchangeKernel
from clustersim.core.topology import NodeType, Topology


@dataclass(frozen=True)
class Request:
    """One collective to perform.

    Parameters
    ----------
    kind : one of :data:`clustersim.core.program.COLLECTIVES`, or ``"send"`` (member 0 sends to member 1).
    nbytes : float [bytes], the full tensor, NCCL's S.
    dtype, redop : element type and reduction. root : position in the group.
    algorithm, protocol : pins, as NCCL_ALGO and NCCL_PROTO; None lets the backend choose.
    matrix : of an all_to_all whose pairs differ (PyTorch's uneven splits), bytes between members per byte of S.
    kernel : of an all_to_all that a library other than NCCL makes.
    """

    kind: str
    nbytes: float
    dtype: str = "fp32"
    redop: str = "sum"
    root: int = 0
    algorithm: str | None = None
    protocol: str | None = None
    matrix: ByteMatrix | None = None
    kernel: ExchangeKernel | None = None


@dataclass(frozen=True, eq=False)
class Group:
    """The members of a communicator on their machine, in rank order.

    Parameters
    ----------
    topology : Topology
    gpus : (n,) int, vertex id of each member's GPU.
    launch : how the job was started: ``"process_per_gpu"`` (torchrun, the default), ``"single_process"`` (one process
        drives a node's GPUs, ``nccl-tests -g 8``) or ``"threads"`` (``nccl-tests -t 8``). It sets the host floor.
    nccl_version : (major, minor), for the tuner's constants.
    """

    topology: Topology
    gpus: Ints
    launch: str = "process_per_gpu"
    nccl_version: tuple[int, int] = (2, 28)

    @cached_property
    def _terms(self) -> tuple[bytes, str, tuple[int, int]]:
        return self.gpus.tobytes(), self.launch, self.nccl_version

    def __eq__(self, other: object) -> bool:
        """Of one topology object, and with the same members: answers about one serve the other."""
        return isinstance(other, Group) and self.topology is other.topology and self._terms == other._terms

    def __hash__(self) -> int:
        return hash(self._terms)

    @property
    def size(self) -> int:
        """Members."""
        return len(self.gpus)

    @cached_property
    def nodes(self) -> Ints:
        """(n,) node of each member."""
        return self.topology.vertex_node[self.gpus]

    @cached_property
    def node_ids(self) -> Ints:
        """Distinct nodes in order of first appearance."""
        _, first = np.unique(self.nodes, return_index=True)
        return self.nodes[np.sort(first)]

    @property
    def n_nodes(self) -> int:
        """How many nodes the group touches."""
        return len(self.node_ids)

    @property
    def ranks_per_node(self) -> int:
        """The largest number of members on one node."""
        return int(np.unique(self.nodes, return_counts=True)[1].max())

    @property
    def node_type(self) -> NodeType:
        """The node type of the first member; mixed groups are described by the weakest where it matters."""
        return self.topology.node_types[int(self.nodes[0])]


class Channel(msgspec.Struct, frozen=True, eq=False):
    """One of NCCL's parallel paths through a group.

    Parameters
    ----------
    index : int
    order : (n,) int, positions in ring order: node by node, entering and leaving each node at the GPUs nearest the
        NIC this channel uses. Trees hang their intra-node chains on the same order.
    share : float, fraction of the payload this channel carries; over all channels they sum to 1.
    nic : int, rail (NIC index inside the node) the channel enters its first node by; -1 inside one node.
    rails : (n,) int, the rail of the ring edge that leaves ``order[i]``, the same NIC index at both ends; empty where
        every edge uses ``nic``. A ring that enters a node by one NIC and leaves it by the next needs it.
    """

    index: int
    order: Ints
    share: float
    nic: int = -1
    rails: Ints = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def edge_rails(self) -> Ints:
        """(n,) int: :attr:`rails`, spelt out for every edge."""
        return self.rails if len(self.rails) else np.full(len(self.order), self.nic, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Traffic:
    """Who sends how much to whom, over a whole collective.

    Parameters
    ----------
    src, dst : (E,) int, positions in the group. ``-1`` as dst (or src) means the NVSwitch multicast/reduce engine of
        the member's own node: the bytes cross only the GPU's links to (or from) its switches.
    fraction : (E,) float, bytes sent on this edge per byte of S.
    rail : (E,) int, the NIC index to use if the edge leaves the node; -1 for the sender's nearest.
    steps : int, sequential hops a byte waits for, inside plus outside nodes. net_steps : how many cross the network.
    round : (E,) int, for algorithms that work in rounds, each over before the next begins (halving-doubling): the
        round an edge is used in, so that times add up over rounds. Empty where all edges work all the time.
    relay : a GPU forwards for two others that share no NVLink, as NCCL's sends and receives have it.
    adds : (E,) bool, of algorithms in rounds: the receiver adds what comes. Empty where not told.
    blocking : of algorithms in rounds: a member begins a round when its sends and receives of the one before are over;
        else it sends on as soon as it has what it sends.
    """

    src: Ints
    dst: Ints
    fraction: Floats
    rail: Ints
    steps: int
    net_steps: int
    round: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    adds: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    relay: bool = False
    blocking: bool = True

    def only(self, chosen: Bools) -> Traffic:
        """Some of its edges."""
        columns = {name: getattr(self, name) for name in ("src", "dst", "fraction", "rail", "round", "adds")}
        return replace(self, **{name: column[chosen] for name, column in columns.items() if len(column)})

    @property
    def rounds(self) -> list[Bools]:
        """(E,) bool of each round: its edges. Where all edges work all the time there is one round."""
        rounds = [self.round == number for number in np.unique(self.round).tolist()]
        return rounds or [np.ones(len(self.src), dtype=np.bool_)]


@dataclass(frozen=True, eq=False)
class TransferSchedule:
    """Every transfer of a collective, for chunk fidelity and for checking that the data comes out right.

    Transfers are listed in an order in which each one's dependencies come earlier. What a transfer carries is the
    sender's own piece combined with what the transfers in its ``after`` brought of it; a member ends with its own piece
    plus everything it was told to add, or with what overwrote it.

    Parameters
    ----------
    src, dst : (T,) int, positions in the group.
    chunk : (T,) int, which of ``n_chunks`` equal pieces of the tensor moves. n_chunks : int.
    reduce : (T,) bool, the receiver adds to its own copy (True) or overwrites it (False).
    after_ptr, after : CSR list of transfers that must have *arrived* before one may start.
    rail : (T,) int, as in :class:`Traffic`.
    chunk_fraction : (n_chunks,) float, of S.
    lane : (T,) int, the connection a transfer uses (one pair of members on one channel). A lane is first in, first out:
        a transfer starts only when the one listed before it on its lane has *drained* at the sender (its latency does
        not count). Empty: no such order.
    relay : as in :class:`Traffic`.
    round : (T,) int, of algorithms in rounds; empty where lanes work all the time.
    passes : (T,) bool, the sender hands on what was brought, without its own piece; empty where nothing is.

    For all_gather, reduce_scatter, scatter and gather, piece ``k`` belongs to member ``k % n``; for all_to_all piece
    ``src * n + dst`` is what ``src`` holds for ``dst``. Where the fractions of an all_reduce sum to n, piece ``k`` is
    a part of member ``k % n``'s own tensor, and members add up what they gathered.
    """

    src: Ints
    dst: Ints
    chunk: Ints
    n_chunks: int
    reduce: Bools
    after_ptr: Ints
    after: Ints
    rail: Ints
    chunk_fraction: Floats
    lane: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    relay: bool = False
    round: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    passes: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))


class EdgeCosts(msgspec.Struct, frozen=True, eq=False):
    """What each edge of a traffic takes on an idle machine at line rate.

    Parameters
    ----------
    hop : (E,) float [s], latency of the route.
    alone, busy : (E,) float [s], for all its bytes, with its links to itself, and sharing them by their loads.
    """

    hop: Floats
    alone: Floats
    busy: Floats


AGREE = 0.005
"""How far, as a part of ``chunk``, a collective alone on a machine takes longer or shorter at ``flow``; but for what
:class:`Apart` says."""


class Apart(msgspec.Struct, frozen=True):
    """Kinds of an algorithm of which ``flow`` and ``chunk`` differ by more than :data:`AGREE`, alone on a machine.

    ``tolerance`` : the largest part of ``chunk`` that they were measured to differ by, to the next percent, at 64 MiB
    (tests/test_fidelity_contract.py). ``why`` : what the fluid flow does not follow.
    """

    kinds: frozenset[str]
    tolerance: float
    why: str


class Algorithm(msgspec.Struct, frozen=True):
    """An algorithm: one file, one row in ``ALGORITHMS``.

    ``traffic(request, group, channels)`` gives the macro-flow, ``schedule(request, group, channels)`` every transfer
    (None inside a switch); ``ALGORITHMS`` refuses other kinds. ``layout`` : see
    :mod:`clustersim.collectives.channels`.

    ``sends(kind, n, n_islands)`` is (sent, received), bytes per byte of S, the mean over ``n`` members in so many
    NVLink domains: the sum of the traffic's edges, wherever the members are. A contract test compares the two.

    ``fill(request, group, channels, costs)`` is the time [s] of the schedule beyond the bytes of its slowest edge: hops
    in sequence and filling the pipeline. None: ``steps`` times the longest hop, or the sum over rounds of the longest
    hop of each. ``waves(request, group, channels)`` is the schedule told without listing it, None where it cannot be.
    """

    name: str
    kinds: frozenset[str]
    traffic: Callable[[Request, Group, tuple[Channel, ...]], Traffic]
    sends: Callable[[str, int, int], tuple[float, float]]
    schedule: Callable[[Request, Group, tuple[Channel, ...]], TransferSchedule] | None = None
    layout: str = "ring"
    fill: Callable[[Request, Group, tuple[Channel, ...], EdgeCosts], float] | None = None
    waves: Callable[[Request, Group, tuple[Channel, ...]], Waves | None] | None = None
    apart: tuple[Apart, ...] = ()

    def tolerance(self, kind: str) -> float:
        """By what part ``flow`` and ``chunk`` may differ for a kind, alone on a machine."""
        return next((row.tolerance for row in self.apart if kind in row.kinds), AGREE)


@dataclass(frozen=True, eq=False)
class Plan:
    """A collective as the engine plays it: a fixed latency, then one fluid flow.

    Uncontended it takes ``latency + nbytes / min(ceiling, min(bandwidth / weight))`` seconds.

    Parameters
    ----------
    kind, algorithm, protocol, n_channels : what was chosen.
    nbytes : float [bytes], NCCL's S.
    latency : float [s], everything that does not shrink with bandwidth: launch, hops, pipeline fill.
    links : (k,) int, links crossed. weights : (k,) float, bytes of link capacity one payload byte takes, protocol
        overhead and achieved efficiency included.
    ceiling : float [bytes/s] of payload, from what is not a link: SMs, channel count.
    lower_bound : float [s], which no algorithm beats on this topology: bytes over the narrowest cut.
    bus_factor : float, nccl-tests' factor from algbw to busbw.
    host : float [s], the part of ``latency`` that is the host posting sends and receives: a benchmark that does nothing
        else waits for it, a step whose launches run ahead does not.
    channels : the paths its links were worked out from, for chunk fidelity; empty where the backend laid none.
    """

    kind: str
    algorithm: str
    protocol: str
    n_channels: int
    nbytes: float
    latency: float
    links: Ints
    weights: Floats
    ceiling: float
    lower_bound: float = 0.0
    bus_factor: float = 1.0
    host: float = 0.0
    channels: tuple[Channel, ...] = field(default=(), repr=False)

    def rate(self, bandwidth: Floats) -> float:
        """Payload bytes/s of the flow alone on links of these bandwidths [bytes/s]."""
        if not len(self.links):
            return self.ceiling
        return float(min(self.ceiling, np.min(bandwidth[self.links] / self.weights)))

    def time(self, bandwidth: Floats) -> float:
        """Seconds of the collective alone on an idle network."""
        if self.nbytes <= 0:
            return self.latency
        return self.latency + self.nbytes / self.rate(bandwidth)


def bus_factor(kind: str, n: int) -> float:
    """nccl-tests' busbw / algbw for n ranks (nccl-tests doc/PERFORMANCE.md)."""
    if kind == "all_reduce":
        return 2.0 * (n - 1) / n
    if kind in {"all_gather", "reduce_scatter", "all_to_all", "scatter", "gather"}:
        return (n - 1) / n
    return 1.0
