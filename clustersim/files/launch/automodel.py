"""NeMo Automodel's files: a model by its name on the hub, classes by their last names, and sections of 0.2 by today's.

Names and defaults: nemo_automodel 0.7.0 (``recipes/llm/train_ft.py``, ``recipes/_dist_utils.py``,
``components/distributed/config.py``) and, of a file that names a manager, 0.2.0 (``components/distributed/fsdp2.py``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import shown
from clustersim.files.launch import unread
from clustersim.files.launch.adapters import flag
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.table import FrameworkTable
from clustersim.model.adapter_setting import ALL_LINEAR

COMMAND = "automodel"
PACKAGE = "nemo_automodel"
TELLING = (
    "step_scheduler.local_batch_size",
    "step_scheduler.global_batch_size|distributed.*",
    "step_scheduler.*|model.pretrained_model_name_or_path",
)
"""Keys that together tell a file of Automodel, any one group of them."""
MODELS = ("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path", "model.config")
CAUSAL = re.compile(r"(?:\w+\.)*\w*ForCausalLM(?:\.from_(?:pretrained|config))?")
"""Classes of models that predict the next token."""
RECIPES = re.compile(r"(?:[\w./]*\.)?(?:TrainFinetune|Benchmarking)RecipeForNextTokenPrediction")
SECTIONS = {
    "distributed_config.": "distributed.",
    "autopipeline.": "distributed.pipeline.",
    "parallelizer.": "distributed.moe.",
}
"""Sections of 0.2 and 0.3, and those of 0.7 in their place."""
MANAGER = "FSDP2Manager"
"""The class that a file of 0.2 names, whose gradients are reduced in bf16."""
LATER = ("distributed.enable_", "distributed.defer_", "distributed.fsdp2_")
"""Beginnings of options that 0.2 has not, which reads no class there any more."""
LENGTHS = ("packed_sequence.packed_sequence_size", "dataset.seq_len", "dataset.seq_length")
DEGREES = ("dp_size", "tp_size", "cp_size", "pp_size")
NOTHING = ("none", "null", "None", None)
SPLITTING = ("distributed.tp_size", "distributed.cp_size")
COMPILING = ("compile.enabled", "distributed.enable_compile")
USUAL_TARGETS = "*_proj"
"""Where adapters are if nobody says it, which are a block's linears (``ModuleMatcher``)."""


def is_launch(document: Document) -> bool:
    """Whether a command, or a file, is one of Automodel's."""
    if document.program == COMMAND or document.program.startswith(PACKAGE):
        return True
    target = document.options.get(("config", "model._target_"))
    if target is not None and str(target.value).startswith(f"{PACKAGE}."):
        return True
    return document.kind == "yaml" and unread.has_group([name for _, name in document.options], TELLING)


def arranged(read: Sequence[Document], options: dict[Key, OptionValue], table: FrameworkTable) -> list[str]:
    """Bring options to the table's names. Changes ``options``, and the first file's machine; returns notes.

    Raises :class:`ScenarioError` for another recipe than that of next tokens, and for a model that is built otherwise
    than by its name.
    """
    if table.name != "automodel":
        return []
    notes = _sections(options)
    _refuse_others(options)
    _put(options, "automodel.model", MODELS)
    _put(options, "automodel.weights", ("model.torch_dtype", "model.dtype"))
    _put(options, "automodel.attention", ("model.backend.attn", "model.attn_implementation"))
    _put(options, "automodel.offload", ("distributed.offload_policy._target_",), value=True)
    for key in [key for key in options if key[1].startswith("distributed.offload_policy.")]:
        del options[key]
    attention = options.get(("config", "automodel.attention"))
    if attention is not None and attention.value == "te":
        options["config", "automodel.rotation"] = attention
    if attention is not None and attention.value == "flex":
        notes.append(f"{attention.where}: {attention.as_written}: attention is by the kernel that PyTorch picks")
    _kernels(options)
    notes += _experts(options)
    _pipeline(options)
    _classes(options)
    _world(read, options)
    return notes + _lengths(options) + _adapters(options)


