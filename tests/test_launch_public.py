"""Kinds of launch files that public repositories have and that were misread, or refused though they say enough."""

import re

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
    [
        ("", "BACKWARD_POST"),
        (", backward_prefetch: BACKWARD_POST", "BACKWARD_POST"),
        (", backward_prefetch: NONE", "None"),
    ],
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


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_is_reentrant_does_not_stop_early(reentrant):
    word = str(reentrant).lower()
    words = f"activation_checkpointing: true, activation_checkpointing_reentrant: {word}"
    assert fields(f"{FOUNDRY}fsdp_config: {{{words}}}\n", "f.yaml")["model.early_stop"] is not reentrant
    trainer = "per_device_train_batch_size: 1\nmodel_name_or_path: meta-llama/Llama-3.1-8B\nmax_seq_length: 2048\n"
    trainer += f"gradient_checkpointing: true\ngradient_checkpointing_kwargs: {{use_reentrant: {word}}}\n"
    assert fields(trainer, "t.yaml")["model.early_stop"] is not reentrant


TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[activation_checkpoint]
"""


@pytest.mark.parametrize(
    ("words", "early"),
    [
        ('mode = "full"\n[compile]\nenable = false\n', False),  # torchtitan 0.2, whose default it is
        ('mode = "full"\nearly_stop = true\n[compile]\nenable = false\n', True),  # as FSDP is played
        ('mode = "full"\nearly_stop = false\n[compile]\nenable = true\n', True),  # nobody reads the rest of a graph
        ('mode = "full"\n', True),  # 0.1
        ('mode = "none"\nearly_stop = false\n[compile]\nenable = false\n', None),
    ],
)
def test_torchtitan_computes_a_block_again_to_its_end_where_it_does(words, early):
    assert fields(f"{TITAN}{words}", "llama3_8b.toml").get("model.early_stop") is early


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


# ---- frameworks by their scripts, and those that are not read ------------------------------------------------------


def test_openrlhfs_own_script_is_known_by_its_words():
    had = fields(
        "deepspeed --num_gpus 8 ../train_sft.py --pretrain meta-llama/Meta-Llama-3-8B --train_batch_size 64 "
        "--micro_train_batch_size 2 --zero_stage 3"
    )
    assert (had["strategy.kind"], had["strategy.zero_optimization.stage"]) == ("zero", 3)


def test_llama_cookbooks_script_is_known_by_its_words():
    had = fields(
        "torchrun --nproc_per_node 2 ft.py --enable_fsdp --model_name meta-llama/Meta-Llama-3-8B "
        "--batch_size_training 4"
    )
    assert had["strategy.kind"] == "fsdp"


@pytest.mark.parametrize(
    ("words", "framework"),
    [
        ("fairseq-train bin --arch transformer --criterion cross_entropy --max-tokens 4096", "fairseq"),
        ("torchrun --nproc_per_node 8 train.py bin --arch a --criterion c --update-freq 2", "fairseq"),
    ],
)
def test_a_framework_that_is_not_read_is_named(words, framework):
    with pytest.raises(ScenarioError, match=f"is of {framework}, whose files are not read"):
        read(words)


# ---- a vocabulary that nobody says ----------------------------------------------------------------------------------

NEOX = (
    '{"pipe_parallel_size": 1, "model_parallel_size": 1, "num_layers": 3, "hidden_size": 512, '
    '"num_attention_heads": 8, "seq_length": 256, "max_position_embeddings": 256, "pos_emb": "rotary", '
    '"no_weight_tying": true, "train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": true}%s}'
)


@pytest.mark.parametrize(
    "word", ["", ', "tokenizer_type": "GPT2BPETokenizer"', ', "tokenizer-type": "HFGPT2Tokenizer"']
)
def test_neox_has_gpt2s_tokenizer_where_no_other_is_said(word):
    made = read(NEOX % word, "n.yml")
    assert made.scenario.table["model"]["options"]["vocab"] == 50257
    assert "which the files do not say" not in " ".join(made.notes)


def test_the_vocabulary_of_another_tokenizer_of_neox_is_told_as_unknown():
    made = read(NEOX % ', "tokenizer_type": "HFTokenizer"', "n.yml")
    assert "its vocabulary, which the files do not say" in " ".join(made.notes)


@pytest.mark.parametrize(("length", "name"), [(2048, "llama-7b"), (4096, "llama2-7b"), (16384, "codellama-7b")])
def test_models_of_the_same_sizes_are_told_apart_by_their_length(length, name):
    words = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --swiglu"
    words += f" --seq-length {length} --max-position-embeddings {length}"
    words += " --position-embedding-type rope --normalization RMSNorm"
    words += " --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
    words = f"torchrun --nproc_per_node 8 pretrain_gpt.py {words} --micro-batch-size 1 --global-batch-size 8 --bf16"
    assert read(words).scenario.table["model"]["name"] == name


# ---- LitGPT: decoders alone ------------------------------------------------------------------------------------------

LITGPT = """
checkpoint_dir: checkpoints/google/{name}
devices: 8
train: {{max_seq_length: 512, micro_batch_size: 1, global_batch_size: 8}}
"""


def test_litgpts_model_has_no_tower():
    with pytest.raises(ScenarioError, match="reads images, and LitGPT has its decoder alone"):
        read(LITGPT.format(name="gemma-3-4b-it"), "l.yaml")
    assert read(LITGPT.format(name="gemma-3-1b-it"), "l.yaml").scenario.table["model"]["name"] == "gemma3-1b"


def test_longlora_is_no_plain_lora():
    text = LITGPT.format(name="gemma-3-1b-it") + "lora_r: 8\nlonglora: {use_longlora: %s, n_groups: 4}\n"
    with pytest.raises(ScenarioError, match="trains by LongLoRA"):
        read(text % "true", "l.yaml")
    assert read(text % "false", "l.yaml").scenario.table["model"]["adapter"]["rank"] == 8


# ---- one process that sees several GPUs ------------------------------------------------------------------------------

TRAINER = (
    "train.py --model_name_or_path meta-llama/Llama-3.2-1B --per_device_train_batch_size 1 --max_seq_length 256 --bf16"
)


@pytest.mark.parametrize(("start", "told"), [("python", True), ("torchrun --nproc_per_node 2", False)])
def test_a_script_that_no_launcher_starts_is_one_rank_and_it_is_told(start, told):
    made = read(f"CUDA_VISIBLE_DEVICES=0,1 {start} {TRAINER}")
    words = "no launcher starts train.py, which alone is one rank; the GPUs of CUDA_VISIBLE_DEVICES are taken"
    assert (words in " ".join(made.notes)) == told
    assert made.scenario.table["cluster"]["gpus_per_node"] == 2


def test_ms_swifts_script_places_layers_where_no_launcher_starts_it():
    words = "llm_sft.py --model_id_or_path Qwen/Qwen2.5-7B-Instruct --sft_type full --dtype bf16 --max_length 256"
    with pytest.raises(ScenarioError, match="places layers over the GPUs it sees"):
        read(f"CUDA_VISIBLE_DEVICES=0,1 python {words}")
    assert read(f"CUDA_VISIBLE_DEVICES=0 python {words}").scenario
    assert read(f"CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 {words}").scenario


@pytest.mark.parametrize(("word", "kernel"), [("True", "fa2"), ("False", None)])
def test_a_scripts_own_switch_of_flash_attention_is_true_or_false(word, kernel):
    assert fields(f"torchrun --nproc_per_node 8 {TRAINER} --flash_attn {word}").get("model.attention") == kernel


@pytest.mark.parametrize(("words", "told"), [("--attn_implementation flash_attention_2", True), ("", False)])
def test_flash_attention_in_fp32_is_told(words, told):
    made = read(f"torchrun --nproc_per_node 8 {TRAINER} {words}".replace("--bf16", ""))
    assert ("a type of 16 bits, which fa2 needs" in " ".join(made.notes)) == told
    assert "which fa2 needs" not in " ".join(read(f"torchrun --nproc_per_node 8 {TRAINER} {words}").notes)


# ---- what a script hands on, and what its words lack -----------------------------------------------------------------

MEGATRON = (
    "torchrun --nproc_per_node {ranks} pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 "
    "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size {batch} --bf16\n"
)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("export NCCL_IB_DISABLE=1", "NCCL_IB_DISABLE=1 is not played"),
        ("export NCCL_IB_QPS_PER_CONNECTION=4", "NCCL_IB_QPS_PER_CONNECTION=4 is not played"),
        ("export NCCL_P2P_LEVEL=phb", "NCCL ignores it"),
        ("export NCCL_FOO=1", "NCCL_FOO=1 is not known, and not played"),
        ("export NCCL_IB_DISABLE=0", ""),
        ("export NCCL_DEBUG=INFO", ""),
    ],
)
def test_variables_of_nccl_that_change_time_are_told(line, named):
    notes = " ".join(read(f"{line}\n{MEGATRON.format(ranks=8, batch=8)}").notes)
    assert (named in notes) if named else "is not played" not in notes


@pytest.mark.parametrize("setting", ["NCCL_ALGO=Tree", "NCCL_P2P_DISABLE=1", "NCCL_P2P_LEVEL=4", "NCCL_NVLS_ENABLE=0"])
def test_variables_of_nccl_that_are_played_become_fields(setting):
    made = read(f"export {setting} NCCL_NVLS_ENABLE=2 {setting}\n{MEGATRON.format(ranks=8, batch=8)}")
    name, _, value = setting.partition("=")
    assert made.scenario.file.run.nccl_environment == {name: value}
    assert "not played" not in " ".join(made.notes)


def test_variables_of_a_pod_are_told():
    pod = (
        "apiVersion: batch/v1\nkind: Job\nspec: {template: {spec: {containers: [{name: a, env: "
        "[{name: NCCL_SHM_DISABLE, value: '1'}], command: [sh, -c, "
        f"'{MEGATRON.format(ranks=8, batch=8).strip()}']}}]}}}}}}\n"
    )
    assert "NCCL_SHM_DISABLE=1 is not played" in " ".join(read(pod, "job.yaml").notes)


@pytest.mark.parametrize(
    ("lines", "lacking"),
    [
        ("NODES=$1\nRANKS=$((NODES * 8))\n", "is a sum with \\$1, an argument of the script, which nobody says"),
        ("RANKS=$((${SIZE} * 8))\n", "is a sum with SIZE, which is set nowhere in the script"),
        ("RANKS=$2\n", "\\$2 is an argument of the script, which nobody says"),
    ],
)
def test_a_number_that_a_script_does_not_say_is_asked_for_by_what_it_lacks(lines, lacking):
    with pytest.raises(ScenarioError, match=f"--global-batch-size: {lacking}; write its value"):
        read(lines + MEGATRON.format(ranks=8, batch="$((RANKS * 2))" if "(" in lines else "$RANKS"))


def test_a_script_that_was_not_given_is_asked_for_once():
    with pytest.raises(ScenarioError, match=r"reads common.sh, which"):
        read(". common.sh\nLENGTH=512\n. common.sh\n")


# ---- ranks of Composer's launcher, layers of nanotron, words of adapters -------------------------------------------


@pytest.mark.parametrize(
    ("command", "nodes", "ranks"),
    [
        ("composer -n 4 train.py here.yaml", 1, 4),
        ("composer -n 8 --world_size 16 --node_rank 0 train.py here.yaml", 2, 8),
        ("composer train.py here.yaml", 1, None),
    ],
)
def test_composers_launcher_says_the_ranks(command, nodes, ranks):
    text = FOUNDRY.replace("64", "16")
    made = exchange.read([document(f"{command}\n", "a.sh"), document(text, "here.yaml")], {"topology": "hgx-h100"})
    cluster = made.scenario.table["cluster"]
    assert (cluster["nodes"], cluster.get("gpus_per_node")) == (nodes, ranks)


NANOTRON = """
model: {model_config: {num_hidden_layers: 4, hidden_size: 512, intermediate_size: 1024, num_attention_heads: 8,
  num_key_value_heads: 2, vocab_size: 32000}}
