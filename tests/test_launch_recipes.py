"""Configurations that hold a whole run, of frameworks that are read only; what no scenario plays is refused."""

from __future__ import annotations

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch import shapes
from clustersim.files.launch.files import document
from clustersim.files.launch.whose import framework_of

pytest.importorskip("yaml", reason="needs pyyaml (the exchange extra)")

MACHINE = {"topology": "hgx-h100", "nodes": 1}
TRAINER = (
    "model_name_or_path: meta-llama/Meta-Llama-3-8B\nper_device_train_batch_size: 2\ncutoff_len: 2048\nbf16: true\n"
)
COMMAND = "--model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 4"
TUNE = """
model:
  _component_: torchtune.models.llama3_1.llama3_1_8b
tokenizer:
  max_seq_len: 4096
batch_size: 2
gradient_accumulation_steps: 8
optimizer:
  _component_: torch.optim.AdamW
  fused: true
optimizer_in_bwd: false
enable_activation_checkpointing: true
dtype: bf16
"""
NEOX = """{
  "pipe-parallel-size": 2, "model_parallel_size": 2, "num-layers": 44, "hidden-size": 6144, # a comment
  "num-attention-heads": 64, "seq-length": 2048, "max-position-embeddings": 2048, "pos-emb": "rotary",
  "no-weight-tying": true, "gpt_j_residual": true, "attention_config": [[["flash"], 44]],
  "optimizer": {"type": "Adam", "params": {"lr": 1.0e-4,}},
  "zero_optimization": {"stage": 1, "overlap_comm": True}, "fp16": {"enabled": true, "type": "bfloat16"},
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32, "checkpoint-activations": true,
}"""
NANOTRON = """
parallelism: {dp: 2, pp: 2, tp: 2, pp_engine: afab, tp_mode: REDUCE_SCATTER}
tokens: {sequence_length: 2048, micro_batch_size: 2, batch_accumulation_per_replica: 8, train_steps: 10}
optimizer: {zero_stage: 1, accumulate_grad_in_fp32: true, optimizer_factory: {name: adamW, torch_adam_is_fused: true}}
model:
  dtype: bfloat16
  model_config:
    {hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, num_attention_heads: 32,
     num_key_value_heads: 8, vocab_size: 128256, tie_word_embeddings: false}
"""
FOUNDRY = """
max_seq_len: 2048
model:
  {name: mpt_causal_lm, d_model: 1024, n_heads: 16, n_layers: 24, expansion_ratio: 4, max_seq_len: "${max_seq_len}",
   vocab_size: 50368, attn_config: {attn_impl: flash}}
train_loader: {name: text}
optimizer: {name: decoupled_adamw, lr: 1.0e-4}
global_train_batch_size: 64
device_train_microbatch_size: 16
precision: amp_bf16
fsdp_config: {sharding_strategy: FULL_SHARD, mixed_precision: PURE, activation_checkpointing: true}
"""
OLMO = """
model:
  {d_model: 4096, n_heads: 32, n_layers: 32, mlp_hidden_size: 22016, weight_tying: false, rope: true,
   include_bias: false,
   layer_norm_type: rms, activation_type: swiglu, attention_dropout: 0.0, residual_dropout: 0.0, flash_attention: true,
   max_sequence_length: 2048, vocab_size: 32000, embedding_size: 32000, block_type: sequential, alibi: false}
precision: amp_bf16
fsdp: {wrapping_strategy: by_block, precision: mixed}
global_train_batch_size: 64
device_train_microbatch_size: 2
"""
LIGHTNING = """
trainer: {strategy: fsdp, devices: [0, 1, 2, 3], num_nodes: 2, precision: bf16-mixed, accumulate_grad_batches: 4}
model: {class_path: mine.Module, init_args: {lr: 0.1}}
data: {class_path: mine.Data, init_args: {batch_size: 4, max_length: 1024}}
"""
LITGPT = """
checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B
precision: bf16-true
devices: 4
num_nodes: 1
lora_r: 32
lora_query: true
lora_mlp: true
train: {max_seq_length: 512, global_batch_size: 64, micro_batch_size: 2, lr_warmup_steps: 10, epochs: 2}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.0002}}
"""
WHOLE = {
    "torchtune": (
        TUNE,
        {
            "model.name": "llama3.1-8b",
            "model.seq_len": 4096,
            "strategy.kind": "fsdp",
            "strategy.orig_dtype": "bf16",
            "strategy.reduce_dtype": "bf16",
            "batch.micro": 2,
            "batch.count": 8,
            "model.activation_checkpointing": "full",
            "run.optimizer_impl": "fused",
        },
    ),
    "neox": (
        NEOX,
        {
            "model.name": "gpt-neox-20b",
            "parallel.pp": 2,
            "parallel.tp": 2,
            "strategy.kind": "zero",
            "strategy.param_dtype": "bf16",
            "batch.micro": 4,
            "batch.count": 32,
            "model.attention": "fa2",
            "model.activation_checkpointing": "full",
        },
    ),
    "nanotron": (
        NANOTRON,
        {
            "model.name": "llama3-8b",
            "parallel.tp": 2,
            "parallel.pp": 2,
            "parallel.schedule": "gpipe",
            "parallel.sequence_parallel": True,
            "parallel.use_distributed_optimizer": True,
            "batch.micro": 2,
            "batch.count": 8,
        },
    ),
    "foundry": (
        FOUNDRY,
        {
            "model.name": "mpt-350m",
            "strategy.kind": "fsdp",
            "strategy.version": 1,
            "strategy.reduce_dtype": "bf16",
            "model.attention": "fa2",
            "batch.micro": 8,  # what a replica has of the step, where it is less
            "batch.count": 1,
        },
    ),
    "olmo": (
        OLMO,
        {
            "model.name": "llama-7b",
            "strategy.kind": "fsdp",
            "strategy.reduce_dtype": "fp32",
            "model.seq_len": 2048,
            "batch.micro": 2,
            "batch.count": 4,
        },
    ),
    "litgpt": (
        LITGPT,
        {
            "model.name": "llama3.2-1b",
            "strategy.kind": "fsdp",
            "strategy.orig_dtype": "bf16",
            "cluster.gpus_per_node": 4,
            "model.seq_len": 512,
            "model.activation_checkpointing": "full",
            "model.adapter.rank": 32,
            "model.adapter.dropout": 0.05,
            "model.adapter.target_modules": ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
            "batch.micro": 2,
            "batch.count": 8,
        },
    ),
    "lightning": (
        LIGHTNING,
        {
            "model.name": "llama3-8b",
            "strategy.kind": "fsdp",
            "cluster.gpus_per_node": 4,
            "model.seq_len": 1024,
            "batch.micro": 4,
            "batch.count": 4,
        },
    ),
}


