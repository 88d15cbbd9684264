"""Arguments of Hugging Face's Trainer: in a file of their own, or saying what accelerate's file would."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import shown
from clustersim.files.launch import axolotl, factory, swift, trainer_args, trainer_programs
from clustersim.files.launch.files import Document, Key, OptionValue, document
from clustersim.files.launch.table import FrameworkTable

ARGUMENTS = ("model_name_or_path", "per_device_train_batch_size", "base_model")
"""Keys of files that hold the arguments of a training script: of Trainer's, TRL's, LLaMA-Factory's and axolotl's."""
SECTIONED = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_seq_length")
"""Arguments that are read where they are in no section of a file, but DeepSpeed's of accelerate."""
SHARDING = {
    "full_shard": "FULL_SHARD",
    "shard_grad_op": "SHARD_GRAD_OP",
    "no_shard": "NO_SHARD",
    "hybrid_shard": "HYBRID_SHARD",
    "hybrid_shard_zero2": "HYBRID_SHARD_ZERO2",
}
_CONFIG = "fsdp_config"
_OF_FSDP = "activation_checkpointing"
_DEGREES = {
    "tp_size": "tp",
    "tensor_parallel_size": "tp",
    "context_parallel_size": "cp",
    "sequence_parallel_degree": "cp",
    "dp_shard_size": "dp_shard",
    "dp_replicate_size": "dp_replicate",
}
"""axolotl's names of accelerate's parallelism_config, and one of TrainingArguments."""
OF_DEEPSPEED = re.compile(r"(?:ds|deepspeed)_?(?:config|cfg|conf|json)(?:_?(?:path|file|json|name))?")
"""Names that training scripts have for DeepSpeed's file, which the Trainer calls ``deepspeed``."""
HEADS = re.compile(r"run_(glue|classification|swag|qa|squad|ner|xnli|seq_cls)\w*(\.py)?")
"""Scripts of transformers' examples whose model has a head of few labels."""


def arranged(read: Sequence[Document], table: FrameworkTable) -> None:
    """Bring documents of accelerate to the two places that its table knows: the script's arguments, and its own file.

    Changes the documents. Raises :class:`ScenarioError` for a sharding that FSDP does not have.
    """
    if table.name != "accelerate":
        return
    known = {row.option for row in table.every() if row.at == "args"}
    named = [file.options[key] for file in read if (key := ("args", _CONFIG)) in file.options]
    shards = {Path(str(said.value)).name for said in named if str(said.value).endswith(".json")}
    for file in read:
        if file.kind == "json" and Path(file.name).name in shards:
            file.options = {("config", f"{_CONFIG}.{name}"): said for (_, name), said in file.options.items()}
    for file in read:
        trainer_args.named_before(file)
    _checkpointed_twice(read)
    swift.filled(read)
    for file in read:
        _arranged_document(file, known)
    _commanded(read)
    trainer_args.clipped(read)
    trainer_args.left_to_accelerate(read)
    _meshed(read)
    trainer_args.recomputed(read)
    trainer_args.mixed(read)
    trainer_args.resharded(read)
    trainer_args.optimized(read)
    _unsaid_strategy(read)


def _arranged_document(file: Document, known: set[str]) -> None:
    """The same of one document by itself; ``known`` : options that the table reads of a script's arguments."""
    names = {name for _, name in file.options}
    _refuse_sections(file, names)
    if file.kind in {"yaml", "json"} and names & set(ARGUMENTS):
        file.options = {_place(key, known): said for key, said in file.options.items()}
    _lowered(file)
    _named_for_deepspeed(file)
    factory.renamed(file)
    _inline(file)
    _of_deepspeed_chat(file)
    if file.program == "trl sft":
        _of_trl(file)
    swift.arranged(file)
    _renamed(file)
    trainer_programs.arranged(file)
    trainer_args.arranged(file)
    if "base_model" in names and (file.kind != "shell" or file.program.startswith("axolotl")):
        axolotl.arranged(file)
    _attention(file)
    factory.arranged(file)
    for key in (("args", "finetuning_type"), ("args", "adapter"), ("args", "swift_tuner")):
        if key in file.options and str(file.options[key].value).lower() in {"full", ""}:
            del file.options[key]
    _sharded(file)


