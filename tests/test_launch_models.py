"""Models of launch files: by their names, weights that are saved in 4 bits, and those that read images."""

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document
from clustersim.scenario.run.parts import model_of, transformer_of

SFT = "accelerate launch --num_processes 8 sft.py --per_device_train_batch_size 1 --max_length 512 --bf16"
FACTORY = """
stage: sft
do_train: true
template: x
per_device_train_batch_size: 1
cutoff_len: 512
bf16: true
"""
SEEING = {
    "Qwen/Qwen2.5-VL-7B-Instruct": ("model.visual.", "model.visual.merger."),
    "google/gemma-3-4b-it": ("model.vision_tower.", "model.multi_modal_projector."),
    "llava-hf/llava-1.5-7b-hf": ("model.vision_tower.", "model.multi_modal_projector."),
}
"""Models that read images, and how the names of their towers and projectors begin."""


def read(text, name="run.sh"):
    return exchange.read([document(text, name)], {"topology": "hgx-h100", "nodes": 1})


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2-7b"),
        ("/models/deepseek-coder-6.7b-base/", "deepseek-coder-6.7b"),
        ("01-ai/Yi-34B-Chat", "yi-34b"),
    ],
)
def test_a_model_of_other_words_is_said(name, model):
    made = read(f"{SFT} --model_name_or_path {name}")
    assert made.tables["model"]["name"] == model
    assert any(f"has the sizes of {model}" in note for note in made.notes)


@pytest.mark.parametrize("name", ["me/Qwen2.5-7B-mine", "Qwen/Qwen3-8B-FP8", "Qwen/Qwen2.5-Omni-7B"])
def test_a_model_of_a_neighbours_name_is_none(name):
    with pytest.raises(ScenarioError, match="no shipped model is of this name"):
        read(f"{SFT} --model_name_or_path {name}")


def test_weights_that_are_saved_in_4_bits_are_so_beside_adapters_and_train_nothing_alone():
    name = "unsloth/Qwen2.5-7B-Instruct-bnb-4bit"
    with pytest.raises(ScenarioError, match=f"{name}' without an adapter: weights in 4 bits are not trained"):
        read(f"{SFT} --model_name_or_path {name}")
    adapters = f"{SFT} --use_peft --lora_r 8 --lora_target_modules q_proj"
    by_name = read(f"{adapters} --model_name_or_path {name}")
    said = read(f"{adapters} --model_name_or_path Qwen/Qwen2.5-7B --load_in_4bit --use_bnb_nested_quant")
    assert by_name.tables["model"] == said.tables["model"]
    assert any("bitsandbytes' 4 bits" in note for note in by_name.notes)


def trained(text, name="run.sh"):
    """Names of parameters that are trained, whole or beside by an adapter."""
    from clustersim.scenario.run.parts import model_of

    model = model_of(read(text, name).scenario)
    return {tensor.name for layer in model.layers for tensor in layer.tensors if not tensor.frozen}


@pytest.mark.parametrize("model", SEEING)
def test_llama_factory_trains_the_decoder_alone_unless_it_is_told_otherwise(model):
    tower, projector = SEEING[model]
    text = f"{FACTORY}model_name_or_path: {model}\n"
    whole = trained(
        f"{text}finetuning_type: full\nfreeze_vision_tower: false\nfreeze_multi_modal_projector: false\n", "a.yaml"
    )
    usual = trained(f"{text}finetuning_type: full\n", "a.yaml")
    seen = trained(f"{text}finetuning_type: full\nfreeze_vision_tower: false\n", "a.yaml")
    assert usual == {name for name in whole if not name.startswith((tower, projector))}
    assert seen == {name for name in whole if not name.startswith(projector)}
    for targets in ("all", "q_proj,v_proj"):
        beside = trained(f"{text}finetuning_type: lora\nlora_rank: 8\nlora_target: {targets}\n", "a.yaml")
        assert beside
        assert not {name for name in beside if name.startswith((tower, projector))}
        assert all("lora" in name for name in beside)


