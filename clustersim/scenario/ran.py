"""A run in words: what was run, its figures, and what is to be said of them once it is known how the run went."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from clustersim.core import ranges
from clustersim.core.timeline import step_ends
from clustersim.core.tomls import plainly
from clustersim.core.units import format_time
from clustersim.explain.metrics import steady_window
from clustersim.model.seconds.conv import is_winograd
from clustersim.model.seconds.unstated import half_width
from clustersim.scenario.beside_published import beside_published

if TYPE_CHECKING:
    from clustersim.core.device import Device
    from clustersim.core.model import Model
    from clustersim.scenario.result import Result
    from clustersim.scenario.running import Prepared
    from clustersim.scenario.schema import Change


SETTLED = 0.03
"""How much the pace of the later half of the steps may differ from the earlier half's in a steady state."""
LEAST = 8
"""Steps from which a pace is told at all where every worker has its own."""


def ran(prepared: Prepared) -> Iterator[tuple[str, str]]:
    """(what, in words), for the head of a run's answer."""
    p = prepared
    file = prepared.scenario.file
    between = f"{p.mesh.nproc_per_node} {p.devices}"
    yield "machine", f"{p.topology.name}: {p.mesh.n_nodes:,} node(s) x {between} = {p.gpus:,} GPUs"
    length = file.model.seq_len or (p.model.seq_len if file.model.file is not None else 0)
    tokens = f", {length:,} tokens a sample" if length else ""
    size = f"{p.model.parameters:,} parameters in {p.model.depth}"
    if p.model.partly_frozen:
        size = f"{size}, {p.model.trained:,} trained ({p.model.trained / p.model.parameters:.2%})"
    yield "model", f"{p.model.name}: {size}, {file.model.dtype}{tokens}"
    yield "strategy", f"{_strategy(p)}; {_batch(p)}"
    if p.scenario.changes:
        yield "changed", ", ".join(f"{key} = {plainly(value)}" for key, value in p.scenario.changes.items())


def _strategy(p: Prepared) -> str:
    kind = p.scenario.strategy.name
    if p.split is None:
        return kind
    degrees = (f"{name} {p.mesh.size(name)}" for name in ("tp", "cp", "pp", "ep", "dp") if p.mesh.size(name) > 1)
    return f"{kind} beside {', '.join(degrees)}"


def _batch(p: Prepared) -> str:
    config = p.scenario.config
    passes = config.gradient_accumulation_steps
    replicas = p.mesh.size("dp")
    each = f"{config.micro_batch_size:,} sample(s) a micro-batch"
    several = f", {passes:,} micro-batches a step" if passes > 1 else ""
    return f"{each}{several}, {config.micro_batch_size * passes * replicas:,} samples a step"


LEAST_LEFT = 0.5
"""Share of a range that measured steps leave at least: what other settings add (network, bubbles) was not in them."""


class Trust(msgspec.Struct, frozen=True):
    """The range around a step time: ``p50`` and ``p90`` (relative), the ``rows`` and ``publishers`` they are from, and
    ``as_of``, the day of the validation; ``assumed`` : the half-width (nine in ten) of what the GPU's own file leaves
    open, which is in both; ``narrowed`` : the share of the range that measured steps left; ``unseen`` : the GPU, where
    none of the steps ran on its generation, which both are wider for; ``kind`` : which published steps it is like
    (:func:`step_kind`)."""

    p50: float
    p90: float
    rows: int
    publishers: int
    as_of: str
    assumed: float = 0.0
    narrowed: float = 1.0
    unseen: str = ""
    kind: str = ""

    def __str__(self) -> str:
        if self.narrowed < 1:
            return (
                f"half within {self.p50:.0%}, nine in ten within {self.p90:.0%}: the range of {self.rows:,} published "
                f"steps of this kind, of which measured ones leave {self.narrowed:.0%}"
            )
        several = self.publishers > 1
        publishers = f"{self.publishers} publishers, each weighing the same" if several else "one publisher"
        more = f", wider by the {ranges.UNSEEN:.0%} of kernels that none of them ran: a {self.unseen}'s"
        return (
            f"+-{self.p50:.0%}, as half of {self.rows:,} published steps of this kind were ({publishers})"
            f"{more if self.unseen else ''}; "
            f"one in ten was off by more than {self.p90:.0%}, where host, network or software were not as described: "
            "numbers of your own machine ([measured], clustersim calibrate) tell whether yours are"
            + (f"; with {self.assumed:.0%} for what is assumed of the GPU" if self.assumed else "")
        )


def trust(prepared: Prepared) -> Trust:
    """How far steps of this kind were from their predictions."""
    fit = prepared.scenario.fit
    kind = step_kind(prepared.scenario.strategy.name, prepared.model, split=prepared.split is not None)
    left = 1.0 if fit is None else max(fit.narrowed, LEAST_LEFT)
    return trust_in(kind, prepared.device, prepared.scenario.file.model.dtype, left)


