"""Llama Cookbook's finetuning script: words in sections, and adapters by PEFT's names.

Names and defaults: llama_cookbook ``configs/peft.py``, ``configs/quantization.py`` and ``utils/config_utils.py``
(``update_config``, which takes a name with its section or alone; 0.0.5.post1).
"""

from __future__ import annotations

from collections.abc import Sequence

from clustersim.core.errors import ScenarioError
from clustersim.files.launch.adapters import flag
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.table import FrameworkTable

SECTIONS = ("train_config.", "fsdp_config.", "lora_config.", "quantization_config.")
OF_LORA = {"r": 8, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}
"""``lora_config``'s defaults, by PEFT's names."""


def is_launch(document: Document) -> bool:
    """Whether a command, or a file of its words, has Llama Cookbook's own names."""
    names = {name.rpartition(".")[2] for _, name in document.options}
    return "model_name" in names and bool({"batch_size_training", "enable_fsdp"} & names)


def arranged(read: Sequence[Document], options: dict[Key, OptionValue], table: FrameworkTable) -> list[str]:
    """Bring options to the table's names, and adapters to PEFT's. Changes ``options``; returns notes.

    Raises :class:`ScenarioError` for weights in 4 bits without adapters, in 8 bits, and for adapters in other shards
    than FULL_SHARD.
    """
    if table.name != "cookbook":
        return []
    for key in [key for key in options if key[0] == "config" or key[1].startswith(SECTIONS)]:
        own = key[1].partition(".")[2] if key[1].startswith(SECTIONS) else key[1]
        options["args", own] = options.pop(key)
    sharding = options.get(("args", "sharding_strategy"))
    if sharding is not None:
        word = str(sharding.value).removeprefix("ShardingStrategy.")
        options["args", "sharding_strategy"] = OptionValue(sharding.name, word, sharding.where)
    return _adapters(options)


def _adapters(options: dict[Key, OptionValue]) -> list[str]:
    """LoRA in PEFT's words, where ``use_peft`` asks for it; what it says without is left out, and noted."""
    asked = options.pop(("args", "use_peft"), None)  # of others it means their own defaults
    packed = options.pop(("args", "quantization"), None)
    is_packed = packed is not None and str(packed.value).lower() not in {"none", "false"}
    if packed is not None and is_packed and str(packed.value) != "4bit":
        raise ScenarioError(
            f"{packed.where}: {packed.as_written} keeps weights in 8 bits, which is not played; 4 bits are "
            "(--quantization 4bit)"
        )
    if asked is None or not flag(asked):
        if packed is not None and is_packed:
            raise ScenarioError(
                f"{packed.where}: {packed.as_written}: weights in 4 bits are not trained; say --use_peft"
            )
        unused = [options.pop(key).name for name in OF_LORA if (key := ("args", name)) in options]
        return [f"no --use_peft: {', '.join(unused)} ask for nothing, and all parameters are trained"] if unused else []
    options["args", "peft_type"] = OptionValue(asked.name, "lora", asked.where)
    for name, usual in OF_LORA.items():
        options.setdefault(("args", name), OptionValue(name, usual, asked.where))
    if packed is not None and is_packed:
        options["args", "load_in_4bit"] = OptionValue(packed.name, True, packed.where)
    double = options.pop(("args", "use_double_quant"), None)
    if double is not None:
        options["args", "bnb_4bit_use_double_quant"] = double
    return _parameter_by_parameter(options, asked)


def _parameter_by_parameter(options: dict[Key, OptionValue], asked: OptionValue) -> list[str]:
    """FSDP2 where adapters lie in FSDP1's units, whose policy keeps trained parameters apart from frozen ones
    (``fsdp_auto_wrap_policy``): as many bytes are gathered, and gradients are of adapters alone; returns a note.

    Raises :class:`ScenarioError` for a sharding that FSDP2 has another word for.
    """
    sharded = options.get(("args", "enable_fsdp"))
    if sharded is None or not flag(sharded):
        return []
    sharding = options.pop(("args", "sharding_strategy"), None)
    if sharding is not None and sharding.value != "FULL_SHARD":
        raise ScenarioError(f"{sharding.where}: {sharding.as_written} is not played beside {asked.name}; FULL_SHARD is")
    options["args", "fsdp_version"] = OptionValue(asked.name, 2, asked.where)
    return [f"{asked.where}: {asked.name}: adapters in FSDP1's flat parameters are played as FSDP2's"]
