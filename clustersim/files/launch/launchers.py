"""What starts the ranks of a command (torchrun, deepspeed, accelerate, srun, mpirun, sbatch), and what it says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from clustersim.files.launch.shell_directives import LAUNCHERS, directed_options

TORCH = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}
DEEPSPEED = {"deepspeed", "deepspeed.launcher.runner"}
ACCELERATE = {"accelerate", "accelerate.commands.launch"}
MPI = {"mpirun", "mpiexec", "aprun"}
_TRL = re.compile(r"(?:.*/)?trl/scripts/(\w+)\.py|trl\.scripts\.(\w+)")
COMMANDS = {"tune", "axolotl", "llamafactory-cli", "trl", "swift", "litgpt"}
"""Commands that name what they train by a word, not by a script."""
MASON = "mason.py"
"""Of open-instruct, which submits the command behind ``--``."""
_COUNTS = ("num_processes", "num_machines", "mixed_precision")
_NAMING = {"--launcher", "--framework", "--backend", "--strategy", "--distributed", "--plugin", "--engine"}
"""Options that may have a launcher's name for their value."""
_UNKNOWN = re.compile(r"\$\{[^}]*\}")
_ADDRESS = ("master_addr", "master_port", "node_rank", "rdzv_id", "rdzv_endpoint", "rdzv_backend", "machine_rank")
_VALUED = (*_ADDRESS, *(name.replace("_", "-") for name in _ADDRESS), "main_process_ip", "main_process_port")
"""Options that always have a value, and say nothing of how many ranks there are."""
_SHORT = {"n": "np", "c": "np", "N": "npernode", "H": "host", "np": "np", "ppn": "npernode", "npernode": "npernode"}


