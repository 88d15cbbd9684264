"""What LLaMA-Factory, axolotl and scripts of their own do otherwise than the Trainer whose arguments they hold."""

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
    with pytest.raises(ScenarioError, match=r"is not played$"):
        read(text)
    assert read(f"{AXOLOTL}unfrozen_parameters:\n").scenario


@pytest.mark.parametrize(("kind", "held"), [("bf16: auto", "bf16"), ("float16: true", "fp16"), ("fp16: true", "fp16")])
def test_axolotl_trains_a_whole_model_in_what_it_loads(kind, held):
    made = read(AXOLOTL.replace("bf16: auto", kind))
    had = exchange.canonical(made.scenario)
    assert (had["strategy.param_dtype"], had["model.dtype"]) == (held, held)
    assert any("trains them in it" in note for note in made.notes)


def test_targets_that_name_no_linear_are_passed_over_where_others_do():
    text = f"{AXOLOTL}adapter: lora\nlora_r: 8\nlora_target_modules: [q_proj, gate_up_proj, v_proj]\n"
    made = read(text)
    assert made.tables["model"]["adapter"]["target_modules"] == ["q_proj", "v_proj"]
    assert any("'gate_up_proj' names no linear of the model, and is passed over" in note for note in made.notes)
    with pytest.raises(ScenarioError, match="names no linear"):
        read(text.replace("q_proj, gate_up_proj, v_proj", "gate_up_proj, qkv_proj"))


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


def test_axolotls_batch_is_of_so_many_passes():
    assert fields(f"{AXOLOTL}batch_size: 8\n")["batch.count"] == 8
    assert fields(f"{AXOLOTL}batch_size: 8\ngradient_accumulation_steps: 2\n")["batch.count"] == 2


# ---- scripts of their own --------------------------------------------------------------------------------------------

OWN = "torchrun --nnodes 1 --nproc_per_node 8 train.py --model_name_or_path gpt2 --bf16"


def script(words):
    return exchange.read([document(words, "run.sh")], {"topology": "hgx-h100", "nodes": 1})


def test_plain_names_of_scripts_mean_what_they_say():
    words = "--seq_len 512 --grad_accum_steps 4 --per_device_train_batch_size 2 --use_activation_checkpointing"
    made = script(f"{OWN.replace('model_name_or_path', 'model_name')} {words}")
    had = exchange.canonical(made.scenario)
    assert made.tables["model"]["name"] == "gpt2"
    assert [had[f"model.{name}"] for name in ("seq_len", "activation_checkpointing")] == [512, "full"]
    assert (had["batch.micro"], had["batch.count"], made.unknown) == (2, 4, ())


@pytest.mark.parametrize(
    "words", ["--train_batch_size 4", "--tokens_batch_size 4", "--ctx_len 512", "--my_seq_length 9"]
)
def test_an_amount_in_other_words_is_never_left_out(words):
    with pytest.raises(ScenarioError, match=f"{words} would say how long a sequence is or how many samples"):
        script(f"{OWN} --block_size 512 {words}")
    assert script(f"{OWN} --block_size 512 --eval_batch_size 4 --max_val_seq_length 9").scenario


@pytest.mark.parametrize("words", ["--use_lora", "--lora True", "--vision_tower openai/clip"])
def test_adapters_and_towers_in_a_scripts_own_words_are_refused(words):
    with pytest.raises(ScenarioError, match=words.split()[0]):
        script(f"{OWN} --block_size 512 {words}")


def test_a_script_whose_name_tells_a_strategy_is_no_ddp():
    with pytest.raises(ScenarioError, match=r"train_fsdp\.py tells of fsdp, and no file says how it shards"):
        script(f"{OWN} --block_size 512".replace("train.py", "train_fsdp.py"))
    said = script(f"{OWN} --block_size 512 --fsdp full_shard".replace("train.py", "train_fsdp.py"))
    assert said.tables["strategy"]["kind"] == "fsdp"


@pytest.mark.parametrize(
    ("words", "whose"),
    [
        ("NPROC_PER_NODE=4 megatron rlhf --model m --tensor_model_parallel_size 4", "Megatron-SWIFT's reinforcement"),
        ("colossalai run --nproc_per_node 4 clm.py --model_name_or_path gpt2", "another program of Colossal-AI's"),
    ],
)
def test_a_command_of_a_framework_that_is_not_read_is_never_another_ones(words, whose):
    with pytest.raises(ScenarioError, match=f"is of {whose}.*, whose files are not read"):
        script(words)


