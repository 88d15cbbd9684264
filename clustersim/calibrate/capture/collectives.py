"""Part (a): every collective over every sort of group, in nccl-tests' columns.

Times are nccl-tests': calls in a row, per call, of the slowest rank (its ``-a 3``: a root that only sends runs ahead of
its receivers); here the median of many short loops, with every rank's own. On a machine with other work some loops are
disturbed and some are not, so the fastest is kept as well. Groups that run at once show what they cost each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from clustersim.calibrate.capture.mpi import MpiWorld
from clustersim.calibrate.capture.parts import Budget, CaptureFile
from clustersim.calibrate.capture.world import World, agreed, loops_for
from clustersim.collectives.base import bus_factor
from clustersim.core.program import REDUCING, ROOTED, SPLIT
from clustersim.core.texts import Table
from clustersim.core.units import format_bytes

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "sendrecv",
    "barrier",
)
LARGEST = 4 * 2**30
"""Largest S [bytes]."""
ROUNDS = 3
"""How often everything is measured, within the budget."""


@dataclass(frozen=True)
class GroupLayout:
    """Groups that work at once: ``groups`` of ranks, with ``copies`` communicators each."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...] = KINDS
    copies: int = 1


def layouts(size: int, local: int) -> Iterator[GroupLayout]:
    """The world; then, for contention, its nodes and rails (or halves of one node), alone and all at once."""
    ranks = tuple(range(size))
    yield GroupLayout("world", (ranks,))
    yield GroupLayout("world twice", (ranks,), ("all_reduce",), 2)
    few = ("all_reduce", "all_gather")
    parts: dict[str, list[tuple[int, ...]]] = {}
    if size > local > 1:
        parts["node"] = [ranks[i : i + local] for i in range(0, size, local)]
    if size > local:
        parts["rail"] = [ranks[i::local] for i in range(local)]
    elif size >= 4:
        parts["half"] = [ranks[: size // 2], ranks[size // 2 :]]
    for name, groups in parts.items():
        yield GroupLayout(f"one {name}", (groups[0],), few)
        if len(groups) > 1:
            yield GroupLayout(f"every {name}", tuple(groups), few)


def capture_collectives(world: World, part: CaptureFile, seconds: float, largest: float = LARGEST) -> None:
    """Measure every layout within ``seconds``, several times over: what differs between rounds is the noise."""
    if world.size < 2:
        part.write({"skipped": "collectives need two ranks or more"})
        return
    budget = Budget(seconds)
    todo = _todo(world)
    factor = world.told(2 if budget.share(len(todo)) > 4 else 4)
    handles: dict[str, list[list[Any]]] = {}
    told_skips: set[str] = set()
    for i in range(ROUNDS * len(todo)):
        layout, kind = todo[i % len(todo)]
        if layout.name not in handles:
            handles[layout.name] = [[world.group(list(group)) for _ in range(layout.copies)] for group in layout.groups]
        world.say(f"collectives {i + 1}/{ROUNDS * len(todo)}: {kind}, {layout.name}, {budget.left:.0f} s left")
        share = Budget(world.told(budget.share(ROUNDS * len(todo) - i)))
        skipped = _sweep(_LayoutCase(world, layout, handles[layout.name], kind), part, share, (largest, factor))
        if skipped and skipped not in told_skips:
            part.write({"skipped": f"{kind} over {layout.name}, {skipped}"})
            told_skips.add(skipped)


def _todo(world: World) -> list[tuple[GroupLayout, str]]:
    """Every layout with its kinds; MPI's communicators are asked one at a time."""
    usable = [
        layout for layout in layouts(world.size, world.local_size) if world.backend != "mpi" or layout.name == "world"
    ]
    return [(layout, kind) for layout in usable for kind in world.kinds() or layout.kinds]


@dataclass(frozen=True)
class _LayoutCase:
    """One kind over one layout, whose communicators are ``handles``: those of each group."""

    world: World
    layout: GroupLayout
    handles: list[list[Any]]
    kind: str

    @property
    def mine(self) -> int | None:
        """The group this rank is in, if any."""
        return next((i for i, group in enumerate(self.layout.groups) if self.world.rank in group), None)

    @property
    def n(self) -> int:
        """Ranks of a group."""
        return len(self.layout.groups[0])


def _sweep(case: _LayoutCase, part: CaptureFile, budget: Budget, sizes: tuple[float, int]) -> str:
    """One kind over all sizes, smallest first, as far as the time goes; why it did not come to the largest."""
    world = case.world
    size = 8.0
    last = 0.0
    largest, factor = sizes
    while size <= largest:
        quick = 3 * last * factor  # a warm-up and two calls of the next size
        if world.told(bool(last and quick > budget.left)):
            return f"from {format_bytes(size)}: the time budget is spent"
        call = _prepare(case, size)
        if call is None:
            return f"from {format_bytes(size)}: does not fit the memory"
        if problem := _first(world, call):
            return f"from {format_bytes(size)}: {problem}"
        row = _measure(world, call, budget.left / 8 if budget.left else 0.0, member=case.mine is not None)
        last = row["time_min"] * 1e-6
        _write(part, case, size, row)
        if case.kind == "barrier":
            return ""
        size *= factor
    return ""


Call = tuple[Callable[[], Any], Callable[[], int | None]]


def _prepare(case: _LayoutCase, size: float) -> Call | None:
    """The call of this rank, or None where some rank cannot hold the tensors."""
    world = case.world
    layout = case.layout
    own_group = case.mine
    room = 3.0 * size * layout.copies + 2**20 < world.free_memory()
    calls: list[Call] = []
    if room and own_group is not None:
        try:
            make = world.call if isinstance(world, MpiWorld) else partial(_call, world)
            calls = [
                make(case.kind, int(size), handle, layout.groups[own_group], layout.copies > 1)
                for handle in case.handles[own_group]
            ]
        except (RuntimeError, MemoryError):  # out of memory, on host or card
            room = False
    if not all(world.gather(room)):
        return None
    if layout.copies == 1:
        return calls[0] if calls else (lambda: None, lambda: None)

    def together() -> None:
        """Start all calls, then wait for all of them."""
        for work in [call() for call, _ in calls]:
            work.wait()

    return together, calls[0][1] if calls else lambda: None


def _call(world: World, kind: str, size: int, group: Any, ranks: tuple[int, ...], asynchronous: bool) -> Call:
    """(the collective, how many elements came out wrong in its first call)."""
    torch = world.torch
    device = world.device
    dist, n, position = torch.distributed, len(ranks), ranks.index(world.rank)
    count = max(n, size // 4 // n * n) if kind in SPLIT else max(1, size // 4)
    tensor = torch.full((count,), float(position + 1), device=device)
    part = torch.full((count // n,), float(position + 1), device=device)
    root = ranks[0]
    also = {"group": group, "async_op": asynchronous}
    total = n * (n + 1) / 2.0
    pieces = list(tensor.chunk(n)) if kind in SPLIT else []

    out = torch.empty_like(tensor) if kind in {"all_to_all", "sendrecv"} else tensor
    calls: dict[str, tuple[Callable[[], Any], Any, float]] = {
        "all_reduce": (lambda: dist.all_reduce(tensor, **also), tensor, total),
        "all_gather": (lambda: dist.all_gather_into_tensor(tensor, part, **also), tensor[-1:], float(n)),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, tensor, **also), part, total),
        "all_to_all": (lambda: dist.all_to_all_single(out, tensor, **also), out[-1:], float(n)),
        "broadcast": (lambda: dist.broadcast(tensor, root, **also), tensor, 1.0),
        "reduce": (lambda: dist.reduce(tensor, root, **also), tensor if position == 0 else None, total),
        "scatter": (lambda: dist.scatter(part, pieces if position == 0 else None, root, **also), part, 1.0),
        "gather": (lambda: dist.gather(part, pieces if position == 0 else None, root, **also), None, 0.0),
        "sendrecv": (_ring(dist, out, tensor, ranks, position, group), None, 0.0),
        "barrier": (lambda: dist.barrier(group=group), None, 0.0),
    }
    run, result, right = calls[kind]
    return run, lambda: None if result is None else int((result != right).sum())


def _ring(dist: Any, into: Any, out: Any, ranks: tuple[int, ...], position: int, group: Any) -> Callable[[], None]:
    """Every rank sends to the next and receives from the one before, as nccl-tests' sendrecv."""
    after = ranks[(position + 1) % len(ranks)]
    before = ranks[position - 1]

    def call() -> None:
        """Send to the next rank while receiving from the one before, and wait for both."""
        ops = [dist.P2POp(dist.isend, out, after, group), dist.P2POp(dist.irecv, into, before, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return call


def _first(world: World, call: Call) -> str:
    """The first call, which warms up; what a backend or a device says that does not have it, agreed over all ranks."""

    def warm_up() -> None:
        """The first call, waited for."""
        call[0]()
        world.sync()

    return agreed(world, (RuntimeError, MemoryError), warm_up)[1]


def _measure(world: World, call: Call, seconds: float, member: bool) -> Table:
    """Loops of calls; times in microseconds, as nccl-tests prints them."""
    run, wrong = call
    bad = [w for w in world.gather(wrong()) if w is not None]
    world.wait()
    once = max(world.gather(world.loop(run, 1)))
    start = time.perf_counter()
    world.wait()
    repeats, loops = world.told(loops_for(once, time.perf_counter() - start, seconds))
    own_times = []
    for _ in range(loops):
        world.wait()
        own_times.append(world.loop(run, repeats) if member else None)
    ranks = world.gather(own_times)
    slowest = [max(times) for times in zip(*(r for r in ranks if r[0] is not None), strict=True)]
    return {
        "time": median(slowest) * 1e6,
        "time_min": min(slowest) * 1e6,
        "time_max": max(slowest) * 1e6,
        "rank_times": [median(times) * 1e6 if times[0] is not None else None for times in ranks],
        "#wrong": sum(bad) if bad else None,
        "iterations": repeats * loops,
    }


def _write(part: CaptureFile, case: _LayoutCase, size: float, row: Table) -> None:
    world = case.world
    layout = case.layout
    kind = case.kind
    n = case.n
    count = max(n, int(size) // 4 // n * n) if kind in SPLIT else max(1, int(size) // 4)
    nbytes = 0 if kind == "barrier" else count * 4
    algbw = nbytes / row["time"] / 1e3
    local = {rank // world.local_size for rank in layout.groups[0]}
    part.write(
        {
            "kind": kind,
            "size": nbytes,
            "count": count // n if kind in SPLIT else count,
            "type": "float",
            "redop": "sum" if kind in REDUCING else "none",
            "root": 0 if kind in ROOTED else -1,
            "time": row["time"],
            "algbw": algbw,
            "busbw": algbw * bus_factor(kind, n),
            "#wrong": row["#wrong"],
            "ranks": n,
            "nodes": len(local),
            "layout": layout.name,
            "groups_at_once": len(layout.groups) * layout.copies,
            **{key: row[key] for key in ("time_min", "time_max", "rank_times", "iterations")},
            **world.setting(kind),
        }
    )
