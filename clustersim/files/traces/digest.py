"""What a trace says: its collectives with transfer time and skew, its compute share, and what it seems to wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from clustersim.collectives.base import bus_factor
from clustersim.core.program import COMM_STREAM, DATA_LOADER
from clustersim.core.timeline import Timeline
from clustersim.explain.bounds import transfers_unknown
from clustersim.explain.last_rank import last_to_most
from clustersim.explain.metrics import SteadyWindow, steady_window
from clustersim.explain.occupancy import occupancy, whole_window
from clustersim.files.traces.joining import skipped_of
from clustersim.files.traces.samples import Sample, Samples

LAUNCH_BOUND = 0.25
"""Share of the window the GPU idles for late launch calls from which a trace is called launch-bound."""


WAITS_FOR_DATA = 0.05
"""Share of the window that ranks wait for their data loaders from which it is told."""
SHARES = ("compute_s", "communication_s", "peer_wait_s", "exposed_transfer_s", "exposed_communication_s")
"""The states of :mod:`clustersim.explain.occupancy` that are told: computing, transferring, waiting for a peer, and of
the transfers what no kernel hides."""


class RepeatedCollective(msgspec.Struct, frozen=True):
    """Collectives of one kind, size, type and group: how often, medians and extremes over the repeats [s], and the bus
    bandwidth [bytes/s]; None: nobody knows. ``waiting_included`` : a transfer's time has the wait for peers in it."""

    kind: str
    nbytes: float
    dtype: str
    group_size: int
    count: int
    waiting_included: bool
    transfer_s: float
    transfer_min_s: float
    skew_s: float | None
    skew_max_s: float | None
    busbw: float | None


class RunDigest(msgspec.Struct, frozen=True, tag_field="what", tag="timeline"):
    """What a measured Timeline says: seconds, and shares of the window for each rank that was measured.

    ``whole_s`` : from the first span to the last. ``window_s`` : of that without the warm-up, which all shares are of.
    ``peer_wait_share`` : collectives wait, beside a kernel or not; ``waiting_for_peer_share`` : beside none, as in
    :mod:`clustersim.explain.breakdown`. Shares of communication are empty where nobody knows them: collectives were
    seen, and none could be read.
    """

    source: str
    world_size: int
    ranks_measured: int
    steps: list[int]
    whole_s: float
    window_s: float
    compute_share: list[float]
    communication_share: list[float]
    exposed_transfer_share: list[float]
    peer_wait_share: list[float]
    waiting_for_peer_share: list[float]
    waiting_for_launch_share: float | None
    clock_offset_s: float
    collectives: list[RepeatedCollective]
    skipped: Mapping[str, int]
    hints: list[str]


class SampleSeries(msgspec.Struct, frozen=True):
    """Measured collectives of one kind on one set of ranks: sizes [bytes], the shortest time [s], and the largest bus
    bandwidth [bytes/s]; None: nobody knows."""

    kind: str
    ranks: int | None
    nodes: int | None
    launch: str
    version: str
    rows: int
    smallest_bytes: float
    largest_bytes: float
    fastest_s: float
    busbw_max: float | None


class SampleDigest(msgspec.Struct, frozen=True, tag_field="what", tag="samples"):
    """What a table of measured collectives says."""

    source: str
    rows: int
    tables: list[SampleSeries]
    skipped: Mapping[str, int]
    notes: list[str]


def of_samples(samples: Samples) -> SampleDigest:
    """What Samples say, a row for each kind, set of ranks, launch and version."""
    groups: defaultdict[tuple[Any, ...], list[Sample]] = defaultdict(list)
    for row in samples.rows:
        groups[row.kind, row.ranks, row.nodes, row.launch, row.version].append(row)
    tables = []
    for (kind, ranks, nodes, launch, version), rows in groups.items():
        sizes = [row.nbytes for row in rows]
        fastest = min(row.seconds for row in rows)
        busbw = max((row.busbw for row in rows if row.nbytes and row.busbw == row.busbw), default=None)
        tables.append(
            SampleSeries(kind, ranks, nodes, launch, version, len(rows), min(sizes), max(sizes), fastest, busbw)
        )
    return SampleDigest(samples.source, len(samples), tables, dict(samples.skipped), list(samples.notes))