def _checkpointed_twice(read: Sequence[Document]) -> None:
    """Say that the Trainer refuses FSDP's checkpointing beside its own (``create_accelerator_and_postprocess`` of
    transformers/trainer.py); a script with a loop of its own may have both."""
    switched_on = [
        (document, name.rsplit(".", 1)[-1])
        for document in read
        for (_, name), option in (*document.options.items(), *document.overrides.items())
        if option.is_on
    ]
    own = next((document for document, name in switched_on if name == "gradient_checkpointing"), None)
    inner = next((name for _, name in switched_on if name in {"fsdp_activation_checkpointing", _OF_FSDP}), None)
    if own is not None and inner is not None:
        own.notes.append(
            f"{own.name}: the Trainer stops with an error where both gradient_checkpointing and FSDP's {inner} are "
            "true: leave out gradient_checkpointing; layers are played as computed again once"
        )


def _named_for_deepspeed(document: Document) -> None:
    """A script's own option for DeepSpeed's file, as the Trainer has it: left out, it would be played as DDP."""
    own = next((name for at, name in document.options if at == "args" and OF_DEEPSPEED.fullmatch(name)), "")
    option = document.options.get(("args", own))
    if option is None or str(option.value) in {"", "[]", "None", "none"}:
        return
    if ("args", "deepspeed") in document.options and document.options["args", "deepspeed"].value != []:
        return  # which names the file itself
    del document.options["args", own]
    document.options["args", "deepspeed"] = option


def _lowered(document: Document) -> None:
    """Accelerate's arithmetic, which it reads in whatever case (accelerate/utils/launch.py)."""
    for options in (document.options, document.overrides):
        option = options.get(("config", "mixed_precision"))
        if option is not None and isinstance(option.value, str):
            options["config", "mixed_precision"] = OptionValue(option.name, option.value.lower(), option.where)


def _refuse_sections(file: Document, names: set[str]) -> None:
    """Raise :class:`ScenarioError` for arguments in sections of a script's own file, whose words nobody else has."""
    if file.kind not in {"yaml", "json"}:
        return
    inside = (
        name
        for name in sorted(names)
        if "." in name and name.rsplit(".", 1)[1] in SECTIONED and not name.startswith("deepspeed")
    )
    name = next(inside, None)
    if name is not None:
        raise ScenarioError(
            f"{file.name}: {name} is in a section of a script's own; give what the Trainer is given: "
            f"{name.rsplit('.', 1)[1]} and its kin without sections"
        )


def _commanded(read: Sequence[Document]) -> None:
    """What a command says beside the file of arguments that its ``--config`` names counts against it (``TrlParser`` of
    trl/scripts/utils.py, whose file sets defaults)."""
    count = "config", "deepspeed_config.gradient_accumulation_steps"
    counted = any(("args", "gradient_accumulation_steps") in command.options for command in read)
    for command in read:
        if counted and str(getattr(command.overrides.get(count), "value", "")).startswith("$"):
            del command.overrides[count]  # what a command would print, which is not run: the Trainer's is it
        named = command.options.get(("args", "config"))
        name = Path(str(named.value)).name if named is not None and command.kind == "shell" else ""
        for file in (other for other in read if Path(other.name).name == name):
            for key in [
                key for key in command.overrides if ("args", key[1]) in file.options
            ]:  # LLaMA-Factory's key=value
                command.options["args", key[1]] = command.overrides.pop(key)
            for key in [key for key in command.options if key in file.options]:
                own, before = command.options.pop(key), file.options[key]
                command.overrides[key] = own
                if own.value != before.value:
                    less = f"{shown(before.value)} of {file.name}"
                    command.notes.append(f"{own.where}: {own.name} {shown(own.value)} counts, and not {less}")


def _unsaid_strategy(read: Sequence[Document]) -> None:
    """Raise :class:`ScenarioError` for a script or a file of arguments whose name, or whose comment on how it is
    launched, tells a strategy that no file says, and so is no DDP."""
    keys = {key for file in read for key in (*file.options, *file.overrides)}
    told = {"distributed_type", "zero_optimization.stage", "deepspeed", "deepspeed_config", "deepspeed_config_file"}
    if any(name in told or name.startswith(("fsdp", "deepspeed")) for _, name in keys):
        return
    for file in read:
        beside = re.search(r"^#.*(--config_file|--accelerate_config)[ =](\S+\.ya?ml)", file.text, re.MULTILINE)
        if beside is not None:
            raise ScenarioError(
                f"{file.name}: a comment says that it is launched with {beside[2]}, which says how it shards; give "
                "that file too"
            )
        for name in (file.program, *(Path(file.name).parts[-2:] if file.kind in {"yaml", "json"} else ())):
            word = re.search(
                r"fsdp|deepspeed|zero[-_]?\d" + ("|megatron" if name == file.program else ""), name.lower()
            )
            if word:
                raise ScenarioError(
                    f"{file.name}: {name} tells of {word[0]}, and no file says how it shards; give accelerate's file "
                    "or DeepSpeed's, or say --fsdp or --deepspeed"
                )
    if not any(file.kind == "shell" for file in read):
        read[0].notes.append(f"{read[0].name}: no file says how it is launched: DDP, as the Trainer has it without one")
    for file in read:
        if file.started_by == "deepspeed":
            file.notes.append(
                f"{file.name}: deepspeed starts the ranks, and no option names its configuration: DDP, as the Trainer "
                "has it without one; of a script that makes one itself give that as a .json file too"
            )


