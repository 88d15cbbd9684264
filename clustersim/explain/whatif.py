"""What a better machine or another knob would save at most, without running again.

Each knob says how short every op could become; the run's own graph is then replayed with those durations
(:mod:`clustersim.explain.replay`). What comes out is a bound, not a forecast: contention is assumed away, every time
takes the most favourable turn, and the real saving is at most this.

How short an op could become, with a factor f:

* ``compute speed``: kernels bound by compute or memory take 1/f. ``host speed``: launch-bound kernels and host work.
* ``NVLink``, ``PCIe``, ``NIC``, ``fabric``: a transfer's bytes move at the rate its links would allow with those f
  times as wide and nobody else on them, and its latency shrinks as much (part of it fills a pipeline at that rate).
  With ``PCIe``, copies between host and GPU take 1/f, and a parameter server may be sent to in another order.
* ``latency``: a transfer's latency takes 1/f, its bytes what they took alone.
* ``bucket size`` (any): gradients may travel as soon as the first are made, each transfer at its physical lower bound,
  and nothing is lost to overlap. What workers and a parameter server send each other takes no time; the server takes as
  long as all it does in a step.

One knob is told by an estimate, for no bound of it says much: a kernel might do f times the samples in the time of one
until it is at the peak.

* ``batch``: per sample. Kernels of forward and backward take f times as long, except what launching them takes, and so
  do the bytes that TP, CP, EP and PP send; launch-bound kernels take as long as before, and no less than their FLOPs at
  peak; everything else takes as long as before. Kernels keep the rates they have: where larger ones reach higher rates,
  more is saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np

from clustersim.core.arrays import Columns, Floats, Ints
from clustersim.core.op_infos import each_kind, kind_of, kinds, of_each
from clustersim.core.program import GPU_BOUNDS
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.explain.dimensions import dimension
from clustersim.explain.graph import RunGraph, graph, needs_of, queues
from clustersim.explain.graph_nodes import GraphNode
from clustersim.explain.knobs import COPY, KNOB_NAMED, KNOBS, WIDER
from clustersim.explain.late_start import GRADIENTS, reduces
from clustersim.explain.metrics import steady_window
from clustersim.explain.occupancy import stays_on_device
from clustersim.explain.op_chains import ChainSeconds, chain_seconds
from clustersim.explain.pieces import only_serves
from clustersim.explain.replay import OtherNeeds, replayed
from clustersim.explain.transfer_rates import TransferRates

BUCKETS = "bucket size"
"""The knob with which gradients travel as soon as the first are made: what ops wait for is another."""
_REDUCES = frozenset({"all_reduce", "reduce_scatter"})
_PAIRS = frozenset({"send", "recv"})
_SAID = ("latency", "nbytes", "ceiling", "lower_bound")
"""What a plan says of a transfer."""
_ACTIVATIONS = frozenset({"TP", "CP", "EP", "PP"})
"""Dimensions that send what samples make; the others send parameters and gradients."""
_OF_SAMPLES = frozenset({"forward", "backward"})
"""Phases whose kernels work on samples."""
REORDERS = frozenset({BUCKETS, "PCIe"})
"""Knobs with which a server, which works in order of arrival, may have its work in another order."""
NOTHING = 0.005
"""Shares of a step below this are called nothing."""
ROUNDED = 12
"""Digits of a share behind which there is nothing but rounding."""
PER_SAMPLE = "of the time per sample"
"""What the sentence of a knob says whose saving is not of a step."""
PRESENT_RATES = "kernels at the rates they have"
"""What the estimate of ``batch`` assumes."""


def whatif(
    timeline: Timeline,
    *,
    factor: float = 2.0,
    knobs: tuple[str, ...] = KNOBS,
    peak_flops: float | None = None,
) -> Columns:
    """The most each knob could save of a step, largest first.

    factor : how much faster, wider or larger. peak_flops : float [FLOP/s] of one GPU, for ``batch``.

    Returns columns ``knob``, ``factor``, ``saving`` (at most this share of the step; for ``batch`` about this share of
    a sample's time), ``step_time_s`` (no less than this [s]; for ``batch`` about this) and ``text``.

    Raises :class:`TraceError` for a measured timeline.
    """
    needs = needs_of(timeline)
    early = _early(timeline, needs) if BUCKETS in knobs else {}
    run = graph(timeline, needs=needs, apart=None if timeline.own_paces else early)
    window = steady_window(timeline)
    now = window.step_time
    rates = TransferRates(timeline)
    link_kinds = link_kinds_of(timeline)
    rows = []
    in_turn = [knob for knob in knobs if knob != BUCKETS] + [knob for knob in knobs if knob == BUCKETS]
    turned = _KnobReplay(run, rates, in_turn, factor, peak_flops)
    steps = _steps(turned, early, window.steps) if knobs else []
    for knob, step in zip(in_turn, steps, strict=True):
        least = max(step, _serving(run, window.steps)) if knob in REORDERS else step
        per = factor if knob == "batch" else 1.0
        saving = max(0.0, 1.0 - least / per / now) if now > 0 else 0.0
        rows.append((knob, factor, saving, least, _text(knob, factor, saving, link_kinds)))
    rows.sort(key=lambda row: (-round(row[2], ROUNDED), knobs.index(row[0])))
    names = ("knob", "factor", "saving", "step_time_s", "text")
    return {name: np.array([row[i] for row in rows]) for i, name in enumerate(names)}


def unused(timeline: Timeline) -> set[str]:
    """Knobs of parts that this run does not have: links that nothing crossed, buckets where no gradient is reduced, all
    of a network where nothing is sent."""
    use = timeline.links
    ops = kinds(timeline.ops)
    bounds = {_limit_of(op) for op in ops if op.kind == "compute"}
    copying = {knob for knob in WIDER if KNOB_NAMED[knob].helps & bounds}
    if all(op.kind == "compute" for op in ops):
        return {*WIDER, "latency", BUCKETS} - copying
    without_use = set() if any(map(reduces, ops)) else {BUCKETS}
    if use is None or not len(use.link_kinds):
        return without_use
    crossed = {int(link) for links, _ in use.loads for link in links.tolist()}
    names = [(use.link_kinds[link], use.link_names[link]) for link in crossed]
    uncrossed = {knob for knob, widens in WIDER.items() if not any(widens(*name) for name in names)}
    return without_use | (uncrossed - copying)


def link_kinds_of(timeline: Timeline) -> frozenset[str]:
    """Kinds of the links of a timeline's machine, empty where they are not known."""
    return frozenset(timeline.links.link_kinds if timeline.links is not None else ())


def _text(knob: str, factor: float, saving: float, link_kinds: Collection[str]) -> str:
    if saving < NOTHING:
        saved = f"nothing {PER_SAMPLE}" if knob == "batch" else "nothing"
    elif knob == "batch":
        saved = f"about {saving:.1%} {PER_SAMPLE}, {PRESENT_RATES}"
    else:
        saved = f"at most {saving:.1%} of the step"
    change = KNOB_NAMED[knob].words(factor, link_kinds)
    return f"{change} would save {saved}"


def _steps(turned: _KnobReplay, needs: dict[int, tuple[int, ...]], steps: Ints) -> list[float]:
    """Per knob the seconds per step of the steady state, by :func:`summary`'s definition; ``needs`` : others, with
    ``bucket size``."""
    run = turned.run
    early = (OtherNeeds(needs, turned.knobs.index(BUCKETS)), len(turned.knobs)) if BUCKETS in turned.knobs else None
    if run.timeline.own_paces:
        return _at_own_paces(run, turned, steps, early)
    ends = replayed(run, turned.compute, turned.transfers.__getitem__, early=early, chained=turned.chain)
    ends = np.broadcast_to(ends, (len(turned.knobs), ends.shape[-1]))
    of_op = run.timeline.op_steps
    begin = ends[:, of_op < steps.min()].max(axis=1, initial=-np.inf)
    last = ends[:, np.isin(of_op, steps)].max(axis=1)
    step_times: list[float] = ((last - np.where(np.isfinite(begin), begin, 0.0)) / len(steps)).tolist()
    return step_times


def _at_own_paces(run: RunGraph, turned: _KnobReplay, steps: Ints, early: tuple[OtherNeeds, int] | None) -> list[float]:
    """As :func:`_steps`, of workers at paces of their own: what all together take for a step's samples."""
    ops = run.timeline.ops
    edges = int(steps[0]) - 1, int(steps[-1])
    trains = {op.role for op in kinds(ops) if not only_serves(op.role)}
    training = {i: op for i, op in enumerate(ops) if op.step in edges and op.role in trains}
    by_rank = {i: np.array([]) for i in training}
    replayed(run, turned.compute, turned.transfers.__getitem__, by_rank, early)
    ended = defaultdict[tuple[str, int], Floats](lambda: np.zeros((len(turned.knobs), 1)))
    for i, op in training.items():
        ended[op.role, op.step] = np.maximum(ended[op.role, op.step], by_rank[i])
    took = np.concatenate([ended[role, edges[1]] - ended[role, edges[0]] for role in sorted(trains)], axis=1)
    step_times: list[float] = (1.0 / (len(steps) / took).mean(axis=1)).tolist()
    return step_times


class _KnobReplay:
    """Durations under several knobs (k of them), each turned by itself: all are replayed together."""

    def __init__(
        self, run: RunGraph, rates: TransferRates, knobs: list[str], factor: float, peak: float | None
    ) -> None:
        self.run = run
        self.rates = rates
        self.knobs = knobs
        self.factor = factor
        self.peak = peak
        ops = run.timeline.ops
        self._limits: dict[object, int] = {}
        self._least: list[Floats] = []
        self._infos = kinds(ops)
        self._kind_of = kind_of(ops)
        self._limit_of_op = self._limits_of_ops()
        self.transfers = {
            node.ops[0]: self._shortest(node) for node in run.nodes if len(node.seconds) and node.talks is None
        }
        self._faster = np.array(  # (kinds, k) how many times as fast an op could be
            [[factor if _limit_of(op) in KNOB_NAMED[knob].helps else 1.0 for knob in knobs] for op in self._infos]
        )
        self._of_samples = np.array([self._of_more_samples(op) for op in self._infos]).reshape(-1, 2)
        served = _served(run) if REORDERS & set(knobs) else set[int]()
        self._served = served
        self._in_order = np.array([[0.0 if knob in REORDERS else 1.0] for knob in knobs])
        # With other kernels or buckets, or with a transfer that ends sooner, a kernel that paid for hidden
        # communication may run beside none: what one kernel lost can shrink by more than any transfer does.
        unhides = np.array([[KNOB_NAMED[knob].unhides] for knob in knobs])
        for node in run.nodes if run.lost else ():
            if len(node.seconds):
                shortest = self.transfers.get(node.ops[0])
                shortest = self._in_chain(node).swapaxes(0, 1) if shortest is None else shortest
                unhides |= (shortest < node.seconds).reshape(len(knobs), -1).any(axis=1, keepdims=True)
        self._kept = np.where(unhides, 0.0, 1.0)

    def compute(self, op: int) -> Floats:
        """(k, r) float [s] of a compute op; nan where it does not run."""
        column: Floats = self._computes([op], self.run.size[op])[0]
        # In other pieces or another order, a server's work may be done while more of it comes: _serving has its sum.
        return column * self._in_order if op in self._served else column

    def chain(self, node: GraphNode) -> ChainSeconds:
        """What a chain takes."""
        talks = node.talks if node.talks is not None else np.zeros(len(node.ops), dtype=np.bool_)
        kernels = [op for op, talk in zip(node.ops, talks.tolist(), strict=True) if not talk]
        computes = self._computes(kernels, self.run.size[node.ops[0]])
        return chain_seconds(computes, self._in_chain(node), talks, (node.met.place, node.met.first))

    def _computes(self, ops: list[int], size: int) -> Floats:
        """(n, k, r) float [s] of compute ops of one role, of ``size`` ranks; nan where one does not run."""
        seconds = np.array([self.run.seconds[op] for op in ops]).reshape(-1, size)
        kind = self._kind_of[ops]
        columns: Floats = seconds[:, None] / self._faster[kind][:, :, None]
        if "batch" in self.knobs:
            times, least = self._of_samples[kind].T[:, :, None]
            columns[:, self.knobs.index("batch")] = np.maximum(seconds * times, least)
        if self.run.lost:
            lost = np.array([self.run.lost.get(op, np.zeros(size)) for op in ops]).reshape(-1, size)
            columns += lost[:, None] * self._kept
        return columns

    def _of_more_samples(self, info: OpInfo) -> tuple[float, float]:
        """How many times as long an op takes with ``factor`` times the samples, and how long at least [s]."""
        if info.bound == "launch":
            return 1.0, self.factor * info.flops / self.peak if self.peak else 0.0
        if info.phase not in _OF_SAMPLES or info.bound not in GPU_BOUNDS:
            return 1.0, 0.0
        usual = 0.0 if info.mix is None else info.mix.seconds
        if info.mix is None or usual <= 0:
            return self.factor, 0.0
        launching = info.mix.launch / usual
        growing = 1.0 - launching - info.mix.unfilled / usual
        return launching + growing * self.factor, 0.0

    def _shortest(self, node: GraphNode) -> Floats:
        """(k, m) the shortest each meeting of a node could take [s]. Many nodes are alike but for their times."""
        op = next((i for i in node.ops if "latency" in self._infos[self._kind_of[i]].detail), None)
        loads = tuple(sorted({load for i in node.ops for load in self.rates.loads_of(i)}))
        share, most = self._least[self._limit_number(node.ops[0], op, loads)]
        shortest: Floats = np.minimum(node.seconds * share[:, None], most[:, None])
        return shortest

    def _in_chain(self, node: GraphNode) -> Floats:
        """(t, k, m) the shortest each meeting of a chain's collectives could take [s]."""
        numbers = self._limit_of_op[np.array(node.ops)[node.talks]]
        least = np.array([self._least[number] for number in numbers.tolist()])
        share, most = least.reshape(-1, 2, len(self.knobs), 1).swapaxes(0, 1)
        shortest: Floats = np.minimum(node.seconds[:, None] * share, most)
        return shortest

    def _limits_of_ops(self) -> Ints:
        """(n_ops,) int, which of ``_least`` each collective of a chain has."""
        limits = np.full(len(self._kind_of), -1)
        talks = [np.array(node.ops)[node.talks] for node in self.run.nodes if node.talks is not None]
        ops = np.concatenate([np.zeros(0, dtype=np.int64), *talks])
        named = np.stack([self._kind_of[ops], self.rates.set_of(ops)])
        span = int(named[1].max(initial=-1)) + 2
        _, first, alike = np.unique(named[0] * span + named[1], return_index=True, return_inverse=True)
        numbers = []
        for op in ops[first].tolist():
            latent = op if "latency" in self._infos[self._kind_of[op]].detail else None
            numbers.append(self._limit_number(op, latent, self.rates.loads_of(op)))
        limits[ops] = np.array(numbers, dtype=np.int64)[alike]
        return limits

    def _limit_number(self, first: int, op: int | None, loads: tuple[int, ...]) -> int:
        """Which of ``_least`` a node has whose first op is ``first``, and one that says its latency ``op``."""
        first_info = self._infos[self._kind_of[first]]
        info = None if op is None else self._infos[self._kind_of[op]]
        settings = () if info is None else (info.nbytes, *(info.detail.get(name) for name in _SAID))
        key = first_info.kind, info and info.kind, dimension(first_info), settings, loads
        if key not in self._limits:
            self._limits[key] = len(self._least)
            self._least.append(np.array([self._limit(first_info, info, loads, knob) for knob in self.knobs]).T)
        return self._limits[key]

    def _limit(self, first: OpInfo, op: OpInfo | None, loads: tuple[int, ...], knob: str) -> tuple[float, float]:
        """What a transfer's time shrinks to at least: a share of it, and no more than so much [s]."""
        factor = self.factor
        if knob == "batch":
            return self._grown(first, op, loads), np.inf
        in_buckets = knob == BUCKETS and dimension(first) in GRADIENTS
        if in_buckets and first.kind in _PAIRS:
            return 0.0, np.inf
        if op is None:
            return (1.0 / factor if knob in {*WIDER, "latency"} else 1.0), np.inf
        latency = float(op.detail["latency"])
        nbytes = float(op.detail.get("nbytes", op.nbytes))
        if in_buckets and op.kind in _REDUCES:
            return 1.0, float(op.detail.get("lower_bound", 0.0))
        ceiling = float(op.detail.get("ceiling", np.inf))
        wide, narrow = self.rates.of(loads, knob)
        before = min(wide, narrow, ceiling)
        if knob == "latency":
            latency /= factor
        elif knob in WIDER and np.isfinite(wide):
            wide = wide * factor
            ceiling = ceiling * (factor if KNOB_NAMED[knob].raises_ceiling else 1.0)
        rate = min(wide, narrow, ceiling)
        if np.isfinite(rate):
            latency *= before / rate
        return 1.0, latency + (nbytes / rate if np.isfinite(rate) else 0.0)

    def _grown(self, first: OpInfo, op: OpInfo | None, loads: tuple[int, ...]) -> float:
        """How many times as long a transfer takes with ``factor`` times the samples."""
        if dimension(first) not in _ACTIVATIONS:
            return 1.0
        if op is None:
            return self.factor
        latency = float(op.detail["latency"])
        nbytes = float(op.detail.get("nbytes", op.nbytes))
        rate = min(*self.rates.of(loads, "batch"), float(op.detail.get("ceiling", np.inf)))
        sending = nbytes / rate
        return (latency + self.factor * sending) / (latency + sending) if latency + sending > 0 else 1.0


def _served(run: RunGraph) -> set[int]:
    """Compute ops done in order of arrival: what a parameter server does."""
    queue_names = queues(run.timeline)
    ops = run.timeline.ops
    return {i for i in run.seconds if (ops[i].role, ops[i].stream) in queue_names}


def _serving(run: RunGraph, steps: Ints) -> float:
    """Seconds per step that the busiest server works: the same bytes, whatever pieces they come in."""
    spans = run.timeline.per_op()
    ops = run.timeline.ops
    served = _served(run)
    busy: dict[str, float] = {}
    for i in served:
        if ops[i].step in steps:
            busy[ops[i].role] = busy.get(ops[i].role, 0.0) + float(spans["seconds"][i] / max(spans["ranks"][i], 1))
    return max(busy.values(), default=0.0) / len(steps)


def _limit_of(op: OpInfo) -> str:
    """What an op's pace is bound by: of a copy between host and GPU their links, which no faster GPU widens."""
    return COPY if op.phase == "memcpy" and not stays_on_device(op) else op.bound


def _early(timeline: Timeline, usual: list[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Needs, of the ops for which they are others: a step's gradients may travel as soon as its first backward op is
    over; what updates with them still waits for its last, on whatever stream: an optimizer on the host would else begin
    before backward ends."""
    ops = timeline.ops
    first: dict[tuple[str, int], int] = {}
    last: dict[tuple[str, int], int] = {}
    for i, op in each_kind(ops):
        if op.phase == "backward":
            first.setdefault((op.role, op.step), i)
            last[op.role, op.step] = i
    backward = of_each(ops, lambda op: op.phase in {"backward", "gradient"}, np.bool_)
    awaits = of_each(ops, lambda op: op.kind in _REDUCES and dimension(op) in GRADIENTS, np.bool_)
    updates = of_each(ops, lambda op: op.phase == "optimizer", np.bool_)
    infos = kinds(ops)
    kind = kind_of(ops)
    needs = {}
    for i in np.flatnonzero(awaits | updates).tolist():
        op = infos[kind[i]]
        start = first.get((op.role, op.step), i)
        awaited = [n for n in usual[i] if backward[n]] if awaits[i] else []
        freed = {n for n in usual[i] if n not in awaited} | ({start} if awaited and start < i else set())
        if updates[i] and last.get((op.role, op.step), i) < i:
            freed.add(last[op.role, op.step])
        own = tuple(sorted(freed))
        if own != usual[i]:
            needs[i] = own
    return needs
