"""What launchers, schedulers and variables say of how many nodes and ranks there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from clustersim.files.launch.shell_directives import ScriptVariables

MASON = "mason.py"
"""Of open-instruct, which submits the command behind ``--``."""
UNKNOWN = re.compile(r"\$\{[^}]*\}")
"""A variable that nothing sets."""
LauncherOptions: TypeAlias = dict[str, "str | bool"]
"""Options of a launcher by long names with ``_``; True where one has no value, and ``...`` where a variable may hold
more of them."""


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
    tools: list[tuple[str, LauncherOptions]] = field(default_factory=list)
    machine: dict[str, tuple[str, str]] = field(default_factory=dict)
    options: LauncherOptions = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    alone: str = ""


@dataclass(frozen=True)
class OwnStart:
    """A command that starts torchrun itself, with the ranks that ``NNODES`` and ``NPROC_PER_NODE`` say.

    program : what it begins with. alone : what those of its commands begin with that start ranks on the node that they
    run on, where ``NNODES`` is not said. one_node : who says that it is one node, where only ``NPROC_PER_NODE`` is.
    """

    program: str
    alone: str = ""
    one_node: str = ""


OWN_STARTS = (
    OwnStart("llamafactory-cli", alone="llamafactory-cli train"),
    OwnStart("swift ", one_node="NNODES, which ms-swift has as"),
    OwnStart("megatron ", one_node="NNODES, which ms-swift has as"),
)
"""LLaMA-Factory's ``cli.py`` and ms-swift's ``cli/main.py``."""


ON_MANY = frozenset({"hostfile", "num_nodes", "include", "..."})
ALONE = (
    ("deepspeed", ON_MANY, "deepspeed without --hostfile"),
    ("colossalai", ON_MANY | {"host", "H"}, "colossalai run without --hostfile"),
    ("composer", frozenset({"world_size", "..."}), "composer without --world_size"),
    ("torchrun", frozenset({"nnodes", "..."}), "torchrun without --nnodes"),
)
"""Launchers that start ranks of their own node alone where none of these options is given (deepspeed/launcher/runner.py
``fetch_hostfile``, composer/cli/launcher.py ``_parse_args``, torch/distributed/run.py), and what is said then."""


VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that list the GPUs which a process sees; PyTorch for AMD's GPUs reads each of them."""


def say_machine(launch: Launch, variables: ScriptVariables) -> None:
    """Put what launchers, schedulers and ``variables`` say of nodes and ranks into ``launch``, and notes."""
    _submitted(launch)
    _torch_variables(launch, variables)
    for tool, options in launch.tools:
        _counted(launch, _SAYS.get(tool, _accelerate)(options))
    own = next((start for start in OWN_STARTS if launch.program.startswith(start.program)), None)
    if own is not None:
        for name, variable in (("nodes", "NNODES"), ("gpus_per_node", "NPROC_PER_NODE")):
            said_by = variables.get(variable)
            if isinstance(said_by, str) and said_by.isdecimal():
                launch.machine.setdefault(name, (variable, said_by))
    _whole(launch, variables)
    _ranks_of_bare_script(launch, variables)
    if own is not None and "NNODES" not in variables:
        _on_one_node(launch, own)
    for launcher, names, alone in ALONE:
        if any(tool == launcher and not names & options.keys() for tool, options in launch.tools):
            launch.alone = alone


def _torch_variables(launch: Launch, variables: ScriptVariables) -> None:
    """Variables ``PET_*`` say what no option of torchrun does (torch/distributed/argparse_util.py)."""
    for tool, options in launch.tools:
        for name in ("nnodes", "nproc_per_node") if tool == "torchrun" else ():
            said_by = variables.get(f"PET_{name.upper()}")
            if isinstance(said_by, str) and said_by:
                options.setdefault(name, said_by)


def _counted(launch: Launch, sizes: Said) -> None:
    """What a launcher says of the machine counts, and not what one around it says; a note where they differ."""
    for name, size in dict(sizes).items():
        before = launch.machine.get(name)
        if before is not None and before[1].isdecimal() and size[1].isdecimal() and before[1] != size[1]:
            launch.notes.append(f"{size[0]} {size[1]} counts, not {before[0]} {before[1]} around it")
        if before is None or size[1].isdecimal():
            launch.machine[name] = size


def _on_one_node(launch: Launch, own: OwnStart) -> None:
    """One node, of a command that starts its ranks itself and is not told how many nodes there are."""
    if own.alone and launch.program.startswith(own.alone):
        launch.alone = own.program
    if own.one_node and "gpus_per_node" in launch.machine:
        launch.machine.setdefault("nodes", (own.one_node, "1"))