def step_kind(strategy: str, model: Model, *, split: bool) -> str:
    """Which published steps a step is like: those of its ``strategy``, unless adapters, experts or a ``split`` tell
    more."""
    if model.partly_frozen:
        return "adapters"
    if any(tensor.cut.startswith("expert") for layer in model.layers for tensor in layer.tensors):
        return "experts"
    return "split" if split else strategy


def trust_in(kind: str, gpu: Device, dtype: str, left: float = 1.0) -> Trust:
    """How far published steps of a :func:`step_kind` were from their predictions, on this GPU; ``left`` : the share of
    the range that measured steps left."""
    told = any(item.field == "generation" for item in gpu.assumed)  # and is in what is assumed
    arch = "" if told else gpu.arch
    found = ranges.of_step(kind, arch=arch)
    assumed = half_width(gpu, dtype) if gpu.assumed else 0.0
    half = math.hypot(found.p50, ranges.HALF_OF_NINE * assumed)
    nearly_all = math.hypot(found.p90, assumed)
    unseen = "" if ranges.has_steps(arch) else f"{gpu.name} ({arch})"
    return Trust(left * half, left * nearly_all, found.rows, found.groups, ranges.as_of(), assumed, left, unseen, kind)


def outcome_notes(result: Result) -> Iterator[str]:
    """What a result must say of its figures."""
    file = result.scenario.file
    config = result.scenario.config
    strategy = result.scenario.strategy.name
    together = result.scenario.strategy.together(config)
    if file.published is not None:
        yield from beside_published(result, trust(result.prepared))
    if not together:
        yield from _unsettled(result)
    yield from _timed_changes(result)
    if strategy == "parameter_server" and together:
        yield (
            "parameter_server: workers that end together send together, and those that end apart fill the servers' "
            "pauses: a faster link or GPU can make a step some percent longer"
        )
    kernels = [kernel for layer in result.prepared.model.layers for kernel in layer.kernels if kernel.kind == "conv"]
    if any(is_winograd(result.prepared.device, file.model.dtype, kernel) for kernel in kernels):
        yield (
            "MFU and HFU count direct convolutions; cuDNN runs those of 3x3 and stride 1 in fp32 as Winograd, which "
            "executes up to four times fewer products, so that both may be above 100 %"
        )


def _timed_changes(result: Result) -> Iterator[str]:
    """For how much of the steps that figures are of a link was changed that is so for a time only."""
    window = steady_window(result.timeline)
    length = window.end - window.begin
    n = len(window.steps)
    for one in result.scenario.file.cluster.changes:
        seen = _overlap(one, window.begin, window.end) if one.timed else length
        if not seen:
            yield (
                f"{one.match} changes outside of the steps that figures are of, which are from "
                f"{format_time(window.begin)} to {format_time(window.end)} of the run; run.steps makes it longer"
            )
        elif seen < length:
            took = np.diff([window.begin, *step_ends(result.timeline)[window.steps].max(axis=1)])
            yield (
                f"{one.match} is changed for {format_time(seen)} of the {format_time(length)} that figures are of, {n} "
                f"step(s) of {format_time(took.min())} to {format_time(took.max())}; run.steps makes them more"
            )


def _overlap(change: Change, begin: float, end: float) -> float:
    """Seconds between two moments in which a link is changed."""
    since = change.since or 0.0
    lasts = np.inf if change.until is None else change.until - (change.since or 0.0)

    def until(moment: float) -> float:
        periods, rest = divmod(max(moment - since, 0.0), change.every or np.inf)
        return periods * min(lasts, change.every or 0.0) + min(rest, lasts)

    return float(until(end) - until(begin))


def _unsettled(result: Result) -> Iterator[str]:
    """Asynchronous workers drift apart and their requests spread in time, so that the first steps are not the last."""
    steps = result.summary["steady_steps"]
    more = f"run.steps = {4 * result.scenario.steps} would tell more"
    if len(steps) < LEAST:
        yield f"asynchronous: {len(steps)} steps are too few to tell whether the pace is steady; {more}"
        return
    ended = step_ends(result.timeline)[[steps[0] - 1, *steps], : result.prepared.mesh.workers]
    half = len(steps) // 2
    early = float(np.mean(half / (ended[half] - ended[0])))
    late = float(np.mean((len(steps) - half) / (ended[-1] - ended[half])))
    change = late / early - 1
    if abs(change) > SETTLED:
        word = "faster" if change > 0 else "slower"
        yield (
            f"asynchronous: no steady state is reached, the last {len(steps) - half} steps are {abs(change):.1%} "
            f"{word} than the {half} before, and more steps give other figures; {more}"
        )