def test_ms_swift_leaves_the_tower_and_trl_trains_it():
    model = "Qwen/Qwen2.5-VL-3B-Instruct"
    swift = f"NPROC_PER_NODE=8 swift sft --model {model} --train_type full --torch_dtype bfloat16 --max_length 512"
    assert not any("visual" in name for name in trained(swift))
    assert any("visual.blocks" in name for name in trained(f"{swift} --freeze_vit false"))
    assert any("visual.blocks" in name for name in trained(f"{SFT} --model_name_or_path {model}"))


def test_images_that_no_file_describes_are_said():
    notes = read(f"{SFT} --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct").notes
    assert any("no file says what images are read: 1 image of 448 x 448 pixels" in note for note in notes)
    assert not any("image" in note for note in read(f"{SFT} --model_name_or_path Qwen/Qwen2.5-3B").notes)


def test_a_decoder_that_is_not_trained_is_refused():
    text = f"{FACTORY}model_name_or_path: Qwen/Qwen2-VL-2B\nfinetuning_type: full\nfreeze_language_model: true\n"
    with pytest.raises(ScenarioError, match=r"a.yaml.*freeze_language_model True trains an image encoder"):
        read(text, "a.yaml")


CHAT = (
    "deepspeed main.py --model_name_or_path 01-ai/Yi-6B --per_device_train_batch_size 8 --max_seq_len 512 --deepspeed"
)


def test_deepspeed_chat_offloads_parameters_at_stage_3_alone_and_its_adapters_are_refused():
    second = exchange.canonical(read(f"{CHAT} --zero_stage 2 --offload").scenario)
    third = exchange.canonical(read(f"{CHAT} --zero_stage 3 --offload").scenario)
    key = "strategy.zero_optimization.offload_{}.device"
    assert [made.get(key.format("optimizer")) for made in (second, third)] == ["cpu", "cpu"]
    assert third[key.format("param")] == "cpu"
    assert second.get(key.format("param"), "none") != "cpu"
    with pytest.raises(ScenarioError, match="lora_dim '128' asks for adapters in a script's own words"):
        read(f"{CHAT} --zero_stage 2 --lora_dim 128")
    assert read(f"{CHAT} --zero_stage 2 --lora_dim 0").scenario


FOUNDRY = """
max_seq_len: 2048
model:
  name: hf_causal_lm
  pretrained_model_name_or_path: {name}
  config_overrides: {sizes}
train_loader: {{name: text}}
global_train_batch_size: 64
device_train_microbatch_size: 4
"""
MISTRAL = "mistralai/Mistral-7B-v0.1"


def foundry(sizes, name=MISTRAL, more=""):
    return read(FOUNDRY.format(name=name, sizes=sizes) + more, "f.yaml")


def test_sizes_that_a_file_changes_of_the_model_it_names_are_the_models():
    sizes = "{hidden_size: 512, num_hidden_layers: 4, num_attention_heads: 8, num_key_value_heads: 2, "
    sizes += "intermediate_size: 1024, vocab_size: 4096, max_position_embeddings: 8192}"
    made = foundry(sizes)
    layer = 512 * (512 + 2 * 128) + 512 * 512 + 3 * 512 * 1024 + 2 * 512  # heads are 512 / 8 wide
    assert model_of(made.scenario).parameters == 4 * layer + 2 * 4096 * 512 + 512
    assert not made.unplayed
    assert "mistral-7b-v0.1 with layers = 4" in " ".join(made.notes)
    small = foundry("{n_embd: 128, n_layer: 2, n_head: 4, n_positions: 2048}", "gpt2")
    assert small.scenario.table["model"]["options"] == {
        "d_model": 128,
        "layers": 2,
        "heads": 4,
        "head_dim": 32,
        "kv_heads": 4,
        "d_ff": 512,
        "n_positions": 2048,
    }


def test_a_named_model_with_other_experts_is_asked_for():
    with pytest.raises(ScenarioError, match=r"num_local_experts 16: the model has other experts than the named one"):
        foundry("{num_local_experts: 16}", "mistralai/Mixtral-8x7B-v0.1")