def read(*texts, machine=MACHINE, **asked):
    return exchange.read([document(text, name) for name, text in texts], machine, **asked)


def test_lightnings_batch_norm_of_all_ranks_is_said_not_to_be_played():
    text = LIGHTNING.replace("trainer: {", "trainer: {sync_batchnorm: true, ")
    made = read(("a.yml", text), machine={"topology": "hgx-h100"}, model="llama3-8b")
    assert made.unplayed["trainer.sync_batchnorm"] == (
        "every rank normalises by its own samples, and nothing is exchanged for it"
    )
    off = read(
        ("a.yml", text.replace("norm: true", "norm: false")), machine={"topology": "hgx-h100"}, model="llama3-8b"
    )
    assert "trainer.sync_batchnorm" not in off.unplayed


@pytest.mark.parametrize("name", WHOLE)
def test_one_file_is_a_whole_run(name):
    text, fields = WHOLE[name]
    assert framework_of([document(text, "a.yml")]) == name
    machine = {"topology": "hgx-h100", "nodes": None if name == "lightning" else 1}
    made = read(("a.yml", text), machine=machine, model="llama3-8b" if name == "lightning" else None)
    table = made.scenario.table
    had = exchange.canonical(made.scenario) | {"model.name": table["model"]["name"]}
    had |= {f"cluster.{key}": value for key, value in table["cluster"].items()}
    assert {key: had.get(key) for key in fields} == fields
    assert not made.unknown


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        (TUNE, "\nquantizer: {_component_: a.B}", "fake quantization"),
        (TUNE.replace("llama3_1_8b", "lora_llama3_1_8b"), "", "no lora_attn_modules say where"),
        (NEOX.replace('"seq-length"', '"num_experts": 4, "seq-length"'), "", "has experts"),
        (NEOX.replace('"fa', '"fa').replace('[["flash"], 44]', '[["global", "local"], 22]'), "", "all layers have one"),
        (NANOTRON.replace("vocab_size", "moe_config: {num_experts: 8}, vocab_size"), "", "has experts"),
        (FOUNDRY.replace("expansion_ratio: 4", "expansion_ratio: none"), "", "expected a number above 0"),
        (NEOX.replace('"seq-length"', '"activation": "geglu", "seq-length"'), "", "gated MLP.*config.json"),
        (OLMO.replace("sequential", "moe"), "", "has experts"),
        (LIGHTNING, "", "give --model"),
        (TRAINER, "stage: dpo", "trains by DPO"),
        (TRAINER, "stage: rm", "reward model"),
        (TRAINER, "rl: grpo", "otherwise than on whole sequences"),
        (TRAINER, "max_prompt_length: 512", "is of DPO"),
        (TRAINER, "use_galore: true", "projections of gradients"),
        (LITGPT, "quantize: bnb.fp4", "quantize 'bnb.fp4' is not played"),
        (LITGPT.replace("max_seq_length: 512, ", ""), "", "no train.max_seq_length"),
        (LITGPT.replace("query: true\nlora_mlp: true", "query: false\nlora_value: false"), "", "nothing is trained"),
    ],
)
def test_what_no_scenario_plays_is_refused_with_its_name(text, more, words):
    with pytest.raises(ScenarioError, match=words):
        read(("a.yml", f"{text}{more}\n"))


