"""Part (b): what one device does alone: GEMMs, attention, memory-bound ops, optimizers, launches, host copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from statistics import median
from typing import Any

from clustersim.calibrate.capture.parts import Budget, CaptureFile, CaptureRow
from clustersim.calibrate.capture.world import World, loops_for

Case = tuple[CaptureRow, Callable[[], Callable[[], Any]]]
"""What is measured (op, shape, dtype, flops, bytes of one call), and how to make the call."""


def capture_compute(world: World, part: CaptureFile, seconds: float) -> None:
    """Measure on rank 0 within ``seconds``; the others wait, so that nobody shares the device's power or memory."""
    if world.rank == 0:
        budget = Budget(seconds)
        cases = list(_cases(world.torch, world.device))
        for i, (case_fields, make) in enumerate(cases):
            if i % 20 == 0:
                world.say(f"compute {i + 1}/{len(cases)}: {case_fields['op']}, {budget.left:.0f} s left")
            if not budget.left:
                part.write({"skipped": f"{len(cases) - i} of {len(cases)} cases: the time budget is spent"})
                break
            part.write(_measure(world, case_fields, make, budget.share(len(cases) - i)))
    world.wait()


def _measure(
    world: World, case_fields: CaptureRow, make: Callable[[], Callable[[], Any]], seconds: float
) -> CaptureRow:
    """One row; a case that does not fit or that the device does not have says so."""
    try:
        call = make()
        call()
        once = world.loop(call, 2)
        if once > 4 * max(seconds, 0.05):
            return {**case_fields, "skipped": f"a call takes {once:.2g} s, more than its share of the budget"}
        repeats, loops = loops_for(once, 0.0, seconds)
        times = []
        busy = []
        for _ in range(loops):
            start = time.thread_time()
            times.append(world.loop(call, repeats))
            busy.append((time.thread_time() - start) / repeats)
    except (RuntimeError, MemoryError, NotImplementedError) as error:
        return {**case_fields, "skipped": str(error).split("\n", 1)[0][:200]}
    usual = median(times)
    row = {**case_fields, "time": usual * 1e6, "time_min": min(times) * 1e6, "time_max": max(times) * 1e6}
    if not world.on_gpu and world.torch.get_num_threads() == 1:
        row["time_cpu"] = min(busy) * 1e6  # without what other processes of the machine took
    flops = case_fields.get("flops", 0.0)
    done = flops / usual if isinstance(flops, float) else 0.0
    return row | {"iterations": repeats * loops, "FLOPS": done}


def _cases(torch: Any, device: Any) -> Iterator[Case]:
    """Every kind once before any kind's larger sizes, quick ones first, so that a short budget sees them all."""
    big = device.type == "cuda"
    kinds = [
        _launches(torch, device),
        _copies(torch, device, big),
        _gemms(torch, device, big),
        _memory_bound(torch, device, big),
        _attention(torch, device, big),
        _optimizers(torch, device, big),
    ]
    for one_of_each in zip_longest(*kinds):
        yield from filter(None, one_of_each)


def _dtypes(torch: Any, device: Any) -> list[tuple[str, Any]]:
    dtypes = [("fp32", torch.float32), ("bf16", torch.bfloat16)]
    return [*dtypes, ("fp16", torch.float16)] if device.type == "cuda" else dtypes


def _gemms(torch: Any, device: Any, big: bool) -> Iterator[Case]:
    """Square ones, and a transformer's: tokens x width by width x 4 widths."""
    square = [128, 256, 512, 1024, 2048, 4096, 8192, 16384] if big else [64, 128, 256, 512, 1024]
    shapes = [(s, s, s) for s in square]
    shapes += [
        (tokens, 4 * width, width)
        for width in ([768, 1600, 4096, 8192] if big else [128, 256, 768])
        for tokens in ([512, 2048, 8192] if big else [64, 512])
    ]
    for m, n, k in shapes:
        for name, dtype in _dtypes(torch, device):
            case_fields: CaptureRow = {
                "op": "gemm",
                "m": m,
                "n": n,
                "k": k,
                "dtype": name,
                "flops": 2.0 * m * n * k,
                "bytes": float(dtype.itemsize * (m * k + k * n + m * n)),
            }

            def make(m: int = m, n: int = n, k: int = k, dtype: Any = dtype) -> Callable[[], Any]:
                """The product of random matrices, (m, k) by (k, n)."""
                a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
                out = torch.empty(m, n, device=device, dtype=dtype)
                return lambda: torch.mm(a, b, out=out)

            yield case_fields, make


