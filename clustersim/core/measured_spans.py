"""What a log measured of its machine: which collectives, of which sizes, over how many nodes, and how it was started.

Constants that are fitted to a log are known where the log has rows. Elsewhere a prediction with them is no better known
than one without, so whoever says how far it may be off must know what was measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from clustersim.core.errors import several
from clustersim.core.units import format_bytes

BEYOND = 4.0
"""How far a log's sizes tell of others."""

NOT_RECORDED = "what the constants were fitted to is not recorded; calibrate again"
"""Of a calibrated file from before spans were written."""


class MeasuredSpan(msgspec.Struct, frozen=True):
    """Rows of one collective on one number of ranks.

    Parameters
    ----------
    kind : as :class:`clustersim.collectives.Request`. nodes, ranks : that took part. smallest, largest : float [bytes],
    S of the ends. rows : timed calls. launch : how the job was started, as the log says; empty where it does not.
    version : (major, minor) of NCCL, as the log says; None where it does not.
    """

    kind: str
    nodes: int
    ranks: int
    smallest: float
    largest: float
    rows: int
    launch: str = ""
    version: tuple[int, int] | None = None

    def holds(self, nbytes: float) -> bool:
        """Whether the rows tell of this size: it is within :data:`BEYOND` times of them."""
        return self.smallest / BEYOND < nbytes < self.largest * BEYOND


def stretches(sizes: Iterable[float]) -> Iterator[list[float]]:
    """Sizes [bytes], sorted, in stretches between which there are sizes that none of them tells of.

    >>> list(stretches([8.0, 64.0, 2.0**30]))
    [[8.0, 64.0], [1073741824.0]]
    """
    stretch: list[float] = []
    for size in sorted(sizes):
        if stretch and size > stretch[-1] * BEYOND**2:
            yield stretch
            stretch = []
        stretch.append(size)
    if stretch:
        yield stretch


def outside(
    spans: Sequence[MeasuredSpan], kind: str, nbytes: float, nodes: int, ranks: int | None = None, launch: str = ""
) -> str:
    """Why spans say nothing of a collective, in words; empty where they do.

    ``nbytes`` : S [bytes]. ``ranks`` : None: as many on a node as were measured. ``launch`` : how the job is started,
    where that matters.
    """
    of_kind = [span for span in spans if span.kind == kind]
    if not of_kind:
        return f"{kind} was not in the log"
    near = [span for span in of_kind if (span.nodes > 1) is (nodes > 1)]
    if not near:
        place = "between nodes" if nodes > 1 else "inside one node"
        return f"{kind} {place} was not in the log"
    most = max(span.nodes for span in near)
    if nodes > most:
        return f"{kind} over {nodes} nodes was not in the log, which has {most} at most"
    least = min(span.nodes for span in near)
    if nodes < least:
        return f"{kind} over {nodes} nodes was not in the log, which has {least} at least"
    most_a_node = max(span.ranks / span.nodes for span in near)
    if ranks is not None and ranks / nodes > most_a_node:
        return f"{kind} by {ranks / nodes:g} ranks a node was not in the log, which has {most_a_node:g} at most"
    launches = {span.launch for span in near if span.holds(nbytes)}
    if launches:
        is_alike = not launch or launches & {"", launch}
        return "" if is_alike else f"no small {kind} of a job started as {launch} was in the log"
    below = max((span.largest for span in near if span.largest < nbytes), default=0.0)
    above = min((span.smallest for span in near if span.smallest > nbytes), default=0.0)
    if not below:
        interval = f"below {format_bytes(above)}"
    elif not above:
        interval = f"above {format_bytes(below)}"
    else:
        interval = f"between {format_bytes(below)} and {format_bytes(above)}"
    return f"sizes {interval} were not in the log ({kind})"


class LogLaunch(msgspec.Struct, frozen=True):
    """How a log's job was started: ``launch`` and ``version`` of NCCL as of :class:`MeasuredSpan`; ``other_modes`` :
    launches that fewer of its rows have."""

    launch: str
    version: tuple[int, int] | None
    other_modes: tuple[str, ...] = ()