def _meshed(read: Sequence[Document]) -> None:
    """Shards of ``ParallelismConfig`` where no file names a strategy: FSDP2's (accelerate's
    examples/torch_native_parallelism/nd_parallel.py)."""
    shards = [file for file in read for at, name in file.options if name.endswith("_config_dp_shard_size")]
    kinds = {("config", "distributed_type"), ("config", f"{_CONFIG}.fsdp_version")}
    if not shards or any(kinds & {*file.options, *file.overrides} for file in read):
        return
    for name, value in (("distributed_type", "FSDP"), (f"{_CONFIG}.fsdp_version", 2)):
        shards[0].options["config", name] = OptionValue("--dp-shard-size", value, shards[0].name)
    shards[0].notes.append(f"{shards[0].name}: no file names a strategy, and dp_shard_size shards: FSDP of version 2")


CHAT = {
    "gradient_clipping": 1.0,
    "zero_optimization.overlap_comm": True,
    "zero_optimization.stage3_param_persistence_threshold": 10_000,
    "zero_optimization.stage3_max_live_parameters": 30_000_000,
    "zero_optimization.stage3_prefetch_bucket_size": 30_000_000,
}
"""What DeepSpeed-Chat's main.py puts into DeepSpeed's configuration (dschat/utils/ds_utils.py ``get_train_ds_config``,
microsoft/DeepSpeedExamples at 7cc6cc31)."""


def _of_deepspeed_chat(file: Document) -> None:
    """``--zero_stage`` of a script that makes DeepSpeed's configuration itself, as DeepSpeed-Chat's does; its 16 bits
    are fp16 where ``--dtype`` does not say."""
    stage = file.options.pop(("args", "zero_stage"), None)
    if stage is None:
        return
    for name, value in CHAT.items():
        file.options["config", name] = OptionValue(stage.name, value, stage.where)
    file.options["config", "distributed_type"] = OptionValue(stage.name, "DEEPSPEED", stage.where)
    file.options["config", "deepspeed_config.zero_stage"] = stage
    device = "cpu" if file.options.pop(("args", "offload"), None) else "none"
    for name in ("param", "optimizer") if str(stage.value) == "3" else ("optimizer",):  # which stage 3 alone reads
        key = "config", f"deepspeed_config.offload_{name}_device"
        file.options[key] = OptionValue("--offload", device, stage.where)
    sixteen = next((name for name in ("bf16", "fp16") if ("args", name) in file.options), "fp16")
    said = file.options.pop(("args", "dtype"), OptionValue(f"--{sixteen}", sixteen, stage.where))
    file.options["args", str(said.value)] = OptionValue(said.name, True, said.where)
    file.options.pop(("args", "deepspeed"), None)
    file.notes.append(
        f"{file.name}: {stage.name} is of a script that makes DeepSpeed's configuration itself: {said.value}, and the "
        "rest as DeepSpeed-Chat's main.py has it"
    )


def _of_trl(file: Document) -> None:
    """What TRL's command has by default otherwise than the Trainer (trl/trainer/sft_config.py and base_config.py of TRL
    1.16)."""
    given = {name for _, name in file.options}
    length = not given & {"max_length", "max_seq_length"}
    usual = {"gradient_checkpointing": True, "bf16": "fp16" not in given} | ({"max_length": 1024} if length else {})
    added = {name: value for name, value in usual.items() if name not in given}
    for name, value in added.items():
        file.options["args", name] = OptionValue(name, value, file.name)
    if added:
        words = ", ".join(f"{name} {str(value).lower()}" for name, value in added.items())
        file.notes.append(f"{file.name}: as TRL 1.16 has it by default: {words}")
    file.notes.append(
        f"{file.name}: TRL 1.16 takes the loss in chunks of tokens (its add_fused_lm_head), which no option says: "
        "logits are played whole, as earlier releases have them, in time and memory"
    )