def _attention(torch: Any, device: Any, big: bool) -> Iterator[Case]:
    attend = torch.nn.functional.scaled_dot_product_attention
    sizes = [(8, 16, 1024, 64), (4, 32, 2048, 128), (1, 32, 8192, 128)] if big else [(2, 4, 64, 32), (2, 4, 256, 32)]
    for batch, heads, tokens, width in sizes:
        for name, dtype in _dtypes(torch, device):
            for causal in (False, True):
                case_fields: CaptureRow = {
                    "op": "attention",
                    "batch": batch,
                    "heads": heads,
                    "tokens": tokens,
                    "head_dim": width,
                    "dtype": name,
                    "causal": causal,
                    "flops": 4.0 * batch * heads * tokens**2 * width * (0.5 if causal else 1.0),
                    "bytes": 4.0 * batch * heads * tokens * width * dtype.itemsize,
                }

                def make(shape: Any = (batch, heads, tokens, width), dtype: Any = dtype, causal: bool = causal) -> Any:
                    """Attention of random queries, keys and values of one shape."""
                    q, k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
                    return lambda: attend(q, k, v, is_causal=causal)

                yield case_fields, make


def _memory_bound(torch: Any, device: Any, big: bool) -> Iterator[Case]:
    """Each with the bytes it must read and write, for achieved bandwidth."""
    f = torch.nn.functional
    ops: dict[str, tuple[Callable[[Any], Any], int]] = {
        "layer_norm": (lambda x: f.layer_norm(x, x.shape[-1:]), 2),
        "add": (lambda x: x + x, 2),
        "copy": (lambda x: x.clone(), 2),
        "gelu": (f.gelu, 2),
        "softmax": (lambda x: x.softmax(-1), 2),
        "sum": (lambda x: x.sum(), 1),
        "dropout": (lambda x: f.dropout(x, 0.1, True), 2),
        "zero": (lambda x: x.zero_(), 1),
    }
    for elements in [2**k for k in ((12, 16, 20, 24, 28) if big else (10, 14, 18, 20))]:
        for name, dtype in _dtypes(torch, device)[:2]:
            for op, (run, passes) in ops.items():
                nbytes = float(passes * elements * dtype.itemsize)
                case_fields: CaptureRow = {"op": op, "elements": elements, "dtype": name, "bytes": nbytes}

                def make(n: int = elements, dtype: Any = dtype, run: Any = run) -> Callable[[], Any]:
                    """The op on about ``n`` random elements, in rows of 1024."""
                    x = torch.randn(max(1, n // 1024), min(n, 1024), device=device).to(dtype)
                    return lambda: run(x)

                yield case_fields, make


def _optimizers(torch: Any, device: Any, big: bool) -> Iterator[Case]:
    for parameters in (10**7, 10**8, 10**9) if big else (10**5, 10**6):
        for op, options in (
            ("sgd", {}),
            ("adam", {}),
            ("adamw", {}),
            ("adamw", {"fused": True}),
            ("adamw", {"foreach": True}),
        ):
            case_fields: CaptureRow = {
                "op": f"optimizer_{op}",
                "parameters": parameters,
                "dtype": "fp32",
                **options,
                "bytes": parameters * (12.0 if op == "sgd" else 28.0),
            }

            def make(n: int = parameters, op: str = op, options: Any = options) -> Callable[[], Any]:
                """A step of the optimizer over ``n`` parameters in 100 tensors, gradients all one."""
                tensors = [torch.zeros(n // 100, device=device, requires_grad=True) for _ in range(100)]
                for tensor in tensors:
                    tensor.grad = torch.ones_like(tensor)
                kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
                return kinds[op](tensors, lr=1e-3, **options).step  # type: ignore[no-any-return]

            yield case_fields, make


def _launches(torch: Any, device: Any) -> Iterator[Case]:
    """An op of one element: the host's cost where calls queue up, and the device's where each is waited for."""
    x = torch.ones(1, device=device)

    def waited() -> Any:
        """The op, then a wait for the device."""
        x.add_(1)
        if device.type == "cuda":
            torch.cuda.synchronize()

    yield {"op": "launch", "dtype": "fp32"}, lambda: lambda: x.add_(1)
    yield {"op": "launch_and_wait", "dtype": "fp32"}, lambda: waited
    yield {"op": "launch_empty", "dtype": "fp32"}, lambda: lambda: torch.empty(1, device=device)


def _copies(torch: Any, device: Any, big: bool) -> Iterator[Case]:
    """Host to device and back over PCIe, pinned and pageable; on a CPU, memory to memory."""
    gpu = device.type == "cuda"
    for nbytes in [4**k for k in range(5, 15 if big else 12)]:
        for pinned in (True, False) if gpu else (False,):
            for op in ("host_to_device", "device_to_host") if gpu else ("host_to_host",):

                def make(n: int = nbytes, pinned: bool = pinned, op: str = op) -> Callable[[], Any]:
                    """A copy of ``n`` bytes between host and device."""
                    host = torch.empty(n, dtype=torch.uint8, pin_memory=pinned)
                    device_tensor = torch.empty(n, dtype=torch.uint8, device=device)
                    into, out = (host, device_tensor) if op == "device_to_host" else (device_tensor, host)
                    return lambda: into.copy_(out, non_blocking=True)

                yield {"op": op, "bytes": float(nbytes), "pinned": pinned}, make
