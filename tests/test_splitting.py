"""``[parallel]`` in a scenario: read beside the other tables, checked, made into a mesh, and described."""

from __future__ import annotations

import re

import pytest

from clustersim import scenario
from clustersim.app.cli.describe import ranks_words
from clustersim.core.errors import ClusterSimError, ScenarioError
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective, Compute, Send
from clustersim.scenario.file.splitting import splits
from clustersim.scenario.run.mesh_table import rank_view, rows
from clustersim.scenario.run.parts import placed
from clustersim.studies.sweep.fields import check_fields

SPLIT = """
[cluster]
topology = "hgx-h100"
nodes = 8

[model]
name = "llama3-8b"
dtype = "bf16"

[strategy]
kind = "ddp"

[parallel]
tensor_parallel_degree = 4
pp = 2
"""
MOE = SPLIT.replace("llama3-8b", "mixtral-8x7b").replace(
    "tensor_parallel_degree = 4\npp = 2", "tp = 4\ncp = 2\npp = 2\nep = 8\netp = 1\nsequence_parallel = true"
)
PLAIN = SPLIT[: SPLIT.index("[parallel]")].replace("nodes = 8", "nodes = 1")


def read(folder, text=SPLIT, changes=None):
    path = folder / "split.toml"
    path.write_text(text)
    return scenario.load(path, changes)


def mesh_of(loaded) -> Mesh:
    return placed(loaded)[1]


def test_a_table_by_anybodys_names_makes_a_mesh_of_what_is_left_for_data(tmp_path):
    loaded = read(tmp_path)
    assert (loaded.file.parallel.tp, loaded.file.parallel.pp) == (4, 2)
    made = mesh_of(loaded)
    assert (made.size("tp"), made.size("pp"), made.size("dp")) == (4, 2, 8)
    assert made.groups("dp")[0].tolist() == list(range(0, 32, 4))


@pytest.mark.parametrize("name", ["tp", "tensor_parallel_degree", "tensor-model-parallel-size"])
def test_set_replaces_a_field_by_any_of_its_names(tmp_path, name):
    loaded = read(tmp_path, changes={f"parallel.{name}": 8})
    assert (loaded.file.parallel.tp, loaded.changes) == (8, {"parallel.tp": 8})
    assert mesh_of(loaded.changed({"parallel.tp": 2})).size("tp") == 2


def test_set_reaches_into_the_routing_however_it_was_written(tmp_path):
    loaded = read(tmp_path, SPLIT + 'routing = "skewed"\n', {"parallel.routing.skew": 1.5})
    assert (loaded.file.parallel.routing.kind, loaded.file.parallel.routing.skew) == ("skewed", 1.5)


def test_without_the_table_nothing_changes(tmp_path):
    loaded = read(tmp_path, PLAIN)
    assert loaded.file.parallel is None
    assert "parallel" not in loaded.inputs()
    assert mesh_of(loaded).dims is None


@pytest.mark.parametrize(
    "strategy",
    [
        'kind = "ddp"',
        'kind = "ddp"\ngradient_accumulation_steps = 2\nbucket_cap_mb = 50',
        'kind = "fsdp"',
        'kind = "fsdp"\nversion = 1',
        'kind = "zero"\nzero_optimization = {stage = 1}',
        'kind = "zero"\nzero_optimization = {stage = 3}',
    ],
)
def test_with_every_degree_1_a_program_is_the_same_op_for_op(tmp_path, strategy):
    text = PLAIN.replace('kind = "ddp"', strategy)
    plain = read(tmp_path, text).prepare()
    table = read(tmp_path, text + "[parallel]\ntp = 1\npp = 1\ncp = 1\nep = 1\n").prepare()
    assert table.mesh.dims is not None
    assert table.split is None
    ops = [[repr(op) for role in one.program.roles for op in role.ops] for one in (table, plain)]
    assert ops[0] == ops[1]
    assert [table.program.describe(rank) for rank in (0, 7)] == [plain.program.describe(rank) for rank in (0, 7)]
    assert table.cost.forward.tolist() == plain.cost.forward.tolist()
    assert table.memory.at_peak() == plain.memory.at_peak()


