"""What the textbooks say of data parallelism and of split models, beside what runs of shipped scenarios come to.

Each claim is a formula (N ranks, Z bytes of gradients, Psi parameters) and a figure taken out of a run. What a GPU
sends is what its links carried away from it, under the textbook's backend, which knows no protocol overhead.
``tests/test_claims.py`` holds every row to its tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np

from clustersim.mesh import Mesh
from clustersim.model import Layer, Model, Tensor
from clustersim.scenario import load, split_claims
from clustersim.scenario.claim import Claim, run, sent, told
from clustersim.scenario.result import Result
from clustersim.strategies import STRATEGIES
from clustersim.strategies.ps_report import Served
from clustersim.texts import Table

__all__ = ["Claim", "claims", "told"]

DDP, SERVER, ASYNC = "ddp_resnet50_1x8_v100", "ps_sync_cpu_1x8", "ps_async_1x8"
ZERO, FSDP = "zero1_llama3_8b_2x8_a100", "fsdp_mpt_7b_16x8_a100"


def claims(progress: Callable[[int, int], None] | None = None) -> list[Claim]:
    """Every claim, from runs made now (some seconds). ``progress`` is called with (groups done, groups in all)."""
    groups = (_volumes, _server, _growth, _states, _zero_volumes, _asynchrony, _prefetch, *split_claims.GROUPS)
    found: list[Claim] = []
    for done, group in enumerate(groups):
        found += group()
        if progress:
            progress(done + 1, len(groups))
    return found


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
        result = run(DDP, **machine, strategy__algorithm=algorithm, strategy__broadcast_buffers=False)
        what = f"all_reduce by {algorithm}, N = {n}: a GPU sends"
        yield Claim(what, formula, source, factor * _gradients(result), sent(result))


def _server() -> Iterator[Claim]:
    """A parameter server's own links."""
    result = run(SERVER)
    (server,) = cast(Served, result.of_strategy).servers
    for way, moved in (("in", server.bytes_in), ("out", server.bytes_out)):
        what = f"parameter server, N = 8: {way} at the server, a step"
        yield Claim(what, "N Z", "Li et al. 2014", 8 * _gradients(result), moved)


def _growth() -> Iterator[Claim]:
    """Seconds of communication at 32 workers over those at 8: VGG-16, one GPU on each machine, one switch."""
    machine = {"cluster__topology": "hgx-a100", "cluster__gpus_per_node": 1, "run__backend": "ideal"}
    small = {"model__name": "vgg16", "strategy__micro_batch_size": 1, "run__jitter": 0.0}
    rows: tuple[tuple[str, str, Table, int, str, float, str], ...] = (
        ("parameter server", SERVER, {"strategy__server": "gpu"}, 1, "N Z: 4 x", 4.0, "Li et al. 2014"),
        ("ring", DDP, {"strategy__algorithm": "ring"}, 0, "2 (N-1)/N Z: flat", 31 / 32 / (7 / 8), "Sergeev 2018"),
    )
    for name, scenario, knobs, more, formula, says, source in rows:
        at = {n: run(scenario, **machine, **small, **knobs, cluster__nodes=n + more) for n in (8, 32)}
        seconds = {n: result.summary["communication_s"] for n, result in at.items()}
        what = f"{name}: communication time at N = 32 over N = 8"
        yield Claim(what, formula, source, says, seconds[32] / seconds[8], "x", 0.02)


def _states() -> Iterator[Claim]:
    """The ZeRO paper's figure 1: model states of Psi = 7.5e9 on 64 GPUs."""
    psi, n = 7.5e9, 64
    layers = tuple(Layer(f"l{i}", "block", (Tensor(f"l{i}.w", 75_000_000),), ()) for i in range(100))
    model, mesh = Model("7.5b", "formula", layers), Mesh(np.arange(n), 8)
    row = STRATEGIES["zero"]
    formulas = {1: ("4 Psi + 12 Psi/N", 4 + 12 / n), 2: ("2 Psi + 14 Psi/N", 2 + 14 / n), 3: ("16 Psi/N", 16 / n)}
    for stage, (formula, each) in formulas.items():
        config = load(ZERO, {"strategy.zero_optimization.stage": stage, "strategy.param_dtype": "fp16"}).config
        yield Claim(
            f"ZeRO-{stage}, N = {n}, Psi = 7.5e9: model states of a GPU", formula, "arXiv:1910.02054, figure 1",
            each * psi, _model_states(row, model, mesh, config), "GB",
        )  # fmt: skip


def _model_states(row: Any, model: Model, mesh: Mesh, config: Any) -> float:
    from clustersim.memory import Training, memory

    held = row.holding(model, mesh, config)
    run = Training(micro_batch_size=1, dtype="fp16", param_dtype="fp16", holding=held)
    return memory(model, run).model_states


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
        result = run(
            ZERO, strategy__zero_optimization=knobs, model__name="gpt2", model__seq_len=1024, run__backend="ideal"
        )
        n, psi = result.prepared.mesh.world_size, result.prepared.model.parameters
        yield Claim(
            f"{name}: a GPU sends, over DDP's 2 (N-1)/N Z", formula, source,
            factor, sent(result) / (2 * (n - 1) / n * 2.0 * psi), "x", 0.01,
        )  # fmt: skip


def _asynchrony() -> Iterator[Claim]:
    """Bounded staleness: none is a synchronous run; enough of it leaves compute alone."""
    sync = run(ASYNC, strategy__mode="sync", strategy__staleness=0)
    zero = run(ASYNC, strategy__staleness=0)
    says, found = sync.summary["step_time_s"], zero.summary["step_time_s"]
    yield Claim("async with staleness 0: step time over the synchronous one", "1 x", "Ho et al. 2013", 1.0,
                found / says, "x", 1e-9)  # fmt: skip


def _prefetch() -> Iterator[Claim]:
    """FSDP1's backward_prefetch: earlier is not slower, and holds one unit more."""
    of = {p: run(FSDP, strategy__backward_prefetch=p, cluster__nodes=4) for p in ("BACKWARD_PRE", "None")}
    unit = max(layer.parameters for layer in of["None"].prepared.model.layers if layer.kind == "block") * 2.0
    more = of["BACKWARD_PRE"].memory.total - of["None"].memory.total
    yield Claim("FSDP, BACKWARD_PRE over no prefetch: peak memory grows by", "one gathered unit",
                "PyTorch's FSDP documentation", unit, more, "MiB", 0.05)  # fmt: skip
