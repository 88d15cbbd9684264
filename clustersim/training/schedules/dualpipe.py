"""DualPipe: micro-batches enter at both ends (DeepSeek-V3, arXiv 2412.19437, section 3.2.1; deepseek-ai/DualPipe).

Every rank holds two stages, r and p-1-r: the model is there twice. Half of the micro-batches start at rank 0 and go
down (chunk 0), half start at rank p-1 and go up (chunk 1); each direction numbers its own from 0. Where they meet,
the forward of one direction runs beside the backward of the other, and each hides the other's expert all-to-all. Rank
r of the lower half thus sees what rank r of a DualPipeV of p/2 ranks sees (its V's way back is the other direction's
way in), and the upper half is its mirror image:

    bubble = (p/2-1)(FB + B - 3W), FB being the time of a pair; peak p+1 stage passes on every rank; parameters twice.
"""

from __future__ import annotations

from clustersim.training.schedules.base import Orders, Schedule
from clustersim.training.schedules.dualpipev import dualpipev, pair_bubble


def dualpipe(p: int, chunks: int, m: int) -> Orders:
    """The lower half of the ranks as DualPipeV of half the ranks and micro-batches; the upper half mirrored."""
    lower = dualpipev(p // 2, chunks, m // 2)
    return lower + tuple(
        tuple(tuple(action._replace(chunk=1 - action.chunk) for action in slot) for slot in order)
        for order in reversed(lower)
    )


DUALPIPE = Schedule(
    "dualpipe",
    dualpipe,
    placement="both",
    chunks=2,
    splits_backward=True,
    microbatches=lambda p, m, options: m % 2 == 0 and m >= 2 * p,
    needs="an even number of at least 2 pp micro-batches, half for each direction",
    even_stages=True,
    bubble=lambda p, chunks, m, cost: pair_bubble(p // 2, chunks, m // 2, cost),
    peak=lambda rank, p, chunks, m: p + 1,
)
