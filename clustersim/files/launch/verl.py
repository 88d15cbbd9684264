"""verl's supervised finetuning: two trainers' words as one, and adapters by PEFT's names.

Names and defaults: ``verl/trainer/config`` of verl 0.2 to 0.9.1, ``fsdp_sft_trainer.py`` (to 0.6.1) and, of engines,
``sft_trainer.py`` (since 0.6).
"""

from __future__ import annotations

from collections.abc import Sequence

from clustersim.core.errors import ScenarioError
from clustersim.files.launch.adapters import flag, number
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.table import FrameworkTable

TRAINERS = ("fsdp_sft_trainer", "sft_trainer", "sft_trainer_ray")
"""Programs that are read, by the last part of their name."""
OF_ENGINES = ("engine.", "data.max_token_len_per_gpu", "data.use_dynamic_bsz", "model.path")
"""Names of the trainer of engines alone."""
SHIPPED = ("sft_trainer", "sft_trainer_engine")
"""verl's own configurations, whose values are the defaults here."""
TOKENS = 8192
LENGTH = 1024
"""Tokens of a pass and of a sample, where nobody says them."""


TRANSLATED = (
    "data.max_token_len_per_gpu",
    "data.micro_batch_size",
    "data.use_dynamic_bsz",
    "engine.offload_policy",
    "model.fsdp_config.cpu_offload",
    "model.fsdp_config.offload_params",
    "model.lora_adapter_path",
    "model.lora_rank",
    "model.strategy",
    "model.target_modules",
)
"""Options that are read here, in place of those of the table; and those of Megatron's adapters, which are left out."""
OF_MEGATRON = "model.lora."


def is_launch(document: Document) -> bool:
    """Whether a command runs a trainer of verl's that finetunes."""
    name = document.program.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    of_verl = document.program.startswith("verl") or "/verl/" in document.program
    return name in TRAINERS and (of_verl or any(at == "config" for at, _ in document.overrides))


def arranged(read: Sequence[Document], options: dict[Key, OptionValue], table: FrameworkTable) -> list[str]:
    """Bring both trainers' options to the table's names. Changes ``options``; returns notes.

    Raises :class:`ScenarioError` for offloading that is not played, and for options of no value that fits.
    """
    if table.name != "verl":
        return []
    program = next((file for file in read if file.program), read[0])
    name = program.program.removesuffix(".py")
    of_engines = name.endswith(("sft_trainer", "sft_trainer_ray")) and not name.endswith("fsdp_sft_trainer")
    if not program.program:
        of_engines = any(key[1].startswith(OF_ENGINES) for key in options)
    config = options.get(("args", "config_name"))
    if config is not None and config.value in SHIPPED and ("args", "config_path") not in options:
        del options["args", "config_name"]
    _old_passes(options)
    notes = _strategy(options, program.name, of_engines=of_engines)
    _offload(options)
    if of_engines:
        notes += _passes(options, program.name)
    if name.endswith("_ray"):  # which starts its workers itself
        for option, field in (("trainer.nnodes", "verl.nodes"), ("trainer.n_gpus_per_node", "verl.gpus")):
            usual = OptionValue(option, 1, program.name)
            options["config", field] = options.pop(("config", option), usual)
    return notes + _adapters(options) + _split(options)


def _strategy(options: dict[Key, OptionValue], file_name: str, *, of_engines: bool) -> list[str]:
    """FSDP's version, whose default releases have otherwise, as they have checkpointing; returns notes."""
    strategy_option = options.pop(("config", "engine.strategy" if of_engines else "model.strategy"), None)
    if strategy_option is None:
        strategy_option = OptionValue("strategy", "fsdp" if of_engines else "fsdp2", file_name)
    options["config", "verl.strategy"] = strategy_option
    if of_engines:
        return []
    notes = []
    if strategy_option.name == "strategy":
        notes.append(f"{file_name}: no model.strategy: fsdp2, as verl 0.4 to 0.6 have it; 0.2 and 0.3 had fsdp")
    if ("config", "model.enable_gradient_checkpointing") not in options:
        notes.append(
            f"{file_name}: no model.enable_gradient_checkpointing: blocks are computed again, as verl 0.4 to 0.6 have "
            "it; 0.2 and 0.3 kept them"
        )
    return notes


