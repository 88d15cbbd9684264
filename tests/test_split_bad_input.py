"""Bad [parallel] tables: one line with field, value and the nearest that works, and exit status 2."""

from __future__ import annotations

import pytest

from clustersim import scenario
from clustersim.core.errors import ClusterSimError

PIPELINE = "1f1b_gpt2_xl_1x8_a100"
MOE = "ep8_mixtral_8x7b_8x8_h100"
DENSE = "tp8_pp4_llama3_70b_32x8_h100"
CONV = "model_parallel_resnet50_1x2_v100"
TITAN = "fsdp_tp8_llama3_70b_32x8_h100"
DUAL = "pp16_ep64_deepseek_v3_256x8_h800"

WRONG = [
    (PIPELINE, {"tp": 3}, "tp = 3 does not fit into 8 ranks; use 2 or 4 (at $.parallel.tp)"),
    (PIPELINE, {"tp": 2, "pp": 4}, "tp = 2 does not divide 25 heads; use 1 or 5 (at $.parallel.tp)"),
    (PIPELINE, {"pp": 16}, "pp = 16 does not fit into 8 ranks; use 8 (at $.parallel.pp)"),
    (PIPELINE, {"pp": 64, "cluster.nodes": 8}, "pp = 64 makes 64 stages of 48 layers; use 16 (at $.parallel.pp)"),
    (
        PIPELINE,
        {"pp": 7, "cluster.gpus_per_node": 7},
        "pp = 7: 48 layers do not divide over 7 ranks; use 6 or 8, or a layout (at $.parallel.pp)",
    ),
    (PIPELINE, {"vpp": 7}, "vpp = 7 makes 56 stages of 48 layers; use 6 (at $.parallel.vpp)"),
    (PIPELINE, {"vpp": 2}, "1f1b has 1 chunk on each pipeline rank, not 2; use 1 (at $.parallel.vpp)"),
    (PIPELINE, {"schedule": "1f2b"}, "no pipeline schedule '1f2b'; did you mean '1f1b'? (at $.parallel.schedule)"),
    (PIPELINE, {"schedule": "zbv"}, "vpp = 1: this schedule gives every rank 2 chunks; use 2 (at $.parallel.vpp)"),
    (PIPELINE, {"schedule": "dualpipe", "microbatches": 25}, "the nearest that works is 26 (at $.parallel"),
    (PIPELINE, {"schedule": "pipedream_2bw", "microbatches": 4}, "the nearest that works is 8 (at $.parallel"),
    (PIPELINE, {"schedule_csv": "none.csv"}, "nor beside 1f1b_gpt2_xl_1x8_a100.toml (at $.parallel.schedule_csv)"),
    (PIPELINE, {"layout": [6, 6, 6, 6, 6, 6, 6, 5]}, "layout has 8 stages of 47 layers together; the pipeline has 8"),
    (PIPELINE, {"layout": "Et*6|(t*6|*6,t*6L"}, "cannot read '('; write E, t, m, L, '|', '*n' and parentheses"),
    (PIPELINE, {"layout": [24, 24]}, "layout has 2 stages, which pp 8 and vpp 1 do not make (at $.parallel.layout)"),
    (PIPELINE, {"layout": [8, 0, 8, 8, 8, 8, 8, 0]}, "stage 1 of 8 has no layer; give it one (at $.parallel.layout)"),
    (PIPELINE, {"microbatches": 24, "global_batch_size": 50}, "and parallel.global_batch_size to 25; say one"),
    (PIPELINE, {"global_batch_size": 49}, "is no multiple of 2 samples on 1 replicas; use 48 or 50"),
    (PIPELINE, {"strategy.gradient_accumulation_steps": 8}, "and strategy.gradient_accumulation_steps to 8; say one"),
    (PIPELINE, {"pp": "8"}, "'8' does not fit: expected a whole number, got text in quotes (at $.parallel.pp)"),
    (PIPELINE, {"pp": 2.5}, "2.5 does not fit: expected a whole number, got a number (at $.parallel.pp)"),
    (PIPELINE, {"pp": True}, "True does not fit: expected a whole number, got true or false (at $.parallel.pp)"),
    (PIPELINE, {"micro_batchs": 3}, "unknown field 'micro_batchs' = 3; did you mean 'microbatches'?"),
    (PIPELINE, {"strategy.kind": "parameter_server", "pp": 2}, "has a whole model on every worker, which"),
    (PIPELINE, {"strategy.kind": "sgd_steps"}, "strategy 'sgd_steps' has a whole model on every worker"),
    (PIPELINE, {"strategy.kind": "zero", "strategy.zero_optimization.stage": 3}, "use stage 0 or 1, or pp = 1 (at"),
    (PIPELINE, {"strategy.kind": "fsdp", "strategy.version": 1}, "write version = 2 (at $.strategy.version)"),
    (CONV, {"tp": 2, "pp": 1}, "tp = 2 cuts attention and MLPs; the model has none; use 1 (at $.parallel.tp)"),
    (CONV, {"cp": 2, "pp": 1}, "cp = 2 splits a sequence; the model has none; use 1 (at $.parallel.cp)"),
    (CONV, {"layout": [73, 0]}, "stage 1 of 2 has no layer; give it one (at $.parallel.layout)"),
    (DENSE, {"ep": 2}, "ep = 2 spreads experts; the model has none; use 1 (at $.parallel.ep)"),
    (DENSE, {"vpp": 3}, "80 layers do not divide over 4 ranks of 3 chunks; use 2 or 4, or a layout"),
    (DENSE, {"global_batch_size": 100}, "is no multiple of 1 samples on 8 replicas; use 96 or 104"),
    (MOE, {"ep": 16}, "ep = 16 does not divide 8 experts; use 8 (at $.parallel.ep)"),
    (MOE, {"ep": 8, "etp": 16}, "ep = 8 does not fit into 64 ranks beside etp = 16; use 4 (at $.parallel.ep)"),
    (MOE, {"routing": {"kind": "histogram", "file": "no.csv"}}, "(at $.parallel.routing.file)"),
    (
        MOE,
        {"strategy.kind": "fsdp", "use_distributed_optimizer": False, "dp_replicate": 2},
        "dp_replicate = 2 with ep = 8: replicas of sharded experts are not played; use dp_replicate = 1, or ep = 1",
    ),
    (TITAN, {"dp_shard": 7}, "dp_shard = 7 times dp_replicate 1 is not dp 32; use 32 (at $.parallel.dp_shard)"),
    (DUAL, {"microbatches": 16}, "not 16 micro-batches; the nearest that works is 32 (at $.parallel.microbatches)"),
]


