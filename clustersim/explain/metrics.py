"""What a run amounts to: step time, throughput, utilisation, and how much communication was not hidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from clustersim.core.arrays import Columns, Floats, Ints
from clustersim.core.errors import ProgramError
from clustersim.core.memo import kept_with_first
from clustersim.core.model import Model
from clustersim.core.op_infos import kinds, of_each
from clustersim.core.program import PHASES
from clustersim.core.timeline import LinkUse, OpInfo, Timeline, alike, step_ends
from clustersim.explain.occupancy import holds_kernels, is_kernel, occupancy, seconds_of_ops
from clustersim.explain.pieces import staged, workers
from clustersim.explain.volume import MemberBytes

LEAST_REST = 1e-9
"""Share of a step below which what is left of it is the rounding of sums over its spans."""


def rest_of_step(step: float, *parts: float) -> float:
    """What parts of a step leave of it [s]; nothing where that is their rounding.

    >>> rest_of_step(1.0, 0.25, 0.5), rest_of_step(0.3, 0.1, 0.2 - 1e-17)
    (0.25, 0.0)
    """
    rest = step - sum(parts)
    return rest if rest > LEAST_REST * step else 0.0


def summary(
    timeline: Timeline,
    model: Model,
    *,
    samples_per_step: float,
    workers: int | None = None,
    together: bool = True,
    peak: tuple[float, str] | None = None,
) -> dict[str, Any]:
    """The figures of a run's steady state, as plain numbers, lists and numpy arrays.

    Parameters
    ----------
    samples_per_step : of all ranks together: micro-batch x accumulation x data-parallel ranks.
    workers : how many ranks, the first ones, the means are over; the others serve. None means all.
    together : ranks step together, so that the slowest sets the pace; False where each may be ahead of others
        (asynchronous training): rates are then sums over ranks of what each does in its own time.
    peak : [FLOP/s] of one GPU, dense (never the sparse figure) in the dtype of the matrix products, and what it is, in
        words. None leaves ``mfu`` and ``hfu`` None.

    Returns a dict. Times are per step, means over ranks, in seconds:

    * ``step_time_s``: from the end of the last warm-up step to the end of the run, over ``steady_steps`` (numbers
      from 0). A step ends when its last rank does. ``first_step_s`` is the first. Where ranks have paces of their own
      (:attr:`Timeline.own_paces`) it is what all together take for as many samples as a step has, and a mean over ranks
      counts each by its pace, so that every GPU's second counts the same.
    * ``slowest_step_s``: where ranks have paces of their own, the slowest one's step; else None.
    * ``samples_per_s`` (all ranks), ``tokens_per_s_per_gpu`` (None without tokens), ``model_flops_per_s_per_gpu``.
    * ``mfu``: model FLOPs (:meth:`Model.flops_per_sample`, no recomputation) over peak; ``hfu``: executed FLOPs over
      peak, recomputation included (PaLM, arXiv:2204.02311, appendix B).
    * ``compute_s``: kernels keep the compute stream busy. ``communication_s``: some transfer is running.
      ``peer_wait_s``: no transfer runs, but a collective waits for a peer, beside a kernel or not.
      ``exposed_communication_s``: no kernel runs, and some transfer is moving (``exposed_transfer_s``) or others are
      waited for (``waiting_for_peer_s``): as in :mod:`clustersim.explain.breakdown`. ``idle_s``: what is left, the
      host, its copies and its loading of batches.
    * ``phase_shares``: fractions of the step, of kernels by phase, plus ``exposed_communication`` and
      ``idle``.
    * ``bytes_sent_per_gpu``: payload each GPU sends per step, as the algorithms played need it; by op and by kind of
      link: :func:`clustersim.explain.volume.volume`.
    * ``hottest_links``: ``(name, utilisation, bytes)`` of ten, in the steady window; bytes are link capacity used in a
      step, protocol overhead included, and utilisation is their share of the line rate.
    * ``per_rank``: columns ``rank, compute_s, communication_s, peer_wait_s, exposed_communication_s,
      exposed_transfer_s, waiting_for_peer_s``.
    """
    window = steady_window(timeline)
    world, n = timeline.world_size if workers is None else workers, len(window.steps)
    pace = np.full(world, 1.0 / window.step_time) if together else paces_of_ranks(timeline, window.steps)[:world]
    a_step = window.step_time if together else float(1.0 / pace.mean())
    per_rank, phases = _of_ranks(timeline, window, pace if timeline.own_paces else 1.0 / window.step_time, world)
    nbytes_of = MemberBytes(world)
    busiest = hottest_links(timeline.links, window.begin, window.end, 10)
    executed = _per_gpu(timeline, window, world, lambda op: op.flops) / (n * a_step)
    peak_flops, peak_text = peak or (None, "")
    return {
        "step_time_s": window.step_time,
        "first_step_s": window.first,
        "slowest_step_s": float(1.0 / pace.min()) if timeline.own_paces else None,
        "steady_steps": window.steps.tolist(),
        **_rates(model, samples_per_step / a_step, world, executed, peak_flops),
        "peak_flops": peak_flops,
        "peak": peak_text,
        **_means(per_rank, phases, window.step_time, pace if timeline.own_paces else None),
        "bytes_sent_per_gpu": _per_gpu(timeline, window, world, lambda op: nbytes_of(op)[0]) / n,
        "hottest_links": [(name, utilisation, nbytes / window.done) for name, utilisation, nbytes in busiest],
        "per_rank": per_rank,
    }


def _rates(
    model: Model, samples_per_s: float, world: int, executed: float, peak: float | None
) -> dict[str, float | None]:
    """What is done in a second; ``executed`` : [FLOP/s] of each GPU."""
    model_flops = model.flops_per_sample() * samples_per_s / world
    return {
        "samples_per_s": samples_per_s,
        "tokens_per_s_per_gpu": samples_per_s * model.tokens / world if model.tokens else None,
        "model_flops_per_s_per_gpu": model_flops,
        "mfu": model_flops / peak if peak else None,
        "hfu": executed / peak if peak else None,
    }


def _means(
    per_rank: Columns, phases: dict[str, float], step: float, pace: Floats | None
) -> dict[str, float | dict[str, float]]:
    """Means over ranks, each as often as its ``pace`` is, and what they leave of a step."""
    columns = {name: column for name, column in per_rank.items() if name != "rank"}
    mean = {name: float(np.average(column, weights=pace)) for name, column in columns.items()}
    exposed = mean["exposed_communication_s"]
    idle = rest_of_step(step, mean["compute_s"], exposed)
    shares = {phase: seconds / step for phase, seconds in phases.items()}
    return {
        **mean,
        "idle_s": idle,
        "phase_shares": shares | {"exposed_communication": exposed / step, "idle": idle / step},
    }


@dataclass(frozen=True, eq=False)
class SteadyWindow:
    """The steady state of a run: its ``steps`` (numbers from 0), from when to when they ran [s], how long the ``first``
    step of the run took [s], how many leading steps are ``left_out``, and how many steps a mean rank has ``done`` from
    begin to end."""

    steps: Ints
    begin: float
    end: float
    first: float
    left_out: int
    done: float

    @property
    def length(self) -> float:
        """Seconds of all steady steps."""
        return self.end - self.begin

    @property
    def step_time(self) -> float:
        """Seconds of a steady step."""
        return self.length / self.done


WARMUP = 2
"""Steps that are left out of the figures of a simulated run: DDP's first has a single bucket and no overlap, and its
second follows the rebuild."""


def whole_periods(steps: int, period: int) -> int:
    """The fewest steps, at least ``steps``, of which :func:`steady_window` holds whole periods of ``period`` steps.

    Any ``period`` steps in a row do what every other such window does, whichever of them begins it, so the warm-up need
    not end with a period. What repeats after one step is played as long as it is asked for.

    >>> whole_periods(3, 1), whole_periods(3, 4), whole_periods(6, 4), whole_periods(7, 4)
    (3, 6, 6, 10)
    """
    if period == 1:
        return steps
    periods = max(1, -(-(steps - WARMUP) // period))
    return WARMUP + periods * period


@kept_with_first(maxsize=None)
def steady_window(timeline: Timeline) -> SteadyWindow:
    """The window that all figures are taken from: without the first :data:`WARMUP` steps, or in a run of no more,
    without all but the last; of a measured run without those of :func:`warm_up`. Where workers have paces of their own
    it is the fastest one's: all still train until it is done.

    Raises :class:`ProgramError` for an empty timeline.
    """
    steps = _step_ends(timeline)
    step_numbers, begin, end = steps
    skip = min(WARMUP, len(step_numbers) - 1)
    if timeline.source != "simulated":  # a profiler begins where it was told to, often after the warm-up
        skip = min(warm_up(np.diff(end, prepend=begin)), len(step_numbers) - 1)
    window = _after(steps, skip)
    return _while_all_train(timeline, window) if timeline.own_paces else window


def _while_all_train(timeline: Timeline, window: SteadyWindow) -> SteadyWindow:
    """Of a window until the slowest worker is done, the part from when a worker has done its warm-up until one has done
    its last step."""
    train = workers(timeline)
    ended = step_ends(timeline)[:, train]
    begin = float(ended[window.left_out - 1].min()) if window.left_out else window.begin
    end = float(ended[-1].min())
    pace = paces_of_ranks(timeline, window.steps)[train]
    return replace(window, begin=begin, end=end, done=(end - begin) * float(pace.mean()))


def window_after(timeline: Timeline, left_out: int) -> SteadyWindow:
    """The window of a run without its first steps, so many as are ``left_out``.

    Raises :class:`ProgramError` for an empty timeline.
    """
    return _after(_step_ends(timeline), left_out)


def _after(steps: tuple[Ints, float, Floats], left_out: int) -> SteadyWindow:
    """The window without the first of the steps that :func:`_step_ends` says."""
    step_numbers, begin, end = steps
    return SteadyWindow(
        step_numbers[left_out:],
        float(end[left_out - 1]) if left_out else begin,
        float(end[-1]),
        float(end[0]) - begin,
        left_out,
        float(len(step_numbers) - left_out),
    )


def _step_ends(timeline: Timeline) -> tuple[Ints, float, Floats]:
    """Numbers of the steps of a run, when its first began, and when each ended [s]."""
    steps = timeline.op_steps
    ops = timeline.per_op()
    played = ops["ranks"] > 0
    if not played.any():
        raise ProgramError("the timeline is empty: there is no step to measure")
    step_numbers = np.unique(steps[played])
    end = np.array([ops["end"][played & (steps == step)].max() for step in step_numbers])
    begin = float(ops["ready"][played & (steps == step_numbers[0])].min())
    return step_numbers, begin, end


def has_steps(timeline: Timeline) -> bool:
    """Whether a run has steps: a trace whose spans nobody numbered is one window, from its first span to its last."""
    return timeline.source == "simulated" or any(op.step for op in kinds(timeline.ops))


def step_word(timeline: Timeline) -> str:
    """What shares are of: a step, or the window of a trace that has none."""
    return "step" if has_steps(timeline) else "window"


def a_step(timeline: Timeline) -> str:
    """What stands behind a time that is a step's: nothing where a trace has no steps."""
    return " a step" if has_steps(timeline) else ""