@dataclass
class Launch:
    """A command taken apart.

    alone : the launcher, where it starts ranks on the node that it runs on alone, unless somebody says more.
    program : the training script, or module. arguments : its words. tools : what starts it, the outermost first, each
    with its options, by names with ``_``. machine : fields of ``[cluster]``, by their last part, and the option that
    says each. options : of ``accelerate launch``, as its file would have them. notes : sentences.
    """

    program: str = ""
    arguments: list[str] = field(default_factory=list)
    tools: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    machine: dict[str, tuple[str, str]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    alone: str = ""


def taken(words: Sequence[str], directives: Sequence[str], variables: dict[str, Any]) -> Launch:
    """A command's words, what stands in ``#SBATCH`` lines, and variables that it is run with."""
    launch = Launch()
    at = _launcher_words(list(words), launch)
    launch.arguments = list(words[at:])
    _litgpt_model(launch)
    if directives:
        launch.tools.insert(0, ("sbatch", directed_options(list(directives))))
    _submitted(launch)
    for tool, options in launch.tools:
        if tool == "torchrun":  # torch/distributed/argparse_util.py: PET_* say what no option does
            for name in ("nnodes", "nproc_per_node"):
                said_by = variables.get(f"PET_{name.upper()}")
                if isinstance(said_by, str) and said_by:
                    options.setdefault(name, said_by)
    for tool, options in launch.tools:
        says = {"sbatch": _slurm, "srun": _slurm, "mpirun": _mpi, "torchrun": _torch, "deepspeed": _deepspeed}
        says |= {MASON: _mason}
        sizes = dict(says.get(tool, _accelerate)(options))
        for name, size in sizes.items():
            before = launch.machine.get(name)
            if before is not None and before[1].isdecimal() and size[1].isdecimal() and before[1] != size[1]:
                launch.notes.append(f"{size[0]} {size[1]} counts, not {before[0]} {before[1]} around it")
            if before is None or size[1].isdecimal():
                launch.machine[name] = size
    if launch.program.startswith(("llamafactory-cli", "swift ")):  # whose cli.py and cli/main.py start torchrun
        for name, variable in (("nodes", "NNODES"), ("gpus_per_node", "NPROC_PER_NODE")):
            said_by = variables.get(variable)
            if isinstance(said_by, str) and said_by.isdecimal():
                launch.machine.setdefault(name, (variable, said_by))
    _whole(launch, variables)
    _ranks_of_bare_script(launch, variables)
    if launch.program.startswith("llamafactory-cli train") and "NNODES" not in variables:
        launch.alone = "llamafactory-cli"
    if launch.program.startswith("swift ") and "NNODES" not in variables and "gpus_per_node" in launch.machine:
        launch.machine.setdefault("nodes", ("NNODES, which ms-swift has as", "1"))
    return launch


def _litgpt_model(launch: Launch) -> None:
    """The model that ``litgpt`` is given by its place, under the option it stands for."""
    if launch.program.startswith("litgpt ") and launch.arguments[:1] and not launch.arguments[0].startswith("-"):
        name = "--model_name" if launch.program == "litgpt pretrain" else "--checkpoint_dir"
        launch.arguments.insert(0, name)


def _ranks_of_bare_script(launch: Launch, variables: dict[str, Any]) -> None:
    """``WORLD_SIZE`` counts where no launcher sets it: torch reads it itself."""
    ranks = variables.get("WORLD_SIZE")
    is_bare = not launch.tools and launch.program.endswith(".py")
    is_counted = {"world", "gpus_per_node"} & launch.machine.keys()
    if is_bare and not is_counted and isinstance(ranks, str) and ranks.isdecimal():
        launch.machine["world"] = ("WORLD_SIZE", ranks)


def _launcher_words(words: list[str], launch: Launch) -> int:
    """Where the training script's arguments begin; its tools and name are kept."""
    tool = ""
    options: list[str] = []
    i = 0

    def close() -> None:
        if tool:
            launch.tools.append((tool, _options(tool, options)))

    while i < len(words):
        word = words[i]
        name = word.rsplit("/", 1)[-1]
        module = word in {"-m", "--module"} and i + 1 < len(words)
        if module and words[i + 1] in LAUNCHERS:
            i += 1
            continue
        if name in LAUNCHERS and not _is_value(words, i):
            close()
            tool = _tool(name)
            options = []
            i += 1
            if tool == "accelerate" and words[i : i + 1] == ["launch"]:
                i += 1
            if name in COMMANDS:
                launch.program = f"{name} {words[i] if i < len(words) else ''}".strip()
                return _of_command(name, words, i, launch)
            continue
        if module:
            close()
            launch.program = _script(words[i + 1])
            return i + 2
        if name == MASON and "--" in words[i:]:
            close()
            tool, options = name, []
            i += 1
            continue
        if word == "--" and tool == MASON:
            close()
            tool, options = "", []
            i += 1
            continue
        if word.endswith(".py"):
            close()
            launch.program = _script(word)
            return i + 1
        options.append(word)
        i += 1
    close()
    if launch.tools and not launch.program:
        return len(words) if launch.tools[-1][0] in {"sbatch", "srun", "mpirun"} and not options else _bare(words)
    return 0


def _script(word: str) -> str:
    """The name of a script or module; of what ``trl sft`` and its kin run, that command's."""
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


def _is_value(words: list[str], i: int) -> bool:
    """Whether a word is the value of an option: ``--launcher deepspeed``."""
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


def _options(tool: str, words: list[str]) -> dict[str, Any]:
    """Options of a launcher by long names with ``_``, without their values True; ``...`` where a variable may hold
    more."""
    if tool in {"srun", "sbatch"}:
        return {**directed_options(words), **_open(words)}
    found: dict[str, Any] = _open(words)
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


def _open(words: list[str]) -> dict[str, Any]:
    """Whether a word that nothing sets may be more options: one that is not the value of an option which has one."""
    befores = ["", *words]
    alone = (word for before, word in zip(befores, words, strict=False) if before.lstrip("-") not in _VALUED)
    return {"...": True} if any(_UNKNOWN.fullmatch(word) for word in alone) else {}


Said = Iterator[tuple[str, tuple[str, str]]]


def _named(options: dict[str, Any], names: dict[str, str], dashes: str = "--") -> Said:
    for option, name in names.items():
        if option in options:
            yield name, (f"{dashes}{option.replace('_', '-')}", str(options[option]))


def _slurm(options: dict[str, Any]) -> Said:
    names = {"nodes": "nodes", "gpus_per_node": "slots", "ntasks_per_node": "tasks", "ntasks": "all", "gpus": "gpus"}
    yield from _named(options, names)


def _mpi(options: dict[str, Any]) -> Said:
    yield from _named(options, {"np": "all", "npernode": "tasks"}, "-")
    by = re.search(r"ppr:(\d+):node", str(options.get("map_by", "")))
    if by:
        yield "tasks", ("--map-by", by[1])
    hosts = str(options.get("host", "")).split(",")
    if hosts != [""] and not _UNKNOWN.search(",".join(hosts)):
        yield "nodes", ("-host", str(len(hosts)))
        slots = {host.partition(":")[2] for host in hosts}
        if len(slots) == 1 and next(iter(slots)).isdecimal():
            yield "slots", ("-host", next(iter(slots)))


def _torch(options: dict[str, Any]) -> Said:
    least, _, most = str(options.get("nnodes", "")).partition(":")
    if least and least == most:  # elastic in name only
        options["nnodes"] = least
    yield from _named(options, {"nnodes": "nodes", "nproc_per_node": "gpus_per_node"})
    if "nproc_per_node" in options and "nnodes" not in options and "..." not in options:
        yield "nodes", ("nnodes, which torchrun has as", "1")


def _deepspeed(options: dict[str, Any]) -> Said:
    yield from _named(options, {"num_nodes": "nodes", "num_gpus": "gpus_per_node"})
    hosts = [host for host in str(options.get("include", "")).split("@") if host]
    if hosts and not _UNKNOWN.search(str(options["include"])):
        yield "nodes", ("--include", str(len(hosts)))
        counts = {len(host.partition(":")[2].split(",")) for host in hosts if ":" in host}
        if len(counts) == 1:
            yield "gpus_per_node", ("--include", str(counts.pop()))


def _mason(options: dict[str, Any]) -> Said:
    yield "nodes", ("--num_nodes", str(options.get("num_nodes", 1)))
    yield from _named(options, {"gpus": "slots"})


def _submitted(launch: Launch) -> None:
    """What open-instruct's mason.py (its ``make_internal_command``) makes of accelerate's ranks: those of each node."""
    nodes = next((str(options.get("num_nodes", 1)) for tool, options in launch.tools if tool == MASON), "")
    for tool, options in launch.tools:
        ranks = str(options.get("num_processes", ""))
        if tool == "accelerate" and nodes.isdecimal() and int(nodes) > 1 and ranks.isdecimal():
            options |= {"num_processes": str(int(ranks) * int(nodes)), "num_machines": nodes}


def _accelerate(options: dict[str, Any]) -> Said:
    yield from _named(options, {"num_machines": "nodes", "num_processes": "world"})


def _whole(launch: Launch, variables: dict[str, Any]) -> None:
    """Nodes, ranks of each, or ranks in all, from what schedulers and launchers say together."""
    machine = launch.machine
    started = any(tool in {"torchrun", "deepspeed", "accelerate"} for tool, _ in launch.tools)
    tasks = machine.pop("tasks", None)
    every = machine.pop("all", None)
    slots = machine.pop("slots", None)
    gpus = machine.pop("gpus", None)
    if not started:  # each task is a rank
        if tasks is not None:
            machine.setdefault("gpus_per_node", tasks)
        if every is not None:
            machine.setdefault("world", every)
    if slots is not None and not machine.get("gpus_per_node", ("", "0"))[1].isdecimal():
        machine["gpus_per_node"] = slots  # of a variable that only the scheduler sets
    if "gpus_per_node" not in machine and "world" not in machine:
        if slots is not None:
            machine["gpus_per_node"] = slots
        elif gpus is not None and gpus[1].isdecimal():
            machine["world"] = gpus
        else:
            visible = variables.get("CUDA_VISIBLE_DEVICES")
            if isinstance(visible, str) and re.fullmatch(r"\d+(,\d+)*", visible):
                machine["gpus_per_node"] = ("CUDA_VISIBLE_DEVICES", str(visible.count(",") + 1))
    for tool, options in launch.tools:
        if tool == "torchrun" and "nproc_per_node" not in options and "..." not in options and options:
            launch.notes.append(
                "torchrun has no --nproc_per_node, of which it would start one rank on each node; "
                "all GPUs of each node are taken"
                + (f", as {machine['gpus_per_node'][0]} says" if "gpus_per_node" in machine else "")
            )
        if tool == "accelerate":
            launch.options |= _accelerate_options(options)


_ACCELERATE = {
    "deepspeed_config_file": "deepspeed_config.deepspeed_config_file",
    "mixed_precision": "mixed_precision",
    "dynamo_backend": "dynamo_config.dynamo_backend",
    "config_file": "config_file",
}
_OF_DEEPSPEED = (
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "gradient_clipping",
    "zero3_init_flag",
    "zero3_save_16bit_model",
)


def _accelerate_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of ``accelerate launch`` by the names that its file has for them."""
    found: dict[str, Any] = {}
    for name, said in options.items():
        if name in {"use_deepspeed", "use_fsdp", "multi_gpu", "use_megatron_lm"}:
            kinds = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM"}
            found["distributed_type"] = kinds.get(name, "MULTI_GPU")
        elif name in _OF_DEEPSPEED:
            found[f"deepspeed_config.{name}"] = said
        elif name.startswith("fsdp_"):
            found[f"fsdp_config.{name}"] = said
        elif name.startswith("parallelism_config_"):
            found[f"parallelism_config.{name}"] = said
        elif name in {"cpu", "use_cpu"}:
            found["use_cpu"] = said
        elif name == "gradient_accumulation_steps":
            found["deepspeed_config.gradient_accumulation_steps"] = said
        elif name in _ACCELERATE:
            found[_ACCELERATE[name]] = said
    return found
