"""Options of TrainingArguments that say what others say, or that count beside others (transformers 5.24, accelerate
1.15)."""

from __future__ import annotations

import json
from collections.abc import Sequence

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import shown
from clustersim.files.launch.files import Document, Key, OptionValue

_CONFIG = "fsdp_config"
_COMPILING = ("torch_compile_backend", "torch_compile_mode", "torchdynamo")
"""Options that alone switch torch.compile on, the last by its name in transformers before 5."""
_UNSAID = {"", "none", "null"}
_OFF = {"false", "auto", *_UNSAID}
_SHARDS = ("shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "2", "3", "4", "5")
"""Sharding strategies of FSDP1 other than whole shards, as accelerate has them in any case and by number."""
_OF_TRANSFORMERS_4 = (
    "evaluation_strategy",
    "overwrite_output_dir",
    "no_cuda",
    "use_mps_device",
    "per_gpu_train_batch_size",
    "fp16_backend",
    "half_precision_backend",
    "fp16_opt_level",
    "fsdp_min_num_params",
    "fsdp_transformer_layer_cls_to_wrap",
    "sharded_ddp",
    "push_to_hub_model_id",
    "push_to_hub_token",
    "include_inputs_for_metrics",
    "include_tokens_per_second",
    "jit_mode_eval",
    "torchdynamo",
    "tpu_num_cores",
    "save_safetensors",
)
"""Arguments of the Trainer that transformers 5 has no longer: files that say one are of 4."""
REENTRANT: Key = "args", "gradient_checkpointing_kwargs.use_reentrant"
OF_FACTORY: Key = "args", "use_reentrant_gc"
"""LLaMA-Factory's own word for it, true by default, but never with FSDP2 (``prepare_model_for_training`` of its
model/model_utils/checkpointing.py, 0.9.4)."""
OF_ACCELERATE = {
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_param.device": "offload_param_device",
}
"""Keys of DeepSpeed's file that accelerate fills in where they are ``"auto"``, and its own names of them
(``DeepSpeedPlugin.deepspeed_config_process`` of accelerate/utils/dataclasses.py)."""


def named_before(file: Document) -> None:
    """``activation_checkpointing`` of transformers 5.24, which deprecates ``gradient_checkpointing``, by that name."""
    for at in ("args", "config"):
        newest = file.options.get((at, "activation_checkpointing"))
        if newest is not None:
            del file.options[at, "activation_checkpointing"]
            file.options[at, "gradient_checkpointing"] = newest  # counts against the older name (``__post_init__``)


def arranged(file: Document) -> None:
    """Bring what arguments say beside each other to the rows that read it. Changes the document."""
    _compiled(file)
    least = file.options.pop(("args", "fsdp_min_num_params"), None)  # of transformers before 5
    if least is not None:
        file.options.setdefault(("config", f"{_CONFIG}.fsdp_min_num_params"), least)
    for key in [key for key in file.options if key[1].startswith("parallelism_config.")]:
        name = key[1].rsplit(".", 1)[-1].removeprefix("parallelism_config_")
        own: Key = "config", f"parallelism_config.parallelism_config_{name}"
        file.options[own] = file.options.pop(key)


def _compiled(file: Document) -> None:
    """torch.compile, which its backend or its mode alone switches on (``TrainingArguments.__post_init__``); axolotl
    hands them on where ``torch_compile`` is true."""
    key = "args", "torch_compile"
    option = next((file.options[at] for name in _COMPILING if (at := ("args", name)) in file.options), None)
    if option is None or ("args", "base_model") in file.options or str(option.value).lower() in _UNSAID:
        return
    before = file.options.get(key)
    if before is None or str(before.value).lower() == "false":
        file.options[key] = OptionValue(option.name, True, option.where)
        file.notes.append(f"{option.where}: {option.name} switches torch.compile on")


def recomputed(read: Sequence[Document]) -> None:
    """Which of PyTorch's checkpoints computes layers again where no option says it, which transformers 5 has otherwise
    than 4 (``gradient_checkpointing_enable`` of modeling_utils.py: not reentrant, and so no further than backward
    needs; reentrant in 4.35 to 4.57, and PyTorch's default before). Changes the documents."""
    for file in read:
        _recomputed_how(file)
        again = file.options.get(("args", "gradient_checkpointing"))
        own = file.options.pop(OF_FACTORY, None)
        if again is None or not again.is_on or REENTRANT in file.options:
            continue
        if own is not None:
            reentrant = OptionValue(own.name, own.is_on and not _is_fsdp2(read), own.where)
            file.options[REENTRANT] = reentrant
            continue
        older = next((name for name in _OF_TRANSFORMERS_4 if ("args", name) in file.options), None)
        file.options[REENTRANT] = OptionValue(again.name, older is not None, again.where)
        by = f"as transformers 4 has it, of which {older} is" if older else "as transformers 5 has it; 4 repeats it"
        file.notes.append(
            f"{again.where}: no use_reentrant: a block's last product is {'' if older else 'not '}repeated, {by}"
        )


def _recomputed_how(file: Document) -> None:
    """``gradient_checkpointing_kwargs``, or ``activation_checkpointing_kwargs`` of transformers 5.24, key by key, as a
    command's JSON too. Raises :class:`ScenarioError` for a text that is none."""
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        option = file.options.get(("args", name))
        if option is not None and isinstance(option.value, str) and option.value.strip().lower() not in _UNSAID:
            del file.options["args", name]
            try:
                inside = json.loads(option.value)
            except ValueError as wrong:
                raise ScenarioError(
                    f"{option.where}: {option.name} {shown(option.value)} is no JSON: {wrong}"
                ) from None
            for key, value in (inside if isinstance(inside, dict) else {}).items():
                file.options["args", f"{name}.{key}"] = OptionValue(f"{option.name} {key}", value, option.where)
    newest = file.options.pop(("args", "activation_checkpointing_kwargs.use_reentrant"), None)
    if newest is not None:
        file.options[REENTRANT] = newest


def _is_fsdp2(read: Sequence[Document]) -> bool:
    """Whether a file of accelerate's asks for FSDP of version 2."""
    key = "config", f"{_CONFIG}.fsdp_version"
    return any(str(option.value) == "2" for file in read if (option := file.options.get(key)) is not None)


def mixed(read: Sequence[Document]) -> None:
    """16 bits that the Trainer's arguments say, which count against those that accelerate's file or launcher says
    (``TrainingArguments.__post_init__`` of transformers 4.30 to 5.24). Changes the documents."""
    switched_on = {
        name: option
        for file in read
        for name in ("fp16", "bf16")
        if (option := file.options.get(("args", name))) is not None and str(option.value).lower() not in _OFF
    }
    if len(switched_on) != 1:
        return  # both are a contradiction that the Trainer refuses too
    ((name, own),) = switched_on.items()
    for file in read:
        for options in (file.options, file.overrides):
            option = options.get(("config", "mixed_precision"))
            if option is not None and option.value not in {name, "no"}:
                options["config", "mixed_precision"] = OptionValue(option.name, name, option.where)
                file.notes.append(
                    f"{own.where}: {own.as_written} counts against {option.as_written} of {option.where}, as the "
                    "Trainer has it; a script with a loop of its own may not"
                )


def resharded(read: Sequence[Document]) -> None:
    """Say that FSDP1 shards as ``fsdp_sharding_strategy`` says, whatever ``fsdp_reshard_after_forward`` does, as
    ``accelerate config`` writes it (``FullyShardedDataParallelPlugin.__post_init__`` of accelerate 1.15)."""
    options = {key[1]: option for file in read for key, option in (*file.options.items(), *file.overrides.items())}
    option = options.get(f"{_CONFIG}.fsdp_reshard_after_forward")
    if option is None or str(option.value).lower() not in _SHARDS:
        return
    version = options.get(f"{_CONFIG}.fsdp_version")
    if version is not None and str(version.value) != "1":
        return
    strategy = options.get(f"{_CONFIG}.fsdp_sharding_strategy")
    counts = "FULL_SHARD" if strategy is None else strategy.value
    if str(counts).lower() != str(option.value).lower():
        read[0].notes.append(
            f"{option.where}: {option.name} {shown(option.value)}: FSDP1 of accelerate shards as "
            f"fsdp_sharding_strategy says, and so {counts} is played; say that option too where "
            f"{shown(option.value)} is meant"
        )


def optimized(read: Sequence[Document]) -> None:
    """Leave out the Trainer's kind of AdamW where DeepSpeed's file has an optimizer, which counts
    (``deepspeed_optim_sched`` of transformers/integrations/deepspeed.py); others than AdamW contradict it."""
    own = next(
        (option for file in read for key, option in file.options.items() if key == ("config", "optimizer.type")), None
    )
    if own is None:
        return
    for file in read:
        for name in ("optim", "optimizer"):  # of the Trainer, and of axolotl
            option = file.options.get(("args", name))
            if (
                option is not None
                and str(option.value).startswith("adamw_torch")
                and not str(option.value).endswith("bit")
            ):
                del file.options["args", name]
                file.notes.append(f"{option.where}: {option.name} {option.value}: the optimizer is that of {own.where}")


def clipped(read: Sequence[Document]) -> None:
    """``"auto"`` of DeepSpeed's gradient_clipping is the Trainer's max_grad_norm (``HfTrainerDeepSpeedConfig`` of
    transformers/integrations/deepspeed.py), which is 1 as accelerate's own value is (``_prepare_deepspeed``)."""
    norms = [said for file in read for (_, name), said in file.options.items() if name == "max_grad_norm"]
    norm = norms[0].value if norms else 1.0
    for file in read:
        for key, said in file.options.items():
            if key[1] in {"gradient_clipping", "deepspeed_config.gradient_clipping"} and said.value == "auto":
                file.options[key] = OptionValue(said.name, norm, said.where)


def left_to_accelerate(read: Sequence[Document]) -> None:
    """Leave out ``"auto"`` of DeepSpeed's file for what accelerate's own file or command says."""
    stated = {name for file in read for _, name in (*file.options, *file.overrides)}
    for file in read:
        for name, own in OF_ACCELERATE.items():
            option = file.options.get(("config", name))
            if option is not None and option.value == "auto" and f"deepspeed_config.{own}" in stated:
                del file.options["config", name]
