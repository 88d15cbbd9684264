"""What happened, simulated or measured: spans on streams, and what crossed which link.

A row of the span table stands for one op on a *set* of ranks that did it at exactly the same time, so that a run whose
ranks behave alike stays small at 16,384 GPUs. Where they do not, ops are kept as :class:`~clustersim.core.blocks.Block`
columns, and become rows only when somebody asks for rows. :meth:`Timeline.spans` expands either for the ranks asked
for, :meth:`Timeline.per_op` sums over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.blocks import AT_ONCE, Block, Columns, RankSets, joined, no_rows
from clustersim.core.cards import card
from clustersim.core.errors import ProgramError
from clustersim.core.label import Label
from clustersim.core.memo import Keeper
from clustersim.core.op_infos import OpInfo, kinds, of_each
from clustersim.core.sheets import Rows, Sheet, Shelf, expanded
from clustersim.core.units import format_time

__all__ = ["OWN_PACES", "SPAN_LABELS", "WITHOUT_GPU", "LinkUse", "OpInfo", "Timeline", "alike", "step_ends"]

WITHOUT_GPU = "ranks without a GPU"
"""Of the entry of ``stats`` that counts ranks whose profile has operators of the CPU alone."""

OWN_PACES = "own_paces"
"""Of the entry of ``stats`` that is 1 where :attr:`clustersim.core.program.Program.own_paces` was played."""


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
    link_kinds : per link one of :data:`clustersim.core.topology.LINK_KINDS`; empty where unknown.
    changing : links whose rate changed during the run; ``link_bandwidth`` is what they had at their own rate.
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
    changing: Sequence[int] = ()

    def bytes_per_link(self) -> Floats:
        """(L,) float [bytes]: everything that crossed each link."""
        links, weights, load = self.per_byte
        moved = weights * np.bincount(self.transfer_load, weights=self.payload, minlength=len(self.loads))[load]
        return np.bincount(links, weights=moved, minlength=len(self.link_bandwidth)).astype(np.float64)

    @cached_property
    def payload(self) -> Floats:
        """(T,) float [bytes] that each transfer moved."""
        moved = self.segment_end - self.segment_start
        moved *= self.segment_rate  # there are millions: no third column beside these
        return np.bincount(self.segment_transfer, moved, len(self.transfer_op)).astype(np.float64, copy=False)

    @cached_property
    def per_byte(self) -> tuple[Ints, Floats, Ints]:
        """Links and weights of all loads one after another, and whose they are."""
        if not self.loads:
            return np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0, dtype=np.int64)
        links, weights = (np.concatenate(column) for column in zip(*self.loads, strict=True))
        return links, weights, np.repeat(np.arange(len(self.loads)), [len(links) for links, _ in self.loads])

    def series(self, link: int) -> tuple[Floats, Floats]:
        """Rate over time on one link: ``(times (n+1,) [s], rates (n,) [bytes/s])``, constant between two times."""
        weight = np.array([float(weights[links == link].sum()) for links, weights in self.loads])
        share = weight[self.transfer_load][self.segment_transfer] if len(self.loads) else np.array([])
        used = share > 0
        rate = self.segment_rate[used] * share[used]
        start = self.segment_start[used]
        end = self.segment_end[used]
        times = np.unique(np.concatenate([[0.0], start, end]))
        change = np.zeros(len(times))
        np.add.at(change, np.searchsorted(times, start), rate)
        np.add.at(change, np.searchsorted(times, end), -rate)
        return times, np.maximum(np.cumsum(change)[:-1], 0.0)


@dataclass(frozen=True, eq=False)
class Timeline(Keeper):
    """Spans of a run.

    Parameters
    ----------
    ops : what the spans were. rank_sets : distinct sets of ranks, each a (k,) int array.
    row_op, row_set : (R,) int, index into ``ops`` and ``rank_sets``.
    row_ready : (R,) float [s], when the rank could have begun: stream free and dependencies done.
    row_start, row_end : (R,) float [s]. For a collective ``ready`` is the rank's own arrival and ``start`` the moment
        its last member arrived, so ``start - ready`` is time spent waiting for peers.
    links : what crossed the links, None for measured runs that do not know. source : ``"simulated"`` or where it was
        measured. rank_node : (world_size,) int, the node of each rank, for grouping tracks.
    """

    world_size: int
    ops: Sequence[OpInfo]
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
        ops: Sequence[OpInfo],
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
            attributes = vars(timeline)
            attributes["blocks"] = blocks
            attributes["_narrow"] = tuple(attributes.pop(name) for name in _ROWS)
        return timeline

    if not TYPE_CHECKING:  # a fallback that answers everything would hide misspelt names from mypy

        def __getattr__(self, name: str) -> Any:
            if name not in _ROWS or "_narrow" not in vars(self):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            sets, *rows = vars(self)["_narrow"]
            book = RankSets(self.world_size, sets)
            columns = joined([tuple(rows), *(book.rows(block) for block in self.blocks)])
            vars(self).update(zip(_ROWS, (tuple(book.sets), *columns), strict=True))
            return vars(self)[name]

    @property
    def own_paces(self) -> bool:
        """Whether nobody waits for anybody's step (:attr:`clustersim.core.program.Program.own_paces`)."""
        return bool(self.stats.get(OWN_PACES))

    def _rows(self) -> Rows:
        """Rank sets and rows of everything outside :attr:`blocks`."""
        if "_narrow" in vars(self):
            narrow: Rows = vars(self)["_narrow"]
            return narrow
        return self.rank_sets, self.row_op, self.row_set, self.row_ready, self.row_start, self.row_end

    def __repr__(self) -> str:
        return f"<Timeline ({self.source}) of {', '.join(f'{n} {noun}' for noun, n in self._counts())}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return card(f"Timeline ({self.source})", self._counts())

    def _counts(self) -> list[tuple[str, str]]:
        """Of each what there is; nothing is expanded for it."""
        counts = {
            "ranks": self.world_size,
            "steps": len({op.step for op in kinds(self.ops)}),
            "ops": len(self.ops),
            "spans": int(self.per_op()["ranks"].sum()),
        }
        return [*((noun, f"{n:,}") for noun, n in counts.items()), ("from begin to end", format_time(self.makespan))]

    @cached_property
    def makespan(self) -> float:
        """Seconds from 0 to the end of the last span."""
        blocks = max((block.columns[2].high for block in self.blocks), default=0.0)
        return max(float(self._rows()[5].max(initial=0.0)), blocks)

    def per_op(self) -> dict[str, npt.NDArray[Any]]:
        """What each op came to over its ranks, a column element per op, without expanding anything.

        ``ranks`` (n_ops,) int, how many did it; ``seconds`` [s], from start to end, summed over them; ``ready``
        and ``start`` [s], the first moment any could have begun, and did (inf where nobody did it); ``end`` [s], when
        the last was done (-inf).
        """
        return dict(self._per_op)

    def ranks_per_op(self, below: int | None = None) -> Ints:
        """(n_ops,) how many ranks did each op, of those ``below`` a number: of all, ``ranks`` of :meth:`per_op`."""
        sets, op, set_of, *_ = self._rows()
        least = self.world_size if below is None else below
        sizes = np.array([len(s) if least >= self.world_size else (s < least).sum() for s in sets], dtype=np.int64)
        ranks = np.bincount(op, weights=sizes[set_of], minlength=len(self.ops)).astype(np.int64)
        for blocks in self.shelf.columns:
            np.add.at(ranks, blocks.op, int((blocks.ranks < least).sum()))
        return ranks

    @cached_property
    def _per_op(self) -> dict[str, npt.NDArray[Any]]:
        n, (sets, op, set_of, ready, start, end) = len(self.ops), self._rows()
        sizes = np.array([len(s) for s in sets], dtype=np.int64)[set_of]
        ranks = self.ranks_per_op()
        seconds = np.bincount(op, weights=(end - start) * sizes, minlength=n).astype(np.float64)
        first = np.full(n, np.inf)
        began = np.full(n, np.inf)
        last = np.full(n, -np.inf)
        np.minimum.at(first, op, ready)
        np.minimum.at(began, op, start)
        np.maximum.at(last, op, end)
        spent = np.zeros(len(self.blocks))
        for blocks in self.shelf.columns:
            its_ready, its_start, its_end = blocks.which
            spent[blocks.place] = len(blocks.ranks) * (blocks.mean[its_end] - blocks.mean[its_start])
            np.minimum.at(first, blocks.op, blocks.low[its_ready])
            np.minimum.at(began, blocks.op, blocks.low[its_start])
            np.maximum.at(last, blocks.op, blocks.high[its_end])
        np.add.at(seconds, [block.op for block in self.blocks], spent)
        op_columns = {"ranks": ranks, "seconds": seconds, "ready": first, "start": began, "end": last}
        for column in op_columns.values():
            column.flags.writeable = False  # everybody who asks gets the same
        return op_columns

    def spans(self, ranks: Sequence[int] | None = None, *, labels: bool = False) -> dict[str, npt.NDArray[Any]]:
        """Spans as columns ``rank, op, ready, start, end``, sorted by rank, then start, then op.

        ``ranks`` None means all of them. ``labels`` : with what each span was, :data:`SPAN_LABELS`, as columns of
        texts and numbers; -1 and empty where there is none. The dict goes straight into ``pandas.DataFrame``.

        Raises :class:`ProgramError` for a rank that the run does not have.
        """
        wanted = np.arange(self.world_size) if ranks is None else np.unique(np.asarray(ranks, dtype=np.int64))
        unknown = wanted[(wanted < 0) | (wanted >= self.world_size)].tolist()
        if unknown:
            raise ProgramError(f"no rank {unknown[0]}: the run has ranks 0 to {self.world_size - 1}")
        parts = [_by_start(sheet) for sheet in self.sheets(wanted)]
        columns = [np.concatenate(column) for column in zip(no_rows(), *parts, strict=True)]
        order = np.argsort(columns[0], kind="stable")  # sheets hold whole ranks
        spans = {name: column[order] for name, column in zip(_SPAN, columns, strict=True)}
        return spans | self._labels(spans["op"]) if labels else spans

    def _labels(self, op: Ints) -> dict[str, npt.NDArray[Any]]:
        """What these ops were, a column for each of :data:`SPAN_LABELS`."""
        rows = [_label_cells(info) for info in self.ops]
        of_op = zip(*rows, strict=True) if rows else ((),) * len(SPAN_LABELS)
        columns = {}
        for name, cells in zip(SPAN_LABELS, of_op, strict=True):
            kind = object if any(isinstance(cell, str) for cell in cells) else None
            columns[name] = np.array(cells, dtype=kind)[op]
        return columns

    def sheets(self, ranks: Ints, at_once: int = AT_ONCE, of_ops: Bools | None = None) -> Iterator[Sheet]:
        """Every span of these ranks (ascending) as tables of about ``at_once`` spans; ``of_ops`` : (n_ops,) of which
        ops, None for all."""
        return self.shelf.sheets(ranks, at_once, of_ops)

    @cached_property
    def shelf(self) -> Shelf:
        """Rows and blocks by the ranks that did them."""
        return Shelf(self._rows(), self.blocks, self.world_size)

    @cached_property
    def op_steps(self) -> Ints:
        """(n_ops,) int, the step of each op; not to be written to."""
        steps: Ints = of_each(self.ops, lambda op: op.step, np.int64)
        steps.flags.writeable = False
        return steps

    @cached_property
    def _step_ends(self) -> Floats:
        step = self.op_steps
        ended = np.zeros((int(step.max(initial=-1)) + 1, self.world_size))
        rank, op, _, _, end = expanded(self._rows())
        np.maximum.at(ended, (step[op], rank), end)
        for blocks in self.shelf.columns:
            last = blocks.high[blocks.which[2]]
            for s in np.unique(step[blocks.op]).tolist():
                row = ended[s, blocks.ranks]
                own = np.flatnonzero(step[blocks.op] == s)
                for i in own[np.argsort(-last[own])].tolist():
                    if last[i] <= row.min():
                        break  # nor is any of the others the last of a rank
                    row = np.maximum(row, blocks.columns[blocks.which[2, i]].all)
                ended[s, blocks.ranks] = row
        ended.flags.writeable = False  # everybody who asks gets the same
        return ended

    @cached_property
    def _alike(self) -> tuple[Ints, Ints]:
        _, first, of_rank = np.unique(self.shelf.courses(), return_index=True, return_inverse=True)
        return np.sort(first).astype(np.int64), np.argsort(np.argsort(first))[of_rank]


