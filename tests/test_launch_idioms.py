"""Launch files as people have them: what names another file, what holds one inside, hosts, pods, and names of 2024."""

from __future__ import annotations

import json

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.core.paths import data_path
from clustersim.files import launch as exchange
from clustersim.files.launch import json_comments
from clustersim.files.launch.files import HOSTS, MODEL, document

pytest.importorskip("yaml", reason="needs pyyaml (the exchange extra)")

MACHINE = {"topology": "hgx-h100", "nodes": 1}
GPT = "pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
GPT += "--max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --bf16"
TRAINER = "train.py --model_name_or_path meta-llama/Meta-Llama-3-8B --per_device_train_batch_size 2 --block_size 2048"
ZERO3 = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "train_batch_size": "auto"}


def read(*texts, machine=MACHINE, **asked):
    """An import of texts by name."""
    return exchange.read([document(text, name) for name, text in texts], machine, **asked)


def leaves(made):
    return exchange.canonical(made.scenario)


# ---- DeepSpeed's file: beside, inside, or missing --------------------------------------------------------------------

ARGUMENTS = {"model_name_or_path": "meta-llama/Llama-2-7b-hf", "per_device_train_batch_size": 4, "block_size": 2048}


@pytest.mark.parametrize("inside", [ZERO3, json.dumps(ZERO3)])
def test_a_table_of_deepspeed_in_the_trainers_arguments_is_deepspeeds_file(inside):
    whole = read(("args.json", json.dumps({**ARGUMENTS, "deepspeed": inside})))
    beside = read(
        ("args.json", json.dumps({**ARGUMENTS, "deepspeed": "ds.json"})),
        ("ds.json", json.dumps(ZERO3)),
    )
    assert leaves(whole) == leaves(beside)
    assert leaves(whole)["strategy.zero_optimization.stage"] == 3


def test_a_file_that_names_another_does_not_stand_for_it():
    with pytest.raises(ScenarioError, match=r"args.json: deepspeed names ds.json; give that file too"):
        read(("args.json", json.dumps({**ARGUMENTS, "deepspeed": "ds.json"})))


def test_options_of_accelerate_launch_count_against_its_file():
    file = "num_machines: 1\nnum_processes: 8\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n"
    words = f"accelerate launch --config_file acc.yaml --num_machines 2 --num_processes 16 {TRAINER}"
    made = read(("run.sh", words), ("acc.yaml", file), machine={"topology": "hgx-h100"})
    assert made.tables["cluster"] == {"topology": "hgx-h100", "nodes": 2, "gpus_per_node": 8}


# ---- the model -------------------------------------------------------------------------------------------------------


def test_a_config_among_the_files_is_the_model_and_tells_what_auto_is(tmp_path):
    config = data_path("data") / "models" / "qwen2-7b.json"
    (tmp_path / "config.json").write_text(config.read_text("utf-8"))
    launch = f"deepspeed --num_gpus 8 {TRAINER.replace('meta-llama/Meta-Llama-3-8B', './mine')} --deepspeed ds.json"
    own = str(tmp_path / "config.json")
    files = [("run.sh", launch), ("ds.json", json.dumps(ZERO3)), (own, config.read_text("utf-8"))]
    assert document(files[2][1], own).kind == MODEL
    made = read(*files, path=tmp_path / "s.toml")
    assert made.tables["model"]["hf_config"] == "./config.json"
    assert leaves(made)["strategy.zero_optimization.reduce_bucket_size"] == 3584**2
    asked = read(*files[:2], path=tmp_path / "s.toml", model="./config.json")
    assert leaves(asked) == leaves(made)


def test_a_model_that_is_not_shipped_is_named_before_what_follows_from_it():
    launch = f"deepspeed --num_gpus 8 {TRAINER.replace('meta-llama/Meta-Llama-3-8B', 'me/mine')} --deepspeed ds.json"
    with pytest.raises(ScenarioError, match=r"run.sh .*--model_name_or_path 'me/mine': no shipped model .*config.json"):
        read(("run.sh", launch), ("ds.json", json.dumps(ZERO3)))


# ---- hosts and pods --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hosts", ["a slots=8\nb slots=8  # the second\n", "a:8\nb:8\n", "a slots=8 max_slots=8\nb slots=8"]
)
def test_a_list_of_hosts_says_the_machine(hosts):
    assert document(hosts, "hostfile").kind == HOSTS
    launch = f"deepspeed --hostfile hostfile {GPT}"
    bare = {"topology": "hgx-h100"}
    beside = read(("run.sh", launch), ("hostfile", hosts), machine=bare)
    assert beside.tables["cluster"] == {"nodes": 2, "gpus_per_node": 8, "topology": "hgx-h100"}
    written = read(("run.sh", f"cat <<EOT > hostfile\n{hosts}\nEOT\n{launch}"), machine=bare)
    assert leaves(written) == leaves(beside)
    part = read(("run.sh", launch.replace("--hostfile", "--num_nodes 1 --hostfile")), ("hostfile", hosts), machine=bare)
    assert part.tables["cluster"]["nodes"] == 1


