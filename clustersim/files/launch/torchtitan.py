"""torchtitan's files: options that count only beside others, and what those of 2024 (before ``[parallelism]``) say
otherwise than by another name."""

from __future__ import annotations

import math

from clustersim.core import texts
from clustersim.core.errors import ScenarioError
from clustersim.core.texts import shown
from clustersim.files.launch.files import Key, OptionValue
from clustersim.files.launch.options import ScenarioFields
from clustersim.files.launch.table import FrameworkTable
from clustersim.files.launch.titan_pipelines import COUNTS, PARALLEL, batches_of_2024, count_in
from clustersim.files.launch.titan_python import COMPILED
from clustersim.scenario import Scenario
from clustersim.scenario.run.parts import transformer_of


def arranged(options: dict[Key, OptionValue], table: FrameworkTable) -> list[str]:
    """Bring options to the names and meanings of the table's release; returns notes. Changes ``options``.

    A pipeline's schedule had any case, and its batch was cut into so many micro-batches, as many as stages where
    nobody said (torchtitan/distributed/pipeline.py ``build_pipeline_schedule`` of 2024).

    Raises :class:`ScenarioError` for a batch that does not divide.
    """
    if table.name != "torchtitan":
        return []
    _leave_out_plain(options)
    notes = _samples_of_tokens(options)
    _compiled(options)
    _async_tensor_parallel(options)
    _chunked_loss(options)
    notes += _float8(options)
    _early_stop(options)
    notes += _checkpointing(options)
    notes += _replicated(options)
    notes += _loops_of_2024(options)
    return notes + batches_of_2024(options, table)


PLAIN = {
    "comm.mode": ("default",),
    "experimental.custom_args_module": ("",),
    "float8.precompute_float8_dynamic_scale_for_fsdp": (False,),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": (False,),
    "experimental.custom_import": ("",),
    "experimental.pipeline_parallel_split_mode": ("manual",),
    "job.custom_config_module": ("",),
    "loss.num_chunks": (8,),
    "model.attn_mask_type": ("causal",),
    "model.attn_type": ("sdpa",),
    "model.norm_type": ("rmsnorm",),
    "override.imports": ([],),
}
"""Values of options that are told as not played, where they ask for what is played."""
SIXTEEN = ("output", "lm_head", "router.gate", "moe.router.gate")
"""Linears outside the 8 bits that are played: the head and routers."""


def _leave_out_plain(options: dict[Key, OptionValue]) -> None:
    """Drop what asks for what is played anyway. Changes ``options``."""
    for name, values in PLAIN.items():
        option = options.get(("config", name))
        if option is not None and option.value in values:
            del options["config", name]
    for key in [key for key in options if key[1].endswith(".filter_fqns")]:
        names = options[key].value
        names = names.split(",") if isinstance(names, str) else names
        if isinstance(names, list) and set(names) <= set(SIXTEEN):
            del options[key]


def _compiled(options: dict[Key, OptionValue]) -> None:
    """Raise :class:`ScenarioError` for a compiler that is none of inductor: its kernels are not played."""
    backend = options.get(("config", "compile.backend"))
    compiled = _is_on(options, "compile.enable") or _is_on(options, "training.compile")
    if backend is not None and compiled and backend.value != "inductor":
        raise ScenarioError(
            f"{backend.where}: {backend.name} {shown(backend.value)} is not played; say inductor, or leave out "
            "compile.enable for kernels op by op"
        )


TOKENS = 16384
SEQUENCE = 2048
"""Tokens of a pass and of a sample, where a configuration of tokens does not say them (torchtitan/config/training.py
after 0.3)."""
_OF_TOKENS = {
    "training.max_context_length": "training.seq_len",
    "training.num_tokens_per_microbatch_per_dp_rank": "training.local_batch_size",
    "training.num_tokens_per_train_step": "training.global_batch_size",
    "parallelism.num_pp_microbatches": f"{PARALLEL}microbatch_size",
}
"""Options of configurations that count tokens, and those that count samples in their place."""


