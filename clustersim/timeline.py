"""What happened, simulated or measured: spans on streams, and what crossed which link.

A row of the span table stands for one op on a *set* of ranks that did it at exactly the same time, so that a run whose
ranks behave alike stays small at 16,384 GPUs. :meth:`Timeline.spans` expands rows for the ranks asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OpInfo:
    """What a span was: the label side of an op, shared by simulated and measured runs.

    Parameters
    ----------
    name, stream, phase, bound : as in :mod:`clustersim.program`.
    kind : ``"compute"``, a collective's kind, ``"send"`` or ``"recv"``.
    nbytes : float [bytes], NCCL's S for a collective, HBM bytes for compute.
    flops : float, of one rank.
    step : int, the training step it belongs to.
    detail : free facts for a viewer: algorithm, protocol, n_channels, group size, lower bound [s], and of a transfer
        alone on an idle network its ``latency`` [s] and ``ceiling`` [bytes/s of payload]. ``groups`` is (groups x
        members) int, the ranks that met, and ``meets`` the other ops they came from, where they did not all run one op.
    """

    name: str
    kind: str
    stream: str
    phase: str = "other"
    bound: str = "compute"
    nbytes: float = 0.0
    flops: float = 0.0
    step: int = 0
    role: str = ""
    after: tuple[int, ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LinkUse:
    """What each transfer put on which link, over time.

    A transfer moves payload at a piecewise-constant rate; its ``load`` says how many bytes of each link one byte of its
    payload costs. Bytes on a link over [t0, t1] are the sum of rate x weight x time.

    Parameters
    ----------
    segment_transfer : (S,) int, transfer id. segment_start, segment_end : (S,) float [s].
    segment_rate : (S,) float [bytes/s], of payload.
    transfer_op : (T,) int, row in :attr:`Timeline.ops`. transfer_load : (T,) int, row of ``loads``.
    loads : per distinct load a pair (links (k,) int, weights (k,) float [bytes on the link per payload byte]).
    link_names, link_bandwidth : per link; bandwidth in bytes/s.
    link_kinds : per link one of :data:`clustersim.topology.LINK_KINDS`; empty where unknown.
    """

    segment_transfer: Ints
    segment_start: Floats
    segment_end: Floats
    segment_rate: Floats
    transfer_op: Ints
    transfer_load: Ints
    loads: tuple[tuple[Ints, Floats], ...]
    link_names: Sequence[str]
    link_bandwidth: Floats
    link_kinds: Sequence[str] = ()

    def bytes_per_link(self) -> Floats:
        """(L,) float [bytes]: everything that crossed each link."""
        moved = self.segment_rate * (self.segment_end - self.segment_start)
        per_transfer = np.bincount(self.segment_transfer, weights=moved, minlength=len(self.transfer_op))
        per_load = np.bincount(self.transfer_load, weights=per_transfer, minlength=len(self.loads))
        total = np.zeros(len(self.link_bandwidth))
        for payload, (links, weights) in zip(per_load.tolist(), self.loads, strict=True):
            np.add.at(total, links, payload * weights)
        return total

    def series(self, link: int) -> tuple[Floats, Floats]:
        """Rate over time on one link: ``(times (n+1,) [s], rates (n,) [bytes/s])``, constant between two times."""
        weight = np.array([float(weights[links == link].sum()) for links, weights in self.loads])
        share = weight[self.transfer_load][self.segment_transfer] if len(self.loads) else np.array([])
        used = share > 0
        rate, start, end = self.segment_rate[used] * share[used], self.segment_start[used], self.segment_end[used]
        times = np.unique(np.concatenate([[0.0], start, end]))
        change = np.zeros(len(times))
        np.add.at(change, np.searchsorted(times, start), rate)
        np.add.at(change, np.searchsorted(times, end), -rate)
        return times, np.maximum(np.cumsum(change)[:-1], 0.0)


@dataclass(frozen=True, eq=False)
class Timeline:
    """Spans of a run.

    Parameters
    ----------
    world_size : int
    ops : what the spans were.
    rank_sets : distinct sets of ranks, each a (k,) int array.
    row_op, row_set : (R,) int, index into ``ops`` and ``rank_sets``.
    row_ready : (R,) float [s], when the rank could have begun: stream free and dependencies done.
    row_start, row_end : (R,) float [s]. For a collective ``ready`` is the rank's own arrival and ``start`` the moment
        its last member arrived, so ``start - ready`` is time spent waiting for peers.
    links : what crossed the links, None for measured runs that do not know.
    source : ``"simulated"`` or where it was measured.
    rank_node : (world_size,) int, the node of each rank, for grouping tracks.
    """

    world_size: int
    ops: tuple[OpInfo, ...]
    rank_sets: tuple[Ints, ...]
    row_op: Ints
    row_set: Ints
    row_ready: Floats
    row_start: Floats
    row_end: Floats
    links: LinkUse | None = None
    source: str = "simulated"
    rank_node: Ints | None = None
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def makespan(self) -> float:
        """Seconds from 0 to the end of the last span."""
        return float(self.row_end.max()) if len(self.row_end) else 0.0

    def spans(self, ranks: Sequence[int] | None = None) -> dict[str, npt.NDArray[Any]]:
        """Spans as columns ``rank, op, ready, start, end``, sorted by rank, then start, then op.

        ``ranks`` None means all of them. The dict goes straight into ``pandas.DataFrame``.
        """
        sizes = np.array([len(s) for s in self.rank_sets], dtype=np.int64)
        members = np.concatenate(self.rank_sets) if self.rank_sets else np.array([], dtype=np.int64)
        if ranks is not None:
            wanted = np.isin(members, np.asarray(sorted(set(ranks)), dtype=np.int64))
            owner = np.repeat(np.arange(len(sizes)), sizes)[wanted]
            members, sizes = members[wanted], np.bincount(owner, minlength=len(sizes))
        repeat = sizes[self.row_set]
        # Each row's members are a slice of ``members``: its set's offset, plus 0, 1, 2... inside the row.
        inside = np.arange(repeat.sum()) - np.repeat(np.cumsum(repeat) - repeat, repeat)
        columns = {
            "rank": members[np.repeat((np.cumsum(sizes) - sizes)[self.row_set], repeat) + inside],
            "op": np.repeat(self.row_op, repeat),
            "ready": np.repeat(self.row_ready, repeat),
            "start": np.repeat(self.row_start, repeat),
            "end": np.repeat(self.row_end, repeat),
        }
        order = np.lexsort((columns["op"], columns["start"], columns["rank"]))
        return {name: column[order] for name, column in columns.items()}


def alike(timeline: Timeline) -> tuple[Ints, Ints]:
    """Ranks grouped by having exactly the same spans: ``(representatives (c,), class of each rank (world_size,))``.

    Whatever is computed per rank needs only the representatives, so a run whose ranks behave alike costs the same to
    analyse at 8 ranks and at 16,384. Classes are numbered by their lowest rank, which represents them.
    """
    used = np.unique(timeline.row_set)
    # Two ranks are alike when they are in the same sets: compare sums of one random 63-bit number per set.
    mark = np.random.default_rng(0).integers(2**63, size=len(timeline.rank_sets))
    signature = np.zeros(timeline.world_size, dtype=np.int64)
    for s in used.tolist():
        signature[timeline.rank_sets[s]] ^= mark[s]
    _, first, of = np.unique(signature, return_index=True, return_inverse=True)
    number = np.argsort(np.argsort(first))
    representatives: Ints = np.sort(first).astype(np.int64)
    return representatives, number[of]


def first_ranks(timeline: Timeline, n: int) -> Timeline:
    """The same run as its first ``n`` ranks saw it."""
    if n >= timeline.world_size:
        return timeline
    sets = tuple(ranks[ranks < n] for ranks in timeline.rank_sets)
    kept = np.array([len(ranks) > 0 for ranks in sets], dtype=bool)[timeline.row_set]
    return replace(
        timeline,
        world_size=n,
        rank_sets=sets,
        row_op=timeline.row_op[kept],
        row_set=timeline.row_set[kept],
        row_ready=timeline.row_ready[kept],
        row_start=timeline.row_start[kept],
        row_end=timeline.row_end[kept],
        rank_node=None if timeline.rank_node is None else timeline.rank_node[:n],
    )
