"""OpenRLHF's supervised finetuning: names with sections as those of its older releases, and adapters by PEFT's names.

Names and defaults: openrlhf ``cli/train_sft.py`` and ``models/actor.py`` (0.11.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clustersim.core.texts import data_table
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.table import FrameworkTable

SECTIONED: Mapping[str, str] = data_table("launch_words")["openrlhf"]
"""Names since 0.10 -> names before, where an option is read or played otherwise."""


def is_launch(document: Document) -> bool:
    """Whether a command runs a program of OpenRLHF."""
    names = {name for at, name in document.options if at == "args"}
    return document.program.startswith("openrlhf") or {"micro_train_batch_size", "pretrain"} <= names


def arranged(read: Sequence[Document], options: dict[Key, OptionValue], table: FrameworkTable) -> list[str]:
    """Bring options to the table's names, and adapters to PEFT's. Changes ``options``; returns notes on what releases
    have otherwise."""
    if table.name != "openrlhf":
        return []
    is_older = ("args", "micro_train_batch_size") in options
    for key in [key for key in options if key[1] in SECTIONED]:
        options["args", SECTIONED[key[1]]] = options.pop(key)
    notes = []
    if is_older and not {("args", "attn_implementation"), ("args", "flash_attn")} & options.keys():
        notes.append(
            f"{read[0].name}: no --flash_attn: flash_attention_2, as openrlhf 0.11.2 has it by default; releases with "
            "--flash_attn had eager attention without it"
        )
    rank = options.pop(("args", "lora_rank"), None)
    if rank is None or str(rank.value) == "0":
        return notes
    options["args", "peft_type"] = OptionValue(rank.name, "lora", rank.where)
    options["args", "r"] = rank
    options.setdefault(("args", "target_modules"), OptionValue("target_modules", "all-linear", rank.where))
    return notes
