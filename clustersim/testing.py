"""Contracts that every shipped row of a table keeps, for rows of one's own.

Call them in a test: :func:`check_strategy`, :func:`check_algorithm`, :func:`check_schedule`, :func:`check_reader`. Each
raises :class:`AssertionError` with what does not hold. The tests of this package call the same functions.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from math import isclose
from typing import Any

import msgspec
import numpy as np

from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Algorithm, Channel, Group, Request, TransferSchedule
from clustersim.collectives.channels import channels
from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import ProgramError, ScenarioError
from clustersim.core.mesh import Mesh
from clustersim.core.model import Kernel, Layer, Model, StepCost, Tensor
from clustersim.core.program import Compute, Program
from clustersim.core.topology import Topology
from clustersim.engine import simulate
from clustersim.files.traces.reader_contract import check_reader, require
from clustersim.training.schedules import Order, PassCosts, Schedule, check, stage_of, times
from clustersim.training.schedules.base import UNIT, stage_count
from clustersim.training.strategies import Strategy, StrategyConfig

__all__ = ["check_algorithm", "check_reader", "check_schedule", "check_strategy", "toy_cost", "toy_model"]

CLOSE = 1e-6
"""Relative error up to which two ways to work out the same number agree."""


def _refuses(row: Any, errors: type[Exception], function: Callable[[], object], what: str) -> None:
    try:
        function()
    except errors:
        return
    raise AssertionError(f"{row.name}: {what} must be refused with a {errors.__name__}")


# ---- strategies -----------------------------------------------------------------------------------------------------


def toy_model(layers: list[list[int]], seq_len: int = 0, buffers: int = 0, tied: bool = False) -> Model:
    """A model whose layer ``i`` has tensors of the given sizes; ``tied`` lets the last layer reuse the first tensor."""
    toy_layers = []
    for i, sizes in enumerate(layers):
        tensors = [Tensor(f"l{i}.t{j}", numel) for j, numel in enumerate(sizes)]
        if tied and i == len(layers) - 1:
            tensors.append(Tensor("head", layers[0][0], tied_to="l0.t0"))
        kernel = Kernel("k", "gemm", flops=1e9, backward_flops=2e9)
        toy_layers.append(Layer(f"l{i}", "block", tuple(tensors), (kernel,), buffers=buffers))
    return Model("toy", "toy", tuple(toy_layers), seq_len=seq_len)


def toy_cost(model: Model, forward: float = 1e-3, backward: float = 2e-3, **more: Any) -> StepCost:
    """The same time for every layer [s], and by name what else a :class:`StepCost` has."""
    n = len(model.layers)
    values: dict[str, Any] = {"optimizer": 5e-4, "grad_copy_bandwidth": 1e12, "per_tensor": 1e-5} | more
    bound = ("compute",) * n
    flops = np.full(n, 8e9)
    return StepCost(np.full(n, forward), np.full(n, backward), bound, bound, flops, 2 * flops, **values)


def check_strategy(row: Strategy) -> None:
    """Its knobs can be read, every layer is computed once a micro-batch, its program can be played, and its steps
    repeat after its period.

    Parameters
    ----------
    row : a :class:`~clustersim.training.strategies.base.Strategy`, in the table or not.

    Raises :class:`AssertionError` where the contract is broken.
    """
    require(issubclass(row.config, StrategyConfig), row, "its config must be a StrategyConfig")
    for accumulation in (1, 3):
        for jitter in (0.0, 0.05):
            check_steps(row, accumulation, jitter)
    check_period(row)
    for wrong in ({"micro_batchsize": 2}, {"micro_batch_size": 0}):
        _refuses(row, msgspec.ValidationError, lambda table=wrong: msgspec.convert(table, row.config), f"{wrong}")  # type: ignore[misc]
    model = toy_model([[5], [6]])
    config = row.config()
    _, ranks = _placed(row, config)
    other = toy_cost(toy_model([[5]]))
    _refuses(row, ProgramError, lambda: row.build(model, other, ranks, config, 1, 0), "costs of another model")
    _refuses(row, ProgramError, lambda: row.build(model, toy_cost(model), ranks, config, 0, 0), "a run of 0 steps")


def check_steps(row: Strategy, accumulation: int, jitter: float) -> None:
    """What :func:`check_strategy` asks of the program of three steps of so many micro-batches."""
    model = toy_model([[2**18, 9], [30 * 2**18], [5]], buffers=3, tied=True)
    cost = toy_cost(model, jitter=jitter, step_overhead=1e-3, overlap_slowdown=0.3)
    config = msgspec.convert({"kind": row.name, "gradient_accumulation_steps": accumulation}, row.config)
    topology, ranks = _placed(row, config)
    program = row.build(model, cost, ranks, config, 3, 5)
    program.check()
    require(program.overlap_slowdown == 0.3, row, "its program must have the cost's overlap_slowdown")
    require(bool(program.notes), row, "its program must say in notes what is played")
    ops = program.roles[0].ops
    flops = sum(op.flops for op in ops if isinstance(op, Compute))
    wanted = 3 * accumulation * float(cost.forward_flops.sum() + cost.backward_flops.sum())
    require(isclose(flops, wanted, rel_tol=CLOSE), row, f"a rank computes {flops:g} FLOPs, the model has {wanted:g}")
    require({op.step for op in ops} == {0, 1, 2}, row, "each op must have its step")
    makespan = simulate(program, topology, ranks, backend="ideal").makespan
    kernels = 3 * accumulation * 9e-3 * (1 - 3 * jitter)
    require(makespan > kernels, row, f"three steps take {makespan:g} s, their kernels alone {kernels:g} s")
    phases = {op.phase for role in program.roles for op in role.ops}
    require("optimizer" in phases, row, "no op has the phase 'optimizer'")
    require("fwd l0" in program.describe(0), row, "the forward of layer l0 must be called 'fwd l0'")


def check_period(row: Strategy) -> None:
    """The steps behind the first repeat after the row's ``period``, and no sooner: figures are means over periods."""
    config = row.config()
    period = row.period_of(config)
    _, ranks = _placed(row, config)
    model = toy_model([[2**18, 9], [30 * 2**18], [5]])
    program = row.build(model, toy_cost(model), ranks, config, 1 + max(3 * period, 8), 5)
    steps = [_step_signature(program, step) for step in range(1, 1 + max(3 * period, 8))]
    found = next(p for p in range(1, len(steps) + 1) if all(a == b for a, b in zip(steps, steps[p:], strict=False)))
    require(found == period, row, f"its steps repeat after {found}, its period is {period}")


