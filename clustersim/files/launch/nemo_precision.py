"""Arithmetic of NeMo 2 and Megatron-Bridge, which the plugin of precision says, and not the model's configuration.

Fields that both have are the plugin's, those that it leaves alone too (``update_config_with_dtype_overrides``,
nemo/lightning/pytorch/plugins/mixed_precision.py and megatron/bridge/training/mixed_precision.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.table import FrameworkTable

OF_MODEL = ("model.config.fp8", "model.fp8")
"""What the model's configuration calls its type of 8 bits, in NeMo 2 and in Megatron-Bridge."""
PLUGINS = ("mixed_precision", "trainer.plugins")
"""What holds the plugin; NeMo 1 has neither, and reads the model's configuration."""
CONTAINER = "ConfigContainer."


def arranged(_: Sequence[Document], options: dict[Key, OptionValue], table: FrameworkTable) -> list[str]:
    """Leave out what the plugin overwrites. Changes ``options``; returns a note where the model has 8 bits, and the
    plugin has none."""
    plugin = list(_of_plugin(options)) if table.name == "nemo" else []
    if not plugin:
        return []
    notes = []
    for key in [key for key in options if key[1].removeprefix(CONTAINER) in OF_MODEL]:
        own = options.pop(key)
        if not _is_off(own) and not any(_has_8_bits(option) for option in plugin):
            notes.append(
                f"{own.where}: {own.as_written} is without effect: the plugin of precision overwrites it, and has no "
                "type of 8 bits (its own field fp8 would say one)"
            )
    return notes


def _of_plugin(options: dict[Key, OptionValue]) -> Iterator[OptionValue]:
    for (at, name), option in options.items():
        plain = name.removeprefix(CONTAINER)
        if at == "config" and any(plain == holder or plain.startswith(f"{holder}.") for holder in PLUGINS):
            yield option


def _has_8_bits(option: OptionValue) -> bool:
    """Whether an option of the plugin is its ``fp8``, or the name of a precision that has it."""
    field = option.name.rsplit(".", 1)[-1]
    return (field == "fp8" and not _is_off(option)) or (field == PLUGINS[0] and "fp8" in str(option.value))


def _is_off(option: OptionValue) -> bool:
    return option.value is None or str(option.value).lower() in {"", "false", "none", "null"}
