"""The ``[parallel]`` table: what other frameworks call its fields, and what must divide what."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from clustersim.core.errors import ScenarioError
from clustersim.training.parallel import (
    FIELDS,
    ModelShape,
    ParallelConfig,
    Recompute,
    check,
    field_for,
    padded_vocab,
    preset,
    recompute,
    stages_of,
    translate,
)

LLAMA = ModelShape(32, 4096, 4096, heads=32, kv_heads=8, ffn=14336)
MIXTRAL = ModelShape(32, 4096, 4096, 32, 8, experts=8, moe_ffn=14336)


def config(**fields) -> ParallelConfig:
    """A table as a file would give it."""
    return msgspec.convert(fields, ParallelConfig)


ALIASES = {
    "tensor-model-parallel-size": (8, {"tp": 8}),
    "--pipeline-model-parallel-size": (4, {"pp": 4}),
    "context_parallel_size": (2, {"cp": 2}),
    "expert_model_parallel_size": (8, {"ep": 8}),
    "expert-tensor-parallel-size": (1, {"etp": 1}),
    "num-virtual-stages-per-pipeline-rank": (2, {"vpp": 2}),
    "num-layers-per-virtual-pipeline-stage": (5, {"layers_per_virtual_stage": 5}),
    "pipeline_model_parallel_layout": ("EtL", {"layout": "EtL"}),
    "moe-token-dispatcher-type": ("flex", {"dispatcher": "flex"}),
    "overlap-moe-expert-parallel-comm": (True, {"ep_overlap": True}),
    "no-overlap-p2p-communication": (True, {"overlap_p2p_communication": False}),
    "tp_comm_overlap": (True, {"tp_overlap": "userbuffers"}),
    "use_tp_pp_dp_mapping": (True, {"order": "tp-cp-ep-pp-dp"}),
    "tensor_parallel_degree": (8, {"tp": 8}),
    "pipeline_parallel_degree": (4, {"pp": 4}),
    "context_parallel_degree": (4, {"cp": 4}),
    "expert_parallel_degree": (4, {"ep": 4}),
    "data_parallel_shard_degree": (-1, {"dp_shard": -1}),
    "data_parallel_replicate_degree": (2, {"dp_replicate": 2}),
    "enable_async_tensor_parallel": (True, {"tp_overlap": "async_tp"}),
    "pipeline_parallel_schedule": ("Interleaved1F1B", {"schedule": "Interleaved1F1B"}),
    "pipeline_parallel_layers_per_stage": (2, {"layers_per_virtual_stage": 2}),
    "context_parallel_rotate_method": ("allgather", {"cp_comm_type": "all_gather"}),
    "debug": ({"moe_force_load_balance": True}, {"routing": {"kind": "round_robin"}}),
    "compile": ({"enable_async_tensor_parallel": False}, {"tp_overlap": "none"}),
    "pipeline": ({"stages": "auto"}, {}),
    "sequence_parallel_size": (4, {"cp": 4}),
    "ep_size": (8, {"ep": 8}),
    "train_batch_size": (256, {"global_batch_size": 256}),
    "gradient_accumulation_steps": (8, {"microbatches": 8}),
    "pipe_partitioned": (True, {"pipeline_partitioned": True}),
    "routing": ("balanced", {"routing": {"kind": "balanced"}}),
}


@pytest.mark.parametrize("name", ALIASES)
def test_another_frameworks_name_means_the_same_field(name):
    value, expected = ALIASES[name]
    fields, elsewhere = translate({name: value})
    assert (fields, elsewhere) == (expected, {})
    config(**fields)


def test_an_activation_checkpoint_interval_is_full_recomputation_of_so_many_layers():
    fields, _ = translate({"pipeline": {"activation_checkpoint_interval": 2}})
    assert recompute(config(**fields)) == Recompute("full", "uniform", 2)
    assert translate({"pipeline": {"activation_checkpoint_interval": 0}}) == ({}, {})


ELSEWHERE = {
    "megatron": ({"micro-batch-size": 2, "seq_length": 8192}, {"strategy.micro_batch_size": 2, "model.seq_len": 8192}),
    "experts": (
        {"num_experts": 64, "moe_router_topk": 4},
        {"model.options.experts": 64, "model.options.experts_per_token": 4},
    ),
    "torchtitan, no pipeline": ({"training": {"local_batch_size": 8}}, {"strategy.micro_batch_size": 8}),
    "torchtitan, reshard": ({"fsdp_reshard_after_forward": "never"}, {"strategy.reshard_after_forward": False}),
    "torchtitan, checkpoints": (
        {"activation_checkpoint": {"mode": "full"}},
        {"model.activation_checkpointing": "full"},
    ),
    "deepspeed": (
        {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 4},
        {"strategy.zero_optimization.stage": 1, "strategy.micro_batch_size": 4},
    ),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_what_belongs_to_another_table_is_moved_there(case):
    written, expected = ELSEWHERE[case]
    assert translate(written) == ({}, expected)


@pytest.mark.parametrize(
    ("beside", "micro_batch_size"), [({"num_pp_microbatches": 4}, 2), ({"pipeline_parallel_microbatch_size": 2}, 2)]
)
def test_a_local_batch_is_all_micro_batches_of_a_pipeline_together(beside, micro_batch_size):
    fields, elsewhere = translate({"local_batch_size": 8, **beside})
    assert (fields, elsewhere) == ({"microbatches": 4}, {"strategy.micro_batch_size": micro_batch_size})


def test_a_local_batch_that_does_not_divide_is_refused():
    with pytest.raises(ScenarioError, match=r"local_batch_size = 8 does not divide .* 3 of them"):
        translate({"local_batch_size": 8, "num_pp_microbatches": 3})


def test_two_names_of_one_field_are_one_line_naming_both():
    with pytest.raises(ScenarioError) as raised:
        translate({"tp": 8, "tensor_parallel_degree": 4})
    assert str(raised.value) == (
        "tp = 8 and tensor_parallel_degree = 4 contradict each other; write tp once (at $.parallel.tp)"
    )
    assert translate({"tp": 8, "tensor_parallel_degree": 8}) == ({"tp": 8}, {})


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"tensor_paralel_degree": 4}, "did you mean 'tensor_parallel_degree'? (at $.parallel.tensor_paralel_degree)"),
        ({"xyz": 4}, "unknown field 'xyz' = 4; the first ones are tp, pp, cp, ep"),
        ({"tp_comm_overlap": 1}, "tp_comm_overlap = 1 does not fit: expected true or false"),
        ({"context_parallel_rotate_method": "ring"}, "known: 'allgather', 'alltoall'"),
    ],
)
def test_a_name_or_value_that_nobody_has_is_refused_with_what_is_near(written, said):
    with pytest.raises(ScenarioError, match=re.escape(said)):
        translate(written)


def test_a_field_of_the_table_is_found_by_any_name():
    assert field_for("pipeline_parallel_degree") == "parallel.pp"
    assert field_for("tp-comm-overlap") == "parallel.tp_overlap"
    assert field_for("micro_batch_size") == "strategy.micro_batch_size"
    assert field_for("bucket_cap_mb") is None


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "deepspeed", "oneflow"])
@pytest.mark.parametrize("tp", [1, 8])
def test_a_frameworks_defaults_are_fields_and_hold_together(framework, tp):
    said = {"framework": framework, "tp": tp, "pp": 2}
    made = config(**{**preset(framework, said), **said})
    assert set(preset(framework, said)) <= set(FIELDS)
    check(made, LLAMA, 64)


def test_torchtitans_experts_are_cut_only_where_they_are_not_spread():
    assert preset("torchtitan", {"tp": 2, "ep": 4})["etp"] == 1
    assert "etp" not in preset("torchtitan", {"tp": 2})


def test_torchtitan_gives_two_stages_to_each_rank_of_a_schedule_with_several():
    assert preset("torchtitan", {"schedule": "Interleaved1F1B"})["vpp"] == 2
    assert "vpp" not in preset("torchtitan", {"schedule": "Interleaved1F1B", "layers_per_virtual_stage": 2})
    assert "vpp" not in preset("torchtitan", {"schedule": "1F1B"})


# The table, the model, the ranks; and what the one line must say.
WRONG = {
    "world": ({"tp": 3}, LLAMA, 64, "tp = 3 does not fit into 64 ranks; use 2 or 4 (at $.parallel.tp)"),
    "world by all": ({"tp": 8, "pp": 16}, LLAMA, 64, "pp = 16 does not fit into 64 ranks beside tp * cp = 8; use 8"),
    "experts' world": (
        {"tp": 4, "ep": 8, "sequence_parallel": True},
        MIXTRAL,
        16,
        "ep = 8 does not fit into 16 ranks beside tp = 4; use 4, or set parallel.etp = 1, which leaves each expert "
        "whole (at $.parallel.ep)",
    ),
    "heads": ({"tp": 3}, LLAMA, 48, "tp = 3 does not divide 32 heads; use 2 or 4 (at $.parallel.tp)"),
    "ffn": (
        {"tp": 16},
        ModelShape(4, heads=32, kv_heads=32, hidden=4096, ffn=1000),
        64,
        "tp = 16 does not divide 1,000 of the MLP's width; use 8 (at $.parallel.tp)",
    ),
    "no products": ({"tp": 2}, ModelShape(73), 8, "tp = 2 cuts attention and MLPs; the model has none; use 1"),
    "kv heads": (
        {"tp": 4},
        ModelShape(4, heads=24, kv_heads=6, hidden=1536, ffn=6144),
        64,
        "tp = 4 is neither a divisor nor a multiple of 6 key-value heads; use 3 or 6",
    ),
    "kv heads of some blocks": (
        {"tp": 4},
        ModelShape(4, heads=24, kv_heads=8, hidden=1536, ffn=6144, kv_heads_of=(6,)),
        64,
        "tp = 4 is neither a divisor nor a multiple of 6 key-value heads; use 2 or 24",
    ),
    "sequence": (
        {"cp": 8},
        ModelShape(4, seq_len=1000),
        64,
        "cp = 8 does not cut 1,000 tokens into 16 equal chunks; use 5 or 10 (at $.parallel.cp)",
    ),
    "images": ({"cp": 2}, ModelShape(4), 64, "cp = 2 splits a sequence; the model has none; use 1"),
    "sequence by tp": (
        {"tp": 8, "cp": 2, "sequence_parallel": True},
        ModelShape(4, 1000, 64, heads=8),
        64,
        "tp = 8 does not divide the 500 tokens of a sequence; use 5 or 10 (at $.parallel.tp)",
    ),
    "sequence parallel alone": ({"sequence_parallel": True}, LLAMA, 8, "needs tp > 1; tp is 1"),
    "sequence parallel with all_reduce": (
        {"tp": 2, "sequence_parallel": True, "tp_grad_overlap": True},
        LLAMA,
        8,
        "leave one out",
    ),
    "overlap without sequence parallel": (
        {"tp": 2, "tp_overlap": "userbuffers"},
        LLAMA,
        8,
        "tp_overlap = 'userbuffers' needs sequence_parallel = true (at $.parallel.tp_overlap)",
    ),
    "overlap of nothing": ({"tp_overlap": "bulk"}, LLAMA, 8, "tp is 1"),
    "experts without sequence parallel": ({"tp": 2}, MIXTRAL, 8, "needs sequence_parallel = true, which is false"),
    "experts": ({"ep": 3}, MIXTRAL, 48, "ep = 3 does not divide 8 experts; use 2 or 4 (at $.parallel.ep)"),
    "no experts": ({"ep": 2}, LLAMA, 8, "ep = 2 spreads experts; the model has none; use 1"),
    "expert width": ({"etp": 3}, MIXTRAL, 48, "etp = 3 does not divide 14,336 of an expert's width; use 2 or 4"),
    "all to all": (
        {"cp": 16, "cp_comm_type": "a2a"},
        LLAMA,
        64,
        "a2a over 16 ranks does not divide the 8 key-value heads of a rank; use 8, or another cp_comm_type",
    ),
    "sizes missing": ({"cp": 8, "cp_comm_type": "a2a+p2p"}, LLAMA, 64, "needs hierarchical_context_parallel_sizes"),
    "sizes": (
        {"cp": 8, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (4, 4)},
        LLAMA,
        64,
        "hierarchical_context_parallel_sizes 4 * 4 are not two sizes whose product is cp 8",
    ),
    "list of layers": ({"cp": 2, "cp_comm_type": ("p2p", "a2a")}, LLAMA, 64, "lists 2 layers; the model has 32"),
    "stages": ({"pp": 64}, LLAMA, 64, "pp = 64 makes 64 stages of 32 layers; use 32 (at $.parallel.pp)"),
    "chunks": ({"pp": 4, "vpp": 16}, LLAMA, 64, "vpp = 16 makes 64 stages of 32 layers; use 8 (at $.parallel.vpp)"),
    "uneven": ({"pp": 3}, LLAMA, 48, "pp = 3: 32 layers do not divide over 3 ranks; use 2 or 4, or a layout"),
    "uneven chunks": (
        {"pp": 4, "vpp": 3},
        LLAMA,
        64,
        "vpp = 3: 32 layers do not divide over 4 ranks of 3 chunks; use 2 or 4, or a layout",
    ),
    "uneven beside the ends": (
        {"pp": 4, "decoder_first_pipeline_num_layers": 6},
        LLAMA,
        64,
        "pp = 4: 26 layers do not divide over 3 ranks beside the ends",
    ),
    "two ways of ends": (
        {"pp": 4, "decoder_first_pipeline_num_layers": 5, "account_for_loss_in_pipeline_split": True},
        LLAMA,
        64,
        "both set the ends of the pipeline; say one (at $.parallel.account_for_loss_in_pipeline_split)",
    ),
    "two ways of chunks": (
        {"pp": 4, "vpp": 2, "layers_per_virtual_stage": 2},
        LLAMA,
        64,
        "vpp = 2 contradicts 2 layers a chunk, which make 4 on each rank (at $.parallel.vpp)",
    ),
    "chunks of layers": (
        {"pp": 4, "layers_per_virtual_stage": 6},
        LLAMA,
        64,
        "makes 6 chunks of 32 layers, which pp 4 does not divide; use 4 or 8",
    ),
    "layout of other stages": ({"pp": 2, "layout": (9, 9, 14)}, LLAMA, 64, "layout has 3 stages, which pp 2 and vpp 1"),
    "layout and vpp": ({"pp": 2, "vpp": 2, "layout": (16, 16)}, LLAMA, 64, "layout has 2 stages, which pp 2 and vpp 2"),
    "layout and the ends": (
        {"pp": 2, "layout": (16, 16), "decoder_last_pipeline_num_layers": 4},
        LLAMA,
        64,
        "layout and decoder_last_pipeline_num_layers both say",
    ),
    "layout that cannot be read": ({"pp": 2, "layout": "Et*16|x*16L"}, LLAMA, 64, "cannot read 'x'"),
    "layout without an end": ({"pp": 2, "layout": "Et*16|t*16"}, LLAMA, 64, "begins with one E and ends with one L"),
    "chunks of one rank": ({"vpp": 2}, LLAMA, 8, "vpp = 2 needs pp > 1; pp is 1"),
    "two ranks without overlap": ({"pp": 2, "vpp": 2, "overlap_p2p_communication": False}, LLAMA, 8, "needs pp > 2"),
    "deferral": ({"defer_embedding_wgrad_compute": True}, LLAMA, 8, "needs pp > 1"),
    "padding": ({"pad_to_capacity": True}, MIXTRAL, 8, "needs a capacity_factor"),
    "capacity": ({"capacity_factor": 1.0}, MIXTRAL, 8, "dispatcher = 'allgather' sends every token everywhere"),
    "shared experts": ({"shared_expert_overlap": True}, MIXTRAL, 8, "needs dispatcher = 'alltoall' or 'flex'"),
    "pairs in a pipeline": (
        {"ep": 2, "pp": 2, "ep_overlap": True, "dispatcher": "alltoall"},
        MIXTRAL,
        8,
        "needs vpp > 1; vpp is 1",
    ),
    "pairs that gather": (
        {"ep": 2, "ep_overlap": True, "dispatcher": "allgather"},
        MIXTRAL,
        8,
        "needs dispatcher = 'alltoall' or 'flex', not 'allgather'",
    ),
    "padding that DeepEP has not": (
        {"ep": 2, "dispatcher": "flex", "capacity_factor": 1.0, "pad_to_capacity": True},
        MIXTRAL,
        8,
        "is not what DeepEP has",
    ),
    "8 bits by all-to-all": (
        {"ep": 2, "dispatcher": "alltoall", "float8_dispatch": True},
        MIXTRAL,
        8,
        "is what the kernels of 'flex' have; dispatcher is 'alltoall'",
    ),
    "pairs of nothing": ({"ep_overlap": True, "dispatcher": "alltoall"}, MIXTRAL, 8, "ep is 1"),
    "recomputation's method": ({"recompute_method": "block"}, LLAMA, 8, "belongs to recompute_granularity = 'full'"),
    "recomputation": ({"recompute_granularity": "full"}, LLAMA, 8, "needs recompute_method and recompute_num_layers"),
    "modules": ({"recompute_modules": ("mlp",)}, LLAMA, 8, "belong to recompute_granularity = 'selective'"),
    "distributed activations": (
        {
            "tp": 2,
            "sequence_parallel": True,
            "distribute_saved_activations": True,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        LLAMA,
        8,
        "needs sequence_parallel = false",
    ),
    "gathering": ({"overlap_param_gather": True}, LLAMA, 8, "needs use_distributed_optimizer = true"),
    "instances": ({"num_distributed_optimizer_instances": 2}, LLAMA, 8, "needs use_distributed_optimizer = true"),
    "instances that do not divide": (
        {"num_distributed_optimizer_instances": 3, "use_distributed_optimizer": True},
        LLAMA,
        8,
        "which is dp_replicate, does not divide dp 8; use 2 or 4",
    ),
    "buckets": ({"ddp_bucket_size": 1, "ddp_num_buckets": 1}, LLAMA, 8, "say one (at $.parallel.ddp_num_buckets)"),
    "shards": ({"dp_shard": 4}, LLAMA, 8, "dp_shard = 4 times dp_replicate 1 is not dp 8; use 8, or dp_replicate = 2"),
    "replicas": ({"dp_replicate": 3}, LLAMA, 8, "dp_replicate = 3 does not divide dp 8; use 2 or 4"),
    "order": ({"dp_replicate": 1, "order": "tp-xp"}, LLAMA, 8, "'xp' is no dimension"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_one_line_with_field_value_and_what_would(case):
    fields, shape, world, said = WRONG[case]
    with pytest.raises(ScenarioError) as raised:
        check(config(**fields), shape, world)
    assert said in str(raised.value)
    assert re.fullmatch(r"[^\n]* \(at \$\.parallel\.\w+\)", str(raised.value))


FINE = {
    "plain": ({}, LLAMA, 8),
    "few key-value heads": ({"tp": 16, "sequence_parallel": True}, LLAMA, 64),
    "folded experts": ({"tp": 4, "cp": 2, "pp": 2, "ep": 8, "etp": 1, "sequence_parallel": True}, MIXTRAL, 64),
    "uneven ends": (
        {"pp": 4, "decoder_first_pipeline_num_layers": 5, "decoder_last_pipeline_num_layers": 7},
        LLAMA,
        64,
    ),
    "loss and embedding counted": (
        {"pp": 16, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        ModelShape(126, 8192, 16384, 128256, 128, 8, 128, 53248),
        64,
    ),
    "layout": (
        {"pp": 8, "layout": "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"},
        ModelShape(80, 8192, 8192, 128256, 64, 8, 128, 28672),
        64,
    ),
    "hierarchical": ({"cp": 8, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (4, 2)}, LLAMA, 64),
}


@pytest.mark.parametrize("case", FINE)
def test_what_fits_is_let_through(case):
    fields, shape, world = FINE[case]
    check(config(**fields), shape, world)


degree = st.integers(1, 16)


def refusal(fields: dict[str, int], world: int) -> str:
    """What is wrong with these degrees of Mixtral; nothing where they fit."""
    try:
        check(config(**fields, sequence_parallel=fields["tp"] > 1), MIXTRAL, world)
    except ScenarioError as error:
        return str(error)
    return ""


@given(degree, degree, degree, degree, st.sampled_from([8, 16, 48, 64, 96]))
def test_what_an_error_suggests_is_not_refused_for_the_same_reason(tp, cp, pp, ep, world):
    fields = {"tp": tp, "cp": cp, "pp": pp, "ep": ep}
    found = re.fullmatch(r"(.*?); use (\d+)(?: or (\d+))?.* \(at \$\.parallel\.(\w+)\)", refusal(fields, world))
    assume(found is not None)
    reason, *values, field = found.groups()
    for value in filter(None, values):
        changed = re.sub(r"\d+", "n", refusal({**fields, field: int(value)}, world))
        assert not changed.startswith(re.sub(r"\d+", "n", reason))


@given(degree, degree, degree, degree, st.sampled_from([8, 16, 48, 64, 96]))
def test_degrees_that_pass_make_a_mesh_of_the_whole_world(tp, cp, pp, ep, world):
    made = config(tp=tp, cp=cp, pp=pp, ep=ep, sequence_parallel=tp > 1)
    try:
        check(made, MIXTRAL, world)
    except ScenarioError:
        return
    dims = made.dims(world)
    assert dims.world == world == dims.sizes["etp"] * dims.ep * dims.edp * dims.pp


def test_micro_batches_follow_from_the_global_batch():
    assert config(global_batch_size=256).micro_batches(dp=8, micro_batch_size=2) == 16
    assert config(microbatches=4).micro_batches(dp=8, micro_batch_size=2) == 4
    assert config().micro_batches(dp=8, micro_batch_size=2, accumulation=3) == 3
    assert config(microbatches=16, global_batch_size=256).micro_batches(8, 2, 16) == 16


@pytest.mark.parametrize(
    ("fields", "accumulation", "said"),
    [
        ({"global_batch_size": 100}, 1, "is no multiple of 2 samples on 8 replicas; use 96 or 112"),
        ({"global_batch_size": 8}, 1, "use 16 (at $.parallel.global_batch_size)"),
        (
            {"global_batch_size": 64, "microbatches": 2},
            1,
            "parallel.microbatches comes to 2 micro-batches and parallel.global_batch_size to 4; say one",
        ),
        ({"microbatches": 2}, 4, "and strategy.gradient_accumulation_steps to 4; say one (at $.parallel.microbatches)"),
    ],
)
def test_batches_that_do_not_go_together_are_refused(fields, accumulation, said):
    with pytest.raises(ScenarioError, match=re.escape(said)):
        config(**fields).micro_batches(8, 2, accumulation)


def test_a_layout_string_lists_the_layers_of_every_stage():
    deepseek = stages_of("Et*3|(tt|)*29,m|L")
    assert (len(deepseek), deepseek[0], deepseek[1], deepseek[-2:]) == (32, "Ettt", "tt", ("m", "L"))
    made = config(pp=16, layout="Et*3|(tt|)*29,m|L")
    assert (made.chunks(61), made.schedule_name(61)) == (2, "interleaved")


def test_chunks_follow_from_their_layers():
    assert config(pp=4, layers_per_virtual_stage=2).chunks(32) == 4
    # torchtitan: 32 layers, and one more at each end, in chunks of at most 3 are 12, three on each rank.
    torchtitan = config(pp=4, layers_per_virtual_stage=3, first_stage_less_layers=1, last_stage_less_layers=1)
    assert torchtitan.chunks(32) == 3
    assert (config(pp=4).schedule_name(32), config(pp=4, vpp=2).schedule_name(32)) == ("1f1b", "interleaved")


RECOMPUTED = {
    "nothing": ({}, "none", Recompute()),
    "model's full": ({}, "full", Recompute("full")),
    "model's selective": ({}, "selective", Recompute("selective_op")),
    "modules": ({"recompute_granularity": "selective"}, "none", Recompute("selective", modules=("core_attn",))),
    "blocks": (
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        "full",
        Recompute("full", "block", 3),
    ),
}


@pytest.mark.parametrize("case", RECOMPUTED)
def test_recomputation_is_said_by_megatrons_fields_or_by_the_models_word(case):
    fields, word, expected = RECOMPUTED[case]
    assert recompute(config(**fields), word) == expected


@pytest.mark.parametrize("word", ["full", "selective"])
def test_two_kinds_of_recomputation_contradict_each_other(word):
    with pytest.raises(ScenarioError, match="both say what backward recomputes; say one"):
        recompute(config(recompute_granularity="selective"), word)


def test_backwards_all_reduce_overlaps_unless_sequence_parallelism_replaces_it():
    assert config(tp=2).overlaps_tp_gradient
    assert not config(tp=2, sequence_parallel=True).overlaps_tp_gradient
    assert not config(tp=2, tp_grad_overlap=False).overlaps_tp_gradient


def test_layers_may_exchange_keys_in_different_ways():
    made = config(cp=2, cp_comm_type=("p2p", "a2a"))
    assert (made.cp_comm(0), made.cp_comm(1), config().cp_comm(7)) == ("p2p", "a2a", "p2p")


def test_a_vocabulary_is_padded_to_a_multiple_for_every_rank():
    assert padded_vocab(50257, 128, 1) == 50304
    assert padded_vocab(128256, 128, 8) == 129024
    assert padded_vocab(32000, 1, 8) == 32000