def _step_signature(program: Program, step: int) -> Counter[tuple[object, ...]]:
    """What is done in a step: how often each op of each role."""
    return Counter(
        (role.name, type(op).__name__, op.stream, op.phase, getattr(op, "kind", ""), op.nbytes)
        for role in program.roles
        for op in role.ops
        if op.step == step
    )


def _placed(row: Strategy, config: StrategyConfig) -> tuple[Topology, Mesh]:
    """A machine, and this strategy's ranks on it."""
    topology = fabrics.load("hgx-a100", nodes=1)
    ranks = fabrics.mesh(topology, nproc_per_node=row.world_size or 4)
    return topology, row.place(topology, ranks, config) if row.place else ranks


# ---- collective algorithms ------------------------------------------------------------------------------------------


def check_algorithm(row: Algorithm, groups: Iterable[Group] | None = None) -> None:
    """Every member ends with the right data, and traffic, schedule and ``sends`` move the same bytes.

    Parameters
    ----------
    row : an :class:`~clustersim.collectives.base.Algorithm`, in the table or not.
    groups : what to try; 2 to 16 GPUs of one to three HGX H100 where nothing is said. A group that it refuses with a
        :class:`ProgramError` is left out, but each kind must take one.

    Raises :class:`AssertionError` where the contract is broken.
    """
    tried = list(_groups() if groups is None else groups)
    for kind in sorted(row.kinds):
        taken = [members for members in tried if _takes(row, kind, members)]
        require(bool(taken), row, f"{kind}: it takes none of the groups")
        for members in taken:
            if kind != "send":  # which has its own op on each side
                check_sends(row, kind, members)
            if row.schedule is not None:
                check_edges(row, kind, members)
            if row.schedule is not None and kind != "barrier":
                check_data(row, kind, members)