def _samples_of_tokens(options: dict[Key, OptionValue]) -> list[str]:
    """Samples, where a configuration counts tokens, as those after 0.3 do; returns a note. Changes ``options``.

    Raises :class:`ScenarioError` for tokens that are no whole samples.
    """
    taken = {name: options.pop(("config", name)) for name in _OF_TOKENS if ("config", name) in options}
    there = options.pop(("config", COMPILED), None)
    if not taken:
        return []
    if there is not None:
        options["config", "compile.enable"] = OptionValue("compile", True, there.where)
    length, tokens, step, passes = (taken.get(name) for name in _OF_TOKENS)
    by = next(iter(taken.values()))
    seq_len = SEQUENCE if length is None else count_in(length)
    samples = _samples(tokens, TOKENS, seq_len, by)
    degree = options.get(("config", f"{PARALLEL}degree"))
    count = 1
    if degree is not None and count_in(degree) > 1:
        count = 1 if passes is None else count_in(passes)
        options["config", f"{PARALLEL}microbatch_size"] = OptionValue("samples of a micro-batch", samples, by.where)
    options["config", "training.seq_len"] = length or OptionValue("training.max_context_length", seq_len, by.where)
    named = tokens or OptionValue("training.num_tokens_per_microbatch_per_dp_rank", TOKENS, by.where)
    options["config", "training.local_batch_size"] = OptionValue(named.name, samples * count, named.where)
    if step is not None and str(step.value) != "-1":
        whole = _samples(step, TOKENS, seq_len, by)
        options["config", "training.global_batch_size"] = OptionValue(step.name, whole, step.where)
    options.setdefault(
        ("config", "parallelism.context_parallel_load_balancer"), OptionValue("load balancer", "", by.where)
    )
    return [
        f"{by.where}: {by.name} counts tokens, as torchtitan does after 0.3: {samples:,} sample(s) of {seq_len:,} "
        "a pass"
    ]


def _samples(tokens: OptionValue | None, usual: int, seq_len: int, by: OptionValue) -> int:
    """Whole samples of so many tokens. Raises :class:`ScenarioError`."""
    count = usual if tokens is None else count_in(tokens)
    if count % seq_len:
        option = tokens or by
        raise ScenarioError(
            f"{option.where}: {option.name}: {count:,} tokens are not whole samples of {seq_len:,}, which are played; "
            "say a multiple"
        )
    return count // seq_len


def _replicated(options: dict[Key, OptionValue]) -> list[str]:
    """A note where nothing is sharded, which releases wrap otherwise (models/llama3/infra/parallelize.py of 0.2.2, and
    models/llama3/parallelize.py of 0.3.0)."""
    shard, replicate = (
        options.get(("config", f"parallelism.data_parallel_{kind}_degree")) for kind in ("shard", "replicate")
    )
    if shard is None or replicate is None or str(shard.value) != "1" or str(replicate.value) == "1":
        return []
    return [
        f"{shard.where}: {shard.name} 1: FSDP2 over replicas, as torchtitan 0.3 has it; 0.1 and 0.2 wrap it in DDP, "
        "whose gradients are reduced in buckets of 100 MB"
    ]


EXPERTS = "experts"
"""The module of every model of torchtitan whose grouped products a converter takes (``GroupedExperts``)."""


def converters(leaves: texts.Table) -> texts.Table:
    """Options of the converters that make products of 8 bits: of linears, and of experts' grouped products beside them
    (``quantize.linear.*`` and ``quantize.grouped_mm.*``, torchtitan/components/quantization of release 0.2).

    leaves : the scenario's, by dotted field.
    """
    if leaves.get("model.dtype") != "fp8":
        return {}
    family = _family(leaves)
    names = [f"quantize.linear.{family}"]
    if not leaves.get("shape.experts.count") or unconverted(leaves):
        return {"model.converters": names}
    grouped = f"quantize.grouped_mm.{family}"
    return {"model.converters": [*names, grouped], f"{grouped}.fqns": [EXPERTS]}