def test_what_only_a_config_tells_is_taken_from_it():
    largest = FOUNDRY.replace("d_model: 1024", "d_model: 2048")
    assert read(("a.yml", largest.replace("attn_impl: flash", "alibi: true")), model="mpt-1b").unknown == ()


@pytest.mark.parametrize("program", ["examples/scripts/dpo.py", "grpo.py", "run_orpo.py", "reward_modeling.py"])
def test_a_script_of_another_kind_of_training_is_refused(program):
    with pytest.raises(ScenarioError, match=r"trains (by|a reward)"):
        read(("run.sh", f"accelerate launch --num_processes 8 {program} {COMMAND}"))


def test_degrees_of_axolotl_are_accelerates():
    text = (
        "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 2048\nmicro_batch_size: 1\noptimizer: adamw_torch_fused\n"
    )
    text += "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\ntensor_parallel_size: 2\nbf16: true\n"
    made = read(("a.yml", f"{text}dp_shard_size: 2\ndp_replicate_size: 2\n"))
    had = exchange.canonical(made.scenario)
    degrees = ("parallel.tp", "strategy.data_parallel_shard_degree", "strategy.data_parallel_replicate_degree")
    assert [had[name] for name in degrees] == [2, 2, 2]
    assert not made.unknown


CHAT = 'STAGE=$1\nif [ "$STAGE" == "" ]; then\n  STAGE=3\nfi\n'