MEGATRON_SWIFT = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen2.5-14B --max_length 4096"


def test_megatron_swift_trains_a_model_by_its_name_with_its_own_defaults():
    words = f"NNODES=2 {MEGATRON_SWIFT} --tensor_model_parallel_size 4 --sequence_parallel true --packing true"
    made = exchange.read([document(words, "run.sh")], {"topology": "hgx-h100"})
    had = exchange.canonical(made.scenario)
    assert made.scenario.file.model.name == "qwen2.5-14b"
    assert (had["model.seq_len"], had["model.dtype"], had["strategy.param_dtype"]) == (4096, "bf16", "bf16")
    assert (made.tables["cluster"]["nodes"], made.tables["cluster"]["gpus_per_node"]) == (2, 8)
    parallel = made.tables["parallel"]
    assert (parallel["tp"], parallel["sequence_parallel"], parallel["global_batch_size"]) == (4, True, 16)
    assert (parallel["recompute_granularity"], parallel["use_distributed_optimizer"]) == ("selective", True)
    assert not any("unknown options" in note for note in made.notes)


@pytest.mark.parametrize(
    ("words", "field", "means"),
    [
        ("--fp16 true", "model.dtype", "fp16"),
        ("--fp8_format hybrid", "model.dtype", "fp8"),
        ("--recompute_granularity none", "parallel.recompute_granularity", None),
        ("--use_distributed_optimizer false", "parallel.use_distributed_optimizer", False),
        ("--packing_length 8192", "model.seq_len", 8192),
    ],
)
def test_what_a_command_of_megatron_swift_says_counts_against_its_defaults(words, field, means):
    assert (exchange.canonical(script(f"{MEGATRON_SWIFT} {words}").scenario).get(field) or None) == (means or None)


def test_experts_of_megatron_swift_are_the_named_models():
    made = script(f"{MEGATRON_SWIFT} --expert_model_parallel_size 4".replace("Qwen2.5-14B", "Qwen3-30B-A3B"))
    assert (made.tables["parallel"]["ep"], made.tables["parallel"]["dispatcher"]) == (4, "alltoall")
    assert script(
        MEGATRON_SWIFT.replace("--model Qwen/Qwen2.5-14B", "--load Qwen2.5-14B-mcore")
    ).scenario.file.model.name


@pytest.mark.parametrize(
    ("words", "rank", "dropout", "linears"),
    [
        ("--tuner_type lora", 8, 0.05, ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]),
        ("--train_type lora --lora_rank 16 --lora_dropout 0 --target_modules all-linear", 16, 0.0, 4),
        ("--tuner_type lora --lora_alpha 64 --target_modules linear_qkv linear_proj", 8, 0.05, 2),
    ],
)
def test_adapters_of_megatron_swift_stand_beside_megatrons_linears(words, rank, dropout, linears):
    made = script(f"{MEGATRON_SWIFT} {words} --tensor_model_parallel_size 2 --sequence_parallel true")
    adapter = made.scenario.file.model.adapter
    assert (adapter.rank, adapter.dropout) == (rank, dropout)
    assert (
        len(adapter.target_modules) == linears if isinstance(linears, int) else list(adapter.target_modules) == linears
    )
    assert any("is as Megatron-Bridge has it" in note for note in made.notes)
    assert not any("unknown options" in note for note in made.notes)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("--tuner_type longlora", "'longlora' is not played; full and lora are"),
        ("--tuner_type lora --modules_to_save embed", "--modules_to_save 'embed' beside adapters is not played"),
        ("--tuner_type lora --lora_bias all", "--lora_bias 'all' beside adapters is not played"),
        ("--tuner_type lora --target_modules other", "'other' is no linear of Megatron that is known"),
    ],
)
def test_adapters_of_megatron_swift_that_are_not_played_are_refused(words, refusal):
    with pytest.raises(ScenarioError, match=refusal):
        script(f"{MEGATRON_SWIFT} {words}")


def test_a_model_that_megatron_swift_does_not_name_is_asked_for():
    with pytest.raises(ScenarioError, match="megatron sft names no model"):
        script(MEGATRON_SWIFT.replace("--model Qwen/Qwen2.5-14B", ""))


