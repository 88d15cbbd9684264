"""NeMo Automodel's YAML and prime-rl's TOML: what they say, what of them is told or refused, and whose they are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import Table
from clustersim.files import launch as exchange
from clustersim.files.launch import files

MACHINE = {"topology": "hgx-h100", "nodes": 2}
YAML = """
step_scheduler: {global_batch_size: 64, local_batch_size: 2, max_steps: 3}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, MODEL}
distributed: {DISTRIBUTED}
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}
dataset: {_target_: nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDataset, seq_len: 4096}
optimizer: {_target_: torch.optim.Adam}
"""
LLAMA = "pretrained_model_name_or_path: meta-llama/Llama-3.1-8B"
EXPERTS = "config: {pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B}, backend: {fake_balanced_gate: true, BACKEND}"
TOML = """
[model]
name = "Qwen/Qwen3-8B"
MODEL
[data]
batch_size = 64
seq_len = 4096
MORE
"""


def automodel(
    distributed: str = "strategy: fsdp2",
    model: str = LLAMA,
    more: str = "",
    command: str | None = None,
) -> exchange.LaunchImport:
    return read([files.document(sections(distributed, model, more), "c.yaml")], command)


def sections(distributed: str, model: str, more: str) -> str:
    """The file's text, with ``more`` in place of sections of the same names."""
    named = {line.partition(":")[0] for line in more.splitlines()}
    lines = YAML.replace("MODEL", model).replace("DISTRIBUTED", distributed).splitlines()
    return "\n".join([*(line for line in lines if line.partition(":")[0] not in named), more])


def prime(model: str = "", more: str = "", command: str | None = None) -> exchange.LaunchImport:
    return read([files.document(TOML.replace("MODEL", model).replace("MORE", more), "c.toml")], command)


def read(documents: Sequence[files.Document], command: str | None) -> exchange.LaunchImport:
    beside = [] if command is None else [files.document(f"{command}\n", "run.sh")]
    machine = MACHINE if command is None else {"topology": "hgx-h100"}
    return exchange.read([*beside, *documents], machine)


def had(made: exchange.LaunchImport) -> Table:
    return exchange.canonical(made.scenario) | {"model.name": made.scenario.file.model.name}


def test_a_file_of_automodel_is_fsdp2_of_16_bit_weights_that_reduces_once_a_step() -> None:
    made = automodel()
    fields = had(made)
    assert (made.framework.name, made.unknown) == ("automodel", ())
    assert (fields["model.name"], fields["model.seq_len"], fields["model.attention"]) == ("llama3.1-8b", 4096, "fa2")
    assert (fields["strategy.kind"], fields["strategy.version"], fields["strategy.no_sync"]) == ("fsdp", 2, True)
    types = [fields[f"strategy.{name}_dtype"] for name in ("param", "reduce", "orig")]
    assert types == ["bf16", "fp32", "bf16"]
    assert (fields["batch.micro"], fields["batch.count"], fields["run.optimizer"]) == (2, 2, "adam")
    assert fields["strategy.clip_grad_norm"] is True


@pytest.mark.parametrize(
    ("distributed", "model", "more", "field", "value"),
    [
        ("activation_checkpointing: true", "", "", "model.activation_checkpointing", "full"),
        ("activation_checkpointing: selective", "", "", "model.activation_checkpointing", "selective"),
        ("defer_fsdp_grad_sync: false", "", "", "strategy.no_sync", False),
        ("dp_replicate_size: 2", "", "", "strategy.data_parallel_replicate_degree", 2),
        ("cp_size: 2", "", "", "parallel.cp", 2),
        ("tp_size: 2", "", "", "run.optimizer_impl", "for-loop"),
        ("_target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager", "", "", "strategy.reduce_dtype", "bf16"),
        ("mp_policy: {reduce_dtype: bfloat16}", "", "", "strategy.reduce_dtype", "bf16"),
        ("", f"{LLAMA}, torch_dtype: float32", "", "strategy.orig_dtype", "fp32"),
        ("", f"{LLAMA}, attn_implementation: eager", "", "model.attention", "eager"),
        ("", f"{LLAMA}, backend: {{attn: te}}", "", "model.attention", "cudnn"),
        ("", "", "compile: {enabled: true}", "model.implementation", "fused"),
        ("", f"{LLAMA}, force_hf: true", "", "model.implementation", "liger"),
        ("", "", "packed_sequence: {packed_sequence_size: 2048}", "model.seq_len", 2048),
        ("", "", "fp8: {enabled: true, recipe_name: rowwise}", "model.float8_recipe", "rowwise"),
        ("", "", "clip_grad_norm: {max_norm: 0.0}", "strategy.clip_grad_norm", False),
        ("offload_policy: {_target_: torch.distributed.fsdp.CPUOffloadPolicy}", "", "", "strategy.cpu_offload", True),
    ],
)
def test_a_word_of_automodels_file_changes_what_it_says(
    distributed: str, model: str, more: str, field: str, value: object
) -> None:
    assert had(automodel()).get(field) != value
    assert had(automodel(distributed or "strategy: fsdp2", model or LLAMA, more))[field] == value


