"""How far a prediction may be off, by what is known of what it is about.

``data/ranges.toml`` has half-widths of ranges around a prediction that held half, and nine in ten, of published
measurements; ``python tests/ranges.py`` writes it from the errors of validation. Each publisher counts once however
many rows it has, so a range is what may be expected of one more of them. Ranges of collectives are made of rows whose
publisher the constants were not fitted to. Those of steps, and of collectives on machines that few or none published,
are as much wider as rows that nothing was fitted to were further off when they were first predicted: the form of the
law was made with the tables at hand, and the machines in them are better kept than most.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec
from msgspec.structs import replace

from clustersim.core.device import unseen_width
from clustersim.core.measured_spans import NOT_RECORDED, outside
from clustersim.core.texts import Table, data_table
from clustersim.core.topology import NVSWITCH, Topology

VAGUE = 0.10
"""Error of a kind of strategy from which it is said that it cannot be ranked."""
HALF_OF_NINE = 0.41
"""The half-width that half of normal errors keep, of the one that nine in ten keep."""
AGED = frozenset({"sm35", "sm37", "sm50", "sm52", "sm60", "sm61", "sm75"})
"""Generations whose steps were measured with libraries of their time, Kepler to Turing but for Volta: all 18 steps that
nothing was fitted to, of five publishers, were slower than predicted, a fifth in the median."""
AGED_WIDTH = 0.5
"""Half-width (nine in ten) of what those libraries add. Without it 3 of the 18 were within p50 and 13 within p90; with
it 9 and 17."""


class PredictionRange(msgspec.Struct, frozen=True):
    """A range around a prediction.

    Parameters
    ----------
    p50, p90 : relative half-widths: half of the measurements lay within ``prediction * (1 +- p50)``, nine in ten within
        ``p90``. rows : measurements. groups : publishers they are from.
    known : what is known of this prediction's subject: ``"calibrated"`` (numbers measured on this machine),
        ``"published"`` (several publishers have rows of this machine, or this one's software has), ``"similar"``
        (others of its kind have), ``"new"`` (nobody has published rows of its transport, so it is a draw from all
        transports; or no steps on its generation of GPUs). outside : why numbers of the machine say nothing of it,
        where it has some, or how far they are from what was fitted to them; else empty.
    """

    p50: float
    p90: float
    rows: int
    groups: int
    known: str
    outside: str = ""

    @classmethod
    def of(cls, entry: Table, known: str) -> PredictionRange:
        """A range of ``data/ranges.toml``."""
        return cls(float(entry["p50"]), float(entry["p90"]), int(entry["rows"]), int(entry["groups"]), known)


def size_class(nbytes: float) -> str:
    """The three ranges of sizes in which different physics rule: latency, the pipeline, bandwidth."""
    return "<=64 KiB" if nbytes <= 2**16 else "64 KiB - 32 MiB" if nbytes <= 2**25 else ">32 MiB"


SMALL = size_class(0.0)
MANY = "many nodes"
FEW_NODES = 8
"""Beyond which are fewer tables than up to there."""
_FAMILIES = {"rings": ("all_reduce", "all_gather", "reduce_scatter"), "rooted": ("broadcast", "reduce")}
_ONE_FLOW = frozenset({"send", "sendrecv"})
SHARED_UPLINK = 2.0
"""Times as long as predicted that kinds with one flow a NIC may take over many nodes: of two flows that a switch's hash
sends over one uplink each has half of it, as published rates of sendrecv beyond 8 nodes do; no law here says when."""
CLOSENESS = ("published", "similar", "new")
"""Of a machine without numbers of its own: the surest first."""
STRANGE = frozenset(CLOSENESS[1:])
"""Of a machine that few or none published: rows that nothing was fitted to are further off there, and not elsewhere."""


NVLINK_BETWEEN = "nvlink between nodes"
"""The transport of nodes that share NVSwitches. What is published of such machines is of one node of them, but for two
rows: 72 GB200 took 1.24 to 1.6 times as long as predicted (coreweave/nccl-tests pull request 43)."""


def _joined_by_switches(topology: Topology) -> bool:
    """Whether nodes share NVSwitches, which belong to none of them."""
    kinds = zip(topology.vertex_kinds, topology.vertex_node.tolist(), strict=True)
    return any(kind == NVSWITCH and node < 0 for kind, node in kinds)


def traits(kind: str, nbytes: float, nodes: int, net: str, well_known: Collection[str]) -> tuple[str, ...]:
    """What makes a collective surer or less sure than others of its size: whether it stays inside a node, and else
    whether its transport is one of the well known, which many operators measured, and whether its nodes are many; the
    same place in its class of sizes alone, since hosts are unlike in small messages and networks in large ones; and
    the family of its kind (``rings``, ``rooted``, ``direct``)."""
    place = "one node" if nodes <= 1 else net if net in well_known else "other transport"
    many = (MANY,) if nodes > FEW_NODES else ()
    family = next((name for name, kinds in _FAMILIES.items() if kind in kinds), "direct")
    return (place, f"{place}, {size_class(nbytes)}", *many, family)


def of_collective(
    topology: Topology,
    nbytes: float,
    nodes: int | None = None,
    kind: str = "all_reduce",
    ranks: int | None = None,
    launch: str = "",
) -> PredictionRange:
    """Of the time of a collective of ``nbytes`` on a machine, over ``nodes`` of it (None: all) with so many ``ranks``
    (None: as many on a node as were measured), in a job that was started so (empty: as what was measured).

    Never narrower than that of a machine that is better known. What a machine's own numbers do not tell
    (:func:`unmeasured_reason`) has the range of a machine without them.
    """
    data = data_table("ranges")["collectives"]
    count = topology.n_nodes if nodes is None else nodes
    net, closeness = without_numbers(topology, count)
    has_numbers = bool(topology.calibration is not None and topology.calibration.nccl) or bool(topology.measured)
    reason = unmeasured_reason(topology, nbytes, count, kind, ranks, launch)
    names: tuple[str, ...] = ("calibrated",) if has_numbers else ()
    if not names or reason:
        names += closeness
    # What is new between nodes is no surer than what is well known.
    transports = (*data["well_known"], net) if count > 1 and names[-1] == CLOSENESS[-1] else (net,)
    ranges = [
        _widened(data, name, size_class(nbytes), traits(kind, nbytes, count, transport, data["well_known"]))
        for name in names
        for transport in transports
    ]
    p50 = max(around.p50 for around in ranges)
    p90 = max(around.p90 for around in ranges)
    left = _left_by_fit(topology, nbytes) if has_numbers and not reason else 0.0
    if left > p50:
        p50, p90 = left, min(p90 + left - p50, WIDEST)
        reason = f"the fit leaves the machine's own rows {left:.0%} off in the median"
    if one_flow_each(kind, count):
        p90 = SHARED_UPLINK * (1.0 + p90) - 1.0
    return replace(ranges[-1], p50=p50, p90=p90, outside=reason)


def without_numbers(topology: Topology, nodes: int) -> tuple[str, tuple[str, ...]]:
    """What joins so many nodes of a machine, as :func:`traits` has it, and those of :data:`CLOSENESS` that it takes
    the widest range of while it has no numbers of its own."""
    data = data_table("ranges")["collectives"]
    over_switches = nodes > 1 and _joined_by_switches(topology)
    net = NVLINK_BETWEEN if over_switches else topology.node_types[0].net
    is_published = topology.name in data["platforms"] and not over_switches
    # Machines that ranges are made from are NVIDIA's: none has RCCL and xGMI, which matter inside a node as well.
    on_amd = any(node.gpu.amd for node in topology.node_types)
    is_known = not on_amd and (nodes <= 1 or net in data["transports"])
    return net, CLOSENESS[: 1 if is_published else 2 if is_known else 3]


WIDEST = 0.95
"""Half-width of a range that a fit makes wider, at most: times are above zero."""


def _left_by_fit(topology: Topology, nbytes: float) -> float:
    """How far a fit leaves a machine's own rows of a class of sizes, in the median; 0 where no file says."""
    return 0.0 if topology.calibration is None else topology.calibration.provenance.errors.get(size_class(nbytes), 0.0)


def unmeasured_reason(
    topology: Topology, nbytes: float, nodes: int, kind: str, ranks: int | None = None, launch: str = ""
) -> str:
    """Why the numbers of a machine say nothing of a collective; empty where they do, and of a machine without any.

    Of a log those outside of its spans; of a few measured numbers a size of whose class none is, which is how their
    ranges were made: three numbers, each of another class.
    """
    if topology.measured:
        size = size_class(nbytes)
        measured = {size_class(number.nbytes) for number in topology.measured}
        if size in measured:
            return ""
        if topology.calibration is None or not topology.calibration.provenance.spans:
            return f"none of the measured numbers is of {size}"
    if topology.calibration is None or not topology.calibration.nccl:
        return ""
    spans = topology.calibration.provenance.spans
    started = launch if size_class(nbytes) == SMALL else ""  # of large messages the launch changes nothing
    return outside(spans, kind, nbytes, nodes, ranks, started) if spans else NOT_RECORDED


def one_flow_each(kind: str, nodes: int) -> bool:
    """Whether NICs have one flow each over more switches than a leaf, so that two may meet on an uplink."""
    return kind in _ONE_FLOW and nodes > FEW_NODES


def collective_words(around: PredictionRange, nbytes: float, kind: str, nodes: int) -> str:
    """What the range of a collective says to a reader."""
    of_whom = {"calibrated": "with numbers of the machine", "published": "of this machine", "similar": "of its kind"}
    whose = of_whom.get(around.known, "of any transport, none of this one among them,")
    tail = (
        "; two flows on one uplink take twice as long, and no law here says when" if one_flow_each(kind, nodes) else ""
    )
    return (
        f"trust, {size_class(nbytes)}: half of published times {whose} within {around.p50:.0%}, nine in ten within "
        f"{around.p90:.0%}{tail}{f'; {around.outside}' if around.outside else ''}"
    )


def _widened(data: Table, closeness: str, size: str, of_kind: tuple[str, ...]) -> PredictionRange:
    """The range of a size class, times what traits widen it by; of a strange machine, times how much further off rows
    were that nothing was fitted to."""
    entry = data[closeness]
    usual = PredictionRange.of(entry[size], closeness)
    p50, p90 = (math.prod(entry["times"][share].get(trait, 1.0) for trait in of_kind) for share in ("p50", "p90"))
    beyond = data["beyond"][size] if closeness in STRANGE else {"p50": 1.0, "p90": 1.0}
    return replace(usual, p50=usual.p50 * p50 * beyond["p50"], p90=usual.p90 * p90 * beyond["p90"])


NORMAL_HALF = 0.6745
"""Standard deviations that half of a normal law lies within."""


def far_of_log(size: str) -> float:
    """|error| that nine in ten published logs are within in a class of sizes, their publisher left out."""
    return float(_of_logs(size)["p90"])


def log_words(size: str) -> str:
    """How far published logs are from what is expected of machines that nobody tuned for, their publisher left out, in
    a class of sizes."""
    far = _of_logs(size)
    return f"Half of published logs are within {far['p50']:.0%}, nine in ten within {far['p90']:.0%}"


def spread_of_log(size: str) -> float:
    """Standard deviation of ln(measured / expected) of a published log's rows in a class of sizes, their publisher
    left out, by the error that half of logs are within."""
    return float(_of_logs(size)["p50"]) / NORMAL_HALF


def _of_logs(size: str) -> dict[str, float]:
    row: dict[str, float] = data_table("ranges")["collectives"]["logs"][size]
    return row


def of_step(kind: str, source: str = "", arch: str = "", dtype: str = "") -> PredictionRange:
    """Of the time of a training step.

    ``kind`` : of a strategy; ``"split"`` where the model is split; of one with few published steps, the range of all.
    ``source`` : whose software it is, where it is one of those whose steps are published. ``arch`` : of the GPU; where
    none of the steps ran on its generation, the range is wider by what its kernels in ``dtype`` may be off
    (:func:`clustersim.core.device.unseen_width`), and of an old one by what its libraries may be (:func:`aged_width`).
    """
    steps = data_table("ranges")["steps"]
    published = steps["published"].get(f"{kind}/{source}")
    if published:
        around = PredictionRange.of(published, "published")
    else:
        around = PredictionRange.of(steps["similar"].get(kind, steps["similar"]["all"]), "similar")
    wider = math.hypot(0.0 if has_steps(arch) else unseen_width(dtype), aged_width(arch))
    p50 = math.hypot(around.p50, HALF_OF_NINE * wider)
    known = around.known if has_steps(arch) else "new"
    return replace(around, p50=p50, p90=math.hypot(around.p90, wider), known=known)


def aged_width(arch: str) -> float:
    """Half-width (nine in ten) of what a generation's libraries add where they are as old (:data:`AGED`); else 0."""
    return AGED_WIDTH if arch in AGED else 0.0


def unseen_steps() -> tuple[int, int]:
    """How many published steps that nothing was fitted to say how wide ranges are, and of how many publishers."""
    unseen = data_table("ranges")["steps"]["unseen"]
    return int(unseen["rows"]), int(unseen["publishers"])


def has_steps(arch: str) -> bool:
    """Whether steps are published that ran on GPUs of this generation, such as ``"sm90"``; of none named, yes."""
    return not arch or arch in data_table("ranges")["steps"]["generations"]


def as_of() -> str:
    """The day of the validation."""
    return str(data_table("ranges")["date"])


def alike(a: float, b: float, error: float) -> bool:
    """Whether two predicted rates differ by less than the ``error`` of the less certain one (relative), so that nobody
    knows which is the better."""
    return abs(a - b) <= error * min(a, b)


KIND_WORDS = {
    "split": "split models",
    "experts": "mixtures of experts",
    "thin split": "split models whose hosts pace them",
    "thin experts": "mixtures of experts whose hosts pace them",
    "single": "single GPUs",
    "sgd_steps": "plain SGD",
    "parameter_server": "parameter servers",
}
"""What kinds of steps are called that have no name of a strategy which people read."""


def off_by(kind: str) -> str:
    """How coarsely steps of a kind of strategy are predicted, in words."""
    step_range = of_step(kind)
    called = KIND_WORDS.get(kind, kind)
    return f"half of steps of their kind ({called}) are off by more than {step_range.p50:.0%}"


def within() -> str:
    """What the ``+-`` beside a rate is, in words."""
    rows = of_step("all").rows
    unseen = unseen_steps()[0]
    return (
        f"+-: half of steps lie within it, by kind of strategy, by {rows} published ones and {unseen} that nothing was "
        f"fitted to (validated {as_of()})"
    )