def test_a_word_that_ends_in_megatron_starts_nothing():
    words = "cd /opt/megatron && python -m torch.distributed.run --nproc_per_node 8 train.py --project megatron"
    assert script(f"{words} {BARE}").tables["strategy"]["kind"] == "ddp"


BARE = "--per_device_train_batch_size 1 --max_seq_length 1024 --bf16 --model_name_or_path Qwen/Qwen3-8B"


def test_a_script_that_no_launcher_starts_is_told_of():
    notes = script(f"python train.py {BARE}").notes
    assert any("no launcher starts train.py, which alone is one rank" in note for note in notes)
    for words in ("torchrun --nproc_per_node 8 train.py", "CUDA_VISIBLE_DEVICES=0 python train.py"):
        assert not any("no launcher" in note for note in script(f"{words} {BARE}").notes)


def test_world_size_counts_where_no_launcher_sets_it():
    made = script(f"export WORLD_SIZE=1\npython train.py {BARE}")
    assert made.tables["cluster"]["gpus_per_node"] == 1


def test_ms_swift_as_a_module_has_its_defaults():
    text = "--model Qwen/Qwen3-8B --max_length 4096 --lora_rank 64 --gradient_accumulation_steps 4"
    made = script(f"deepspeed --num_gpus 8 --module swift.cli.sft {text} --deepspeed default-zero3")
    assert (made.tables["model"]["adapter"]["rank"], made.tables["strategy"]["kind"]) == (64, "zero")
    with pytest.raises(ScenarioError, match="without NPROC_PER_NODE is one process"):
        script(f"CUDA_VISIBLE_DEVICES=0,1 python -m swift.cli.sft {text}")


SWIFT = "swift sft --model Qwen/Qwen2.5-7B --max_length 2048 --dataset own/x"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("", "", "say NPROC_PER_NODE"),
        ("CUDA_VISIBLE_DEVICES=0,1 ", "", "say NPROC_PER_NODE"),
        ("NPROC_PER_NODE=8 ", "--train_type adalora", "'adalora' is not played; lora and full are"),
        ("NPROC_PER_NODE=8 ", "--train_type full --deepspeed own.json", "give that file too"),
        ("NPROC_PER_NODE=8 ", "--quant_bits 8", "4 bits are played, no others"),
        ("NPROC_PER_NODE=8 ", "--train_type full --quant_bits 4", "without an adapter"),
    ],
)
def test_what_ms_swift_does_otherwise_than_is_played_is_refused(before, after, words):
    with pytest.raises(ScenarioError, match=words):
        script(f"{before}{SWIFT} {after}")


@pytest.mark.parametrize(("ranks", "micro", "passes"), [(8, 1, 2), (4, 2, 2), (8, 4, 1), (1, 1, 16)])
def test_ms_swift_makes_sixteen_samples_a_step_where_no_count_of_passes_is_said(ranks, micro, passes):
    made = script(f"NPROC_PER_NODE={ranks} {SWIFT} --per_device_train_batch_size {micro}")
    assert made.tables["strategy"].get("gradient_accumulation_steps", 1) == passes
    assert any(f"gradient_accumulation_steps {passes}" in note for note in made.notes)


# ---- Megatron-LM's forks, and DeepSpeed's ----------------------------------------------------------------------------

SIZES = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --global-batch-size 8 --bf16"
)


@pytest.mark.parametrize("words", ["--num-shared-experts 2", "--qk-nope-head-dim 128"])
def test_a_model_in_the_words_of_a_fork_is_not_taken_for_a_plain_one(words):
    command = f"torchrun --nproc_per_node 8 pretrain_deepseek.py {SIZES} {words}"
    with pytest.raises(ScenarioError, match="in the words of a fork"):
        script(command)
    for small, own in (("layers 4", "layers 27"), ("size 512", "size 2048"), ("heads 8", "heads 16")):
        command = command.replace(small, own)  # sizes that contradict the model given beside them are refused
    given = exchange.read([document(command, "run.sh")], {"topology": "hgx-h100", "nodes": 1}, model="deepseek-v2-lite")
    assert given.tables["model"]["name"] == "deepseek-v2-lite"