def unconverted(leaves: texts.Table) -> list[str]:
    """What is played in 8 bits and no converter of release 0.2 takes, with what it would be."""
    if leaves.get("model.dtype") != "fp8":
        return []
    degree = {name: int(leaves.get(f"parallel.{name}") or 1) for name in ("tp", "pp", "cp")}
    by = next((f"{name} = {degree[name]}" for name in ("pp", "cp") if degree[name] > 1), "")
    lines = []
    if leaves.get("shape.experts.count") and by and _family(leaves) == "float8":
        lines.append(
            f"experts in 8 bits beside {by}, which quantize.grouped_mm.float8 refuses: their grouped products would "
            "be in 16 bits"
        )
    if _family(leaves) == "mx" and degree["tp"] > 1 and leaves.get("model.implementation") == "fused":
        lines.append(f"float8_recipe = mxfp8 beside tp = {degree['tp']} in a compiled model, which it refuses")
    return lines


def _family(leaves: texts.Table) -> str:
    return "mx" if leaves.get("model.float8_recipe") == "mxfp8" else "float8"


def wide_experts(options: dict[Key, OptionValue], imported: Scenario) -> list[str]:
    """A note where linears alone are of 8 bits: experts' grouped products are played in 8 bits, too."""
    model = imported.file.model
    shape = transformer_of(imported)
    if model.dtype != "fp8" or shape is None or not shape.experts:
        return []
    grouped = f"quantize.grouped_mm.{_family({'model.float8_recipe': model.float8_recipe})}"
    key: Key = ("config", f"{grouped}.fqns")
    converted = options.get(("config", "model.converters"))
    asked = converted is not None and grouped in str(converted.value)
    if asked and (key not in options or EXPERTS in str(options[key].value)):
        return []
    why = f"{options[key].name} does not name {EXPERTS!r}" if asked else f"no converter is {grouped}"
    return [f"experts' grouped products are played in 8 bits, and the run has them in 16: {why}"]


def fill(fields: ScenarioFields, ranks: int) -> None:
    """Raise :class:`ScenarioError` where degrees that are all said are not as many ranks, as torchtitan does
    (torchtitan/distributed/parallel_dims.py ``ParallelDims._validate``)."""
    shard, replicate = (f"strategy.data_parallel_{kind}_degree" for kind in ("shard", "replicate"))
    by = fields.by.get(shard)
    if by is None or shard not in fields:
        return
    split = (f"parallel.{name}" for name in ("tp", "cp", "pp"))
    degrees = [count for name in (shard, replicate, *split) if isinstance(count := fields.get(name, 1), int)]
    needed = math.prod(degrees)
    if needed != ranks:
        raise ScenarioError(
            f"{by.where}: {by.name} {shown(by.value)} times the other degrees is {needed} ranks, and the job has "
            f"{ranks}; use -1, which is what is left, or say so many ranks (--nodes, --gpus-per-node)"
        )


def _is_on(options: dict[Key, OptionValue], name: str) -> bool:
    held = options.get(("config", name))
    return held is not None and held.is_on


def _async_tensor_parallel(options: dict[Key, OptionValue]) -> None:
    """Raise :class:`ScenarioError` where torchtitan does: products overlap with their exchanges in compiled models
    alone (torchtitan/distributed/tensor_parallel.py ``maybe_enable_async_tp``)."""
    name = "parallelism.enable_async_tensor_parallel"
    tp = options.get(("config", "parallelism.tensor_parallel_degree"))
    if not _is_on(options, name) or tp is None or str(tp.value) == "1":
        return
    components = options.get(("config", "compile.components"))
    compiled = _is_on(options, "compile.enable") or _is_on(options, "training.compile")
    if not compiled or (components is not None and "model" not in str(components.value)):
        asked = options["config", name]
        raise ScenarioError(
            f"{asked.where}: {asked.name} needs compile.enable with the component model, as torchtitan does; say it, "
            "or leave this out"
        )


def _chunked_loss(options: dict[Key, OptionValue]) -> None:
    """A loss in chunks, where nothing splits the model, is the scenario's."""
    key: Key = ("config", "loss.chunked")
    degrees = ("tensor_parallel_degree", f"{PARALLEL}degree", "context_parallel_degree", "expert_parallel_degree")
    stated = [options.get(("config", f"parallelism.{name.removeprefix('parallelism.')}")) for name in degrees]
    if key in options and all(degree is None or str(degree.value) == "1" for degree in stated):
        options["config", "loss.chunks"] = options.pop(key)


