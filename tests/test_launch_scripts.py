"""Frameworks that are launched by a script's own words: nanoGPT, OpenRLHF's finetuning, Llama Cookbook."""

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document
from clustersim.scenario.run.parts import model_of

MACHINE = {"topology": "hgx-h100", "nodes": 1}


def read(*files, machine=None, **more):
    return exchange.read([document(text, name) for name, text in files], machine or MACHINE, **more)


def fields(*files, **more):
    return exchange.canonical(read(*files, **more).scenario)


def changed(before, after):
    """Fields that differ."""
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


# ---- nanoGPT --------------------------------------------------------------------------------------------------------

NANO = """
import time
out_dir = 'out-own'
batch_size = 16
block_size = 512
gradient_accumulation_steps = 4 * 8
n_layer = 4
n_head = 4
n_embd = 256
max_iters = 100
lr_decay_iters = max_iters
wandb_run_name = 'own' + str(time.time())
"""
CONFIG = ("config/train_own.py", NANO)
NANO_RUN = "torchrun --standalone --nproc_per_node=8 train.py config/train_own.py"


def nano(words=""):
    return fields(("run.sh", f"{NANO_RUN} {words}"), CONFIG)


def test_a_configuration_of_nanogpt_is_its_training_script():
    made = read(("run.sh", NANO_RUN), CONFIG)
    had = exchange.canonical(made.scenario)
    assert made.framework.name == "nanogpt"
    assert (had["strategy.kind"], had["model.dtype"], had["model.implementation"]) == ("ddp", "bf16", "fused")
    assert (had["batch.micro"], had["batch.count"], had["model.seq_len"]) == (16, 4, 512)
    assert (had["run.optimizer"], had["run.optimizer_impl"]) == ("adamw", "fused")
    layer = 12 * 256 * 256 + 2 * 256  # neither linears nor norms have biases
    assert model_of(made.scenario).parameters == 4 * layer + (50304 + 512) * 256 + 256


NANO_CHANGES = [
    ("--dtype=float16", {"model.dtype"}),
    ("--compile=False", {"model.implementation"}),
    ("--batch_size=8", {"batch.micro"}),
    ("--gradient_accumulation_steps=64", {"batch.count"}),
    ("--dropout=0.1", {"shape.attn_dropout", "shape.hidden_dropout"}),
    ("--n_layer=8", {"shape.layers"}),
    ("--bias=True", {"shape.mlp_bias", "shape.qkv_bias"}),
    ("--dataset=shakespeare_char", {"shape.vocab"}),
    ("--block_size=256", {"model.seq_len"}),
]


@pytest.mark.parametrize(("word", "names"), NANO_CHANGES)
def test_a_word_behind_nanogpts_file_counts_and_changes_what_it_says(word, names):
    assert names <= changed(nano(), nano(word))


def test_ranks_share_nanogpts_passes_which_are_all_one_ranks_without_a_launcher():
    alone = fields(("run.sh", "python train.py config/train_own.py"), CONFIG, machine={"topology": "hgx-h100"})
    assert (alone["strategy.kind"], alone["batch.count"]) == ("single", 32)
    with pytest.raises(
        ScenarioError, match="gradient_accumulation_steps 32 of batch_size 16, in all 512 is not made of"
    ):
        fields(("run.sh", NANO_RUN.replace("=8", "=6")), CONFIG)


def test_a_checkpoint_of_gpt2_has_its_own_sizes():
    words = "torchrun --standalone --nproc_per_node=4 train.py --init_from=gpt2-medium --n_layer=3"
    made = read(("run.sh", words))
    assert model_of(made.scenario).parameters == 354_823_168  # transformers' GPT2LMHeadModel of its config.json
    assert any("has its own --n_layer" in note for note in made.notes)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ([("run.sh", NANO_RUN)], "reads config/train_own.py; give that file too"),
        ([("c.py", f"{NANO}init_from = 'resume'\n")], "say init_from scratch beside n_layer"),
        ([("c.py", f"{NANO}device = 'cpu'\n")], "trains on CPUs"),
        ([("c.py", f"{NANO}batch_size = max(2, 3)\n")], r"batch_size is max\(2, 3\), which only running tells"),
        ([("c.py", f"{NANO}init_from = 'gpt3'\n")], "is none of scratch, gpt2"),
        (
            [("train.py", "x = 1\nexec(open('configurator.py').read())\n")],
            "is nanoGPT's program; give a file of its config",
        ),
    ],
)
def test_what_nanogpts_files_leave_open_is_asked_for(files, match):
    with pytest.raises(ScenarioError, match=match):
        read(*files)


# ---- OpenRLHF -------------------------------------------------------------------------------------------------------

EARLIER = (
    "openrlhf.cli.train_sft --pretrain meta-llama/Meta-Llama-3-8B --max_len 1024 --train_batch_size 64 "
    "--micro_train_batch_size 2 --zero_stage 3 --bf16 --flash_attn --gradient_checkpointing"
)
SECTIONED = (
    "openrlhf.cli.train_sft --model.model_name_or_path meta-llama/Meta-Llama-3-8B --data.max_len 1024 "
    "--train.batch_size 64 --train.micro_batch_size 2 --ds.zero_stage 3 --model.gradient_checkpointing_enable"
)


def rlhf(words, more=""):
    return fields(("run.sh", f"deepspeed --num_gpus 8 --module {words} {more}"))


