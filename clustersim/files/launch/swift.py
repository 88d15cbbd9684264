"""Arguments of ms-swift's ``swift sft`` and ``swift pt`` in the words of Hugging Face's Trainer.

Names and defaults: modelscope/ms-swift ``swift/arguments/sft_args.py`` (at 00e9ca86), ``swift/trainers/arguments.py``
(at 0037257c) and the DeepSpeed and FSDP presets of ``swift/config`` (at c2bd8ac5, zero3 at 39e3366d).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import shown
from clustersim.files.launch import grouped_experts, seeing
from clustersim.files.launch.files import Document, OptionValue
from clustersim.files.launch.launcher_sizes import VISIBLE
from clustersim.files.launch.whose import SWIFT, SWIFT_MODULES, SWIFT_TUNERS

COMMANDS = ("swift sft", "swift pt")
NAMES = {
    "model": "model_name_or_path",
    "model_id_or_path": "model_name_or_path",
    "attn_impl": "attn_implementation",
    "experts_impl": "experts_implementation",
    "freeze_vit": seeing.TOWER,
    "freeze_aligner": seeing.PROJECTOR,
}
EARLIER = {
    "batch_size": "per_device_train_batch_size",
    "dtype": "torch_dtype",
    "lora_dropout_p": "lora_dropout",
    "lora_target_modules": "target_modules",
    "quantization_bit": "quant_bits",
}
"""Names of ms-swift 1 and 2 (its ``swift/llm/utils/argument.py`` at v2.6) -> those of 3."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
KERNELS = {"flash_attn": "flash_attention_2", "flash_attention": "flash_attention_2"}
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp16"}
"""The Trainer's arithmetic for what weights are loaded in: of fp32 it is fp16 (``_init_torch_dtype``)."""
SAMPLES = 16
"""A step's samples where ``gradient_accumulation_steps`` is not said."""
AUTO = {"bf16.enabled": "auto", "fp16.enabled": "auto", "gradient_clipping": "auto", "train_batch_size": "auto"}
ZERO2 = {
    "zero_optimization.allgather_partitions": True,
    "zero_optimization.allgather_bucket_size": 200_000_000,
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.reduce_bucket_size": 200_000_000,
}
ZERO3 = {
    "zero_optimization.sub_group_size": 1_000_000_000,
    "zero_optimization.reduce_bucket_size": "auto",
    "zero_optimization.stage3_prefetch_bucket_size": "auto",
    "zero_optimization.stage3_param_persistence_threshold": "auto",
    "zero_optimization.stage3_max_live_parameters": 1_000_000_000,
    "zero_optimization.stage3_max_reuse_distance": 1_000_000_000,
}
AWAY = {"device": "cpu", "pin_memory": True}
"""Of what its presets keep on the host (``swift/llm/ds_config/zero3_offload.json``)."""
PRESETS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("zero0", "zero1", "zero2", "zero2_offload"), ZERO2),
    **dict.fromkeys(("zero3", "zero3_offload"), ZERO3),
}
FSDP = {
    "distributed_type": "FSDP",
    "fsdp_config.fsdp_version": 2,
    "fsdp_config.fsdp_reshard_after_forward": True,
    "fsdp_config.fsdp_activation_checkpointing": True,
}
"""Of its ``--fsdp fsdp2``."""


def arranged(command: Document) -> None:
    """Bring a command of ms-swift to the Trainer's names, with ms-swift's defaults.

    Changes the document. Raises :class:`ScenarioError` for a tuner that is not played, layers that are placed over the
    GPUs of one process, and a count of passes that hangs on a number of ranks that nobody says.
    """
    options = command.options
    own = (command.program in SWIFT or command.kind == "yaml") and any(
        ("args", name) in options for name in SWIFT_TUNERS
    )
    if not (own or command.program in (*COMMANDS, *SWIFT_MODULES)):
        return
    _refuse_placed(command)
    added = _of_earlier(command)
    options.pop(("args", "model_name"), None)  # what the model calls itself
    for name, means in NAMES.items():
        renamed = options.pop(("args", name), None)
        if renamed is not None:
            options["args", means] = renamed
    kernel = options.get(("args", "attn_implementation"))
    if kernel is not None and kernel.value in KERNELS:
        options["args", "attn_implementation"] = OptionValue(kernel.name, KERNELS[str(kernel.value)], kernel.where)
    grouped_experts.taken(command)
    seeing.by_default(command)
    added |= _tuned(command)
    added |= _typed(command)
    for name, value in {"gradient_checkpointing": True, "per_device_train_batch_size": 1}.items():
        if ("args", name) not in options:
            added[name] = value
    for name, value in added.items():
        options["args", name] = OptionValue(name, value, command.name)
    added |= _passes(command)
    _sharded(command)
    if added:
        words = ", ".join(f"{name} {str(value).lower()}" for name, value in added.items())
        command.notes.append(f"{command.name}: as ms-swift has it by default: {words}")


