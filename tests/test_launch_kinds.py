"""Models that launch files describe by sizes of a kind that no shipped model is of, and what else decides a model."""

import pytest

from clustersim import model as models
from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch import shapes
from clustersim.files.launch.files import document
from clustersim.scenario.parts import model_of

MACHINE = {"topology": "hgx-h100", "nodes": 1}
SMALL = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 512"
BATCH = "--micro-batch-size 1 --global-batch-size 8 --bf16"
NEOX = {
    "pipe_parallel_size": 1,
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 256,
    "max_position_embeddings": 256,
    "pos_emb": "rotary",
    "no_weight_tying": "true",
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": "{stage: 1}",
}


def read(text, name="run.sh", **more):
    return exchange.read([document(text, name)], MACHINE, **more)


def megatron(more):
    return read(f"torchrun --nproc_per_node 8 pretrain_gpt.py {SMALL} {BATCH} {more}\n")


def neox(**more):
    return read("\n".join(f"{key}: {value}" for key, value in (NEOX | more).items()), "n.yml")


# Parameters as nn.Module has them: embedding, blocks, last norm, output.
LAYER = 512 * 1536 + 512 * 512 + 2 * 512 * 2048


@pytest.mark.parametrize(
    ("more", "blocks", "outside"),
    [
        # LayerNorms and biases, whose rotary kind without parallel halves nobody ships
        (
            "--position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 1024",
            LAYER + 1536 + 512 + 2048 + 512 + 4 * 512,
            2 * 1024 * 512 + 2 * 512,
        ),
        # a gated MLP whose positions are learned
        (
            "--swiglu --ffn-hidden-size 1024 --disable-bias-linear --vocab-size 1024",
            512 * 1536 + 512 * 512 + 3 * 512 * 1024 + 4 * 512,
            1024 * 512 + 512 * 512 + 2 * 512,
        ),
        # experts of another number
        (
            "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --vocab-size 1024 "
            "--untie-embeddings-and-output-weights --num-experts 6 --moe-router-topk 2 --ffn-hidden-size 256",
            512 * 1536 + 512 * 512 + 6 * (3 * 512 * 256 + 512) + 2 * 512,
            2 * 1024 * 512 + 512,
        ),
    ],
)
def test_a_kind_that_nobody_ships_has_the_parameters_of_its_sizes(more, blocks, outside):
    made = megatron(f"--attention-dropout 0 --hidden-dropout 0 {more}")
    assert model_of(made.scenario).parameters == 4 * blocks + outside
    assert any("no shipped model is of this kind; it is" in note for note in made.notes)


def test_experts_with_biases_are_refused():
    with pytest.raises(ScenarioError, match=r"no shipped model is of this kind .*config\.json"):
        megatron("--swiglu --num-experts 4 --moe-router-topk 2")


@pytest.mark.parametrize("name", ["llama2-7b", "gpt2-xl", "bloom-176b", "mixtral-8x7b", "llama3-70b", "qwen3-8b"])
def test_counted_parameters_are_the_shipped_models(name):
    assert shapes.counted(shapes._shipped()[name]) == models.model(name, seq_len=512).parameters


def test_a_window_that_nobody_asks_for_is_not_taken_with_the_shipped_model():
    sizes = {name: value for name, value in shapes._shipped()["mistral-7b-v0.1"].items() if name != "window"}
    found = shapes.model_for("a.yml", sizes)
    assert found.options.get("window", 0) == 0
    assert not shapes._shipped()[found.name].get("window") or "window = 0" in found.note


def test_neox_has_biases_where_it_says_so():
    every = model_of(neox().scenario).parameters
    attention = model_of(neox(use_bias_in_attn_linear="false").scenario).parameters
    none = model_of(neox(use_bias_in_attn_linear="false", use_bias_in_mlp="false").scenario).parameters
    assert every - attention == 4 * (1536 + 512)
    assert attention - none == 4 * (2048 + 512)


def test_neox_widths_are_factors_and_multiples():
    wide = [model_of(neox(**more).scenario) for more in ({"expansion_factor": 2}, {"intermediate_size": 1000})]
    rounded = model_of(neox(intermediate_size=1000, mlp_multiple_of=256).scenario)
    assert [model.parameters for model in wide] == sorted(model.parameters for model in wide)[::-1]
    assert rounded.parameters == wide[0].parameters  # 1,024 of both


def test_neox_clips_by_default():
    assert exchange.canonical(neox().scenario)["strategy.gradient_clipping"] == 1.0


def test_torchtunes_phi_has_projections_of_its_own():
    text = """
model: {_component_: torchtune.models.phi3.lora_phi3_mini, lora_attn_modules: [q_proj, output_proj], lora_rank: 8}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer}
tokenizer: {max_seq_len: 1024}
batch_size: 2
optimizer: {_component_: torch.optim.AdamW}
dtype: bf16
"""
    made = model_of(read(text, "phi.yaml", model=None).scenario)
    adapters = [tensor.name for layer in made.layers for tensor in layer.tensors if not tensor.frozen]
    assert len(adapters) == 32 * 2 * 2
    assert made.parameters == 3_821_079_552 + sum(32 * 2 * [8 * 3072 * 2])


PATTERN = r"model\.layers\.\d+\.(mlp|self_attn)\.(up|q|v)_proj"


def test_a_pattern_of_modules_is_pefts():
    words = "--model_name_or_path meta-llama/Llama-3.2-1B --per_device_train_batch_size 1 --block_size 256 --bf16"
    text = f"accelerate launch --num_processes 8 sft.py {words} --use_peft --lora_r 8 --lora_target_modules '{PATTERN}'"
    made = model_of(read(text).scenario)
    adapted = {tensor.name for layer in made.layers for tensor in layer.tensors if "lora_A" in tensor.name}
    assert len(adapted) == 16 * 3
    assert all(name.split(".lora_A")[0].endswith(("up_proj", "q_proj", "v_proj")) for name in adapted)


def test_lion_keeps_half_of_adams_states():
    text = """
model:
  {name: mpt_causal_lm, d_model: 1024, n_heads: 16, n_layers: 24, expansion_ratio: 4, max_seq_len: 512,
   vocab_size: 50368}
train_loader: {name: text}
max_seq_len: 512
global_train_batch_size: 8
device_train_microbatch_size: 1
"""
    states = {
        name: read(f"{text}optimizer: {{name: {name}}}", "f.yaml")
        .scenario.run()
        .to_dict()["memory"]["by"]["optimizer_states"]
        for name in ("decoupled_adamw", "decoupled_lionw")
    }
    assert states["decoupled_lionw"] == pytest.approx(states["decoupled_adamw"] / 2)


def test_alibi_of_a_recipe_is_played():
    text = "{d_model: 1024, n_heads: 16, n_layers: 24, max_seq_len: 512, vocab_size: 50368, attn_config: {alibi: true}}"
    more = "train_loader: {name: text}\nmax_seq_len: 512\nglobal_train_batch_size: 8\ndevice_train_microbatch_size: 1\n"
    plain = model_of(
        read(f"model: {text}\n{more}".replace("{d_model", "{name: mpt_causal_lm, d_model"), "f.yaml").scenario
    )
    assert not any("wpe" in tensor.name for layer in plain.layers for tensor in layer.tensors)
