"""What happened, simulated or measured: spans on streams, and what crossed which link.

A row of the span table stands for one op on a *set* of ranks that did it at exactly the same time, so that a run whose
ranks behave alike stays small at 16,384 GPUs. Where they do not, ops are kept as :class:`~clustersim.blocks.Block`
columns, and become rows only when somebody asks for rows. :meth:`Timeline.spans` expands either for the ranks asked
for, :meth:`Timeline.per_op` sums over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from clustersim.blocks import Block, Columns, Extents, RankSets, joined, totals
from clustersim.label import Label

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class OpInfo(msgspec.Struct, frozen=True, gc=False):
    """What a span was: the label side of an op, shared by simulated and measured runs.

    Parameters
    ----------
    name, stream, phase, bound : as in :mod:`clustersim.program`.
    kind : ``"compute"``, a collective's kind, ``"send"`` or ``"recv"``.
    nbytes : float [bytes], NCCL's S for a collective, HBM bytes for compute.
    flops : float, of one rank.
    step : int, the training step it belongs to.
    label : what it belongs to, as fields; None where unknown. stage : the pipeline stage of its ranks, -1 for none.
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
    detail: dict[str, Any] = {}
    label: Label | None = None
    stage: int = -1


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
    blocks: tuple[Block, ...] = field(default=(), init=False, repr=False)
    """Ops whose ranks differ, while nobody has asked for rows; see :meth:`of_blocks`."""

    @classmethod
    def of_blocks(
        cls,
        world_size: int,
        ops: tuple[OpInfo, ...],
        rank_sets: tuple[Ints, ...],
        rows: Columns,
        blocks: tuple[Block, ...],
        **rest: Any,
    ) -> Timeline:
        """A Timeline of rows and blocks; the ``row_`` columns and ``rank_sets`` hold both, and are made when asked for.

        A copy by ``dataclasses.replace`` has rows only. ``rest``: the other fields.
        """
        timeline = cls(world_size, ops, rank_sets, *rows, **rest)
        if blocks:
            known = vars(timeline)
            known["blocks"] = blocks
            known["_narrow"] = tuple(known.pop(name) for name in _ROWS)
        return timeline

    if not TYPE_CHECKING:  # a fallback that answers everything would hide misspelt names from mypy

        def __getattr__(self, name: str) -> Any:
            if name not in _ROWS or "_narrow" not in vars(self):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            sets, *rows = vars(self)["_narrow"]
            book = RankSets(self.world_size, sets)
            made = joined([tuple(rows), *(book.rows(block) for block in self.blocks)])
            vars(self).update(zip(_ROWS, (tuple(book.sets), *made), strict=True))
            return vars(self)[name]

    def _rows(self) -> tuple[tuple[Ints, ...], Ints, Ints, Floats, Floats, Floats]:
        """Rank sets and rows of everything outside :attr:`blocks`."""
        if "_narrow" in vars(self):
            narrow: tuple[tuple[Ints, ...], Ints, Ints, Floats, Floats, Floats] = vars(self)["_narrow"]
            return narrow
        return self.rank_sets, self.row_op, self.row_set, self.row_ready, self.row_start, self.row_end

    @property
    def makespan(self) -> float:
        """Seconds from 0 to the end of the last span."""
        ends = [self._rows()[5], *(block.end for block in self.blocks)]
        return max((float(end.max()) for end in ends if len(end)), default=0.0)

    @cached_property
    def extents(self) -> Extents:
        """Least, greatest and mean of the blocks' columns; a view of the run begins with what is known here."""
        return Extents()

    def per_op(self) -> dict[str, npt.NDArray[Any]]:
        """What each op came to over its ranks, a column element per op, without expanding anything.

        ``ranks`` (n_ops,) int, how many did it; ``seconds`` [s], from start to end, summed over them; ``ready``
        and ``start`` [s], the first moment any could have begun, and did (inf where nobody did it); ``end`` [s], when
        the last was done (-inf).
        """
        return dict(self._per_op)

    def ranks_per_op(self) -> Ints:
        """(n_ops,) how many ranks did each op: ``ranks`` of :meth:`per_op`, without looking at a time."""
        sets, op, of, *_ = self._rows()
        sizes = np.array([len(s) for s in sets], dtype=np.int64)[of]
        ranks = np.bincount(op, weights=sizes, minlength=len(self.ops)).astype(np.int64)
        np.add.at(ranks, [block.op for block in self.blocks], [len(block.ranks) for block in self.blocks])
        return ranks

    @cached_property
    def _per_op(self) -> dict[str, npt.NDArray[Any]]:
        n, (sets, op, of, ready, start, end) = len(self.ops), self._rows()
        sizes = np.array([len(s) for s in sets], dtype=np.int64)[of]
        ranks = self.ranks_per_op()
        seconds = np.bincount(op, weights=(end - start) * sizes, minlength=n).astype(np.float64)
        first, began, last = np.full(n, np.inf), np.full(n, np.inf), np.full(n, -np.inf)
        np.minimum.at(first, op, ready)
        np.minimum.at(began, op, start)
        np.maximum.at(last, op, end)
        of_block, *columns = totals(self.blocks, self.extents)
        into = (np.add, seconds), (np.minimum, first), (np.minimum, began), (np.maximum, last)
        for (how, column), values in zip(into, columns, strict=True):
            how.at(column, of_block, values)
        found = {"ranks": ranks, "seconds": seconds, "ready": first, "start": began, "end": last}
        for column in found.values():
            column.flags.writeable = False  # everybody who asks gets the same
        return found

    def spans(self, ranks: Sequence[int] | None = None) -> dict[str, npt.NDArray[Any]]:
        """Spans as columns ``rank, op, ready, start, end``, sorted by rank, then start, then op.

        ``ranks`` None means all of them. The dict goes straight into ``pandas.DataFrame``.
        """
        wanted = None if ranks is None else np.asarray(sorted(set(ranks)), dtype=np.int64)
        parts = [self._row_spans(wanted), *_block_spans(self.blocks, wanted)]
        columns = {
            name: np.concatenate([part[i] for part in parts])
            for i, name in enumerate(("rank", "op", "ready", "start", "end"))
        }
        order = np.lexsort((columns["op"], columns["start"], columns["rank"]))
        return {name: column[order] for name, column in columns.items()}

    def _row_spans(self, wanted: Ints | None) -> Columns:
        """Rank, op, ready, start and end of each span of the rows."""
        sets, op, of, ready, start, end = self._rows()
        sizes = np.array([len(s) for s in sets], dtype=np.int64)
        members = np.concatenate(sets) if sets else np.array([], dtype=np.int64)
        if wanted is not None:
            kept = np.isin(members, wanted)
            owner = np.repeat(np.arange(len(sizes)), sizes)[kept]
            members, sizes = members[kept], np.bincount(owner, minlength=len(sizes))
        repeat = sizes[of]
        # Each row's members are a slice of ``members``: its set's offset, plus 0, 1, 2... inside the row.
        inside = np.arange(repeat.sum()) - np.repeat(np.cumsum(repeat) - repeat, repeat)
        rank = members[np.repeat((np.cumsum(sizes) - sizes)[of], repeat) + inside]
        ready, start, end = (np.repeat(column, repeat) for column in (ready, start, end))
        return rank, np.repeat(op, repeat), ready, start, end


