"""Configurations that hold a whole run: what they say otherwise than by a value of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import data_table
from clustersim.files.launch.files import Document, OptionValue
from clustersim.files.launch.interpolation import STAGES
from clustersim.files.launch.table import FrameworkTable, load
from clustersim.model import named_models as models
from clustersim.model.published import configs

DEGREES = ("dp", "tp", "pp", "context_parallel_size", "expert_parallel_size")
"""Of nanotron, which make up its world (nanotron/parallel/context.py)."""


def arranged(read: Sequence[Document], table: FrameworkTable) -> None:
    """Bring documents to the names and meanings of their framework's table. Changes the documents.

    Raises :class:`ScenarioError` for a value that is of another form.
    """
    for script in read if table.name in {"megatron", "deepspeed"} else ():
        _first_names(script)
    for command in read if table.name == "olmo" else ():
        _overriding(command)
    arrange = _ARRANGED.get(table.name)
    if arrange is None:
        return
    for document in read:
        if document.kind in {"yaml", "json"}:
            arrange(document)


def unstaged(read: Sequence[Document]) -> None:
    """What a command of NeMo-Framework-Launcher changes below a stage (``training=llama/llama3_8b
    training.model.micro_batch_size=2``), by the names of the file that it chooses. Changes the documents."""
    for command in read:
        stage = next((stage for stage in STAGES if ("config", stage) in command.overrides), None)
        if stage is None or ("config", "stages") not in command.overrides:
            continue
        chosen = command.overrides.pop(("config", stage))
        del command.overrides["config", "stages"]
        if all(file.kind == "shell" for file in read):
            command.options["args", "config_name"] = chosen  # the file, which is asked for
        for at, name in [key for key in command.overrides if key[1].startswith(f"{stage}.")]:
            own = command.overrides.pop((at, name))
            command.overrides[at, name.removeprefix(f"{stage}.")] = own


_FIRST_NAMES = {
    "model_parallel_size": ("args", "tensor_model_parallel_size"),
    "pipe_parallel_size": ("args", "pipeline_model_parallel_size"),
    "batch_size": ("args", "micro_batch_size"),
    "gas": ("config", "gradient_accumulation_steps"),
}
"""What Megatron-LM before 2.0 and its fork for DeepSpeed called them (megatron/arguments.py of 1.1.5, of
microsoft/DeepSpeedExamples): ``batch_size`` is a replica's, of one pass."""


def _first_names(script: Document) -> None:
    """Names of Megatron-LM's first releases, where ``--model-parallel-size`` tells that it is one of them."""
    if script.kind != "shell" or not {("args", "model_parallel_size"), ("args", "num_layers")} <= set(script.options):
        return
    for name, key in _FIRST_NAMES.items():
        stated = script.options.pop(("args", name), None)
        if stated is not None:
            script.options[key] = stated


def _overriding(command: Document) -> None:
    """``--name=value`` beside OLMo's file, which counts against it (its scripts/train.py)."""
    for at, name in list(command.options) if command.kind == "shell" else ():
        if at == "args" and name not in {"config", "launcher"}:
            command.overrides["config", name] = command.options.pop((at, name))


def _whole(document: Document, name: str, default: int) -> int:
    said = document.options.get(("config", name))
    if said is None:
        return default
    text = str(said.value)
    if not text.isdecimal() or not 0 < int(text[:9]) == int(text):
        raise ScenarioError(f"{said.where}: {said.name} {said.value!r} does not fit: expected a whole number")
    return int(text)


def _neox(document: Document) -> None:
    """Names with ``-``; attention as runs of layers; ``fp16`` with ``type`` bfloat16, as releases before
    ``precision`` had it."""
    plain = {(at, name.replace("-", "_")): said for (at, name), said in document.options.items()}
    attention = plain.get(("config", "attention_config"))
    if attention is not None:
        words = set(_attention(attention.value))
        if not words <= {"flash", "global"} or len(words) > 1:
            raise ScenarioError(f"{attention.where}: {attention.name}: attention is read where all layers have one")
        plain["config", "attention_config"] = OptionValue(
            attention.name, words.pop() if words else "global", attention.where
        )
    half = plain.pop(("config", "fp16.type"), None)
    if half is not None and str(half.value) == "bfloat16":
        enabled = plain.pop(("config", "fp16.enabled"), half)
        plain["config", "bf16.enabled"] = OptionValue(enabled.name, True, enabled.where)
    document.options = plain
    _widened(document)
    _tokenized(document)