WARM = 1.25
"""Leading steps of a measured run that took so many times the median were warming up."""

CUT = 0.9
"""A first step of a measured run that is this much shorter than its shortest other was not recorded from its start."""


def warm_up(seconds: npt.ArrayLike) -> int:
    """How many leading steps of a measured run, which took these seconds [s], were warming up.

    A first step that is shorter than each of the others by more than they differ is left out too: it was under way,
    or its GPU had not begun with it, when the first span was recorded.
    """
    took = np.asarray(seconds, dtype=np.float64)
    settled = np.flatnonzero(took < WARM * np.median(took)) if len(took) else took
    leading = int(settled[0]) if len(settled) else 0
    cut = len(took) > 2 and took[0] < min(CUT * took[1:].min(), took[1:].min() - np.ptp(took[1:]))
    return 1 if cut and leading == 0 else leading


def paces_of_ranks(timeline: Timeline, steady: Ints) -> Floats:
    """(world_size,) float [steps/s]: what each rank does of the steps ``steady``, from the end of its own step before
    them, or from 0, to the end of its own last."""
    ended = step_ends(timeline)
    begin = ended[steady[0] - 1] if steady[0] else np.zeros(timeline.world_size)
    pace: Floats = len(steady) / (ended[steady[-1]] - begin)
    return pace


