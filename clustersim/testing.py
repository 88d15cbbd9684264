"""Contracts that every shipped row of a table keeps, for rows of one's own.

Call them in a test: :func:`check_strategy`, :func:`check_algorithm`, :func:`check_schedule`, :func:`check_reader`. Each
raises :class:`AssertionError` with what does not hold. The tests of this package call the same functions.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, product
from math import isclose
from typing import Any

import msgspec
import numpy as np

from clustersim.cluster import files as fabrics
from clustersim.collectives.algorithm_contract import check_algorithm
from clustersim.core.contract import CLOSE, require
from clustersim.core.errors import ClusterSimError, ProgramError, ScenarioError
from clustersim.core.mesh import Mesh
from clustersim.core.model import Kernel, Layer, Model, StepCost, Tensor
from clustersim.core.program import Collective, Compute, Op, Program
from clustersim.core.topology import Topology
from clustersim.engine import simulate
from clustersim.files.traces.reader_contract import check_reader
from clustersim.training.schedules import Order, PassCosts, Schedule, check, stage_of, times
from clustersim.training.schedules.base import UNIT, stage_count
from clustersim.training.strategies import Strategy, StrategyConfig
from clustersim.training.strategies.exchange_contract import check_exchange

__all__ = ["check_algorithm", "check_reader", "check_schedule", "check_strategy", "toy_cost", "toy_model"]


def _plays(row: Any, function: Callable[[], object]) -> None:
    """A program that cannot be is the row's breach, whoever refuses it."""
    try:
        function()
    except ProgramError as wrong:
        raise AssertionError(f"{row.name}: {wrong}") from wrong


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
    values: dict[str, Any] = {"optimizer": 5e-4, "grad_copy_bandwidth": 1e12, "per_tensor": 1e-5}
    values |= {"host_copy_rates": (20e9, 20e9)} | more
    bound = ("compute",) * n
    flops = np.full(n, 8e9)
    return StepCost(np.full(n, forward), np.full(n, backward), bound, bound, flops, 2 * flops, **values)


def check_strategy(row: Strategy) -> None:
    """Its knobs can be read, every layer is computed once a micro-batch, its program can be played, its steps repeat
    after its period, and within one each rank hears of every other's gradients.

    Parameters
    ----------
    row : a :class:`~clustersim.training.strategies.base.Strategy`, in the table or not.

    Raises :class:`AssertionError` where the contract is broken.
    """
    require(issubclass(row.config, StrategyConfig), row, "its config must be a StrategyConfig")
    for accumulation in (1, 3):
        for jitter in (0.0, 0.05):
            _plays(row, lambda passes=accumulation, by=jitter: check_steps(row, passes, by))  # type: ignore[misc]
    _plays(row, lambda: check_period(row))
    _plays(row, lambda: check_exchanged(row))
    check_whole_numbers(row)
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


def check_whole_numbers(row: Strategy) -> None:
    """A whole number that a knob cannot be is refused as one reads it, or by an error that says so: never a traceback.

    Tried are 0 and -1 of each knob whose default is a whole number. Raises :class:`AssertionError`.
    """
    model = toy_model([[5], [6]])
    defaults = msgspec.to_builtins(row.config())
    knobs = [name for name, value in defaults.items() if type(value) is int]
    for knob, value in product(knobs, (0, -1)):
        try:
            config = msgspec.convert({"kind": row.name, knob: value}, row.config)
            _, ranks = _placed(row, config)
            row.build(model, toy_cost(model), ranks, config, row.period_of(config), 0)
        except (msgspec.ValidationError, ClusterSimError):
            continue
        except Exception as wrong:
            words = f"{type(wrong).__name__}: {wrong}"
            raise AssertionError(f"{row.name}: {knob} = {value} must work or be refused, not end in {words}") from wrong


def check_period(row: Strategy) -> None:
    """The steps behind the first repeat after the row's ``period``, and no sooner: figures are means over periods.

    Where partners change from step to step they are part of what repeats. How often depends on the number of ranks,
    which a period does not know; so it may be a multiple of what it is on the few that are tried.
    """
    config = row.config()
    period = row.period_of(config)
    _, ranks = _placed(row, config)
    model = toy_model([[2**18, 9], [30 * 2**18], [5]])
    program = row.build(model, toy_cost(model), ranks, config, 1 + max(3 * period, 8), 5)
    steps = range(1, 1 + max(3 * period, 8))
    alike = _repeats_after([_step_signature(program, step) for step in steps])
    same_partners = _repeats_after([_step_signature(program, step, partners=True) for step in steps])
    fits = period == alike if alike == same_partners else period % same_partners == 0
    require(fits, row, f"its steps repeat after {same_partners}, its period is {period}")


def check_exchanged(row: Strategy) -> None:
    """Within a period each rank hears of every other's gradients: else they do not train one model.

    As :func:`clustersim.training.strategies.exchange_contract.check_exchange` has it, of three micro-batches a step.
    """
    config = msgspec.convert({"kind": row.name, "gradient_accumulation_steps": 3}, row.config)
    period = row.period_of(config)
    _, ranks = _placed(row, config)
    model = toy_model([[2**18, 9], [30 * 2**18], [5]])
    check_exchange(row, row.build(model, toy_cost(model), ranks, config, 2 * period + 1, 5), period)


def _repeats_after(steps: Sequence[object]) -> int:
    return next(p for p in range(1, len(steps) + 1) if all(a == b for a, b in zip(steps, steps[p:], strict=False)))


def _step_signature(program: Program, step: int, partners: bool = False) -> Counter[tuple[object, ...]]:
    """What is done in a step: how often each op of each role, and where asked for with whom."""
    return Counter(
        (
            role.name,
            type(op).__name__,
            op.stream,
            op.phase,
            getattr(op, "kind", ""),
            op.nbytes,
            partners and _others(op),
        )
        for role in program.roles
        for op in role.ops
        if op.step == step
    )


def _others(op: Op) -> tuple[int, ...]:
    """The ranks that an op names, its root first."""
    if isinstance(op, Compute):
        return ()
    if isinstance(op, Collective):
        return op.root, op.groups.shape[1], *op.groups.ravel().tolist()
    return tuple(op.peer.tolist())


def _placed(row: Strategy, config: StrategyConfig) -> tuple[Topology, Mesh]:
    """A machine, and this strategy's ranks on it."""
    topology = fabrics.load("hgx-a100", nodes=1)
    ranks = fabrics.mesh(topology, nproc_per_node=row.world_size or 4)
    return topology, row.place(topology, ranks, config) if row.place else ranks


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
