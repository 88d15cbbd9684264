"""Volume: how many bytes a step moves, by op: sent and received by GPUs, and carried by each kind of link."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from clustersim.collectives.volume import per_member
from clustersim.core.arrays import Columns, Floats, Ints
from clustersim.core.op_infos import OpInfo, of_each
from clustersim.core.timeline import LinkUse, Timeline
from clustersim.core.topology import LINK_KINDS
from clustersim.explain.dimensions import dimension

AT_ONCE = 2**20
"""Transfers that are added up together."""


def host_copies(timeline: Timeline, steps: Sequence[int]) -> tuple[float, float]:
    """Bytes that all GPUs together copy to their hosts in a step, and from them: parameters, gradients and activations.

    Mean over ``steps``; of a simulated timeline, whose copies say by their stream where they go.
    """
    wanted = set(steps)

    def nbytes_of(op: OpInfo) -> tuple[float, float]:
        """Bytes that an op copies to hosts, and from them."""
        copied = op.phase == "memcpy" and op.step in wanted
        return op.nbytes * (copied and op.stream.startswith("d2h")), op.nbytes * (
            copied and op.stream.startswith("h2d")
        )

    each = of_each(timeline.ops, nbytes_of, np.float64).reshape(-1, 2)
    to_host, from_host = (timeline.per_op()["ranks"] @ each / len(steps)).tolist()
    return to_host, from_host


def volume(timeline: Timeline, steps: Sequence[int], sort: Callable[[OpInfo], str] | None = None) -> Columns:
    """What a step moves, a row per sort of op, most bytes sent first.

    steps : numbers of the steps to take the mean over, such as ``steady_steps`` of
        :func:`clustersim.explain.metrics.summary`.
    sort : what an op is a row of; None is ``op`` below. :func:`by_dimension` has another.

    Returns a dict of columns:

    * ``op``: a collective's kind, or the first word of a message ("push", "pull", "send").
    * ``count``: calls a step, as one rank counts them: collectives that it takes part in, messages that it sends, or
      pulls that it gets; mean over ``ranks``, those that do any.
    * ``sent``, ``received`` [bytes]: by all ranks together, of payload: what the algorithm played needs, see
      :func:`clustersim.collectives.volume.per_member`. A switch that adds and multicasts (NVLS) sends and receives
      too, so the two may differ.
    * one per kind of link that carried anything (``link_nvlink``, ``link_pcie``, ``link_cpu``, ``link_net``...)
      [bytes]: summed over links, protocol overhead included; a byte that crosses three links counts three times.
      None of them where the timeline does not know its links.
    """
    ops = timeline.per_op()
    wanted = set(steps)
    sort = sort or _word
    rows: dict[str, int] = {}
    nbytes_of = MemberBytes(timeline.world_size)

    def facts(op: OpInfo) -> tuple[float, ...]:
        """Of an op its row, whether it counts (a message does where it is asked for), and bytes out and in."""
        if op.kind == "compute" or op.step not in wanted:
            return -1, 0, 0, 0
        row = rows.setdefault(sort(op), len(rows))
        return row, op.kind != ("send" if _word(op) == PULL else "recv"), *nbytes_of(op)

    rows_of_ops, counts, out, into = of_each(timeline.ops, facts, np.float64).reshape(-1, 4).T
    row_of = rows_of_ops.astype(np.int64)
    names = list(rows)
    chosen = row_of >= 0
    row, did = row_of[chosen], ops["ranks"][chosen].astype(np.float64)
    calls, sent, received = (
        np.bincount(row, weights=column, minlength=len(names)).astype(np.float64)
        for column in (did * counts[chosen], did * out[chosen], did * into[chosen])
    )
    ranks = _taking_part(timeline, np.where(counts > 0, row_of, -1), len(names))
    table: Columns = {
        "op": np.array(names, dtype=np.str_),
        "count": np.divide(calls, ranks, out=np.zeros(len(names)), where=ranks > 0) / len(steps),
        "ranks": ranks,
        "sent": sent / len(steps),
        "received": received / len(steps),
    }
    if timeline.links is not None and len(timeline.links.link_kinds):
        for kind, nbytes in _by_link_kind(timeline.links, row_of, len(names)).items():
            table[f"link_{kind}"] = nbytes / len(steps)
    order = np.argsort(-sent, kind="stable")
    return {name: column[order] for name, column in table.items()}


def _taking_part(timeline: Timeline, row_of: Ints, n_rows: int) -> Ints:
    """(rows,) how many ranks do any op of a row. ``row_of`` : (ops,) int, -1 for an op of none."""
    takes_part = np.zeros((n_rows, timeline.world_size), dtype=np.bool_)
    rank_sets, op, set_of, *_ = timeline._rows()
    of_sets = {
        (row, number): rank_sets[number] for row, number in zip(row_of[op].tolist(), set_of.tolist(), strict=True)
    }
    for (row, _), members in of_sets.items():
        if row >= 0:
            takes_part[row, members] = True
    for blocks in timeline.shelf.columns:
        for row in np.unique(row_of[blocks.op]).tolist():
            if row >= 0:
                takes_part[row, blocks.ranks] = True
    count: Ints = takes_part.sum(axis=1)
    return count


def by_dimension(timeline: Timeline, steps: Sequence[int], workers: int) -> Columns:
    """What a step moves over each dimension of the mesh (:mod:`clustersim.explain.dimensions`), most first.

    Columns ``dimension``, ``sent_per_gpu`` [bytes], mean over ``workers`` ranks, and ``sent``, ``received`` and those
    by kind of link as in :func:`volume`.
    """
    table = volume(timeline, steps, dimension)
    columns = {name: column for name, column in table.items() if name not in {"op", "count", "ranks"}}
    return {"dimension": table["op"], "sent_per_gpu": table["sent"] / workers, **columns}


PULL = "pull"
"""A message that is for who gets it to ask for: a worker pulls, and a server sends."""


def _word(op: OpInfo) -> str:
    """What sort of op it is: a pull's request and its data are told apart."""
    if op.kind not in {"send", "recv"}:
        return op.kind
    first, _, rest = op.name.partition(" ")
    # A message of a pipeline is a send on one rank and a recv on another, and crosses its links once.
    return "pull request" if rest.startswith("request") else "send" if first == "recv" else first


