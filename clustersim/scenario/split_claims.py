"""What papers say of split models, beside orders that were played and bytes that links and ops carried."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from clustersim.scenario.claim import Claim, run, sent
from clustersim.scenario.result import Result
from clustersim.schedules import schedule, times
from clustersim.schedules.base import Costs
from clustersim.texts import Table

PIPELINE = "1f1b_gpt2_xl_1x8_a100"
ONE_NODE = {"run__steps": 1, "run__backend": "ideal", "run__optimizer": "none"}
DENSE: Table = ONE_NODE | {"model__name": "gpt2-medium", "parallel__pp": 1, "parallel__schedule": "1f1b",
                                    "parallel__microbatches": 1, "strategy__micro_batch_size": 1}  # fmt: skip


def _bubbles() -> Iterator[Claim]:
    """Idle time over computing time of equal stages with free transfers; F = I = W."""
    p, m, v = 8, 24, 2
    rows = (
        ("gpipe", 1, "(p-1)/m", (p - 1) / m, "arXiv:1811.06965"),
        ("1f1b", 1, "(p-1)/m", (p - 1) / m, "arXiv:2104.04473"),
        ("interleaved_1f1b", v, "(p-1)/(v m)", (p - 1) / (v * m), "arXiv:2104.04473"),
        ("zb_h1", 1, "(p-1)/(3 m)", (p - 1) / (3 * m), "arXiv:2401.10241"),
    )
    for name, chunks, formula, says, source in rows:
        row = schedule(name)
        played = times(row.order(p, chunks, m), row.placement, Costs(1.0, 1.0, 1.0))
        work = max(played.busy)
        what = f"{name}, p = {p}, m = {m}{f', v = {v}' if chunks > 1 else ''}: bubble over work"
        yield Claim(what, formula, source, says, (played.makespan - work) / work, "x", 1e-9)


def _sequence_parallelism() -> Iterator[Claim]:
    """What a transformer layer's tensor-parallel ranks send: of two depths the difference."""
    t, tokens, hidden, layers = 8, 1024, 1024, 12
    found = {}
    for sp in (False, True):
        knobs = DENSE | {"parallel__tp": t, "parallel__sequence_parallel": sp}
        depths = [sent(run(PIPELINE, **knobs, model__options={"layers": n})) for n in (layers, 2 * layers)]
        found[sp] = (depths[1] - depths[0]) / layers
    each = 2.0 * tokens * hidden * (t - 1) / t
    yield Claim(f"tensor parallelism, t = {t}: a GPU sends in a layer", "4 x 2 (t-1)/t T h", "arXiv:1909.08053",
                8 * each, found[False], "MiB", 0.01)  # fmt: skip
    yield Claim("sequence parallelism over it: 6 gathers and 4 scatters", "10/8", "arXiv:2205.05198", 1.25,
                found[True] / found[False], "x", 0.01)  # fmt: skip


def _distributed_optimizer() -> Iterator[Claim]:
    """Reduce-scatter of gradients and all-gather of parameters, where both have 16 bits."""
    knobs = DENSE | {"parallel__grad_reduce_in_fp32": False, "run__optimizer": "adamw"}
    whole, shared = (sent(run(PIPELINE, **knobs, parallel__use_distributed_optimizer=on)) for on in (False, True))
    yield Claim("distributed optimizer, N = 8: a GPU sends, over all_reduce", "1 x", "arXiv:1910.02054", 1.0,
                shared / whole, "x", 0.01)  # fmt: skip


def _experts() -> Iterator[Claim]:
    """Tokens to their experts and back, forward and backward."""
    e, k, tokens, hidden, layers = 8, 2, 1024, 4096, 2
    knobs = DENSE | {"model__name": "mixtral-8x7b", "model__options": {"layers": layers}, "parallel__ep": e}
    result = run(PIPELINE, **knobs, parallel__dispatcher="alltoall", parallel__routing="balanced")
    each = 4 * k * 2.0 * tokens * hidden * (e - 1) / e
    yield Claim(f"expert parallelism, e = {e}, top {k}: a GPU sends in a layer", "4 k T h (e-1)/e", "arXiv:2006.16668",
                each, _of(result, "all_to_all") / e / layers, "MiB", 0.01)  # fmt: skip


def _context() -> Iterator[Claim]:
    """Keys and values round the ring of context-parallel ranks; backward also brings their gradients round."""
    c, tokens, hidden, layers = 8, 1024, 1024, 24
    result = run(PIPELINE, **DENSE, parallel__cp=c)
    yield Claim(f"ring context parallelism, c = {c}: a GPU sends in a layer", "3 (c-1) 2 T/c h", "Transformer Engine",
                3 * (c - 1) * 2 * 2.0 * tokens / c * hidden, _of(result, "ring") / c / layers, "MiB", 0.01)  # fmt: skip


def _blocking() -> Iterator[Claim]:
    """What transfers add to a step of 1F1B whose stages wait for each: of two speeds of the links the difference.

    The count is of Megatron-LM's order of calls on four stages (MODEL_PARALLEL.md 2.3); the last stage's head is small.
    """
    for m in (8, 16):
        knobs = ONE_NODE | {"cluster__gpus_per_node": 4, "parallel__pp": 4, "parallel__microbatches": m,
                            "run__jitter": 0, "model__options": {"layers": 24, "vocab": 128}}  # fmt: skip
        slow = run(PIPELINE, **knobs, cluster__changes=[{"match": "node0/gpu*", "factor": 0.01}])
        fast = run(PIPELINE, **knobs)
        each = _transfer(slow) - _transfer(fast)
        found = (slow.timeline.makespan - fast.timeline.makespan) / each
        yield Claim(f"1f1b, p = 4, m = {m}: transfers that a step waits for", "2 m + 3", "Megatron-LM", 2.0 * m + 3,
                    found, "x", 0.03)  # fmt: skip


def _transfer(result: Result) -> float:
    """Seconds of the shortest message: one for which both sides are ready."""
    played = result.timeline.per_op()
    ranks, seconds = played["ranks"], played["seconds"]
    sent = [i for i, op in enumerate(result.timeline.ops) if op.kind == "send" and ranks[i]]
    return min(float(seconds[i] / ranks[i]) for i in sent)


def _of(result: Result, op: str) -> float:
    """Payload of all ranks together in a step, of one sort of op."""
    rows = result.volume
    return float(sum(sent for name, sent in zip(rows["op"], rows["sent"], strict=True) if str(name).startswith(op)))


GROUPS: tuple[Callable[[], Iterator[Claim]], ...] = (
    _bubbles, _blocking, _sequence_parallelism, _distributed_optimizer, _experts, _context,
)  # fmt: skip
"""Each makes some claims."""
