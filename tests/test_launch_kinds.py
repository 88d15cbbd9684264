"""Models that launch files describe by sizes of a kind that no shipped model is of, and what else decides a model."""

from pathlib import Path

import pytest

from clustersim import model as models
from clustersim import scenario
from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch import shapes
from clustersim.files.launch.files import document
from clustersim.scenario.run.parts import model_of

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
        # experts without a gate
        (
            "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --vocab-size 1024 "
            "--untie-embeddings-and-output-weights --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256",
            512 * 1536 + 512 * 512 + 8 * (2 * 512 * 256 + 512) + 2 * 512,
            2 * 1024 * 512 + 512,
        ),
    ],
)
def test_a_kind_that_nobody_ships_has_the_parameters_of_its_sizes(more, blocks, outside):
    made = megatron(f"--attention-dropout 0 --hidden-dropout 0 {more}")
    assert model_of(made.scenario).parameters == 4 * blocks + outside
    assert any("no shipped model is of this kind; it is" in note for note in made.notes)


SQUARED = "--squared-relu --disable-bias-linear --vocab-size 1024 --attention-dropout 0 --hidden-dropout 0"
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights"
)


@pytest.mark.parametrize("more", ["", EXPERTS])
def test_squared_relus_are_what_megatron_fuses_them_to_and_no_gate_goes_with_them(more):
    """They were played as GELUs without a word: op by op they are two kernels that keep more."""
    squared, plain = (model_of(megatron(f"{words} {more}").scenario) for words in (SQUARED, SQUARED[15:]))
    assert squared.parameters == plain.parameters
    assert squared.layers == plain.layers, "of Megatron-LM both are one kernel that reads its input again"
    eager, gelus = (
        models.model("llama2-7b", activation=name, implementation="eager", d_ff=512).layers
        for name in ("relu2", "gelu")
    )
    assert eager != gelus
    with pytest.raises(ScenarioError, match=r"squared ReLUs .* gated"):
        megatron(f"{SQUARED} {more} --swiglu")


@pytest.mark.parametrize(
    ("target", "means"), [("megatron.core.activations.squared_relu", "relu2"), ("torch._C._nn.gelu", "gelu")]
)
def test_bridges_activation_is_the_function_that_its_file_names(target, means):
    text = f"""
model: {{num_layers: 4, hidden_size: 512, num_attention_heads: 8, ffn_hidden_size: 1024, seq_length: 256,
  vocab_size: 1024, normalization: RMSNorm, position_embedding_type: rope, add_bias_linear: false,
  gated_linear_unit: false,
  share_embeddings_and_output_weights: false, activation_func: {{_target_: {target}, _call_: false}}}}
train: {{global_batch_size: 8, micro_batch_size: 1}}
"""
    made = read(text, "b.yaml").scenario
    assert made.file.model.options["activation"] == means


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


# ---- what says the same as the scenario has anyway is said ----------------------------------------------------------

TRAINER = "--model_name_or_path meta-llama/Llama-3.2-1B --per_device_train_batch_size 2 --block_size 512"
USUAL = "BACKWARD_PRE"
"""Of PyTorch's FSDP1."""
FSDP1 = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config: {fsdp_version: 1, fsdp_sharding_strategy: FULL_SHARD, fsdp_backward_prefetch: WORD}
"""


def both(first, name, second, other):
    return exchange.read([document(first, name), document(second, other)], MACHINE)


@pytest.mark.parametrize(
    ("word", "means"), [("BACKWARD_PRE", "BACKWARD_PRE"), ("NO_PREFETCH", "None"), ("BACKWARD_POST", "BACKWARD_POST")]
)
@pytest.mark.parametrize("name", ["fsdp_backward_prefetch", "fsdp_backward_prefetch_policy"])
def test_prefetch_of_fsdp1_is_what_accelerates_file_says(name, word, means):
    config = FSDP1.replace("WORD", word).replace("fsdp_backward_prefetch", name)
    made = both(f"accelerate launch --config_file c.yaml sft.py {TRAINER}", "run.sh", config, "c.yaml")
    assert (exchange.canonical(made.scenario)["strategy.backward_prefetch"] or USUAL) == means


def test_a_file_of_the_trainers_fsdp_config_is_read():
    config = '{"backward_prefetch": "backward_pre", "activation_checkpointing": true, "min_num_params": 2000}'
    words = f"torchrun --nproc_per_node 8 run_clm.py --fsdp 'full_shard auto_wrap' --fsdp_config fsdp.json {TRAINER}"
    had = exchange.canonical(both(words, "run.sh", config, "fsdp.json").scenario)
    assert (had["strategy.backward_prefetch"] or USUAL) == "BACKWARD_PRE"
    assert had["model.activation_checkpointing"] == "full"
    assert had["strategy.min_num_params"] == 2000


@pytest.mark.parametrize("word", ["fp32", "bf16"])
def test_a_recipe_in_fp32_is_played_in_fp32(word):
    tune = f"""