def _of_earlier(command: Document) -> dict[str, Any]:
    """Bring a command of ms-swift 1 or 2 to the names of 3; returns what was not said.

    Raises :class:`ScenarioError` for adapters whose modules nobody says, which those releases have by model.
    """
    options = command.options
    if not any(("args", name) in options for name in ("model_id_or_path", "batch_size", "dtype", "template_type")):
        return {}
    for name, means in EARLIER.items():
        option = options.pop(("args", name), None)
        if option is not None and str(option.value).upper() not in {"AUTO", "DEFAULT"}:
            value = DTYPES.get(str(option.value), option.value)
            plain = "all-linear" if name == "lora_target_modules" and str(value).upper() == "ALL" else value
            options["args", means] = OptionValue(option.name, plain, option.where)
    flash = options.pop(("args", "use_flash_attn"), None)
    if flash is not None and flash.is_on:
        options["args", "attn_impl"] = OptionValue(flash.name, "flash_attn", flash.where)
    bits = options.get(("args", "quant_bits"))
    if bits is not None and str(bits.value) == "0":
        del options["args", "quant_bits"]
    kind = options.pop(("args", "model_type"), None)
    if kind is not None and ("args", "model_id_or_path") not in options:
        options["args", "model_id_or_path"] = kind
    tuner = next((options[key] for name in SWIFT_TUNERS if (key := ("args", name)) in options), None)
    if (tuner is None or tuner.value == "lora") and ("args", "target_modules") not in options:
        where = command.name if tuner is None else f"{tuner.where}: {tuner.name} {shown(tuner.value)}"
        raise ScenarioError(
            f"{where}: ms-swift before 3 has adapters at modules that its table has of each model; say "
            "--lora_target_modules ALL, or their names"
        )
    if ("args", "max_length") in options:
        return {}
    return {"max_length": 2048}


def filled(read: Sequence[Document]) -> None:
    """Put what a file of arguments says into the command that names it (``swift sft FILE``, ``--config FILE``), which
    counts against it; of a file alone they are arguments, too. Changes the documents."""
    commands = [one for one in read if one.program in COMMANDS]
    for file in read:
        if file.kind != "yaml" or not {name for _, name in file.options} & set(SWIFT_TUNERS):
            continue
        own = {("args", name): said for (_, name), said in file.options.items()}
        named = [one for one in commands if Path(str(_config(one))).name == Path(file.name).name]
        file.options = {} if named else own
        for command in named:
            command.options = {**own, **command.options}


def _config(command: Document) -> Any:
    return getattr(command.options.get(("args", "config")), "value", "")


def _tuned(command: Document) -> dict[str, Any]:
    """What is trained, as LLaMA-Factory's words say it; returns what was not said."""
    options = command.options
    tuner = next((options.pop(key) for name in SWIFT_TUNERS if (key := ("args", name)) in options), None)
    kind = "lora" if tuner is None else str(tuner.value)
    if kind not in {"lora", "full"}:
        where = command.name if tuner is None else f"{tuner.where}: {tuner.name}"
        raise ScenarioError(f"{where}: {shown(kind)} is not played; lora and full are")
    options["args", "swift_tuner"] = OptionValue("tuner_type" if tuner is None else tuner.name, kind, command.name)
    return {"swift_tuner": kind} if tuner is None else {}