def of_run(run: Timeline) -> RunDigest:
    """What a measured Timeline says. Shares are of :func:`clustersim.explain.metrics.steady_window`, as in the totals
    of :mod:`clustersim.studies.replay`."""
    measured = np.unique(run.spans()["rank"])
    steady = steady_window(run)
    window = steady.length
    occupied = occupancy(run, measured, steady.begin, steady.end)
    compute, comm, waits, exposed, beside_nothing = (
        (occupied[state] / window if window else occupied[state]).tolist() for state in SHARES
    )
    collectives = _collectives(run)
    skipped = skipped_of(run)
    if transfers_unknown(run):
        comm, waits, exposed, beside_nothing = ([], [], [], [])
    return RunDigest(
        source=run.source,
        world_size=run.world_size,
        ranks_measured=len(measured),
        steps=sorted({op.step for op in run.ops}),
        whole_s=whole_window(run),
        window_s=window,
        compute_share=compute,
        communication_share=comm,
        exposed_transfer_share=exposed,
        peer_wait_share=waits,
        waiting_for_peer_share=[both - moving for both, moving in zip(beside_nothing, exposed, strict=True)],
        waiting_for_launch_share=run.stats.get("waiting_for_launch_share"),
        clock_offset_s=run.stats.get("clock_offset_s", 0.0),
        collectives=collectives,
        skipped=skipped,
        hints=[*_hints(run, compute, waits, len(measured)), *_of_loaders(run, steady)],
    )


def _collectives(run: Timeline) -> list[RepeatedCollective]:
    length = run.row_end - run.row_ready
    first = {int(op): i for i, op in reversed(list(enumerate(run.row_op.tolist())))}
    groups: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, op in enumerate(run.ops):
        if op.kind != "compute" and (op.stream == COMM_STREAM or "transfer_s" in op.detail):
            d = op.detail
            groups[op.kind, op.nbytes, d.get("dtype", ""), d.get("group_size", run.world_size)].append(number)
    rows = []
    for (kind, nbytes, dtype, size), numbers in sorted(groups.items(), key=lambda g: -len(g[1]) * g[0][1]):
        details = [run.ops[n].detail for n in numbers]
        complete = [d for d in details if "transfer_s" in d]
        seconds = [d["transfer_s"] for d in complete] or [float(length[first[n]]) for n in numbers]
        skews = [d["skew_s"] for d in complete]
        median = float(np.median(seconds))
        skew, most = (float(np.median(skews)), max(skews)) if skews else (None, None)
        busbw = nbytes / median * bus_factor(kind, size) if nbytes and median > 0 and size else None
        times = median, min(seconds), skew, most
        rows.append(RepeatedCollective(kind, nbytes, dtype, size, len(numbers), not complete, *times, busbw))
    return rows


def _hints(run: Timeline, compute: list[float], waits: list[float], measured: int) -> Iterator[str]:
    if measured < run.world_size:
        yield (
            f"{measured} of {run.world_size} ranks: a collective's shortest time over these may still hold waiting; "
            "add the other ranks' files"
        )
    offset = run.stats.get("clock_offset_s", 0.0)
    if offset:
        yield f"clocks of ranks differ by up to {offset * 1e3:.3g} ms; aligned by the ends of their collectives"
    late = run.stats.get("waiting_for_launch_share", 0.0)
    if late > LAUNCH_BOUND:
        yield (
            f"launch-bound: {100 * late:.0f} % of the window the compute stream idles for a launch call that came "
            "late; faster links would not help these"
        )
    if waits and np.mean(waits) > 0.1:
        share = f"{100 * float(np.mean(waits)):.0f} % of the window, beside kernels or not"
        yield f"collectives wait for peers {share}: uneven work, not slow links{_last(run)}"
    if compute and np.mean(compute) < 0.2:
        shares = dict.fromkeys(f"{100 * share:.0f}" for share in (min(compute), max(compute)))
        yield f"the compute stream is busy {' to '.join(shares)} % of the window only"


def _of_loaders(run: Timeline, window: SteadyWindow) -> Iterator[str]:
    """That ranks wait for their data loaders, where profiles name them and it is not little."""
    spans = run.spans()
    loads = np.array([op.name == DATA_LOADER for op in run.ops], dtype=np.bool_)[spans["op"]]
    inside = np.minimum(spans["end"], window.end) - np.maximum(spans["start"], window.begin)
    seconds = float(np.clip(inside, 0.0, None)[loads].sum()) / len(np.unique(spans["rank"]))
    if seconds > WAITS_FOR_DATA * window.length:
        share = f"{100 * seconds / window.length:.0f} % of the window"
        yield f"ranks wait for their data loaders {share}: more workers, cheaper samples"


def _last(run: Timeline) -> str:
    """Whom most collectives wait for, where one rank is the last to most of them; else nothing."""
    last = last_to_most(run)
    return "" if last is None else f"; {last}"
