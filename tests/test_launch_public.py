"""Kinds of launch files that public repositories have and that were misread, or refused though they say enough."""

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document
from clustersim.scenario.run.parts import model_of


def read(text, name="run.sh"):
    return exchange.read([document(text, name)], {"topology": "hgx-h100", "nodes": 1})


def fields(text, name="run.sh"):
    return exchange.canonical(read(text, name).scenario)


# ---- llm-foundry: FSDP as Composer has it ---------------------------------------------------------------------------

FOUNDRY = """
max_seq_len: 1024
model: {name: mpt_causal_lm, d_model: 1024, n_heads: 16, n_layers: 24, expansion_ratio: 4, vocab_size: 50368}
train_loader: {name: text}
global_train_batch_size: 64
device_train_microbatch_size: 4
"""


def test_composer_shards_where_only_something_else_of_fsdp_is_said():
    had = fields(f"{FOUNDRY}fsdp_config: {{mixed_precision: PURE}}\n", "f.yaml")
    assert (had["strategy.kind"], had["strategy.sharding_strategy"] or "FULL_SHARD") == ("fsdp", "FULL_SHARD")
    assert fields(FOUNDRY, "f.yaml")["strategy.kind"] == "ddp"


@pytest.mark.parametrize(
    ("words", "gathered"),
    [("", "BACKWARD_POST"), (", backward_prefetch: BACKWARD_POST", "BACKWARD_POST"), (", backward_prefetch: NONE", "None")],
)
def test_composer_gathers_behind_the_gradients_of_a_unit(words, gathered):
    had = fields(f"{FOUNDRY}fsdp_config: {{sharding_strategy: FULL_SHARD{words}}}\n", "f.yaml")
    assert had["strategy.backward_prefetch"] == gathered


def test_composers_other_switches_of_fsdp_are_fields():
    words = "sharding_strategy: FULL_SHARD, backward_prefetch: BACKWARD_PRE, forward_prefetch: true, cpu_offload: true"
    had = fields(f"{FOUNDRY}fsdp_config: {{{words}}}\n", "f.yaml")
    assert (had["strategy.backward_prefetch"] or "BACKWARD_PRE") == "BACKWARD_PRE"
    assert had["strategy.forward_prefetch"] is True
    assert had["strategy.cpu_offload"] is True


# ---- torchtune: builders that take sizes, and names of models ------------------------------------------------------

TUNE = """
model: {model}
checkpointer: {{_component_: torchtune.training.FullModelHFCheckpointer}}
tokenizer: {{max_seq_len: 512}}
batch_size: 2
optimizer: {{_component_: torch.optim.AdamW}}
dtype: bf16
"""
SIZES = "vocab_size: 4096, num_layers: 3, embed_dim: 512, num_heads: 8, num_kv_heads: 2, max_seq_len: 512"


@pytest.mark.parametrize(("builder", "biases"), [("llama3", 0), ("qwen2", 512 + 2 * 128)])
def test_a_builder_of_torchtune_takes_the_sizes_of_a_model(builder, biases):
    words = f"{{_component_: torchtune.models.{builder}.{builder}, {SIZES}, intermediate_dim: 1000}}"
    made = model_of(read(TUNE.format(model=words), "t.yaml").scenario)
    layer = 2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1000 + 2 * 512 + biases
    assert made.parameters == 3 * layer + 2 * 4096 * 512 + 512


def test_the_width_that_a_builder_is_not_told_is_a_multiple_of_256():
    words = f"{{_component_: torchtune.models.llama3.llama3, {SIZES}}}"
    made = model_of(read(TUNE.format(model=words), "t.yaml").scenario)
    layer = 2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1536 + 2 * 512  # 4 * int(2 * 512 / 3) = 1,364
    assert made.parameters == 3 * layer + 2 * 4096 * 512 + 512


def test_a_builder_without_sizes_is_asked_for_them():
    with pytest.raises(ScenarioError, match="does not say what model it is"):
        read(TUNE.format(model="{_component_: torchtune.models.llama3.llama3}"), "t.yaml")


@pytest.mark.parametrize("name", ["qwen3.qwen3_4b_base", "qwen3.qwen3_4b_instruct"])
def test_a_builder_of_torchtune_is_known_by_its_models_name(name):
    had = read(TUNE.format(model=f"{{_component_: torchtune.models.{name}}}"), "t.yaml").scenario.table
    assert had["model"]["name"] == "qwen3-4b"


def test_replicas_of_torchtune_are_its_shards_besides():
    text = TUNE.format(model="{_component_: torchtune.models.llama3_2.llama3_2_1b}")
    assert fields(f"{text}data_parallel_replicate_dim: 2\n", "t.yaml")["strategy.data_parallel_replicate_degree"] == 2


# ---- frameworks that are not read -----------------------------------------------------------------------------------


def test_openrlhfs_own_script_is_known_by_its_words():
    words = "deepspeed ../train_sft.py --pretrain a/b --train_batch_size 64 --micro_train_batch_size 2 --zero_stage 3"
    with pytest.raises(ScenarioError, match="is of OpenRLHF, whose files are not read"):
        read(words)