def _renamed(file: Document) -> None:
    """Names that the Trainer's scripts have for what accelerate, or another of them, says."""
    for name, degree in _DEGREES.items():
        said = file.options.pop(("args", name), None)
        if said is not None:
            key = "config", f"parallelism_config.parallelism_config_{degree}_size"
            file.options[key] = OptionValue(said.name, said.value, said.where)
    config = file.options.pop(("args", "config_name"), None)
    if config is not None:
        file.options.setdefault(("args", "model_name_or_path"), config)
    packed = file.options.pop(("args", "max_packed_sequence_len"), None)
    if packed is not None:  # of axolotl before 0.3: samples are joined to sequences of this length
        for name in ("sequence_len", "max_seq_length"):
            file.options.pop(("args", name), None)
        file.options["args", "max_seq_length"] = packed
        file.options["args", "packing"] = OptionValue(packed.name, True, packed.where)
    if HEADS.fullmatch(file.program):
        file.notes.append(f"{file.name}: {file.program} has a head of few labels; that over the vocabulary is played")


def _inline(file: Document) -> None:
    """DeepSpeed's file as ``deepspeed`` of TrainingArguments holds it: a table, or its text."""
    for key in [key for key in file.options if key[1].startswith("deepspeed.")]:
        file.options["config", key[1].partition(".")[2]] = file.options.pop(key)
    shards = file.options.get(("args", _CONFIG))
    if shards is not None and str(shards.value).lstrip().startswith("{"):
        del file.options["args", _CONFIG]
        held = document(str(shards.value), f"{file.name}: {shards.name}").options.items()
        file.options |= {("config", f"{_CONFIG}.{key[1]}"): option for key, option in held}
    said = file.options.get(("args", "deepspeed"))
    if said is not None and str(said.value).lstrip().startswith("{"):
        del file.options["args", "deepspeed"]
        inside = document(str(said.value), f"{file.name}: {said.name}")
        file.options |= {
            key: OptionValue(option.name, option.value, file.name) for key, option in inside.options.items()
        }


def _place(key: Key, known: set[str]) -> Key:
    """Of a file with the arguments of a script, all are arguments but what has accelerate's own names."""
    name = key[1]
    own = name.startswith((f"{_CONFIG}.", "accelerator_config.")) and name not in known
    return key if own else ("args", name)


_ATTENTION = {
    "flash_attention": "flash_attention_2",
    "use_flash_attn": "flash_attention_2",
    "use_flash_attention_2": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "flex_attention",
    "xformers_attention": "xformers",
}
"""Switches of axolotl's files, of PEFT's example and of alignment-handbook before 0.3, by what they mean to
``attn_implementation``."""


def _attention(document: Document) -> None:
    """The kernel of attention by document name; FlexAttention's has the traffic of FlashAttention's."""
    name = "args", "attn_implementation"
    for word, means in _ATTENTION.items():
        switch = document.options.pop(("args", word), None)
        if switch is not None and switch.is_on:
            document.options[name] = OptionValue(switch.name, means, switch.where)
    switch = document.options.get(name)
    if switch is not None and switch.value == "flex_attention":
        document.options[name] = OptionValue(switch.name, "flash_attention_2", switch.where)
        document.notes.append(f"{switch.where}: FlexAttention is played with FlashAttention-2's times and memory")


def _sharded(file: Document) -> None:
    """``fsdp`` and ``fsdp_config`` of TrainingArguments as accelerate's file has them (transformers
    training_args.py ``_process_fsdp_args``)."""
    for key in list(file.options):
        if key[1].startswith(f"{_CONFIG}.") and not key[1].startswith(f"{_CONFIG}.fsdp_"):
            last = key[1].rsplit(".", 1)[-1]
            found = file.options.pop(key)
            if last.startswith("backward_prefetch"):  # of which the Trainer takes any case
                found = OptionValue(found.name, str(found.value).upper(), found.where)
            file.options["config", f"{_CONFIG}.fsdp_{last}"] = found
    said = file.options.get(("args", "fsdp"))
    if said is None:
        return
    del file.options["args", "fsdp"]
    words = _words(said.value)
    if not words:
        return
    file.options["config", "distributed_type"] = OptionValue(said.name, "FSDP", said.where)
    for word in words:
        if word in SHARDING:
            strategy = OptionValue(said.name, SHARDING[word], said.where)
            file.options.setdefault(("config", f"{_CONFIG}.fsdp_sharding_strategy"), strategy)
        elif word == "offload":
            file.options["config", f"{_CONFIG}.fsdp_offload_params"] = OptionValue(said.name, True, said.where)
        elif word not in {"auto_wrap", "true"}:
            choices = ", ".join([*SHARDING, "auto_wrap", "offload"])
            raise ScenarioError(f"{said.where}: {said.name}: {word!r} is not a choice; known: {choices}")


def _words(value: Any) -> list[str]:
    words = value if isinstance(value, list) else [value]
    return [part.lower() for word in words for part in str(word).split() if part.lower() not in {"false", "none", ""}]
