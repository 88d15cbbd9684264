"""What starts the ranks of a command (torchrun, deepspeed, accelerate, srun, mpirun, sbatch), and what it says."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clustersim.files.launch.launcher_sizes import MASON, UNKNOWN, Launch, LauncherOptions, say_machine
from clustersim.files.launch.primus_commands import MAIN
from clustersim.files.launch.shell_directives import LAUNCHERS, ScriptVariables, directed_options

TORCH = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}
DEEPSPEED = {"deepspeed", "deepspeed.launcher.runner"}
ACCELERATE = {"accelerate", "accelerate.commands.launch"}
MPI = {"mpirun", "mpiexec", "aprun", "horovodrun"}
_TRL = re.compile(r"(?:.*/)?(?:trl/scripts|trl/examples/scripts)/(\w+)\.py|trl\.scripts\.(\w+)")
COMMANDS = {"tune", "axolotl", "llamafactory-cli", "trl", "swift", "megatron", "litgpt", "automodel"}
"""Commands that name what they train by a word, not by a script."""
MEGATRON = ("megatron sft", "megatron pt")
"""Megatron-SWIFT's commands, whose first word is also the name of much else."""
_COUNTS = ("num_processes", "num_machines", "mixed_precision")
_NAMING = {"--launcher", "--framework", "--backend", "--strategy", "--distributed", "--plugin", "--engine"}
"""Options that may have a launcher's name for their value."""
_ADDRESS = ("master_addr", "master_port", "node_rank", "rdzv_id", "rdzv_endpoint", "rdzv_backend", "machine_rank")
_VALUED = (*_ADDRESS, *(name.replace("_", "-") for name in _ADDRESS), "main_process_ip", "main_process_port")
"""Options that always have a value, and say nothing of how many ranks there are."""
_SHORT = {"n": "np", "c": "np", "N": "npernode", "H": "host", "np": "np", "ppn": "npernode", "npernode": "npernode"}


def taken(words: Sequence[str], directives: Sequence[str], variables: ScriptVariables) -> Launch:
    """A command's words, what stands in ``#SBATCH`` lines, and variables that it is run with."""
    launch = Launch()
    words = _with_module(words)
    at = _launcher_words(list(words), launch)
    launch.arguments = list(words[at:])
    _litgpt_model(launch)
    if directives:
        launch.tools.insert(0, ("sbatch", {**directed_options(list(directives))}))
    say_machine(launch, variables)
    return launch


def _litgpt_model(launch: Launch) -> None:
    """The model that ``litgpt`` is given by its place, under the option it stands for."""
    if launch.program.startswith("litgpt ") and launch.arguments[:1] and not launch.arguments[0].startswith("-"):
        name = "--model_name" if launch.program == "litgpt pretrain" else "--checkpoint_dir"
        launch.arguments.insert(0, name)


def _launcher_words(words: list[str], launch: Launch) -> int:
    """Where the training script's arguments begin; its tools and name are kept."""
    tool = ""
    options: list[str] = []
    i = 0

    def begin(name: str = "") -> None:
        """The options of the tool that was named before come to their end here; those of another begin."""
        nonlocal tool, options
        if tool:
            launch.tools.append((tool, _options(tool, options)))
        tool, options = name, []

    while i < len(words):
        word = words[i]
        name = word.rsplit("/", 1)[-1]
        is_module = word in {"-m", "--module"} and i + 1 < len(words)
        i += 1
        submits = name == MASON and "--" in words[i:]
        if is_module and words[i] in LAUNCHERS:
            continue
        if name in LAUNCHERS and not _is_value(words, i - 1):
            begin(_tool(name))
            if tool == "accelerate" and words[i : i + 1] == ["launch"]:
                i += 1
            if name in COMMANDS:
                launch.program = f"{name} {words[i] if i < len(words) else ''}".strip()
                return _of_command(name, words, i, launch)
        elif is_module or (word.endswith(".py") and not submits):
            begin()
            launch.program = _script(words[i] if is_module else word)
            return i + is_module
        elif submits:
            begin(name)
        elif word == "--" and tool == MASON:
            begin()
        else:
            options.append(word)
    beside = options
    begin()
    if launch.tools and not launch.program:
        return len(words) if launch.tools[-1][0] in {"sbatch", "srun", "mpirun"} and not beside else _bare(words)
    return 0


MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
FLAGS = ("--standalone", "--no-python", "--no_python", "--run-path", "--run_path")
"""Options of torchrun that have no value."""


