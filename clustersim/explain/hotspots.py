"""Where the network is busy: utilisation of each link over time, its peaks, and who used it.

Links that take the same part in every transfer (rails of a symmetric machine) have the same history, so it is computed
once for each distinct *part* and shared: a thousand GPUs have a hundred thousand links and a few dozen histories.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustersim.core.arrays import Columns, Floats, Ints
from clustersim.core.memo import kept_with_first
from clustersim.core.op_infos import of_each
from clustersim.core.timeline import LinkUse, Timeline
from clustersim.explain.metrics import steady_window
from clustersim.explain.transfers import sort_of

USERS = 3
"""How many users of a link are told."""
BINS = 200
"""Of the steady state, in each of which a link's mean utilisation is told."""


@dataclass(frozen=True, eq=False)
class LinkParts:
    """Links by the part they take in transfers.

    of : (links,) int, the part of each link; -1 for a link nothing crosses.
    loads : (parts,) lists of loads that cross it. weights : their bytes on the link per byte of payload.
    """

    of: Ints
    loads: list[Ints]
    weights: list[Floats]


def parts(use: LinkUse) -> LinkParts:
    """Group links by (load, weight) pairs."""
    mark = np.zeros(len(use.link_bandwidth), dtype=np.uint64)
    draw = np.random.default_rng(0)
    for links, weights in use.loads:
        token = draw.integers(1, 2**63, dtype=np.uint64)
        mark[links] += token * np.asarray(weights, dtype=np.float64).view(np.uint64) + token
    values, first, part_of = np.unique(mark, return_index=True, return_inverse=True)
    number = np.cumsum(values != 0) - 1
    column = np.where(values[part_of] != 0, number[part_of], -1).astype(np.int64)
    loads: list[list[int]] = [[] for _ in range(int((values != 0).sum()))]
    weights_of: list[list[float]] = [[] for _ in loads]
    example = {int(link): int(number[i]) for i, link in enumerate(first.tolist()) if values[i] != 0}
    for i, (links, weights) in enumerate(use.loads):
        for entry in np.flatnonzero(np.isin(links, np.array(list(example), dtype=np.int64))).tolist():
            loads[example[int(links[entry])]].append(i)
            weights_of[example[int(links[entry])]].append(float(weights[entry]))
    return LinkParts(column, [np.array(x, dtype=np.int64) for x in loads], [np.array(x) for x in weights_of])


def hotspots(timeline: Timeline, top: int = 10) -> Columns:
    """The busiest links of the steady state, of those with the same history the first; busiest first, ties by link id.

    Utilisation is capacity used over line rate, protocol overhead included.

    Returns columns for the ``top`` links: ``name``, ``bandwidth`` [bytes/s], ``utilisation`` (mean over the window),
    ``peak`` (at the highest instant), ``users`` (n, 3) names of the sorts of op that used it most and ``user_share``
    (n, 3), of its bytes; ``alike``, how many links have the same history and line rate; ``heat`` (n, BINS), mean
    utilisation in each bin; and for all links of the machine ``all_utilisation`` (links,). Nothing where a timeline
    has no links.
    """
    use = timeline.links
    if use is None or not len(use.segment_start):
        return {}
    steady = steady_window(timeline)
    window = steady.begin, steady.end
    link_parts = parts(use)
    bandwidth = use.link_bandwidth
    moved = _Moved(use, window)
    history = _histories(timeline, window)
    carried, peak = (np.array([h[k] for h in history] + [0.0])[link_parts.of] for k in (0, 1))
    utilisation = carried / (bandwidth * max(window[1] - window[0], 1e-30))
    kind, alike = _kinds(link_parts.of, bandwidth)
    order = np.argsort(-utilisation, kind="stable")[: int((utilisation > 0).sum())]
    order = order[np.sort(np.unique(kind[order], return_index=True)[1])][:top]
    part_of = link_parts.of[order].tolist()
    users = [_users_of(timeline, moved, link_parts.loads[part], link_parts.weights[part]) for part in part_of]
    heat = np.array([history[part][2] for part in part_of]).reshape(-1, BINS)
    return {
        "name": np.array([use.link_names[i] for i in order.tolist()]),
        "bandwidth": bandwidth[order],
        "utilisation": utilisation[order],
        "peak": peak[order] / bandwidth[order],
        "users": np.array([names for names, _ in users]).reshape(-1, USERS),
        "user_share": np.array([shares for _, shares in users]).reshape(-1, USERS),
        "alike": alike[kind[order]],
        "heat": heat / bandwidth[order][:, None],
        "all_utilisation": utilisation,
    }


