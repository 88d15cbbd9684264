"""Colossal-AI's own programs for language models: which of them a command runs, its words, and what its plug-in is.

Names and defaults: the programs and releases that ``data/exchange/colossal.toml`` names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clustersim.core.errors import ScenarioError
from clustersim.files.launch.adapters import flag, number
from clustersim.files.launch.colossal_words import stem
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.table import FrameworkTable


@dataclass(frozen=True)
class ColossalProgram:
    """A program that is read.

    Parameters
    ----------
    telling : an option that its like of another framework does not have. renamed : its options, and the table's name of
        each. usual : values where its command says none, by the table's names. passes : the option that says samples
        of a pipeline's pass.
    """

    telling: str
    renamed: dict[str, str]
    usual: dict[str, str | int | float]
    passes: str = ""


PROGRAMS = {
    "benchmark": ColossalProgram(
        "plugin",
        {"config": "colossal.size", "xformers": "use_flash_attn", "zero": "zero_stage"},
        {
            "colossal.size": "7b",
            "max_length": 4096,
            "batch_size": 2,
            "mixed_precision": "bf16",
            "accumulation_steps": 1,
        },
        "mbs",
    ),
    "train_sft": ColossalProgram(
        "pretrain",
        {"pretrain": "pretrained", "max_len": "max_length"},
        {
            "max_length": 512,
            "batch_size": 4,
            "mixed_precision": "bf16",
            "accumulation_steps": 8,
            "grad_clip": 1.0,
        },
    ),
    "train": ColossalProgram(
        "pretrained",
        {"use_grad_checkpoint": "grad_checkpoint"},
        {
            "max_length": 8192,
            "batch_size": 2,
            "mixed_precision": "fp16",
            "accumulation_steps": 1,
            "grad_clip": 1.0,
        },
        "microbatch_size",
    ),
}
"""By the program's name."""
PLUGINS = ("zero2", "zero2_cpu", "3d", "3d_cpu", "gemini", "gemini_auto", "fsdp", "fsdp_cpu", "ddp")
USUAL_PLUGIN = "gemini"


def is_launch(document: Document) -> bool:
    """Whether a command runs a program that is read, by its name and its words."""
    program = PROGRAMS.get(stem(document.program))
    names = {name for at, name in document.options if at == "args"}
    launcher = document.options.get(("args", "launcher"))
    own = launcher is not None and str(launcher.value).startswith("colossalai")
    plugin = document.options.get(("args", "plugin"))
    of_plugin = plugin is not None and str(plugin.value) in PLUGINS
    if program is None or not (own or of_plugin):
        return False
    return program.telling in names or (own and stem(document.program) == "benchmark")


def arranged(read: Sequence[Document], options: dict[Key, OptionValue], table: FrameworkTable) -> list[str]:
    """Bring a program's options to the table's names, and its plug-in to a stage of ZeRO. Changes ``options``; returns
    notes. Raises :class:`ScenarioError` for what no stage does."""
    if table.name != "colossal":
        return []
    file = next((document for document in read if document.program), read[0])
    program = PROGRAMS.get(stem(file.program), PROGRAMS["train"])
    for name, own in program.renamed.items():
        if ("args", name) in options:
            options["args", own] = options.pop(("args", name))
    for name, usual in program.usual.items():
        options.setdefault(("args", name), OptionValue(f"--{name}, by default,", usual, file.name))
    options.setdefault(("args", "plugin"), OptionValue("--plugin, by default,", USUAL_PLUGIN, file.name))
    notes = _attention(options, file.name)
    plugin = options["args", "plugin"]
    if str(plugin.value).startswith(("zero2", "3d")):
        del options["args", "plugin"]
        notes += _stage(options, plugin)
        _passes(options, program)
        if _count(options, "tp") > 1 and not program.telling.startswith("plugin"):
            notes.append(f"{file.name}: logits are split over tensor-parallel ranks, where {file.program} gathers them")
    return notes


