"""What is charged to a slow GPU, against what the same scenario takes with that GPU at full speed."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import clustersim as package
from clustersim.core.op_infos import of_each
from clustersim.explain.breakdown import breakdown
from clustersim.explain.explain import explain
from clustersim.explain.pieces import STATES, PieceState, by_class
from clustersim.explain.representatives import representatives
from clustersim.explain.stalls import causes
from clustersim.studies.what_if.rerun import step_time

SMALL = {"model.name": "llama3.2-1b", "run.jitter": 0.0, "run.steps": 3}
SHORT = SMALL | {"cluster.nodes": 2, "model.seq_len": 1024}
MPT = SMALL | {"model.name": "mpt-1b"}
CASES = {
    "ddp": ("ddp_gpt2_xl_2x8_a100", SMALL | {"model.name": "gpt2"}),
    "fsdp1": ("fsdp_mpt_7b_16x8_a100", MPT | {"cluster.nodes": 2, "strategy.micro_batch_size": 1}),
    "fsdp2": ("fsdp_llama3_8b_64x8_h100", SMALL | {"cluster.nodes": 1}),
    "fsdp2, short": ("fsdp_llama3_8b_64x8_h100", SHORT),
    "fsdp2, 512 GPUs": ("fsdp_llama3_8b_64x8_h100", {"run.jitter": 0.0}),
    "hsdp": ("hsdp_llama3_70b_32x8_h100", SMALL | {"cluster.nodes": 2, "strategy.data_parallel_replicate_degree": 2}),
    "zero1": ("zero1_llama3_8b_2x8_a100", SMALL | {"cluster.nodes": 1}),
    "zero2": ("zero2_llama3_8b_2x8_a100", SMALL | {"cluster.nodes": 1}),
    "zero3": ("zero3_llama3_8b_2x8_a100", SMALL | {"cluster.nodes": 2}),
    "ep": ("ep8_mixtral_8x7b_8x8_h100", {"cluster.nodes": 1, "parallel.global_batch_size": 8, "run.jitter": 0.0}),
}
PIPELINE = (
    "tp8_pp4_llama3_70b_32x8_h100",
    SMALL
    | {"cluster.nodes": 1, "parallel.tp": 2, "parallel.pp": 2, "parallel.vpp": 1, "parallel.global_batch_size": 8},
)
SLOW = {"cluster.slow": [{"ranks": [5], "speed": 0.8}]}
NOT_BUSY = ("exposed transfer", "waiting for a peer", "bubble")
LEAST, MOST = 0.97, 1.16
"""Of what a GPU at full speed gives back, as a mean over GPUs of which the slow one waits for nobody. It is more
where fast GPUs hide less of their transfers while they wait, so that their own kernels are faster than they will be."""


@cache
def played(case, slow):
    name, changes = CASES.get(case, PIPELINE)
    return package.load(name, changes | (SLOW if slow else {})).run().timeline


def charged(timeline):
    explained = causes(timeline)
    return {(c.cause, c.subject): explained.share(c) for c in explained.charges}


def given_back(case):
    now = step_time(played(case, slow=True))
    return 1 - step_time(played(case, slow=False)) / now


@pytest.mark.parametrize("case", CASES)
def test_a_slow_gpu_is_charged_with_what_its_full_speed_gives_back(case):
    timeline = played(case, slow=True)
    n = timeline.world_size
    share = charged(timeline)["slow rank", "rank 5"]
    assert LEAST < share / (given_back(case) * (n - 1) / n) < MOST
    assert "of the step is lost because rank 5 is slow" in explain(timeline, bounded=False).verdict


@pytest.mark.parametrize("case", ["ddp", "fsdp1", "fsdp2", "fsdp2, short", "fsdp2, 512 GPUs", "hsdp", "zero1", "zero3"])
def test_what_is_charged_is_what_a_fast_gpu_waits_and_sees_of_transfers_beyond_a_run_without_a_slow_one(case):
    slow, mended = played(case, slow=True), played(case, slow=False)
    n = slow.world_size
    lost = [breakdown(t).seconds[0, [STATES.index(state) for state in NOT_BUSY]].sum() for t in (slow, mended)]
    seconds = charged(slow)["slow rank", "rank 5"] * step_time(slow)
    assert seconds == pytest.approx((lost[0] - lost[1]) * (n - 1) / n, rel=0.03)


@pytest.mark.parametrize("case", ["fsdp2, short", "hsdp", "pipeline"])
def test_all_that_is_charged_is_all_that_is_lost(case):
    explained = causes(played(case, slow=True))
    cut = explained.cut
    useless = [i for i, s in enumerate(STATES) if s not in ("compute-bound", "memory-bound", "optimizer")]
    # Of kernels that are shorter than their launch, what the launch takes beyond them.
    launching = of_each(explained.timeline.ops, lambda op: by_class(op).get(PieceState.LAUNCH, 0.0), np.float64)
    seconds = cut.seconds * np.where(cut.state == PieceState.LAUNCH, launching[cut.op], 1.0)
    lost = (seconds * cut.weight[cut.owner])[np.isin(cut.state, useless)].sum()
    assert sum(c.seconds for c in explained.charges) == pytest.approx(lost)
    assert all(c.seconds >= -1e-9 for c in explained.charges)


def test_without_a_slow_gpu_nobody_is_slow():
    for case in ("ddp", "fsdp2, short", "hsdp"):
        assert not any(cause == "slow rank" for cause, _ in charged(played(case, slow=False)))


def test_kernels_that_a_slow_nic_keeps_transfers_beside_are_no_slow_gpu():
    name, changes = CASES["hsdp"]
    nic = {"cluster.changes": [{"match": "node0/nic0", "factor": 0.25}]}
    shares = charged(package.load(name, changes | nic).run().timeline)
    assert not any(cause == "slow rank" for cause, _ in shares)
    assert max(shares, key=shares.__getitem__)[0] == "link"


def test_verdict_warnings_and_charts_name_the_same_slow_gpu_of_a_later_stage():
    timeline = played("pipeline", slow=True)
    explained = explain(timeline, bounded=False)
    assert "of the step is lost because rank 5 is slow" in explained.verdict
    assert explained.warnings[0].startswith("rank 5 is ")
    assert [rank for rank, remark in representatives(timeline).items() if remark == "slowest"] == [5]
    share = charged(timeline)["slow rank", "rank 5"]
    # A wait for a slow stage is charged to it as a whole, with what the schedule would have anyway.
    assert LEAST < share / given_back("pipeline") < 1.2
