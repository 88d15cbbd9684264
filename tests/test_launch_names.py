"""What names, placeholders and the release of an option tell, which no option says."""

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document

MACHINE = {"topology": "hgx-h100", "nodes": 1}
BARE = "--per_device_train_batch_size 1 --max_seq_length 1024 --bf16 --model_name_or_path Qwen/Qwen3-8B"


def script(text, name="run.sh", **asked):
    return exchange.read([document(text, name)], MACHINE, **asked)


# ---- who starts a script ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start", ["python train.py", "python train/sft/own.py", "/opt/bin/python3 a/own.py", "python -m own"]
)
def test_a_script_in_a_folder_that_no_launcher_starts_is_told_of(start):
    words = "no launcher starts"
    assert any(words in note for note in script(f"export CUDA_VISIBLE_DEVICES=0,1\n{start} {BARE}").notes)
    assert not any(words in note for note in script(f"torchrun --nproc_per_node 8 a/own.py {BARE}").notes)


def test_nanogpts_script_in_a_folder_is_one_gpu():
    config = document("n_layer = 4\nn_head = 4\nn_embd = 128\nblock_size = 64\n", "config/own.py")
    made = exchange.read(
        [document("python nanoGPT/train.py config/own.py", "run.sh"), config], {"topology": "hgx-h100"}
    )
    assert made.tables["strategy"]["kind"] == "single"


@pytest.mark.parametrize(
    ("start", "told"),
    [("torchrun", True), ("python -m torch.distributed.launch", True), ("torchrun --nproc_per_node 8", False)],
)
def test_torchrun_without_a_number_of_ranks_is_told_of(start, told):
    notes = script(f"{start} train.py {BARE}").notes
    assert any("torchrun has no --nproc_per_node" in note for note in notes) == told


# ---- placeholders ----------------------------------------------------------------------------------------------------


def test_a_word_in_angle_brackets_is_to_be_filled_in_and_takes_no_option_with_it():
    with pytest.raises(ScenarioError, match=r"path_to_the_model.* is set nowhere in the script"):
        script(f"torchrun --nproc_per_node 8 train.py {BARE.replace('Qwen/Qwen3-8B', '<path to the model>')}")
    made = script(f"torchrun --master_addr <your-ip> --nproc_per_node 2 train.py --output_dir=<out> {BARE}")
    assert made.tables["cluster"]["gpus_per_node"] == 2


@pytest.mark.parametrize(
    "redirection", ["<in.txt >out.txt", "< in.txt > out.txt", "<in.txt > out.txt", "2>&1 | tee a.log"]
)
def test_redirections_are_none(redirection):
    made = script(f"torchrun --nproc_per_node 2 train.py {BARE} {redirection}")
    assert made.tables["cluster"]["gpus_per_node"] == 2
    assert not made.unknown


def test_angle_brackets_within_quotes_are_themselves():
    made = script(f"torchrun --nproc_per_node 2 train.py {BARE} --run_name '<own>' --output_dir \"<out>/a\"")
    assert not any("nothing in the script says" in note for note in made.notes)


# ---- adapters that a name alone tells of -----------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["finetune_lora.py", "-m own.run-lora-packed", "train.py --output_dir out/qlora-8b"])
def test_a_name_that_tells_of_adapters_is_asked_about(start):
    with pytest.raises(ScenarioError, match=r"tells of q?lora, and no word that is known asks for adapters"):
        script(f"torchrun --nproc_per_node 2 {start} {BARE}")
    assert script(f"torchrun --nproc_per_node 2 {start} {BARE} --use_peft false").tables["strategy"]["kind"] == "ddp"


def test_a_name_with_these_letters_in_another_word_tells_nothing():
    assert script(f"torchrun --nproc_per_node 2 explorations.py {BARE} --output_dir out/floral").tables


def test_llamafactorys_folder_is_not_asked_about_where_all_parameters_are_trained():
    words = "llamafactory-cli train --stage sft --finetuning_type full --output_dir saves/lora --cutoff_len 512 --bf16"
    assert script(f"{words} --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1").tables


# ---- Megatron-LM -----------------------------------------------------------------------------------------------------

LLAMA_70B = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 "
    "--num-attention-heads 64 --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear --seq-length 4096 "
    "--max-position-embeddings 8192 --attention-dropout 0 --hidden-dropout 0 --tensor-model-parallel-size 8 "
    "--micro-batch-size 1 --global-batch-size 8 --bf16 "
)


@pytest.mark.parametrize(
    ("name", "words", "model"),
    [
        ("submit-llama3-70b.sh", "", "llama3-70b"),
        ("run.sh", "--load /ckpt/Llama-2-70B_mcore", "llama2-70b"),
        ("run.sh", "--wandb-exp-name codellama_70b", "codellama-70b"),
        ("submit-llama3-70b.sh", "--vocab-size 32000", "llama2-70b"),
    ],
)
def test_models_of_the_same_sizes_are_told_apart_by_names_where_nobody_says_the_vocabulary(name, words, model):
    assert script(LLAMA_70B + words, name).tables["model"]["name"] == model


