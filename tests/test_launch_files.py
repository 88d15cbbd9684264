"""What other people's launch files mean: names, files that name each other, references, and what a script trains."""

from __future__ import annotations

import json

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document
from clustersim.files.launch.table import load

pytest.importorskip("yaml", reason="needs pyyaml (the exchange extra)")

MACHINE = {"topology": "hgx-h100", "nodes": 1}
ZERO3 = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
GPT = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 "
GPT += "--micro-batch-size 4 --global-batch-size 32 --fp16"
TRAINER = (
    "train.py --model_name_or_path meta-llama/Meta-Llama-3-8B --per_device_train_batch_size 2 --max_seq_length 2048"
)


def read(*texts, machine=MACHINE, **asked):
    """An import of texts by name."""
    return exchange.read([document(text, name) for name, text in texts], machine, **asked)


def script(words):
    return "run.sh", f"torchrun --nproc_per_node 8 --nnodes 1 {words}"


def leaves(found):
    return exchange.canonical(found.scenario)


# ---- what a script trains --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("pretrain_bert.py", "bert-large-uncased"),
        ("examples/bert/pretrain_bert.py", "bert-large-uncased"),
        ("pretrain_gpt.py", "gpt2-medium"),
        ("train.py", "gpt2-medium"),
    ],
)
def test_the_script_says_whether_tokens_see_all_others(program, name):
    found = read(script(f"{program} {GPT}"))
    assert found.tables["model"]["name"] == name


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("pretrain_t5.py", "encoder with a decoder"),
        ("pretrain_vlm.py", "image encoder"),
        ("pretrain_mamba.py", "Mamba"),
        ("pretrain_vision_classify.py", "image model"),
        ("pretrain_ict.py", "two encoders"),
        ("pretrain_retro.py", "retrieval"),
    ],
)
def test_a_script_whose_model_no_sizes_tell_is_refused_unless_the_model_is_given(program, why):
    with pytest.raises(ScenarioError, match=rf"run.sh: {program[:-3]} trains .*{why}.*--model"):
        read(script(f"{program} {GPT}"))
    found = read(script(f"{program} {GPT}"), model="gpt2-medium")
    assert found.tables["model"]["name"] == "gpt2-medium"


@pytest.mark.parametrize(
    "words", ["--freeze-LM", "--freeze-ViT", "--img-embedding-idx 1", "--language-model-type=mistral_7b"]
)
def test_a_script_of_any_name_with_an_image_encoder_is_no_language_model_alone(words: str):
    with pytest.raises(ScenarioError, match="language model with an image encoder"):
        read(script(f"examples/multimodal/train.py {GPT} {words}"))


NEMO = """
run: {name: NAME, results_dir: "${base_results_dir}/${.name}"}
trainer: {num_nodes: 2, devices: 8, precision: bf16}
model:
  micro_batch_size: 1
  global_batch_size: 32
  encoder_seq_length: 2048
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 24
  hidden_size: 1024
  ffn_hidden_size: FFN
  num_attention_heads: 16
  megatron_amp_O2: true
  optim: {name: distributed_fused_adam, bucket_cap_mb: "${training.model.global_batch_size}"}
  data: {seq_length: "${training.model.encoder_seq_length}", data_prefix: [1.0, "${data_dir}/x"]}
"""


def nemo(ffn="4096", name="gpt3_350m", **changed):
    text = NEMO.replace("FFN", ffn).replace("NAME", name)
    for key, value in changed.items():
        text = text.replace(f"  {key}: ", f"  {key}: {value} # ")
    return "gpt.yaml", text


@pytest.mark.parametrize(
    ("ffn", "width"),
    [
        ("${multiply:4, ${.hidden_size}}", 4096),
        ("${multiply:4,${model.hidden_size}}", 4096),
        ("${multiply:${training.model.num_attention_heads}, 256}", 4096),
        ("${eval:'4 * ${.hidden_size}'}", 4096),
        ("${eval:${.hidden_size} * 8 // 2}", 4096),
        ("${calc:'int(${.hidden_size} / 0.25)'}", 4096),
        ("${divide:${multiply:8, ${.hidden_size}}, 2}", 4096),
        ("${.hidden_size}", 1024),
        ("${model.encoder_seq_length}", 2048),
        ("${..model.hidden_size}", 1024),
        ("${oc.decode:${oc.env:FFN,3072}}", 3072),
        ("${oc.decode:'3072'}", 3072),
        ("${oc.decode:'${oc.env:FFN,3072}'}", 3072),
        ("${multiply:${oc.decode:'3'},${.hidden_size}}", 3072),
        ("${oc.env:FFN,'3072'}", 3072),
        ("${oc.select:model.hidden_size,3072}", 1024),
        ("${oc.select:model.nobody,3072}", 3072),
        ("${add:${.hidden_size}, ${.hidden_size}, 1024}", 3072),
        ("${int_div:9000, 2}", 4500),
    ],
)
def test_references_and_products_of_omegaconf_are_worked_out(ffn, width):
    found = read(nemo(ffn))
    assert leaves(found)["shape.d_ff"] == width
    assert leaves(found)["model.seq_len"] == 2048


