"""Programs that take a recipe of NeMo 2: what the tree tells counts, and what only running tells is asked for."""

from __future__ import annotations

import ast

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch import nemo_python, nemo_recipes
from clustersim.files.launch.files import document
from clustersim.files.launch.megatron_adapters import CLASSES
from clustersim.files.launch.python_values import UNREAD, ProgramValues
from clustersim.files.launch.table import load
from clustersim.scenario.run.parts import transformer_of

HEAD = "import nemo_run as run\nfrom nemo.collections import llm\n"
TAKEN = f"{HEAD}recipe = llm.llama3_70b.pretrain_recipe(num_nodes=8)\n"


def read(text: str) -> dict[str, object]:
    return dict(nemo_python.options(ast.parse(text), "a.py")[0])


@pytest.mark.parametrize("name", sorted(nemo_recipes.recipes())[::3])
def test_recipes_of_the_table_are_scenarios(name: str) -> None:
    recipe = nemo_recipes.recipes()[name]
    nodes = max(recipe.nodes, recipe.tp * recipe.pp * recipe.cp // 4)
    made = exchange.read(
        [document(f"{HEAD}run.run(llm.{name}.pretrain_recipe(num_nodes={nodes}))\n", "a.py")], {"topology": "hgx-h100"}
    )
    had = exchange.canonical(made.scenario)
    assert (had["parallel.tp"], had["parallel.pp"], had["parallel.cp"]) == (recipe.tp, recipe.pp, recipe.cp)
    assert (had["batch.global"], had["model.seq_len"]) == (recipe.batch, recipe.seq)
    assert made.framework.name == "nemo"


TUNED = [name for name, recipe in nemo_recipes.recipes().items() if recipe.tuned is not None]


@pytest.mark.parametrize("name", TUNED[::3])
def test_recipes_that_tune_all_parameters_are_scenarios(name: str) -> None:
    tuned = nemo_recipes.recipes()[name].tuned
    assert tuned is not None
    call = f"llm.{name}.finetune_recipe(num_nodes={tuned.nodes}, peft_scheme=None)"
    made = exchange.read([document(f"{HEAD}run.run({call})\n", "a.py")], {"topology": "hgx-h100"})
    had = exchange.canonical(made.scenario)
    assert (had["parallel.tp"], had["parallel.pp"]) == (tuned.tp, tuned.pp)
    assert (had["batch.global"], had["model.seq_len"]) == (128, 2048)
    assert not had["parallel.overlap_grad_reduce"]


def test_a_recipe_that_tunes_packs_as_it_is_told() -> None:
    head = "from nemo.collections.llm.recipes.llama3_8b import finetune_recipe as own\n"
    packed = read(f"{head}a = own(peft_scheme='none', packed_sequence=True, seq_length=8192)\n")
    assert (packed["data.global_batch_size"], packed["data.seq_length"]) == (8, 8192)
    for more, words in (
        ("", "trains an adapter \\(lora\\), as finetune_recipe does by default"),
        ("peft_scheme='dora'", "trains an adapter \\(dora\\), which is read of YAML files"),
        ("peft_scheme=f()", "is given peft_scheme, which only running tells"),
        ("peft_scheme=None, packed_sequence=True", "does not say seq_length"),
    ):
        with pytest.raises(ScenarioError, match=words):
            read(f"{head}a = own({more})\n")
    with pytest.raises(ScenarioError, match="finetune_recipe of gpt3_175b is in no table here"):
        read(f"{HEAD}a = llm.gpt3_175b.finetune_recipe()\n")


def test_every_model_of_the_recipes_is_one_that_the_table_names() -> None:
    row = next(row for row in load("nemo").rows if row.option == "model.config._target_")
    known = {str(pair[0]) for pair in row.map or ()}
    assert {recipe.model for recipe in nemo_recipes.recipes().values()} <= known


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("if TP:\n    recipe.trainer.strategy.tensor_model_parallel_size = 8\n", "only running tells whether"),
        ("part = recipe.trainer.strategy\n", "a second name for recipe.trainer.strategy"),
        ("changed(recipe.trainer)\n", "hands the recipe to changed"),
        ("setattr(recipe, 'model', None)\n", "hands the recipe to setattr"),
        ("recipe.trainer.num_nodes *= 2\n", "which is not followed"),
        ("recipe.trainer.strategy.update(a=1)\n", "may change the recipe"),
        ("recipe.data.global_batch_size = f()\n", "only running tells: write its value"),
        ("recipe.data.micro_batch_size: int = 2\n", "which is not followed"),
        ("other = llm.llama3_8b.pretrain_recipe(num_nodes=8)\n", "takes several recipes"),
        ("def g():\n    recipe.trainer.devices = 4\n", "which is not followed"),
    ],
)
def test_what_may_change_a_recipe_unseen_is_refused(more: str, words: str) -> None:
    assert read(TAKEN)["trainer.num_nodes"] == 8
    with pytest.raises(ScenarioError, match=words):
        read(TAKEN + more)