def _groups() -> Iterator[Group]:
    for nodes in (1, 2, 3):
        topology = fabrics.load("hgx-h100", nodes=nodes)
        for n in (2, 3, 4, 5, 6, 8, 16):
            if nodes <= n <= 8 * nodes:
                counts = [n // nodes + (node < n % nodes) for node in range(nodes)]
                yield Group(topology, np.concatenate([topology.node_gpus(i)[:c] for i, c in enumerate(counts)]))


def _asked(row: Algorithm, kind: str, members: Group) -> tuple[Request, Group, tuple[Channel, ...]]:
    request = Request(kind, 2.0**22, root=members.size - 1, algorithm=row.name)
    return request, members, channels(members, 2, row.layout)


def _takes(row: Algorithm, kind: str, members: Group) -> bool:
    try:
        row.traffic(*_asked(row, kind, members))
    except ProgramError:
        return False
    return True


def _schedule(row: Algorithm, kind: str, members: Group) -> TransferSchedule:
    if row.schedule is None:
        raise AssertionError(f"{row.name}: it has no schedule")
    return row.schedule(*_asked(row, kind, members))


def check_sends(row: Algorithm, kind: str, members: Group) -> None:
    """``sends`` is the mean over members of what the traffic's edges from and to root 0 carry."""
    traffic = row.traffic(Request(kind, 1.0, algorithm=row.name), members, channels(members, 2, row.layout))
    carried = [float(traffic.fraction[end >= 0].sum()) / members.size for end in (traffic.src, traffic.dst)]
    stated = row.sends(kind, members.size, members.topology.n_nodes)
    same = all(isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE) for a, b in zip(stated, carried, strict=True))
    require(same, row, f"{kind} of {members.size}: sends says {stated}, the traffic has {tuple(carried)}")


def check_edges(row: Algorithm, kind: str, members: Group) -> None:
    """The schedule moves the bytes of the traffic on every edge."""
    traffic = row.traffic(*_asked(row, kind, members))
    schedule = _schedule(row, kind, members)
    moved = _per_edge(schedule.src, schedule.dst, schedule.chunk_fraction[schedule.chunk])
    wanted = _per_edge(traffic.src, traffic.dst, traffic.fraction)
    for edge in sorted(moved.keys() | wanted.keys()):
        both = moved.get(edge, 0.0), wanted.get(edge, 0.0)
        words = f"{kind} of {members.size}: the schedule sends {both[0]:g} from {edge[0]} to {edge[1]}"
        require(isclose(*both, rel_tol=CLOSE), row, f"{words}, the traffic {both[1]:g}")


def _per_edge(src: Ints, dst: Ints, fraction: Floats) -> dict[tuple[int, int], float]:
    totals: dict[tuple[int, int], float] = defaultdict(float)
    for s, d, f in zip(src.tolist(), dst.tolist(), fraction.tolist(), strict=True):
        totals[s, d] += f
    return {edge: total for edge, total in totals.items() if total > 0}


def check_data(row: Algorithm, kind: str, members: Group, operation: np.ufunc = np.add) -> None:
    """Executing the schedule with numbers gives every member what the kind promises."""
    schedule = _schedule(row, kind, members)
    checked = 0
    for member, piece, wanted, value in _results(kind, schedule, members.size, members.size - 1, operation):
        checked += 1
        right = value is not None and isclose(value, wanted, rel_tol=1e-12)
        words = f"{kind} of {members.size}: member {member} ends with {value} of piece {piece}"
        require(right, row, f"{words}, not with {wanted}")
    require(checked > 0, row, f"{kind} of {members.size}: no member gets anything")


Own = Callable[[int, int], "float | None"]
"""What a member begins with of a piece; None: nothing."""