def test_hosts_with_different_slots_are_asked_for():
    with pytest.raises(ScenarioError, match=r"4, 8 slots; say --nodes"):
        document("a slots=8\nb slots=4\n", "hostfile")


def _torch_job(command, **spec):
    pod = {"spec": {"containers": [{"name": "c", **command, "resources": {"limits": {"nvidia.com/gpu": 8}}}]}}
    roles = {"Worker": {"replicas": 3, "template": pod}, "Master": {"replicas": 1, "template": pod}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "j"},
        "spec": {"pytorchReplicaSpecs": roles, **spec},
    }


def _mpi_job():
    launcher = {"command": ["mpirun", "-np", "32", "python"], "args": GPT.split()}
    roles = {
        "Launcher": {"replicas": 1, "template": {"spec": {"containers": [launcher]}}},
        "Worker": {"replicas": 4, "template": {"spec": {"containers": [{"name": "w"}]}}},
    }
    spec = {"slotsPerWorker": 8, "mpiReplicaSpecs": roles}
    return {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "spec": spec}


def _train_job():
    trainer = {"numNodes": 4, "numProcPerNode": 8, "command": ["torchrun"], "args": GPT.split()}
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "spec": {"trainer": trainer}}


def _ray_job(entrypoint):
    def group(gpus):
        limits = {"nvidia.com/gpu": gpus} if gpus else {"cpu": 4}
        return {"template": {"spec": {"containers": [{"name": "r", "resources": {"limits": limits}}]}}}

    cluster = {"headGroupSpec": group(0), "workerGroupSpecs": [{"replicas": 4, "groupName": "g", **group(8)}]}
    spec = {"entrypoint": entrypoint, "rayClusterSpec": cluster}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "r"}, "spec": spec}


@pytest.mark.parametrize("words", [f"python {GPT}", f"torchrun --nnodes 4 --nproc_per_node 8 {GPT}"])
def test_a_job_of_ray_runs_its_entrypoint_on_the_pods_with_gpus(words):
    import yaml

    made = read(("job.yaml", yaml.safe_dump(_ray_job(words))), machine={"topology": "hgx-h100"})
    script = read(("run.sh", f"torchrun --nnodes 4 --nproc_per_node 8 {GPT}"), machine={"topology": "hgx-h100"})
    assert leaves(made) == leaves(script)


def test_a_cluster_of_ray_without_an_entrypoint_is_refused():
    import yaml

    with pytest.raises(ScenarioError, match="without an entrypoint; give the script that it runs"):
        document(yaml.safe_dump(_ray_job("") | {"kind": "RayCluster"}), "job.yaml")


@pytest.mark.parametrize(
    "job",
    [
        _torch_job({"command": ["torchrun", "--nnodes=$(PET_NNODES)"], "args": ["--nproc_per_node=8", *GPT.split()]}),
        _torch_job({"command": ["bash", "-c"], "args": [f"set -e\ntorchrun {GPT} 2>&1 | tee log"]}, nprocPerNode="8"),
        _torch_job({"command": ["bash", "-c", f"torchrun --nnodes $WORLD_SIZE --nproc_per_node 8 {GPT}"]}),
        _mpi_job(),
        _train_job(),
    ],
)
def test_a_job_of_pods_is_the_script_that_they_run(job):
    import yaml

    service = "apiVersion: v1\nkind: Service\nspec: {clusterIP: None}\n---\n"
    made = read(("job.yaml", service + yaml.safe_dump(json.loads(json.dumps(job)))), machine={"topology": "hgx-h100"})
    script = read(("run.sh", f"torchrun --nnodes 4 --nproc_per_node 8 {GPT}"), machine={"topology": "hgx-h100"})
    assert leaves(made) == leaves(script)


@pytest.mark.parametrize(
    "text",
    [
        "apiVersion: v1\nkind: Pod\nspec: 3\n",
        "apiVersion: v1\nkind: Job\nspec: {template: {spec: {containers: [3]}}}\n",
    ],
)
def test_pods_without_a_command_are_refused(text):
    with pytest.raises(ScenarioError, match="no container of it has a command"):
        document(text, "job.yaml")


