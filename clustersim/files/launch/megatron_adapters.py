"""Adapters as NeMo 1, NeMo 2 and Megatron-Bridge ask for them, beside the linears of Megatron-Core.

Names and defaults: NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/peft/{lora,canonical_lora}.py (at 0191fc5e), which
are NeMo 2's nemo/collections/llm/peft; NeMo 1's megatron_gpt_finetuning_config.yaml (examples/nlp/language_modeling/
tuning/conf).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.texts import data_table, short, shown
from clustersim.files.launch.adapters import flag, number
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.options import ScenarioFields
from clustersim.model.adapter_setting import MEGATRON_LINEARS

CLASSES = msgspec.convert(data_table("adapters")["megatron_classes"], dict[str, tuple[str, ...]])
"""Classes of ``peft``, and the linears that have an adapter where nobody says them."""
OLD_LINEARS: Mapping[str, Sequence[str]] = data_table("adapters")["old_linears"]
"""NeMo 1's names of linears."""
IDLE = frozenset(data_table("adapters")["megatron_idle"])
"""What says nothing more of a step, or is read with the others."""


def taken(read: Sequence[Document], options: Mapping[Key, OptionValue], fields: ScenarioFields, used: set[Key]) -> None:
    """Put what options say of adapters into ``model.adapter``, and what was read into ``used``.

    Raises :class:`ScenarioError` for another way to train a part, for linears that are not known, for an exchange of
    adapters that is not described, and for a program that trains adapters (NeMo 1's ``*_peft_tuning.py``) of which
    nothing says which.
    """
    program = next((file for file in read if "peft" in file.program.rpartition("/")[2]), None)
    if program is not None and not any(name.endswith("peft_scheme") for _, name in options):
        raise ScenarioError(f"{program.name}: {short(program.program)} trains adapters; say model.peft.peft_scheme")
    for place in ("peft", "model.peft"):
        said = {key[1].removeprefix(f"{place}."): key for key in options if key[1].startswith(f"{place}.")}
        if "_target_" in said:
            _of_class(options, said, fields, used)
        elif "peft_scheme" in said:
            _of_scheme(options, said, fields, used)


def _of_class(options: Mapping[Key, OptionValue], said: dict[str, Key], fields: ScenarioFields, used: set[Key]) -> None:
    """NeMo 2's and Megatron-Bridge's."""
    kind = options[said["_target_"]]
    name = str(kind.value).rpartition(".")[2]
    if name not in CLASSES:
        raise ScenarioError(f"{kind.where}: {kind.name} {shown(kind.value)}: {', '.join(CLASSES)} are played, not it")
    read = {field: options[key] for field, key in said.items()}
    _say(fields, "target_modules", _linears(read, CLASSES[name]), read.get("target_modules", kind))
    _say(fields, "rank", number(read["dim"], whole=True) if "dim" in read else 32, read.get("dim", kind))
    _dropout(fields, read.get("dropout"))
    _plain(read, ("a2a_experimental", "normalize_moe_lora"))
    for field in ("exclude_modules", "lora_dtype"):
        if field in read and read[field].value not in (None, "", "null", "None", []):
            option = read[field]
            raise ScenarioError(f"{option.where}: {option.name} {shown(option.value)} is not played; leave it out")
    known = {"target_modules", "dim", "dropout", "a2a_experimental", "normalize_moe_lora", "exclude_modules"}
    used.update(key for field, key in said.items() if field in known | {"lora_dtype"} | IDLE)


def _of_scheme(
    options: Mapping[Key, OptionValue], said: dict[str, Key], fields: ScenarioFields, used: set[Key]
) -> None:
    """NeMo 1's ``peft_scheme`` with ``lora_tuning``."""
    scheme = options[said["peft_scheme"]]
    used.add(said["peft_scheme"])
    inside = {field.removeprefix("lora_tuning."): key for field, key in said.items() if "lora_tuning." in field}
    if scheme.value in (None, "", "none", "null", "None"):
        used.update(said.values())
        return
    if scheme.value != "lora":
        raise ScenarioError(f"{scheme.where}: {scheme.name} {shown(scheme.value)} is not played; lora is")
    read = {field: options[key] for field, key in inside.items()}
    _say(fields, "target_modules", _linears(read, ("linear_qkv",)), read.get("target_modules", scheme))
    dim = read.get("adapter_dim")
    _say(fields, "rank", 32 if dim is None else number(dim, whole=True), dim or scheme)
    _dropout(fields, read.get("adapter_dropout"))
    used.update(key for field, key in said.items() if not field.startswith(("p_tuning.", "ia3_tuning.")))
    used.update(key for field, key in said.items() if field.startswith(("p_tuning.", "ia3_tuning.", "adapter_tuning.")))


def _say(fields: ScenarioFields, field: str, value: Any, option: OptionValue) -> None:
    fields.say(f"model.adapter.{field}", value, option)


def _dropout(fields: ScenarioFields, option: OptionValue | None) -> None:
    if option is not None and (share := float(number(option))):
        _say(fields, "dropout", share, option)


def _plain(read: Mapping[str, OptionValue], names: tuple[str, ...]) -> None:
    """Raise for what is asked for and not described."""
    for name in names:
        if name in read and flag(read[name]):
            option = read[name]
            raise ScenarioError(f"{option.where}: {option.name} true is not played; leave it out")


def _linears(read: Mapping[str, OptionValue], usual: tuple[str, ...]) -> list[str]:
    """Megatron's linears by its names or NeMo 1's. Raises for other names, and for linears of some layers alone."""
    option = read.get("target_modules")
    if option is None or option.value in (None, "", "null", "None"):
        return list(usual)
    words = option.value if isinstance(option.value, list | tuple) else str(option.value).strip("[]").split(",")
    found: list[str] = []
    for word in (str(word).strip().strip("\"'") for word in words):
        if word not in MEGATRON_LINEARS and word not in OLD_LINEARS:
            known = (*MEGATRON_LINEARS, *OLD_LINEARS)
            raise ScenarioError(
                f"{option.where}: {option.name} {shown(word)} is no linear of Megatron that is known; "
                f"{nearest(word, known)}"
            )
        found += OLD_LINEARS.get(word, (word,))
    return list(dict.fromkeys(found))
