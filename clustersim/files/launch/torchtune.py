"""torchtune's recipes: a builder names the model and its adapters at once, and a recipe of one device is no FSDP.

Names: pytorch/torchtune ``recipes/configs`` and ``torchtune/models/*/_model_builders.py`` (0.6).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import shown
from clustersim.files.launch.adapters import flag, number
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.options import ScenarioFields
from clustersim.files.launch.table import FrameworkTable
from clustersim.model.published import known_as

BUILDER: Key = ("config", "model._component_")
KIND: Key = ("config", "model.adapter")
BASE: Key = ("config", "model.quantize_base")
"""Whether what is not trained is kept in 4 bits, whatever the builder is called."""
ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
MLP = ("gate_proj", "up_proj", "down_proj")
KINDS = ("qlora_", "lora_")
PLAIN = {"gated": True, "norm": "rmsnorm", "positions": "rotary", "mlp_bias": False, "tied": False}
"""What the blocks of every builder below have (torchtune/models/llama3/_component_builders.py and its like)."""
BUILDERS = {
    "llama2": PLAIN,
    "llama3": PLAIN,
    "llama3_1": PLAIN,
    "mistral": PLAIN,
    "qwen2": {**PLAIN, "qkv_bias": True},
}
"""Builders that take a model's sizes, and its kind."""
SPLIT = ("phi3", "phi4")
"""Models whose projections are one for queries, keys and values in transformers, and three here
(torchtune/models/phi3/_component_builders.py)."""


def arranged(read: Sequence[Document], options: dict[Key, OptionValue], table: FrameworkTable) -> list[str]:
    """Take a builder apart into the model and its kind of adapters; a recipe of one device has one. Changes
    ``options``; returns notes."""
    if table.name != "torchtune":
        return []
    builder = options.get(BUILDER)
    if builder is not None:
        module, dot, name = str(builder.value).rpartition(".")
        kind = next((kind for kind in KINDS if name.startswith(kind)), "")
        options[BUILDER] = OptionValue(builder.name, f"{module}{dot}{name.removeprefix(kind)}", builder.where)
        _named(options, module, name.removeprefix(kind))
        if kind:
            options[KIND] = OptionValue(builder.name, kind.rstrip("_"), builder.where)
    alone = not any(file.program for file in read)
    named = [file.name for file in read if alone and "single_device" in Path(file.name).name]
    if named or any("single_device" in file.program for file in read):
        options["args", "nproc_per_node"] = OptionValue("single_device", 1, read[0].name)
    return [f"{name}: one GPU, as its name says" for name in named]


def _named(options: dict[Key, OptionValue], module: str, name: str) -> None:
    """Put a builder's kind beside the sizes that it takes, or a model's name in its place. Changes ``options``."""
    builder = options[BUILDER]
    if not module.startswith("torchtune.models"):
        return
    if name not in BUILDERS:
        if known_as(name) is not None:
            options[BUILDER] = OptionValue(builder.name, known_as(name), builder.where)
        return
    del options[BUILDER]
    for field, value in BUILDERS[name].items():
        options["config", f"builder.{field}"] = OptionValue(builder.name, value, builder.where)
    width = options.get(("config", "model.embed_dim"))
    if width is not None and options.get(("config", "model.intermediate_dim")) is None:
        inner = 4 * int(2 * int(number(width, whole=True)) / 3)
        rounded = -(-inner // ROUNDED) * ROUNDED
        options["config", "model.intermediate_dim"] = OptionValue(width.name, rounded, width.where)


ROUNDED = 256
"""What the width of an MLP that nobody says is a multiple of (``scale_hidden_dim_for_mlp``)."""


def taken(options: dict[Key, OptionValue], fields: ScenarioFields, used: set[Key]) -> None:
    """Put a builder's modules into ``model.options``, its adapters into ``model.adapter``, and what was read into
    ``used``. Raises :class:`ScenarioError` for a builder of adapters that says no module, or one that torchtune does
    not know."""
    builder = options.get(BUILDER)
    if builder is not None and any(f".{name}." in str(builder.value) for name in SPLIT):
        fields.say("model.options.family", "llama", builder)
    kind = options.get(KIND)
    if kind is None:
        return
    used.add(KIND)
    own = {name: ("config", f"model.{name}") for name in ("lora_attn_modules", "apply_lora_to_mlp")}
    own |= {name: ("config", f"model.{name}") for name in ("apply_lora_to_output", "lora_rank", "lora_dropout")}
    said = {name: options[key] for name, key in own.items() if key in options}
    used.update(own[name] for name in said)
    targets = _attention(said.get("lora_attn_modules"))
    if "apply_lora_to_mlp" in said and flag(said["apply_lora_to_mlp"]):
        targets += MLP
    if "apply_lora_to_output" in said and flag(said["apply_lora_to_output"]):
        targets.append("lm_head")
    if not targets:
        raise ScenarioError(f"{kind.where}: {kind.name} has adapters, and no lora_attn_modules say where")
    fields.say("model.adapter.target_modules", targets, said.get("lora_attn_modules", kind))
    rank = number(said["lora_rank"], whole=True) if "lora_rank" in said else 8
    fields.say("model.adapter.rank", rank, said.get("lora_rank", kind))
    if "lora_dropout" in said and number(said["lora_dropout"]):
        fields.say("model.adapter.dropout", float(number(said["lora_dropout"])), said["lora_dropout"])
    base = options.get(BASE)
    if base is not None:
        used.add(BASE)
    if kind.value == "qlora" or (base is not None and flag(base)):
        fields.say("model.adapter.load_in_4bit", True, kind)
        fields.say("model.adapter.bnb_4bit_use_double_quant", True, kind)  # torchao's NF4Tensor scales its scales


def _attention(option: OptionValue | None) -> list[str]:
    if option is None:
        return []
    words = option.value if isinstance(option.value, list | tuple) else [option.value]
    unknown = [word for word in words if word not in ATTENTION]
    if unknown:
        raise ScenarioError(f"{option.where}: {option.name} {shown(unknown[0])} is none of {', '.join(ATTENTION)}")
    return [ATTENTION[str(word)] for word in words]