model: {{_component_: torchtune.models.llama3_2.llama3_2_1b}}
tokenizer: {{max_seq_len: 512}}
batch_size: 2
dtype: {word}
"""
    had = exchange.canonical(read(tune, "t.yaml").scenario)
    assert {had["model.dtype"], had["strategy.param_dtype"]} <= ({"bf16"} if word == "bf16" else {"fp32", None})
    assert had["strategy.reduce_dtype"] == word


# ---- who starts the ranks -------------------------------------------------------------------------------------------

BERT = "pretrain_bert.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512"
WORDS = f"{BERT} --max-position-embeddings 512 --micro-batch-size 2 --global-batch-size 64 --bf16"
SKY = """
resources: {accelerators: H100:8}
num_nodes: 4
run: |
  torchrun --nnodes=$SKYPILOT_NUM_NODES --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE WORDS
"""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"conda run -n env --no-capture-output torchrun --nnodes 4 --nproc-per-node 8 {WORDS}", "run.sh"),
        (f"srun -N 4 --label torchrun --nnodes 4 --nproc-per-node 8 {WORDS}", "run.sh"),
        (f"flux run -N4 -n32 -g1 python {WORDS}", "run.sh"),
        (f"aprun -n 32 -N 8 python {WORDS}", "run.sh"),
        (SKY.replace("WORDS", WORDS), "sky.yaml"),
        (SKY.replace("WORDS", WORDS).replace("H100:8}", "{H100: 8}}"), "sky.yaml"),
    ],
)
def test_ranks_are_those_that_a_launcher_starts(text, name):
    made = exchange.read([document(text, name)], {"topology": "hgx-h100"})
    assert (made.tables["cluster"]["nodes"], made.tables["cluster"].get("gpus_per_node", 8)) == (4, 8)


def test_llama_factorys_variables_start_torchrun():
    words = "FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=0 NPROC_PER_NODE=4 llamafactory-cli train c.yaml"
    config = "model_name_or_path: meta-llama/Llama-3.2-1B\nstage: sft\nfinetuning_type: full\ncutoff_len: 512\n"
    made = exchange.read([document(words, "run.sh"), document(config, "c.yaml")], {"topology": "hgx-h100"})
    assert (made.tables["cluster"]["nodes"], made.tables["cluster"]["gpus_per_node"]) == (2, 4)


# ---- what was left out of a step without a word ---------------------------------------------------------------------


def test_shards_without_a_strategy_are_fsdp2s():
    words = "accelerate launch --num_processes 8 nd_parallel.py --dp-replicate-size 2 --dp-shard-size 2 --tp-size 2"
    had = exchange.canonical(read(words, model="llama3-8b").scenario)
    assert (had["strategy.kind"], had["strategy.version"], had["parallel.tp"]) == ("fsdp", 2, 2)
    assert (had["strategy.data_parallel_shard_degree"], had["strategy.data_parallel_replicate_degree"]) == (2, 2)


def test_shards_that_a_strategy_has_not_are_an_error():
    config = "distributed_type: MULTI_GPU\nparallelism_config: {parallelism_config_dp_shard_size: 4}\n"
    with pytest.raises(ScenarioError, match=r"dp_shard_size '?4'? shards or copies .* FSDP of version 2"):
        both(f"accelerate launch --num_processes 8 sft.py {TRAINER}", "run.sh", config, "c.yaml")


def test_one_process_is_one_gpu():
    config = "distributed_type: 'NO'\nmixed_precision: bf16\n"
    made = both(f"accelerate launch --config_file c.yaml sft.py {TRAINER}", "run.sh", config, "c.yaml")
    assert made.tables["cluster"]["gpus_per_node"] == 1
    assert made.scenario.run().summary["step_time_s"] > 0  # which a strategy of one GPU refuses of more


def test_megatron_deepspeed_has_scores_in_memory_unless_flash_attention_is_asked_for():
    config = '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}'
    words = f"deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt.py --deepspeed_config ds.json {SMALL}"
    plain = both(words, "run.sh", config, "ds.json")
    flash = both(f"{words} --use-flash-attn-v2", "run.sh", config, "ds.json")
    assert [exchange.canonical(made.scenario)["model.attention"] for made in (plain, flash)] == ["eager", None]
    assert any("scores of attention are in memory" in note for note in plain.notes)


def test_axolotls_liger_and_cut_losses_are_played():
    text = "base_model: meta-llama/Llama-3.2-1B\nmicro_batch_size: 1\nsequence_len: 512\nbf16: true\nplugins: [a.P]\n"
    liger = read(f"{text}liger_rope: true\nliger_fused_linear_cross_entropy: true\n", "a.yaml")
    cut = read(text.replace("a.P", "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"), "a.yaml")
    had = exchange.canonical(liger.scenario)
    assert (had["model.implementation"], had["model.loss"]) == ("liger", "liger")
    assert exchange.canonical(cut.scenario)["model.loss"] == "cut"
    plugin = text.replace("a.P", "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin")
    for whole in (f"{plugin}cut_cross_entropy: false\n", f"{text}cut_cross_entropy: true\n"):
        assert exchange.canonical(read(whole, "a.yaml").scenario).get("model.loss") is None
    with pytest.raises(ScenarioError, match=r"cut_cross_entropy \(of CutCrossEntropyPlugin\) True: "):
        read(f"{plugin}tensor_parallel_size: 2\n", "a.yaml")


def test_a_recipe_of_one_device_is_on_one():
    text = """