_ROWS = ("rank_sets", "row_op", "row_set", "row_ready", "row_start", "row_end")


def _block_spans(blocks: tuple[Block, ...], wanted: Ints | None) -> list[Columns]:
    """Rank, op, ready, start and end of each span of the blocks."""
    places: dict[int, Ints] = {}
    spans = []
    for block in blocks:
        ranks, at = block.ranks, places.get(id(block.ranks))
        if at is None:
            at = np.arange(len(ranks)) if wanted is None else np.flatnonzero(np.isin(ranks, wanted))
            places[id(ranks)] = at
        ready, start, end = (column[at] if len(column) > 1 else np.repeat(column, len(at)) for column in block.times)
        spans.append((ranks[at], np.full(len(at), block.op, dtype=np.int64), ready, start, end))
    return spans


def alike(timeline: Timeline) -> tuple[Ints, Ints]:
    """Ranks grouped by having exactly the same spans: ``(representatives (c,), class of each rank (world_size,))``.

    Whatever is computed per rank needs only the representatives, so a run whose ranks behave alike costs the same to
    analyse at 8 ranks and at 16,384. Classes are numbered by their lowest rank, which represents them.
    """
    sets, _, of, *_ = timeline._rows()
    rng = np.random.default_rng(0)
    # Two ranks are alike when they are in the same sets: compare sums of one random 63-bit number per set.
    mark = rng.integers(2**63, size=len(sets), dtype=np.uint64)
    signature = np.zeros(timeline.world_size, dtype=np.uint64)
    for s in np.unique(of).tolist():
        signature[sets[s]] += mark[s]
    for block in timeline.blocks:  # and where each has its own times, when those are the same bits
        for column in block.times:
            bits = column.view(np.uint64)
            odd = rng.integers(2**63, size=2, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
            signature[block.ranks] += (bits ^ (bits >> np.uint64(31))) * odd[0] + odd[1]
    _, first, of_rank = np.unique(signature, return_index=True, return_inverse=True)
    number = np.argsort(np.argsort(first))
    representatives: Ints = np.sort(first).astype(np.int64)
    return representatives, number[of_rank]


def step_ends(timeline: Timeline) -> Floats:
    """(steps, world_size) float [s]: when each rank's last op of each step ended; 0 where it did nothing in it."""
    step = np.array([op.step for op in timeline.ops], dtype=np.int64)
    ended = np.zeros((int(step.max(initial=-1)) + 1, timeline.world_size))
    rank, op, _, _, end = timeline._row_spans(None)
    np.maximum.at(ended, (step[op], rank), end)
    for block in timeline.blocks:
        row = ended[step[block.op]]
        row[block.ranks] = np.maximum(row[block.ranks], block.end)
    return ended


def first_ranks(timeline: Timeline, n: int) -> Timeline:
    """The same run as its first ``n`` ranks saw it."""
    if n >= timeline.world_size:
        return timeline
    sets, *rows = timeline._rows()
    sets = tuple(ranks[ranks < n] for ranks in sets)
    kept = np.array([len(ranks) > 0 for ranks in sets], dtype=bool)[rows[1]]
    blocks = tuple(block.of_ranks(block.ranks < n) for block in timeline.blocks if block.ranks.min() < n)
    nodes = None if timeline.rank_node is None else timeline.rank_node[:n]
    return _with(timeline, n, sets, tuple(column[kept] for column in rows), blocks, nodes)


def of_ops(timeline: Timeline, chosen: npt.NDArray[np.bool_]) -> Timeline:
    """The same run without the spans of other ops; ``chosen`` is (n_ops,) bool."""
    sets, *rows = timeline._rows()
    kept = chosen[rows[0]]
    blocks = tuple(block for block in timeline.blocks if chosen[block.op])
    columns = tuple(column[kept] for column in rows)
    return _with(timeline, timeline.world_size, sets, columns, blocks, timeline.rank_node)


def between(timeline: Timeline, begin: float, end: float) -> Timeline:
    """The same run as it was between two times [s]: spans that touch them, cut off there, with every op's step."""
    sets, op, of, ready, start, stop = timeline._rows()
    kept = (stop > begin) & (ready < end)
    columns = (np.clip(column[kept], begin, end) for column in (ready, start, stop))
    parts = (
        block.between(begin, end) if touched else None if touched is None else block
        for block, touched in zip(timeline.blocks, _cut(timeline, begin, end), strict=True)
    )
    blocks = tuple(part for part in parts if part is not None)
    rows = (op[kept], of[kept], *columns)
    return _with(timeline, timeline.world_size, sets, rows, blocks, timeline.rank_node)


def _cut(timeline: Timeline, begin: float, end: float) -> list[bool | None]:
    """Whether the times [s] cut each block; None where it is outside them."""
    early, late, _ = timeline.extents.of([block.ready for block in timeline.blocks])
    done, over, _ = timeline.extents.of([block.end for block in timeline.blocks])
    whole = ((early >= begin) & (late < end) & (done > begin) & (over <= end)).tolist()
    inside = ((early < end) & (over > begin)).tolist()
    return [not all_of_it if some else None for all_of_it, some in zip(whole, inside, strict=True)]


def _with(
    timeline: Timeline,
    world_size: int,
    sets: tuple[Ints, ...],
    rows: tuple[npt.NDArray[Any], ...],
    blocks: tuple[Block, ...],
    rank_node: Ints | None,
) -> Timeline:
    rest = {"links": timeline.links, "source": timeline.source, "stats": timeline.stats, "rank_node": rank_node}
    op, of, ready, start, end = rows
    view = Timeline.of_blocks(world_size, timeline.ops, sets, (op, of, ready, start, end), blocks, **rest)
    if blocks:
        vars(view)["extents"] = Extents(timeline.extents)
    return view