NAMED = "torchrun --nproc_per_node 8 megatron_gpt_pretraining.py --config-name gpt"


@pytest.mark.parametrize(
    ("script", "width"),
    [
        (f"export FFN=4096\n{NAMED}\n", 4096),
        (f"FFN=4096 {NAMED}\n", 4096),
        (f"FFN=4096\n{NAMED}\n", 3072),  # which the shell keeps to itself
        (f"{NAMED}\n", 3072),
    ],
)
def test_a_file_sees_the_variables_that_its_script_hands_on(script, width):
    for ffn in ("${oc.decode:${oc.env:FFN,3072}}", "${multiply:1,${oc.env:FFN,${.nobody}3072}}"):
        if width == 3072 and "nobody" in ffn:
            continue
        assert leaves(read(nemo(ffn), ("run.sh", script)))["shape.d_ff"] == width


def test_what_refers_to_a_field_that_a_command_gives_has_the_commands_value():
    ffn = nemo("${multiply:2,${.hidden_size}}")
    assert leaves(read(ffn, ("run.sh", f"{NAMED}\n")))["shape.d_ff"] == 2048
    given = leaves(read(ffn, ("run.sh", f"{NAMED} model.hidden_size=2048\n")))
    assert (given["shape.d_model"], given["shape.d_ff"]) == (2048, 4096)


@pytest.mark.parametrize(
    "given",
    [
        "'model.ffn_hidden_size=${oc.decode:3072}'",
        "model.ffn_hidden_size='${oc.env:FFN,3072}'",
        'model.ffn_hidden_size="\\${multiply:\\${model.hidden_size},3}"',
        "model.ffn_hidden_size='${add:${.hidden_size},2048}'",
    ],
)
def test_what_a_command_gives_in_omegaconfs_words_is_worked_out_too(given):
    script = f"torchrun --nproc_per_node 8 megatron_gpt_pretraining.py --config-name gpt {given}\n"
    found = read(nemo(), ("run.sh", script))
    assert leaves(found)["shape.d_ff"] == 3072


@pytest.mark.parametrize(
    ("ffn", "said"),
    [
        ("???", r"model.ffn_hidden_size is \?\?\?, which somebody must fill in"),
        ("${nobody.says}", "model.ffn_hidden_size: .*nobody.says.* is set nowhere"),
        ("${multiply:4, ${nobody}}", "is set nowhere"),
        ("${.ffn_hidden_size}", "refers to itself"),
        ("${frobnicate:4}", "is set nowhere"),
        ("${divide:4, 0}", "is set nowhere"),
    ],
)
def test_what_no_node_says_is_asked_for_where_it_matters(ffn, said):
    with pytest.raises(ScenarioError, match=said) as wrong:
        read(nemo(ffn))
    assert "\n" not in str(wrong.value)


def test_a_nemo_file_says_by_its_name_what_it_trains():
    assert read(nemo(name="bert_345m")).tables["model"]["name"].startswith("bert-large")
    with pytest.raises(ScenarioError, match="t5_220m trains an encoder with a decoder"):
        read(nemo(name="t5_220m"))


def test_without_o2_parameters_of_nemo_stay_in_fp32():
    assert leaves(read(nemo()))["strategy.param_dtype"] == "bf16"
    assert leaves(read(nemo(megatron_amp_O2="false")))["strategy.param_dtype"] == "fp32"


# ---- files that name each other --------------------------------------------------------------------------------------