model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
tokenizer: {max_seq_len: 512}
batch_size: 2
"""
    made = [read(text, f"1B_full{more}.yaml") for more in ("", "_single_device")]
    assert [one.tables["cluster"].get("gpus_per_node") for one in made] == [None, 1]
    assert any("one GPU, as its name says" in note for note in made[1].notes)


@pytest.mark.parametrize("name", ["sp_size", "model.cp_size", "ulysses_size", "ring_attn_size"])
def test_degrees_under_names_that_nobody_has_are_not_left_out(name):
    with pytest.raises(ScenarioError, match="would split the work"):
        read(f"base_model: meta-llama/Llama-3.2-1B\nsequence_len: 512\n{name}: 4\n", "a.yaml")


def test_settings_of_hydra_ask_for_the_file_that_they_change():
    words = "--config-name=llama model.tensor_model_parallel_size=4 model.num_layers=32 trainer.devices=8"
    with pytest.raises(ScenarioError, match="names llama; give that file too"):
        read(f"torchrun --nproc_per_node 8 megatron_gpt_pretraining.py {words}")


@pytest.mark.parametrize(
    ("more", "dense"), [("", 0), ("--moe-layer-freq 2", 2), ("--moe-layer-freq '([0]*1+[1]*3)'", 1)]
)
def test_layers_with_experts_are_those_that_the_script_says(more, dense):
    words = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --vocab-size 1024"
    words += " --untie-embeddings-and-output-weights --num-experts 8 --moe-router-topk 2 --ffn-hidden-size 256"
    made = model_of(megatron(f"{words} {more}").scenario)
    routers = [
        tensor.name for layer in made.layers for tensor in layer.tensors if "block_sparse_moe.gate" in tensor.name
    ]
    assert len(routers) == 4 - dense


MIXTRAL = (Path(__file__).parent / "data" / "launch" / "megatron_mixtral_8x7b.yaml").read_text("utf-8")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", False),
        ("moe_grouped_gemm: true", "moe_grouped_gemm: false", True),
        ("  moe_grouped_gemm: true\n", "", True),
    ],
)
def test_experts_that_megatron_calls_one_by_one_are_said_to_be_played_together(old, new, said):
    made = read(MIXTRAL.replace(old, new), "a.yaml")
    assert any("as one grouped product" in note for note in made.notes) == said
    assert "moe_grouped_gemm" not in made.unplayed


def test_a_dense_model_says_nothing_of_experts():
    assert not any("grouped" in note for note in megatron("--swiglu --vocab-size 1024").notes)


def test_another_pattern_of_experts_is_refused():
    words = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --num-experts 8"
    with pytest.raises(ScenarioError, match=r"--moe-layer-freq .*another pattern is not played"):
        megatron(f"{words} --untie-embeddings-and-output-weights --moe-layer-freq '[0,1,1,0]'")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("--lora-r 16 --lora-alpha 32", "trains adapters by MindSpeed-LLM"),
        ("--lora-target-modules linear_qkv", "trains adapters by MindSpeed-LLM"),
        ("--stage dpo", "trains by DPO"),
        ("--mm-model model.json", "is of MindSpeed-MM"),
        ("--num-frames 129", "trains on video"),
        ("--context-parallel-size 2 --context-parallel-algo hybrid_cp_algo", "'hybrid_cp_algo' is not a choice"),
    ],
)
def test_what_forks_of_megatron_train_otherwise_is_refused(more, why):
    with pytest.raises(ScenarioError, match=why):
        megatron(more)


@pytest.mark.parametrize(
    ("word", "means"), [("megatron_cp_algo", "p2p"), ("ulysses_cp_algo", "a2a"), ("kvallgather_cp_algo", "all_gather")]
)
def test_how_mindspeed_splits_sequences_is_read(word, means):
    made = megatron(f"--context-parallel-size 2 --context-parallel-algo {word}")
    assert exchange.canonical(made.scenario)["parallel.cp_comm_type"] == means
    assert not made.unknown


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("evaluate_megatron_llama.py", "evaluates: no training"),
        ("run_inference.py", "generates text: no training"),
        ("convert_ckpt.py", "converts a checkpoint: no training"),
        ("pretrain_sora.py", "images or video"),
    ],
)
def test_a_program_of_megatron_that_trains_no_language_model_is_refused(program, why):
    with pytest.raises(ScenarioError, match=why):
        read(f"torchrun --nproc_per_node 8 {program} {SMALL} {BATCH}\n")


def test_a_program_of_nemo_that_generates_is_refused_whatever_the_model():
    command = "python megatron_gpt_generate.py trainer.devices=2 trainer.num_nodes=1 model.tensor_model_parallel_size=1"
    with pytest.raises(ScenarioError, match="generates text: no training"):
        read(command, model="llama3-8b")


def test_a_configuration_that_hydra_names_is_asked_for():
    with pytest.raises(ScenarioError, match="--config-name names sft; give that file too"):
        read("torchrun --nproc_per_node 8 tune.py --config-path /conf --config-name sft\n")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=own trainer.nnodes=1\n", "run.sh"),
        ("torchrun --nproc_per_node 8 -m verl.experimental.own data.train_batch_size=8\n", "run.sh"),
        ("actor_rollout_ref:\n  model:\n    path: own\ntrainer:\n  nnodes: 1\n", "ppo.yaml"),
    ],
)
def test_reinforcement_learning_of_verl_is_named_and_refused(text, name):
    with pytest.raises(ScenarioError, match="is of verl"):
        read(text, name)


def test_a_script_with_axolotls_name_of_the_model_is_no_axolotl():
    head = "torchrun --nproc_per_node 8 tune.py --base_model meta-llama/Llama-3.1-8B --cutoff_len 512 --bf16"
    made = read(f"{head} --per_device_train_batch_size 2\n")
    had = exchange.canonical(made.scenario)
    assert had["batch.micro"] == 2
    assert had.get("strategy.param_dtype") != "bf16"
    assert not any("axolotl" in note for note in made.notes)
    with pytest.raises(ScenarioError, match="--batch_size 128 would say"):
        read(f"{head} --micro_batch_size 4 --batch_size 128\n")


COLOSSAL = "another program of Colossal-AI's"


@pytest.mark.parametrize(
    ("name", "text", "whose"),
    [
        ("c.yaml", "model: {type: llama, hidden_dim: 64}\ntrainer: {train_batch_size: 8, num_train_steps: 2}\n",
         "Levanter"),
        ("c.yaml", "trainer: {mp: 'p=f32,c=bfloat16', num_train_steps: 2}\n", "Levanter"),
        ("c.yml", "base_emb_dim: 64\nbase_num_decoder_layers: 2\n", "MaxText"),
        ("c.yml", "per_device_batch_size: 1\nmax_target_length: 64\n", "MaxText"),
        ("c.sh", "fairseq-train data --arch transformer_lm --max-tokens 2048 --update-freq 16\n", "fairseq"),
        ("c.sh", "torchrun --nproc_per_node 8 -m fairseq_cli.hydra_train task.data=a\n", "fairseq"),
        ("c.sh", "colossalai run --nproc_per_node 8 train.py --plugin gemini\n", COLOSSAL),
        ("c.sh", "python3 -m verl.trainer.main_ppo data.train_batch_size=8\n", "verl's reinforcement learning"),
        ("c.sh", "python train.py data --arch transformer_wmt_en_de --max-tokens 4096 --fp16\n", "fairseq"),
        ("c.sh", "torchrun --nproc_per_node 8 train.py data --arch transformer_lm --tokens-per-sample 8\n", "fairseq"),
        ("c.sh", "python fairseq/fairseq_cli/train.py data --fp16\n", "fairseq"),
        ("c.sh", "srun --nodes 2 fairseq2 lm instruction_finetune out --config-file c.yaml\n", "fairseq2"),
        ("c.sh", "metaseq-train --arch transformer_lm_megatron --criterion cross_entropy --update-freq 2\n", "metaseq"),
        ("c.sh", "torchrun --nproc_per_node 8 train.py --plugin low_level_zero --batch_size 8\n", COLOSSAL),
        ("c.sh", "torchrun --nproc_per_node 8 train.py --plugin 3d --tp 2 --pp 2 --batch_size 8\n", COLOSSAL),
        ("c.sh", "python -m colossalai.cli run --nproc_per_node 8 finetune.py --batch_size 8\n", COLOSSAL),
        ("c.sh", "python3 train.py --actor-num-nodes 4 --actor-num-gpus-per-node 8 --num-layers 36\n", "slime"),
        ("c.yaml", "policy: {model_name: a, train_global_batch_size: 8}\ngrpo: {num_prompts_per_step: 2}\n", "NeMo-RL"),
        ("c.toml", "rollouts_per_example = 8\nbatch_size = 64\n[model]\nname = 'a'\n",
         "prime-rl's reinforcement learning"),
    ],
)  # fmt: skip
def test_files_of_frameworks_that_are_not_read_are_never_read_as_anothers(name: str, text: str, whose: str):
    with pytest.raises(ScenarioError, match=f"is of {whose}, whose files are not read"):
        exchange.read([document(text, name)], {"topology": "hgx-h100"}, model="llama3-8b")


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("composer -n 8 train/train.py here.yaml data_local=c4", "here.yaml"),
        ("python ./deepy.py train.py -d configs here.yml", "here.yml"),
        ("torchrun --nproc_per_node=8 run_train.py --config-file here.yaml", "here.yaml"),
    ],
)
def test_a_configuration_that_a_command_names_is_asked_for(command: str, named: str):
    with pytest.raises(ScenarioError, match=f"names {named}; give that file too"):
        exchange.read([document(f"{command}\n", "run.sh")], {"topology": "hgx-h100"}, model="llama3-8b")


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node=8 megatron_gpt_pretraining.py trainer.devices=8 model.micro_batch_size=2",
        "torchrun --nproc_per_node=8 pretrain_llama3_8b.py --config-file a.yaml model.tensor_model_parallel_size=4",
    ],
)
def test_changes_of_a_configuration_that_is_not_here_ask_for_it(command: str):
    with pytest.raises(ScenarioError, match=r"changes a configuration that .*py reads or makes; give that too"):
        exchange.read([document(f"{command}\n", "run.sh")], {"topology": "hgx-h100"}, model="llama3-8b")


@pytest.mark.parametrize(
    ("test", "taken"),
    [('[ "$1" != "slurm" ]', 2), ("[[ ${1} != slurm ]]", 2), ('[ "$1" == "slurm" ]', 4), ('[ "$HOST" != "a" ]', None)],
)
def test_a_script_that_nobody_gives_arguments_has_none(test: str, taken: int | None):
    command = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers {}"
    script = f"if {test}; then\n  {command.format(2)}\nelse\n  {command.format(4)}\nfi\n"
    if taken is None:
        with pytest.raises(ScenarioError):
            document(script, "run.sh")
    else:
        assert document(script, "run.sh").options["args", "num_layers"].value == str(taken)


YAML_CFG = """
language_model:
  num_layers: 4
  hidden_size: 512
  num_attention_heads: 8
  ffn_hidden_size: null
  add_bias_linear: {biases}
  add_qkv_bias: False
  activation_func: {activation}
  num_moe_experts: {experts}
  normalization: RMSNorm
  fp8: {fp8}
