"""What the textbooks say of data parallelism and of split models, beside what runs of shipped scenarios come to.

Each claim is a formula (N ranks, Z bytes of gradients, Psi parameters) and a figure taken out of a run or of an order
that was played. What a GPU sends is what its links carried away from it, under the textbook's backend, which knows no
protocol overhead. ``tests/test_claims.py`` holds every row to its tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from clustersim.core.mesh import Mesh
from clustersim.core.model import Layer, Model, Tensor
from clustersim.core.texts import Table
from clustersim.scenario import load
from clustersim.scenario.result import Result
from clustersim.training.memory import Training, memory
from clustersim.training.schedules import PassCosts, schedule, times
from clustersim.training.strategies import STRATEGIES
from clustersim.training.strategies.ps_report import ServerFigures

DDP = "ddp_resnet50_1x8_v100"
SERVER = "ps_sync_cpu_1x8"
ASYNC = "ps_async_1x8"
ZERO = "zero1_llama3_8b_2x8_a100"
FSDP = "fsdp_mpt_7b_16x8_a100"
PIPELINE = "1f1b_gpt2_xl_1x8_a100"
ONE_NODE = {"run__steps": 1, "run__backend": "ideal", "run__optimizer": "none"}
DENSE: Table = ONE_NODE | {
    "model__name": "gpt2-medium",
    "parallel__pp": 1,
    "parallel__schedule": "1f1b",
    "parallel__microbatches": 1,
    "strategy__micro_batch_size": 1,
}


@dataclass(frozen=True)
class Claim:
    """One row.

    Parameters
    ----------
    what : in words. formula : as the textbook writes it. source : where.
    says, found : by the formula, and by the run; both in bytes, or ratios where ``unit`` is "x"; "GB" and "MiB" say how
        bytes are written.
    within : how far apart the two may be, relative.
    """

    what: str
    formula: str
    source: str
    says: float
    found: float
    unit: str = "MiB"
    within: float = 1e-3

    @property
    def holds(self) -> bool:
        """Whether the run says what the formula says."""
        return abs(self.found - self.says) <= self.within * abs(self.says)


def _run(scenario: str, **changes: Any) -> Result:
    """A shipped scenario with changes: ``cluster__nodes=4`` is ``cluster.nodes``."""
    return load(scenario, {key.replace("__", "."): value for key, value in changes.items()}).run()


def _sent(result: Result) -> float:
    """Bytes that left a GPU in a step, by its links; on NVSwitch machines no GPU passes on another's bytes."""
    use = result.timeline.links
    topology = result.prepared.topology
    if use is None or not use.transfer_op.size:
        return 0.0
    leaves = np.isin(topology.link_src, topology.gpus)
    return float(use.bytes_per_link()[leaves].sum()) / result.prepared.mesh.world_size / result.scenario.steps


def told(claim: Claim) -> tuple[str, str]:
    """What the formula says and what the run found, as text."""
    scale = {"GB": 1e9, "MiB": 2.0**20, "x": 1.0}[claim.unit]
    digits = 3 if claim.unit == "x" else 1
    return f"{claim.says / scale:.{digits}f} {claim.unit}", f"{claim.found / scale:.{digits}f} {claim.unit}"


def claims(progress: Callable[[int, int], None] | None = None) -> list[Claim]:
    """Every claim, from runs made now (some seconds). ``progress`` is called with (groups done, groups in all)."""
    groups = (
        _volumes,
        _server,
        _growth,
        _states,
        _zero_volumes,
        _asynchrony,
        _prefetch,
        _bubbles,
        _blocking,
        _sequence_parallelism,
        _distributed_optimizer,
        _experts,
        _context,
    )
    all_claims: list[Claim] = []
    for done, group in enumerate(groups):
        all_claims += group()
        if progress:
            progress(done + 1, len(groups))
    return all_claims


def _gradients(result: Result) -> float:
    return result.prepared.model.parameters * 4.0