def test_what_a_framework_has_where_its_file_says_nothing_is_no_contradiction():
    text = LIGHTNING.replace("num_nodes: 2, ", "")
    made = read(("a.yml", text), machine={"topology": "hgx-h100", "nodes": 2}, model="llama3-8b")
    assert made.tables["cluster"]["nodes"] == 2
    assert not any("as asked for" in note for note in made.notes)
    assert read(("a.yml", NEOX.replace('[[["flash"], 44]]', "[]"))).tables["model"]["attention"] == "eager"


def test_a_script_that_makes_deepspeeds_configuration_itself():
    made = read(("run.sh", f"{CHAT}deepspeed main.py {COMMAND} --max_seq_len 512 --zero_stage $STAGE --deepspeed"))
    had = exchange.canonical(made.scenario)
    assert (had["strategy.kind"], had["strategy.zero_optimization.stage"], had["model.dtype"]) == ("zero", 3, "fp16")
    assert (had["model.seq_len"], had["strategy.gradient_clipping"]) == (512, 1.0)
    with pytest.raises(ScenarioError, match="makes DeepSpeed's configuration itself"):
        read(("run.sh", f"deepspeed finetune.py {COMMAND} --deepspeed"))


@pytest.mark.parametrize(
    "words",
    [
        "trl sft --accelerate_config zero3",
        "deepspeed train.py --deepspeed zero3",
        "tune run full --config llama3/8B_full",
    ],
)
def test_a_configuration_that_is_named_by_a_word_is_asked_for(words):
    with pytest.raises(ScenarioError, match=r"names (zero3|llama3/8B_full); give that file too"):
        read(("run.sh", f"{words} {COMMAND if 'tune' not in words else ''}"))


@pytest.mark.parametrize(
    "launch",
    [
        "trl sft --num_processes 4",
        "python trl/scripts/sft.py",
        "accelerate launch --num_processes 4 ../trl/scripts/sft.py",
        "torchrun --nproc_per_node 4 -m trl.scripts.sft",
    ],
)
def test_trls_command_has_trls_defaults(launch: str):
    made = read(("run.sh", f"{launch} {COMMAND}"), machine={"topology": "hgx-h100", "nodes": 1})
    had = exchange.canonical(made.scenario)
    assert (had["model.activation_checkpointing"], had["model.dtype"], had["model.seq_len"]) == ("full", "bf16", 1024)
    assert any("as TRL 1.16 has it by default" in note for note in made.notes)


def test_a_script_of_trl_that_trains_otherwise_is_no_fine_tuning():
    for launch in ("trl dpo", "python trl/scripts/dpo.py"):
        with pytest.raises(ScenarioError, match="trains by DPO"):
            read(("run.sh", f"{launch} {COMMAND}"), machine={"topology": "hgx-h100", "nodes": 1})


def test_zero_stage_0_has_masters():
    text = '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 0}}'
    made = read(("ds.json", text), model="gpt2")
    held = made.scenario.run().to_dict()["memory"]["by"]
    assert held["gradients"] == pytest.approx(held["parameters"], rel=0.02)
    assert held["master_weights"] == pytest.approx(2 * held["parameters"], rel=0.02)


@pytest.mark.parametrize("width", [512, 768, 1024, 2880, 5120])
def test_a_dense_model_is_never_played_as_a_mixture(width):
    sizes = {
        "layers": 12,
        "d_model": width,
        "heads": width // 64,
        "gated": True,
        "norm": "rmsnorm",
        "positions": "rotary",
    }
    found = shapes.model_for("a.yaml", sizes | {"mlp_bias": False, "tied": False})
    assert "experts.count" not in shapes._shipped()[found.name]


def test_ranks_that_a_file_makes_of_its_degrees_are_compared():
    made = read(("a.yml", NANOTRON), machine={"topology": "hgx-h100", "nodes": 2})
    assert "16 ranks as asked for; a.yml: parallelism says 8" in made.notes