ACCELERATE = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {deepspeed_config_file: ds_zero3.json, zero3_init_flag: true}
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 8
"""


def test_a_file_that_another_names_is_asked_for_and_counts():
    launch = "acc.sh", f"accelerate launch --config_file acc.yaml {TRAINER} --bf16 True"
    own = "acc.yaml", ACCELERATE
    with pytest.raises(ScenarioError, match=r"acc.sh.*config_file names acc.yaml; give that file too"):
        read(launch)
    with pytest.raises(ScenarioError, match=r"acc.yaml: .*config_file names ds_zero3.json; give that file too"):
        read(launch, own)
    found = read(launch, own, ("ds_zero3.json", json.dumps(ZERO3)))
    assert leaves(found)["strategy.zero_optimization.stage"] == 3
    other = read(launch, own, ("mine.json", json.dumps(ZERO3)))
    assert leaves(other) == leaves(found)
    assert any("mine.json is taken for ds_zero3.json" in note for note in other.notes)


def test_auto_is_what_the_trainer_puts_for_the_model():
    found = read(
        ("train.sh", f"deepspeed --num_gpus 8 {TRAINER} --deepspeed ds.json --bf16 True"),
        ("ds.json", json.dumps(ZERO3)),
    )
    had = leaves(found)
    width = 4096
    assert had["strategy.zero_optimization.reduce_bucket_size"] == width**2
    assert had["strategy.zero_optimization.stage3_prefetch_bucket_size"] == int(0.9 * width**2)
    assert had["strategy.zero_optimization.stage3_param_persistence_threshold"] == 10 * width
    assert (had["batch.micro"], had["strategy.param_dtype"]) == (2, "bf16")
    assert any("4,096 wide" in note for note in found.notes)


@pytest.mark.parametrize(
    ("zero", "field", "value"),
    [
        ({"stage": 3, "prefetch_bucket_size": 7e6}, "stage3_prefetch_bucket_size", 7e6),
        ({"stage": 3, "param_persistence_threshold": 9}, "stage3_param_persistence_threshold", 9),
        ({"stage": 2, "cpu_offload": True}, "offload_optimizer.device", "cpu"),
    ],
)
def test_deepspeed_takes_two_names_for_a_field(zero, field, value):
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1, "bfloat16": {"enabled": True}}
    had = leaves(read(("ds.json", json.dumps(config)), model="llama3-8b"))
    assert had[f"strategy.zero_optimization.{field}"] == value
    assert had["strategy.param_dtype"] == "bf16"


def test_two_names_of_one_field_with_two_values_contradict():
    zero = {"stage": 3, "prefetch_bucket_size": 7, "stage3_prefetch_bucket_size": 8}
    with pytest.raises(ScenarioError, match="are one option"):
        read(("ds.json", json.dumps({"zero_optimization": zero, "train_batch_size": 8})), model="llama3-8b")


# ---- Trainer, TRL, LLaMA-Factory, axolotl ----------------------------------------------------------------------------

FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
finetuning_type: full
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
flash_attn: fa2
gradient_checkpointing: true
"""


def test_arguments_in_a_file_of_their_own_are_those_of_a_script():
    said = FACTORY.replace("finetuning_type: full\n", "").strip().splitlines()
    words = " ".join(f"--{name} {value}" for name, _, value in (line.partition(": ") for line in said))
    files = read(("sft.yaml", FACTORY))
    assert leaves(files) == leaves(read(script(f"train.py {words} --use_reentrant_gc true")))  # as LLaMA-Factory has it
    assert files.tables["model"]["name"] == "llama3-8b"
    assert any("has the sizes of llama3-8b" in note for note in files.notes)


def test_axolotls_names_mean_the_same():
    text = FACTORY.replace("model_name_or_path", "base_model").replace("cutoff_len", "sequence_len")
    text = text.replace("per_device_train_batch_size", "micro_batch_size").replace(
        "flash_attn: fa2", "flash_attention: true"
    )
    text = text.replace("bf16: true", "bf16: auto")
    loaded = f"{FACTORY}torch_dtype: bfloat16\n"  # which axolotl does, and LLaMA-Factory not
    assert leaves(read(("ax.yml", text))) == leaves(read(("sft.yaml", loaded)))
    sharded = read(("ax.yml", f"{text}fsdp_version: 2\nfsdp_config:\n  offload_params: true\n"))
    assert (leaves(sharded)["strategy.kind"], leaves(sharded)["strategy.cpu_offload"]) == ("fsdp", True)


TRL = "--use_peft --lora_r 32 --lora_alpha 16 --lora_target_modules q_proj k_proj --load_in_4bit --use_bnb_nested_quant"
AXOLOTL = """
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_modules_to_save:
  - lm_head
"""
LORA = "finetuning_type: lora\nlora_rank: 32\nlora_target: all\nquantization_bit: 4\nquantization_method: bnb\n"
PEFT = {"peft_type": "LORA", "r": 32, "target_modules": ["q_proj", "v_proj"], "bias": "none", "lora_alpha": 16}