def _put(options: dict[Key, OptionValue], name: str, sources: Sequence[str], value: object = None) -> None:
    """Put the first of some options that has a value under a name of the table's; none of them stays."""
    given = [option for source in sources if (option := options.pop(("config", source), None)) is not None]
    option = next((option for option in given if option.value not in NOTHING), None)
    if option is not None:
        value = str(option.value).removeprefix("torch.") if value is None else value
        options["config", name] = OptionValue(option.name, value, option.where)


def _sections(options: dict[Key, OptionValue]) -> list[str]:
    """Sections by today's names, and what a manager of 0.2 has otherwise; returns a note."""
    for key in list(options):
        section = next((old for old in SECTIONS if key[1].startswith(old)), None)
        if section is not None:
            name = SECTIONS[section] + key[1].removeprefix(section)
            name = name.replace("moe.activation_checkpointing", "activation_checkpointing")
            if name != "distributed._target_":
                options.setdefault(("config", name), options[key])
            del options[key]
    for key in [key for key in options if key[1].startswith("distributed.") and options[key].value in NOTHING]:
        del options[key]
    target = options.get(("config", "distributed._target_"))
    reduced: Key = ("config", "distributed.mp_policy.reduce_dtype")
    is_later = any(name.startswith(LATER) for _, name in options if not name.endswith("_async_tensor_parallel"))
    if target is None or not str(target.value).endswith(MANAGER) or reduced in options or is_later:
        return []
    options[reduced] = OptionValue(target.name, "bfloat16", target.where)
    return [
        f"{target.where}: {target.name} {MANAGER}: gradients are reduced in bf16, as 0.2 has it; 0.7 reduces in fp32"
    ]


def _refuse_others(options: dict[Key, OptionValue]) -> None:
    recipe = options.get(("config", "recipe._target_")) or options.get(("config", "recipe"))
    if recipe is not None and not RECIPES.fullmatch(str(recipe.value)):
        raise ScenarioError(
            f"{recipe.where}: {recipe.name} {shown(recipe.value)} is not read; recipes of next tokens are "
            "(TrainFinetuneRecipeForNextTokenPrediction)"
        )
    options.pop(("config", "recipe._target_"), None)
    target = options.pop(("config", "model._target_"), None)
    if target is not None and not CAUSAL.fullmatch(str(target.value)):
        raise ScenarioError(
            f"{target.where}: {target.name} {shown(target.value)}: a model that is built so is not read; one that "
            "predicts next tokens is, by its name on the hub (NeMoAutoModelForCausalLM.from_pretrained)"
        )


def _kernels(options: dict[Key, OptionValue]) -> None:
    """Liger's norms, rotation and activations: transformers' modules (``force_hf``) have them unless the file says
    otherwise, and where nothing splits a layer (``kernel_patches.py`` ``_apply_preload_overrides``)."""
    forced = options.get(("config", "model.force_hf"))
    if forced is None or not flag(forced) or any(_count(options, name) > 1 for name in SPLITTING):
        return
    liger = options.pop(("config", "model.use_liger_kernel"), None)
    compiled = any(flag(option) for name in COMPILING if (option := options.get(("config", name))) is not None)
    if not compiled and (liger is None or flag(liger)):
        told = liger or forced
        options["config", "automodel.liger"] = OptionValue(told.name, True, told.where)


FUSED_NORMS = ("te", "torch_fp32")
"""Norms of ``BackendConfig`` that are one kernel: Transformer Engine's, and one that it compiles itself."""