def _widened(document: Document) -> None:
    """The width of an MLP, by a factor, or rounded (megatron/model/transformer.py ``ParallelMLP``)."""
    said = next((document.options[key] for key in _NEOX_WIDTHS if key in document.options), None)
    if said is None:
        return
    factor = _number(document, "expansion_factor", 4.0)
    width = _whole(document, "intermediate_size", max(1, int(factor * _whole(document, "hidden_size", 1))))
    multiple = _whole(document, "mlp_multiple_of", 1)
    width = -(-width // multiple) * multiple
    document.options["config", "intermediate_size"] = OptionValue(said.name, width, said.where)
    for key in _NEOX_WIDTHS:
        document.options.pop(key, None)


def _tokenized(document: Document) -> None:
    """The vocabulary of GPT-2's tokenizer, which GPT-NeoX takes where nothing else is said (neox_args.py)."""
    if ("config", "num_layers") not in document.options:
        return
    said = document.options.get(("config", "tokenizer_type"))
    if said is None or str(said.value) in _GPT2:
        where = (document.name, "tokenizer_type") if said is None else (said.where, said.name)
        document.options["config", "neox.vocab"] = OptionValue(where[1], GPT2_TOKENS, where[0])


GPT2_TOKENS = 50257
_GPT2 = frozenset(("GPT2BPETokenizer", "HFGPT2Tokenizer"))


_NEOX_WIDTHS = (("config", "expansion_factor"), ("config", "mlp_multiple_of"))


def _number(document: Document, name: str, default: float) -> float:
    said = document.options.get(("config", name))
    if said is None:
        return default
    try:
        value = float(str(said.value))
    except ValueError:
        value = 0.0
    if not 0 < value < 1000:
        raise ScenarioError(f"{said.where}: {said.name} {said.value!r} does not fit: expected a number above 0")
    return value


def _attention(runs: Any) -> list[str]:
    """Kinds of ``[[["flash"], 12], [["global", "local"], "all"]]``."""
    items = runs if isinstance(runs, list) else [runs]
    return [str(word) for run in items for word in (run[0] if isinstance(run, list) and run else [run])]


def _nanotron(document: Document) -> None:
    """How many ranks there are: the degrees make the world."""
    if ("config", "parallelism.dp") in document.options:
        ranks = math.prod(_whole(document, f"parallelism.{name}", 1) for name in DEGREES)
        document.machine["cluster.world"] = OptionValue("parallelism", str(ranks), document.name)


def _olmo(document: Document) -> None:
    """The width of an MLP: of a gated one the two halves are counted together (olmo/model.py ``OLMoBlock``)."""
    width = _whole(document, "model.d_model", 768)
    hidden = _whole(document, "model.mlp_hidden_size", _whole(document, "model.mlp_ratio", 4) * width)
    activation = document.options.get(("config", "model.activation_type"))
    gated = activation is None or str(activation.value) == "swiglu"
    said = next((document.options[key] for key in _MLP if key in document.options), None)
    where = document.name if said is None else said.where
    name = "model.mlp_ratio" if said is None else said.name
    document.options["config", "model.mlp_hidden_size"] = OptionValue(name, hidden // 2 if gated else hidden, where)
    include = document.options.get(("config", "model.include_bias"))
    if include is not None:  # which norms take over where nothing is said of them (olmo/model.py ``LayerNormBase``)
        document.options.setdefault(("config", "model.bias_for_layer_norm"), include)
    behind = document.options.get(("config", "model.norm_after"))
    if behind is not None and _is_olmo_2(document):
        del document.options["config", "model.norm_after"]
        document.options["config", "olmo.like"] = OptionValue(behind.name, "olmo2-7b", behind.where)


_OLMO_2 = {
    "norm_after": ("true", "false"),
    "attention_layer_norm": ("true", "false"),
    "rope": ("true", "false"),
    "layer_norm_type": ("rms", "default"),
    "activation_type": ("swiglu", "swiglu"),
    "include_bias": ("false", "true"),
    "weight_tying": ("false", "true"),
}
"""What OLMo 2's blocks are, and what a file that does not say it has (olmo/config.py ``ModelConfig``)."""


def _is_olmo_2(document: Document) -> bool:
    """Whether blocks are OLMo 2's: norms behind their halves, and of whole queries and keys."""
    said = {name: document.options.get(("config", f"model.{name}")) for name in _OLMO_2}
    return all(
        str(usual if (option := said[name]) is None else option.value).lower() == own
        for name, (own, usual) in _OLMO_2.items()
    )


_MLP = (("config", "model.mlp_hidden_size"), ("config", "model.mlp_ratio"))


PEFT = "model.peft_config."
"""Of llm-foundry, PEFT's own configuration."""
OF_PEFT: Sequence[str] = data_table("adapters")["peft"]
"""What PEFT's configuration says of LoRA; the rest is refused."""


def _foundry(document: Document) -> None:
    """A model of llm-foundry's own class, adapters in PEFT's words, and a micro-batch that Composer finds."""
    kind = document.options.get(("config", f"{PEFT}peft_type"))
    sharded = any(name.startswith("fsdp_config.") for _, name in document.options)
    if kind is not None and str(kind.value).lower() == "lora" and not sharded:
        for name in OF_PEFT:
            option = document.options.pop(("config", f"{PEFT}{name}"), None)
            if option is not None:
                document.options["config", name] = option
    if sharded and ("config", "fsdp_config.sharding_strategy") not in document.options:
        # as FSDPConfig of composer/utils/parallelism.py has it
        document.options["config", "fsdp_config.sharding_strategy"] = OptionValue(
            "fsdp_config", "FULL_SHARD", document.name
        )
    own = document.options.get(("config", "model.name"))
    if own is not None and str(own.value) in {"mpt_causal_lm", "mosaic_gpt"}:
        for name, value in (("gated", False), ("norm", "layernorm"), ("positions", "learned"), ("tied", True)):
            document.options["config", f"mpt.{name}"] = OptionValue(own.name, value, own.where)
    ratio = document.options.get(("config", "model.expansion_ratio"))
    if ratio is not None:
        width = int(_number(document, "model.expansion_ratio", 4.0) * _whole(document, "model.d_model", 2048))
        document.options["config", "model.ffn_width"] = OptionValue(ratio.name, width, ratio.where)
        del document.options["config", "model.expansion_ratio"]
    micro = document.options.get(("config", "device_train_microbatch_size"))
    if micro is not None and str(micro.value) == "auto":
        document.notes.append(
            f"{micro.where}: {micro.name} auto is the largest that fits; here all samples of a rank go at once"
        )


def _lightning(document: Document) -> None:
    """GPUs by their numbers; layers that are computed again, by whatever says which."""
    prefix = "trainer.strategy.init_args.activation_checkpointing"
    for key in [key for key in document.options if key[1].startswith(prefix)]:
        policy = document.options.pop(key)
        if policy.value not in (None, [], False):
            document.options["config", f"{prefix}_policy"] = OptionValue(policy.name, True, policy.where)
    for name in ("trainer.devices", "trainer.gpus"):  # the latter of before 2.0
        devices = document.options.get(("config", name))
        if devices is not None:
            count = _devices(devices.value)
            document.options["config", name] = OptionValue(devices.name, count, devices.where)


def _devices(value: Any) -> Any:
    """How many GPUs a list of them, a number or a word is, -1 for all of a node
    (lightning/fabric/utilities/device_parser.py).

    >>> _devices([0, 2]), _devices("0,1"), _devices("0,"), _devices("4"), _devices("auto"), _devices("-1")
    (2, 2, 1, '4', -1, -1)
    """
    if isinstance(value, str) and "," in value:
        value = [word for word in value.split(",") if word.strip()]
    if isinstance(value, list):
        return -1 if value in ([-1], ["-1"]) else len(value)
    return -1 if value in ("auto", "-1") else value


def _nemo(document: Document) -> None:
    """The class of a model's sizes, by its own name, where the file has none of them."""
    key = "config", "model.config._target_"
    sized = any(name.rsplit(".", 1)[-1] == "num_layers" for _, name in document.options)
    target = document.options.pop(key, None)
    if target is not None and not sized:
        document.options[key] = OptionValue(target.name, str(target.value).rpartition(".")[2], target.where)
        _expert_class(document, document.options[key])


_OF_EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {},
    "Qwen3": {"moe_permute_fusion": True},
    "DeepSeek": {"moe_permute_fusion": True, "moe_shared_expert_overlap": True, "moe_router_dtype": "fp32"},
}
"""What NeMo's classes of models with experts have otherwise than Megatron-Core, beside tokens that go by all_to_all
(nemo/collections/llm/gpt/model of nemo_toolkit 2.4.0)."""


def _expert_class(document: Document, target: OptionValue) -> None:
    """What the class of a model with experts says of them, where the file does not."""
    row = next(row for row in load("nemo").rows if row.option == "model.config._target_")
    name = row.read(target.value)
    shape = models.shape(name, {}) if name in configs() else None
    usual = next((values for start, values in _OF_EXPERTS.items() if str(target.value).startswith(start)), None)
    if shape is None or shape.experts is None or usual is None:
        return
    values = {"num_moe_experts": shape.experts.count, "moe_token_dispatcher_type": "alltoall"} | usual
    stated = {option.rsplit(".", 1)[-1] for _, option in document.options}
    for option, value in values.items():
        if option not in stated:
            document.options["config", f"model.config.{option}"] = OptionValue(target.name, value, target.where)


_ARRANGED: dict[str, Callable[[Document], None]] = {
    "nemo": _nemo,
    "neox": _neox,
    "nanotron": _nanotron,
    "olmo": _olmo,
    "foundry": _foundry,
    "lightning": _lightning,
}