def usual_launch_of(spans: Sequence[MeasuredSpan], kind: str, nodes: int, launch: str = "") -> LogLaunch | None:
    """How most rows were started: of the collective and the place, where the log has them. None of no spans.

    ``launch`` : where it is chosen; then of rows that were started so, where there are any.
    """
    near = [span for span in spans if span.launch == launch] if launch else []
    near = near or list(spans)
    for chosen in (
        [span for span in near if span.kind == kind and (span.nodes > 1) is (nodes > 1)],
        [span for span in near if span.kind == kind],
        near,
    ):
        if chosen:
            counts: Counter[tuple[str, tuple[int, int] | None]] = Counter()
            for span in chosen:
                counts[span.launch, span.version] += span.rows
            (mode, version), _ = max(counts.items(), key=lambda item: item[1])
            return LogLaunch(mode, version, tuple(other for other in launches_of(chosen) if other != mode))
    return None


def span_words(spans: Sequence[MeasuredSpan]) -> Iterator[str]:
    """A line for each collective and number of ranks: sizes and rows."""
    for span in spans:
        sizes = f"{format_bytes(span.smallest)} to {format_bytes(span.largest)}"
        version = "" if span.version is None else version_words(span.version)
        how = ", ".join(word for word in (span.launch, version) if word)
        rows = f"{span.rows} rows ({how})" if how else f"{span.rows} rows"
        yield f"{span.kind} of {sizes} over {several(span.nodes, 'node')}, {span.ranks} ranks: {rows}"


def version_words(version: tuple[int, int], library: str = "NCCL") -> str:
    """The version of NCCL, or of RCCL.

    >>> version_words((2, 28))
    'NCCL 2.28'
    """
    return f"{library} {version[0]}.{version[1]}"


def launches_of(spans: Iterable[MeasuredSpan]) -> tuple[str, ...]:
    """How the jobs were started, each once; empty where no row says it."""
    return tuple(dict.fromkeys(span.launch for span in spans if span.launch))


USUAL_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "sendrecv")
"""Collectives that a reader is told of where a log has them not."""
USUAL_SIZES = (2.0**8, 2.0**32)
"""[bytes] beyond which nobody misses a size."""


def missing_words(spans: Sequence[MeasuredSpan]) -> Iterator[str]:
    """What a log has not: collectives, sizes of those that it has, and nodes."""
    kinds = list(dict.fromkeys(span.kind for span in spans))
    missing = [kind for kind in USUAL_KINDS if kind not in kinds]
    if missing:
        yield ", ".join(missing)
    sizes: dict[str, list[str]] = {}
    for kind in kinds:
        for interval in _missing_sizes([span for span in spans if span.kind == kind]):
            sizes.setdefault(interval, []).append(kind)
    yield from (f"sizes {interval} ({', '.join(of_kinds)})" for interval, of_kinds in sizes.items())
    yield from _missing_nodes({span.nodes for span in spans})


def _missing_nodes(nodes: Collection[int]) -> Iterator[str]:
    """``nodes`` : that were measured."""
    joined = [count for count in nodes if count > 1]
    yield f"more than {max(joined)} nodes" if joined else "several nodes"
    if 1 not in nodes:
        yield f"fewer than {min(joined)} nodes"
    elif joined and min(joined) > 2:
        yield f"2 to {min(joined) - 1} nodes"


def _missing_sizes(spans: Sequence[MeasuredSpan]) -> Iterator[str]:
    """Of one collective."""
    smallest, largest = USUAL_SIZES
    if not any(span.holds(smallest) or span.smallest < smallest for span in spans):
        yield f"below {format_bytes(min(span.smallest for span in spans))}"
    ordered = sorted(spans, key=lambda span: span.smallest)
    reached = ordered[0].largest
    for span in ordered[1:]:
        if span.smallest > reached * BEYOND**2:
            yield f"between {format_bytes(reached)} and {format_bytes(span.smallest)}"
        reached = max(reached, span.largest)
    if not reached * BEYOND > largest:
        yield f"above {format_bytes(reached)}"