@pytest.mark.parametrize(
    ("distributed", "model", "more", "found"),
    [
        ("strategy: fsdp2", ", use_liger_kernel: false", "", None),
        ("tp_size: 2", "", "", None),
        ("strategy: fsdp2", "", "compile: {enabled: true}", "fused"),
    ],
)
def test_automodels_modules_of_transformers_have_ligers_kernels_but_where(
    distributed: str, model: str, more: str, found: str | None
) -> None:
    made = automodel(distributed, f"{LLAMA}, force_hf: true{model}", more)
    assert had(made).get("model.implementation") == found
    assert not made.unplayed


def test_dropout_behind_automodels_adapters_keeps_none_of_their_inputs() -> None:
    for position, dropped in (("", None), (", dropout_position: pre", 0.1)):
        adapter = automodel(more=f"peft: {{dim: 8, dropout: 0.1{position}}}").scenario.file.model.adapter
        assert adapter is not None
        assert (adapter.dropout or None) == dropped


def test_automodels_sections_of_0_2_are_those_of_today() -> None:
    now = automodel(
        "pp_size: 2, activation_checkpointing: true, pipeline: {pp_schedule: Interleaved1F1B, layers_per_stage: 8}",
        more="step_scheduler: {global_batch_size: 16, local_batch_size: 2}",
    )
    old = automodel(
        "pp_size: 2, mp_policy: {reduce_dtype: float32}",
        more="step_scheduler: {global_batch_size: 16, local_batch_size: 2}\n"
        "autopipeline: {pp_schedule: interleaved1f1b, layers_per_stage: 8, pp_microbatch_size: 1}\n"
        "parallelizer: {activation_checkpointing: true}",
    )
    assert had(now) == had(old)
    fields = had(now)
    assert (fields["parallel.schedule"], fields["batch.micro"]) == ("interleaved_1f1b", 1)
    assert fields["parallel.layers_per_virtual_stage"] == 8
    alone = automodel("pp_size: 1", more="autopipeline: {pp_schedule: interleaved1f1b, layers_per_stage: 8}")
    assert had(alone) == had(automodel())


def test_automodels_experts_are_spread_and_kept_gathered() -> None:
    fields = had(automodel("ep_size: 8", EXPERTS.replace("BACKEND", "attn: te")))
    assert (fields["parallel.ep"], fields["parallel.routing.kind"]) == (8, "round_robin")
    assert fields["strategy.reshard_after_forward"] is False
    again = had(automodel("ep_size: 8, moe: {reshard_after_forward: true}", EXPERTS.replace("BACKEND", "attn: te")))
    assert again["strategy.reshard_after_forward"] is True
    told = automodel("ep_size: 8", EXPERTS.replace("BACKEND", "dispatcher: deepep, linear: te")).unplayed
    assert told.keys() == {"model.backend.linear"}
    assert not automodel("ep_size: 8", EXPERTS.replace("BACKEND", "dispatcher: torch, linear: torch")).unplayed


@pytest.mark.parametrize(
    ("words", "played"),
    [
        ("dispatcher: torch", ("allgather", "deepep", False)),
        ("dispatcher: deepep", ("flex", "deepep", True)),
        ("dispatcher: hybridep", ("flex", "hybridep", True)),
        ("dispatcher: uccl_ep", ("flex", "uccl", True)),
        ("enable_deepep: true", ("flex", "deepep", True)),
        ("enable_deepep: false", ("allgather", "deepep", False)),
        ("attn: te", ("flex", "deepep", True)),
    ],
)
def test_automodels_dispatchers_are_played_by_their_words(words: str, played: tuple[object, ...]) -> None:
    fields = had(automodel("ep_size: 8", EXPERTS.replace("BACKEND", words)))
    names = ("parallel.dispatcher", "parallel.flex_backend", "parallel.permute_fusion")
    assert tuple(fields.get(name) for name in names) == played
    assert "parallel.dispatcher" not in had(automodel("ep_size: 1", EXPERTS.replace("BACKEND", words)))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("dispatcher: deepep_v2", "'deepep_v2' is not a choice that is played; known: torch, deepep, hybridep"),
        ("experts: torch_mm_mxfp8", "computes experts in 8 bits"),
        ("experts: mok", "kernels that are not played"),
    ],
)
def test_automodels_words_of_experts_that_are_not_played_are_refused(words: str, why: str) -> None:
    with pytest.raises(ScenarioError, match=why):
        automodel("ep_size: 8", EXPERTS.replace("BACKEND", words))


