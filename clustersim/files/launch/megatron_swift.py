"""Megatron-SWIFT's ``megatron sft`` and ``megatron pt``: a model by its name, trained with Megatron-LM's options.

Names and defaults: ms-swift 4.6 ``swift/megatron/arguments/megatron_args.py`` (``MegatronArguments``), and of 3 where a
script has its names (``--load``, ``--train_type``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import shown
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.launchers import MEGATRON
from clustersim.files.launch.table import FrameworkTable
from clustersim.model import named_models as models
from clustersim.model.published import known_as

MODELS = ("model", "mcore_model", "load")
"""Options that name the model, the newest first: on the hub, or a folder of converted weights."""
CONVERTED = re.compile(r"[-_]mcore$")
TUNERS = ("tuner_type", "train_type")
ALL = "all-linear"
OF_LORA: dict[str, tuple[str, int | float | str]] = {
    "lora_rank": ("dim", 8),
    "lora_dropout": ("dropout", 0.05),
    "target_modules": ("target_modules", ALL),
    "lora_alpha": ("", 32),
    "lora_bias": ("", "none"),
    "use_rslora": ("", "false"),
}
"""Of LoRA: Megatron-Bridge's names, empty of what no step takes longer for, and ms-swift's defaults (``TunerMixin`` of
``swift/megatron/arguments/tuner_args.py``)."""
NOT_PLAYED = ("modules_to_save", "target_regex", "lora_dtype")
"""What trains other parts, or chooses them, and a type of their own."""
LENGTHS = ("packing_length", "max_length")
NAMED = "swift_model"
"""The option that the table of Megatron-LM's words reads the model of."""
USUAL: dict[str, str | int | bool] = {
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "recompute_granularity": "selective",
    "use_distributed_optimizer": True,
    "attention_backend": "flash",
    "bf16": True,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
}
"""Where Megatron-LM has another default, or none; a model's weights are in bf16 nearly always."""
OF_EXPERTS = ("moe_grouped_gemm", "moe_token_dispatcher_type")


def is_launch(document: Document) -> bool:
    """Whether a command is one of Megatron-SWIFT's that train one model."""
    return document.program in MEGATRON


def arranged(read: Sequence[Document], options: dict[Key, OptionValue], table: FrameworkTable) -> list[str]:
    """Bring options to Megatron-LM's names, with Megatron-SWIFT's defaults. Changes ``options``; returns notes.

    Raises :class:`ScenarioError` for adapters that are not played, and for a command that names no model.
    """
    command = next((file for file in read if is_launch(file)), None)
    if command is None or table.name != "megatron":
        return []
    adapter_notes = _adapters(options, command)
    model = _taken(options, MODELS)
    if model is None:
        raise ScenarioError(f"{command.name}: {command.program} names no model; say --model, or --load")
    name = CONVERTED.sub("", str(model.value).rstrip("/"))
    options["args", NAMED] = OptionValue(model.name, name, model.where)
    length = _taken(options, LENGTHS)
    if length is not None:
        options["args", "seq_length"] = length
    shape = models.shape(shipped_name, {}) if (shipped_name := known_as(name)) else None
    has_experts = shape is not None and shape.experts is not None
    if shape is not None and shape.experts is not None:
        options["args", "num_experts"] = OptionValue(model.name, shape.experts.count, model.where)
    said = {key[1] for key in options}
    added = {
        option: value
        for option, value in USUAL.items()
        if option not in said
        and (has_experts or option not in OF_EXPERTS)
        and not (option == "bf16" and "fp16" in said)
    }
    for option, value in added.items():
        options["args", option] = OptionValue(option, value, command.name)
    words = ", ".join(f"{option} {str(value).lower()}" for option, value in added.items())
    notes = [f"{command.name}: as Megatron-SWIFT 4.6 has it by default: {words}"] if added else []
    notes += adapter_notes
    return [*notes, f"{command.name}: every sample is as long as --max_length"] if length is not None else notes


def _taken(options: dict[Key, OptionValue], names: Sequence[str]) -> OptionValue | None:
    """The first of some options that has a value; none of them stays."""
    values = [options.pop(key) for name in names if (key := ("args", name)) in options]
    return next((option for option in values if str(option.value) not in {"", "None", "null"}), None)


def _adapters(options: dict[Key, OptionValue], command: Document) -> list[str]:
    """LoRA in the words of Megatron-Bridge, whose adapters stand beside the same linears; returns a note.

    Raises :class:`ScenarioError` for another way to train a part, and for parts that are trained whole beside it.
    """
    tuner = _taken(options, TUNERS)
    values = {name: _taken(options, (name,)) for name in OF_LORA}
    if tuner is None or tuner.value == "full":
        return []
    if tuner.value != "lora":
        raise ScenarioError(f"{tuner.where}: {tuner.name} {shown(tuner.value)} is not played; full and lora are")
    beside = [_taken(options, (name,)) for name in NOT_PLAYED]
    bias = values["lora_bias"]
    beside += [bias] if bias is not None and bias.value != "none" else []
    for option in beside:
        if option is not None and option.value != []:
            raise ScenarioError(f"{option.where}: {option.as_written} beside adapters is not played; leave it out")
    options["config", "peft._target_"] = OptionValue(tuner.name, "LoRA", tuner.where)
    usual = {}
    for name, (field, default) in OF_LORA.items():
        option = values[name]
        if option is None:
            option = OptionValue(name, default, command.name)
            usual[name] = default
        if field and option.value not in (ALL, [ALL]):
            options["config", f"peft.{field}"] = option
    words = ", ".join(f"{name} {value}" for name, value in usual.items() if OF_LORA[name][0])
    told = [f"{command.name}: as ms-swift has it by default of LoRA: {words}"] if words else []
    return [
        *told,
        f"{tuner.where}: what ranks of tensor parallelism exchange for adapters is as Megatron-Bridge has it",
    ]