def _old_passes(options: dict[Key, OptionValue]) -> None:
    """Raise :class:`ScenarioError` for samples of a pass in words that releases read otherwise. Changes ``options``."""
    samples_option = options.pop(("config", "data.micro_batch_size"), None)
    if (
        samples_option is not None
        and samples_option.value is not None
        and ("config", "data.micro_batch_size_per_gpu") not in options
    ):
        raise ScenarioError(
            f"{samples_option.where}: {samples_option.name} {samples_option.value} is of all ranks together in verl "
            "0.1, and without effect since; say data.micro_batch_size_per_gpu"
        )


def _offload(options: dict[Key, OptionValue]) -> None:
    """Parameters on the host. Raises :class:`ScenarioError` for FSDP1's ``CPUOffload`` of nothing."""
    offloading, params = (
        options.pop(("config", f"model.fsdp_config.{name}"), None) for name in ("cpu_offload", "offload_params")
    )
    policy = options.pop(("config", "engine.offload_policy"), None)
    version = options["config", "verl.strategy"].value
    if offloading is not None and flag(offloading):
        if version == "fsdp" and (params is None or not flag(params)):
            return  # CPUOffload(offload_params=False) moves nothing
        options["config", "verl.offload"] = offloading
    if policy is not None and flag(policy):
        if version != "fsdp2":
            raise ScenarioError(f"{policy.where}: {policy.name} is FSDP2's; say engine.strategy=fsdp2, or leave it out")
        options["config", "verl.offload"] = policy


def _passes(options: dict[Key, OptionValue], file_name: str) -> list[str]:
    """Samples of a pass, where passes are filled up to so many tokens; returns a note."""
    dynamic = options.pop(("config", "data.use_dynamic_bsz"), None)
    tokens = options.pop(("config", "data.max_token_len_per_gpu"), None)
    if dynamic is not None and not flag(dynamic):
        return []
    length = options.get(("config", "data.max_length"))
    samples = options.get(("config", "ulysses_sequence_parallel_size"))
    ranks = 1 if samples is None else int(number(samples, whole=True))
    seq_len = LENGTH if length is None else int(number(length, whole=True))
    limit = TOKENS if tokens is None else int(number(tokens, whole=True))
    name = "data.max_token_len_per_gpu" if tokens is None else tokens.name
    samples_held = max(1, limit * ranks // max(1, seq_len))
    options["config", "data.micro_batch_size_per_gpu"] = OptionValue(
        name, samples_held, file_name if tokens is None else tokens.where
    )
    options["config", "verl.capped"] = OptionValue(name, True, file_name)
    return [f"{file_name}: {name} {limit:,}: {samples_held:,} sample(s) a pass, each as long as data.max_length"]


def _adapters(options: dict[Key, OptionValue]) -> list[str]:
    """LoRA in PEFT's words, and FSDP2 for FSDP1's units, which keep trained parameters apart from frozen ones; a note.

    Raises :class:`ScenarioError` for adapters that a file elsewhere describes.
    """
    path = options.pop(("config", "model.lora_adapter_path"), None)
    if path is not None and path.value not in (None, "", "null"):
        raise ScenarioError(f"{path.where}: {path.name} describes adapters; say model.lora_rank and target_modules too")
    rank = options.pop(("config", "model.lora_rank"), None)
    targets = options.pop(("config", "model.target_modules"), None)
    for key in [key for key in options if key[1].startswith(OF_MEGATRON)]:
        del options[key]
    if rank is None or str(rank.value) == "0":
        return []
    options["config", "peft_type"] = OptionValue(rank.name, "lora", rank.where)
    options["config", "r"] = rank
    options["config", "target_modules"] = targets or OptionValue("target_modules", "all-linear", rank.where)
    return _second_version(options, "adapters in FSDP1's flat parameters")


def _split(options: dict[Key, OptionValue]) -> list[str]:
    """FSDP2 beside Ulysses, whose gathers and reductions have FSDP1's bytes; returns a note."""
    ulysses = options.get(("config", "ulysses_sequence_parallel_size"))
    if ulysses is None or str(ulysses.value) == "1":
        return []
    return _second_version(options, "FSDP1 beside Ulysses")


def _second_version(options: dict[Key, OptionValue], beside_what: str) -> list[str]:
    key: Key = ("config", "verl.strategy")
    strategy_option = options[key]
    if strategy_option.value != "fsdp":
        return []
    as_played = f"{strategy_option.name} fsdp, played as"  # which an error then quotes
    options[key] = OptionValue(as_played, "fsdp2", strategy_option.where)
    return [f"{strategy_option.where}: {beside_what}: played as FSDP2's"]
