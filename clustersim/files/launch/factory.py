"""LLaMA-Factory's files in the words of Hugging Face's Trainer: those of 0.9, and those of its version 1.

Names and defaults: hiyouga/LLaMA-Factory 0.9.5, ``src/llamafactory/hparams``, and ``src/llamafactory/v1`` for version 1
(``config/training_args.py``, ``config/model_args.py``, ``core/base_trainer.py``, ``core/model_engine.py`` and
``plugins``).
"""

from __future__ import annotations

from typing import Any

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import shown
from clustersim.files.launch import seeing
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.trainer_args import OF_FACTORY
from clustersim.files.launch.whose import FACTORY_1

NAMES = {
    "model": "model_name_or_path",
    "micro_batch_size": "per_device_train_batch_size",
    "enable_activation_checkpointing": "gradient_checkpointing",
    "flash_attn": "attn_implementation",
    "peft_config.r": "lora_rank",
    "peft_config.target_modules": "lora_target",
    "peft_config.lora_dropout": "lora_dropout",
    "peft_config.modules_to_save": "additional_target",
    "peft_config.use_dora": "use_dora",
    "quant_config.quantization_bit": "quantization_bit",
    "quant_config.double_quantization": "double_quantization",
}
"""Of version 1, by what they are in 0.9 and the Trainer."""
SHARDS = {"reshard_after_forward": "fsdp_reshard_after_forward", "offload_params": "fsdp_offload_params"}
"""Of ``dist_config`` of fsdp2, by accelerate's names."""
USUAL: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "gradient_checkpointing": True,
    "cutoff_len": 2048,
    "optim": "adamw_torch",
}
"""What version 1 has where nobody says it."""


def renamed(document: Document) -> None:
    """Bring a file of version 1 to the names of 0.9 and of accelerate, with version 1's defaults.

    Weights are loaded in the checkpoint's type, which is bf16 of nearly all, and trained in it, whatever ``bf16`` says;
    FSDP computes in bf16 or fp32, and reduces in fp32 (``FSDP2Engine.get_mp_policy``).

    Changes the document. Raises :class:`ScenarioError` for adapters of another kind, sequences that are split, and an
    optimizer of a plugin.
    """
    if not {name for _, name in document.options} & FACTORY_1:
        return
    said = {name: option for (_, name), option in document.options.items()}
    made: dict[Key, OptionValue] = {}

    def put(name: str, value: Any, section: str = "args", by: OptionValue | None = None) -> None:
        """Set an option; what says so is ``by``, or the file."""
        made[section, name] = OptionValue(by.name if by else name, value, by.where if by else document.name)

    _refuse(said)
    kind = said.get("dist_config.name")
    _distributed(said, put)
    for name, option in said.items():
        if not name.startswith(("dist_config.", "kernel_config.")):
            put(NAMES.get(name, name), option.value, by=option)
    made.pop(("args", "peft_config.name"), None)
    made.pop(("args", "quant_config.name"), None)
    made.pop(("args", "bf16"), None)
    tuner = said.get("peft_config.name")
    if tuner is not None:
        put("finetuning_type", tuner.value, by=tuner)
        made.setdefault(("args", "lora_dropout"), OptionValue(tuner.name, 0.05, document.name))
    computed = str(getattr(said.get("bf16"), "value", True)).lower() == "true"
    if kind is not None and kind.value == "deepspeed":
        put("bf16", True)
    else:
        put("pure_bf16", True)
    if kind is not None and kind.value == "fsdp2":
        put("reduce_dtype", "float32")
        if not computed:
            put("param_dtype", "float32", by=said["bf16"])
    if str(getattr(said.get("kernel_config.name"), "value", "")) == "liger_kernel":
        put("liger_kernels", True, by=said["kernel_config.name"])  # its loss needs the logits
    added = {name: value for name, value in USUAL.items() if ("args", name) not in made}
    for name, value in added.items():
        put(name, value)
    document.options = made
    words = ", ".join(f"{name} {str(value).lower()}" for name, value in added.items())
    document.notes.append(
        f"{document.name}: is of version 1 of LLaMA-Factory, which trains weights in the type that they are loaded in: "
        "bf16" + (f"; and has by default: {words}" if words else "")
    )


