"""Options of TrainingArguments that say what others say, or that count beside others (transformers 5.24, accelerate
1.15)."""

from __future__ import annotations

from clustersim.core.texts import shown
from clustersim.files.launch.files import Document, Key, OptionValue

_CONFIG = "fsdp_config"
_COMPILING = ("torch_compile_backend", "torch_compile_mode", "torchdynamo")
"""Options that alone switch torch.compile on, the last by its name in transformers before 5."""
_UNSAID = {"", "none", "null"}
_SHARDS = ("shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "2", "3", "4", "5")
"""Sharding strategies of FSDP1 other than whole shards, as accelerate has them in any case and by number."""


def named_before(one: Document) -> None:
    """``activation_checkpointing`` of transformers 5.24, which deprecates ``gradient_checkpointing``, by that name."""
    for at in ("args", "config"):
        newest = one.options.get((at, "activation_checkpointing"))
        if newest is not None:
            del one.options[at, "activation_checkpointing"]
            one.options[at, "gradient_checkpointing"] = newest  # counts against the older name (``__post_init__``)


def arranged(one: Document) -> None:
    """Bring what arguments say beside each other to the rows that read it. Changes the document."""
    _compiled(one)
    least = one.options.pop(("args", "fsdp_min_num_params"), None)  # of transformers before 5
    if least is not None:
        one.options.setdefault(("config", f"{_CONFIG}.fsdp_min_num_params"), least)
    for key in [key for key in one.options if key[1].startswith("parallelism_config.")]:
        name = key[1].rsplit(".", 1)[-1].removeprefix("parallelism_config_")
        own: Key = "config", f"parallelism_config.parallelism_config_{name}"
        one.options[own] = one.options.pop(key)


def _compiled(one: Document) -> None:
    """torch.compile, which its backend or its mode alone switches on (``TrainingArguments.__post_init__``); axolotl
    hands them on where ``torch_compile`` is true."""
    key = "args", "torch_compile"
    said = next((one.options[at] for name in _COMPILING if (at := ("args", name)) in one.options), None)
    if said is None or ("args", "base_model") in one.options or str(said.value).lower() in _UNSAID:
        return
    before = one.options.get(key)
    if before is None or str(before.value).lower() == "false":
        one.options[key] = OptionValue(said.name, True, said.where)
        one.notes.append(f"{said.where}: {said.name} switches torch.compile on")


def resharded(read: list[Document]) -> None:
    """Say that FSDP1 shards as ``fsdp_sharding_strategy`` says, whatever ``fsdp_reshard_after_forward`` does, as
    ``accelerate config`` writes it (``FullyShardedDataParallelPlugin.__post_init__`` of accelerate 1.15)."""
    options = {key[1]: option for one in read for key, option in (*one.options.items(), *one.overrides.items())}
    said = options.get(f"{_CONFIG}.fsdp_reshard_after_forward")
    if said is None or str(said.value).lower() not in _SHARDS:
        return
    version = options.get(f"{_CONFIG}.fsdp_version")
    if version is not None and str(version.value) != "1":
        return
    strategy = options.get(f"{_CONFIG}.fsdp_sharding_strategy")
    counts = "FULL_SHARD" if strategy is None else strategy.value
    if str(counts).lower() != str(said.value).lower():
        read[0].notes.append(
            f"{said.where}: {said.name} {shown(said.value)}: FSDP1 of accelerate shards as fsdp_sharding_strategy "
            f"says, and so {counts} is played; say that option too where {shown(said.value)} is meant"
        )


def optimized(read: list[Document]) -> None:
    """Leave out the Trainer's kind of AdamW where DeepSpeed's file has an optimizer, which counts
    (``deepspeed_optim_sched`` of transformers/integrations/deepspeed.py); others than AdamW contradict it."""
    own = next(
        (option for one in read for key, option in one.options.items() if key == ("config", "optimizer.type")), None
    )
    if own is None:
        return
    for one in read:
        for name in ("optim", "optimizer"):  # of the Trainer, and of axolotl
            said = one.options.get(("args", name))
            if said is not None and str(said.value).startswith("adamw_torch") and not str(said.value).endswith("bit"):
                del one.options["args", name]
                one.notes.append(f"{said.where}: {said.name} {said.value}: the optimizer is that of {own.where}")