def test_a_check_that_ends_a_script_does_not_hide_its_command():
    words = 'if [ -z "$DATA" ]; then\n  echo "set DATA" >&2\n  exit 1\nfi\n'
    made = read(("run.sh", f"{words}accelerate launch --num_processes 8 sft.py {COMMAND} --block_size 512"))
    assert exchange.canonical(made.scenario)["model.seq_len"] == 512


TITAN = """
from torchtitan.trainer import Trainer
def llama3_8b() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()), model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4), training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        parallelism=ParallelismConfig(tensor_parallel_degree=2), activation_checkpoint=FullAC.Config(),
    )
def llama3_8b_mine() -> Trainer.Config:
    config = llama3_8b()
    config.training.seq_len = 4096
    config.compile = CompileConfig(enable=True, components=["model"], enable_async_tensor_parallel=True)
    config.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config(enable=True)])
    config.activation_checkpoint = None
    return config
def other() -> Trainer.Config:
    return other()
"""
"""As torchtitan 0.3 writes its configurations."""


def titan(config: str, options: str = "") -> exchange.LaunchImport:
    command = f"torchrun --nproc_per_node 8 --nnodes 1 -m torchtitan.train --module llama3 --config {config} {options}"
    return read(("run.sh", command), ("config_registry.py", TITAN))


def test_torchtitans_python_is_read_as_a_tree():
    had = exchange.canonical(titan("llama3_8b", "--training.local_batch_size 4").scenario)
    assert (had["model.seq_len"], had["batch.micro"], had["parallel.tp"]) == (8192, 4, 2)
    assert had["model.activation_checkpointing"] == "full"
    mine = exchange.canonical(titan("llama3_8b_mine").scenario)
    assert (mine["model.seq_len"], mine["model.implementation"], mine["model.dtype"]) == (4096, "fused", "fp8")
    assert (mine["parallel.tp_overlap"], mine["model.activation_checkpointing"]) == ("async_tp", "none")


@pytest.mark.parametrize(
    ("config", "words"), [("nope", "has no configuration 'nope'"), ("other", "made of each other in a circle")]
)
def test_a_configuration_of_python_that_is_none_is_refused(config, words):
    with pytest.raises(ScenarioError, match=words):
        titan(config)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Controller.Config", "trains by reinforcement learning"),
        ("GraphTrainer.Config", "traced and compiled as a whole"),
        ("FluxTrainer.Config", "makes images"),
        ("OwnBackendConfig", "is a OwnBackendConfig, which is not read"),
    ],
)
def test_what_another_trainer_of_torchtitan_does_is_said(kind, words):
    text = f"from torchtitan.own import model\ndef one() -> {kind}:\n    return made(llama3_8b())\n"
    with pytest.raises(ScenarioError, match=words):
        read(("config_registry.py", text))
    with pytest.raises(ScenarioError, match=words):
        exchange.read([document(text, "config_registry.py")], MACHINE, model="llama3-8b")


def test_torchtitans_images_are_refused_and_its_experts_may_have_8_bits():
    images = TITAN.replace("optimizer=", "dataloader=MMDataLoader.Config(dataset='own'), optimizer=")
    command = "torchrun --nproc_per_node 8 --nnodes 1 -m torchtitan.train --module llama3 --config llama3_8b"
    with pytest.raises(ScenarioError, match="reads images beside text"):
        read(("run.sh", command), ("config_registry.py", images))
    both = "converters=[Float8LinearConverter.Config(), Float8GroupedExpertsConverter.Config()]"
    experts = TITAN.replace('model_registry("8B")', f'model_registry("16B", {both})', 1)
    made = read(("run.sh", command.replace("--module llama3", "--module deepseek_v3")), ("config_registry.py", experts))
    assert exchange.canonical(made.scenario)["model.dtype"] == "fp8"