parallelism: {dp: 8, tp: 1, pp: 1, pp_engine: 1f1b, tp_mode: ALL_REDUCE, recompute_layer: %s}
tokens: {sequence_length: 512, micro_batch_size: 1, batch_accumulation_per_replica: 2}
"""


@pytest.mark.parametrize(("word", "kept"), [("true", ("full", "uniform", 1)), ("false", (None, None, None))])
def test_nanotron_computes_each_layer_again(word, kept):
    had = fields(NANOTRON % word, "n.yaml")
    names = ("granularity", "method", "num_layers")
    assert tuple(had.get(f"parallel.recompute_{name}") or None for name in names) == kept


def test_a_rank_and_an_alpha_are_no_full_finetuning():
    words = "torchrun --nproc_per_node 2 -m lora --model_name_or_path Qwen/Qwen3-4B --per_device_train_batch_size 1"
    with pytest.raises(ScenarioError, match="--alpha '512' asks for adapters in a script's own words"):
        read(f"{words} --rank 256 --alpha 512 --bf16\n")


@pytest.mark.parametrize(("preset", "overlaps"), [("default-zero3", True), ("zero3", False)])
def test_presets_of_ms_swift_2_send_beside_backward(preset, overlaps):
    words = f"NPROC_PER_NODE=2 swift sft --model Qwen/Qwen3-4B --train_type full --deepspeed {preset} --max_length 512"
    assert fields(words)["strategy.zero_optimization.overlap_comm"] is overlaps


@pytest.mark.parametrize("script", ["trl/scripts/sft.py", "../trl/examples/scripts/sft.py"])
def test_trls_script_has_its_defaults_wherever_it_lies(script):
    words = f"accelerate launch --num_processes 2 {script} --model_name_or_path google/gemma-2b"
    had = fields(words)
    assert (had["model.seq_len"], had["model.activation_checkpointing"], had["model.dtype"]) == (1024, "full", "bf16")


def test_variables_that_a_program_sets_are_played():
    program = """