def test_finetuning_of_openrlhf_is_zero_by_its_own_words_of_either_release():
    had = rlhf(EARLIER)
    assert had["strategy.zero_optimization.stage"] == 3
    assert (had["model.dtype"], had["strategy.param_dtype"], had["model.attention"]) == ("bf16", "bf16", "fa2")
    assert (had["batch.micro"], had["batch.count"], had["strategy.gradient_clipping"]) == (2, 4, 1.0)
    assert rlhf(SECTIONED) == had


@pytest.mark.parametrize(
    ("earlier", "sectioned", "name"),
    [
        ("--zpg 4", "--ds.zpg 4", "strategy.zero_optimization.zero_hpz_partition_size"),
        ("--adam_offload", "--ds.adam_offload", "strategy.zero_optimization.offload_optimizer.device"),
        ("--lora_rank 16", "--ds.lora.rank 16", "model.adapter.rank"),
        ("--max_norm 0", "--max_norm 0", "strategy.gradient_clipping"),
        ("--use_liger_kernel", "--ds.use_liger_kernel", "model.implementation"),
    ],
)
def test_an_option_of_openrlhf_changes_what_it_says(earlier, sectioned, name):
    assert name in changed(rlhf(EARLIER), rlhf(EARLIER, earlier))
    assert name in changed(rlhf(SECTIONED), rlhf(SECTIONED, sectioned))


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (EARLIER.replace("train_sft", "train_dpo"), "trains by DPO"),
        (EARLIER.replace("train_sft", "train_ppo_ray"), "trains by PPO or its kin"),
        (EARLIER.replace("train_sft", "train_rm"), "trains a reward model"),
        (EARLIER.replace("train_sft", "batch_inference"), "trains nothing"),
        (f"{EARLIER} --ring_attn_size 2", "ring attention"),
        (f"{SECTIONED} --ds.tensor_parallel_size 4", "AutoTP"),
    ],
)
def test_what_openrlhf_trains_otherwise_is_refused_with_why(words, match):
    with pytest.raises(ScenarioError, match=match):
        rlhf(words)


# ---- Llama Cookbook -------------------------------------------------------------------------------------------------

COOK = (
    "torchrun --nnodes 1 --nproc_per_node 8 finetuning.py --enable_fsdp --model_name meta-llama/Llama-2-7b-hf "
    "--batch_size_training 2 --context_length 1024"
)


def cook(more=""):
    return fields(("run.sh", f"{COOK} {more}"))


def test_finetuning_of_llama_cookbook_is_fsdp_of_16_bits_with_checkpoints():
    had = cook()
    assert (had["strategy.kind"], had["strategy.version"]) == ("fsdp", 1)
    assert {had[f"strategy.{name}_dtype"] for name in ("orig", "param", "reduce")} == {"bf16"}
    assert had["model.activation_checkpointing"] == "full"
    assert (had["batch.micro"], had["batch.count"], had["model.seq_len"]) == (2, 1, 1024)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--use_fp16", "strategy.orig_dtype"),
        ("--fsdp_config.fsdp_activation_checkpointing False", "model.activation_checkpointing"),
        ("--fsdp_activation_checkpointing False", "model.activation_checkpointing"),
        ("--fsdp_cpu_offload", "strategy.cpu_offload"),
        ("--gradient_clipping", "strategy.clip_grad_norm"),
        ("--gradient_accumulation_steps 4", "batch.count"),
        ("--sharding_strategy ShardingStrategy.SHARD_GRAD_OP", "strategy.sharding_strategy"),
    ],
)
def test_an_option_of_llama_cookbook_changes_what_it_says(words, name):
    assert name in changed(cook(), cook(words))


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("--freeze_layers", "trains some layers alone"),
        ("--quantization 4bit", "weights in 4 bits are not trained; say --use_peft"),
        ("--quantization", "8 bits"),
        ("--use_peft --sharding_strategy NO_SHARD", "NO_SHARD' is not played beside --use_peft"),
    ],
)
def test_what_llama_cookbook_trains_otherwise_is_refused_with_why(words, match):
    with pytest.raises(ScenarioError, match=match):
        cook(words)


ALONE = COOK.replace("torchrun --nnodes 1 --nproc_per_node 8", "python").replace("--enable_fsdp", "")


def alone(more=""):
    return fields(("run.sh", f"{ALONE} {more}"), machine={"topology": "hgx-h100"})


def test_without_fsdp_llama_cookbook_is_one_gpu():
    had = alone()
    assert (had["strategy.kind"], had["strategy.param_dtype"]) == ("single", "bf16")


def test_adapters_of_llama_cookbook_are_pefts():
    had = alone("--use_peft --quantization 4bit")
    assert (had["model.adapter.rank"], had["model.adapter.target_modules"]) == (8, ("q_proj", "v_proj"))
    assert had["model.adapter.load_in_4bit"] is True
    assert alone("--use_peft --lora_config.r 32")["model.adapter.rank"] == 32
    with pytest.raises(ScenarioError, match="prefixes of attention"):
        alone("--use_peft --peft_method llama_adapter")


def test_adapters_beside_fsdp_are_played_as_fsdp2s_and_it_is_said():
    made = read(("run.sh", f"{COOK} --use_peft --peft_method lora --pure_bf16"))
    had = exchange.canonical(made.scenario)
    assert (had["strategy.kind"], had["strategy.version"] or 2, had["model.adapter.rank"]) == ("fsdp", 2, 8)
    assert any("are played as FSDP2's" in note for note in made.notes)
