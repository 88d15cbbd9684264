"""What holds a transfer: a link, the kernels that drive it, its fixed latency, or others on the same link."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.memo import kept_with_first
from clustersim.core.op_infos import kind_of, kinds, of_each
from clustersim.core.timeline import LinkUse, OpInfo, Timeline

CONTENDED = 0.97
"""Below this share of the rate it would have alone, a transfer shares its links."""
LATENCY_SHARE = 0.5
"""Above this share of its time in latency, bandwidth does not matter much to a transfer."""
LONGER = 1.1
"""A load that flows so many times as long as an op's earlier ones is what the op waits for."""


CHANGED = "changed link"
OF_LINKS = ("link", "shared link", CHANGED)
"""What of its links holds a transfer: what one carries, that others use it as well, that its rate changes."""


class TransferFacts(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Of one op's transfers, all groups together.

    Parameters
    ----------
    seconds : float [s], of one transfer, mean. latency : float [s], the part before bytes flow.
    rate : float [bytes/s] of payload while bytes flow; alone : what the links allow with nobody else on them.
    ceiling : float [bytes/s], what the kernels sustain; inf for no limit.
    link : the link that allows least (-1: unknown); of a transfer that is slower than its links allow at their own
        rate, the one of them whose rate changed, if any did. runner_up : the next narrowest of another sort, and what
        it allows.
    limit : one of :data:`OF_LINKS`, ``"latency"``, ``"kernels"`` or ``"unknown"``.
    """

    seconds: float
    latency: float
    rate: float
    alone: float
    ceiling: float
    link: int
    runner_up: tuple[int, float]
    limit: str


@kept_with_first(maxsize=None)
def transfer_facts(timeline: Timeline) -> dict[int, TransferFacts]:
    """Facts of every op that transfers something, by index in :attr:`Timeline.ops`."""
    use = timeline.links
    spans = timeline.per_op()
    nobody = np.full(len(timeline.ops), np.nan)
    seconds = np.divide(spans["seconds"], spans["ranks"], out=nobody, where=spans["ranks"] > 0)
    flows = _flows(use, len(timeline.ops)) if use is not None and len(use.segment_start) else None
    of_kind = kinds(timeline.ops)
    sends = of_each(timeline.ops, lambda op: op.kind != "compute", np.bool_)
    places = np.flatnonzero(sends & ~np.isnan(seconds))
    booked = np.full(len(timeline.ops), -1) if flows is None else flows.load
    facts = {}
    for i, kind, took in zip(
        places.tolist(), kind_of(timeline.ops)[places].tolist(), seconds[places].tolist(), strict=True
    ):
        op = of_kind[kind]
        owner = i
        if booked[i] < 0:  # of several that meet, on one
            owner = next((int(o) for o in op.detail.get("meets", ()) if booked[int(o)] >= 0), i)
        facts[i] = _facts(op, took, use, flows, owner)
    return facts


@dataclass(frozen=True, eq=False)
class _OpFlows:
    """Per op: the load that holds it longest, and of this load's transfers payload bytes and seconds of flow; per
    load: what its links allow."""

    moved: Floats
    flowing: Floats
    load: Ints
    narrowest: list[tuple[int, float, int, float]]


def _flows(use: LinkUse, n_ops: int) -> _OpFlows:
    span = use.segment_end - use.segment_start
    carried = use.segment_rate * span
    n = len(use.transfer_op)
    flowing = np.bincount(use.segment_transfer, weights=span, minlength=n).astype(np.float64)
    moved = np.bincount(use.segment_transfer, weights=carried, minlength=n).astype(np.float64)
    return _slowest(use, moved, flowing, n_ops)


def _slowest(use: LinkUse, moved: Floats, flowing: Floats, n_ops: int) -> _OpFlows:
    """Of each op the load that flows longest, its first one where others take about as long: transfers inside a
    machine are over soon, and do not say what those over the network wait for. ``moved``, ``flowing`` : of each
    transfer, payload bytes and seconds."""
    n_loads = max(1, len(use.loads))
    pairs, first, pair_of = np.unique(
        use.transfer_op.astype(np.int64) * n_loads + use.transfer_load, return_index=True, return_inverse=True
    )
    seconds = np.bincount(pair_of, weights=flowing, minlength=len(pairs))
    each = seconds / np.bincount(pair_of, minlength=len(pairs))
    nbytes = np.bincount(pair_of, weights=moved, minlength=len(pairs))
    of_op = _OpFlows(
        np.zeros(n_ops),
        np.zeros(n_ops),
        np.full(n_ops, -1, dtype=np.int64),
        [narrowest(use, i) for i in range(len(use.loads))],
    )
    longest = np.zeros(n_ops)
    op_of = pairs // n_loads
    alone = np.bincount(op_of, minlength=n_ops)[op_of] == 1  # most ops have one load
    of_op.load[op_of[alone]] = pairs[alone] % n_loads
    of_op.moved[op_of[alone]], of_op.flowing[op_of[alone]] = nbytes[alone], seconds[alone]
    several = np.flatnonzero(~alone)
    for pair in several[np.argsort(first[several], kind="stable")].tolist():
        op = int(op_of[pair])
        if of_op.load[op] < 0 or each[pair] > LONGER * longest[op]:
            longest[op] = each[pair]
            of_op.load[op] = int(pairs[pair] % n_loads)
            of_op.moved[op], of_op.flowing[op] = nbytes[pair], seconds[pair]
    return of_op


def narrowest(use: LinkUse, load: int) -> tuple[int, float, int, float]:
    """Of one load: the link that allows the least payload [bytes/s] and how much, then the same for links of another
    sort (names alike but for numbers). -1 and inf where there is none."""
    links, weights = use.loads[load]
    if not len(links):
        return -1, np.inf, -1, np.inf
    allowed = use.link_bandwidth[links] / weights
    first = int(np.argmin(allowed))
    own = sort_of(use.link_names[int(links[first])])
    order = np.argsort(allowed, kind="stable")
    # Links of one sort mostly allow the same: look at the first few of each distinct rate.
    seen: set[float] = set()
    for i in order.tolist():
        value = round(float(allowed[i]), 3)
        if value in seen:
            continue
        seen.add(value)
        if sort_of(use.link_names[int(links[i])]) != own:
            return int(links[first]), float(allowed[first]), int(links[i]), float(allowed[i])
    return int(links[first]), float(allowed[first]), -1, np.inf


@lru_cache(maxsize=2**16)
def sort_of(name: str) -> str:
    """A link's name without its numbers: ``"node#/nic# -> leaf#"``."""
    return re.sub(r"\d+", "#", name)


def _changed(use: LinkUse, load: int, narrow: int) -> int:
    """Of the links of a load whose rate changed during the run the one that allows least; ``narrow`` where none did."""
    links, weights = use.loads[load]
    changing = np.isin(links, use.changing)
    if not changing.any():
        return narrow
    return int(links[changing][np.argmin(use.link_bandwidth[links[changing]] / weights[changing])])


def _facts(op: OpInfo, seconds: float, use: LinkUse | None, flows: _OpFlows | None, owner: int) -> TransferFacts:
    latency = float(op.detail.get("latency", np.nan))
    ceiling = float(op.detail.get("ceiling", np.inf))
    if flows is None or use is None or flows.load[owner] < 0 or flows.flowing[owner] <= 0:
        limit = "latency" if latency > LATENCY_SHARE * seconds else "unknown"
        return TransferFacts(seconds, latency, np.nan, np.nan, ceiling, -1, (-1, np.inf), limit)
    rate = float(flows.moved[owner] / flows.flowing[owner])
    link, alone, runner_up, allowed = flows.narrowest[int(flows.load[owner])]
    if latency > LATENCY_SHARE * seconds:
        limit = "latency"
    elif rate < CONTENDED * min(alone, ceiling):
        link = _changed(use, int(flows.load[owner]), link)
        limit = CHANGED if link in use.changing else "shared link"
    else:
        limit = "link" if alone <= ceiling else "kernels"
    return TransferFacts(seconds, latency, rate, alone, ceiling, link, (runner_up, allowed), limit)