@pytest.mark.parametrize(("name", "changes", "said"), WRONG, ids=[f"{name[:4]} {c}" for name, c, _ in WRONG])
def test_what_cannot_be_split_so_is_one_line_with_field_value_and_what_would_be_right(name, changes, said):
    changes = {key if "." in key else f"parallel.{key}": value for key, value in changes.items()}
    with pytest.raises(ClusterSimError) as raised:
        scenario.load(name, changes).prepare()
    text = str(raised.value)
    assert said in text
    assert "\n" not in text


@pytest.mark.parametrize("command", ["run", "memory", "describe", "compare-strategies"])
def test_every_command_ends_with_the_line_and_status_2(clustersim, command):
    done = clustersim(command, PIPELINE, "--set", "parallel.tp=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --set parallel.tp: tp = 3 does not fit into 8 ranks; use 2 or 4 (at $.parallel.tp)\n"


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (PIPELINE, {"strategy.bucket_cap_mb": 50}, "strategy.bucket_cap_mb changes nothing beside a split model"),
        (PIPELINE, {"overlap_p2p_communication": False}, "it is the interleaved schedule's, not that of '1f1b'"),
        (PIPELINE, {"microbatch_group_size_per_vp_stage": 8}, "schedule '1f1b' has no groups"),
        (PIPELINE, {"ddp_num_buckets": 2}, "without overlap_grad_reduce a chunk has one bucket"),
        (DENSE, {"cp_comm_type": "all_gather"}, "cp_comm_type changes nothing here: cp is 1"),
        (MOE, {"flex_backend": "hybridep"}, "flex_backend changes nothing here: dispatcher is 'alltoall'"),
        (TITAN, {"use_distributed_optimizer": True}, "the replicas are the strategy's own"),
    ],
)
def test_a_setting_with_nothing_to_work_on_is_said(name, changes, said):
    changes = {key if "." in key else f"parallel.{key}": value for key, value in changes.items()}
    notes = [scenario.load(name, more).prepare().notes for more in (changes, {})]
    assert [any(said in note for note in found) for found in notes] == [True, False]


@pytest.mark.parametrize("name", [PIPELINE, MOE, DENSE, CONV, TITAN, DUAL])
def test_no_shipped_scenario_says_what_changes_nothing(name):
    assert not any("changes nothing" in note for note in scenario.load(name).prepare().notes)
