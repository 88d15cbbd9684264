"""Interleaved 1F1B: several chunks on each rank, 1F1B over the chunks (Narayanan et al., arXiv 2104.04473, 2.2).

The model is cut into p*v stages that go round the ranks v times. A rank fills the pipeline with chunks that are v
times shorter, so the bubble is v times shorter: (p-1)(F+B)/v for F and B of the rank's whole share. It costs v times
as many messages, and memory: rank 0 holds p*(1 + (p-1)/(pv)) stages' worth of activations instead of p (Korthikanti,
2205.05198).

Micro-batches go through in groups of g (``microbatch_group_size_per_vp_stage``): the group through chunk 0, then
through chunk 1, ... then the next group. Backwards go through the chunks in reverse. g = p is the tightest; a larger
g leaves more time for each message and holds more.

    warm-up of rank r = min(vm, 2(p-r-1) + (v-1)g) forwards, then F and B in turn
    peak of rank r    = min(vm, 2(p-r-1) + (v-1)g + 1) chunk passes

The 2 is the way to the next rank and back. With ``overlap_moe_expert_parallel_comm`` Megatron adds one forward to the
warm-up, so that the F and the B that then alternate belong to unrelated micro-batches, and runs them beside each other:
the expert exchange of the one hides behind the computing of the other. One more micro-batch is held for it.
"""

from __future__ import annotations

from typing import Any

from clustersim.core.errors import ScenarioError
from clustersim.training.schedules.base import Action, Options, Order, Orders, Schedule, ScheduleOption
from clustersim.training.schedules.gpipe import fill_and_drain
from clustersim.training.schedules.one_f_one_b import in_turn

GROUP = ScheduleOption(
    "microbatch_group_size_per_vp_stage",
    int,
    None,
    "micro-batches that go through one chunk before the next chunk's turn, from pp to microbatches; pp if not given",
    1,
)
BESIDE = ScheduleOption(
    "overlap_moe_expert_parallel_comm",
    bool,
    False,
    "run the forward of one micro-batch beside the backward of another, to hide the experts' exchanges",
)


def interleaved(p: int, chunks: int, m: int, **options: Any) -> Orders:
    """Of each rank: its warm-up, then F and B in turn (or in pairs), then the rest of B."""
    group = group_of(p, m, options)
    beside = bool(options[BESIDE.name])
    forwards, backwards = (tuple((action,) for action in passes(kind, m, chunks, group)) for kind in "FB")
    warm = [warmup(rank, p, chunks, m, group, 2) + beside for rank in range(p)]
    return tuple((in_pairs if beside else in_turn)(forwards, backwards, many) for many in warm)


def in_pairs(forwards: Order, backwards: Order, warm: int) -> Order:
    """``warm`` forwards (or all there are), then forwards beside backwards, then the rest of the backwards."""
    steady = max(len(forwards) - warm, 0)
    pairs = (forward + backward for forward, backward in zip(forwards[warm:], backwards[:steady], strict=True))
    return (*forwards[:warm], *pairs, *backwards[steady:])


def passes(kind: str, m: int, chunks: int, group: int) -> list[Action]:
    """A rank's forwards, or its backwards (any other kind), in order: group by group, each through all its chunks.

    >>> [f"{a.microbatch}.{a.chunk}" for a in passes("B", 3, 2, 2)]
    ['0.1', '1.1', '0.0', '1.0', '2.1', '2.0']
    """
    laps = range(chunks) if kind == "F" else range(chunks - 1, -1, -1)
    return [
        Action(kind, k, chunk)
        for first in range(0, m, group)
        for chunk in laps
        for k in range(first, min(first + group, m))
    ]


def warmup(rank: int, p: int, chunks: int, m: int, group: int, per_hop: int) -> int:
    """Forwards before the first backward: the last rank's, and ``per_hop`` for each rank between it and this one."""
    return min(chunks * m, (chunks - 1) * group + per_hop * (p - 1 - rank))


def group_of(p: int, m: int, options: Options) -> int:
    """Micro-batches of a group: as asked, else an equal share of PyTorch's rounds, which is p where p divides m."""
    given = options.get(GROUP.name)
    if given is None:
        return m // rounds(p, m)
    group = int(given)
    if not p <= group <= m:
        raise ScenarioError(
            f"{GROUP.name} = {group} must be from pp = {p} to microbatches = {m}; use {min(max(group, p), m)} "
            f"(at $.parallel.{GROUP.name})"
        )
    return group


def rounds(p: int, m: int) -> int:
    """How many groups PyTorch makes of m micro-batches: as many as give each at least p, and at least one."""
    return max(1, m // p)


def works(p: int, m: int, options: Options) -> bool:
    """PyTorch: the rounds are equal. Megatron, with a group size: what is left of m is nothing or at least p.

    A group size that is none for any m is :func:`group_of`'s to refuse.
    """
    given = options.get(GROUP.name)
    if given is None:
        return m % rounds(p, m) == 0
    return not p <= given <= m or m % int(given) == 0 or m % int(given) >= p


def _peak(rank: int, p: int, chunks: int, m: int, **options: Any) -> int:
    warm = warmup(rank, p, chunks, m, group_of(p, m, options), 2) + bool(options[BESIDE.name])
    return min(chunks * m, warm + 1)


INTERLEAVED = Schedule(
    "interleaved_1f1b",
    interleaved,
    chunks=None,
    aliases=("interleaved", "1F1B-interleaved", "1F1B-I", "forward_backward_pipelining_with_interleaving"),
    options=(GROUP, BESIDE),
    microbatches=works,
    needs="micro-batches in groups of at least pp: a multiple of pp, or groups that leave no rest below pp",
    bubble=fill_and_drain,
    peak=_peak,
)