def _ranks_of_bare_script(launch: Launch, variables: ScriptVariables) -> None:
    """``WORLD_SIZE`` counts where no launcher sets it: torch reads it itself."""
    ranks = variables.get("WORLD_SIZE")
    is_bare = not launch.tools and launch.program.endswith(".py")
    is_counted = {"world", "gpus_per_node"} & launch.machine.keys()
    if is_bare and not is_counted and isinstance(ranks, str) and ranks.isdecimal():
        launch.machine["world"] = ("WORLD_SIZE", ranks)


Said = Iterator[tuple[str, tuple[str, str]]]


def _named(options: LauncherOptions, names: dict[str, str], dashes: str = "--") -> Said:
    for option, name in names.items():
        if option in options:
            yield name, (f"{dashes}{option.replace('_', '-')}", str(options[option]))


def _slurm(options: LauncherOptions) -> Said:
    names = {"nodes": "nodes", "gpus_per_node": "slots", "ntasks_per_node": "tasks", "ntasks": "all", "gpus": "gpus"}
    yield from _named(options, names)


def _mpi(options: LauncherOptions) -> Said:
    yield from _named(options, {"np": "all", "npernode": "tasks"}, "-")
    by = re.search(r"ppr:(\d+):node", str(options.get("map_by", "")))
    if by:
        yield "tasks", ("--map-by", by[1])
    hosts = str(options.get("host", "")).split(",")
    if hosts != [""] and not UNKNOWN.search(",".join(hosts)):
        yield "nodes", ("-host", str(len(hosts)))
        slots = {host.partition(":")[2] for host in hosts}
        if len(slots) == 1 and next(iter(slots)).isdecimal():
            yield "slots", ("-host", next(iter(slots)))


def _torch(options: LauncherOptions) -> Said:
    least, _, most = str(options.get("nnodes", "")).partition(":")
    if least and least == most:  # elastic in name only
        options["nnodes"] = least
    yield from _named(options, {"nnodes": "nodes", "nproc_per_node": "gpus_per_node"})
    if "nproc_per_node" in options and "nnodes" not in options and "..." not in options:
        yield "nodes", ("nnodes, which torchrun has as", "1")


def _deepspeed(options: LauncherOptions) -> Said:
    yield from _named(options, {"num_nodes": "nodes", "num_gpus": "gpus_per_node"})
    hosts = [host for host in str(options.get("include", "")).split("@") if host]
    if hosts and not UNKNOWN.search(str(options["include"])):
        yield "nodes", ("--include", str(len(hosts)))
        counts = {len(host.partition(":")[2].split(",")) for host in hosts if ":" in host}
        if len(counts) == 1:
            yield "gpus_per_node", ("--include", str(counts.pop()))


def _colossal(options: LauncherOptions) -> Said:
    yield from _named(options, {"num_nodes": "nodes", "nproc_per_node": "gpus_per_node"})
    hosts = [host for host in str(options.get("host", options.get("H", ""))).split(",") if host]
    if hosts and not UNKNOWN.search(" ".join(hosts)):
        yield "nodes", ("--host", str(len(hosts)))


def _composer(options: LauncherOptions) -> Said:
    yield from _named(options, {"n": "gpus_per_node"}, "-")
    yield from _named(options, {"nproc": "gpus_per_node", "world_size": "world"})


def _mason(options: LauncherOptions) -> Said:
    yield "nodes", ("--num_nodes", str(options.get("num_nodes", 1)))
    yield from _named(options, {"gpus": "slots"})


def _submitted(launch: Launch) -> None:
    """What open-instruct's mason.py (its ``make_internal_command``) makes of accelerate's ranks: those of each node."""
    nodes = next((str(options.get("num_nodes", 1)) for tool, options in launch.tools if tool == MASON), "")
    for tool, options in launch.tools:
        ranks = str(options.get("num_processes", ""))
        if tool == "accelerate" and nodes.isdecimal() and int(nodes) > 1 and ranks.isdecimal():
            options |= {"num_processes": str(int(ranks) * int(nodes)), "num_machines": nodes}


def _accelerate(options: LauncherOptions) -> Said:
    yield from _named(options, {"num_machines": "nodes", "num_processes": "world"})


_SAYS: dict[str, Callable[[LauncherOptions], Said]] = {
    "sbatch": _slurm,
    "srun": _slurm,
    "mpirun": _mpi,
    "torchrun": _torch,
    "deepspeed": _deepspeed,
    "colossalai": _colossal,
    "composer": _composer,
    MASON: _mason,
}
"""What each launcher's options say of the machine; of another's, as accelerate's do."""


def _visible(variables: ScriptVariables) -> tuple[str, str] | None:
    """The variable that lists the GPUs which a process sees, and how many those are; None where none does."""
    for name in VISIBLE:
        listed = str(variables.get(name))
        if re.fullmatch(r"\d+(,\d+)*", listed):
            return name, str(listed.count(",") + 1)
    return None