# ---- torchtitan of 2024 ----------------------------------------------------------------------------------------------

TITAN = '[model]\nname = "llama3"\nflavor = "70B"\n'
OLD = """[training]
batch_size = 8
data_parallel_degree = -1
tensor_parallel_degree = 8
compile = true
[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "interleaved_1f1b"
pipeline_parallel_microbatches = 4
enable_async_tensor_parallel = true
[float8]
enable_float8_linear = true
"""
NEW = """[training]
local_batch_size = 8
[compile]
enable = true
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 2
"""


def test_torchtitans_names_of_2024_mean_those_of_2025():
    machine = {"topology": "hgx-h100", "nodes": 16}
    old = read(("a.toml", TITAN + OLD), machine=machine)
    new = read(("a.toml", TITAN.replace("flavor", 'converters = ["float8"]\nflavor') + NEW), machine=machine)
    assert {**leaves(old), "run.optimizer_impl": "fused"} == leaves(new)
    assert leaves(old)["run.optimizer_impl"] == "foreach"
    assert any("is a name of 2024, when no optimizer was fused" in note for note in old.notes)
    asked = read(("a.toml", TITAN + OLD + "[optimizer]\nfused = true\n"), machine=machine)
    assert leaves(asked) == leaves(new)
    assert not old.unknown


def test_without_a_count_torchtitan_of_2024_has_a_micro_batch_for_each_stage():
    machine = {"topology": "hgx-h100", "nodes": 16}
    text = TITAN + OLD.replace("pipeline_parallel_microbatches = 4\n", "")
    made = read(("a.toml", text), machine=machine)
    assert leaves(made)["batch.micro"] == 8 // 4
    assert any("4 micro-batches, one for each stage" in note for note in made.notes)
    with pytest.raises(ScenarioError, match="a batch of 6 samples is not made of 4 micro-batches"):
        read(("a.toml", text.replace("batch_size = 8", "batch_size = 6")), machine=machine)


def test_a_degree_that_nobody_knows_is_never_left_out():
    with pytest.raises(ScenarioError, match=r"training.pencil_parallel_degree 4 would split the work"):
        read(
            ("a.toml", TITAN + "[training]\npencil_parallel_degree = 4\n"),
            machine={"topology": "hgx-h100", "nodes": 16},
        )


# ---- NeMo and Megatron-Bridge ----------------------------------------------------------------------------------------

NEMO = """trainer: {devices: 8, num_nodes: 2, precision: bf16}
model:
  mcore_gpt: true
  micro_batch_size: 1
  global_batch_size: 32
  tensor_model_parallel_size: 2
  encoder_seq_length: 2048
  max_position_embeddings: 2048
  num_layers: 24
  hidden_size: 1024
  num_attention_heads: 16
"""


def test_nemo_reads_the_method_of_full_recomputation_alone():
    plain = read(("gpt.yaml", NEMO + "  activations_checkpoint_granularity: selective\n"))
    method = "  activations_checkpoint_method: block\n  activations_checkpoint_num_layers: 0\n"
    assert leaves(read(("gpt.yaml", NEMO + "  activations_checkpoint_granularity: selective\n" + method))) == leaves(
        plain
    )


def test_the_precision_of_a_bridge_recipe_settles_that_of_its_optimizer():
    recipe = NEMO.replace("trainer: {devices: 8, num_nodes: 2, precision: bf16}", "trainer: {devices: 8, num_nodes: 2}")
    recipe += "optimizer: {optimizer: adam, bf16: true}\nmixed_precision: bf16_with_fp8_current_scaling_mixed\n"
    assert leaves(read(("gpt.yaml", recipe)))["model.dtype"] == "fp8"


# ---- words of graphs, recipes and dispatchers ------------------------------------------------------------------------

LAUNCH = f"torchrun --nnodes 1 --nproc_per_node 8 {GPT} "


@pytest.mark.parametrize(
    ("words", "scopes"),
    [
        ("--cuda-graph-impl local", ["attn", "mamba", "mlp", "moe"]),
        ("--cuda-graph-impl local --cuda-graph-scope full", ["attn", "mamba", "mlp", "moe"]),
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope attn", ["attn"]),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp", ["attn", "mlp"]),
        ("--cuda-graph-impl full_iteration", ["full_iteration"]),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", ["full_iteration"]),
        ("--cuda-graph-impl none --cuda-graph-scope attn", None),
        ("--cuda-graph-scope attn", None),
        ("--enable-cuda-graph", ["attn", "mamba", "mlp", "moe"]),
    ],
)
def test_megatrons_cuda_graphs_of_every_release_replay_what_they_say(words, scopes):
    graphs = read(("run.sh", LAUNCH + words)).tables["run"].get("cuda_graph")
    assert (None if graphs is None else list(graphs)) == scopes