def _volumes() -> Iterator[Claim]:
    """Ways to all-reduce, by the bytes each GPU sends; DDP on eight GPUs."""
    n = 8
    ways = (
        ("ring", "2 (N-1)/N Z", 2 * (n - 1) / n, "Patarasuk and Yuan 2009"),
        ("ring_unsplit", "(N-1) Z", n - 1.0, "by counting"),
        ("direct", "(N-1) Z, in all N (N-1) Z", n - 1.0, "by counting"),
    )
    for algorithm, formula, factor, source in ways:
        machine = {"cluster__topology": "hgx-a100", "run__backend": "ideal"}
        result = _run(DDP, **machine, strategy__algorithm=algorithm, strategy__broadcast_buffers=False)
        claim_text = f"all_reduce by {algorithm}, N = {n}: a GPU sends"
        yield Claim(claim_text, formula, source, factor * _gradients(result), _sent(result))


def _server() -> Iterator[Claim]:
    """A parameter server's own links."""
    result = _run(SERVER)
    (server,) = cast(ServerFigures, result.of_strategy).servers
    for direction, moved in (("in", server.bytes_in), ("out", server.bytes_out)):
        claim_text = f"parameter server, N = 8: {direction} at the server, a step"
        yield Claim(claim_text, "N Z", "Li et al. 2014", 8 * _gradients(result), moved)


def _growth() -> Iterator[Claim]:
    """Seconds of communication at 32 workers over those at 8: VGG-16, one GPU on each machine, one switch."""
    machine = {"cluster__topology": "hgx-a100", "cluster__gpus_per_node": 1, "run__backend": "ideal"}
    small = {"model__name": "vgg16", "strategy__micro_batch_size": 1, "run__jitter": 0.0}
    rows: tuple[tuple[str, str, Table, int, str, float, str], ...] = (
        ("parameter server", SERVER, {"strategy__server": "gpu"}, 1, "N Z: 4 x", 4.0, "Li et al. 2014"),
        ("ring", DDP, {"strategy__algorithm": "ring"}, 0, "2 (N-1)/N Z: flat", 31 / 32 / (7 / 8), "Sergeev 2018"),
    )
    for name, scenario, knobs, more, formula, says, source in rows:
        result_at = {n: _run(scenario, **machine, **small, **knobs, cluster__nodes=n + more) for n in (8, 32)}
        seconds = {n: result.summary["communication_s"] for n, result in result_at.items()}
        claim_text = f"{name}: communication time at N = 32 over N = 8"
        yield Claim(claim_text, formula, source, says, seconds[32] / seconds[8], "x", 0.02)


def _states() -> Iterator[Claim]:
    """The ZeRO paper's figure 1: model states of Psi = 7.5e9 on 64 GPUs."""
    psi = 7.5e9
    n = 64
    layers = tuple(Layer(f"l{i}", "block", (Tensor(f"l{i}.w", 75_000_000),), ()) for i in range(100))
    model = Model("7.5b", "formula", layers)
    mesh = Mesh(np.arange(n), 8)
    formulas = {1: ("4 Psi + 12 Psi/N", 4 + 12 / n), 2: ("2 Psi + 14 Psi/N", 2 + 14 / n), 3: ("16 Psi/N", 16 / n)}
    for stage, (formula, per_parameter) in formulas.items():
        config = load(ZERO, {"strategy.zero_optimization.stage": stage, "strategy.param_dtype": "fp16"}).config
        zero_holding = STRATEGIES["zero"].holding(model, mesh, config)
        training = Training(micro_batch_size=1, dtype="fp16", param_dtype="fp16", holding=zero_holding)
        yield Claim(
            f"ZeRO-{stage}, N = {n}, Psi = 7.5e9: model states of a GPU",
            formula,
            "arXiv:1910.02054, figure 1",
            per_parameter * psi,
            memory(model, training).model_states,
            "GB",
        )