@pytest.mark.parametrize(
    "words",
    [
        "--num-experts 8 --moe-latent-size 128",
        "--experimental-attention-variant gated_delta_net",
        "--linear-attention-freq 4",
        "--attention-output-gate",
        "--heterogeneous-layers-config-path blocks.json",
        "--retro-add-retriever",
        "--num-experts 8 --first-k-dense-replace 1",
    ],
)
def test_blocks_that_no_option_describes_are_asked_for_and_not_left_out(words):
    with pytest.raises(ScenarioError, match=r"which sizes do not tell; describe it in a config\.json"):
        script(f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} {words}")


def test_products_that_deepspeed_splits_beside_the_trainer_are_refused():
    config = '{"train_batch_size": 64, "bf16": {"enabled": true}, "tensor_parallel": {"autotp_size": DEGREE}}'
    command = "deepspeed --num_nodes 1 --num_gpus 8 train.py --deepspeed ds.json --model_name_or_path Qwen/Qwen3-8B"

    def made(degree):
        words = f"{command} --per_device_train_batch_size 1 --max_length 1024"
        files = [document(words, "run.sh"), document(config.replace("DEGREE", degree), "ds.json")]
        return exchange.read(files, {"topology": "hgx-h100"})

    assert made("1").tables["strategy"]["gradient_accumulation_steps"] == 8
    for degree in ("2", "16"):
        with pytest.raises(ScenarioError, match=f"tensor_parallel.autotp_size {degree} splits products by DeepSpeed"):
            made(degree)


def test_megatron_deepspeed_computes_again_what_granularity_says():
    config = '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}'
    words = f"deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt.py --deepspeed_config ds.json {SIZES}"

    def recomputed(more):
        files = [document(f"{words} {more}", "run.sh"), document(config, "ds.json")]
        return exchange.canonical(exchange.read(files, {"topology": "hgx-h100"}).scenario)[
            "model.activation_checkpointing"
        ]

    assert [recomputed(more) for more in ("", "--recompute-granularity full")] == ["none", "full"]
    with pytest.raises(ScenarioError, match="'selective' is not a choice"):
        recomputed("--recompute-granularity selective")


def test_a_default_that_a_script_assigns_holds_afterwards():
    made = script(f': "${{TP:=2}}"\n: ${{PP:=1}}\n{OWN} --block_size 512 --per_device_train_batch_size $TP\n')
    assert exchange.canonical(made.scenario)["batch.micro"] == 2


# ---- torchtitan's configurations of Python ---------------------------------------------------------------------------

TITAN = """
def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B", attn_backend="flex"),
        training=TrainingConfig(local_batch_size=1, seq_len=8192{graphs}),
    )


def changed() -> Trainer.Config:
    \"\"\"Of another.\"\"\"
    config = llama3_8b()
    enable_fused_swiglu(config)
    return config
"""


@pytest.mark.parametrize(
    ("word", "played", "told"),
    [("grouped_mm", "grouped_mm", False), ("sonicmoe", "grouped_mm", True), ("eager", None, False)],
)
def test_axolotls_experts_are_one_product_where_it_says_so(word, played, told):
    text = f"{AXOLOTL}experts_implementation: {word}\n".replace("base_model: ", "base_model: Qwen/Qwen3-30B-A3B #")
    made = read(text)
    assert made.tables["model"].get("options", {}).get("experts_implementation") == played
    assert any("is played as grouped_mm" in note for note in made.notes) is told
    assert not made.unplayed.keys() & {"experts_implementation"}


def test_axolotls_dense_models_have_no_experts_to_join_and_a_loop_is_told():
    assert "options" not in read(f"{AXOLOTL}experts_implementation: grouped_mm\n").tables["model"]
    assert "experts_implementation" in read(f"{AXOLOTL}experts_implementation: batched_mm\n").unplayed


def titan(graphs="", name="llama3_8b"):
    files = [
        document(f"torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config {name}", "run.sh"),
        document(TITAN.replace("{graphs}", graphs), "config_registry.py"),
    ]
    return exchange.read(files, {"topology": "hgx-h100", "nodes": 1})


def test_torchtitan_03_has_a_step_in_one_graph_unless_it_is_told_not_to():
    usual, plain = titan(), titan(", disable_cuda_graphs=True")
    assert usual.tables["run"]["cuda_graph"] == ["full_iteration"]
    assert any("one CUDA graph, as torchtitan 0.3 has them" in note for note in usual.notes)
    assert "cuda_graph" not in plain.tables["run"]