@pytest.mark.parametrize("word", ["ncclep", "deepepv2", "pigeon"])
def test_a_dispatcher_that_is_not_played_is_refused_by_its_word(word):
    experts = f"{LAUNCH} --num-experts 8 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {word}"
    with pytest.raises(ScenarioError, match=rf"moe-flex-dispatcher-backend: '{word}' is not a choice"):
        read(("run.sh", experts))


EXPERTS_OF_TITAN = '[model]\nname = "deepseek_v3"\nflavor = "16B"\n[training]\nseq_len = 4096\nlocal_batch_size = 1\n'


def experts_of_titan(backend):
    text = f"{EXPERTS_OF_TITAN}[parallelism]\nexpert_parallel_degree = 8\nexpert_parallel_comm_backend = {backend!r}\n"
    return read(("a.toml", text), machine={"topology": "hgx-h100", "nodes": 1})


def test_torchtitans_exchange_of_experts_is_played_by_its_word():
    assert experts_of_titan("deepep").tables["parallel"]["dispatcher"] == "flex"
    assert "dispatcher" not in experts_of_titan("standard").tables["parallel"]  # torchtitan's all_to_all


def test_an_exchange_of_torchtitan_that_is_not_played_is_refused():
    with pytest.raises(ScenarioError, match=r"expert_parallel_comm_backend.* 'pigeon' is not a choice"):
        experts_of_titan("pigeon")


@pytest.mark.parametrize(
    ("converters", "dtype"),
    [
        ('["float8"]', "fp8"),
        ('["quantize.linear.float8", "quantize.grouped_mm.float8"]', "fp8"),
        ('["quantize.linear.mx"]', "fp8"),
        ('["mx"]', "fp8"),
        ("[]", "bf16"),
    ],
)
def test_torchtitans_converters_are_read(converters, dtype):
    text = TITAN + f"converters = {converters}\n[training]\nlocal_batch_size = 1\n"
    assert leaves(read(("a.toml", text), machine={"topology": "hgx-h100", "nodes": 16}))["model.dtype"] == dtype


FSDP_AGAIN = "distributed_type: FSDP\nnum_machines: 1\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n"
FSDP_AGAIN += "  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_activation_checkpointing: {inner}\n"


@pytest.mark.parametrize(("inner", "outer"), [("true", ""), ("false", "True"), ("true", "True")])
def test_checkpointing_by_fsdp_and_by_the_trainer_is_said_to_stop_the_trainer(inner, outer):
    words = f"accelerate launch --config_file acc.yaml {TRAINER}" + (f" --gradient_checkpointing {outer}" * bool(outer))
    made = read(("run.sh", words), ("acc.yaml", FSDP_AGAIN.format(inner=inner)))
    assert leaves(made)["model.activation_checkpointing"] == "full"
    said = any("the Trainer stops with an error" in note for note in made.notes)
    assert said == (inner == "true" and bool(outer))


def test_checkpointing_twice_in_the_trainers_own_file_is_said():
    sharded = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"activation_checkpointing": True}}
    made = read(("args.json", json.dumps({**ARGUMENTS, **sharded, "gradient_checkpointing": True})))
    assert any("FSDP's activation_checkpointing" in note for note in made.notes)


COMMENTED = """// ZeRO of stage 2
{
  "train_micro_batch_size_per_gpu": 4, # a rank's
  "bf16": {"enabled": true},
  "comment": "http://a.b/c#d, /* not one */ ,]",
  /* gradients are
     sharded */
  "zero_optimization": {"stage": 2,}, // and no more
}
"""


def test_deepspeeds_json_may_have_comments_and_last_commas():
    plain = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    plain["comment"] = "http://a.b/c#d, /* not one */ ,]"
    assert json.loads(json_comments.plain(COMMENTED)) == plain
    script = ("run.sh", f"deepspeed --num_gpus 8 {TRAINER} --per_device_train_batch_size 4 --deepspeed ds.json")
    made = read(script, ("ds.json", COMMENTED))
    assert leaves(made) == leaves(read(script, ("ds.json", json.dumps(plain))))


@pytest.mark.parametrize("text", ['{"a": 1}', '{"a": "//", "b": [1, {"c": "# ,}"}]}', '{"a": "\\\\", "b": ", }"}'])
def test_json_without_comments_stays_as_it_is(text):
    assert json_comments.plain(text) == text