_ROWS = ("rank_sets", "row_op", "row_set", "row_ready", "row_start", "row_end")
_SPAN = ("rank", "op", "ready", "start", "end")
SPAN_LABELS = (
    *("name", "kind", "phase", "stream", "step", "stage"),
    *("unit", "action", "microbatch", "chunk", "dim", "nbytes", "flops"),
)
"""What a span can be told with: fields of :class:`OpInfo` and of its :class:`~clustersim.core.label.Label`."""


def _label_cells(info: OpInfo) -> tuple[str | float, ...]:
    """The cells of :data:`SPAN_LABELS` of an op."""
    label = info.label or Label()
    belongs = label.unit, label.action, label.microbatch, label.chunk, label.dim
    return info.name, info.kind, info.phase, info.stream, info.step, info.stage, *belongs, info.nbytes, info.flops


def _by_start(sheet: Sheet) -> Columns:
    """Spans of a sheet one after another: by rank, then start, then op."""
    order = np.argsort(sheet.start, axis=1, kind="stable")
    times = (np.take_along_axis(column, order, axis=1).ravel() for column in (sheet.ready, sheet.start, sheet.end))
    return np.repeat(sheet.ranks, len(sheet.op)), sheet.op[order].ravel(), *times  # type: ignore[return-value]


def alike(timeline: Timeline) -> tuple[Ints, Ints]:
    """Ranks grouped by having exactly the same spans: ``(representatives (c,), class of each rank (world_size,))``.

    Whatever is computed per rank needs only the representatives. Classes are numbered by their lowest rank.
    """
    return timeline._alike


def step_ends(timeline: Timeline) -> Floats:
    """(steps, world_size) float [s]: when each rank's last op of each step ended; 0 where it did nothing in it."""
    return timeline._step_ends