def test_attention_and_adapters_of_llm_foundry():
    named = FOUNDRY.format(name="meta-llama/Llama-3.2-1B", sizes="{}").replace(
        "  name: hf", "  attn_implementation: flash_attention_2\n  name: hf"
    )
    assert exchange.canonical(read(named, "f.yaml").scenario)["model.attention"] == "fa2"
    lora = named.replace("  name: hf", "  peft_config: {peft_type: LORA, r: 8, target_modules: [q_proj]}\n  name: hf")
    had = exchange.canonical(read(lora, "f.yaml").scenario)
    assert (had["model.adapter.rank"], had["model.adapter.target_modules"]) == (8, ("q_proj",))
    with pytest.raises(ScenarioError, match="without fsdp_config, whose flat parameters do not tell frozen ones"):
        read(f"{lora}fsdp_config: {{sharding_strategy: FULL_SHARD}}\n", "f.yaml")
    with pytest.raises(ScenarioError, match="PEFT's plain LoRA is played"):
        read(lora.replace("r: 8", "r: 8, use_dora: true"), "f.yaml")


def test_a_mixture_with_shared_experts_and_plain_attention_is_described():
    """No shipped model has shared experts beside queries without norms and biases; sizes tell it all the same."""
    words = (
        "torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 8 --hidden-size 384 "
        "--num-attention-heads 8 --ffn-hidden-size 688 --seq-length 4096 --max-position-embeddings 4096 --swiglu "
        "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
        "--untie-embeddings-and-output-weights --vocab-size 32000 "
        "--num-experts 64 --moe-router-topk 4 --moe-ffn-hidden-size 344 --moe-shared-expert-intermediate-size 344 "
        "--micro-batch-size 1 --global-batch-size 64 --bf16"
    )
    shape = transformer_of(read(words).scenario)
    assert shape is not None
    assert shape.experts is not None
    experts = shape.experts
    assert (experts.count, experts.per_token, experts.width, experts.shared) == (64, 4, 344, 344)
    assert (shape.layers, shape.kv_heads, shape.qk_norm, shape.qkv_bias) == (8, 8, False, False)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", "a Llama 3.2 Vision, some of whose blocks attend to the image"),
        ("microsoft/deberta-v3-large", "a DeBERTa, with disentangled attention"),
        ("baichuan-inc/Baichuan2-7B-Chat", "a Baichuan 2, with queries, keys and values in one product"),
        ("THUDM/chatglm3-6b", "a ChatGLM, with queries, keys and values in one product"),
        ("tiiuae/Falcon-E-1B-Base", "a Falcon-E, whose linears are rounded to three values"),
        ("openai/clip-vit-large-patch14-336", "a pair of an image and a text encoder"),
    ],
)
def test_a_model_that_is_not_described_is_refused_by_what_it_is(name, what):
    with pytest.raises(ScenarioError, match=f"no shipped model is of this name .*: it is {what}"):
        read(f"{SFT} --model_name_or_path {name}")


@pytest.mark.parametrize("name", ["google/flan-t5-base", "facebook/bart-large", "openai/whisper-small"])
def test_an_encoder_and_a_decoder_are_known_by_name(name):
    made = read(f"{SFT.replace('512', '448')} --model_name_or_path {name}")
    assert model_of(made.scenario).family == "seq2seq"


def test_lengths_of_a_source_and_a_target_are_an_encoders_and_a_decoders_and_no_other_models():
    words = "torchrun --nproc_per_node 8 run_summarization.py --per_device_train_batch_size 4 --bf16 "
    words += "--max_source_length 512 --max_target_length 128 --model_name_or_path"
    for name in ("google-t5/t5-small", "facebook/bart-large", "google/flan-t5-base"):
        made = read(f"{words} {name}")
        assert not [option for option in made.unplayed if "max_source_length" in option]
        model = model_of(made.scenario)
        assert (model.seq_len, "512 tokens to 128" in model.notes) == (128, True)
    assert [option for option in read(f"{words} gpt2").unplayed if "max_source_length" in option]
    with pytest.raises(ScenarioError, match="max_source_length"):
        read(f"{words.replace('512', 'long')} google/flan-t5-base")
