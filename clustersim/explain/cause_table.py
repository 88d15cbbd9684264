"""The causes that lost time is charged to, one row each: its headline, its sentence, and both where no GPU is.

:mod:`clustersim.explain.charges` decides which instant is charged to which cause; what is said of one is here alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from clustersim.core.units import format_time
from clustersim.explain import sentences
from clustersim.explain.metrics import has_steps
from clustersim.explain.pace import peers_named
from clustersim.explain.sentences import op_quoted
from clustersim.explain.transfers import CHANGED

if TYPE_CHECKING:
    from clustersim.explain.booking import Charge
    from clustersim.explain.stalls import Causes

Sentence: TypeAlias = "str | Callable[[Causes, Charge], str]"
"""A sentence with the names of :func:`_filled`, or who makes it."""


@dataclass(frozen=True)
class CauseWords:
    """What is said of one cause.

    Parameters
    ----------
    name : as it is charged, and as ``stalls`` and ``--json`` have it. headline : behind "because", with ``{subject}``.
        Larger micro-batches are advised as ``{larger_batches}``, with whether memory has room
        for them, and empty where it has none.
    sentence : what, where and by how much, without what it costs. headline_on_cpu, sentence_on_cpu : the same of a run
        that was profiled where no GPU is; empty where nothing differs. headline_of_several : of several subjects;
        empty where the headline is true of any number.
    """

    name: str
    headline: str
    sentence: Sentence
    headline_on_cpu: str = ""
    sentence_on_cpu: Sentence = ""
    headline_of_several: str = ""


CAUSES = (
    CauseWords("link", "{subject} cannot carry more", sentences.narrow_link),
    CauseWords("shared link", "transfers share {subject}", sentences.shared_link),
    CauseWords(CHANGED, "the rate of {subject} changes in the run", sentences.shared_link),
    CauseWords("kernels", "communication kernels limit {subject}", sentences.limited_by_kernels),
    CauseWords(
        "latency", "collectives are too small: latency, not bandwidth, limits {subject}", sentences.latency_bound
    ),
    CauseWords("late start", "communication starts too late in backward", sentences.late_start),
    CauseWords(
        "slow rank",
        "{subject} is slow, and everybody waits for it",
        "Rank {holder} is slow: its kernels take {pace:.2f} times {peers}, and {waiters} for "
        "it, longest rank {rank} at {op}, {worst} while rank {holder} was still in {held}.",
        sentence_on_cpu="Rank {holder} is slow: its operators take {pace:.2f} times {peers}, and "
        "{waiters} for it, longest rank {rank} at {op}, {worst} while rank {holder} was still in {held}.",
        headline_of_several="{subject} are slow, and everybody waits for them",
    ),
    CauseWords(
        "uneven experts",
        "routing is skewed: ranks wait for those whose experts get the most tokens",
        sentences.uneven_experts,
    ),
    CauseWords("jitter", "ranks wait for the slowest", sentences.jitter),
    CauseWords("parameter server", "workers wait for the parameter server", sentences.parameter_server),
    CauseWords(
        "schedule",
        "GPUs idle by the schedule's own structure",
        sentences.schedule_bubble,
        headline_on_cpu="ranks idle by the schedule's own structure",
    ),
    CauseWords(
        "late launch",
        "ranks arrive at collectives at different times, because their hosts launch late",
        sentences.late_launch,
    ),
    CauseWords(
        "host copies",
        "GPUs wait for copies from and to the host",
        "Copies between host and GPU hold the GPU: rank {rank} waits {worst} for {moved}.",
        "ranks wait for copies",
        "Copies hold the rank: rank {rank} waits {worst} for {moved}.",
    ),
    CauseWords(
        "host",
        "GPUs wait for the host ({subject})",
        sentences.waits_for_host,
        "ranks wait for the host ({subject})",
        sentences.waits_for_host,
    ),
    CauseWords(
        "calls",
        "it is host-bound: the host calls layers more slowly than GPUs compute them; {larger_batches}CUDA "
        "graphs, compiled layers or fewer stages help",
        "Host-bound: the host takes longer to call a layer's modules, their gradients and its collectives than GPUs to "
        "compute them, {op} {worst} on rank {rank}; {larger_batch}CUDA graphs, compiled layers, fewer stages "
        "or a faster CPU would help, a faster GPU would not. What it takes is usual of the framework; [measured] "
        "layer_time says what it is on your machine.",
    ),
    CauseWords(
        "idle device",
        "it is launch-bound: GPUs idle with nothing queued",
        "Launch-bound: GPUs have nothing queued, since the host launches kernels more slowly than they run; on rank "
        "{rank} for {worst} in all.",
        "between operators nothing is recorded",
        "Between operators nothing is recorded: Python, the data loader or what the profiler does not see; on rank "
        "{rank} for {worst} in all.",
    ),
    CauseWords(
        "launch",
        "it is launch-bound: the host launches kernels more slowly than they run",
        "Launch-bound passes: all kernels of {op} and others are together shorter than the host takes to launch "
        "them; {larger_batch}fused kernels or CUDA graphs would help, a faster GPU would not.",
        "operators are so short that calling them takes as long",
        "Short operators: calling {op} and others takes as long as they do; a larger batch would help.",
    ),
    CauseWords("unknown", "communication is exposed", sentences.unknown_limit),
)
"""Every cause that :mod:`clustersim.explain.charges` charges to."""

CAUSE_NAMED = {cause.name: cause for cause in CAUSES}


def headline(causes: Causes, name: str, subject: str, *, several: bool = False) -> str:
    """Why a step is lost, after "because"; ``several`` : it has several subjects."""
    cause_row = CAUSE_NAMED[name]
    template = (cause_row.headline_on_cpu if causes.on_cpu else "") or cause_row.headline
    template = (cause_row.headline_of_several if several else "") or template
    return template.format(subject=subject, larger_batches=_larger(causes, "larger micro-batches"))


def sentence(causes: Causes, charge: Charge) -> str:
    """One cause as a sentence: what, where, by how much, and what it costs."""
    cause_row = CAUSE_NAMED[charge.cause]
    sentence = (cause_row.sentence_on_cpu if causes.on_cpu else "") or cause_row.sentence
    text = _filled(sentence, causes, charge) if isinstance(sentence, str) else sentence(causes, charge)
    step = format_time(causes.length / causes.steps)
    share = causes.share(charge)
    unit = "rank" if causes.on_cpu else "GPU"
    over = f"1 {unit}" if causes.workers == 1 else f"{causes.workers:,} {unit}s"
    whole = f"every {step} step" if has_steps(causes.timeline) else f"a {step} window"
    return f"{text} Cost: {format_time(causes.cost(charge))} of {whole} ({share:.1%}), mean over {over}."


def _larger(causes: Causes, advice: str) -> str:
    """Advice of larger micro-batches with whether memory has room for them; empty where it has none."""
    return f"{advice} ({causes.room}), " if causes.room is not None else ""


def _filled(template: str, causes: Causes, charge: Charge) -> str:
    return template.format(
        rank=charge.rank,
        ranks=len(charge.ranks),
        waiters="1 rank waits" if len(charge.ranks) == 1 else f"{len(charge.ranks)} ranks wait",
        holder=charge.holder_rank,
        pace=causes.pace[charge.holder_rank],
        peers=peers_named(causes.timeline, charge.holder_rank) if charge.holder_rank >= 0 else "",
        worst=format_time(charge.worst),
        op=op_quoted(causes, charge.op),
        held=op_quoted(causes, charge.holder_op),
        moved=op_quoted(causes, charge.holder_op if charge.holder_op >= 0 else charge.op),
        share=causes.share(charge),
        larger_batch=_larger(causes, "a larger micro-batch"),
    )
