"""Launch files that a scenario is written as: what the frameworks' own programs ask for is there."""

import pytest
import yaml

from clustersim import scenario
from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange

FSDP = {"kind": "fsdp", "version": 2, "param_dtype": "bf16", "micro_batch_size": 1}
SIZES = "parallelism_config_"


def accelerates(**changed):
    usual = {"cluster.nodes": 2, "model": {"name": "qwen2-7b", "seq_len": 4096}, "strategy": FSDP}
    given = {name.replace("__", "."): value for name, value in changed.items()}
    made = scenario.load("zero1_llama3_8b_2x8_a100", usual | given)
    found = exchange.written(made, "accelerate")
    return yaml.safe_load(found.texts["launch.yaml"]), found


def test_accelerate_shards_by_itself_where_nothing_else_is_split():
    config, _ = accelerates()
    assert "parallelism_config" not in config
    assert config["fsdp_config"]["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"


@pytest.mark.parametrize(
    ("changed", "sizes"),
    [
        ({"strategy__data_parallel_replicate_degree": 2}, (2, 8, 1)),
        ({"parallel__tp": 2}, (1, 8, 2)),
        ({"parallel__tp": 2, "parallel__dp_replicate": 4}, (4, 2, 2)),
    ],
)
def test_accelerates_sizes_multiply_to_its_processes_and_are_read_back(changed, sizes):
    config, found = accelerates(**changed)
    names = ("dp_replicate_size", "dp_shard_size", "tp_size")
    assert tuple(config["parallelism_config"][SIZES + name] for name in names) == sizes
    assert sizes[0] * sizes[1] * sizes[2] == config["num_processes"] == 16
    assert not any("shard" in line or "replicate" in line for line in found.wordless)


def test_accelerate_refuses_to_split_tensors_beside_replicas_and_so_does_its_export():
    with pytest.raises(ScenarioError, match="no word for tp = 2 beside"):
        accelerates(strategy={"kind": "ddp", "micro_batch_size": 1}, parallel__tp=2)
    config, _ = accelerates(
        strategy={"kind": "ddp", "micro_batch_size": 1}, cluster__nodes=1, cluster__gpus_per_node=4, parallel__tp=4
    )
    assert (config["distributed_type"], config["parallelism_config"][SIZES + "tp_size"]) == ("MULTI_GPU", 4)


def test_accelerates_file_has_a_distributed_type_where_it_is_the_usual():
    assert accelerates(strategy={"kind": "ddp", "micro_batch_size": 1})[0]["distributed_type"] == "MULTI_GPU"


def test_a_model_that_the_hub_has_not_is_to_be_said_to_the_script():
    _, found = accelerates(model={"name": "bloom-560m", "seq_len": 1024})
    assert "model_name_or_path" not in found.texts["launch.sh"]
    assert any(line.startswith("model = bloom-560m") for line in found.wordless)


def words(made):
    return exchange.written(made, "deepspeed").texts["launch.sh"].replace("\\\n", "").split()


def test_megatron_deepspeeds_script_is_told_what_it_asks_for():
    said = words(scenario.load("zero3_llama3_8b_2x8_a100", {"model.activation_checkpointing": "full"}))
    for option, value in {
        "--micro-batch-size": "1",
        "--zero-stage": "3",
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
    }.items():
        assert said[said.index(option) + 1] == value
    assert {"--bf16", "--no-pipeline-parallel", "--global-batch-size"} <= set(said)
    kept = scenario.load("zero3_llama3_8b_2x8_a100", {"model.activation_checkpointing": "none"})
    assert "--recompute-granularity" not in words(kept)


def test_megatron_deepspeeds_script_is_told_nothing_that_its_parser_does_not_know():
    made = scenario.load("zero1_llama3_8b_2x8_a100", {"model": {"name": "bloom-560m", "seq_len": 1024}})
    found = exchange.written(made, "deepspeed")
    assert not {"--position-embedding-type", "--embed-layernorm", "--pad-vocab-size-to", "--add-qkv-bias"} & set(
        words(made)
    )
    assert "shape.positions = alibi: it would be learned" in found.wordless
