"""Words of earlier releases, and files that are written as their readers allow: ms-swift 1 and 2, null twice."""

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document

MACHINE = {"topology": "hgx-h100", "nodes": 1}
SWIFT = (
    "NPROC_PER_NODE=4 swift sft --model_id_or_path /models/Qwen3-4B --template_type AUTO --dtype AUTO "
    "--batch_size 2 --gradient_accumulation_steps 4 --max_length 4096 --use_flash_attn true "
)


def script(text, *more, **asked):
    return exchange.read([document(text, "run.sh"), *more], {"topology": "hgx-h100"}, **asked)


def yaml(text, machine=MACHINE, **asked):
    return exchange.read([document(text, "a.yaml")], machine, **asked)


def test_ms_swift_before_3_is_read_in_its_own_words():
    made = script(f"{SWIFT} --sft_type full --deepspeed default-zero3\n")
    had = exchange.canonical(made.scenario)
    right = {"strategy.zero_optimization.stage": 3, "strategy.param_dtype": "bf16", "model.attention": "fa2"}
    right |= {"batch.micro": 2, "batch.count": 4, "model.seq_len": 4096}
    assert {key: had.get(key) for key in right} == right
    assert not {"--batch_size", "--dtype", "--use_flash_attn"} & {*made.unknown, *made.ignored}
    half = exchange.canonical(script(f"{SWIFT} --sft_type full\n".replace("AUTO --batch", "fp16 --batch")).scenario)
    assert half["model.dtype"] == "fp16"


def test_adapters_of_ms_swift_before_3_are_where_its_table_has_them():
    lora = f"{SWIFT} --sft_type lora --lora_rank 16 --lora_dropout_p 0.1 --quantization_bit 0"
    with pytest.raises(ScenarioError, match=r"ms-swift before 3 has adapters at modules that its table has"):
        script(f"{lora}\n")
    had = exchange.canonical(script(f"{lora} --lora_target_modules q_proj v_proj\n").scenario)
    assert had["model.adapter.target_modules"] == ("q_proj", "v_proj")
    assert (had["model.adapter.rank"], had["model.adapter.dropout"]) == (16, 0.1)
    run = SWIFT.replace("NPROC_PER_NODE=4 swift sft", "torchrun --nproc_per_node 4 src/llm_sft.py")
    assert script(f"{run} --sft_type lora --lora_target_modules ALL\n").framework.name == "accelerate"


def test_llamafactory_starts_ranks_on_its_own_node():
    run = (
        "llamafactory-cli train --model_name_or_path Qwen/Qwen3-4B --stage sft --finetuning_type full --cutoff_len 512"
    )
    made = script(f"{run} --bf16 --per_device_train_batch_size 1\n")
    assert made.scenario.table["cluster"]["nodes"] == 1
    assert "run.sh: one node, as llamafactory-cli starts ranks" in " ".join(made.notes)
    asked = exchange.read([document(f"{run} --bf16\n", "run.sh")], {"topology": "hgx-h100", "nodes": 2})
    assert asked.scenario.table["cluster"]["nodes"] == 2
    assert not any("one node" in note for note in asked.notes)
    with pytest.raises(ScenarioError, match="give --nodes"):
        script(f"export NNODES=$COUNT\n{run} --bf16\n")


def test_a_toml_that_torchtitan_names_is_asked_for():
    with pytest.raises(ScenarioError, match=r"--job\.config_file names \./own\.toml; give that file too"):
        script("torchrun --nproc_per_node 8 ./train.py --job.config_file ./own.toml\n")


def test_accelerates_arithmetic_is_read_in_whatever_case():
    text = "distributed_type: FSDP\nnum_machines: 1\nnum_processes: 8\nmixed_precision: BF16\n"
    made = yaml(f"{text}fsdp_config: {{fsdp_version: 2}}\n", model="qwen3-4b")
    assert exchange.canonical(made.scenario)["strategy.param_dtype"] == "bf16"
    # of an accelerate file alone nobody says the batch
    assert "no file says how many samples a rank takes at once: 8" in made.notes


WORDS = "'--num-layers', '4', '--hidden-size', '512', '--num-attention-heads', '8', '--seq-length', '256', "
WORDS += "'--max-position-embeddings', '256', '--micro-batch-size', '1', '--global-batch-size', '8'"
MEGATRON = "num_layers: 4\nhidden_size: 512\nnum_attention_heads: 8\nseq_length: 256\nmicro_batch_size: 1\n"
MEGATRON += "max_position_embeddings: 256\nglobal_batch_size: 8\ntensor_model_parallel_size: 1\n"


def test_a_key_that_is_null_first_is_what_it_is_later():
    made = yaml(f"ffn_hidden_size: null\n{MEGATRON}ffn_hidden_size: 1024\n")
    assert made.scenario.table["model"]["options"]["d_ff"] == 1024


def test_an_alias_of_one_value_is_that_value():
    made = yaml(MEGATRON.replace("seq_length: 256", "seq_length: &n 256").replace("dings: 256", "dings: *n"))
    assert made.scenario.table["model"]["seq_len"] == 256


@pytest.mark.parametrize("limits", ["5.5", "[1]", "text"])
def test_limits_of_a_pod_that_are_no_table_say_no_gpus(limits):
    command = f"[torchrun, --nproc_per_node, '8', pretrain_gpt.py, {WORDS}]"
    container = f"{{name: a, command: {command}, resources: {{limits: {limits}}}}}"
    job = (
        "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec:\n  pytorchReplicaSpecs:\n    Master:\n      replicas: 1\n"
    )
    made = yaml(f"{job}      template: {{spec: {{containers: [{container}]}}}}\n", {"topology": "hgx-h100"})
    assert made.scenario.table["cluster"]["gpus_per_node"] == 8