model_parallel:
  tensor_model_parallel_size: 1
  bf16: True
  overlap_p2p_comm: False
micro_batch_size: 1
global_batch_size: 16
seq_length: 256
max_position_embeddings: 256
untie_embeddings_and_output_weights: True
position_embedding_type: rope
vocab_size: 1024
"""


def yaml_cfg(biases="False", activation="swiglu", experts="null", fp8="null"):
    """Megatron's configuration as YAML, whose names are those of its config classes, with the script that names it."""
    script = document(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --yaml-cfg gpt.yaml --micro-batch-size 1\n", "run.sh"
    )
    text = YAML_CFG.format(biases=biases, activation=activation, experts=experts, fp8=fp8)
    return exchange.read([script, document(text, "gpt.yaml")], MACHINE)


def test_megatrons_yaml_has_no_biases_where_it_says_so():
    """``add_bias_linear`` is the config's name of what ``--disable-bias-linear`` turns off."""
    width = 1344  # int(4 x 512 x 2/3 / 64) x 64
    blocks = 4 * (512 * 1536 + 512 * 512 + 3 * 512 * width + 2 * 512)
    assert model_of(yaml_cfg().scenario).parameters == blocks + 2 * 1024 * 512 + 512


def test_megatrons_yaml_has_its_experts_its_activation_and_its_arithmetic():
    assert yaml_cfg(fp8="hybrid").scenario.file.model.dtype == "fp8"
    assert yaml_cfg(experts="4").scenario.file.model.options["experts"]["count"] == 4
    assert yaml_cfg(activation="gelu", experts="8").scenario.file.model.options["activation"] == "gelu"
    assert yaml_cfg(activation="squaredrelu", experts="8").scenario.file.model.options["activation"] == "relu2"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mistral-7b-v0.1", ["--window-size 4095,0"]),
        ("gpt-oss-20b", ["--window-size 127,0", "--window-attn-skip-freq 2"]),
    ],
)
def test_megatron_is_told_of_windows_and_tells_them(name: str, words: list[str]):
    """Its files had no word for them, and theirs were passed over."""
    exported = scenario.from_table(
        {
            "cluster": {"topology": "hgx-h100"},
            "model": {"name": name, "seq_len": 8192, "dtype": "bf16", "implementation": "fused"},
            "strategy": {"kind": "ddp", "micro_batch_size": 1, "param_dtype": "bf16"},
            "parallel": {"ep" if "oss" in name else "tp": 2},
            "run": {"optimizer": "adamw", "optimizer_impl": "fused"},
        }
    )
    files = exchange.written(exported, "megatron")
    (text,) = files.texts.values()
    assert all(word in text for word in words)
    assert not [said for said in files.wordless if "window" in said]


