"""What LLaMA-Factory and axolotl do otherwise than the Trainer whose arguments their files hold."""

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document

FACTORY = """
model_name_or_path: Qwen/Qwen3-4B
stage: sft
do_train: true
template: qwen3
finetuning_type: full
per_device_train_batch_size: 1
bf16: true
"""
AXOLOTL = "base_model: meta-llama/Llama-3.2-1B\nmicro_batch_size: 1\nsequence_len: 512\nbf16: auto\n"


def read(text):
    return exchange.read([document(text, "a.yaml")], {"topology": "hgx-h100", "nodes": 1})


def fields(text):
    return exchange.canonical(read(text).scenario)


def test_llama_factory_computes_layers_again_unless_it_is_told_not_to():
    usual = read(FACTORY)
    assert exchange.canonical(usual.scenario)["model.activation_checkpointing"] == "full"
    assert exchange.canonical(usual.scenario)["model.seq_len"] == 2048
    assert any("by default: gradient_checkpointing true, cutoff_len 2048" in note for note in usual.notes)
    kept = read(f"{FACTORY}disable_gradient_checkpointing: true\ncutoff_len: 1024\n")
    assert exchange.canonical(kept.scenario)["model.activation_checkpointing"] == "none"
    assert exchange.canonical(kept.scenario)["model.seq_len"] == 1024
    assert not any("by default" in note for note in kept.notes)
    assert not kept.unplayed


def test_muon_counts_against_the_optimizer_that_the_trainer_would_take():
    had = fields(f"{FACTORY}use_muon: true\noptim: adamw_torch\n")
    assert had["run.optimizer"] == "muon"


def test_workers_of_ray_are_ranks():
    made = exchange.read([document(f"{FACTORY}ray_num_workers: 16\n", "a.yaml")], {"topology": "hgx-h100"})
    assert made.tables["cluster"]["nodes"] == 2


@pytest.mark.parametrize("more", ["export_dir: out", "infer_backend: vllm", "do_predict: true"])
def test_a_file_that_trains_nothing_is_refused(more):
    with pytest.raises(ScenarioError, match=f"{more.split(':')[0]} without do_train: true trains nothing"):
        read(f"{FACTORY.replace('do_train: true', '')}{more}\n")
    assert read(f"{FACTORY}{more}\n").scenario  # which trains first


@pytest.mark.parametrize(
    "text",
    [
        FACTORY.replace("full", "freeze"),
        FACTORY.replace("full", "oft"),
        f"{FACTORY}use_kt: true\n",
        f"{FACTORY}use_llama_pro: true\n",
        f"{AXOLOTL}lisa_n_layers: 4\n",
        f"{AXOLOTL}unfrozen_parameters: ['^lm_head.weight$']\n",
        f"{AXOLOTL}diffusion: {{eps: 0.001}}\n",
    ],
)
def test_what_trains_other_parameters_than_all_or_adapters_is_refused(text):
    with pytest.raises(ScenarioError, match="which is not played|sees both directions"):
        read(text)
    assert read(f"{AXOLOTL}unfrozen_parameters:\n").scenario


@pytest.mark.parametrize(("kind", "held"), [("bf16: auto", "bf16"), ("float16: true", "fp16"), ("fp16: true", "fp16")])
def test_axolotl_trains_a_whole_model_in_what_it_loads(kind, held):
    made = read(AXOLOTL.replace("bf16: auto", kind))
    had = exchange.canonical(made.scenario)
    assert (had["strategy.param_dtype"], had["model.dtype"]) == (held, held)
    assert any("trains them in it" in note for note in made.notes)


def test_axolotls_shards_and_adapters_are_in_32_bits():
    shards = fields(f"{AXOLOTL}fsdp_version: 2\nfsdp_config:\n  offload_params: false\n")
    assert shards["strategy.orig_dtype"] in (None, "fp32")
    adapter = read(f"{AXOLOTL}adapter: lora\nlora_r: 8\nlora_target_linear: true\nload_in_8bit: false\n")
    assert exchange.canonical(adapter.scenario)["strategy.param_dtype"] in (None, "fp32")
    assert not adapter.unplayed  # weights in 8 bits that nobody asks for


def test_a_type_of_weights_has_two_names():
    command = "torchrun --nproc_per_node 8 train.py --model_name_or_path gpt2 --block_size 512 --dtype bfloat16"
    made = exchange.read([document(command, "run.sh")], {"topology": "hgx-h100", "nodes": 1})
    assert made.tables["strategy"]["param_dtype"] == "bf16"