def _zero_volumes() -> Iterator[Claim]:
    """What a GPU sends under ZeRO, over what DDP's all_reduce of the same 16-bit gradients sends."""
    reuse = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    classic = {"use_multi_rank_bucket_allreduce": False}
    rows: tuple[tuple[str, Table, str, float, str], ...] = (
        ("ZeRO-1 that reduces to owners", {"stage": 1} | classic, "1 x", 1.0, "arXiv:1910.02054, section 7"),
        ("ZeRO-2 that reduces to owners", {"stage": 2} | classic, "1 x", 1.0, "arXiv:1910.02054, section 7"),
        ("ZeRO-3 that keeps nothing gathered", {"stage": 3} | reuse, "1.5 x", 1.5, "arXiv:1910.02054, section 7"),
        ("ZeRO-2 as DeepSpeed runs it", {"stage": 2}, "all_reduce + all_gather", 1.5, "deepspeed stage_1_and_2.py"),
    )
    for name, knobs, formula, factor, source in rows:
        result = _run(
            ZERO,
            strategy__zero_optimization=knobs,
            model__name="gpt2",
            model__seq_len=1024,
            model__activation_checkpointing="none",
            run__backend="ideal",
        )
        n = result.prepared.mesh.world_size
        psi = result.prepared.model.parameters
        yield Claim(
            f"{name}: a GPU sends, over DDP's 2 (N-1)/N Z",
            formula,
            source,
            factor,
            _sent(result) / (2 * (n - 1) / n * 2.0 * psi),
            "x",
            0.01,
        )


def _asynchrony() -> Iterator[Claim]:
    """Bounded staleness: none is a synchronous run; enough of it leaves compute alone."""
    sync = _run(ASYNC, strategy__mode="sync", strategy__staleness=0)
    zero = _run(ASYNC, strategy__staleness=0)
    says = sync.summary["step_time_s"]
    zero_time = zero.summary["step_time_s"]
    yield Claim(
        "async with staleness 0: step time over the synchronous one",
        "1 x",
        "Ho et al. 2013",
        1.0,
        zero_time / says,
        "x",
        1e-9,
    )


def _prefetch() -> Iterator[Claim]:
    """FSDP1's backward_prefetch: earlier is not slower, and holds one unit more."""
    result_of = {p: _run(FSDP, strategy__backward_prefetch=p, cluster__nodes=4) for p in ("BACKWARD_PRE", "None")}
    unit = max(layer.parameters for layer in result_of["None"].prepared.model.layers if layer.kind == "block") * 2.0
    more = result_of["BACKWARD_PRE"].memory.total - result_of["None"].memory.total
    yield Claim(
        "FSDP, BACKWARD_PRE over no prefetch: peak memory grows by",
        "one gathered unit",
        "PyTorch's FSDP documentation",
        unit,
        more,
        "MiB",
        0.05,
    )


def _bubbles() -> Iterator[Claim]:
    """Idle time over computing time of equal stages with free transfers; F = I = W."""
    p = 8
    m = 24
    v = 2
    rows = (
        ("gpipe", 1, "(p-1)/m", (p - 1) / m, "arXiv:1811.06965"),
        ("1f1b", 1, "(p-1)/m", (p - 1) / m, "arXiv:2104.04473"),
        ("interleaved_1f1b", v, "(p-1)/(v m)", (p - 1) / (v * m), "arXiv:2104.04473"),
        ("zb_h1", 1, "(p-1)/(3 m)", (p - 1) / (3 * m), "arXiv:2401.10241"),
    )
    for name, chunks, formula, says, source in rows:
        row = schedule(name)
        played = times(row.order(p, chunks, m), row.placement, PassCosts(1.0, 1.0, 1.0))
        work = max(played.busy)
        claim_text = f"{name}, p = {p}, m = {m}{f', v = {v}' if chunks > 1 else ''}: bubble over work"
        yield Claim(claim_text, formula, source, says, (played.makespan - work) / work, "x", 1e-9)


def _sequence_parallelism() -> Iterator[Claim]:
    """What a transformer layer's tensor-parallel ranks send: of two depths the difference."""
    t = 8
    tokens = 1024
    hidden = 1024
    layers = 12
    slopes = {}
    for sp in (False, True):
        knobs = DENSE | {"parallel__tp": t, "parallel__sequence_parallel": sp}
        depths = [_sent(_run(PIPELINE, **knobs, model__options={"layers": n})) for n in (layers, 2 * layers)]
        slopes[sp] = (depths[1] - depths[0]) / layers
    expected = 2.0 * tokens * hidden * (t - 1) / t
    yield Claim(
        f"tensor parallelism, t = {t}: a GPU sends in a layer",
        "4 x 2 (t-1)/t T h",
        "arXiv:1909.08053",
        8 * expected,
        slopes[False],
        "MiB",
        0.01,
    )
    yield Claim(
        "sequence parallelism over it: 6 gathers and 4 scatters",
        "10/8",
        "arXiv:2205.05198",
        1.25,
        slopes[True] / slopes[False],
        "x",
        0.01,
    )