FAST = [name for name, recipe in nemo_recipes.recipes().items() if recipe.fast is not None]


@pytest.mark.parametrize("name", FAST)
def test_recipes_in_fast_mode_are_scenarios(name: str) -> None:
    recipe = nemo_recipes.recipes()[name]
    assert recipe.fast is not None
    ranks = (recipe.fast.tp or recipe.tp) * recipe.pp * recipe.cp
    call = f"llm.{name}.pretrain_recipe(num_nodes={max(recipe.nodes, ranks // 4)}, performance_mode=True)"
    had = exchange.canonical(
        exchange.read([document(f"{HEAD}run.run({call})\n", "a.py")], {"topology": "hgx-h100"}).scenario
    )
    assert had["parallel.tp"] == (recipe.fast.tp or recipe.tp)
    assert had["parallel.ep"] == (recipe.fast.ep or recipe.ep)
    assert had.get("parallel.grad_reduce_in_fp32", True) is not recipe.fast.sixteen
    assert had.get("parallel.capacity_factor") == (1.0 if recipe.fast.dropping else None)
    waits = recipe.fast.deferred if recipe.pp > 1 else None
    assert had.get("parallel.wgrad_deferral_limit", 0) == (waits or 0)


def test_tokens_that_a_callback_drops_are_read_as_it_says() -> None:
    head = "from nemo.lightning.pytorch.callbacks import MegatronTokenDropCallback\n"
    head += TAKEN.replace("llama3_70b", "mixtral_8x7b")
    more = "recipe.trainer.callbacks.append(run.Config(MegatronTokenDropCallback, moe_expert_capacity_factor=2.0))\n"
    assert read(head + more)["model.config.moe_expert_capacity_factor"] == 2.0
    assert "model.config.moe_expert_capacity_factor" not in read(head)


@pytest.mark.parametrize(("name", "fused"), [("mixtral_8x7b", False), ("qwen3_30b_a3b", True)])
def test_tokens_of_nemos_models_go_to_experts_as_their_classes_have_it(name: str, fused: bool) -> None:
    text = f"{HEAD}recipe = llm.{name}.pretrain_recipe(num_nodes=8)\n"
    machine = {"topology": "hgx-h100"}
    had = exchange.canonical(exchange.read([document(text, "a.py")], machine).scenario)
    assert (had["parallel.dispatcher"], had["parallel.permute_fusion"]) == ("alltoall", fused)
    text += "recipe.model.config.moe_token_dispatcher_type = 'allgather'\n"
    assert (
        exchange.canonical(exchange.read([document(text, "a.py")], machine).scenario)["parallel.dispatcher"]
        == "allgather"
    )


def test_a_recipe_in_fast_mode_or_unknown_is_asked_for() -> None:
    with pytest.raises(ScenarioError, match="is given performance_mode, which the table does not have of this recipe"):
        read(TAKEN.replace("llama3_70b", "llama32_1b").replace("=8", "=8, performance_mode=True"))
    with pytest.raises(ScenarioError, match=r"the recipe llama9_70b is in no table here; .*--to-yaml of NeMo-Run"):
        read(TAKEN.replace("llama3_70b", "llama9_70b"))