def _distributed(said: dict[str, OptionValue], put: Any) -> None:
    """``dist_config`` as accelerate's file has it; without one, DDP."""
    kind = said.get("dist_config.name")
    if kind is None:
        return
    if kind.value == "fsdp2":
        put("distributed_type", "FSDP", "config", kind)
        put("fsdp_config.fsdp_version", 2, "config", kind)
        for name, means in SHARDS.items():
            option = said.get(f"dist_config.{name}")
            if option is not None:
                put(f"fsdp_config.{means}", option.value, "config", option)
        return
    put("distributed_type", "DEEPSPEED", "config", kind)
    file = said.get("dist_config.config_file")
    if file is None:
        raise ScenarioError(f"{kind.where}: {kind.name} deepspeed without dist_config.config_file, which it needs")
    put("deepspeed_config.deepspeed_config_file", file.value, "config", file)


def _refuse(said: dict[str, OptionValue]) -> None:
    """Raise :class:`ScenarioError` for what version 1 has and nothing plays."""
    for name, accepted in (("dist_config.name", ("fsdp2", "deepspeed")), ("peft_config.name", ("lora",))):
        option = said.get(name)
        if option is not None and option.value not in accepted:
            raise ScenarioError(
                f"{option.where}: {name} {shown(option.value)} is not played; known: {', '.join(accepted)}"
            )
    export = said.get("peft_config.export_dir")
    if export is not None:
        raise ScenarioError(f"{export.where}: peft_config.export_dir merges adapters and trains nothing")
    degree = said.get("dist_config.cp_size")
    if degree is not None and str(degree.value) != "1":
        raise ScenarioError(
            f"{degree.where}: dist_config.cp_size {shown(degree.value)} splits sequences by Ulysses, which is not "
            "played with FSDP"
        )
    optimizer = said.get("optim_config.name")
    if optimizer is not None:
        raise ScenarioError(
            f"{optimizer.where}: optim_config.name {shown(optimizer.value)} is of a plugin, which no file describes"
        )


_OWN = ("finetuning_type", "lora_target", "disable_gradient_checkpointing")
"""Arguments of LLaMA-Factory alone."""
EARLIER = "train_bash.py"
"""The program of releases before 0.7.1."""
_UNTRAINED = ("export_dir", "infer_backend", "do_predict", "predict_with_generate")
"""Of LLaMA-Factory's files that export a model or generate text."""


def arranged(document: Document) -> None:
    """What LLaMA-Factory does otherwise than the Trainer: layers are computed again unless it is told not to, and
    sequences have 2,048 tokens (``prepare_model_for_training`` of its model/model_utils/checkpointing.py and
    hparams/data_args.py, LLaMA-Factory 0.9.5), 1,024 in releases whose program was ``src/train_bash.py``.

    Raises :class:`ScenarioError` for a file that trains nothing.
    """

    def value(name: str) -> Any:
        """What an option says, None where it is not given; a flag alone is true."""
        option = document.options.get(("args", name))
        return None if option is None else True if option.value == [] else option.value

    def on(name: str) -> bool:
        """Whether an option is given as true."""
        return str(value(name)).lower() in {"true", "1", "yes"}

    untrained = next((name for name in _UNTRAINED if value(name) not in (None, False)), None)
    if untrained and not on("do_train"):
        raise ScenarioError(
            f"{document.name}: {untrained} without do_train: true trains nothing; give the file that trains"
        )
    own = [name for name in _OWN if value(name) is not None]
    templated = value("template") is not None and value("stage") is not None
    if not own and not templated:
        return
    seeing.by_default(document)
    flash = document.options.get(("args", "flash_attn"))
    if flash is not None and flash.value == []:  # the switch that it was up to 0.6
        document.options["args", "flash_attn"] = OptionValue(flash.name, "fa2", flash.where)
    option = own[0] if own else "template"
    again = on("gradient_checkpointing") or not on("disable_gradient_checkpointing")
    added: dict[str, Any] = {"gradient_checkpointing": again}
    is_earlier = document.program.rpartition("/")[2] == EARLIER
    if not {name for _, name in document.options} & {"cutoff_len", "max_seq_length", "max_length", "model_max_length"}:
        added["cutoff_len"] = 1024 if is_earlier else 2048
    usual = [name for name, held in added.items() if value(name) != held and not on("disable_gradient_checkpointing")]
    for name, held in added.items():
        document.options["args", name] = OptionValue(name if value(name) is not None else option, held, document.name)
    document.options.pop(("args", "disable_gradient_checkpointing"), None)
    document.options.setdefault(OF_FACTORY, OptionValue(option, True, document.name))
    if usual:
        words = ", ".join(f"{name} {str(added[name]).lower()}" for name in usual)
        release = f"before 0.7.1, of which {EARLIER} is," if is_earlier else "0.9"
        document.notes.append(f"{document.name}: as LLaMA-Factory {release} has it by default: {words}")