def test_a_script_with_a_window_of_some_blocks_is_read_so():
    """``--window-attn-skip-freq N``: one block of all tokens after N - 1 with a window."""
    sizes = {name: value for name, value in shapes._shipped()["mistral-7b-v0.1"].items() if name != "window"}
    asked = shapes.model_for("f", sizes | {"window": 1024, "window_every": "4"})
    assert (asked.options["window"], asked.options["full_every"]) == (1024, 4)
    with pytest.raises(ScenarioError, match=r"--window-attn-skip-freq \[1,0\]\*16: a pattern"):
        shapes.model_for("f", sizes | {"window": 1024, "window_every": "[1,0]*16"})


def test_what_a_step_changes_by_from_launch_files_is_what_was_said_to_have_no_word(tmp_path):
    """2.124 s became 1.914 s by way of accelerate: by these three settings, and by nothing else."""
    tables = {
        "cluster": {"topology": "hgx-a100", "gpus_per_node": 2},
        "model": {"name": "qwen2.5-0.5b", "seq_len": 1024, "dtype": "bf16", "implementation": "fused"},
        "strategy": {"kind": "fsdp", "param_dtype": "bf16", "reduce_dtype": "fp32", "clip_grad_norm": True},
        "parallel": {"framework": "torchtitan"},
        "run": {"optimizer": "adamw", "optimizer_impl": "fused", "steps": 2},
    }
    tables["model"]["activation_checkpointing"] = "selective"
    tables["strategy"]["micro_batch_size"] = 1
    exported = scenario.from_table(tables)
    files = exchange.written(exported, "accelerate")
    named = {said.partition(" = ")[0] for said in files.wordless}
    assert named == {"model.activation_checkpointing", "strategy.ends_apart", "strategy.reduce_dtype"}
    documents = [document(text, name) for name, text in files.texts.items()]
    back = exchange.read(documents, tables["cluster"], run={"steps": 2}).scenario
    model = tables["model"] | {"activation_checkpointing": "none"}
    strategy = tables["strategy"] | {"reduce_dtype": "bf16", "ends_apart": False}
    as_said = scenario.from_table(tables | {"model": model, "strategy": strategy})
    own, again, changed = (made.run().summary["step_time_s"] for made in (exported, back, as_said))
    assert again == pytest.approx(changed, rel=1e-9)
    assert abs(own / again - 1) > 0.02


