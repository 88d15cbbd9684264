"""What is to be said of a run's figures, once it is known how the run went."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from clustersim.core.program import Compute
from clustersim.core.timeline import step_ends
from clustersim.core.units import format_bytes, format_time
from clustersim.explain.metrics import steady_window, window_after
from clustersim.explain.volume import host_copies
from clustersim.model.seconds.conv import is_winograd
from clustersim.scenario.result.beside_published import beside_published
from clustersim.scenario.result.making_fit import making_fit
from clustersim.scenario.result.trust import trust
from clustersim.training.strategies.fsdp_config import FSDPConfig
from clustersim.training.strategies.offloading import ON_HOST, work_of
from clustersim.training.strategies.zero_config import ZeroConfig

if TYPE_CHECKING:
    from clustersim.scenario.file.schema import Change
    from clustersim.scenario.result import Result

SETTLED = 0.03
"""How much the pace of the later half of the steps may differ from the earlier half's in a steady state."""
MASKED = 0.03
"""Share of an MFU's FLOPs from which it is told that a causal mask skips them."""
LEAST = 8
"""Steps from which a pace is told at all where every worker has its own."""


def outcome_notes(result: Result) -> Iterator[str]:
    """What a result must say of its figures."""
    file = result.scenario.file
    config = result.scenario.config
    strategy = result.scenario.strategy.name
    together = result.scenario.strategy.together(config)
    if file.published is not None:
        yield from beside_published(result, trust(result.prepared))
    if not together:
        yield from _own_steps(result)
        yield from _unsettled(result)
    yield from making_fit(result)
    yield from _timed_changes(result)
    yield from _host_copies(result)
    yield from _host_optimizer(result)
    if strategy == "parameter_server" and together:
        yield (
            "parameter_server: workers that end together send together, and those that end apart fill the servers' "
            "pauses: a faster link or GPU can make a step some percent longer"
        )
    yield from _masked_counted(result)
    kernels = [kernel for layer in result.prepared.model.layers for kernel in layer.kernels if kernel.kind == "conv"]
    if any(is_winograd(result.prepared.device, file.model.dtype, kernel) for kernel in kernels):
        yield (
            "MFU and HFU count direct convolutions; cuDNN runs those of 3x3 and stride 1 in fp32 as Winograd, which "
            "executes up to four times fewer products, so that both may be above 100 %"
        )


def _masked_counted(result: Result) -> Iterator[str]:
    """That MFU counts products that a causal mask skips and HFU does not, where they differ visibly by it."""
    mfu = result.summary["mfu"]
    hfu = result.summary["hfu"]
    model = result.prepared.model
    causal = sum(k.model_flops for layer in model.layers for k in layer.kernels if k.causal)
    masked = 0.5 * causal / (model.flops_per_sample() or 1.0)
    if mfu and hfu and (masked >= MASKED or (masked and mfu > hfu)):
        yield (
            f"MFU counts attention's square whole, as PaLM does (6 N + 12 L H Q T a token), and HFU what kernels "
            f"execute: a causal mask skips half of the square. Counted without that half, as Megatron-LM counts, MFU "
            f"is {mfu * (1.0 - masked):.1%}"
        )


def _host_copies(result: Result) -> Iterator[str]:
    """What goes between GPUs and their hosts, which no collective and no link of the tables has."""
    to_host, from_host = host_copies(result.timeline, result.summary["steady_steps"])
    if to_host or from_host:
        both = f"{format_bytes(to_host)} to hosts and {format_bytes(from_host)} from them"
        workers = result.prepared.mesh.workers
        each = f"{format_bytes(to_host / workers)} and {format_bytes(from_host / workers)}"
        pace = f", at {' to '.join(_paces(result))} GB/s"
        yield f"copied in a step beside collectives: {both}; of each GPU {each}{pace}"


def _paces(result: Result) -> Iterator[str]:
    """The slowest and the fastest rate of copies with the host [GB/s], once where they are alike."""
    ops = (op for role in result.prepared.program.roles for op in role.ops if isinstance(op, Compute))
    rates = [op.nbytes / float(np.max(op.duration)) for op in ops if op.phase == "memcpy" and op.nbytes]
    yield from dict.fromkeys(f"{rate / 1e9:.3g}" for rate in (min(rates), max(rates)))


def _host_optimizer(result: Result) -> Iterator[str]:
    """What is assumed of an optimizer on the host, and what threads of a rank's own would make of it; nothing where
    somebody says how fast its memory is."""
    config = result.scenario.config
    if not isinstance(config, FSDPConfig | ZeroConfig) or not config.offloads_optimizer or config.dram_bandwidth:
        return
    timed = (op for role in result.prepared.program.roles for op in role.ops if isinstance(op, Compute))
    seconds = [float(np.max(op.duration)) for op in timed if op.name == ON_HOST]
    if not seconds:
        return
    socket = result.prepared.cost.host_bandwidth
    work = work_of(result.prepared.mesh, config)
    rate = work.rate(socket)
    best = replace(work, threads=None, bound=True).rate(socket)
    threads = "all cores" if work.active == inf else f"{work.active:.0f} thread(s) a rank (OMP_NUM_THREADS)"
    usual = ", as torchrun and accelerate start several" if work.threads is None and work.active == 1 else ""
    note = (
        f"the {ON_HOST} takes {format_time(max(seconds))} of a step: {threads}{usual}, reading and writing "
        f"{rate / 1e9:.3g} GB/s of memory a rank; published ones were up to three times as slow "
        "(strategy.host_threads, strategy.dram_bandwidth)"
    )
    if best > rate:
        note += f"; with cores of its own (strategy.bind_cores) a rank has {best / 1e9:.3g} GB/s"
    yield note


def _timed_changes(result: Result) -> Iterator[str]:
    """For how much of the steps that figures are of a link was changed that is so for a time only."""
    window = steady_window(result.timeline)
    length = window.end - window.begin
    n = len(window.steps)
    for change in result.scenario.file.cluster.changes:
        seen = _overlap(change, window.begin, window.end) if change.timed else length
        if not seen:
            yield (
                f"{change.match} changes outside of the steps that figures are of, which are from "
                f"{format_time(window.begin)} to {format_time(window.end)} of the run; run.steps makes it longer"
            )
        elif seen < length:
            begin = window_after(result.timeline, window.left_out).begin
            took = np.diff([begin, *step_ends(result.timeline)[window.steps].max(axis=1)])
            yield (
                f"{change.match} is changed for {format_time(seen)} of the {format_time(length)} that figures are of, "
                f"{n} step(s) of {format_time(took.min())} to {format_time(took.max())}; run.steps makes them more"
            )


def _overlap(change: Change, begin: float, end: float) -> float:
    """Seconds between two moments in which a link is changed."""
    since = change.since or 0.0
    lasts = np.inf if change.until is None else change.until - (change.since or 0.0)

    def until(moment: float) -> float:
        """Seconds of change from its begin to a moment."""
        periods, rest = divmod(max(moment - since, 0.0), change.every or np.inf)
        return periods * min(lasts, change.every or 0.0) + min(rest, lasts)

    return float(until(end) - until(begin))


def _own_steps(result: Result) -> Iterator[str]:
    """Whose step the step's time is, where workers differ so much that the slowest one's is another."""
    step = result.summary["step_time_s"]
    slowest = result.summary["slowest_step_s"] or step
    if slowest > (1.0 + SETTLED) * step:
        yield (
            f"asynchronous: in the step time, {format_time(step)}, all workers, each at its own pace, do a step's "
            f"samples; the slowest takes {format_time(slowest)} for its own part"
        )


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
