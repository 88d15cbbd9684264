"""What follows from several options together, from the model or from the framework, for the fields of a scenario."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from clustersim.core.errors import ClusterSimError, ScenarioError
from clustersim.core.texts import shown
from clustersim.files.launch import (
    adapters,
    host_work,
    litgpt,
    megatron_adapters,
    nccl_words,
    seeing,
    shapes,
    torchtune,
)
from clustersim.files.launch.asked_files import complete, refuse_overridden, trains
from clustersim.files.launch.files import UNSET, Document, Key, OptionValue
from clustersim.files.launch.launch_parts import LaunchParts
from clustersim.files.launch.open_questions import OpenQuestion, OpenQuestions
from clustersim.files.launch.options import ScenarioFields, others
from clustersim.files.launch.table import FrameworkTable, holds
from clustersim.model import named_models as models
from clustersim.model.encoder_decoders import STYLES
from clustersim.model.names import described
from clustersim.model.published import configs, known_as
from clustersim.model.seconds.kernels import FLASH_KERNELS
from clustersim.scenario.file.splitting import MEGATRON
from clustersim.training.strategies.zero_config import HF_AUTO

_PEFT = frozenset(("accelerate", "foundry", "openrlhf", "cookbook", "verl", "automodel", "prime-rl"))
"""Frameworks whose adapters are in the words of PEFT and its kin."""
RECOMPUTED = "parallel.recompute_granularity"


GROUPED = "moe_grouped_gemm"
"""Megatron-LM's option for one product of all experts of a rank."""
EARLIER = ("checkpoint_activations", "activations_checkpoint_method")
"""Options of Megatron-LM before 3.0 for whole layers, a layer at a time unless told otherwise."""
LOCAL = (*EARLIER, "DDP_impl")
"""Options that Megatron-LM had until core 0.4 alone, of 2023, when ``transformer_impl`` was ``local`` by default."""
NOT_GIVEN = re.compile(r"reads (\S+), which was not given")
"""Of a note on a script that another one reads."""
FLASH = "use_flash_attn"
"""Its option for flash attention without Transformer Engine."""


def settled(
    parts: LaunchParts, used: set[Key], questions: OpenQuestions
) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """Put what follows from several options, the model and the framework into the fields.

    Returns the options that are not played, that are ignored, and that nobody knows.
    """
    table, options, fields, notes = parts.table, parts.options, parts.fields, parts.notes
    notes += _named(fields, table)
    with questions.gathered():
        complete(parts.files, table, options, used, notes)
    notes += _adapters(parts.files, table, options, fields, used)
    notes += seeing.taken(options, fields, used, parts.model, parts.folder)
    notes += _lengths_of_pair(parts, used)
    if table.name == "nemo":
        refuse_overridden(parts.files)
    notes += host_work.taken(parts.files, fields, used)
    nccl_words.taken(parts.files, fields)
    left = others(table, options, used)
    for name, value in table.fixed.items():
        fields.setdefault(name, value)
    notes += _masters(fields)
    notes += _recomputed(fields)
    notes += _of_earlier_release(table, options, fields)
    notes += _unfused(table, options, fields)
    notes += _graphs(fields)
    notes += _scores(table, fields)
    notes += _in_fp32(table, fields)
    notes += _looped_experts(table, options, fields)
    unset = next((note for file in parts.files for note in file.notes if UNSET in note), "")
    if unset and parts.model is None and not {"shape.layers", "model.name"} & fields.keys():
        raise ScenarioError(
            f"{unset}; {_unread(parts.files)}write their words, or give --model: a name, or a config.json"
        )
    trained = trains(parts.files, table, options) if parts.model is None else ""
    notes += _vocabulary(options, fields)
    with questions.gathered():
        notes += _model(parts, trained)
        notes += filled(fields, parts.folder)
    if fields.get("strategy.kind") == "single":
        for name in ("nodes", "gpus_per_node"):
            fields.setdefault(f"cluster.{name}", 1)
    return left


def _unread(files: Sequence[Document]) -> str:
    """What to give first: scripts that others read, and that may set what is not known."""
    names = [found[1] for file in files for note in file.notes if (found := NOT_GIVEN.search(note))]
    return f"give {' and '.join(dict.fromkeys(names))}, which the script reads, or " if names else ""