def _attention(options: dict[Key, OptionValue], file_name: str) -> list[str]:
    """Flash attention where it is asked for; a note where it is not."""
    flash_option = options.pop(("args", "use_flash_attn"), None)
    if flash_option is None or not flag(flash_option):
        return [f"{file_name}: no option asks for flash attention: PyTorch's own choice"]
    options["args", "colossal.attention"] = OptionValue(flash_option.name, "fa2", flash_option.where)
    return []


def _stage(options: dict[Key, OptionValue], plugin: OptionValue) -> list[str]:
    """What a plug-in shards, and where the optimizer is; a note on stage 2. Raises :class:`ScenarioError`."""
    stage_option = options.pop(("args", "zero_stage"), None)
    offload = options.pop(("args", "zero_cpu_offload"), None)
    hybrid = str(plugin.value).startswith("3d")
    stage = 2
    if hybrid:
        stage = 0 if stage_option is None else int(number(stage_option, whole=True))
    else:
        for name in ("tp", "pp", "sp", "sp_mode", "enable_sequence_parallelism"):
            options.pop(("args", name), None)  # of the other plug-in alone
    by = plugin if stage_option is None or not hybrid else stage_option
    split = hybrid and any(_count(options, name) > 1 for name in ("tp", "pp"))
    if not stage and not split:
        raise ScenarioError(
            f"{by.where}: {by.name} {by.value} without a stage of ZeRO averages gradients of 16 bits in DDP's buckets "
            "beside masters in fp32, which is not played; say stage 1 or 2"
        )
    options["args", "colossal.stage"] = OptionValue(by.name, stage, by.where)
    options["args", "colossal.owners"] = OptionValue(by.name, stage == 2, by.where)
    on_host = str(plugin.value).endswith("_cpu") or (hybrid and offload is not None and flag(offload))
    options["args", "colossal.offload"] = OptionValue(plugin.name, on_host and stage > 0, plugin.where)
    _sequence(options)
    owners = f"{by.where}: stage 2: a bucket's reduce_scatter is played as a reduce of each part to its owner"
    return [owners] if stage == 2 else []


def _sequence(options: dict[Key, OptionValue]) -> None:
    """Norms of a part of the sequence each, as Megatron-LM has them. Raises :class:`ScenarioError` for other modes."""
    sequence_option = options.pop(("args", "enable_sequence_parallelism"), None)
    mode = options.pop(("args", "sp_mode"), None)
    if sequence_option is None or not flag(sequence_option):
        return
    if mode is not None and mode.value != "split_gather":
        raise ScenarioError(f"{mode.where}: {mode.name} {mode.value} is not played of Colossal-AI; split_gather is")
    options["args", "colossal.sequence"] = sequence_option


def _passes(options: dict[Key, OptionValue], program: ColossalProgram) -> None:
    """Samples of a pass: a pipeline cuts its batch. Raises :class:`ScenarioError` for accumulation that is not
    played."""
    pipelined = _count(options, "pp") > 1
    cut = options.pop(("args", program.passes), None) if program.passes else None
    batch = options["args", "batch_size"]
    steps = options["args", "accumulation_steps"]
    if pipelined and program.passes:
        samples = OptionValue(program.passes, 1, batch.where) if cut is None else cut
        options["args", "colossal.micro"] = samples
        del options["args", "accumulation_steps"]
        if int(number(steps, whole=True)) > 1:
            raise ScenarioError(f"{steps.where}: {steps.name} {steps.value} beside a pipeline is not read; say 1")
        return
    if pipelined:
        raise ScenarioError(f"{batch.where}: a pipeline of this program is not read; say --pp 1")
    if options["args", "colossal.stage"].value == 1 and int(number(steps, whole=True)) > 1:
        raise ScenarioError(
            f"{steps.where}: {steps.name} {steps.value} beside stage 1, which reduces gradients in each pass, is not "
            "played; say stage 2, which does so too"
        )
    options["args", "colossal.micro"] = batch
    del options["args", "batch_size"]


def _count(options: dict[Key, OptionValue], name: str) -> int:
    option = options.get(("args", name))
    return 1 if option is None else int(number(option, whole=True))
