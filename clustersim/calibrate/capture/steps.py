"""Part (c): real training steps of a small GPT, by strategy, with a profile of every rank.

A strategy is a function that builds its model and returns the step; they are PyTorch's own: DataParallel,
DistributedDataParallel, ZeroRedundancyOptimizer, fully_shard, and a parameter server over send and recv.
"""

from __future__ import annotations

import contextlib
import gzip
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from clustersim.calibrate.capture import gpt
from clustersim.calibrate.capture.parts import Budget, CaptureFile, CaptureRow, write_whole
from clustersim.calibrate.capture.world import World, agreed, repeats_for
from clustersim.core.errors import TraceError

Step = Callable[[], Any]
WARMUP = 2
PROFILED = 2
MOST_STEPS = 30
FAILURES = (ValueError, RuntimeError, ImportError, MemoryError, OSError, TraceError)


def _optimizer(torch: Any, model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _plain(world: World, model: Any, tokens: Any) -> Step:
    optimizer = _optimizer(world.torch, model)

    def step() -> Any:
        """One step; answers with its loss."""
        optimizer.zero_grad()
        loss = model(tokens).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def single(world: World, shape: gpt.GptShape, tokens: Any) -> Step:
    """Every rank alone: the compute that the others are compared with."""
    return _plain(world, gpt.build(world.torch, shape, world.device), tokens)


def data_parallel(world: World, shape: gpt.GptShape, tokens: Any) -> Step:
    """One process, all its GPUs (torch.nn.DataParallel): rank 0 works, the others look on."""
    if not world.on_gpu:
        raise ValueError("torch.nn.DataParallel is for GPUs")
    cards = world.torch.cuda.device_count()
    if cards < 2:
        raise ValueError("torch.nn.DataParallel needs two GPUs or more")
    if world.rank:
        return lambda: None
    model = world.torch.nn.DataParallel(gpt.build(world.torch, shape, world.device))
    return _plain(world, model, tokens.repeat(cards, 1))


def ddp(bucket_mb: float = 25, accumulate: int = 1, zero1: bool = False) -> Callable[[World, gpt.GptShape, Any], Step]:
    """DistributedDataParallel: bucket size [MiB], micro-batches under no_sync, ZeRO-1's sharded optimizer."""

    def build(world: World, shape: gpt.GptShape, tokens: Any) -> Step:
        """The step on this rank."""
        torch = world.torch
        ids = [world.device.index] if world.on_gpu else None
        model = torch.nn.parallel.DistributedDataParallel(
            gpt.build(torch, shape, world.device), device_ids=ids, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        )
        if zero1:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
        else:
            optimizer = _optimizer(torch, model)

        def step() -> Any:
            """One step of ``accumulate`` micro-batches, of which only the last exchanges gradients."""
            optimizer.zero_grad()
            for i in range(accumulate):
                with model.no_sync() if i < accumulate - 1 else contextlib.nullcontext():
                    loss = model(tokens)
                    loss.backward()
            optimizer.step()
            return loss

        return step

    return build


def fsdp2(world: World, shape: gpt.GptShape, tokens: Any) -> Step:
    """fully_shard on every block and on the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = gpt.build(world.torch, shape, world.device)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain(world, model, tokens)


def parameter_server(world: World, shape: gpt.GptShape, tokens: Any) -> Step:
    """Rank 0 holds the parameters: workers send it their gradients and receive new parameters, tensor by tensor."""
    torch = world.torch
    dist = world.torch.distributed
    model = gpt.build(torch, shape, world.device)
    parameters = list(model.parameters())
    workers = range(1, world.size)
    if world.rank == 0:
        optimizer = _optimizer(torch, model)
        space = [torch.empty_like(p) for p in parameters]

        def serve() -> Any:
            """Rank 0: add up the workers' gradients, last tensor first, update, and send everyone the parameters."""
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            for worker in workers:
                for parameter, into in zip(reversed(parameters), reversed(space), strict=True):
                    dist.recv(into, worker)
                    parameter.grad.add_(into, alpha=1 / len(workers))
            optimizer.step()
            for worker in workers:
                for parameter in parameters:
                    dist.send(parameter.data, worker)

        return serve

    def work() -> Any:
        """A worker: one step, with gradients sent and parameters received tensor by tensor."""
        model.zero_grad()
        loss = model(tokens)
        loss.backward()
        for parameter in reversed(parameters):
            dist.send(parameter.grad, 0)
        for parameter in parameters:
            dist.recv(parameter.data, 0)
        return loss

    return work


MODES: dict[str, Callable[[World, gpt.GptShape, Any], Step]] = {
    "single": single,
    "ddp": ddp(),
    "ddp_bucket_1MiB": ddp(1),
    "ddp_bucket_100MiB": ddp(100),
    "ddp_accumulate_4": ddp(accumulate=4),
    "zero1": ddp(zero1=True),
    "fsdp2": fsdp2,
    "parameter_server": parameter_server,
    "data_parallel": data_parallel,
}
"""Every strategy by name."""


def capture_steps(world: World, part: CaptureFile, folder: Path, seconds: float) -> None:
    """Run every mode within ``seconds``; one that cannot run says why and the next begins."""
    budget = Budget(seconds)
    shape = gpt.ON_GPU if world.on_gpu else gpt.ON_CPU
    world.torch.manual_seed(world.rank + 1)
    tokens = world.torch.randint(shape.vocabulary, (shape.batch, shape.tokens), device=world.device)
    for i, (mode, build) in enumerate(MODES.items()):
        if world.told(not budget.left):
            part.write({"mode": mode, "skipped": "the time budget is spent"})
            continue
        if world.size < 2 and mode not in {"single", "data_parallel"}:
            part.write({"mode": mode, "skipped": "needs two ranks or more"})
            continue
        world.say(f"steps {i + 1}/{len(MODES)}: {mode}, {budget.left:.0f} s left")
        share = world.told(budget.share(len(MODES) - i))
        part.write(
            {"mode": mode, **asdict(shape), **_mode(world, build, shape, tokens, folder / "traces" / mode, share)}
        )


def _mode(world: World, build: Any, shape: gpt.GptShape, tokens: Any, folder: Path, seconds: float) -> CaptureRow:
    """One strategy's row. Ranks agree after building and after warming up, so that one's failure stops all."""
    step, problem = agreed(world, FAILURES, lambda: build(world, shape, tokens))
    if problem:
        return {"skipped": problem}
    if world.on_gpu:
        world.torch.cuda.reset_peak_memory_stats()
    losses, problem = agreed(world, FAILURES, lambda: _warmed_up(world, step))
    if problem:
        return {"skipped": problem}
    once = max(world.gather(_timed(world, step)))
    count = world.told(repeats_for(once, seconds / 2, MOST_STEPS))
    times = []
    busy = []
    for _ in range(count):
        start = time.process_time()
        times.append(_timed(world, step))
        busy.append(time.process_time() - start)
    ranks = world.gather([median(times), min(times), max(times), min(busy)])
    row = {
        "step_time": max(r[0] for r in ranks) * 1e6,
        "rank_times": [r[0] * 1e6 for r in ranks],
        "time_min": min(r[1] for r in ranks) * 1e6,
        "time_max": max(r[2] for r in ranks) * 1e6,
        "steps": count,
        "loss": next((float(x.detach()) for x in losses[::-1] if x is not None), None),
        "parameters": sum(p.numel() for p in gpt.build(world.torch, shape, "meta").parameters()),
    }
    if not world.on_gpu:
        row["time_cpu"] = max(r[3] for r in ranks) * 1e6  # of the busiest rank, all its threads
    if world.on_gpu:
        row["peak_memory"] = max(world.gather(world.torch.cuda.max_memory_allocated()))
    _, problem = agreed(world, FAILURES, lambda: _profile(world, step, folder))
    return row | ({"trace_skipped": problem} if problem else {})


def _warmed_up(world: World, step: Step) -> list[Any]:
    losses = [step() for _ in range(WARMUP)]
    world.sync()
    return losses


def _timed(world: World, step: Step) -> float:
    world.sync()
    start = time.perf_counter()
    step()
    world.sync()
    return time.perf_counter() - start


def _profile(world: World, step: Step, folder: Path) -> None:
    """A Kineto trace of some steps, one file per rank, as torch.profiler writes it."""
    profiler = world.torch.profiler
    kinds = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if world.on_gpu else [])]
    world.wait()
    with profiler.profile(activities=kinds, record_shapes=True) as profile:
        for _ in range(PROFILED):
            step()
            world.sync()
            profile.step()
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / f".rank{world.rank}.json"
    try:
        profile.export_chrome_trace(str(raw))
        write_whole(folder / f"rank{world.rank}.json.gz", gzip.compress(raw.read_bytes(), 6, mtime=0))
    finally:
        raw.unlink(missing_ok=True)