UNSAID = {
    "gemma-2b": "shape.activation = geglu: it would be swiglu",
    "olmo-7b": "shape.norm_weight = false: it would be true",
    "mpt-7b": "shape.positions = alibi: it would be learned",
}


@pytest.mark.parametrize(("name", "unsaid"), UNSAID.items())
def test_what_no_option_of_megatron_says_of_a_model_is_told(name, unsaid):
    """Nothing was said of these, and MPT was "said to the training script", which has no ALiBi."""
    tables = {
        "cluster": {"topology": "hgx-h100"},
        "model": {"name": name, "seq_len": 1024, "dtype": "bf16", "implementation": "fused"},
        "strategy": {"kind": "ddp", "micro_batch_size": 1, "param_dtype": "bf16"},
        "parallel": {"framework": "megatron"},
        "run": {"optimizer": "adamw", "optimizer_impl": "fused"},
    }
    assert unsaid in exchange.written(scenario.from_table(tables), "megatron").wordless


def test_a_window_as_long_as_the_samples_is_not_asked_of_a_model():
    """A script of Megatron's with one was refused: "does not change by it"."""
    kinds = "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear"
    made = megatron(f"{kinds} --untie-embeddings-and-output-weights --window-size 4095,0").scenario
    assert "window" not in made.file.model.options
