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

    Raises :class:`ScenarioError` for adapters, and for a command that names no model.
    """
    command = next((file for file in read if is_launch(file)), None)
    if command is None or table.name != "megatron":
        return []
    _refuse_adapters(options)
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
    return [*notes, f"{command.name}: every sample is as long as --max_length"] if length is not None else notes


def _taken(options: dict[Key, OptionValue], names: Sequence[str]) -> OptionValue | None:
    """The first of some options that has a value; none of them stays."""
    values = [options.pop(key) for name in names if (key := ("args", name)) in options]
    return next((option for option in values if str(option.value) not in {"", "None", "null"}), None)


def _refuse_adapters(options: dict[Key, OptionValue]) -> None:
    tuner = _taken(options, TUNERS)
    if tuner is not None and tuner.value != "full":
        raise ScenarioError(
            f"{tuner.where}: {tuner.name} {shown(tuner.value)} trains adapters in Megatron-SWIFT, which is not played; "
            "full is"
        )