def _adapters(
    read: Sequence[Document],
    table: FrameworkTable,
    options: dict[Key, OptionValue],
    fields: ScenarioFields,
    used: set[Key],
) -> list[str]:
    """Put the adapters that options ask for into the fields, and what was read into ``used``; returns notes."""
    if table.name == "accelerate":
        adapters.refuse_untold(read, options)
    if table.name in _PEFT:
        return adapters.taken(options, fields, used)
    if table.name == "nemo" or ("config", "peft._target_") in options:
        megatron_adapters.taken(read, options, fields, used)
    torchtune.taken(options, fields, used)
    litgpt.taken(options, fields, used)
    return []


def _model(parts: LaunchParts, trained: str) -> list[str]:
    """``[model]``'s name, from its sizes where no name is said; returns notes."""
    fields, model, file = parts.fields, parts.model, parts.files[0].name
    if model is not None and (shapes.is_config_path(model) or fields.by.keys() >= shapes.WHOLE):
        shapes.refuse_contradiction(model, parts.folder, fields, fields.by)
        fields["model.hf_config" if shapes.is_config_path(model) else "model.name"] = model
        return []
    if model is not None:  # sizes that are no whole model change the one that is given, as those of a recipe
        fields["model.name"] = model
        return shapes.altered(fields, fields.by)
    if "model.name" in fields:
        _known(fields)
        return shapes.altered(fields, fields.by)
    layers = fields.pop("shape.experts.layers", None)
    sizes = {name[6:]: value for name, value in fields.items() if name.startswith("shape.")}
    names = [Path(read.name).name for read in parts.files] + [str(option.value) for option in parts.options.values()]
    sized_model = shapes.model_for(
        file, sizes, causal=trained != "encoder", seq_len=int(fields.get("model.seq_len") or 0), words=" ".join(names)
    )
    if layers is not None:
        sized_model = shapes.with_expert_layers(sized_model, str(layers), fields.by.get("shape.experts.layers"), file)
    by = fields.by.get("shape.layers")
    if by is not None:
        fields.by["model.name"] = by
    fields["model.name"] = sized_model.name
    if sized_model.options:
        fields["model.options"] = sized_model.options
    return [sized_model.note]


def _vocabulary(options: Mapping[Key, OptionValue], fields: ScenarioFields) -> list[str]:
    """The vocabulary of the model whose tokenizer is named, where no option says how large it is; returns a note."""
    if "shape.layers" not in fields or "shape.vocab" in fields:
        return []
    named = (option for (_, name), option in options.items() if name.rsplit(".", 1)[-1] == "tokenizer_model")
    for option in named:
        shipped_name = known_as(str(option.value))
        shape = None if shipped_name is None else models.shape(shipped_name, {})
        if shape is not None:
            fields["shape.vocab"] = shape.vocab
            return [f"{option.as_written}: the vocabulary is that of {shipped_name}, {shape.vocab:,} tokens"]
    return []


def _known(fields: ScenarioFields) -> None:
    """Raise :class:`ScenarioError` for a model that is not shipped, naming the option that names it."""
    name = fields["model.name"]
    by = fields.by.get("model.name")
    if by is None or not isinstance(name, str):
        return
    try:
        models.shape(name, {})
    except ClusterSimError:
        what = described(name)
        way = f": it is {what}" if what else "; give its config.json among the files, or with --model"
        raise OpenQuestion(
            by.where,
            f"{by.name} {shown(by.value)}: no shipped model is of this name (clustersim list models){way}",
        ) from None


def _masters(fields: ScenarioFields) -> list[str]:
    """DeepSpeed's ZeRO stage 0 of 16-bit parameters, which DDP would update in place: masters in fp32, and one bucket
    of 16-bit gradients behind backward (deepspeed/runtime/engine.py ``_configure_fp16_optimizer``), as Megatron-Core's
    distributed data parallelism is with gradients of the parameters' type; returns a note."""
    by = fields.by.get("strategy.kind")
    sixteen = fields.get("strategy.param_dtype") in {"bf16", "fp16"} or fields.get("model.dtype") in {"bf16", "fp16"}
    is_unsplit = not any(holds(name, fields) for name in ("tp", "pp", "cp", "ep"))
    if (
        by is None
        or not by.name.endswith(("stage", "deepspeed"))
        or fields["strategy.kind"] != "ddp"
        or not (sixteen and is_unsplit)
    ):
        return []
    fields.setdefault("strategy.param_dtype", fields.get("model.dtype"))
    fields["parallel.framework"] = fields["strategy.framework"] = MEGATRON
    fields["parallel.grad_reduce_in_fp32"] = False
    return ["ZeRO stage 0: masters in fp32, gradients in 16 bits behind backward, played as Megatron-Core's"]