def test_what_changes_a_configuration_and_is_not_read_is_said():
    made = titan(name="changed")
    assert [note for note in made.notes if "enable_fused_swiglu(config) is not read" in note]
    assert "model_spec.attn_backend" in made.unplayed
    assert not any("is not read" in note for note in titan().notes)


VERSION_1 = """
model: Qwen/Qwen3-4B
model_class: llm
template: qwen3_nothink
dist_config:
  name: fsdp2
train_dataset: data/own.yaml
micro_batch_size: 2
"""


def test_version_1_of_llama_factory_trains_the_weights_as_they_are_loaded():
    made = read(f"{VERSION_1}global_batch_size: 64\n")
    had = exchange.canonical(made.scenario)
    assert had["strategy.kind"] == "fsdp"
    assert had["strategy.version"] == 2
    assert had["strategy.orig_dtype"] == had["strategy.param_dtype"] == "bf16"
    assert had["strategy.reduce_dtype"] == "fp32"
    assert had["batch.micro"] == 2
    assert had["batch.count"] == 4
    assert had["model.activation_checkpointing"] == "full"
    assert had["model.seq_len"] == 2048
    assert had["run.optimizer_impl"] == "foreach"
    assert any("version 1 of LLaMA-Factory" in note for note in made.notes)
    assert not made.unknown


def test_version_1_without_shards_is_ddp_and_its_own_words_are_read():
    alone = VERSION_1.replace("dist_config:\n  name: fsdp2\n", "")
    had = fields(f"{alone}enable_activation_checkpointing: false\nflash_attn: flash_attention_2\ncutoff_len: 512\n")
    assert had["strategy.kind"] == "ddp"
    assert had["strategy.param_dtype"] == "bf16"
    assert had["model.activation_checkpointing"] == "none"
    assert had["model.attention"] == "fa2"
    assert had["model.seq_len"] == 512
    whole = fields(f"{VERSION_1}bf16: false\n")
    assert whole["strategy.orig_dtype"] == "bf16"
    assert whole["model.dtype"] == "fp32"
    kept = fields(VERSION_1.replace("name: fsdp2", "name: fsdp2\n  reshard_after_forward: false"))
    assert kept["strategy.reshard_after_forward"] is False
    liger = fields(f"{VERSION_1}kernel_config:\n  name: liger_kernel\n  include_kernels: auto\n")
    assert liger["model.implementation"] == "liger"
    assert liger.get("model.loss") != "liger"  # its loss needs the logits


def test_version_1_has_adapters_of_its_own_section():
    tuned = f"{VERSION_1}peft_config:\n  name: lora\n  r: 16\n  target_modules: all\n"
    had = fields(f"{tuned}quant_config:\n  name: bnb\n  quantization_bit: 4\n")
    assert had["model.adapter.rank"] == 16
    assert had["model.adapter.dropout"] == 0.05
    assert list(had["model.adapter.target_modules"]) == ["all-linear"]
    assert had["model.adapter.load_in_4bit"] is True


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("peft_config:\n  name: freeze\n", "'freeze' is not played"),
        ("peft_config:\n  name: lora\n  export_dir: out\n", "merges adapters and trains nothing"),
        ("optim_config:\n  name: own\n", "is of a plugin"),
    ],
)
def test_what_version_1_has_and_nothing_plays_is_refused(more, why):
    with pytest.raises(ScenarioError, match=why):
        read(f"{VERSION_1}{more}")
    with pytest.raises(ScenarioError, match="splits sequences by Ulysses"):
        read(VERSION_1.replace("name: fsdp2", "name: fsdp2\n  cp_size: 2"))


def test_version_1_asks_for_the_file_that_deepspeed_names():
    with pytest.raises(ScenarioError, match=r"names conf/z3\.json; give that file too"):
        read(VERSION_1.replace("name: fsdp2", "name: deepspeed\n  config_file: conf/z3.json"))
    with pytest.raises(ScenarioError, match=r"without dist_config\.config_file"):
        read(VERSION_1.replace("name: fsdp2", "name: deepspeed"))


