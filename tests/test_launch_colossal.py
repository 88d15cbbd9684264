"""Colossal-AI's own programs for language models: its llama benchmark, and its finetuning."""

from __future__ import annotations

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import Table
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document

RUN = "colossalai run --nproc_per_node 8 --hostfile hosts.txt "
BENCHMARK = f"{RUN} benchmark.py -g -x "
CHAT = f"{RUN} train_sft.py --pretrain meta-llama/Llama-2-7b-hf --plugin zero2 --batch_size 2 --max_len 1024 "
LLAMA = f"{RUN} train.py --pretrained meta-llama/Llama-2-7b-hf --plugin zero2 --batch_size 2 --mixed_precision bf16 "


def read(words: str, nodes: int = 2) -> exchange.LaunchImport:
    return exchange.read([document(words, "run.sh")], {"topology": "hgx-h100", "nodes": nodes})


def had(made: exchange.LaunchImport) -> Table:
    return exchange.canonical(made.scenario)


def test_low_level_zero_is_zero_of_stage_2_in_buckets_beside_backward() -> None:
    made = read(LLAMA)
    zero = made.tables["strategy"]["zero_optimization"]
    assert made.framework.name == "colossal"
    assert made.unknown == ()
    assert zero == {
        "stage": 2,
        "reduce_bucket_size": 12 * 2**20,
        "allgather_bucket_size": 12 * 2**20,
        "overlap_comm": True,
        "use_multi_rank_bucket_allreduce": False,
    }
    assert had(made)["strategy.param_dtype"] == had(made)["model.dtype"] == "bf16"
    assert made.tables["strategy"]["gradient_clipping"] == 1.0
    assert (had(made)["batch.micro"], had(made)["batch.count"], had(made)["model.seq_len"]) == (2, 1, 8192)
    assert any("played as a reduce of each part to its owner" in note for note in made.notes)


@pytest.mark.parametrize(
    ("words", "usual", "field", "value"),
    [
        ("--use_grad_checkpoint", LLAMA, "model.activation_checkpointing", "full"),
        ("--use_flash_attn", LLAMA, "model.attention", "fa2"),
        ("--accumulation_steps 4", LLAMA, "batch.count", 4),
        ("--max_length 4096", LLAMA, "model.seq_len", 4096),
        ("--grad_checkpoint", CHAT, "model.activation_checkpointing", "full"),
        ("--mixed_precision fp16", CHAT, "strategy.param_dtype", "fp16"),
        ("--accumulation_steps 2", CHAT, "batch.count", 2),
    ],
)
def test_a_word_of_colossals_finetuning_changes_what_it_says(words: str, usual: str, field: str, value: object) -> None:
    assert had(read(usual)).get(field) != value
    assert had(read(f"{usual} {words}"))[field] == value


def test_an_optimizer_on_the_host_is_offloaded() -> None:
    zero = read(LLAMA.replace("zero2", "zero2_cpu")).tables["strategy"]["zero_optimization"]
    assert zero["offload_optimizer"]["device"] == "cpu"


def test_letters_of_colossals_benchmark_are_its_long_options() -> None:
    short = read(f"{BENCHMARK} -p 3d -b 16 -c 13b -l2048 --zero 1 --tp 4")
    long = "benchmark.py --plugin 3d --batch_size 16 --config 13b --max_length 2048 --zero 1 --tp 4"
    assert had(short) == had(read(f"{RUN} {long} --grad_checkpoint --xformers"))
    assert short.tables["model"]["name"] == "llama2-13b"
    assert (had(short)["parallel.tp"], had(short)["batch.micro"]) == (4, 16)
    assert short.tables["strategy"]["zero_optimization"]["stage"] == 1


def test_a_pipeline_of_colossals_benchmark_cuts_its_batch() -> None:
    fields = had(read(f"{BENCHMARK} -p 3d --pp 4 --tp 2 -b 16 --mbs 2 --zero 1"))
    assert (fields["parallel.pp"], fields["parallel.tp"], fields["parallel.schedule"]) == (4, 2, "1f1b")
    assert (fields["batch.micro"], fields["batch.count"]) == (2, 8)
    alone = read(f"{BENCHMARK} -p 3d --pp 8 -b 16", nodes=1)
    assert alone.tables["strategy"]["kind"] == "ddp"


def test_sequences_are_split_with_tensors_where_colossal_does_so() -> None:
    hybrid = LLAMA.replace("zero2", "3d") + "--zero_stage 1 --tp 2 --enable_sequence_parallelism "
    assert had(read(hybrid))["parallel.sequence_parallel"] is True
    assert any("logits are split" in note for note in read(hybrid).notes)
    with pytest.raises(ScenarioError, match="--sp_mode ring is not played"):
        read(f"{hybrid} --sp_mode ring")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (f"{BENCHMARK} -b 16", "--plugin, by default, 'gemini' keeps parameters in chunks"),
        (f"{BENCHMARK} -p gemini_auto", "keeps parameters in chunks whose places Gemini chooses"),
        (f"{BENCHMARK} -p fsdp", "wraps the model in one unit of FSDP1"),
        (f"{BENCHMARK} -p 3d -b 4", "without a stage of ZeRO"),
        (f"{BENCHMARK} -p 3d --zero 1 --sp 2", "splits sequences over further ranks"),
        (f"{BENCHMARK} -p 3d --pp 2 --zero 1 --pp_style interleaved --n_chunks 2", "has several chunks a stage"),
        (f"{BENCHMARK} -p 3d --zero 1 --custom-ckpt", "computes some layers of each stage again"),
        (f"{LLAMA} --freeze_non_embeds_params", "trains the embeddings alone"),
        (f"{CHAT} --lora_rank 8", "trains adapters of its own kind"),
        (LLAMA.replace("zero2", "ddp"), "averages gradients of 16 bits that have no masters"),
        (LLAMA.replace("zero2", "3d") + "--zero_stage 1 --accumulation_steps 4", "beside stage 1"),
        (f"{RUN} train_rm.py --pretrain own --plugin zero2", "another program of Colossal-AI's"),
        ("torchrun --nproc_per_node 4 train_sft.py --pretrain own --strategy colossalai_zero2", "another program of"),
        (f"{RUN} pretrain.py -p 3d --tp 4 --zero 1", "another program of Colossal-AI's"),
    ],
)
def test_what_colossal_does_otherwise_is_refused_with_what_to_do(words: str, why: str) -> None:
    with pytest.raises(ScenarioError, match=why):
        read(words)


def test_colossals_launcher_says_the_machine() -> None:
    one = exchange.read([document(LLAMA.replace("--hostfile hosts.txt", ""), "run.sh")], {"topology": "hgx-h100"})
    assert one.tables["cluster"]["nodes"] == 1
    two = LLAMA.replace("--hostfile hosts.txt", "--host a,b")
    assert exchange.read([document(two, "run.sh")], {"topology": "hgx-h100"}).tables["cluster"]["nodes"] == 2
    four = LLAMA.replace("--hostfile hosts.txt", "--num_nodes 4")
    assert exchange.read([document(four, "run.sh")], {"topology": "hgx-h100"}).tables["cluster"]["nodes"] == 4