def _recomputed(fields: ScenarioFields) -> list[str]:
    """How many layers are computed again, which Megatron-LM reads of full granularity alone: none of a stage where
    blocks have 0; returns a note."""
    by = fields.by.get(RECOMPUTED)
    if by is not None and by.name.lstrip("-").replace("-", "_") in EARLIER and fields[RECOMPUTED] == "full":
        fields.setdefault("parallel.recompute_num_layers", 1)
    layers = fields.get("parallel.recompute_num_layers")
    full = fields.get(RECOMPUTED) == "full"
    if full and layers == 0 and fields.get("parallel.recompute_method") == "block":
        for name in ("granularity", "method", "num_layers"):
            del fields[f"parallel.recompute_{name}"]
        return ["no layer is computed again: blocks of 0 layers are"]
    if not full and "parallel.recompute_method" in fields and not _asked(fields, "recompute_method"):
        del fields["parallel.recompute_method"]  # NeMo reads it of full granularity alone
    if layers is not None and not full and fields.get("parallel.framework", MEGATRON) == MEGATRON:
        del fields["parallel.recompute_num_layers"]
    return []


def _of_earlier_release(table: FrameworkTable, options: Mapping[Key, OptionValue], fields: ScenarioFields) -> list[str]:
    """Kernels of a Megatron-LM script that has options of before Transformer Engine was its default; returns a note."""
    earlier = next((option for (_, name), option in options.items() if name in LOCAL), None)
    if table.name != "megatron" or earlier is None or "model.implementation" in fields.by:
        return []
    fields["model.implementation"] = "megatron"
    return [f"{earlier.where}: {earlier.name} is of Megatron-LM before core 0.4, whose --transformer-impl was local"]


def _unfused(table: FrameworkTable, options: Mapping[Key, OptionValue], fields: ScenarioFields) -> list[str]:
    """Attention of Megatron-LM without Transformer Engine, whose scores are in memory unless an option asks for flash
    attention (core/transformer/dot_product_attention.py, ``LocalSpecProvider``); returns a note."""
    if table.name != "megatron" or fields.get("model.implementation") != "megatron" or "model.attention" in fields:
        return []
    flash = next((option for (_, name), option in options.items() if name == FLASH and option.is_on), None)
    fields["model.attention"] = "eager" if flash is None else "fa2"
    return (
        [] if flash else ["no --use-flash-attn: scores of attention are in memory, as transformer_impl local has them"]
    )


def _asked(fields: ScenarioFields, name: str) -> bool:
    """Whether an option of Megatron-LM's own name says a field, which then checks it."""
    by = fields.by.get(f"parallel.{name}")
    return by is not None and by.name.lstrip("-").replace("-", "_").rsplit(".", 1)[-1] == name


def _scores(table: FrameworkTable, fields: ScenarioFields) -> list[str]:
    """Kernels of Megatron-DeepSpeed, whose scores of attention are in memory where no option asks for flash attention
    (megatron/model/transformer.py ``CoreAttention``); returns a note."""
    if table.name != "deepspeed":
        return []
    is_set = "model.attention" in fields.by
    if "shape.layers" not in fields:  # another script than Megatron-DeepSpeed's
        if not is_set:
            fields.pop("model.attention", None)
        return []
    if fields.get("model.attention") != "eager":
        return []
    fields.setdefault("model.implementation", "megatron")
    return (
        [] if is_set else ["no --use-flash-attn-v2: scores of attention are in memory, as Megatron-DeepSpeed has them"]
    )


def _in_fp32(table: FrameworkTable, fields: ScenarioFields) -> list[str]:
    """A note on kernels of FlashAttention in fp32, which they do not take: a script sets the type itself."""
    kernel = fields.get("model.attention")
    if table.name != "accelerate" or fields.get("model.dtype") not in (None, "fp32") or kernel not in FLASH_KERNELS:
        return []
    return [
        f"no file says a type of 16 bits, which {kernel} needs: all is played in fp32; "
        "say bf16 or mixed_precision where the script loads weights in bfloat16 by itself"
    ]