def test_of_many_configurations_of_python_one_must_be_named():
    with pytest.raises(ScenarioError, match=r"holds the configurations llama3_8b, .*give the script that has --config"):
        read(("config_registry.py", TITAN))
    with pytest.raises(ScenarioError, match="is a program, and none is run"):
        read(("train.py", "import torch"))


def test_arithmetic_that_is_left_to_a_trainer_is_said_to_be_fp32():
    text = '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}'
    assert any("bf16.enabled auto is what --bf16" in note for note in read(("ds.json", text), model="gpt2").notes)
    trainer = f"{TRAINER}deepspeed: ds.json\n".replace("size: 2", "size: 1")
    assert not any("bf16.enabled" in note for note in read(("a.yml", trainer), ("ds.json", text)).notes)


LLAMA = "torchrun --nproc_per_node 8 train.py --model_name_or_path meta-llama/Meta-Llama-3-8B --block_size 2048"
POST = '--fsdp full_shard --fsdp_config \'{"backward_prefetch": "backward_post"}\''


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--per_gpu_train_batch_size 2", "batch.micro", 2),
        ("--torch_dtype bfloat16", "strategy.param_dtype", "bf16"),
        ("--bf16 --tp_size 4", "parallel.tp", 4),
        (POST, "strategy.backward_prefetch", "BACKWARD_POST"),
        ("--attn_implementation xformers", "model.attention", "efficient"),
        ("--attn_implementation flash_attention_4", "model.attention", "fa4"),
    ],
)
def test_what_the_trainers_arguments_mean(words, field, value):
    made = read(("run.sh", f"{LLAMA} {words}"))
    assert exchange.canonical(made.scenario).get(field, made.tables["strategy"].get(field.split(".")[1])) == value
    assert not made.unknown


@pytest.mark.parametrize("words", ["--sharded_ddp zero_dp_3", "--no_cuda", "--config_overrides n_layer=4"])
def test_what_the_trainers_arguments_do_that_is_not_played(words):
    with pytest.raises(ScenarioError, match=words.split()[0]):
        read(("run.sh", f"{LLAMA} {words}"))


def test_a_head_of_few_labels_is_told():
    command = "run_glue.py --model_name_or_path bert-base-uncased --max_seq_length 128"
    made = read(("run.sh", f"torchrun --nproc_per_node 8 {command}"))
    assert any("head of few labels" in note for note in made.notes)


@pytest.mark.parametrize(("precision", "held"), [("amp_bf16", "bf16"), ("amp_fp16", "fp16"), ("fp32", "fp32")])
def test_pure_mixed_precision_reduces_in_the_parameters_type(precision, held):
    """Gradients were reduced in bf16 whatever the parameters were in."""
    made = read(("a.yml", FOUNDRY.replace("precision: amp_bf16", f"precision: {precision}")))
    had = exchange.canonical(made.scenario)
    assert had["strategy.reduce_dtype"] == held
    assert had["strategy.param_dtype"] == held
    plain = read(("a.yml", FOUNDRY.replace("PURE", "DEFAULT").replace("amp_bf16", precision)))
    assert exchange.canonical(plain.scenario)["strategy.reduce_dtype"] == "fp32"
    with pytest.raises(ScenarioError, match="'FULL' is not a choice"):
        read(("a.yml", FOUNDRY.replace("PURE", "FULL")))


def test_olmos_blocks_with_norms_behind_their_halves_are_olmo_2s() -> None:
    text = OLMO.replace("alibi: false", "alibi: false, norm_after: true, attention_layer_norm: true")
    made = exchange.read([document(text, "c.yaml")], {"topology": "hgx-h100", "nodes": 1})
    model = made.tables["model"]
    assert (model["name"], model["options"]["vocab"]) == ("olmo2-7b", 32000)
    with pytest.raises(ScenarioError, match="norms behind attention and the MLP, and is otherwise not as OLMo 2"):
        exchange.read([document(text.replace("rms", "default"), "c.yaml")], {"topology": "hgx-h100", "nodes": 1})