def test_micro_batches_are_the_steps_of_gradient_accumulation(tmp_path):
    batch = "[parallel]\nglobal_batch_size = 32\n"
    made = read(tmp_path, PLAIN + batch).prepare()
    same = read(tmp_path, PLAIN, {"strategy.gradient_accumulation_steps": 4}).prepare()
    assert made.scenario.config.gradient_accumulation_steps == 4
    assert made.program.describe(0) == same.program.describe(0)


def test_of_two_ways_to_say_the_micro_batches_the_last_that_was_set_holds(tmp_path):
    loaded = read(tmp_path, PLAIN + "[parallel]\nglobal_batch_size = 32\n", {"parallel.microbatches": 2})
    assert loaded.prepare().scenario.config.gradient_accumulation_steps == 2
    again = loaded.changed({"parallel.global_batch_size": 64})
    assert again.prepare().scenario.config.gradient_accumulation_steps == 8
    gone = read(tmp_path, PLAIN + "[parallel]\nglobal_batch_size = 32\n", {"parallel.microbatches": None})
    assert gone.prepare().scenario.config.gradient_accumulation_steps == 4


def test_what_other_frameworks_write_beside_it_goes_to_its_own_table(tmp_path):
    text = SPLIT + "train_micro_batch_size_per_gpu = 4\nseq_length = 4096\n"
    loaded = read(tmp_path, text)
    assert (loaded.config.micro_batch_size, loaded.file.model.seq_len) == (4, 4096)
    assert read(tmp_path, text, {"strategy.micro_batch_size": 8}).config.micro_batch_size == 8


def test_torchtitans_degrees_are_fsdps_too(tmp_path):
    text = PLAIN.replace('"ddp"', '"fsdp"') + "[parallel]\ndata_parallel_replicate_degree = 2\n"
    loaded = read(tmp_path, text)
    assert loaded.config.data_parallel_replicate_degree == 2
    assert (mesh_of(loaded).size("dp_replicate"), mesh_of(loaded).size("dp_shard")) == (2, 4)
    hybrid = read(tmp_path, PLAIN.replace('"ddp"', '"fsdp"') + "data_parallel_replicate_degree = 2\n")
    assert hybrid.prepare().program.describe(0) == loaded.prepare().program.describe(0)


def test_a_framework_puts_its_defaults_where_nothing_is_said(tmp_path):
    parallel = read(tmp_path, SPLIT + 'framework = "torchtitan"\ncp_comm_type = "a2a"\n').file.parallel
    assert (parallel.sequence_parallel, parallel.order, parallel.cp_comm_type) == (True, "torchtitan", "a2a")