def _looped_experts(table: FrameworkTable, options: Mapping[Key, OptionValue], fields: ScenarioFields) -> list[str]:
    """A note on experts that Megatron-LM calls one after the other, as it does unless it is told otherwise
    (megatron/training/arguments.py ``moe_grouped_gemm``; core/transformer/moe/experts.py ``SequentialMLP``)."""
    values = [option.value for (_, name), option in options.items() if name.rsplit(".", 1)[-1] == GROUPED]
    asked = any(value not in (False, "false", "False") for value in values)
    if table.name != "megatron" or asked or not fields.get("shape.experts.count"):
        return []
    return [
        "no --moe-grouped-gemm: Megatron-LM calls each of a rank's experts by itself; they are played as one grouped "
        "product, so that a step whose host or whose small products bind takes longer than said"
    ]


def _graphs(fields: ScenarioFields) -> list[str]:
    """What CUDA graphs replay: by Megatron-LM's default nothing, whatever the scope is; whole layers, where no scope is
    said, or ``full`` is (``TransformerConfig.__post_init__``, NVIDIA/Megatron-LM at 002526d8); returns a note."""
    how = fields.pop("graphs.impl", None)
    scopes = fields.pop("run.cuda_graph", None) or []
    if how is None:
        return []
    words = ["full_iteration"] if how == "full_iteration" else [word for word in scopes if word != "full"]
    fields["run.cuda_graph"] = words or ["attn", "mamba", "mlp", "moe"]
    return []


def _named(fields: ScenarioFields, table: FrameworkTable) -> list[str]:
    """A model by the name that it has on the hub, or of the folder that it is in; returns a note."""
    name = fields.get("model.name")
    if not isinstance(name, str) or name in configs():
        return []
    packed = adapters.NAMED if table.name == "accelerate" else None  # which says of adapters that they are beside it
    shipped_name = known_as(packed.sub("", name) if packed else name)
    if shipped_name is None or shipped_name == name:
        return []
    fields["model.name"] = shipped_name
    return [f"{name} has the sizes of {shipped_name}"]


def _lengths_of_pair(parts: LaunchParts, used: set[Key]) -> list[str]:
    """Tokens of a source and of a target where both are said, of an encoder and a decoder (``max_source_length`` and
    ``max_target_length`` of transformers' examples); returns a note. To any other model they say nothing of a sample.
    """
    keys = [("args", name) for name in ("max_source_length", "max_target_length")]
    name = parts.model or parts.fields.get("model.name")
    if not isinstance(name, str) or not all(key in parts.options for key in keys):
        return []
    try:
        kind = models.config_of(parts.folder / name if shapes.is_config_path(name) else name).get("model_type")
    except ClusterSimError:
        return []  # which whoever reads the model says
    if kind not in STYLES or STYLES[kind].sound:
        return []
    source, target = (parts.options[key] for key in keys)
    lengths = [adapters.number(option, whole=True) for option in (source, target)]
    parts.fields["model.options"] = {**parts.fields.get("model.options", {}), "source_len": lengths[0]}
    parts.fields.say("model.seq_len", lengths[1], target, over=True)
    used.update(keys)
    return [f"{source.as_written}, {target.as_written}: every source and every target is as long"]


def filled(fields: ScenarioFields, folder: Path = Path()) -> list[str]:
    """What Hugging Face's integration puts for ``"auto"`` in DeepSpeed's file, from the model; returns a note.

    As ``HfTrainerDeepSpeedConfig.trainer_config_finalize`` (transformers) and ``Accelerator._prepare_deepspeed``.
    folder : of the scenario, whose paths start there.
    """
    auto = [name for name in HF_AUTO if fields.get(f"strategy.zero_optimization.{name}") == "auto"]
    if not auto:
        return []
    width = _width(fields, folder)
    if width is None:
        return []  # which the strategy's own reader tells what it would be
    values = {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }
    for name in auto:
        fields[f"strategy.zero_optimization.{name}"] = values[name]
    words = ", ".join(f"{name} = {values[name]:,}" for name in auto)
    return [f'"auto" of a model {width:,} wide: {words}']


def _width(fields: ScenarioFields, folder: Path) -> int | None:
    """The model's, where it is a transformer."""
    config = fields.get("model.hf_config")
    name = folder / config if isinstance(config, str) else fields.get("model.name")
    shape = models.shape(name, dict(fields.get("model.options", {}))) if isinstance(name, str | Path) else None
    return None if shape is None else shape.d_model