import os
from nemo.collections import llm
os.environ["NCCL_P2P_DISABLE"] = "1"
env_vars = {"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "INFO"}
recipe = llm.llama3_8b.pretrain_recipe(num_nodes=1, num_gpus_per_node=8)
"""
    environment = read(program, "own.py").scenario.file.run.nccl_environment
    assert environment == {"NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1"}


# ---- bash: flags behind conditions, braces, and counts --------------------------------------------------------------

SFT = "torchrun --nproc_per_node 2 sft.py --model_name_or_path Qwen/Qwen3-4B --per_device_train_batch_size 1"


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ('$( [ "$HALF" = true ] && echo "--bf16" )', True),
        ('$([[ $HALF == true && $GPUS -gt 1 ]] && echo "--bf16" || echo "--fp16")', True),
        ("$(if [ $HALF = true ]; then echo '--bf16'; else echo --fp16; fi)", True),
        ("$([[ $HALF != true ]] && echo --bf16)", False),
        ("$([ $GPUS -gt 2 ] && echo --bf16 || true)", False),
        ("$(test $GPUS -lt 2 || echo --bf16)", True),
    ],
)
def test_flags_behind_a_condition_of_the_script(flag, said):
    made = read(f"HALF=true\nGPUS=2\n{SFT} --max_length 512 {flag}\n")
    assert (exchange.canonical(made.scenario)["model.dtype"] == "bf16") is said
    assert "nothing in the script says" not in " ".join(made.notes)


def test_a_flag_behind_what_nobody_says_names_it():
    made = read(f"{SFT} --max_length 512 --bf16 $([ $AGAIN = 1 ] && echo --gradient_checkpointing)\n")
    assert "nothing in the script says what these are: ${AGAIN}" in " ".join(made.notes)
    made = read(f"{SFT} --max_length 512 --bf16 $(cat flags | head -1)\n")
    assert "nothing in the script says what these are: ${command}" in " ".join(made.notes)


def test_what_a_file_of_the_script_has_behind_a_condition():
    script = f"""OFFLOAD=true
cat <<EOT > ds.json
{{"bf16": {{"enabled": true}}, "zero_optimization": {{"stage": 2$(if [ "$OFFLOAD" = "true" ]; then echo ',
  "offload_optimizer": {{"device": "cpu"}}'; fi)}}}}
EOT
{SFT} --max_length 512 --deepspeed ds.json
"""
    assert fields(script)["strategy.zero_optimization.offload_optimizer.device"] == "cpu"


@pytest.mark.parametrize("numbers", ["{1..3}", "$(seq 3)", "$(seq 1 $((1+2)))", "{1,2}", "{1..1000}"])
def test_a_loop_over_numbers_knows_its_first(numbers):
    script = f"""for i in {numbers}; do
if [ $i -eq 1 ]; then LONG=512; else LONG=1024; fi
{SFT} --bf16 --max_length $LONG
done
"""
    assert fields(script)["model.seq_len"] == 512


@pytest.mark.parametrize("ranks", ["gpu", "auto"])
@pytest.mark.parametrize("seen", ["0,1,2,3", "$(seq -s, 0 $((N-1)))"])
def test_torchrun_starts_a_rank_on_each_gpu_that_it_sees(ranks, seen):
    words = SFT.replace("--nproc_per_node 2", f"--nproc_per_node {ranks}") + " --bf16 --max_length 512\n"
    made = read(f"N=4\nexport CUDA_VISIBLE_DEVICES={seen}\n{words}")
    assert made.tables["cluster"]["gpus_per_node"] == 4
    assert read(f"CUDA_VISIBLE_DEVICES=2,3 {words}").tables["cluster"]["gpus_per_node"] == 2


def test_the_greater_of_two_sums():
    assert fields(f"S=512\n{SFT} --bf16 --max_length $((S>256?S:256))\n")["model.seq_len"] == 512
    assert fields(f"S=128\n{SFT} --bf16 --max_length $(( S > 256 ? S : 256 ))\n")["model.seq_len"] == 256


def test_flash_attn_of_earlier_llama_factory_is_a_switch():
    own = "--stage sft --do_train --finetuning_type full --flash_attn --cutoff_len 512 --bf16"
    assert fields(f"{SFT.replace('sft.py', 'src/train_bash.py')} {own}\n")["model.attention"] == "fa2"


@pytest.mark.parametrize(
    "count",
    [
        """$(echo $CUDA_VISIBLE_DEVICES | tr ',' '\\n' | wc -l)""",
        """$(echo "$CUDA_VISIBLE_DEVICES" | tr ',' ' ' | wc -w)""",
        """$(awk -F',' '{print NF}' <<< "$CUDA_VISIBLE_DEVICES")""",
        """`echo $CUDA_VISIBLE_DEVICES | awk -F, '{print NF}'`""",
        "$(nvidia-smi -L | wc -l)",
    ],
)
def test_ranks_that_a_script_counts(count):
    words = SFT.replace("--nproc_per_node 2", "--nproc_per_node=$N") + " --bf16 --max_length 512\n"
    made = read(f"export CUDA_VISIBLE_DEVICES=4,5,6\nN={count}\n{words}")
    assert made.tables["cluster"]["gpus_per_node"] == 3
    if "nvidia" not in count:
        times = f"{words.strip()} --gradient_accumulation_steps $((24 / $N))\n"
        had = read(f"export CUDA_VISIBLE_DEVICES=4,5,6\nN={count}\n{times}").tables["strategy"]
        assert had["gradient_accumulation_steps"] == 8


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
@pytest.mark.parametrize("starts", ["accelerate launch sft.py", "torchrun --nproc_per_node=gpu sft.py"])
def test_ranks_are_those_of_the_gpus_that_are_seen(name, starts):
    words = f"{starts} {SFT.partition('sft.py ')[2]} --bf16 --max_length 512\n"
    assert read(f"export {name}=0,1,2,3\n{words}").tables["cluster"]["gpus_per_node"] == 4


def test_ranks_that_only_running_tells_are_told():
    words = SFT.replace("--nproc_per_node 2", "--nproc_per_node=$N") + " --bf16 --max_length 512\n"
    told = "how many ranks --nproc-per-node starts only running tells"
    assert told in " ".join(read(words).notes)
    assert told not in " ".join(read(f"N=4\n{words}").notes)
    with pytest.raises(ScenarioError, match="is a sum with what a command prints that is not run; write its value"):
        read(f"N=$(nvidia-smi -L | wc -l)\n{words.strip()} --gradient_accumulation_steps $((16 / N))\n")


def test_a_block_and_passes_of_the_trainer_are_no_nanogpt():
    words = SFT.replace("sft.py", "train.py") + " --block_size 512 --gradient_accumulation_steps 4 --bf16"
    had = read(words).tables
    assert (had["model"]["name"], had["model"]["seq_len"]) == ("qwen3-4b", 512)
    assert had["strategy"]["gradient_accumulation_steps"] == 4


def test_a_line_of_a_written_file_that_only_running_tells():
    script = """
DATA=$(printf "  - path: %s\\n" a b)
cat > own.yml << EOF
base_model: Qwen/Qwen3-4B
datasets:
${DATA}
sequence_len: 512
micro_batch_size: 1
optimizer: adamw_torch
bf16: true
EOF
accelerate launch --num_processes 2 -m axolotl.cli.train own.yml
"""
    made = read(script)
    assert made.tables["model"]["seq_len"] == 512
    assert "what ${command} adds to own.yml only running tells" in " ".join(made.notes)


@pytest.mark.parametrize(
    ("said", "length"),
    [
        ("declare -A LONG=([7b]=512 [13b]=1024)\nSIZE=13b\nS=${LONG[$SIZE]}", 1024),
        ('declare -A LONG\nLONG[7b]=512\nLONG["13b"]=1024\nSIZE=7b\nS=${LONG["$SIZE"]}', 512),
        ("read -r S M <<< '512 8 9'", 512),
        ("IFS=: read -ra ALL <<< 256:512\nS=${ALL[1]}", 512),
        ('S=$(echo "2 * 256" | bc)', 512),
        ('H=256\nS=$(bc <<< "2*$H")', 512),
    ],
)
def test_values_that_a_script_looks_up_or_works_out(said, length):
    assert fields(f"{said}\n{SFT} --bf16 --max_length $S\n")["model.seq_len"] == length


def test_what_a_list_by_words_lacks_is_asked_for():
    with pytest.raises(ScenarioError, match=r"LONG.* is set nowhere in the script; write its value"):
        read(f"declare -A LONG=([7b]=512)\nS=${{LONG[70b]}}\n{SFT} --bf16 --max_length $S\n")
    with pytest.raises(ScenarioError, match="is a sum that is not worked out; write its value"):
        read(f"{SFT} --bf16 --max_length $((2 ** 9))\n")


def test_read_counts_the_devices_that_a_text_lists():
    words = SFT.replace("--nproc_per_node 2", "--nproc_per_node ${#IDS[@]}") + " --bf16 --max_length 512\n"
    made = read(f'GPUS="0, 1, 2, 3"\nIFS="," read -r -a IDS <<< "$GPUS"\n{words}')
    assert made.tables["cluster"]["gpus_per_node"] == 4


@pytest.mark.parametrize(
    "ahead",
    [
        "mpirun -np 8 -npernode 8 -x NCCL_IB_DISABLE=1 -x PATH python",
        "srun --nodes 1 --ntasks-per-node 8 --export=ALL,NCCL_IB_DISABLE=1 python",
        "srun --nodes 1 singularity exec --nv --env NCCL_IB_DISABLE=1 here.sif torchrun --nproc_per_node 8",
        "env NCCL_IB_DISABLE=1 torchrun --nproc_per_node 8",
    ],
)
def test_variables_that_a_command_hands_on_are_told(ahead):
    made = read(f"{ahead} {SFT.partition('--nproc_per_node 2 ')[2]} --bf16 --max_length 512\n")
    assert "NCCL_IB_DISABLE=1 is not played" in " ".join(made.notes)


# ---- Qwen in nanotron and torchtune, vocabularies by their tokenizer ------------------------------------------------

QWEN = """
model:
  dtype: bfloat16
  model_config: {{is_qwen2_config: true, hidden_size: 512, intermediate_size: 1024, num_attention_heads: 8,
    num_key_value_heads: 2, num_hidden_layers: 4, vocab_size: 4096, tie_word_embeddings: true, moe_config: null,
    no_rope_layer: null, {more}}}
parallelism: {{dp: 2, tp: 1, pp: 1, tp_mode: REDUCE_SCATTER}}
tokens: {{micro_batch_size: 2, sequence_length: 1024}}
optimizer: {{zero_stage: 0}}
"""


@pytest.mark.parametrize(("bias", "vectors"), [("attention_bias: true", 512 + 2 * 128), ("attention_bias: false", 0)])
def test_nanotrons_qwen_is_told_by_its_sizes_and_biases(bias, vectors):
    """It was refused: its blocks differ from Llama's in what the file says alone."""
    made = model_of(read(QWEN.format(more=bias), "n.yaml").scenario)
    assert (
        made.parameters == 4 * (2 * 512 * 512 + 2 * 512 * 128 + vectors + 3 * 512 * 1024 + 2 * 512) + 4096 * 512 + 512
    )


def test_a_window_of_nanotron_limits_attention():
    texts = [QWEN.format(more=f"attention_bias: false, sliding_window_size: {size}") for size in (20, "null")]
    assert [read(text, "n.yaml").scenario.file.model.options.get("window") for text in texts] == [20, None]


@pytest.mark.parametrize(
    ("name", "model"),
    [("qwen3_8b_instruct", "qwen3-8b"), ("lora_qwen3_moe_30b_a3b_base", "qwen3-30b-a3b"), ("qwen3_32b", "qwen3-32b")],
)
def test_torchtunes_builders_of_qwen3_are_named_models(name, model):
    more = ", lora_attn_modules: [q_proj], lora_rank: 8" if name.startswith("lora") else ""
    words = f"{{_component_: torchtune.models.qwen3.{name}{more}}}"
    assert read(TUNE.format(model=words), "t.yaml").scenario.file.model.name == model


TOKENIZED = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --seq-length 256 --bf16 "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 8 --max-position-embeddings 512 "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {} {}"
)


@pytest.mark.parametrize(
    ("tokenizer", "more", "vocab"),
    [
        ("meta-llama/Meta-Llama-3-8B", "", 128_256),
        ("/models/Qwen2.5-7B-Instruct", "", 152_064),
        ("meta-llama/Meta-Llama-3-8B", "--vocab-size 1024", 1024),
        ("/data/tokenizer.model", "", 0),
    ],
)
def test_a_tokenizer_that_is_named_says_how_large_the_vocabulary_is(tokenizer, more, vocab):
    """It was that of the model whose sizes are nearest."""
    made = read(TOKENIZED.format(tokenizer, more))
    assert any("--tokenizer-model" in note for note in made.notes) is (vocab > 1024)
    blocks = 4 * (4 * 512 * 512 + 3 * 512 * 1344 + 2 * 512)
    assert not vocab or model_of(made.scenario).parameters == blocks + 512 + 2 * 512 * vocab


# ---- words of experts -----------------------------------------------------------------------------------------------

EXPERTS = (
    "deepspeed --num_gpus 8 pretrain_gpt.py --deepspeed --deepspeed_config ds.json --num-layers 4 --hidden-size 1024 "
    "--ffn-hidden-size 4096 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 8 --num-experts 8 --topk 2 --moe-expert-parallel-size 8 --fp16 --swiglu "
    "--normalization rmsnorm --use-rotary-position-embeddings --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
BESIDE = '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": true}MORE}'


def read_experts(words: str = "", more: str = ""):
    """Megatron-DeepSpeed's command beside its file."""
    files = [document(f"{EXPERTS} {words}\n", "run.sh"), document(BESIDE.replace("MORE", more), "ds.json")]
    return exchange.read(files, {"topology": "hgx-h100", "nodes": 1})


@pytest.mark.parametrize(("words", "every"), [("", 2), ("--expert-interval 1", 1), ("--expert-interval 4", 4)])
def test_megatron_deepspeed_has_experts_in_every_second_layer_by_default(words, every):
    """Of its arguments.py (expert_interval, 2); a script that did not say so had them in every layer, and one that did
    was told that the option is unknown."""
    made = read_experts(words)
    experts = made.tables["model"]["options"]["experts"]
    assert experts.get("every", 1) == every
    assert not made.unknown


@pytest.mark.parametrize(
    ("words", "more", "why"),
    [
        ("--mlp-type residual", "", "dense MLP beside the experts"),
        ("--use-residual", "", "dense MLP beside the experts"),
        ("--ep-size 8", "", "deepspeed.moe.layer.MoE"),
        ("--ep-world-size 8", "", "DeepSpeedExamples"),
        ("", ', "moe": {"enabled": true, "ep_size": 8, "num_experts": 64, "top2": true}', "DeepSpeed's inference"),
    ],
)
def test_words_of_experts_that_are_not_read_are_refused_with_the_reason(words, more, why):
    with pytest.raises(ScenarioError, match=re.escape(why)):
        read_experts(words, more)


@pytest.mark.parametrize(("word", "told"), [("TURBO", False), ("DEEP_EP", False), ("UCCL_EP", True)])
def test_another_library_for_experts_exchange_is_told(word, told):
    notes = " ".join(read(f"export PRIMUS_TURBO_EP_BACKEND={word}\n{MEGATRON.format(ranks=8, batch=8)}").notes)
    assert (f"PRIMUS_TURBO_EP_BACKEND={word} is not played" in notes) is told


@pytest.mark.parametrize(
    ("word", "played", "told"),
    [("grouped_mm", "grouped_mm", False), ("batched_mm", None, True), ("eager", None, False)],
)
def test_ms_swifts_experts_are_one_product_where_it_says_so(word, played, told):
    made = read(
        "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen3-30B-A3B --deepspeed zero3 --torch_dtype bfloat16 "
        f"--per_device_train_batch_size 1 --max_length 2048 --experts_impl {word}\n"
    )
    assert made.tables["model"].get("options", {}).get("experts_implementation") == played
    assert bool(made.unplayed) is told
    assert not made.unknown