def test_automodels_norms_of_one_kernel_are_played_so() -> None:
    assert had(automodel("ep_size: 8", EXPERTS.replace("BACKEND", "rms_norm: te")))["model.implementation"] == "liger"
    apart = had(automodel("ep_size: 8", EXPERTS.replace("BACKEND", "rms_norm: te, rope_fusion: false")))
    assert apart["model.implementation"] != "liger"


@pytest.mark.parametrize(
    ("peft", "targets"),
    [
        ("dim: 16", ["all-linear"]),
        ("dim: 16, match_all_linear: true", ["all-linear", "lm_head"]),
        ("dim: 16, target_modules: [q_proj, v_proj]", ["q_proj", "v_proj"]),
    ],
)
def test_automodels_adapters_are_where_its_words_say(peft: str, targets: list[str]) -> None:
    made = automodel(more=f"peft: {{_target_: nemo_automodel.components._peft.lora.PeftConfig, {peft}}}")
    adapter = made.tables["model"]["adapter"]
    assert (adapter["rank"], adapter["target_modules"], adapter["base_dtype"]) == (16, targets, "bf16")


def test_losses_of_automodel_are_told_apart_by_their_classes() -> None:
    cut = automodel(more="loss_fn: {_target_: nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy}")
    assert had(cut)["model.loss"] == "cut"
    assert had(automodel()).get("model.loss") is None
    with pytest.raises(ScenarioError, match="'ChunkedCrossEntropy' is not a choice that is played"):
        automodel(more="loss_fn: {_target_: nemo_automodel.components.loss.chunked_ce.ChunkedCrossEntropy}")


@pytest.mark.parametrize(
    "command",
    [
        "automodel c.yaml --nproc-per-node 8 --step_scheduler.local_batch_size 4",
        "automodel finetune llm -c c.yaml --nproc-per-node=8 --step_scheduler.local_batch_size=4",
        "torchrun --nproc-per-node 8 examples/finetune.py --config c.yaml --step_scheduler.local_batch_size 4",
        "torchrun --nproc-per-node 8 -m nemo_automodel.cli.app c.yaml --step_scheduler.local_batch_size 4",
    ],
)
def test_a_command_of_automodel_counts_against_its_file(command: str) -> None:
    made = automodel(command=command)
    fields = had(made)
    assert made.unknown == ()
    assert (made.tables["cluster"]["nodes"], made.tables["cluster"]["gpus_per_node"]) == (1, 8)
    assert (fields["batch.micro"], fields["batch.count"]) == (4, 2)


def test_ranks_of_automodel_are_those_of_its_sizes() -> None:
    text = sections("dp_size: 8, tp_size: 2", LLAMA, "")
    made = exchange.read([files.document(text, "c.yaml")], {"topology": "hgx-h100"})
    assert made.tables["cluster"]["nodes"] == 2


@pytest.mark.parametrize(
    ("distributed", "model", "more", "problem"),
    [
        ("strategy: ddp", LLAMA, "", "is a strategy that is not read; fsdp2 is"),
        ("strategy: fsdp2", LLAMA, "recipe: nemo_automodel.recipes.vlm.finetune.FinetuneRecipeForVLM", "is not read"),
        ("strategy: fsdp2", LLAMA, "dataset: {_target_: a.squad}", "no file says how long a sample is"),
        ("strategy: fsdp2", LLAMA, "optimizer: {_target_: a.FusedAdam}", "keeps states in fp32 beside weights"),
        ("strategy: fsdp2", LLAMA, "peft: {target_modules: ['*.q_*']}", "is a pattern; list the modules"),
        ("strategy: fsdp2", LLAMA, "quantization: {load_in_4bit: true}", "weights in 4 bits are not trained"),
        ("strategy: fsdp2", LLAMA, "teacher_model: {name: a}", "distils a teacher"),
        ("strategy: fsdp2", "config: {_target_: transformers.Qwen3Config, num_hidden_layers: 4}", "",
         "is described otherwise than by its name"),
        ("pp_size: 2, pipeline: {pp_schedule: 1f1b}", LLAMA, "", "is 4 pipelines of 2 micro-batches after another"),
    ],
)  # fmt: skip
def test_what_is_not_understood_of_automodel_is_refused_by_name(
    distributed: str, model: str, more: str, problem: str
) -> None:
    with pytest.raises(ScenarioError, match=problem):
        automodel(distributed, model, more)