@pytest.mark.parametrize(
    ("files", "adapter"),
    [
        (
            [script(f"{TRAINER} {TRL}")],
            {
                "target_modules": ["q_proj", "k_proj"],
                "dropout": 0.05,
                "load_in_4bit": True,
                "bnb_4bit_use_double_quant": True,
            },
        ),
        (
            [("ax.yml", FACTORY.replace("model_name_or_path", "base_model").replace("finetuning_type: full", AXOLOTL))],
            {
                "target_modules": ["all-linear"],
                "dropout": 0.05,
                "modules_to_save": ["lm_head"],
                "load_in_4bit": True,
                "bnb_4bit_use_double_quant": True,
            },
        ),
        (
            [("sft.yaml", FACTORY.replace("finetuning_type: full", LORA))],
            {"target_modules": ["all-linear"], "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        ),
        (
            [script(TRAINER), ("adapter_config.json", json.dumps(PEFT))],
            {"target_modules": ["q_proj", "v_proj"]},
        ),
    ],
    ids=["trl", "axolotl", "llama-factory", "peft"],
)
def test_adapters_are_read_in_every_librarys_words(files, adapter):
    found = read(*files)
    assert found.tables["model"]["adapter"] == {"rank": 32, **adapter}
    assert not set(found.unplayed) & {"lora_r", "lora_alpha", "adapter", "use_peft", "load_in_4bit", "quantization_bit"}


def test_targets_that_nobody_says_are_pefts_and_said():
    found = read(script(f"{TRAINER} --use_peft"))
    assert found.tables["model"]["adapter"] == {"rank": 16, "target_modules": ["q_proj", "v_proj"], "dropout": 0.05}
    assert any("no lora_target_modules; q_proj and v_proj have one" in note for note in found.notes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--use_peft --lora_target_modules qproj", "did you mean 'q_proj'?"),
        ("--use_peft --lora_target_modules 'layers.[0-9]+.q'", "'layers.[0-9]+.q' names no linear"),
        ("--use_peft --lora_target_modules '(layers.+)+q'", "no regular expression of names, or one of repeats"),
        ("--use_peft --lora_target_modules 'layers.[0-9+'", "no regular expression of names"),
        ("--load_in_4bit", "without an adapter: weights in 4 bits are not trained"),
        ("--use_peft --lora_r many", "expected a whole number"),
        ("--adapter lora --lora_target_linear true", "without lora_r: say of what rank they are"),
        ("--adapter lora --lora_r 8", "without lora_target_modules or lora_target_linear"),
        ("--finetuning_type lora --quantization_bit 8", "4 bits are played, no others"),
    ],
)
def test_an_adapter_that_nobody_can_play_is_refused(words, message):
    with pytest.raises(ScenarioError) as error:
        read(script(f"{TRAINER} {words}"))
    assert message in str(error.value)


def test_what_is_no_lora_is_said_not_to_be_played():
    text = FACTORY.replace("finetuning_type: full", "adapter: llama-adapter")
    assert "all parameters are trained" in read(("sft.yaml", text)).unplayed.values()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--optim adamw_bnb_8bit", {"run.optimizer": "adamw_8bit"}),
        ("--optim paged_adamw_32bit", {"run.optimizer": "paged_adamw"}),
        ("--optim adafactor", {"run.optimizer": "adafactor"}),
        ("--adafactor True", {"run.optimizer": "adafactor"}),
        ("--optim adamw_torch_fused", {"run.optimizer": "adamw", "run.optimizer_impl": "fused"}),
        ("--use_liger_kernel", {"model.implementation": "liger", "model.loss": "liger"}),
    ],
)
def test_optimizers_and_fused_kernels_are_read(words, said):
    had = leaves(read(script(f"{TRAINER} {words}")))
    assert {name: had.get(name) for name in said} == said


def test_offloaded_activations_are_read():
    assert read(script(f"{TRAINER} --activation_offloading")).tables["model"]["activation_offloading"] is True


def test_packing_says_what_it_leaves_open():
    found = read(script(f"{TRAINER} --packing true"))
    assert "[model.packing] says how long documents are" in found.unplayed["--packing"]