@pytest.mark.parametrize(
    ("name", "head", "why"),
    [
        ("qwen3_fsdp2.yaml", "", "tells of fsdp, and no file says how it shards"),
        ("zero3/full.yaml", "", "tells of zero3, and no file says how it shards"),
        (
            "full.yaml",
            "# accelerate launch \\\n#   --config_file conf/f2.yaml train.py\n",
            r"launched with conf/f2\.yaml",
        ),
    ],
)
def test_arguments_whose_name_or_comment_tells_of_shards_are_no_ddp(name, head, why):
    machine = {"topology": "hgx-h100", "nodes": 1}
    arguments = document(f"{head}{FACTORY}", name)
    with pytest.raises(ScenarioError, match=why):
        exchange.read([arguments], machine)
    beside = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
    told = exchange.read([document(f"{head}{FACTORY}", name), document(beside, "own.yaml")], machine)
    assert exchange.canonical(told.scenario)["strategy.kind"] == "fsdp"


def test_arguments_alone_are_ddp_and_that_is_said():
    assert any("no file says how it is launched: DDP" in note for note in read(FACTORY).notes)


def test_fewer_workers_than_a_node_has_gpus_are_as_many_ranks():
    made = exchange.read([document(f"{FACTORY}ray_num_workers: 4\n", "a.yaml")], {"topology": "hgx-h100"})
    assert made.tables["cluster"]["gpus_per_node"] == 4
    assert not any("as asked for" in note for note in made.notes)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("own/Llama-3-8B-AWQ", "AWQ's 4 bits"),
        ("own/llama-3-8b-gptq-int4", "GPTQ's bits"),
        ("own/Llama-3-8B-AQLM-2Bit", "AQLM's bits"),
        ("own/Qwen3-30B-A3B-NVFP4", "NVFP4"),
    ],
)
def test_weights_in_bits_of_another_kind_are_refused(name, why):
    with pytest.raises(ScenarioError, match=why):
        read(FACTORY.replace("Qwen/Qwen3-4B", name))


def test_what_another_backend_splits_is_refused_by_what_it_is():
    with pytest.raises(ScenarioError, match="is of LLaMA-Factory's Megatron backend"):
        read(f"{FACTORY}tensor_model_parallel_size: 2\n")
    with pytest.raises(ScenarioError, match="places experts on different ranks"):
        read(f"{AXOLOTL}expert_parallel_size: 4\n")


def test_axolotl_has_states_in_4_bits_and_ligers_kernels_under_a_compiler():
    assert fields(f"{AXOLOTL}optimizer: adamw_torch_4bit\n")["run.optimizer"] == "adamw_4bit"
    had = fields(f"{AXOLOTL}torch_compile: true\nliger_rms_norm: true\n")
    assert had["model.implementation"] == "liger"


@pytest.mark.parametrize("stage", [0, 1])
def test_presets_of_swift_below_stage_2_have_its_buckets_and_masters(stage):
    line = (
        f"NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B --train_type full --deepspeed zero{stage} --max_length 512"
    )
    had = exchange.canonical(exchange.read([document(line, "a.sh")], {"topology": "hgx-h100"}).scenario)
    if stage:
        assert had["strategy.zero_optimization.stage"] == 1
        assert had["strategy.zero_optimization.reduce_bucket_size"] == 200_000_000
    else:
        assert had["strategy.framework"] == "megatron"
        assert had["parallel.grad_reduce_in_fp32"] is False


SWIFT_FILE = "model: Qwen/Qwen3-4B\ntuner_type: lora\nlora_rank: 16\nmax_length: 512\nper_device_train_batch_size: 2\n"


@pytest.mark.parametrize("command", ["swift sft own.yaml", "swift sft --config own.yaml"])
def test_a_file_of_swifts_arguments_counts_where_its_command_says_nothing(command):
    files = [document(f"NPROC_PER_NODE=4 {command}\n", "a.sh"), document(SWIFT_FILE, "own.yaml")]
    had = exchange.canonical(exchange.read(files, {"topology": "hgx-h100"}).scenario)
    assert (had["batch.micro"], had["batch.count"]) == (2, 2)
    assert (had["model.adapter.rank"], had["model.seq_len"]) == (16, 512)
    files = [document(f"NPROC_PER_NODE=4 {command} --max_length 1024\n", "a.sh"), document(SWIFT_FILE, "own.yaml")]
    assert exchange.canonical(exchange.read(files, {"topology": "hgx-h100"}).scenario)["model.seq_len"] == 1024