def _distributed_optimizer() -> Iterator[Claim]:
    """Reduce-scatter of gradients and all-gather of parameters, where both have 16 bits."""
    knobs = DENSE | {"parallel__grad_reduce_in_fp32": False, "run__optimizer": "adamw"}
    sent_whole, shared = (
        _sent(_run(PIPELINE, **knobs, parallel__use_distributed_optimizer=on)) for on in (False, True)
    )
    yield Claim(
        "distributed optimizer, N = 8: a GPU sends, over all_reduce",
        "1 x",
        "arXiv:1910.02054",
        1.0,
        shared / sent_whole,
        "x",
        0.01,
    )


def _experts() -> Iterator[Claim]:
    """Tokens to their experts and back, forward and backward."""
    e = 8
    k = 2
    tokens = 1024
    hidden = 4096
    layers = 2
    knobs = DENSE | {"model__name": "mixtral-8x7b", "model__options": {"layers": layers}, "parallel__ep": e}
    result = _run(PIPELINE, **knobs, parallel__dispatcher="alltoall", parallel__routing="balanced")
    expected = 4 * k * 2.0 * tokens * hidden * (e - 1) / e
    yield Claim(
        f"expert parallelism, e = {e}, top {k}: a GPU sends in a layer",
        "4 k T h (e-1)/e",
        "arXiv:2006.16668",
        expected,
        _of(result, "all_to_all") / e / layers,
        "MiB",
        0.01,
    )


def _context() -> Iterator[Claim]:
    """Keys and values round the ring of context-parallel ranks; backward also brings their gradients round."""
    c = 8
    tokens = 1024
    hidden = 1024
    layers = 24
    result = _run(PIPELINE, **DENSE, parallel__cp=c)
    yield Claim(
        f"ring context parallelism, c = {c}: a GPU sends in a layer",
        "3 (c-1) 2 T/c h",
        "Transformer Engine",
        3 * (c - 1) * 2 * 2.0 * tokens / c * hidden,
        _of(result, "ring") / c / layers,
        "MiB",
        0.01,
    )


def _blocking() -> Iterator[Claim]:
    """What transfers add to a step of 1F1B whose stages wait for each: of two speeds of the links the difference.

    The count is of Megatron-LM's order of calls on four stages (MODEL_PARALLEL.md 2.3); the last stage's head is small.
    """
    for m in (8, 16):
        knobs = ONE_NODE | {
            "cluster__gpus_per_node": 4,
            "parallel__pp": 4,
            "parallel__microbatches": m,
            "run__jitter": 0,
            "model__options": {"layers": 24, "vocab": 128},
        }
        slow = _run(PIPELINE, **knobs, cluster__changes=[{"match": "node0/gpu*", "factor": 0.01}])
        fast = _run(PIPELINE, **knobs)
        transfer_gain = _transfer(slow) - _transfer(fast)
        gain_ratio = (slow.timeline.makespan - fast.timeline.makespan) / transfer_gain
        yield Claim(
            f"1f1b, p = 4, m = {m}: transfers that a step waits for",
            "2 m + 3",
            "Megatron-LM",
            2.0 * m + 3,
            gain_ratio,
            "x",
            0.03,
        )


def _transfer(result: Result) -> float:
    """Seconds of the shortest message: one for which both sides are ready."""
    played = result.timeline.per_op()
    ranks = played["ranks"]
    seconds = played["seconds"]
    sent = [i for i, op in enumerate(result.timeline.ops) if op.kind == "send" and ranks[i]]
    return min(float(seconds[i] / ranks[i]) for i in sent)


def _of(result: Result, op: str) -> float:
    """Payload of all ranks together in a step, of one sort of op."""
    rows = result.volume
    return float(sum(sent for name, sent in zip(rows["op"], rows["sent"], strict=True) if str(name).startswith(op)))
