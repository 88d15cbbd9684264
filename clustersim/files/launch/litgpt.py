"""LitGPT's runs: which of its commands a file is for, and what that command does whatever the file says.

Names and defaults: Lightning-AI/litgpt ``pretrain.py``, ``finetune/full.py``, ``finetune/lora.py`` and ``config.py``
(0.5.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import shown
from clustersim.files.launch.adapters import flag, number
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.options import ScenarioFields
from clustersim.files.launch.table import FrameworkTable
from clustersim.model import named_models as models
from clustersim.model.published import known_as

PRETRAIN = "pretrain"
FULL = "finetune_full"
LORA = "finetune_lora"
COMMANDS = {
    "pretrain": PRETRAIN,
    "finetune_full": FULL,
    "full": FULL,
    "finetune": LORA,
    "finetune_lora": LORA,
    "lora": LORA,
}
"""Its words -> the program; ``litgpt finetune full`` is of releases before 0.5."""
BATCHES = {PRETRAIN: (512, 4), FULL: (16, 1), LORA: (16, 1)}
"""Samples of a step and of a pass, where the file has none."""
MODULES = {
    "lora_query": (True, ("q_proj",)),
    "lora_key": (False, ("k_proj",)),
    "lora_value": (True, ("v_proj",)),
    "lora_projection": (False, ("o_proj",)),
    "lora_mlp": (False, ("gate_proj", "up_proj", "down_proj")),
    "lora_head": (False, ("lm_head",)),
}
"""Where adapters are: by default or not, and the modules by transformers' names."""
RANK = 8
DROPOUT = 0.05
QUANTIZED: Key = ("config", "quantize")
PAGED = "bitsandbytes.optim.PagedAdamW"
FOUR_BITS = {"bnb.nf4": False, "bnb.nf4-dq": True}
"""What keeps the trained model's weights in 4 bits -> whether its scales have scales."""
OWN = {
    "n_layer": 16,
    "n_embd": 4096,
    "n_head": 32,
    "block_size": 4096,
    "norm_class_name": "LayerNorm",
    "mlp_class_name": "GptNeoxMLP",
    "parallel_residual": True,
    "bias": True,
}
"""``litgpt.Config``'s defaults, of a model that has no name."""


def arranged(read: Sequence[Document], options: dict[Key, OptionValue], table: FrameworkTable) -> list[str]:
    """Say what a command of LitGPT does of itself. Changes ``options``; returns notes.

    Raises :class:`ScenarioError` for a command that is not known.
    """
    if table.name != "litgpt":
        return []
    for at, name in [key for key in options if key[0] == "args" and key[1] != "config"]:
        moved = options.pop((at, name))
        options.setdefault(("config", name), moved)
    where = read[0].name
    named = options.get(("args", "config"))
    if named is not None and all(file.kind == "shell" for file in read):
        raise ScenarioError(f"{named.where}: {named.name} names {named.value}; give that file too")
    command, notes = _command(read, options)
    checkpoint = options.pop(("config", "checkpoint_dir"), None)
    if checkpoint is not None:
        options["config", "model_name"] = _model_of(checkpoint)
    _sizes(options, where)
    _ranks(options, command, where)
    _paged(options)
    own: dict[str, Any] = {"tied": _tied(options)}
    if command == PRETRAIN:
        own |= {"sharding": "HYBRID_SHARD", "compiled": True, "fused": True}
        options.setdefault(("config", "train.max_norm"), OptionValue("train.max_norm", 1.0, where))
    else:
        own |= {"version": 2 if command == LORA else 1, "again": True}
    for name, value in own.items():
        if value is not None:
            options["config", f"litgpt.{name}"] = OptionValue(f"litgpt {command}", value, where)
    for name, value in zip(("global_batch_size", "micro_batch_size"), BATCHES[command], strict=True):
        options.setdefault(("config", f"train.{name}"), OptionValue(f"train.{name}", value, where))
    _length(options)
    return notes


def _command(read: Sequence[Document], options: dict[Key, OptionValue]) -> tuple[str, list[str]]:
    """Which of its commands is run: as a script says, else as keys do."""
    for file in read:
        words = file.program.split()
        if words[:1] == ["litgpt"]:
            word = words[1] if len(words) > 1 else ""
            if word not in COMMANDS:
                why = "trains prefixes of attention, and" if "adapter" in word else "is no training, and"
                raise ScenarioError(
                    f"{file.name}: litgpt {word} {why} is not played; pretrain, finetune_full and finetune_lora are"
                )
            return COMMANDS[word], []
    names = {name for _, name in options}
    if any(name.startswith("lora_") for name in names):
        return LORA, []
    if "checkpoint_dir" in names:
        if QUANTIZED[1] in names:
            raise ScenarioError(f"{read[0].name}: no lora_r and quantize: give the command beside it (litgpt ...) too")
        return FULL, [f"{read[0].name}: taken for finetune_full's, as it has a checkpoint_dir and no adapters"]
    return PRETRAIN, []


def _model_of(checkpoint: OptionValue) -> OptionValue:
    """A model by the folder of its checkpoint, ``checkpoints/meta-llama/Llama-3.2-1B``."""
    parts = [part for part in str(checkpoint.value).split("/") if part not in {"", ".", "checkpoints"}]
    return OptionValue(checkpoint.name, "/".join(parts[-2:]), checkpoint.where)


