"""Ring: everybody sends to the next and receives from the one before, all at once.

all_reduce is a reduce-scatter and an all-gather, each n - 1 steps of S/n: 2 (n-1)/n S leave every member, whatever n
(Patarasuk and Yuan 2009). Per channel the tensor is cut into n blocks; block ``b`` sets out from the member after its
owner, gathers a contribution at every hop, arrives complete at its owner, and goes round once more. broadcast and
reduce are pipelines along the same ring, open before or behind the root (NCCL src/device/{broadcast,reduce}.h).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from clustersim.collectives.base import Algorithm, Apart, Channel, EdgeCosts, Group, Request, Traffic, TransferSchedule
from clustersim.collectives.build import RailChannel, ScheduleWriter, least_sent, pieces, traffic_of
from clustersim.collectives.front import few_enough, pipeline_fill
from clustersim.collectives.islands import n_islands
from clustersim.collectives.waves import Wave, Waves
from clustersim.core.arrays import Floats, Ints

KINDS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"})
_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
    """Every ring edge carries (n-1)/n of its channel per pass; a pipeline's n - 1 edges carry all of it."""
    n = group.size
    parts = []
    for channel in channels:
        src, rail = _from_root(request, channel)
        dst = np.roll(src, -1)
        if request.kind in _PASSES:
            parts.append((src, dst, _PASSES[request.kind] * (n - 1) / n * channel.share, rail))
        else:
            parts.append((src[:-1], dst[:-1], channel.share, rail[:-1]))
    passes = _PASSES.get(request.kind, 1)
    return traffic_of(parts, passes * (n - 1), passes * _net_steps(request, group))


def _net_steps(request: Request, group: Group) -> int:
    """Network hops a byte makes in one trip round the ring."""
    n = n_islands(group)
    if n == 1:
        return 0
    return n - 1 if request.kind not in _PASSES or n == group.size else n


def _from_root(request: Request, channel: Channel) -> tuple[Ints, Ints]:
    """Ring order and rail of each leaving edge; a pipeline's starts at the root, or ends there for reduce."""
    order = channel.order
    rail = channel.edge_rails
    if request.kind in _PASSES:
        return order, rail
    root = int(np.flatnonzero(order == request.root)[0])
    shift = -root if request.kind == "broadcast" else -(root + 1)
    return np.roll(order, shift), np.roll(rail, shift)


def schedule(request: Request, group: Group, channels: tuple[Channel, ...]) -> TransferSchedule:
    """Every transfer. A step's send waits only for what it forwards."""
    if request.kind in _PASSES:
        return _laps(request.kind, group.size, channels)
    writer = ScheduleWriter()
    fractions: list[float] = []
    for c, channel in enumerate(channels):
        k = pieces(request.nbytes * channel.share)
        _pipeline(writer, request, channel, c, len(fractions), k)
        fractions += [channel.share / k] * k
    return writer.done(np.array(fractions))


def _laps(kind: str, n: int, channels: tuple[Channel, ...]) -> TransferSchedule:
    """Channel by channel, step by step: at each, position i receives from position i - 1 what that received before.

    Reducing, position i - 1 passes on block i - step - 2; gathering, block i - step - 1. Whole columns at once: a ring
    of a thousand ranks has two million sends.
    """
    step, position = (axis.ravel() for axis in np.indices((_PASSES[kind] * (n - 1), n)))
    reduce = (step < n - 1) & (kind != "all_gather")
    passed = np.where(reduce, step + 2, step + 1 - (n - 1 if kind == "all_reduce" else 0))
    block = (position - passed) % n
    before = (step - 1) * n + (position - 1) % n  # what arrived there in the step before
    count = len(step)
    waits = step > 0
    base = np.arange(len(channels))[:, None]
    order = np.stack([channel.order for channel in channels])
    rails = np.stack([channel.edge_rails for channel in channels])
    return TransferSchedule(
        src=order[:, position - 1].ravel(),
        dst=order[:, position].ravel(),
        chunk=(base * n + order[:, block]).ravel(),
        n_chunks=len(channels) * n,
        reduce=np.tile(reduce, len(channels)),
        after_ptr=np.concatenate([[0], np.cumsum(np.tile(waits, len(channels)))]),
        after=(base * count + before[waits]).ravel(),
        rail=rails[:, position - 1].ravel(),
        chunk_fraction=np.repeat([channel.share / n for channel in channels], n),
        lane=(base * n + position).ravel(),
    )


def waves(request: Request, group: Group, channels: tuple[Channel, ...]) -> Waves | None:
    """The laps of :func:`schedule`, a wave a step; None for pipelines. A slot is a place in a ring."""
    if request.kind not in _PASSES:
        return None
    n = group.size
    steps = _PASSES[request.kind] * (group.size - 1)
    order = np.stack([channel.order for channel in channels])
    return Waves(
        src=np.roll(order, 1, axis=1).ravel(),
        dst=order.ravel(),
        rail=np.roll(np.stack([channel.edge_rails for channel in channels]), 1, axis=1).ravel(),
        fraction=np.repeat([channel.share / n for channel in channels], n),
        n_slots=order.size,
        n_transfers=order.size * steps,
        each=partial(_steps, n, steps, len(channels)),
    )