@pytest.mark.parametrize(
    ("file", "argument", "kept"),
    [("true", "", "full"), ("false", "--gradient_checkpointing True", "full"), ("false", "", None)],
)
def test_either_switch_of_checkpointing_turns_it_on(file, argument, kept):
    config = f"distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_activation_checkpointing: {file}\n"
    found = read(("acc.yaml", config), script(f"{TRAINER} {argument}"))
    assert found.tables["model"].get("activation_checkpointing") == kept


def test_fsdp_of_trainers_arguments_is_fsdp():
    had = leaves(read(script(f'{TRAINER} --fsdp "shard_grad_op auto_wrap offload" --bf16')))
    assert (had["strategy.kind"], had["strategy.sharding_strategy"], had["strategy.cpu_offload"]) == (
        "fsdp",
        "SHARD_GRAD_OP",
        True,
    )
    with pytest.raises(ScenarioError, match="'half_shard' is not a choice"):
        read(script(f"{TRAINER} --fsdp half_shard"))


def test_options_of_accelerate_launch_count_as_its_file_does():
    words = "accelerate launch --use_deepspeed --zero_stage 3 --mixed_precision bf16 --num_processes 8 "
    had = leaves(read(("run.sh", f"{words}{TRAINER}"), machine={"topology": "hgx-h100"}))
    assert (had["strategy.kind"], had["strategy.zero_optimization.stage"]) == ("zero", 3)
    assert had["model.dtype"] == "bf16"


def test_a_length_that_nobody_says_is_said():
    found = read(script(TRAINER.replace("--max_seq_length 2048", "")))
    assert any("how long a sequence is: 8,192 tokens" in note for note in found.notes)


# ---- an option means what its framework means ------------------------------------------------------------------------

TITAN = """
[model]
name = "llama3"
flavor = "8B"
[parallelism]
[compile]
enable = true
"""


@pytest.mark.parametrize(
    ("components", "implementation"),
    [('["loss"]', "flash"), ('["model", "loss"]', "fused"), ('["model"]', "fused"), (None, "fused"), ("[]", "flash")],
)
def test_torchtitan_compiles_the_components_that_it_is_told(components, implementation):
    text = TITAN + (f"components = {components}\n" if components else "")
    assert read(("a.toml", text)).tables["model"]["implementation"] == implementation


@pytest.mark.parametrize(
    ("degrees", "ranks", "fits"),
    [
        ({"replicate": 1, "shard": 1}, 8, False),
        ({"replicate": 1, "shard": 1}, 1, True),
        ({"shard": 4}, 8, False),
        ({"replicate": 2, "shard": 4}, 8, True),
        ({"replicate": 2, "shard": -1}, 8, True),
        ({"replicate": 8, "shard": 1}, 8, True),
        ({"replicate": 2, "shard": 2}, 8, False),
    ],
)
def test_degrees_that_torchtitan_is_told_are_as_many_ranks_as_the_job_has(degrees, ranks: int, fits: bool):
    lines = "".join(f"data_parallel_{name}_degree = {count}\n" for name, count in degrees.items())
    text = TITAN.replace("[parallelism]\n", f"[parallelism]\n{lines}")
    assert lines in text
    machine = {"topology": "hgx-h100", "nodes": 1, "gpus_per_node": ranks}
    if fits:
        assert read(("a.toml", text), machine=machine).tables["strategy"]["kind"] == "fsdp"
    else:
        with pytest.raises(
            ScenarioError, match=f"times the other degrees is .* ranks, and the job has {ranks}; use -1"
        ):
            read(("a.toml", text), machine=machine)


def test_changes_on_torchtitans_command_line_count_against_its_file():
    launch = script("-m torchtitan.train --job.config_file a.toml --training.local_batch_size 2")
    assert leaves(read(launch, ("a.toml", TITAN)))["batch.micro"] == 2
    with pytest.raises(ScenarioError, match=r"names a.toml; give that file too"):
        read(launch, framework="torchtitan")


@pytest.mark.parametrize(
    ("said", "granularity"),
    [
        ("--recompute-granularity selective --recompute-num-layers 1", "selective"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", None),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", "full"),
    ],
)
def test_how_many_layers_megatron_computes_again(said, granularity):
    found = read(script(f"pretrain_gpt.py {GPT} {said}"))
    assert leaves(found).get("parallel.recompute_granularity") == granularity


def test_an_option_that_is_there_twice_is_as_argparse_reads_it():
    found = read(script(f"pretrain_gpt.py {GPT} --seq-length 256"))
    assert leaves(found)["model.seq_len"] == 256
    assert any("--seq-length is there twice" in note for note in found.notes)