def test_what_changes_no_step_may_be_anything() -> None:
    more = "recipe.trainer.max_steps = f()\nrecipe.log.ckpt.save_top_k = x\nrecipe.resume.path = y\nrun.run(recipe)\n"
    assert read(TAKEN + more) == read(TAKEN)


def test_a_class_takes_the_place_of_what_was_there() -> None:
    more = "recipe.trainer.strategy = run.Config(llm.MegatronStrategy, tensor_model_parallel_size=2)\n"
    had = read(TAKEN + more)
    assert had["trainer.strategy.tensor_model_parallel_size"] == 2
    assert "trainer.strategy.virtual_pipeline_model_parallel_size" not in had


def test_values_are_those_of_every_call_of_a_function() -> None:
    tree = ast.parse("def f(n=2):\n    return n\nf()\n")
    values = ProgramValues(tree)
    node = values.functions["f"].node.body[0].value
    assert values.of(node, values.functions["f"]) == 2
    tree = ast.parse("def f(n=2):\n    return n\nf(3)\nf(4)\n")
    values = ProgramValues(tree)
    assert values.of(values.functions["f"].node.body[0].value, values.functions["f"]) is UNREAD


@pytest.mark.parametrize("text", ["a = b\nb = a", "a = a + 1", "a = 2 // 0", "def f():\n    return f()\na = f()"])
def test_names_that_lead_nowhere_end(text: str) -> None:
    tree = ast.parse(f"{text}\nc = a\n")
    values = ProgramValues(tree)
    assert values.of(tree.body[-1].value, values.module) is UNREAD


BRIDGE = """
model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama31ModelProvider70B
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 4
  sequence_parallel: true
  num_layers: 80
  hidden_size: 8192
  num_attention_heads: 64
  num_query_groups: 8
  ffn_hidden_size: 28672
  vocab_size: 128256
  gated_linear_unit: true
  normalization: RMSNorm
  add_bias_linear: false
  share_embeddings_and_output_weights: false
  position_embedding_type: rope
  seq_length: 4096
train:
  micro_batch_size: 1
  global_batch_size: 32
mixed_precision: bf16_mixed
"""
LORA = "peft:\n  _target_: megatron.bridge.peft.lora.LoRA\n"
OLD = """  peft:
    peft_scheme: lora
    lora_tuning:
      target_modules: [attention, mlp_fc1]
      adapter_dim: 8
"""


def bridge(more: str) -> exchange.LaunchImport:
    return exchange.read([document(BRIDGE + more, "bridge.yaml")], {"topology": "hgx-h100", "nodes": 1})


@pytest.mark.parametrize(
    ("more", "targets", "rank", "dropout"),
    [
        (LORA, ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), 32, 0.0),
        (f"{LORA}  dim: 16\n  dropout: 0.1\n  target_modules: [linear_qkv]\n", ("linear_qkv",), 16, 0.1),
        (LORA.replace("lora.LoRA", "canonical_lora.CanonicalLoRA"), None, 32, 0.0),
    ],
)
def test_adapters_of_megatron_bridge_stand_beside_megatrons_linears(
    more: str, targets: tuple[str, ...] | None, rank: int, dropout: float
) -> None:
    made = bridge(more)
    adapter = made.scenario.file.model.adapter
    assert adapter is not None
    assert (adapter.rank, adapter.dropout) == (rank, dropout)
    assert adapter.target_modules == (targets or CLASSES["CanonicalLoRA"])
    assert (made.scenario.file.parallel.tp, made.scenario.file.parallel.pp) == (2, 4)
    assert not [name for name in made.unplayed if "peft" in name]