def _per_gpu(timeline: Timeline, window: SteadyWindow, world: int, of_op: Callable[[OpInfo], float]) -> float:
    """Mean over the first ``world`` ranks of what their ops of the steady steps add up to, ``of_op`` each."""
    steady = set(window.steps.tolist())
    flops = of_each(timeline.ops, lambda op: of_op(op) if op.step in steady else 0.0, np.float64)
    return float((flops * timeline.ranks_per_op(world)).sum() / world)


def _of_ranks(
    timeline: Timeline, window: SteadyWindow, pace: Floats | float, world: int
) -> tuple[Columns, dict[str, float]]:
    """Seconds of a step of each rank, by what its streams do, and of the compute stream by phase, mean over ranks.

    ``pace`` : [steps/s] of each of the first ``world`` ranks, or of all. Worked out for one rank of each class of
    equals. A receive is posted, and a rank ahead begins, a step early: spans of every step count for as long as they
    are in the window.
    """
    equals, class_of = alike(timeline)
    # Classes are in order of their first rank: those of the first ranks come first.
    ranks = equals[equals < world]
    class_of = class_of[:world]
    busy = occupancy(timeline, ranks, window.begin, window.end)
    seconds = seconds_of_ops(timeline, world, window.begin, window.end)
    waits = timeline.source == "simulated" and not staged(timeline)
    parted = _parted(busy, window.length if waits else None)
    steps = pace * window.length
    per_rank = {name: column[class_of] / steps for name, column in parted.items()}
    phases = {name: value / (world * window.done) for name, value in _by_phase(timeline, seconds).items()}
    return {"rank": np.arange(world), **per_rank}, phases