def _experts(options: dict[Key, OptionValue]) -> list[str]:
    """How tokens reach experts, by 0.2's word or today's, and kernels of norms, rotation and gated activations, each of
    which is one where the backend says so of the first two (``BackendConfig``); returns a note where nobody says it."""
    old = options.pop(("config", "model.backend.enable_deepep"), None)
    dispatcher = options.pop(("config", "model.backend.dispatcher"), None)
    if old is not None:
        dispatcher = OptionValue(old.name, "deepep" if flag(old) else "torch", old.where)
    if dispatcher is not None:
        options["config", "automodel.dispatcher"] = dispatcher
    norm = options.get(("config", "model.backend.rms_norm"))
    rotation = options.get(("config", "model.backend.rope_fusion"))
    if norm is not None and norm.value in FUSED_NORMS and (rotation is None or flag(rotation)):
        options["config", "automodel.kernels"] = OptionValue(norm.name, True, norm.where)
        options.pop(("config", "model.backend.rms_norm"))
        options.pop(("config", "model.backend.rope_fusion"), None)
    degree = options.get(("config", "distributed.ep_size"))
    if dispatcher is not None or degree is None or str(degree.value) == "1":
        return []
    return ["model.backend.dispatcher is not said: tokens go by DeepEP, as wherever it is installed"]


def _count(options: dict[Key, OptionValue], name: str) -> int:
    """A degree, 1 where it is not said."""
    option = options.get(("config", name))
    return 1 if option is None else _whole(option)


def _pipeline(options: dict[Key, OptionValue]) -> None:
    """A pipeline's schedule in any spelling (torch's ``get_schedule_class``); nothing of one where there is none."""
    degree = options.get(("config", "distributed.pp_size"))
    if degree is None or str(degree.value) == "1":
        for key in [key for key in options if key[1].startswith("distributed.pipeline.")]:
            del options[key]
    schedule = options.get(("config", "distributed.pipeline.pp_schedule"))
    if schedule is not None:
        plain = str(schedule.value).lower().replace("_", "")
        options["config", "distributed.pipeline.pp_schedule"] = OptionValue(schedule.name, plain, schedule.where)


def _classes(options: dict[Key, OptionValue]) -> None:
    """The loss and the optimizer by the last words of their classes.

    Raises :class:`ScenarioError` for an optimizer whose states are of another type than its weights.
    """
    for name in ("loss", "optimizer"):
        section = "loss_fn" if name == "loss" else name
        target = options.pop(("config", f"{section}._target_"), None) or options.pop(("config", section), None)
        if target is not None:
            last = str(target.value).rpartition(".")[2]
            options["config", f"automodel.{name}"] = OptionValue(target.name, last, target.where)
    optimizer = options.get(("config", "automodel.optimizer"))
    fused = options.pop(("config", "optimizer.fused"), None)
    if optimizer is None or optimizer.value != "FusedAdam":
        if fused is not None and flag(fused):
            options["config", "automodel.fused"] = fused
        return
    weights = options.get(("config", "automodel.weights"))
    if weights is None or str(weights.value) not in {"float32", "fp32"}:
        raise ScenarioError(
            f"{optimizer.where}: {optimizer.name} FusedAdam keeps states in fp32 beside weights in 16 bits, which is "
            "not played; say model.torch_dtype float32, or torch.optim.AdamW"
        )
    for key in [key for key in options if key[1].startswith(("optimizer.master_", "optimizer.exp_avg", "optimizer.s"))]:
        if options[key].value not in (False, "false", "float32", "torch.float32"):
            raise ScenarioError(f"{options[key].where}: {options[key].as_written} is not read of FusedAdam")
        del options[key]
    options["config", "automodel.fused"] = OptionValue(optimizer.name, True, optimizer.where)


def _world(read: Sequence[Document], options: dict[Key, OptionValue]) -> None:
    """How many ranks there are, where the file says a data-parallel size beside the others."""
    sizes = [options.get(("config", f"distributed.{name}")) for name in DEGREES]
    size = sizes[0]
    if size is None or not _whole(size):
        return
    whole = [1 if option is None else _whole(option) or 1 for option in sizes]
    read[0].machine.setdefault("cluster.world", OptionValue(size.name, str(math.prod(whole)), size.where))