DEFAULTS = {
    # torchtitan/config/job_config.py at 000204a4 and b5bcd76c
    "torchtitan": {
        "training.local_batch_size": 8,
        "training.seq_len": 2048,
        "training.max_norm": 1.0,
        "training.global_batch_size": -1,
        "training.mixed_precision_param": "bfloat16",
        "training.mixed_precision_reduce": "float32",
        "training.enable_cpu_offload": False,
        "optimizer.name": "AdamW",
        "optimizer.implementation": "fused",
        "compile.enable": False,
        "parallelism.data_parallel_replicate_degree": 1,
        "parallelism.data_parallel_shard_degree": -1,
        "parallelism.tensor_parallel_degree": 1,
        "parallelism.pipeline_parallel_degree": 1,
        "parallelism.pipeline_parallel_schedule": "1F1B",
        "parallelism.pipeline_parallel_microbatch_size": 1,
        "parallelism.context_parallel_degree": 1,
        "parallelism.context_parallel_rotate_method": "allgather",
        "parallelism.enable_async_tensor_parallel": False,
        "parallelism.fsdp_reshard_after_forward": "default",
    },
    # megatron/training/arguments.py, NVIDIA/Megatron-LM at d98e8a64
    "megatron": {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "make_vocab_size_divisible_by": 128,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "transformer_impl": "transformer_engine",
        "optimizer": "adam",
        "moe_token_dispatcher_type": "allgather",
        "moe_router_topk": 2,
        "num_query_groups": 1,
        "cp_comm_type": "p2p",
        "use_distributed_optimizer": False,
        "overlap_grad_reduce": False,
    },
    # transformers TrainingArguments 4.5x; accelerate commands/launch.py 1.x
    "accelerate": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "fsdp_config.fsdp_version": 1,
        "fsdp_config.fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_config.fsdp_backward_prefetch": "NO_PREFETCH",  # utils/dataclasses.py, 1.15
        "fsdp_config.fsdp_forward_prefetch": False,
        "fsdp_config.fsdp_offload_params": False,
        "deepspeed_config.zero_stage": 2,
    },
    # megatron/core/transformer/transformer_config.py and model_parallel_config.py of megatron-core 0.16.1
    "nemo": {
        "gated_linear_unit": False,
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "multi_latent_attention": False,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "allgather",
        "sequence_parallel": False,
        "tp_comm_overlap": False,
        "deallocate_pipeline_outputs": False,
        "cuda_graph_impl": "none",
        "use_distributed_optimizer": False,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "num_distributed_optimizer_instances": 1,
    },
    # deepspeed/runtime/config.py and zero/config.py, deepspeedai/DeepSpeed at edaa7221
    "deepspeed": {"zero_optimization.stage": 0, "gradient_clipping": 0.0},
    # recipes/full_finetune_distributed.py of torchtune 0.6.1 (cfg.get)
    "torchtune": {
        "fsdp_cpu_offload": False,
        "fsdp_reshard_after_forward": True,
        "tensor_parallel_dim": 1,
        "compile": False,
    },
    # configs/neox_arguments.md of EleutherAI/gpt-neox 2.0, made of megatron/neox_arguments
    "neox": {
        "gradient_clipping": 1.0,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "pipe_partition_method": "type:transformer|mlp",
        "sequence_parallel": False,
        "use_bias_in_mlp": True,
        "use_bias_in_attn_linear": True,
        "pipe_parallel_size": 0,
        "model_parallel_size": 1,
        "checkpoint_activations": False,
        "norm": "layernorm",
        "pos_emb": "learned",
        "no_weight_tying": False,
        "gpt_j_residual": False,
        "make_vocab_size_divisible_by": 128,
    },
    # src/nanotron/config/config.py of nanotron 0.4; a type of parameters that is not said is bfloat16
    "nanotron": {"model.make_vocab_size_divisible_by": 1, "model.dtype": "bfloat16"},
    # llmfoundry/command_utils/train.py of llm-foundry 0.22
    "foundry": {"fsdp_config.mixed_precision": "DEFAULT", "fsdp_config.activation_checkpointing": False},
    # olmo/config.py of ai2-olmo 0.6
    "olmo": {
        "model.layer_norm_with_affine": True,
        "distributed_strategy": "fsdp",
        "fsdp.sharding_strategy": "FULL_SHARD",
        "fsdp.precision": "pure",
        "model.max_sequence_length": 1024,
        "model.rope": False,
        "model.weight_tying": True,
        "model.include_bias": True,
        "model.layer_norm_type": "default",
        "model.attention_dropout": 0.1,
        "model.residual_dropout": 0.1,
        "model.activation_type": "swiglu",
        "optimizer.name": "lionw",
        "model.flash_attention": False,
        "global_train_batch_size": 512,
        "device_train_microbatch_size": 16,
    },
    # litgpt/pretrain.py and utils.py (get_default_supported_precision) of litgpt 0.5.13
    "litgpt": {"precision": "bf16-mixed", "num_nodes": 1, "optimizer": "AdamW", "litgpt.fused": False},
    # the head of train.py of karpathy/nanoGPT; samples are 12 of each of 5 * 8 passes
    "nanogpt": {
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "block_size": 1024,
        "batch_size": 12,
        "nanogpt.samples": 480,
        "nanogpt.vocab": 50304,
        "dropout": 0.0,
        "bias": False,
        "dtype": "bfloat16",
        "compile": True,
    },
    # openrlhf/cli/train_sft.py of openrlhf 0.11.2
    "openrlhf": {
        "zero_stage": 2,
        "max_norm": 1.0,
        "param_dtype": "bf16",
        "attn_implementation": "flash_attention_2",
        "gradient_checkpointing": False,
        "max_len": 2048,
        "micro_train_batch_size": 8,
        "train_batch_size": 128,
        "optim": "adam",
    },
    # llama_cookbook/configs/training.py and fsdp.py of llama-cookbook 0.0.5.post1
    "cookbook": {
        "enable_fsdp": False,
        "sharding_strategy": "FULL_SHARD",
        "fsdp_activation_checkpointing": True,
        "fsdp_cpu_offload": False,
        "use_fp16": False,
        "gradient_clipping": False,
        "context_length": 4096,
        "batch_size_training": 4,
        "gradient_accumulation_steps": 1,
    },
    # recipes/llm/train_ft.py, recipes/_typed_config.py, components/distributed/config.py (FSDP2Config,
    # MoEParallelizerConfig), pipelining/config.py and components/quantization/fp8.py of nemo_automodel 0.7.0
    "automodel": {
        "step_scheduler.global_batch_size": 1,
        "step_scheduler.local_batch_size": 1,
        "distributed.tp_size": 1,
        "distributed.pp_size": 1,
        "distributed.cp_size": 1,
        "distributed.ep_size": 1,
        "distributed.sequence_parallel": False,
        "distributed.enable_async_tensor_parallel": False,
        "distributed.activation_checkpointing": "false",
        "distributed.defer_fsdp_grad_sync": True,
        "distributed.moe.reshard_after_forward": False,
        "distributed.mp_policy.param_dtype": "bfloat16",
        "distributed.mp_policy.reduce_dtype": "float32",
        "distributed.pipeline.pp_schedule": "1f1b",
        "distributed.pipeline.pp_microbatch_size": 1,
        "clip_grad_norm.max_norm": 1.0,
        "compile.enabled": False,
        "fp8.enable_fsdp_float8_all_gather": False,
    },
    # packages/prime-rl-configs/src/prime_rl/configs/trainer.py (at 004274ec) and sft.py (at 0111b1ba)
    "prime-rl": {
        "model.name": "Qwen/Qwen3-0.6B",
        "data.batch_size": 128,
        "data.seq_len": 128,
        "data.micro_batch_size": 1,
        "model.attn": "flash_attention_2",
        "model.fsdp_cpu_offload": False,
        "model.reshard_after_forward": True,
        "model.dp_replicate": 1,
        "model.ep": 1,
        "model.cp": 1,
        "model.cp_style": "ring",
        "model.optimization_dtype": "float32",
        "model.reduce_dtype": "float32",
        "loss_impl": "torch",
        "optim.type": "adamw",
        "optim.max_norm": 1.0,
    },
    # src/lightning/pytorch/trainer/trainer.py of lightning 2.6
    "lightning": {"trainer.num_nodes": 1, "trainer.precision": "32-true", "trainer.accumulate_grad_batches": 1},
}
"""Defaults of the frameworks themselves, with where they stand."""


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_the_frameworks_own(name):
    rows = [row for row in load(name).every() if row.default is not None]
    had = {row.option: row.default for row in rows}
    assert {option: had.get(option) for option in DEFAULTS[name]} == DEFAULTS[name]