def _steps(n: int, steps: int, n_channels: int) -> Iterator[Wave]:
    channel, position = (axis.ravel() for axis in np.indices((n_channels, n)))
    first = channel * steps * n + position
    position_now = channel * n + position
    before = channel * n + (position - 1) % n
    for step in range(steps):
        yield Wave(first + step * n, slice(None), before, position_now, False)


def _pipeline(writer: ScheduleWriter, request: Request, channel: Channel, c: int, base: int, k: int) -> None:
    order, rail = (column.tolist() for column in _from_root(request, channel))
    for piece in range(k):
        before: list[int] = []
        for i in range(len(order) - 1):
            rail_channel = RailChannel(rail[i], c)
            adds = request.kind == "reduce"
            before = [writer.send(order[i], order[i + 1], base + piece, after=before, reduce=adds, way=rail_channel)]


def fill(request: Request, group: Group, channels: tuple[Channel, ...], costs: EdgeCosts) -> float:
    """Seconds beyond the bytes of the slowest edge: the longest way through the recursion of the steps.

    Step t leaves position i when block and link are free: ``x[t, i] = max(x[t-1, i-1] + hop, x[t-1, i]) + block time``.
    """
    if request.kind not in _PASSES:
        return _pipeline_fill(request, group, channels, costs)
    hop = costs.hop
    slowest = float(costs.busy.max(initial=0.0))
    # A link that is seldom busy is seldom shared: between having it alone and sharing it go by its use. Written so that
    # the slowest edge has exactly its own time, and no rounding makes the rest negative.
    busy = costs.busy - (costs.busy - costs.alone) * (1.0 - costs.busy / (slowest or 1.0))
    steps = _PASSES[request.kind] * (group.size - 1)
    edges = group.size
    rings = [slice(first, first + edges) for first in range(0, len(hop), edges)]
    ends = [_beyond_stays(hop[ring], busy[ring] / steps, steps) + (float(busy[ring].max()) - slowest) for ring in rings]
    return max(ends, default=0.0)


def _pipeline_fill(request: Request, group: Group, channels: tuple[Channel, ...], costs: EdgeCosts) -> float:
    """Of broadcast and reduce. Where there are too many edges to follow, each channel by itself."""
    depth = np.array([pieces(request.nbytes * channel.share) for channel in channels])
    flow = traffic(request, group, channels)
    edges = group.size - 1
    if few_enough(len(flow.src), flow.steps):
        edge = np.arange(len(flow.src))
        before = edge[(edge + 1) % edges > 0]
        return pipeline_fill(flow, group, request.nbytes, np.repeat(depth, edges), (before, before + 1), costs)
    slowest = float(costs.busy.max(initial=0.0))
    use = costs.busy / (slowest or 1.0)
    # A piece has the link alone in the time it is not in use, and shares it in the rest.
    pace = (1.0 - use) / np.maximum(costs.alone, 1e-30) + use / np.maximum(costs.busy, 1e-30)
    busy = np.where(costs.busy < slowest, 1.0 / pace, slowest)
    ends = [
        _beyond_slowest(costs.hop[first : first + edges], busy[first : first + edges], k)
        + float(busy[first : first + edges].max())
        for first, k in zip(range(0, len(costs.hop), edges), depth.tolist(), strict=True)
    ]
    return max(0.0, max(ends, default=slowest) - slowest)


def _beyond_slowest(hop: Floats, busy: Floats, k: int) -> float:
    """Seconds beyond the slowest edge's: the first of k pieces crosses every edge, the others follow at its pace."""
    return float(hop.sum() + (busy.sum() - busy.max()) / k)


def _beyond_stays(hop: Floats, block: Floats, steps: int) -> float:
    """Longest of all ways of ``steps`` sends, beyond as many at the slowest edge: each is either the next edge's (the
    block moves on) or the same edge's again.

    Staying costs the edge's block time; moving on costs the hop too. If once round costs more than as many stays at the
    slowest edge, the longest way circulates; else it stays there, and walks only where that pays.
    """
    n = len(hop)
    slow = int(np.argmax(block))
    gain = hop + (block - block[slow])  # of moving on, against a stay at the slowest edge; there it is the hop
    if float(gain.sum()) > n * block[slow] * 1e-12:
        laps, rest = divmod(steps, n)
        ends = np.concatenate([[0.0], np.cumsum(np.concatenate([gain, gain]))])
        return laps * float(gain.sum()) + max(0.0, float((ends[rest : rest + n] - ends[:n]).max()))
    gain = np.roll(gain, -slow)  # gain[0]: leaving the slowest edge after the last stay there
    onward = float(np.cumsum(gain[:steps]).max())
    back = float(np.cumsum(gain[:0:-1][: steps - 1]).max(initial=0.0))
    return onward + back


_SHARED = "streams of several channels share links, and the last ones to end wait for pieces of others"
APART = (
    Apart(frozenset({"broadcast"}), 0.05, _SHARED),
    Apart(frozenset({"reduce"}), 0.06, _SHARED),
)

RING = Algorithm("ring", KINDS, traffic, least_sent, schedule, fill=fill, waves=waves, apart=APART)