def _typed(command: Document) -> dict[str, Any]:
    """The Trainer's arithmetic by what weights are loaded in; returns what was not said."""
    options = command.options
    flags = [name for name in ("bf16", "fp16") if ("args", name) in options]
    loaded = options.get(("args", "torch_dtype"))
    if loaded is None and flags:
        return {}
    dtype = "bfloat16" if loaded is None else str(loaded.value)
    if dtype not in TYPES:
        return {}
    for name in flags:
        del options["args", name]
    said = OptionValue("torch_dtype", True, command.name) if loaded is None else loaded
    options["args", TYPES[dtype]] = OptionValue(said.name, True, said.where)
    return {"torch_dtype": dtype} if loaded is None else {}


def _passes(command: Document) -> dict[str, Any]:
    """Passes of a step where nobody says them: as many as make 16 samples (``TrainArgumentsMixin``)."""
    options = command.options
    if ("args", "gradient_accumulation_steps") in options:
        return {}
    world = _ranks(command)
    micro = str(options["args", "per_device_train_batch_size"].value)
    if not world or not micro.isdecimal():
        raise ScenarioError(
            f"{command.name}: gradient_accumulation_steps is not said, and ms-swift makes {SAMPLES} samples a step of "
            "as many passes as the ranks need; say it, or how many ranks there are"
        )
    passes = max(1, math.ceil(SAMPLES / max(1, int(micro)) / world))
    name = "gradient_accumulation_steps"
    options["args", name] = OptionValue(name, passes, command.name)
    return {name: passes}


def _ranks(command: Document) -> int:
    """How many ranks the command has; 0 where it does not say."""
    counts = {name: str(option.value) for name, option in command.machine.items()}
    if counts.get("cluster.world", "").isdecimal():
        return int(counts["cluster.world"])
    nodes = counts.get("cluster.nodes", "1")
    ranks = counts.get("cluster.gpus_per_node", "")
    return int(nodes) * int(ranks) if nodes.isdecimal() and ranks.isdecimal() else 0


def _refuse_placed(command: Document) -> None:
    """Raise where one process has several GPUs, over which ``device_map`` places layers."""
    ranks = command.machine.get("cluster.gpus_per_node")
    said = None if ranks is None else (ranks.name, str(ranks.value))
    bare = command.program in COMMANDS or (command.program in SWIFT and command.started_by.startswith("python"))
    if bare and (said is None or (said[0] in VISIBLE and said[1] != "1")):
        raise ScenarioError(
            f"{command.name}: {command.program} without NPROC_PER_NODE is one process, which places layers over the "
            "GPUs it sees (device_map), which is not played; say NPROC_PER_NODE, or one GPU in CUDA_VISIBLE_DEVICES"
        )


def _sharded(command: Document) -> None:
    """``--deepspeed zero2`` and its kin, and ``--fsdp fsdp2``, which name presets of ms-swift's own."""
    options = command.options
    preset = options.get(("args", "deepspeed"))
    name = "" if preset is None else str(preset.value).replace("default-", "").replace("-", "_")
    if preset is not None and name in PRESETS:
        del options["args", "deepspeed"]
        held: dict[str, Any] = {**AUTO, "zero_optimization.stage": int(name[4]), **PRESETS[name]}
        overlaps = str(preset.value).startswith("default-")  # ms-swift 2, in swift/llm/ds_config; 3 has false there
        held |= {"zero_optimization.overlap_comm": overlaps, "zero_optimization.contiguous_gradients": True}
        if name.endswith("_offload"):
            devices = ("optimizer", "param") if name.startswith("zero3") else ("optimizer",)
            for part in devices:
                held |= {f"zero_optimization.offload_{part}.{key}": value for key, value in AWAY.items()}
        for key, value in held.items():
            options["config", key] = OptionValue(preset.name, value, preset.where)
    shards = options.get(("args", "fsdp"))
    if shards is not None and shards.value == "fsdp2":
        del options["args", "fsdp"]
        options.pop(("args", "gradient_checkpointing"), None)
        for key, value in FSDP.items():
            options["config", key] = OptionValue(shards.name, value, shards.where)