def test_nemo_1_names_the_same_linears_otherwise() -> None:
    options = BRIDGE.replace("  seq_length: 4096\n", f"  seq_length: 4096\n{OLD}")
    made = exchange.read([document(options, "nemo.yaml")], {"topology": "hgx-h100", "nodes": 1})
    adapter = made.scenario.file.model.adapter
    assert adapter is not None
    assert (adapter.target_modules, adapter.rank) == (("linear_qkv", "linear_proj", "linear_fc1"), 8)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (LORA.replace("lora.LoRA", "dora.DoRA"), "LoRA, CanonicalLoRA are played, not it"),
        (f"{LORA}  a2a_experimental: true\n", "a2a_experimental true is not played"),
        (f"{LORA}  normalize_moe_lora: true\n", "normalize_moe_lora true is not played"),
        (f"{LORA}  exclude_modules: [linear_fc1]\n", "exclude_modules"),
        (f"{LORA}  target_modules: ['*.layers.0.*.linear_qkv']\n", "is no linear of Megatron that is known"),
        (f"{LORA}  dim: many\n", "expected a whole number"),
    ],
)
def test_adapters_that_are_not_described_are_refused(more: str, words: str) -> None:
    with pytest.raises(ScenarioError, match=words):
        bridge(more)


def test_a_program_that_trains_adapters_says_which() -> None:
    command = "python megatron_gpt_peft_tuning.py trainer.devices=8 trainer.num_nodes=1 model.micro_batch_size=1"
    run = document(f"{command} model.global_batch_size=8 model.num_layers=32\n", "run.sh")
    with pytest.raises(ScenarioError, match="trains adapters; say model\\.peft\\.peft_scheme"):
        exchange.read([run], {"topology": "hgx-h100"}, framework="nemo", model="llama3-8b")


def test_a_global_batch_alone_is_asked_for_the_samples_of_a_pass() -> None:
    options = BRIDGE.replace("  micro_batch_size: 1\n", "")
    asked = "train.global_batch_size 32 alone does not say how many samples a pass holds; say micro_batch_size beside"
    with pytest.raises(ScenarioError, match=asked):
        exchange.read([document(options, "bridge.yaml")], {"topology": "hgx-h100", "nodes": 1})


@pytest.mark.parametrize(("name", "kernel"), [("flash", "fa2"), ("fused", "cudnn"), ("unfused", "eager")])
def test_a_backend_of_attention_is_named_as_python_has_it_too(name: str, kernel: str) -> None:
    for word in (name, f"AttnBackend.{name}"):
        options = BRIDGE.replace("  seq_length: 4096\n", f"  seq_length: 4096\n  attention_backend: {word}\n")
        made = exchange.read([document(options, "bridge.yaml")], {"topology": "hgx-h100", "nodes": 1})
        assert made.scenario.file.model.attention == kernel


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("num_layers: 8", "the model is kimi-k2 with layers = 8"),
        ("num_moe_experts: 48", "the model is kimi-k2 with experts = {'count': 48}"),
        (
            "num_moe_experts: 48, moe_layer_freq: [0, 0, 1, 1], num_layers: 4",
            "layers = 4, experts = {'count': 48, 'dense",
        ),
        ("num_moe_experts: 384", ""),
    ],
)
def test_sizes_that_are_no_whole_model_change_the_one_that_is_given(sizes: str, said: str) -> None:
    """As overrides of a recipe do; they were refused beside it, and before that the named model was played whole."""
    lines = f"model: {{{sizes}, seq_length: 4096}}\ntrain: {{micro_batch_size: 1, global_batch_size: 64}}\n"
    place = {"topology": "hgx-h100", "nodes": 1}
    made = exchange.read([document(lines, "kimi.yaml")], place, framework="nemo", model="kimi-k2")
    told = [note for note in made.notes if "the model is" in note]
    assert len(told) == bool(said)
    assert said in "".join(told)
    shape = transformer_of(made.scenario)
    assert shape is not None
    assert shape.experts is not None
    if "[0, 0, 1, 1]" in sizes:
        assert (shape.layers, shape.experts.dense_first, shape.experts.count) == (4, 2, 48)


def test_a_whole_model_that_contradicts_the_one_given_beside_it_is_refused() -> None:
    """Sizes of a whole model were taken for read, and the named model was played."""
    with pytest.raises(ScenarioError, match="num_layers 80, where --model llama3-8b has 32; leave one of them out"):
        exchange.read([document(BRIDGE, "a.yaml")], {"topology": "hgx-h100", "nodes": 1}, model="llama3-8b")


