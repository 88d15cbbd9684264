"""A steady step told by a few of its passes has the kernels and collectives of the step that is written out."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clustersim
from clustersim.core.paths import shipped
from clustersim.core.program import Collective, Compute, Op
from clustersim.scenario.run.held import held
from clustersim.scenario.run.running import prepare_held, sampled_step
from clustersim.studies.plan import limits
from clustersim.studies.plan.candidates import scenario_of
from clustersim.studies.plan.limits import Bound, SampledSteps, step_bound
from clustersim.studies.plan.seen import KnownCandidates
from clustersim.studies.plan.sites import machines_of
from clustersim.studies.plan.spec import load
from clustersim.training.strategies import STRATEGIES
from clustersim.training.strategies.zero3 import _PrefetchWalk
from clustersim.training.strategies.zero_config import ZeroOptimization

PASSES = (1, 2, 3, 6)
MOST_OPTIONS = 12
"""Of a plan that are written out."""
SAMPLED: list[dict[str, Any]] = [
    {"kind": "single"},
    {"kind": "ddp"},
    {"kind": "ddp", "find_unused_parameters": True, "comm_hook": "bf16_compress", "gradient_as_bucket_view": True},
    {"kind": "fsdp", "param_dtype": "bf16"},
    {"kind": "fsdp", "version": 1, "sharding_strategy": "SHARD_GRAD_OP", "limit_all_gathers": True},
    {"kind": "fsdp", "data_parallel_replicate_degree": 2, "reshard_after_forward": False},
    {"kind": "fsdp", "no_sync": True, "version": 1},
    {"kind": "fsdp", "version": 1, "backward_prefetch": "BACKWARD_POST", "forward_prefetch": True},
    {"kind": "fsdp", "cpu_offload": True},
    *({"kind": "zero", "param_dtype": "fp16", "zero_optimization": {"stage": stage}} for stage in (1, 2, 3)),
    {"kind": "zero", "zero_optimization": {"stage": 1, "overlap_comm": True}},
    {"kind": "zero", "zero_optimization": {"stage": 2, "use_multi_rank_bucket_allreduce": False}},
    {"kind": "zero", "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    {
        "kind": "zero",
        "zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0},
    },
    {"kind": "zero", "zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 8}},
    {"kind": "zero", "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
]


def work_of(weighed: list[tuple[tuple[Op, ...], int]]) -> tuple[Counter[Any], Counter[Any]]:
    """Collectives, and kernels with their seconds, by how often they are done; buckets are counted on in a step."""
    collectives, kernels = Counter[Any](), Counter[Any]()
    for ops, times in weighed:
        for op in ops:
            if isinstance(op, Collective):
                where = op.stream, op.communicator, op.groups.tobytes()
                collectives[op.kind, op.nbytes, op.dtype, op.root, where] += times
            elif isinstance(op, Compute):
                kernels[re.sub(r"bucket \d+", "bucket", op.name), op.stream, op.phase, op.paced, op.duration] += times
    return +collectives, +kernels


def test_every_strategy_that_is_told_by_a_few_passes_is_looked_at_here() -> None:
    assert {s["kind"] for s in SAMPLED} == {name for name, row in STRATEGIES.items() if row.sample is not None}


@pytest.mark.parametrize("kept", ["none", "full"])
@pytest.mark.parametrize("strategy", SAMPLED, ids=str)
def test_few_passes_have_the_kernels_and_collectives_of_the_step_that_is_written_out(
    strategy: dict[str, Any], kept: str
) -> None:
    name = "single_gpt2_1x1_a100" if strategy["kind"] == "single" else "ddp_gpt2_xl_2x8_a100"
    for passes in PASSES:
        changes = {
            "strategy": {**strategy, "gradient_accumulation_steps": passes},
            "model.name": "gpt2",
            "model.activation_checkpointing": kept,
            "run.steps": 3,
        }
        parts = held(clustersim.scenario.load(name, changes))
        program = prepare_held(parts).program
        ops = tuple(op for op in program.roles[0].ops if op.step == 2)
        sampled = sampled_step(parts)
        assert sampled is not None
        sample, _ = sampled
        assert work_of(list(sample.times(passes))) == work_of([(ops, 1)]), passes
        assert SampledSteps().bound(parts).step_s == pytest.approx(step_bound(prepare_held(parts)).step_s, rel=1e-12)


@pytest.mark.parametrize("name", [name for name in shipped("scenarios") if name.startswith("plan_")])
def test_bounds_of_shipped_plans_are_those_of_steps_that_are_written_out(name: str) -> None:
    read, path = load(name)
    known = KnownCandidates(read, path, *machines_of(read, path))
    options = [option.candidate for option in known.options if not option.candidate.form.split]
    chosen = options[:: max(1, len(options) // MOST_OPTIONS)]
    by_number = {option.number: option for option in chosen}
    bounds = {number: outcome for number, outcome in known.sieve.look(chosen) if isinstance(outcome, Bound)}
    for number, bound in bounds.items():
        whole = step_bound(prepare_held(held(scenario_of(read, path, by_number[number]))))
        assert bound.step_s == pytest.approx(whole.step_s, rel=1e-12)
        assert bound.compute_s == pytest.approx(whole.compute_s, rel=1e-12)


def test_a_plan_that_writes_every_step_out_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    read, path = load("plan_llama3_70b_h100")
    bounds = {}
    calls = []
    prepare_held_as_it_is = limits.prepare_held
    monkeypatch.setattr(
        limits, "prepare_held", lambda *parts, **how: calls.append(1) or prepare_held_as_it_is(*parts, **how)
    )
    for op_by_op in (False, True):
        calls.clear()
        plan = msgspec.structs.replace(read, run={**read.run, "op_by_op": op_by_op})
        known = KnownCandidates(plan, path, *machines_of(plan, path))
        options = [option.candidate for option in known.options][::10]
        bounds[op_by_op] = dict(known.sieve.look(options))
        assert bool(calls) is op_by_op
    assert any(isinstance(outcome, Bound) for outcome in bounds[True].values())
    for number, plain in bounds[True].items():
        fast = bounds[False][number]
        assert type(fast) is type(plain)
        if isinstance(plain, Bound) and isinstance(fast, Bound):
            assert fast.step_s == pytest.approx(plain.step_s, rel=1e-12)
            assert fast.compute_s == pytest.approx(plain.compute_s, rel=1e-12)
        else:
            assert fast == plain


def test_options_that_differ_in_passes_alone_share_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    read, path = load("plan_llama3_70b_h100")
    looked = []
    monkeypatch.setattr(limits, "sampled_step", lambda parts: looked.append(1) or sampled_step(parts))
    known = KnownCandidates(read, path, *machines_of(read, path))
    options = [option.candidate for option in known.options]
    bounds = [outcome for _, outcome in known.sieve.look(options) if isinstance(outcome, Bound)]
    assert len(looked) < 0.75 * len(bounds)


def walked_along(sizes: list[int], order: tuple[int, ...], k: int, limit: int) -> bool:
    """Whether the module of place ``k`` is used again within ``limit`` elements, as DeepSpeed looks for it."""
    distance = 0
    for later in order[k + 1 :]:
        if distance >= limit:
            return False
        if later == order[k]:
            return True
        distance += sizes[later]
    return False


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    picks=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    limit=st.integers(0, 20),
    recorded=st.booleans(),
)
def test_reuse_is_looked_up_as_it_is_walked_along(
    sizes: list[int], picks: list[int], limit: int, recorded: bool
) -> None:
    order = tuple(pick % len(sizes) for pick in picks)
    walk = _PrefetchWalk(sizes, order, ZeroOptimization(stage=3, stage3_max_reuse_distance=limit), recorded)
    for k in range(len(order)):
        assert walk._soon(k) is (recorded and walked_along(sizes, order, k, limit))