def _results(
    kind: str, schedule: TransferSchedule, n: int, root: int, operation: np.ufunc
) -> Iterator[tuple[int, int, float, float | None]]:
    """(member, piece, what it should end with, what it ends with) for everything that the kind promises."""
    data = np.random.default_rng(7).uniform(0.5, 1.5, size=(n, schedule.n_chunks))
    gathered = kind == "all_reduce" and schedule.chunk_fraction.sum() > n - 0.5

    def own(member: int, piece: int) -> float | None:
        held = {
            "all_gather": piece % n == member,
            "gather": piece % n == member,
            "sendrecv": piece % n == member,
            "all_to_all": piece // n == member,
            "broadcast": member == root,
            "scatter": member == root,
            "send": member == 0,
        }.get(kind, piece % n == member if gathered else True)
        return float(data[member, piece]) if held else None

    end = _executed(schedule, n, operation, own)
    total = operation.reduce(data, axis=0)
    for member in range(n):
        for piece in range(schedule.n_chunks):
            its = piece % n == member
            if gathered or kind == "all_gather" or (kind == "gather" and member == root):
                wanted = data[piece % n, piece]
            elif kind == "all_reduce" or (kind == "reduce_scatter" and its) or (kind == "reduce" and member == root):
                wanted = total[piece]
            elif kind == "broadcast" or (kind == "scatter" and its):
                wanted = data[root, piece]
            elif kind == "all_to_all" and its:
                wanted = data[piece // n, piece]
            elif (kind == "sendrecv" and (piece + 1) % n == member) or (kind == "send" and member == 1):
                wanted = data[0 if kind == "send" else piece, piece]
            else:
                continue
            yield member, piece, float(wanted), end[member][piece]


def _executed(schedule: TransferSchedule, n: int, operation: np.ufunc, own: Own) -> list[list[float | None]]:
    """What each member ends with of each piece."""
    carried: list[float | None] = []
    arrived: dict[tuple[int, int], list[int]] = defaultdict(list)

    def combined(start: float | None, transfers: list[int]) -> float | None:
        value = start
        added: list[float | None] = []
        for t in transfers:
            if schedule.reduce[t]:
                added.append(carried[t])
            else:
                value = carried[t]
                added = []
        return reduce(operation, added, value) if value is not None else reduce(operation, added) if added else None

    for t in range(len(schedule.src)):
        src = int(schedule.src[t])
        piece = int(schedule.chunk[t])
        needs = schedule.after[schedule.after_ptr[t] : schedule.after_ptr[t + 1]].tolist()
        if any(need >= t for need in needs):
            raise AssertionError(f"transfer {t} waits for a later one")
        brought = [need for need in needs if schedule.dst[need] == src and schedule.chunk[need] == piece]
        hands_on = bool(schedule.passes.any() and schedule.passes[t])
        if hands_on:
            brought = brought[-1:]  # others that it waits for were brought before, and are no part of it
        carried.append(combined(None if hands_on else own(src, piece), brought))
        arrived[int(schedule.dst[t]), piece].append(t)
    return [[combined(own(m, p), arrived[m, p]) for p in range(schedule.n_chunks)] for m in range(n)]


# ---- pipeline schedules ---------------------------------------------------------------------------------------------


def check_schedule(row: Schedule, sizes: Iterable[tuple[int, int, int]] | None = None) -> None:
    """Every order can be played without breaking a dependency, and bubble and peak are those that it states.

    Parameters
    ----------
    row : a :class:`~clustersim.training.schedules.base.Schedule`, in the table or not.
    sizes : (pipeline ranks, chunks, micro-batches) to try; small ones that it takes where nothing is said.

    Raises :class:`AssertionError` where the contract is broken.
    """
    tried = list(_sizes(row) if sizes is None else sizes)
    require(bool(tried), row, "it takes no size")
    for p, v, m in tried:
        check_order(row, p, v, m)
        stages = stage_count(row.placement, p, v)
        check_play(row, p, v, m, [PassCosts(1 + stage % 3, 1.0, 0.25 + stage % 2) for stage in range(stages)])
        for cost in (UNIT, PassCosts(0.75, 1.25, 0.5)):
            check_bubble(row, p, v, m, cost)
    kept = row.versions(0, 4), row.staleness(0, 4)
    require(not row.synchronous or kept == (1, 0), row, "a synchronous schedule keeps one version, never stale")


def _sizes(row: Schedule) -> Iterator[tuple[int, int, int]]:
    for p in (1, 2, 3, 4, 6):
        for v in (1, 2, 3) if row.chunks is None else (row.chunks,):
            for m in (1, 2, 3, 4, 7, 8, 12):
                if takes_size(row, p, m):
                    yield p, v, m


def takes_size(row: Schedule, p: int, m: int) -> bool:
    """Whether a schedule takes so many pipeline ranks and micro-batches."""
    fits = row.microbatches is None or row.microbatches(p, m, row.with_defaults({}))
    return fits and not (row.even_stages and p % 2)


def most_held(order: Order, until: str = "W") -> int:
    """The most forward passes of one chunk whose activations a rank holds at once.

    ``until``: "W" frees them after the weight gradient, which needs the chunk's inputs (flash attention leaves little
    else); "I" already after the input gradient. The whole backward frees them in both cases.
    """
    steps = [(action.kind == "F") - (action.kind in ("B", until)) for slot in order for action in slot]
    return max(accumulate(steps, initial=0))


def check_order(row: Schedule, p: int, v: int, m: int) -> None:
    """The order can be played, splits backward as the row says, and each rank holds what it states."""
    orders = row.order(p, v, m)
    size = f"pp {p}, vpp {v}, {m} micro-batches"
    require(len(orders) == p, row, f"{size}: {len(orders)} orders")
    try:
        check(orders, row.placement, m, v)
    except ScenarioError as wrong:
        raise AssertionError(f"{row.name}: {size}: {wrong}") from wrong
    splits = any(action.kind == "I" for order in orders for slot in order for action in slot)
    require(splits == row.splits_backward, row, f"{size}: splits_backward is {row.splits_backward}")
    for rank, order in enumerate(orders):
        stated = row.peak(rank, p, v, m, **row.with_defaults({})) if row.peak else None
        held = most_held(order)
        require(stated in (None, held), row, f"{size}: rank {rank} holds {held}, peak says {stated}")


def check_bubble(row: Schedule, p: int, v: int, m: int, cost: PassCosts) -> None:
    """The bubble that is played is the stated one, for chunks that all take ``cost``."""
    stated = row.bubble(p, v, m, cost) if row.bubble else None
    if stated is None:
        return
    searches = any(option.name == "costs" for option in row.options)
    orders = row.order(p, v, m, **({"costs": cost} if searches else {}))
    played = times(orders, row.placement, cost, pair=operator.add)
    for rank, busy in enumerate(played.busy):
        bubble = played.makespan - busy
        words = f"pp {p}, vpp {v}, {m} micro-batches of {tuple(cost)}: rank {rank} idles {bubble:g}"
        require(isclose(bubble, stated, abs_tol=1e-9), row, f"{words}, bubble says {stated:g}")


def check_play(row: Schedule, p: int, v: int, m: int, costs: Sequence[PassCosts]) -> None:
    """No action starts before what it needs is done, and no rank does two things at once; a cost for each stage."""
    stages = stage_count(row.placement, p, v)
    played = times(row.order(p, v, m), row.placement, costs)
    span: dict[tuple[str, int, int, int], tuple[float, float]] = {}
    for rank, (actions, spans) in enumerate(zip(played.actions, played.spans, strict=True)):
        require(all(a[1] <= b[0] for a, b in pairwise(spans)), row, f"rank {rank} does two things at once")
        for action, (start, end) in zip(actions, spans, strict=True):
            stage = stage_of(row.placement, rank, action.chunk, p)
            direction = action.chunk if row.placement == "both" else 0
            span["B" if action.kind == "I" else action.kind, stage, direction, action.microbatch] = start, end
            lasts = costs[stage].of(action.kind)
            require(isclose(end - start, lasts, rel_tol=CLOSE), row, f"rank {rank}: {action} takes {end - start:g}")
    for (kind, stage, direction, k), (start, _) in span.items():
        before = {
            "F": ("F", stage - 1, direction, k) if stage else None,
            "B": ("B", stage + 1, direction, k) if stage + 1 < stages else ("F", stage, direction, k),
            "W": ("B", stage, direction, k),
        }[kind]
        require(before is None or start >= span[before][1], row, f"{kind}{k} of stage {stage} starts too early")
    require(played.makespan >= max(played.busy), row, "a rank is busy for longer than the play lasts")