def test_megatron_in_bf16_keeps_bf16_parameters_and_reduces_in_fp32():
    had = leaves(read(script(f"pretrain_gpt.py {GPT.replace('--fp16', '--bf16')} --use-distributed-optimizer")))
    assert had["strategy.param_dtype"] == "bf16"
    assert had.get("parallel.grad_reduce_in_fp32") in (None, True)  # which it is of bf16
    own = leaves(read(script(f"pretrain_gpt.py {GPT.replace('--fp16', '--bf16')} --grad-reduce-in-bf16")))
    assert own["parallel.grad_reduce_in_fp32"] is False


def test_a_script_that_is_written_has_the_longest_sequence_and_the_base_of_rotations():
    from clustersim import scenario

    text = exchange.written(scenario.load("tp8_pp4_llama3_70b_32x8_h100"), "megatron").texts["launch.sh"]
    assert "--max-position-embeddings 8192" in text
    assert "--rotary-base 500000" in text
    assert not exchange.written(scenario.load("tp8_pp4_llama3_70b_32x8_h100"), "megatron").wordless


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("qwen3-8b", ["--norm-epsilon 1e-06", "--qk-layernorm", "--rotary-base 1000000", "--kv-channels 128"]),
        ("llama3.1-8b", ["--norm-epsilon 1e-05", "--use-rope-scaling", "--rope-scaling-factor 8"]),
        (
            "deepseek-v3",
            [
                "--norm-epsilon 1e-06",
                "--moe-router-score-function sigmoid",
                "--moe-router-num-groups 8",
                "--moe-router-group-topk 4",
                "--moe-router-enable-expert-bias",
            ],
        ),
    ],
)
def test_a_script_for_megatron_has_what_its_own_scripts_of_the_model_have(model, words):
    """NVIDIA/Megatron-LM examples/post_training/modelopt/conf, THUDM/slime scripts/models."""
    from clustersim import scenario

    tables = {
        "cluster": {"topology": "hgx-h100", "nodes": 4},
        "model": {"name": model, "seq_len": 1024, "dtype": "bf16", "implementation": "fused"},
        "strategy": {"kind": "ddp", "param_dtype": "bf16"},
        "parallel": {"tp": 2, "sequence_parallel": True},
    }
    made = exchange.written(scenario.from_table(tables, "s.toml"), "megatron")
    text = made.texts["launch.sh"]
    assert [word for word in words if word not in text] == []
    assert read(script(text)).scenario.file.model.seq_len == 1024  # nothing of it is unknown to the reader


