"""What launch files leave open is asked for at once, each with what answers it."""

import re

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document

TUNED = "base_model: {model}\nsequence_len: 2048\nmicro_batch_size: 1\ngradient_accumulation_steps: 2\nbf16: true\n"
TUNE = "model:\n  _component_: torchtune.models.{model}\nbatch_size: 2\ndtype: bf16\n"

TRAINED = """
model:
  tensor_model_parallel_size: {tp}
  num_layers: 4
  hidden_size: 512
  num_attention_heads: 8
  max_position_embeddings: 256
  micro_batch_size: 1
  seq_length: {tokens}
train:
  global_batch_size: {samples}
"""


def asked(files, machine, **more) -> str:
    """The error of a launch."""
    with pytest.raises(ScenarioError) as raised:
        exchange.read([document(text, name) for name, text in files.items()], machine, **more)
    return str(raised.value)


def test_machine_model_and_a_file_are_asked_for_together():
    files = {"a.yml": TUNED.format(model="me/mine") + "deepspeed: z3.json\n"}
    words = asked(files, {})
    assert re.search(r"deepspeed names z3\.json; give that file too; ", words)
    assert re.search(r"base_model 'me/mine': no shipped model is of this name .* or with --model; ", words)
    assert re.search(r"give --topology, .*; does not say on how many nodes it runs; give --nodes", words)
    assert words.count("a.yml: ") == 1
    less = asked(files, {"topology": "hgx-h100", "nodes": 1}, model="qwen3-4b")
    assert less == "a.yml: deepspeed names z3.json; give that file too"


def test_what_a_file_may_answer_is_not_asked_for_beside_it():
    words = asked(
        {"run.sh": "accelerate launch --config_file own.yaml sft.py --model_name_or_path me/mine --bf16\n"}, {}
    )
    assert words == "run.sh: config_file names own.yaml; give that file too"


def test_all_files_that_are_missing_are_named():
    run = "accelerate launch --config_file own.yaml sft.py --model_name_or_path Qwen/Qwen3-4B --deepspeed z2.json\n"
    words = asked({"run.sh": run}, {"topology": "hgx-h100"})
    assert "config_file names own.yaml and --deepspeed names z2.json; give those files too" in words


def test_all_values_that_nothing_sets_are_named():
    text = TRAINED.format(tp="${TP}", tokens="${LONG}", samples="${GBS}")
    words = asked({"a.yaml": text}, {"topology": "hgx-h100", "nodes": 1}, framework="nemo")
    assert re.search(r"tensor_model_parallel_size '\$\{TP\}', .* are set nowhere in the script; write their", words)
    for name in ("TP", "LONG", "GBS"):
        assert f"${{{name}}}" in words
    alone = "deepspeed --num_gpus 2 --module openrlhf.cli.train_sft --pretrain <path> --max_len 512 --bf16\n"
    assert asked({"a.sh": alone}, {"topology": "hgx-h100"}).endswith("write its value, or give --model")


def test_a_script_that_is_read_and_not_given_is_asked_for_before_its_words():
    run = 'source models/own.sh\ntorchrun --nproc_per_node 8 pretrain_gpt.py "${MODEL_ARGS[@]}" --bf16\n'
    words = asked({"a.sh": run}, {"topology": "hgx-h100"}, framework="megatron")
    assert "give models/own.sh, which the script reads, or write their words, or give --model" in words


def test_a_configuration_that_a_command_changes_is_asked_for_by_its_name():
    run = "python megatron_gpt_pretraining.py --config-name own.yaml trainer.devices=8 model.micro_batch_size=1\n"
    assert "--config-name names own.yaml; give that file too" in asked({"a.sh": run}, {"topology": "hgx-h100"})


def test_torchrun_alone_starts_ranks_of_one_node():
    run = "torchrun sft.py --model_name_or_path Qwen/Qwen3-4B --bf16 --per_device_train_batch_size 1 --max_length 512\n"
    made = exchange.read([document(run, "a.sh")], {"topology": "hgx-h100"})
    assert made.scenario.table["cluster"]["nodes"] == 1
    assert any("one node, as torchrun without --nnodes starts ranks" in note for note in made.notes)
    more = exchange.read([document(run, "a.sh")], {"topology": "hgx-h100", "nodes": 2})
    assert more.scenario.table["cluster"]["nodes"] == 2


def test_a_model_and_the_nodes_of_a_recipe_are_asked_for_together():
    words = asked({"a.yaml": TUNE.format(model="own.own_7b")}, {"topology": "hgx-h100"})
    assert "no shipped model is of this name" in words
    assert "give --nodes" in words