def test_a_file_of_prime_rl_is_fsdp2_with_masters_that_reduces_after_each_pass() -> None:
    made = prime()
    fields = had(made)
    assert (made.framework.name, made.unknown) == ("prime-rl", ())
    assert (fields["model.name"], fields["model.seq_len"], fields["model.attention"]) == ("qwen3-8b", 4096, "fa2")
    types = [fields[f"strategy.{name}_dtype"] for name in ("param", "reduce", "orig")]
    assert types == ["bf16", "fp32", "fp32"]
    assert (fields["batch.micro"], fields["batch.count"], fields["run.optimizer"]) == (1, 4, "adamw")
    assert fields.get("strategy.no_sync") in (None, False)


@pytest.mark.parametrize(
    ("model", "more", "field", "value"),
    [
        ("[model.ac]", "", "model.activation_checkpointing", "full"),
        ("ac = {freq = 1}", "", "model.activation_checkpointing", "full"),
        ("[model.ac_offloading]", "", "model.activation_checkpointing", "full"),
        ("[model.ac_offloading]", "", "model.activation_offloading", "inf"),
        ("[model.compile]", "", "model.implementation", "fused"),
        ("reduce_dtype = 'bfloat16'", "", "strategy.reduce_dtype", "bf16"),
        ("reshard_after_forward = false", "", "strategy.reshard_after_forward", False),
        ("cp = 2", "", "parallel.cp", 2),
        ("dp_replicate = 2", "", "strategy.data_parallel_replicate_degree", 2),
        ("", "micro_batch_size = 2", "batch.micro", 2),
        ("", "[optim]\nmax_norm = 0.0", "strategy.clip_grad_norm", False),
    ],
)
def test_a_word_of_prime_rls_file_changes_what_it_says(model: str, more: str, field: str, value: object) -> None:
    assert had(prime()).get(field) != value
    assert had(prime(model, more))[field] == value


@pytest.mark.parametrize(("deployment", "ranks"), [
    ("num_gpus = 4", (1, 4)), ("type = 'single_node'", (1, 1)),
    ("type = 'multi_node'\nnum_nodes = 4", (4, 8)),
])  # fmt: skip
def test_the_deployment_of_prime_rl_is_its_machine(deployment: str, ranks: tuple[int, int]) -> None:
    text = TOML.replace("MODEL", "").replace("MORE", f"[deployment]\n{deployment}")
    cluster = exchange.read([files.document(text, "c.toml")], {"topology": "hgx-h100"}).tables["cluster"]
    assert (cluster["nodes"], cluster["gpus_per_node"]) == ranks


def test_an_off_section_of_prime_rl_is_off_and_a_command_counts_against_the_file() -> None:
    assert had(prime("ac_offloading = 'None'\nac = 'None'")) == had(prime())
    run = "uv run torchrun --nproc-per-node 4 src/prime_rl/trainer/sft/train.py @ c.toml --data.batch-size 32"
    made = prime(command=run)
    assert (made.tables["cluster"]["gpus_per_node"], had(made)["batch.count"]) == (4, 8)


def test_adapters_of_prime_rl_are_of_its_own_linears() -> None:
    adapter = prime("[model.lora]\nrank = 4").tables["model"]["adapter"]
    assert adapter["rank"] == 4
    assert adapter["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    with pytest.raises(ScenarioError, match="a model with experts"):
        read([files.document(TOML.replace("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B").replace("MODEL", "[model.lora]")
                             .replace("MORE", ""), "c.toml")], None)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "[model]\nname = 'a/Qwen3-8B'\n[model.ac]\n[optim]\nlr = 1.0\n",
            "holds no data.batch_size and no data.seq_len",
        ),
        (
            "[model]\nname = 'a'\n[orchestrator]\nbatch_size = 8\n[trainer]\nmax = 1\n",
            "prime-rl's reinforcement learning",
        ),
        (TOML.replace("MODEL", "offload = 'full'").replace("MORE", ""), "is of a later release"),
        (TOML.replace("MODEL", "[model.ac]\nfreq = 2").replace("MORE", ""), "computes every few layers again"),
        (TOML.replace("MODEL", "[model.debug]\nnum_layers = 4").replace("MORE", ""), "changes the model's sizes"),
        (TOML.replace("MODEL", "fp8 = true").replace("MORE", ""), "DeepGEMM"),
    ],
)
def test_what_is_not_understood_of_prime_rl_is_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(ScenarioError, match=problem):
        exchange.read([files.document(text, "c.toml")], MACHINE)


def test_a_file_of_torchtitan_is_not_taken_for_prime_rls() -> None:
    text = "[model]\nname = 'llama3'\nflavor = '8B'\n[optimizer]\nlr = 1.0\n[training]\nlocal_batch_size = 1\n"
    assert exchange.read([files.document(text, "c.toml")], MACHINE).framework.name == "torchtitan"