FIRST_FLOAT8: Key = ("config", "training.fp8_linear")
"""Of the first half of 2024: "dynamic", or nothing."""


TRANSLATED = (*_OF_TOKENS, *COUNTS, FIRST_FLOAT8[1])
"""Options that are read here, in place of those of the table's release."""


def _float8(options: dict[Key, OptionValue]) -> list[str]:
    """Weights are gathered in 8 bits where a converter makes linears of 8 bits, whatever else says so; returns a note.

    Raises :class:`ScenarioError` beside a recipe, which has a way of its own (torchtitan's Float8LinearConverter).
    """
    first = options.pop(FIRST_FLOAT8, None)
    if first is not None and first.value:
        options["config", "float8.enable_float8_linear"] = OptionValue(first.name, True, first.where)
    converters = options.get(("config", "model.converters"))
    converted = converters is not None and "float8" in str(converters.value)
    converted = converted or _is_on(options, "float8.enable_float8_linear")
    notes = []
    for section in ("float8", "quantize.linear.float8"):
        key = "config", f"{section}.enable_fsdp_float8_all_gather"
        if not _is_on(options, key[1]):
            continue
        gathered = options[key]
        recipe = options.get(("config", f"{section}.recipe_name"))
        if not converted:
            del options[key]
            notes.append(f"{gathered.where}: {gathered.name} is without effect: no converter makes linears of 8 bits")
        elif recipe is not None and recipe.value:
            raise ScenarioError(
                f"{gathered.where}: {gathered.name} beside {recipe.name} {recipe.value!r}, which torchtitan refuses; "
                "leave one of them out"
            )
    return notes


def _checkpointing(options: dict[Key, OptionValue]) -> list[str]:
    """A note where activations are selected by nobody's word (``selective_ac_option`` of torchtitan 0.2 is "2")."""
    mode = options.get(("config", "activation_checkpoint.mode"))
    key: Key = ("config", "activation_checkpoint.selective_ac_option")
    if key in options:
        if str(options[key].value) == "op":  # which is what is played
            del options[key]
        return []
    if mode is not None and str(mode.value) in {"none", "full", "memory_budget"}:
        return []
    return [
        'no file says activation_checkpoint.selective_ac_option: "op" is played; torchtitan 0.2 has "2" by default, of '
        "which every second block would be computed again as a whole"
    ]


def _early_stop(options: dict[Key, OptionValue]) -> None:
    """Say that recomputation goes on to a block's end, torchtitan 0.2's default (``ActivationCheckpoint.early_stop``);
    0.1 and 0.3 have no such option, and PyTorch's is to stop, as is played of FSDP. A compiled block has nothing that
    nobody reads, whatever is asked, and what is selected is computed again by operators. Changes ``options``."""
    key: Key = ("config", "activation_checkpoint.early_stop")
    mode = options.get(("config", "activation_checkpoint.mode"))
    if mode is None or str(mode.value) != "full" or _is_on(options, "compile.enable") or _is_on(options, key[1]):
        options.pop(key, None)
        return
    release = ("config", "compile.enable") in options and mode.where.partition(":")[0].endswith(".toml")
    if release and key not in options:
        options[key] = OptionValue("early_stop", False, mode.where)


_NAMES_OF_2024 = (
    "training.data_parallel_",
    "training.tensor_parallel_",
    "training.pipeline_parallel_",
    "experimental.pipeline_parallel_",
    "experimental.context_parallel_",
)


def _loops_of_2024(options: dict[Key, OptionValue]) -> list[str]:
    """An optimizer that nobody asks to be fused, which those releases did not do by themselves (config_manager.py at
    0011fb90); returns a note. Changes ``options``."""
    named = [option for option in options.values() if option.name.lstrip("-").startswith(_NAMES_OF_2024)]
    if not named or any(("config", f"optimizer.{name}") in options for name in ("fused", "implementation")):
        return []
    by = named[0]
    options["config", "optimizer.fused"] = OptionValue("optimizer.fused", False, by.where)
    return [f"{by.where}: {by.name} is a name of 2024, when no optimizer was fused unless optimizer.fused asked for it"]