def _kinds(part_of: Ints, bandwidth: Floats) -> tuple[Ints, Ints]:
    """(links,) the kind of each, and (kinds,) how many are of it: those with one history and one line rate, for of
    another rate a link is less full, or more."""
    _, kind, count = np.unique(np.stack([part_of, bandwidth]), axis=1, return_inverse=True, return_counts=True)
    return kind.reshape(-1), count


class _Moved:
    """What transfers moved between two times [s], by segment: of few loads, the others are not looked at."""

    def __init__(self, use: LinkUse, window: tuple[float, float]) -> None:
        self.use = use
        self.start = np.clip(use.segment_start, *window)
        self.end = np.clip(use.segment_end, *window)
        self.load = use.transfer_load[use.segment_transfer]
        self.op = use.transfer_op[use.segment_transfer]
        self._order = np.argsort(self.load, kind="stable")
        self._ptr = np.searchsorted(self.load[self._order], np.arange(len(use.loads) + 1)).tolist()

    def of(self, loads: Ints, weights: Floats) -> tuple[Ints, Floats]:
        """Segments of some loads, in order, and the weight of each."""
        weight = np.zeros(len(self.use.loads))
        weight[loads] = weights
        chosen = np.flatnonzero(weight > 0).tolist()
        stretches = [self._order[self._ptr[load] : self._ptr[load + 1]] for load in chosen]
        segments = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *stretches]))
        return segments, weight[self.load[segments]]


@kept_with_first(maxsize=1)
def _histories(timeline: Timeline, window: tuple[float, float]) -> list[tuple[float, float, Floats]]:
    """:func:`_history` of each part."""
    use = timeline.links
    if use is None:
        return []
    link_parts = parts(use)
    moved = _Moved(use, window)
    times = np.linspace(*window, BINS + 1)
    return [_history(moved, *part, times) for part in zip(link_parts.loads, link_parts.weights, strict=True)]


def _history(moved: _Moved, loads: Ints, weights: Floats, times: Floats) -> tuple[float, float, Floats]:
    """Of one part in a window: bytes, highest rate [bytes/s], and mean rate in each bin [bytes/s]."""
    segments, share = moved.of(loads, weights)
    used = moved.end[segments] > moved.start[segments]
    segments = segments[used]
    rate = moved.use.segment_rate[segments] * share[used]
    start = moved.start[segments]
    end = moved.end[segments]
    if not len(rate):
        return 0.0, 0.0, np.zeros(len(times) - 1)
    moments = np.unique(np.concatenate([times, start, end]))
    change = np.zeros(len(moments))
    np.add.at(change, np.searchsorted(moments, start), rate)
    np.add.at(change, np.searchsorted(moments, end), -rate)
    level = np.maximum(np.cumsum(change)[:-1], 0.0)
    carried = np.concatenate([[0.0], np.cumsum(level * np.diff(moments))])
    per_bin = np.diff(carried[np.searchsorted(moments, times)]) / np.maximum(np.diff(times), 1e-30)
    return float(carried[-1]), float(level.max()), per_bin


@kept_with_first(maxsize=None)
def _sorts(timeline: Timeline) -> tuple[list[str], Ints]:
    """Names of the sorts of op (without numbers), and (n_ops,) which each is."""
    numbers: dict[str, int] = {}
    of_op = of_each(timeline.ops, lambda op: numbers.setdefault(sort_of(op.name), len(numbers)), np.int64)
    return list(numbers), of_op


def _users_of(timeline: Timeline, moved: _Moved, loads: Ints, weights: Floats) -> tuple[list[str], list[float]]:
    """The sorts of op (names without numbers) that put most bytes on the links of a part, with their shares."""
    names, sorts = _sorts(timeline)
    segments, weight = moved.of(loads, weights)
    nbytes = moved.use.segment_rate[segments] * (moved.end[segments] - moved.start[segments]) * weight
    per_op = np.bincount(moved.op[segments], weights=nbytes, minlength=len(timeline.ops))
    ops = np.flatnonzero(per_op > 0)
    per_sort: list[float] = np.bincount(sorts[ops], weights=per_op[ops], minlength=len(names)).tolist()
    used, first = np.unique(sorts[ops], return_index=True)
    in_order = used[np.argsort(first)].tolist()  # of their first ops: sums in another order would be other bits
    total = sum(per_sort[k] for k in in_order)
    best = sorted(((names[k], per_sort[k]) for k in in_order), key=lambda item: (-item[1], item[0]))[:USERS]
    best += [("", 0.0)] * (USERS - len(best))
    return [name for name, _ in best], [value / total if total else 0.0 for _, value in best]