def test_a_size_that_is_the_models_own_may_stand_beside_it() -> None:
    lines = "model:\n  num_layers: 32\n  seq_length: 4096\ntrain:\n  micro_batch_size: 1\n  global_batch_size: 64\n"
    place = {"topology": "hgx-h100", "nodes": 1}
    made = exchange.read([document(lines, "run.yaml")], place, framework="nemo", model="llama3-8b")
    assert made.scenario.file.model.name == "llama3-8b"


TEMPLATE = """
model_defaults: &model
  num_layers: 32
  hidden_size: 4096
  num_attention_heads: 32
  tensor_model_parallel_size: 4
  max_position_embeddings: 4096
trainer: {num_nodes: 2, devices: 8, precision: bf16}
model:
  <<: *model
  micro_batch_size: 1
  global_batch_size: 128
  tensor_model_parallel_size: 2
  encoder_seq_length: 4096
"""


def test_a_template_that_a_section_merges_says_nothing_itself() -> None:
    """The template's degree and the section's were two that contradict each other."""
    made = exchange.read([document(TEMPLATE, "gpt.yaml")], {"topology": "hgx-h100"})
    assert made.scenario.file.parallel.tp == 2
    assert not made.unknown
    counts = TEMPLATE.replace("model_defaults", "first_model")  # a section of its own
    with pytest.raises(ScenarioError, match="contradict each other"):
        exchange.read([document(counts, "gpt.yaml")], {"topology": "hgx-h100"})


def test_learned_positions_without_their_number_are_asked_for() -> None:
    options = BRIDGE.replace("  position_embedding_type: rope\n", "")
    with pytest.raises(ScenarioError, match=r"positions are learned .* say max_position_embeddings, or"):
        exchange.read([document(options, "bridge.yaml")], {"topology": "hgx-h100", "nodes": 1})


def test_sharded_parameters_are_refused_with_what_to_write() -> None:
    more = "ddp:\n  use_megatron_fsdp: true\n  data_parallel_sharding_strategy: optim_grads_params\n"
    with pytest.raises(ScenarioError, match=r'NeMo\'s files are not read with: write strategy\.kind = "fsdp"'):
        bridge(more)


@pytest.mark.parametrize(
    ("changes", "dtype", "is_said"),
    [
        ('recipe.model.config.fp8 = "hybrid"', "bf16", True),
        ('recipe.trainer.plugins.fp8 = "hybrid"', "fp8", False),
        ('recipe.model.config.fp8 = None\nrecipe.trainer.plugins.fp8 = "hybrid"', "fp8", False),
        ("recipe.model.config.fp8 = False", "bf16", False),
    ],
)
def test_a_models_type_of_8_bits_is_what_the_plugin_of_precision_says(changes: str, dtype: str, is_said: bool) -> None:
    """The plugin writes each of its fields over the model's, those that it has no value of too."""
    made = exchange.read([document(f"{TAKEN}{changes}\nrun.run(recipe)\n", "a.py")], {"topology": "hgx-h100"})
    assert made.scenario.file.model.dtype == dtype
    assert any("the plugin of precision overwrites it" in note for note in made.notes) == is_said


@pytest.mark.parametrize(("precision", "dtype"), [("bf16_mixed", "bf16"), ("bf16_with_fp8_mixed", "fp8")])
def test_a_container_of_megatron_bridge_has_its_8_bits_of_its_precision(precision: str, dtype: str) -> None:
    text = BRIDGE.replace("mixed_precision: bf16_mixed", f"mixed_precision: {precision}")
    made = exchange.read([document(f"{text}model.fp8: e4m3\n", "bridge.yaml")], {"topology": "hgx-h100", "nodes": 1})
    assert made.scenario.file.model.dtype == dtype


def test_a_table_of_runs_is_no_run() -> None:
    with pytest.raises(ScenarioError, match=r"perf_matrix\.h100.*holds several runs, of which a program picks one"):
        bridge("perf_matrix:\n  h100:\n    bf16: {tp: 4, gbs: 128}\n")