def bytes_of_rank(op: OpInfo, world_size: int) -> tuple[float, float]:
    """(sent, received): bytes of payload of one rank for an op, mean over the members of its group."""
    if op.kind in {"compute", "send", "recv"}:
        return op.nbytes * (op.kind == "send"), op.nbytes * (op.kind == "recv")
    if (pairs := op.detail.get("between")) is not None:  # an uneven all-to-all says what it moves
        return op.nbytes * pairs, op.nbytes * pairs
    n = int(op.detail.get("group_size", world_size))
    algorithm = op.detail.get("algorithm")
    played = None if algorithm is None else str(algorithm)
    out, into = per_member(op.kind, n, played, int(op.detail.get("n_islands", 1)), op.nbytes)
    return op.nbytes * out, op.nbytes * into


class MemberBytes:
    """:func:`bytes_of_rank` of many ops: those that share their kind, bytes and detail are worked out once."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._known: dict[tuple[str, float, int], tuple[float, float]] = {}

    def __call__(self, op: OpInfo) -> tuple[float, float]:
        """(sent, received) [bytes]; the op is held by whoever asks."""
        key = op.kind, op.nbytes, id(op.detail)
        nbytes = self._known.get(key)
        if nbytes is None:
            nbytes = self._known[key] = bytes_of_rank(op, self._world_size)
        return nbytes


def _by_link_kind(use: LinkUse, row_of: Ints, n_rows: int) -> dict[str, Floats]:
    """Per kind of link that carried anything, (rows,) bytes on all links of that kind."""
    number, (links, weights, load) = {kind: k for k, kind in enumerate(LINK_KINDS)}, use.per_byte
    kind_of = np.array([number[kind] for kind in use.link_kinds], dtype=np.int64)[links]
    per_byte = np.bincount(load * len(number) + kind_of, weights=weights, minlength=len(use.loads) * len(number))
    moved = np.zeros(n_rows * len(use.loads))
    for first in range(0, len(use.transfer_op), AT_ONCE):
        chunk = slice(first, first + AT_ONCE)
        row = row_of[use.transfer_op[chunk]]
        of_load = row * len(use.loads) + use.transfer_load[chunk]
        counted = row >= 0
        moved += np.bincount(of_load[counted], weights=use.payload[chunk][counted], minlength=len(moved))
    total: Floats = np.zeros((n_rows, len(number)))
    total += moved.reshape(n_rows, len(use.loads)) @ per_byte.reshape(len(use.loads), len(number))
    return {kind: total[:, k] for kind, k in number.items() if total[:, k].any()}