def test_a_file_of_swifts_arguments_alone_has_swifts_defaults():
    had = fields(f"{SWIFT_FILE}gradient_accumulation_steps: 4\n")
    assert (had["batch.micro"], had["batch.count"], had["model.adapter.rank"]) == (2, 4, 16)
    assert had["model.activation_checkpointing"] == "full"
    assert had["model.dtype"] == "bf16"
    with pytest.raises(ScenarioError, match="gradient_accumulation_steps is not said"):
        read(SWIFT_FILE)


@pytest.mark.parametrize("degree", [4, 16])
def test_sequences_that_ulysses_splits_are_refused(degree):
    with pytest.raises(ScenarioError, match="splits sequences by Ulysses"):
        read(f"{FACTORY}sequence_parallel_size: {degree}\n")
    assert read(f"{FACTORY}sequence_parallel_size: 1\n").scenario


def test_arguments_in_sections_of_a_scripts_own_are_not_left_out():
    own = "model_name: Qwen/Qwen3-4B\ntraining:\n  per_device_train_batch_size: 2\n  bf16: true\n"
    command = document("accelerate launch --multi_gpu --num_processes 8 own.py --config own.yaml\n", "a.sh")
    with pytest.raises(ScenarioError, match=r"training\.per_device_train_batch_size is in a section of a script's own"):
        exchange.read([command, document(own, "own.yaml")], {"topology": "hgx-h100"})


def test_foundrys_deepspeed_is_no_ddp():
    text = "max_seq_len: 512\nmodel:\n  name: hf_causal_lm\n  pretrained_model_name_or_path: meta-llama/Llama-2-7b-hf\n"
    text += "train_loader: {name: text}\nglobal_train_batch_size: 64\ndevice_train_microbatch_size: 4\n"
    assert read(text).framework.name == "foundry"
    with pytest.raises(ScenarioError, match="shards by DeepSpeed"):
        read(f"{text}deepspeed_config:\n  zero_optimization:\n    stage: 3\n")


def test_adapters_that_begin_as_a_models_own_weights_train_as_others_do():
    lora = FACTORY.replace("finetuning_type: full", "finetuning_type: lora\nlora_rank: 8\nlora_target: all")
    had = fields(f"{lora}pissa_init: true\npissa_iter: 16\n")
    assert had["model.adapter.rank"] == 8
    command = "python scripts/pissa_init.py --model_name_or_path Qwen/Qwen3-4B --output_dir out --pissa_iter 16\n"
    with pytest.raises(ScenarioError, match="trains nothing"):
        script(command)


def test_ranks_that_fill_no_nodes_are_asked_for():
    text = document(f"{FACTORY}ray_num_workers: 12\n", "a.yaml")
    with pytest.raises(ScenarioError, match="12 does not fill nodes of 8 GPUs; give --nodes and --gpus-per-node"):
        exchange.read([text], {"topology": "hgx-h100"})
    asked = exchange.read([text], {"topology": "hgx-h100", "nodes": 2, "gpus_per_node": 6})
    assert asked.scenario


def test_an_import_refuses_what_its_run_would():
    launch = (
        AXOLOTL + "adapter: lora\nlora_r: 8\nlora_target_linear: true\nfsdp_config:\n  fsdp_offload_params: false\n"
    )
    for version, said in (("", "no fsdp_config.fsdp_version"), ("  fsdp_version: 1\n", "fsdp_version 1")):
        why = rf"a\.yaml: .*{said}.*: version = 1 has flat parameters.* use version = 2"
        with pytest.raises(ScenarioError, match=why):
            read(f"{launch}{version}")
    second = read(f"{launch}  fsdp_version: 2\n").scenario
    assert second.prepare().model.partly_frozen


@pytest.mark.parametrize(("program", "tokens"), [("src/train_bash.py", 1024), ("src/train.py", 2048)])
def test_earlier_releases_of_llamafactory_had_shorter_sequences(program, tokens):
    run = f"deepspeed --num_gpus 8 {program} --stage sft --do_train --finetuning_type full --template x --bf16"
    made = script(f"{run} --model_name_or_path Qwen/Qwen3-4B --per_device_train_batch_size 1 --deepspeed_stage 0\n")
    assert made.scenario.file.model.seq_len == tokens