@pytest.mark.parametrize(
    ("words", "in_fp32"),
    [
        ("", None),
        ("--use-precision-aware-optimizer --main-grads-dtype bf16", False),
        ("--use-precision-aware-optimizer --main-grads-dtype fp32", None),
        ("--accumulate-allreduce-grads-in-fp32", True),
    ],
)
def test_gradients_are_reduced_in_the_type_that_the_optimizer_takes_them_in(words, in_fp32):
    # validate_args of megatron/training/arguments.py: fp32 where main_grads_dtype is, which it is by default
    assert script(LLAMA_70B + words).tables["parallel"].get("grad_reduce_in_fp32") == in_fp32


GPT = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 "
    "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8 --fp16 "
)


@pytest.mark.parametrize(
    ("words", "implementation", "attention"),
    [
        ("", "fused", None),
        ("--DDP-impl local", "megatron", "eager"),
        ("--checkpoint-activations", "megatron", "eager"),
        ("--DDP-impl torch --use-flash-attn", "megatron", "fa2"),
        ("--DDP-impl local --transformer-impl transformer_engine", "fused", None),
        ("--transformer-impl local", "megatron", "eager"),
        ("--transformer-impl local --attention-backend fused", "megatron", "cudnn"),
    ],
)
def test_kernels_are_those_of_the_release_that_had_the_option(words, implementation, attention):
    model = script(GPT + words).tables["model"]
    assert (model["implementation"], model.get("attention")) == (implementation, attention)


def test_torchtitans_llama_2_is_known_by_its_flavor():
    model = '[model]\nname = "llama2"\nflavor = "13B"\n'
    text = f"{model}[training]\nbatch_size = 2\nseq_len = 4096\ndata_parallel_degree = -1\n"
    made = exchange.read([document(text, "a.toml")], MACHINE)
    assert made.tables["model"]["name"] == "llama2-13b"


# ---- NeMo 1 and its launcher -----------------------------------------------------------------------------------------

LAUNCHED = (
    "python3 /opt/NeMo-Megatron-Launcher/launcher_scripts/main.py training=llama/own stages=[training] data_dir=/data "
    "training.trainer.num_nodes=2 training.model.global_batch_size=64 "
)
CONF = """
defaults: [_self_]
hydra: {searchpath: [file:///opt/NeMo/examples/nlp/language_modeling/conf]}
run: {name: own, results_dir: "${base_results_dir}/${.name}"}
trainer: {num_nodes: 64, devices: 8, precision: bf16}
model: {micro_batch_size: 1, global_batch_size: 2048, tensor_model_parallel_size: 2, num_layers: 32, hidden_size: 4096,
  ffn_hidden_size: 14336, num_attention_heads: 32, num_query_groups: 8, encoder_seq_length: 8192, bias: false,
  activation: fast-swiglu, normalization: rmsnorm, position_embedding_type: rope, hidden_dropout: 0,
  attention_dropout: 0, share_embeddings_and_output_weights: false, megatron_amp_O2: true,
  max_position_embeddings: 8192,
  optim: {name: mcore_distributed_optim, overlap_grad_sync: true}}
"""


def test_a_command_of_nemos_launcher_changes_the_file_that_it_chooses():
    with pytest.raises(ScenarioError, match="training names llama/own; give that file too"):
        script(LAUNCHED)
    made = exchange.read([document(LAUNCHED, "run.sh"), document(CONF, "own.yaml")], {"topology": "hgx-h100"})
    assert (made.tables["cluster"]["nodes"], made.tables["parallel"]["global_batch_size"]) == (2, 64)
    assert not made.unknown


@pytest.mark.parametrize(("word", "in_fp32"), [("fp32", None), ("bf16", False), ("torch.bfloat16", False)])
def test_nemo_1_reduces_gradients_in_the_type_that_its_optimizer_says(word, in_fp32):
    # megatron_gpt_model.py setup_mcore_distributed_parallel: grad_reduce_in_fp32 of optim.grad_sync_dtype
    conf = document(CONF.replace("overlap_grad_sync", f"grad_sync_dtype: {word}, overlap_grad_sync"), "own.yaml")
    made = exchange.read([conf], {"topology": "hgx-h100"})
    assert made.tables["parallel"].get("grad_reduce_in_fp32") == in_fp32


# ---- configurations that are programs of a framework that is not read ------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "title"),
    [
        ("own.py", "pretrained_model_name_or_path = 'a/b'\nbatch_size = 1\naccumulative_counts = 16\n", "XTuner"),
        ("run.sh", "NPROC_PER_NODE=8 xtuner train own_qlora --deepspeed deepspeed_zero2\n", "XTuner"),
        ("own.py", "hybrid_zero_optimizer = dict(clip_grad_norm=1.0)\nparallel = dict(tensor=1)\n", "InternEvo"),
    ],
)
def test_programs_of_frameworks_that_are_not_read_are_told_by_name(name, text, title):
    with pytest.raises(ScenarioError, match=f"is of {title}, whose files are not read"):
        script(text, name)