# What is changed in SPLIT, and what the error must say.
WRONG = {
    "degree": ("pp = 2", "pp = 0", ["0 does not fit", ">= 1", "$.parallel.pp"]),
    "twice": ("pp = 2", "tp = 2", ["tensor_parallel_degree = 4 and tp = 2 contradict each other", "$.parallel.tp"]),
    "misspelt": ("pp = 2", "tensor_paralel_degree = 2", ["did you mean 'tensor_parallel_degree'?"]),
    "choice": ("pp = 2", 'cp_comm_type = "p3p"', ["'p3p' is not a choice; did you mean 'p2p'?"]),
    "routing": ("pp = 2", 'routing = "skwed"', ["did you mean 'skewed'?", "$.parallel.routing.kind"]),
    "routing without its file": ("pp = 2", 'routing = "histogram"', ["the file that holds it", "$.parallel.routing"]),
    "skew of a uniform routing": ("pp = 2", "routing = {skew = 2.0}", ["belongs to kind = 'skewed'"]),
    "world": ("pp = 2", "pp = 3", ["pp = 3 does not fit into 64 ranks beside tp * cp = 4; use 2 or 4"]),
    "in the strategy": (
        'kind = "ddp"',
        'kind = "fsdp"\npipeline_parallel_degree = 2',
        ["it belongs in the table [parallel]: write parallel.pp", "$.strategy.pipeline_parallel_degree"],
    ),
    "other table": (
        'kind = "ddp"\n\n[parallel]',
        'kind = "ddp"\nmicro_batch_size = 2\n[parallel]\nmicro-batch-size = 4',
        ["strategy.micro_batch_size = 2, and [parallel] says 4", "$.strategy.micro_batch_size"],
    ),
    "shards": ("pp = 2", "dp_shard = 4", ["strategy 'ddp' does not; use strategy 'fsdp'", "$.parallel.dp_shard"]),
    "shards twice": (
        'kind = "ddp"\n\n[parallel]',
        'kind = "fsdp"\ndata_parallel_shard_degree = 8\n[parallel]\ndp_shard = 4',
        ["parallel.dp_shard = 4 and strategy.data_parallel_shard_degree = 8 contradict", "$.parallel.dp_shard"],
    ),
    "servers": ('"ddp"', '"parameter_server"', ["has a whole model on every worker", "$.strategy.kind"]),
    "ZeRO": (
        'kind = "ddp"',
        'kind = "zero"\nzero_optimization = {stage = 2}',
        [
            "ZeRO stage 2 with pp = 2",
            "after every micro-batch",
            "use stage 0 or 1",
            "$.strategy.zero_optimization.stage",
        ],
    ),
    "checkpointing": (
        "pp = 2\n",
        'pp = 2\nrecompute_granularity = "selective"\nactivation_checkpoint.mode = "full"\n',
        ["both say what backward recomputes", "$.parallel.recompute_granularity"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_table_is_one_line_with_file_field_and_what_would_be_right(case, tmp_path):
    old, new, parts = WRONG[case]
    assert old in SPLIT
    with pytest.raises(ClusterSimError) as raised:
        mesh_of(read(tmp_path, SPLIT.replace(old, new)))
    text = str(raised.value)
    assert "\n" not in text
    for part in [str(tmp_path / "split.toml"), *parts]:
        assert part in text


def test_an_error_of_a_set_degree_names_the_option(tmp_path):
    with pytest.raises(ScenarioError, match=re.escape("changes parallel.tp: tp = 3 does not fit into 64 ranks")):
        mesh_of(read(tmp_path, changes={"parallel.tensor_parallel_degree": 3}))
    option = scenario.parse_overrides(["parallel.tensor_parallel_degree=3"])
    with pytest.raises(ScenarioError, match=re.escape("--set parallel.tp: tp = 3 does not fit into 64 ranks")):
        mesh_of(read(tmp_path, changes=option))


def test_a_batch_that_is_no_multiple_is_refused(tmp_path):
    with pytest.raises(ScenarioError, match="global_batch_size = 30 is no multiple of 1 samples on 8 replicas"):
        read(tmp_path, PLAIN + "[parallel]\nglobal_batch_size = 30\n").prepare()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tp = 2", True),
        ("pp = 2", True),
        ("use_distributed_optimizer = true", True),
        ('recompute_granularity = "selective"', True),
        ("tp = 1\nmicrobatches = 2\ndp_replicate = 1", False),
        ('framework = "torchtitan"', False),
        ('schedule = "gpipe"', True),
        ('schedule = "1f1b"', False),
        ('schedule = "pipedream"', True),
    ],
)
def test_a_model_is_split_by_a_degree_or_by_what_megatrons_data_parallelism_does(tmp_path, text, expected):
    assert splits(read(tmp_path, PLAIN + f"[parallel]\n{text}\n")) is expected


def test_a_sweep_may_set_the_table_by_any_name():
    check_fields({"parallel.tensor_model_parallel_size": 8}, [["parallel.pp"], ["parallel.tp"]], "sweep.toml")
    with pytest.raises(ScenarioError, match=re.escape("did you mean 'sequence_parallel'?")):
        check_fields({"parallel.sequence_paralel": True}, [], "sweep.toml")


def test_rows_say_how_many_groups_stay_on_a_node_and_what_joins_them(tmp_path):
    found = {" x ".join(row.dims): row for row in rows(*placed(read(tmp_path, MOE)))}
    assert list(found) == ["tp", "cp", "dp", "dp x cp", "pp", "ep", "edp"]
    assert (found["tp"].groups, found["tp"].inside, found["tp"].links) == (16, 16, ("NVSwitch",))
    assert (found["ep"].first, found["ep"].inside) == (tuple(range(8)), 8)
    assert (found["dp"].inside, found["dp"].nodes, found["dp"].links) == (0, 4, ("NIC (ib)",))
    assert found["dp x cp"].links == ("NVSwitch", "NIC (ib)")


def test_one_ranks_view_has_torchruns_variables_and_its_groups(tmp_path):
    view = rank_view(*placed(read(tmp_path, MOE)), 17)
    assert view.environment == {
        "RANK": 17,
        "LOCAL_RANK": 1,
        "WORLD_SIZE": 64,
        "LOCAL_WORLD_SIZE": 8,
        "GROUP_RANK": 2,
        "GROUP_WORLD_SIZE": 8,
    }
    assert (view.vertex, view.coordinate["dp"], view.coordinate["ep"]) == ("node2/gpu1", 2, 1)
    assert view.groups["tp",] == (16, 17, 18, 19)
    assert all(17 in group for group in view.groups.values())


def test_a_node_without_a_switch_is_joined_by_its_own_links(tmp_path):
    text = PLAIN.replace("hgx-h100", "dgx-1v").replace("llama3-8b", "gpt2").replace("bf16", "fp16")
    (row,) = rows(*placed(read(tmp_path, text)))
    assert (row.dims, row.inside) == (("dp",), 1)
    assert row.links[0] == "NVLink"


def test_describe_prints_degrees_groups_links_and_the_ranks_place_within_100_columns(clustersim, tmp_path):
    path = tmp_path / "moe.toml"
    path.write_text(MOE)
    done = clustersim("describe", path, "--mesh", "--rank", "17")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "64 ranks on 8 node(s): tp 4, cp 2, dp 4, pp 2, experts: etp 1, ep 8, edp 4" in done.stdout
    assert re.search(r"^dp x cp +8 +8  0, 4, 8, 12.* none, 4 nodes +NVSwitch, NIC \(ib\)$", done.stdout, re.M)
    assert "rank 17 drives node2/gpu1" in done.stdout
    assert "RANK=17 LOCAL_RANK=1 WORLD_SIZE=64" in done.stdout
    assert re.search(r"^tp +1 of 4: 16, 17, 18, 19$", done.stdout, re.M)


def test_describe_of_a_rank_beyond_the_world_is_one_line(clustersim, tmp_path):
    path = tmp_path / "moe.toml"
    path.write_text(MOE)
    done = clustersim("describe", path, "--mesh", "--rank", "64")
    assert (done.returncode, done.stderr) == (2, "error: rank 64 is none of the 64 workers of the mesh\n")


@pytest.mark.parametrize("width", [10, 22, 70])
def test_ranks_that_do_not_fit_are_shortened_from_the_middle(width):
    text = ranks_words(range(0, 100_000, 128), width)
    assert text.startswith("0")
    assert text.endswith("..., 99968")
    assert len(text) <= max(width, len("0, ..., 99968"))


POST = """
[cluster]
topology = "hgx-a100"

[model]
name = "gpt2"
seq_len = 128
dtype = "fp16"
options = { tied = false }

[strategy]
kind = "ddp"
param_dtype = "fp16"

[parallel]
pp = 4
microbatches = 8
schedule = "zb_2p"

[run]
steps = 3
jitter = 0.0
"""


def test_steps_validated_afterwards_follow_each_other_without_a_barrier(tmp_path):
    """Stages are late by a forward each; a barrier at the end of a step pays that every step, none pays it once."""
    runs = []
    for said in ({}, {"parallel.enable_optimizer_post_validation": True}):
        runs.append(read(tmp_path, POST, said))
    barrier, free = (run.run().summary["step_time_s"] for run in runs)
    assert free < barrier
    names = [[op.name for op in run.prepare().program.roles[1].ops if isinstance(op, Collective)] for run in runs]
    assert [sum("norm" in name for name in found) for found in names] == [3, 0]


@pytest.mark.parametrize("framework", ["megatron", "oneflow"])
def test_actors_of_oneflow_send_beside_the_next_kernel(tmp_path, framework):
    text = POST.replace('schedule = "zb_2p"', f'schedule = "1f1b"\nframework = "{framework}"')
    program = read(tmp_path, text).prepare().program
    ops = program.roles[1].ops
    sent = {i for i, op in enumerate(ops) if isinstance(op, Send)}
    waited = any(sent & set(op.after) for op in ops if isinstance(op, Compute))
    assert waited == (framework == "megatron")