def _with_module(words: Sequence[str]) -> Sequence[str]:
    """torchrun's ``-m`` beside its module, where other options stand between them, as it may: it has no value."""
    names = [word.rsplit("/", 1)[-1] for word in words]
    for i, word in enumerate(words[:-1]):
        is_flag = word in {"-m", "--module"} and words[i + 1].startswith("-") and TORCH & set(names[:i])
        for j in range(i + 1, len(words)) if is_flag else ():
            before = words[j - 1]
            has_value = before.startswith("-") and "=" not in before and before not in (*FLAGS, word)
            if MODULE.fullmatch(words[j]) and not has_value:
                return [*words[:i], *words[i + 1 : j], word, *words[j:]]
    return words


def _script(word: str) -> str:
    """The name of a script or module; of what ``trl sft`` and its kin run, that command's."""
    if word.endswith(MAIN):
        return MAIN
    trl = _TRL.fullmatch(word)
    return f"trl {trl[1] or trl[2]}" if trl else word.rsplit("/", 1)[-1]


def _bare(words: list[str]) -> int:
    """Of a command without a script, behind its launcher."""
    return max((i for i, word in enumerate(words) if word.rsplit("/", 1)[-1] in LAUNCHERS), default=-1) + 1


def _of_command(name: str, words: list[str], i: int, launch: Launch) -> int:
    """``tune run --nproc_per_node 8 RECIPE --config NAME``; ``axolotl train FILE``; ``llamafactory-cli train FILE``;
    ``trl sft``, whose options are accelerate's too."""
    if name == "trl":
        said = _options("accelerate", words[i:])
        launch.tools.append(("accelerate", {key: said[key] for key in _COUNTS if key in said}))
    if name == "litgpt":
        return _of_litgpt(words, i, launch)
    if name == "automodel":
        return _of_automodel(words, i, launch)
    if name != "tune":
        return i + 1
    options: list[str] = []
    i += 1
    while i < len(words) and words[i].startswith("--") and i + 1 < len(words):
        options += words[i : i + (1 if "=" in words[i] else 2)]
        i += 1 if "=" in words[i] else 2
    launch.tools.append(("torchrun", _options("torchrun", options)))
    launch.program = f"tune {words[i] if i < len(words) else ''}".strip()
    return i + 1


def _of_litgpt(words: list[str], i: int, launch: Launch) -> int:
    """``litgpt pretrain NAME``, ``litgpt finetune_full FOLDER``; ``litgpt finetune full`` of releases before 0.5."""
    if words[i : i + 1] == ["finetune"] and {*words[i + 1 : i + 2]} & {"full", "lora", "adapter", "adapter_v2"}:
        i += 1
    launch.program = f"litgpt {words[i]}" if i < len(words) else "litgpt"
    return i + 1


def _of_automodel(words: list[str], i: int, launch: Launch) -> int:
    """``automodel FILE --nproc-per-node 8``; ``automodel finetune llm -c FILE`` of releases before 0.3."""
    launch.program = "automodel"
    counts = {key: value for key, value in _options("torchrun", words[i:]).items() if key == "nproc_per_node"}
    launch.tools.append(("torchrun", counts))
    return i + 2 if words[i : i + 1] in (["finetune"], ["pretrain"]) else i


def _is_value(words: list[str], i: int) -> bool:
    """Whether a word is the value of an option, or another's name: ``--launcher deepspeed``, ``cd megatron``."""
    if words[i].endswith("megatron") and " ".join(["megatron", *words[i + 1 : i + 2]]) not in MEGATRON:
        return True
    return i > 0 and words[i - 1] in _NAMING


def _tool(name: str) -> str:
    if name in TORCH:
        return "torchrun"
    if name in DEEPSPEED:
        return "deepspeed"
    if name in ACCELERATE:
        return "accelerate"
    if name == "flux":  # of which run has srun's -N and -n
        return "srun"
    return "mpirun" if name in MPI else name


def _options(tool: str, words: list[str]) -> LauncherOptions:
    """Options of a launcher by long names with ``_``, without their values True; ``...`` where a variable may hold
    more."""
    if tool in {"srun", "sbatch"}:
        return {**directed_options(words), **_open(words)}
    found: LauncherOptions = _open(words)
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if not re.fullmatch(r"-{1,2}[A-Za-z].*", word, re.DOTALL):
            continue
        name, equals, said = word.lstrip("-").partition("=")
        if tool == "mpirun":
            name = _SHORT.get(name, name)
        name = name.replace("-", "_")
        if equals:
            found[name] = said
        elif i < len(words) and not words[i].startswith("-"):
            found[name] = words[i]
            i += 1
        else:
            found[name] = True
    return found


def _open(words: list[str]) -> LauncherOptions:
    """Whether a word that nothing sets may be more options: one that is not the value of an option which has one."""
    befores = ["", *words]
    alone = (word for before, word in zip(befores, words, strict=False) if before.lstrip("-") not in _VALUED)
    return {"...": True} if any(UNKNOWN.fullmatch(word) for word in alone) else {}
