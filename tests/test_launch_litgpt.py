"""LitGPT's commands and files: what each of its commands does whatever the file says."""

from __future__ import annotations

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document
from clustersim.scenario.run.parts import model_of

MACHINE = {"topology": "dgx-h100", "nodes": 1}
SIZED = """
model_name: own
model_config: {block_size: 256, padded_vocab_size: 32000, n_layer: 6, n_head: 6, n_embd: 288, bias: false,
  parallel_residual: false, norm_class_name: RMSNorm, mlp_class_name: LLaMAMLP, intermediate_size: 768}
train: {global_batch_size: 512, micro_batch_size: 64, lr_warmup_steps: 1000, tie_embeddings: true}
devices: auto
"""


def read(*texts, machine=MACHINE):
    return exchange.read([document(text, name) for name, text in texts], machine)


def had(*texts):
    made = read(*texts)
    assert not made.unknown
    assert not made.unplayed
    return exchange.canonical(made.scenario)


def test_pretraining_shards_in_nodes_compiled_with_the_fused_optimizer():
    fields = had(("a.yaml", SIZED))
    assert (fields["strategy.kind"], fields["strategy.sharding_strategy"]) == ("fsdp", "HYBRID_SHARD")
    assert (fields["model.implementation"], fields["run.optimizer_impl"]) == ("fused", "fused")
    assert (fields["model.seq_len"], fields["strategy.clip_grad_norm"]) == (256, True)
    assert fields["model.activation_checkpointing"] == "none"
    assert (fields["batch.micro"], fields["batch.count"]) == (64, 1)


def test_a_command_counts_against_its_file():
    script = ("run.sh", "srun -N 1 litgpt pretrain --config a.yaml --devices 8 --train.micro_batch_size 32\n")
    fields = had(script, ("a.yaml", SIZED))
    assert (fields["batch.micro"], fields["batch.count"]) == (32, 2)
    with pytest.raises(ScenarioError, match=r"names a\.yaml; give that file too"):
        read(script)


@pytest.mark.parametrize("command", ["litgpt finetune_full", "litgpt finetune full"])
def test_full_finetuning_computes_blocks_again_and_is_of_one_gpu_unless_told(command):
    text = f"{command} meta-llama/Llama-3.2-1B --train.max_seq_length 1024"
    alone = read(("run.sh", text))
    assert alone.tables["strategy"]["kind"] == "single"
    assert alone.tables["cluster"]["gpus_per_node"] == 1
    fields = had(("run.sh", f"{text} --devices 8 --precision bf16-true"))
    assert (fields["strategy.kind"], fields["strategy.version"]) == ("fsdp", 1)
    assert fields["model.activation_checkpointing"] == "full"
    assert (fields["batch.micro"], fields["batch.count"]) == (1, 2)  # 16 samples a step


def test_adapters_of_one_gpu_may_be_over_weights_in_4_bits():
    text = "litgpt finetune_lora meta-llama/Llama-3.2-1B --train.max_seq_length 512 --quantize bnb.nf4-dq"
    adapter = read(("run.sh", text)).tables["model"]["adapter"]
    assert adapter["target_modules"] == ["q_proj", "v_proj"]
    assert (adapter["rank"], adapter["dropout"]) == (8, 0.05)
    assert (adapter["load_in_4bit"], adapter["bnb_4bit_use_double_quant"]) == (True, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("litgpt finetune_adapter x/y --devices 8", "trains prefixes of attention"),
        ("litgpt pretrain pythia-160m --devices 8", r"no train\.max_seq_length"),
        ("litgpt finetune_lora x/y --devices 8 --train.max_seq_length 512", "no shipped model is of this name"),
        ("litgpt generate meta-llama/Llama-3.2-1B --devices 8", "litgpt generate is no training"),
    ],
)
def test_what_is_not_played_or_said_is_refused(text, words):
    with pytest.raises(ScenarioError, match=words):
        read(("run.sh", text))


def test_a_model_whose_blocks_run_beside_each_other_wants_its_config():
    with pytest.raises(ScenarioError, match=r"runs attention and MLP beside each other.*config\.json"):
        read(("a.yaml", SIZED.replace("parallel_residual: false, ", "")))


@pytest.mark.parametrize("told", [False, True])
def test_the_head_is_a_matrix_of_its_own_unless_pretraining_is_told_otherwise(told):
    text = "litgpt pretrain meta-llama/Llama-3.2-1B --train.max_seq_length 1024 --devices 8"
    script = text + " --train.tie_embeddings true" * told
    own_head = 128256 * 2048
    made = read(("run.sh", script)).scenario
    parameters = model_of(made).parameters
    tied_parameters = 1_235_814_400
    assert parameters == tied_parameters + own_head * (not told)


def test_quantized_weights_are_trained_with_the_paged_optimizer():
    text = "litgpt finetune_lora meta-llama/Llama-3.2-1B --train.max_seq_length 1024 --quantize bnb.nf4"
    assert read(("run.sh", text)).tables["run"]["optimizer"] == "paged_adamw"
    with pytest.raises(ScenarioError, match="'SGD' is not run beside quantize"):
        read(("run.sh", f"{text} --optimizer SGD"))


@pytest.mark.parametrize("line", ["litgpt", "litgpt | tee log", "litgpt --help"])
def test_a_command_without_a_word_is_refused_in_one_line(line):
    with pytest.raises(ScenarioError, match="litgpt"):
        read(("run.sh", f"{line}\n"))