def _parted(busy: Columns, span: float | None) -> Columns:
    """Of seconds of :func:`clustersim.explain.occupancy.occupancy`, what ``summary`` tells of each rank.

    ``span`` : seconds in which a rank that does nothing waits for others; None where that may be something else.
    """
    told = {name: column for name, column in busy.items() if name not in ("host_s", "loads_s")}
    moving = busy["exposed_transfer_s"]
    if span is not None:
        told["exposed_communication_s"] = np.maximum(span - busy["compute_s"] - busy["host_s"], moving)
    told["waiting_for_peer_s"] = told["exposed_communication_s"] - moving
    told["compute_s"] = busy["compute_s"] - busy["loads_s"]
    return told


def _by_phase(timeline: Timeline, seconds: Floats) -> dict[str, float]:
    """What kernels take of each phase, of ``seconds`` of ops."""
    kernels = is_kernel(timeline) & ~holds_kernels(timeline)
    number = {phase: i for i, phase in enumerate(PHASES)}
    phase = of_each(timeline.ops, lambda op: number.get(op.phase, number["other"]), np.int64)
    total = np.bincount(phase, weights=seconds * kernels, minlength=len(PHASES))
    return {name: float(total[i]) for name, i in number.items() if total[i] > 0}


def hottest_links(use: LinkUse | None, begin: float, end: float, n: int) -> list[tuple[str, float, float]]:
    """``(name, utilisation, bytes)`` of the ``n`` busiest links between two times [s], busiest first; ties by id."""
    if use is None or end <= begin or not len(use.segment_start):
        return []
    start = use.segment_start
    stop = use.segment_end
    if start.min() < begin or stop.max() > end:
        use = replace(use, segment_start=np.clip(start, begin, end), segment_end=np.clip(stop, begin, end))
    nbytes = use.bytes_per_link()
    utilisation = nbytes / (use.link_bandwidth * (end - begin))
    # Links that carry as much but for rounding are ties: sums in another order must not name others.
    order = np.argsort(-np.round(utilisation / (utilisation.max() or 1.0), 9), kind="stable")[:n]
    return [(use.link_names[i], float(utilisation[i]), float(nbytes[i])) for i in order.tolist() if nbytes[i] > 0]