def _whole(option: OptionValue) -> int:
    """A whole number that an option is; 0 for another value."""
    text = str(option.value)
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS else 0


DIGITS = 12
"""Of the largest number of ranks, or of tokens, that anybody writes."""


def _lengths(options: dict[Key, OptionValue]) -> list[str]:
    """How long a sample is; returns a note where samples are packed."""
    given = [option for name in LENGTHS if (option := options.pop(("config", name), None)) is not None]
    length = next((option for option in given if _whole(option)), None)
    if length is None:
        return []
    options["config", "automodel.length"] = length
    if not length.name.startswith("packed"):
        return []
    return [f"{length.where}: {length.name}: attention sees one document in each pack; [model.packing] says others"]


def _targets(options: dict[Key, OptionValue], asked: OptionValue) -> list[str]:
    """The modules that adapters stand beside, by name, whose options are taken out.

    Raises :class:`ScenarioError` for patterns of modules other than ``*_proj``.
    """
    every = options.pop(("config", "peft.match_all_linear"), None)
    named = options.pop(("config", "peft.target_modules"), None)
    words = [USUAL_TARGETS] if named is None else named.value if isinstance(named.value, list) else [named.value]
    patterns = [word for word in words if "*" in str(word) and word != USUAL_TARGETS]
    if patterns:
        raise ScenarioError(
            f"{asked.where}: target_modules {shown(patterns[0])} is a pattern; list the modules it names"
        )
    targets = [ALL_LINEAR if word == USUAL_TARGETS else str(word) for word in words]
    return [ALL_LINEAR, "lm_head"] if every is not None and flag(every) else targets


def _adapters(options: dict[Key, OptionValue]) -> list[str]:
    """LoRA in PEFT's words (``PeftConfig`` and ``ModuleMatcher``); returns a note.

    Raises :class:`ScenarioError` for adapters beside split experts, and as :func:`_targets` does.
    """
    asked = next((option for (_, name), option in options.items() if name.startswith("peft.")), None)
    quantized = options.pop(("config", "quantization.load_in_4bit"), None)
    if asked is None:
        if quantized is not None and flag(quantized):
            raise ScenarioError(
                f"{quantized.where}: {quantized.name} without [peft]: weights in 4 bits are not trained"
            )
        return []
    experts = options.get(("config", "distributed.ep_size"))
    if experts is not None and str(experts.value) != "1":
        raise ScenarioError(f"{asked.where}: {asked.name}: adapters of experts that are spread are not played")
    targets = _targets(options, asked)
    rank = options.pop(("config", "peft.dim"), OptionValue("peft.dim", 8, asked.where))
    dropout = options.pop(("config", "peft.dropout"), None)
    weights = options.get(("config", "automodel.weights"), OptionValue("torch_dtype", "bfloat16", asked.where))
    base = "bfloat16" if weights.value == "auto" else weights.value
    options["config", "peft_type"] = OptionValue(asked.name, "lora", asked.where)
    options["config", "r"] = rank
    options["config", "target_modules"] = OptionValue("target_modules", targets, asked.where)
    options["config", "torch_dtype"] = OptionValue(weights.name, base, weights.where)
    position = options.get(("config", "peft.dropout_position"))
    notes = []
    if dropout is not None and position is not None and position.value == "pre":
        options["config", "lora_dropout"] = dropout
    elif dropout is not None and str(dropout.value) not in {"0", "0.0"}:
        notes.append(f"{dropout.where}: {dropout.as_written} is of what adapters put out, which is not played")
    if quantized is not None and flag(quantized):
        options["config", "load_in_4bit"] = quantized
    is_usual = ALL_LINEAR in targets and "lm_head" not in targets
    if is_usual:
        notes.append(f"{asked.where}: {USUAL_TARGETS} is taken as every linear of a block")
    return notes
