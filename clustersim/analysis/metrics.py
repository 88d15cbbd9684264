"""What a run amounts to: step time, throughput, utilisation, and how much communication was not hidden."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from clustersim.analysis import intervals
from clustersim.analysis.volume import bytes_of_rank
from clustersim.errors import ProgramError
from clustersim.model import Model
from clustersim.program import COMPUTE_STREAM, PHASES
from clustersim.timeline import LinkUse, Timeline, alike, between, first_ranks, of_ops, step_ends

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def summary(
    timeline: Timeline,
    model: Model,
    *,
    samples_per_step: float,
    workers: int | None = None,
    together: bool = True,
    peak_flops: float | None = None,
    peak: str = "",
    warmup_steps: int = 2,
    n_links: int = 10,
) -> dict[str, Any]:
    """The figures of a run's steady state, as plain numbers, lists and numpy arrays.

    Parameters
    ----------
    samples_per_step : of all ranks together: micro-batch x accumulation x data-parallel ranks.
    workers : how many ranks, the first ones, the means are over; the others serve. None means all.
    together : ranks step together, so that the slowest sets the pace; False where each has its own (asynchronous
        training): rates are then sums over ranks of what each does in its own time.
    peak_flops : float [FLOP/s] of one GPU, dense (never the sparse figure) in the dtype of the matrix products. None
        leaves ``mfu`` and ``hfu`` None. peak : what it is, in words, passed through.
    warmup_steps : steps left out where the run is long enough: DDP's first has a single bucket and no overlap, and
        its second follows the rebuild. A run of two steps leaves out the first, a run of one keeps it.
    n_links : how many of the busiest links to list.

    Returns a dict. Times are per step, means over ranks, in seconds:

    * ``step_time_s``: from the end of the last warm-up step to the end of the run, over ``steady_steps`` (numbers
      from 0). A step ends when its last rank does: where ranks have paces of their own this is the slowest one's, and
      ``samples_per_s`` is more than a step's samples over it. ``first_step_s`` is the first.
    * ``samples_per_s`` (all ranks), ``tokens_per_s_per_gpu`` (None without tokens), ``model_flops_per_s_per_gpu``.
    * ``mfu``: model FLOPs (:meth:`Model.flops_per_sample`, no recomputation) over peak; ``hfu``: executed FLOPs over
      peak, recomputation included (PaLM, arXiv:2204.02311, appendix B).
    * ``compute_s``: the compute stream is busy. ``communication_s``: some transfer is running.
      ``peer_wait_s``: no transfer runs, but a collective waits for a peer. ``exposed_communication_s``: the compute
      stream is idle while a collective runs (``exposed_transfer_s``: some transfer is moving) or waits for a peer
      (``waiting_for_peer_s``: none is). ``idle_s``: idle for any other reason.
    * ``phase_shares``: fractions of the step, of the compute stream by phase, plus ``exposed_communication`` and
      ``idle``.
    * ``bytes_sent_per_gpu``: payload each GPU sends per step, as the algorithms played need it; by op and by kind of
      link: :func:`clustersim.analysis.volume.volume`.
    * ``hottest_links``: ``(name, utilisation, bytes)``, in the steady window; bytes are link capacity used, protocol
      overhead included, and utilisation is their share of the line rate.
    * ``per_rank``: columns ``rank, compute_s, communication_s, peer_wait_s, exposed_communication_s,
      exposed_transfer_s``.
    """
    steps = np.array([op.step for op in timeline.ops], dtype=np.int64)
    window = _steady(timeline, steps, warmup_steps)
    steady: Ints = window["steps"]
    step_time = (window["end"] - window["begin"]) / len(steady)
    run = of_ops(timeline, np.isin(steps, steady))
    run = first_ranks(run, timeline.world_size if workers is None else workers)
    world = run.world_size
    # A receive is posted, and a rank ahead begins, a step early: the window has spans of whatever step.
    inside = between(first_ranks(timeline, world), window["begin"], window["end"])
    per_rank = _per_rank(inside, len(steady))
    mean = {name: float(column.mean()) for name, column in per_rank.items() if name != "rank"}
    phases = {phase: seconds / step_time for phase, seconds in _phases(inside, len(steady)).items()}
    phases["exposed_communication"] = mean["exposed_communication_s"] / step_time
    idle = max(0.0, step_time - mean["compute_s"] - mean["exposed_communication_s"])
    a_step = step_time if together else float(1.0 / own_paces(first_ranks(timeline, world), steady).mean())
    samples_per_s = samples_per_step / a_step
    model_flops = model.flops_per_sample() * samples_per_s / world
    executed = _per_gpu(run, np.array([op.flops for op in run.ops])) / (len(steady) * a_step)
    return {
        "step_time_s": step_time,
        "first_step_s": window["first"],
        "steady_steps": steady.tolist(),
        "samples_per_s": samples_per_s,
        "tokens_per_s_per_gpu": samples_per_s * model.seq_len / world if model.seq_len else None,
        "model_flops_per_s_per_gpu": model_flops,
        "mfu": model_flops / peak_flops if peak_flops else None,
        "hfu": executed / peak_flops if peak_flops else None,
        "peak_flops": peak_flops,
        "peak": peak,
        **mean,
        "waiting_for_peer_s": max(0.0, mean["exposed_communication_s"] - mean["exposed_transfer_s"]),
        "idle_s": idle,
        "phase_shares": phases | {"idle": idle / step_time},
        "bytes_sent_per_gpu": _per_gpu(run, np.array([bytes_of_rank(op, world)[0] for op in run.ops])) / len(steady),
        "hottest_links": hottest_links(timeline.links, window["begin"], window["end"], n_links),
        "per_rank": per_rank,
    }


@dataclass(frozen=True, eq=False)
class Window:
    """The steady state of a run: its ``steps`` (numbers from 0), and from when to when they ran [s]."""

    steps: Ints
    begin: float
    end: float


def steady_window(timeline: Timeline, warmup_steps: int = 2) -> Window:
    """The window the figures of :func:`summary` are taken from. Raises :class:`ProgramError` for an empty timeline."""
    steps = np.array([op.step for op in timeline.ops], dtype=np.int64)
    found = _steady(timeline, steps, warmup_steps)
    return Window(found["steps"], found["begin"], found["end"])


def _steady(timeline: Timeline, steps: Ints, warmup_steps: int) -> dict[str, Any]:
    """Which steps count, and the window they fill."""
    ops = timeline.per_op()
    played = ops["ranks"] > 0
    if not played.any():
        raise ProgramError("the timeline is empty: there is no step to measure")
    known = np.unique(steps[played])
    end = np.array([ops["end"][played & (steps == step)].max() for step in known])
    begin = float(ops["ready"][played & (steps == known[0])].min())
    skip = min(warmup_steps, len(known) - 1)
    return {
        "steps": known[skip:],
        "begin": float(end[skip - 1]) if skip else begin,
        "end": float(end[-1]),
        "first": float(end[0]) - begin,
    }


def own_paces(timeline: Timeline, steady: Ints) -> Floats:
    """(world_size,) float [steps/s]: what each rank does of the steps ``steady``, from the end of its own step before
    them, or from 0, to the end of its own last."""
    ended = step_ends(timeline)
    begin = ended[steady[0] - 1] if steady[0] else np.zeros(timeline.world_size)
    pace: Floats = len(steady) / (ended[steady[-1]] - begin)
    return pace


def _per_gpu(run: Timeline, of_op: Floats) -> float:
    """Mean over ranks of what their ops add up to; ``of_op`` is (n_ops,), per rank that does the op."""
    return float((of_op * run.ranks_per_op()).sum() / run.world_size)


def _is_compute(run: Timeline) -> npt.NDArray[np.bool_]:
    """(n_ops,) whether an op keeps the compute stream busy. A measured run may name its streams otherwise: then any
    compute op does."""
    compute = np.array([op.kind == "compute" for op in run.ops], dtype=bool)
    usual = np.array([op.stream == COMPUTE_STREAM for op in run.ops], dtype=bool)
    return compute & usual if usual.any() else compute


def _phases(run: Timeline, n_steps: int) -> dict[str, float]:
    """Seconds per step of the compute stream by phase, mean over ranks."""
    number = {phase: i for i, phase in enumerate(PHASES)}
    phase = np.array([number.get(op.phase, number["other"]) for op in run.ops], dtype=np.int64)
    seconds = run.per_op()["seconds"] * _is_compute(run)
    total = np.bincount(phase, weights=seconds, minlength=len(PHASES)) / (run.world_size * n_steps)
    return {name: float(total[i]) for name, i in number.items() if total[i] > 0}


TOGETHER = 512
"""Ranks whose spans are laid out at once: those of a large run do not fit in memory together."""


def _per_rank(run: Timeline, n_steps: int) -> dict[str, npt.NDArray[Any]]:
    """Seconds per step of each rank, by what its streams do; computed for one rank of each class of equals."""
    busy = occupancy_of_all(run) if run.blocks else None
    class_of = np.arange(run.world_size)
    if busy is None:
        representatives, class_of = alike(run)
        some = [occupancy(run, representatives[i : i + TOGETHER]) for i in range(0, len(representatives), TOGETHER)]
        busy = {name: np.concatenate([one[name] for one in some]) for name in some[0]}
    columns: dict[str, npt.NDArray[Any]] = {"rank": np.arange(run.world_size)}
    for name, seconds in busy.items():
        columns[name] = (seconds / n_steps)[class_of]
    return columns


def occupancy_of_all(run: Timeline) -> dict[str, Floats] | None:
    """As :func:`occupancy`, of every rank, for runs in which most ranks differ; None where streams are too many."""
    computing, n = _is_compute(run), run.world_size
    if len({op.stream for op in run.ops if op.kind != "compute"}) > intervals.MOST_STREAMS:
        return None
    compute = intervals.per_stream(run, np.flatnonzero(computing).tolist(), "start")
    talking = [i for i, op in enumerate(run.ops) if op.kind != "compute"]
    transfer = intervals.per_stream(run, talking, "start")
    active = intervals.per_stream(run, talking, "ready")
    if compute is None or transfer is None or active is None:
        return None
    if len(compute) > 1 or len(active) > intervals.MOST_STREAMS:
        return None
    kernels = next(iter(compute.values()), [])
    busy, apart = (intervals.union(list(streams.values()), None, n) for streams in (active, transfer))
    beside, moving = (intervals.union(list(streams.values()), kernels, n) for streams in (active, transfer))
    return {
        "compute_s": intervals.total(kernels, n),
        "communication_s": apart,
        "peer_wait_s": np.maximum(busy - apart, 0.0),
        "exposed_communication_s": np.maximum(busy - beside, 0.0),
        "exposed_transfer_s": np.maximum(apart - moving, 0.0),
    }


def occupancy(run: Timeline, ranks: Ints) -> dict[str, Floats]:
    """Seconds each of ``ranks`` (ascending) spends in each state over a whole timeline; names as in :func:`summary`.

    A sweep over the begins and ends of spans, all ranks at once: between two neighbouring instants it is known how
    many computations, transfers and collectives are open on the rank.
    """
    spans = run.spans(ranks.tolist())
    row = np.searchsorted(ranks, spans["rank"])
    computing = _is_compute(run)[spans["op"]]
    talking = np.array([op.kind != "compute" for op in run.ops], dtype=bool)[spans["op"]]
    ends = spans["end"]
    opened = [(spans["start"], computing), (spans["start"], talking), (spans["ready"], talking)]
    owner = np.concatenate([row[mask] for _, mask in opened] * 2)
    time = np.concatenate([begin[mask] for begin, mask in opened] + [ends[mask] for _, mask in opened])
    channel = np.repeat([0, 1, 2, 0, 1, 2], [int(mask.sum()) for _, mask in opened] * 2)
    change = np.repeat([1, -1], len(channel) // 2)
    order = np.lexsort((time, owner))
    owner, time, channel, change = owner[order], time[order], channel[order], change[order]
    compute, transfer, active = (np.cumsum(np.where(channel == c, change, 0))[:-1] > 0 for c in range(3))
    # Every rank's counts are back at zero after its last event, so the step to the next rank is in no state.
    gap = np.where(owner[1:] == owner[:-1], np.diff(time), 0.0)

    def total(state: npt.NDArray[np.bool_]) -> Floats:
        return np.bincount(owner[:-1], weights=gap * state, minlength=len(ranks)).astype(np.float64)

    return {
        "compute_s": total(compute),
        "communication_s": total(transfer),
        "peer_wait_s": total(active & ~transfer),
        "exposed_communication_s": total(active & ~compute),
        "exposed_transfer_s": total(transfer & ~compute),
    }


def hottest_links(use: LinkUse | None, begin: float, end: float, n: int) -> list[tuple[str, float, float]]:
    """``(name, utilisation, bytes)`` of the ``n`` busiest links between two times [s], busiest first; ties by id."""
    if use is None or end <= begin or not len(use.segment_start):
        return []
    inside = replace(
        use,
        segment_start=np.clip(use.segment_start, begin, end),
        segment_end=np.clip(use.segment_end, begin, end),
    )
    nbytes = inside.bytes_per_link()
    utilisation = nbytes / (use.link_bandwidth * (end - begin))
    order = np.argsort(-utilisation, kind="stable")[:n]
    return [(use.link_names[i], float(utilisation[i]), float(nbytes[i])) for i in order.tolist() if nbytes[i] > 0]