def _whole(launch: Launch, variables: ScriptVariables) -> None:
    """Nodes, ranks of each, or ranks in all, from what schedulers and launchers say together."""
    seen = _visible(variables)
    _scheduled(launch, seen)
    _only_running_tells(launch, seen)
    for tool, options in launch.tools:
        if tool == "torchrun" and "nproc_per_node" not in options and "..." not in options:
            said_by = launch.machine.get("gpus_per_node")
            launch.notes.append(
                "torchrun has no --nproc_per_node, of which it would start one rank on each node; "
                "all GPUs of each node are taken" + (f", as {said_by[0]} says" if said_by else "")
            )
        if tool == "accelerate":
            launch.options |= _accelerate_options(options)


def _scheduled(launch: Launch, seen: tuple[str, str] | None) -> None:
    """Ranks of the tasks, slots and GPUs that a scheduler gives; of the GPUs that are ``seen`` where nothing else says
    it."""
    machine = launch.machine
    tasks, every, slots, gpus = (machine.pop(name, None) for name in ("tasks", "all", "slots", "gpus"))
    if not any(tool in {"torchrun", "deepspeed", "accelerate", "colossalai"} for tool, _ in launch.tools):
        if tasks is not None:  # each task is a rank
            machine.setdefault("gpus_per_node", tasks)
        if every is not None:
            machine.setdefault("world", every)
    if slots is not None and not machine.get("gpus_per_node", ("", "0"))[1].isdecimal():
        machine["gpus_per_node"] = slots  # of a variable that only the scheduler sets
    if "gpus_per_node" in machine or "world" in machine:
        return
    if slots is not None:
        machine["gpus_per_node"] = slots
    elif gpus is not None and gpus[1].isdecimal():
        machine["world"] = gpus
    elif seen is not None:
        machine["gpus_per_node"] = seen


def _only_running_tells(launch: Launch, seen: tuple[str, str] | None) -> None:
    """A number of ranks that is no number: torchrun's gpu and auto, or a count of what is seen."""
    machine = launch.machine
    ranks = machine.get("gpus_per_node") or machine.get("world")
    if ranks is None or ranks[1].isdecimal():
        return
    if seen is not None and "gpus_per_node" in machine:
        machine["gpus_per_node"] = (f"{ranks[0]}, all of {seen[0]}:", seen[1])
    elif ranks[1] not in {"gpu", "auto"}:
        launch.notes.append(
            f"how many ranks {ranks[0]} starts only running tells; all GPUs of each node are taken, or what "
            "--gpus-per-node says"
        )


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
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "deepspeed_moe_layer_cls_names",
)


_SECTIONS = ("fsdp", "parallelism_config", "dynamo", "fp8", "megatron_lm")
"""Families of options of ``accelerate launch`` that are sections of its file, with ``_config`` behind them."""


_OTHER_DEVICES = {"cpu": "use_cpu", "use_cpu": "use_cpu", "tpu": "tpu", "use_xpu": "use_xpu"}


_STARTING = """
num_processes num_machines machine_rank main_process_ip main_process_port main_training_function same_network
rdzv_backend rdzv_conf max_restarts monitor_interval role tee log_dir gpu_ids module m no_python quiet q debug env
help h num_cpu_threads_per_process enable_cpu_affinity mpirun_ccl mpirun_hostfile downcast_bf16 ipex ipex_config
no_tpu_cluster tpu_cluster tpu_use_cluster tpu_use_sudo tpu_name tpu_zone tpu_env tpu_vm vm commands command_file
aws_access_key_id aws_secret_access_key deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter
deepspeed_multinode_launcher use_parallelism_config nproc_per_node nnodes node_rank master_addr master_port
rdzv_endpoint rdzv_id standalone ...
"""


STARTING = frozenset(_STARTING.split())
"""Options of ``accelerate launch`` (commands/launch.py of accelerate 0.34 and 1.15) that say where processes start and
how, and change no step; the last are torchrun's, which it knows too."""


def _accelerate_options(options: LauncherOptions) -> LauncherOptions:
    """Options of ``accelerate launch`` by the names that its file has for them."""
    found: LauncherOptions = {}
    for name, said in options.items():
        if name in {"use_deepspeed", "use_fsdp", "multi_gpu", "use_megatron_lm"}:
            kinds = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM"}
            found["distributed_type"] = kinds.get(name, "MULTI_GPU")
        elif name in _OF_DEEPSPEED:
            found[f"deepspeed_config.{name}"] = said
        elif name in _ACCELERATE:
            found[_ACCELERATE[name]] = said
        elif name in _OTHER_DEVICES:
            found[_OTHER_DEVICES[name]] = said
        elif section := next((section for section in _SECTIONS if name.startswith(f"{section}_")), ""):
            found[f"{section.removesuffix('_config')}_config.{name}"] = said
        elif name == "gradient_accumulation_steps":
            found["deepspeed_config.gradient_accumulation_steps"] = said
        elif name not in STARTING:
            found[name] = said
    return found