# ---- torchtune -------------------------------------------------------------------------------------------------------

TUNE = """
model:
  _component_: torchtune.models.llama3.lora_llama3_70b
  lora_attn_modules: ['q_proj', 'k_proj', 'output_proj']
  apply_lora_to_mlp: True
  lora_rank: 16
  lora_alpha: 32
  lora_dropout: 0.0
tokenizer:
  max_seq_len: 2048
batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
  fused: True
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
dtype: bf16
enable_activation_checkpointing: True
"""


def test_a_recipe_of_torchtune_is_read_with_its_adapters():
    command = ("run.sh", "tune run --nproc_per_node 8 lora_finetune_distributed --config 70B_lora.yaml batch_size=4")
    found = read(command, ("70B_lora.yaml", TUNE))
    assert found.tables["model"]["name"] == "llama3-70b"
    assert found.tables["model"]["adapter"] == {
        "rank": 16,
        "target_modules": ["q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    }
    had = leaves(found)
    assert (had["strategy.kind"], had["strategy.orig_dtype"], had["run.optimizer_impl"]) == ("fsdp", "bf16", "fused")
    assert had["batch.micro"] == 4
    assert found.unplayed["loss._component_"] == "the loss is of whole logits"
    assert not found.unknown


def test_a_recipe_of_one_device_has_one():
    command = ("run.sh", "tune run lora_finetune_single_device --config q.yaml")
    found = read(
        command,
        ("q.yaml", TUNE.replace(".lora_llama3_70b", ".qlora_llama3_8b")),
        machine={"topology": "hgx-h100", "nodes": 1},
    )
    assert found.tables["cluster"]["gpus_per_node"] == 1
    assert found.tables["model"]["adapter"]["load_in_4bit"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("output_proj", "o_proj", "'o_proj' is none of q_proj"),
        ("lora_llama3_70b", "lora_llama9_1b", "llama9_1b"),
        ("lora_rank: 16", "lora_rank: x", "expected a whole number"),
    ],
)
def test_what_torchtune_does_not_know_is_refused(old, new, message):
    with pytest.raises(ScenarioError) as error:
        read(("70B_lora.yaml", TUNE.replace(old, new)))
    assert message in str(error.value)