def _sizes(options: dict[Key, OptionValue], where: str) -> None:
    """A model's own sizes count, and not its name (``pretrain.setup``)."""
    prefix = "model_config."
    if not any(name.startswith(prefix) for _, name in options):
        return
    options.pop(("config", "model_name"), None)
    for name, value in OWN.items():
        options.setdefault(("config", prefix + name), OptionValue(f"{prefix}{name}", value, where))
    gated = options["config", f"{prefix}mlp_class_name"].value != "GptNeoxMLP"
    if gated and ("config", f"{prefix}intermediate_size") not in options:
        raise ScenarioError(f"{where}: model_config.mlp_class_name asks for an intermediate_size, and there is none")
    bias = options["config", f"{prefix}bias"]
    options.setdefault(("config", f"{prefix}attn_bias"), bias)


def _tied(options: dict[Key, OptionValue]) -> bool:
    """Whether the head is the embedding: every model has a head of its own, and only pretraining ties the two, when it
    is told to."""
    tied = options.get(("config", "train.tie_embeddings"))
    return tied is not None and bool(flag(tied))


def _paged(options: dict[Key, OptionValue]) -> None:
    """Beside quantized weights AdamW is bitsandbytes' paged one (``utils.instantiate_bnb_optimizer``).

    Raises :class:`ScenarioError` for another optimizer there, as LitGPT does.
    """
    quantized = options.get(QUANTIZED)
    if quantized is None or not str(quantized.value).startswith("bnb."):
        return
    for name in ("optimizer", "optimizer.class_path"):
        option = options.pop(("config", name), None)
        if option is not None and "AdamW" not in str(option.value):
            raise ScenarioError(
                f"{option.where}: {option.name} {shown(option.value)} is not run beside quantize, but AdamW is"
            )
    options["config", "optimizer"] = OptionValue(quantized.name, PAGED, quantized.where)


def _ranks(options: dict[Key, OptionValue], command: str, where: str) -> None:
    """How many ranks: finetuning has one GPU where nothing is said, and one rank shards nothing."""
    devices = options.get(("config", "devices"))
    if devices is not None and str(devices.value) == "auto":
        devices = options["config", "devices"] = OptionValue(devices.name, -1, devices.where)
    elif devices is None and command != PRETRAIN:
        devices = options["config", "devices"] = OptionValue("devices, which finetuning has as", 1, where)
    nodes = options.get(("config", "num_nodes"))
    if devices is not None and str(devices.value) == "1" and (nodes is None or str(nodes.value) == "1"):
        options["config", "litgpt.kind"] = OptionValue(devices.name, "single", devices.where)
    else:
        options["config", "litgpt.kind"] = OptionValue(f"litgpt {command}", "fsdp", where)


def _length(options: dict[Key, OptionValue]) -> None:
    """Tokens of a sample, which are a model's own where the file describes one."""
    block = options.get(("config", "model_config.block_size"))
    if block is not None:
        options.setdefault(("config", "train.max_seq_length"), block)


def _ask_for_length(options: dict[Key, OptionValue], fields: ScenarioFields) -> None:
    """Raise :class:`ScenarioError` where only the data or the checkpoint has the length of a sample
    (``litgpt/finetune/lora.py`` ``get_longest_seq_length``)."""
    command = options.get(("config", "litgpt.kind"))
    if command is not None and "model.seq_len" not in fields:
        raise ScenarioError(
            f"{command.where}: no train.max_seq_length: samples are as long as the data or the checkpoint has them; "
            "say it there, or give --seq-len, such as --seq-len 512"
        )


def taken(options: dict[Key, OptionValue], fields: ScenarioFields, used: set[Key]) -> None:
    """Put adapters into ``model.adapter``, and what was read into ``used``.

    Raises :class:`ScenarioError` for weights that are quantized otherwise than in NF4, for a length of samples that
    nobody says, and for a model that reads images, of which LitGPT has the decoder alone.
    """
    _is_text_alone(options, fields)
    _ask_for_length(options, fields)
    version = options.get(("config", "litgpt.version"))
    if version is None or version.value != 2:
        return
    targets: list[str] = []
    for name, (default, modules) in MODULES.items():
        option = options.get(("config", name))
        used.add(("config", name))
        if flag(option) if option is not None else default:
            targets += modules
    if not targets:
        raise ScenarioError(f"{version.where}: all lora_* are false, and nothing is trained")
    rank = options.get(("config", "lora_r"))
    dropout = options.get(("config", "lora_dropout"))
    used |= {("config", name) for name in ("lora_r", "lora_dropout")} | {QUANTIZED}
    fields.say("model.adapter.target_modules", targets, version)
    fields.say("model.adapter.rank", RANK if rank is None else number(rank, whole=True), rank or version)
    share = DROPOUT if dropout is None else float(number(dropout))
    if share:
        fields.say("model.adapter.dropout", share, dropout or version)
    quantized = options.get(QUANTIZED)
    if quantized is not None and str(quantized.value) not in FOUR_BITS:
        known = ", ".join(FOUR_BITS)
        raise ScenarioError(f"{quantized.where}: quantize {shown(quantized.value)} is not played; {known} are")
    if quantized is not None:
        fields.say("model.adapter.load_in_4bit", True, quantized)
        if FOUR_BITS[str(quantized.value)]:
            fields.say("model.adapter.bnb_4bit_use_double_quant", True, quantized)


def _is_text_alone(options: dict[Key, OptionValue], fields: ScenarioFields) -> None:
    """Raise :class:`ScenarioError` for a named model that reads images (``litgpt/config.py``: no towers)."""
    named = options.get(("config", "model_name"))
    known = known_as(str(fields.get("model.name", "")))
    shape = models.shape(known, {}) if named is not None and known is not None else None
    if named is not None and shape is not None and shape.tower is not None:
        raise ScenarioError(
            f"{named.where}: {named.name} {shown(named.value)} reads images, and LitGPT has its decoder alone; give "
            "the decoder's sizes as a config.json (its text_config): --model PATH"
        )
