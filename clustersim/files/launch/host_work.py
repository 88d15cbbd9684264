"""How many threads a rank updates with on the host, by what starts it: of an optimizer that is offloaded."""

from __future__ import annotations

from collections.abc import Sequence

from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.options import ScenarioFields
from clustersim.training.strategies.offloading import A_THREAD_A_CORE

THREADS = "OMP_NUM_THREADS"
OF_ACCELERATE = "num_cpu_threads_per_process"
"""What ``accelerate launch`` puts into that variable."""
BOUND = "bind_cores_to_rank"
"""DeepSpeed's option for cores of a rank's own, as many threads as those (its launcher/launch.py)."""
AWAY = ("strategy.cpu_offload", "strategy.zero_optimization.offload_optimizer.device")
"""Fields that put an optimizer on the host."""


def _told(script: Document) -> dict[str, OptionValue]:
    """The strategy's fields that a script's launcher and variables say."""
    told: dict[str, OptionValue] = {}
    by_deepspeed = None
    for tool, options in script.launch.tools if script.launch is not None else ():
        if tool == "accelerate" and str(options.get(OF_ACCELERATE)).isdecimal():
            told["host_threads"] = OptionValue(f"--{OF_ACCELERATE}", int(str(options[OF_ACCELERATE])), script.name)
        if tool == "deepspeed" and BOUND in options:
            told["bind_cores"] = OptionValue(f"--{BOUND}", True, script.name)
        elif tool == "deepspeed":
            by_deepspeed = OptionValue(tool, A_THREAD_A_CORE, script.name)
    variable = script.environment.get(THREADS, "")
    if variable.isdecimal() and not told:  # which DeepSpeed's launcher overwrites where it binds, and accelerate
        told["host_threads"] = OptionValue(THREADS, int(variable), script.name)
    elif by_deepspeed is not None and not told:
        told["host_threads"] = by_deepspeed
    return told


def taken(read: Sequence[Document], fields: ScenarioFields, used: set[Key]) -> list[str]:
    """Put threads and cores of ranks into the fields, where an optimizer is on the host; else they change nothing.

    Returns notes: ``deepspeed`` leaves ranks a thread a core (its launcher/launch.py sets the variable where it binds
    cores, and only there), where torchrun sets one for several ranks of a node and accelerate one for each.
    """
    if not any(fields.get(name) in {True, "cpu"} for name in AWAY):
        return []
    told = {field: option for file in read for field, option in _told(file).items()}
    for field, option in told.items():
        fields.say(f"strategy.{field}", option.value, option)
        used.add(("config", OF_ACCELERATE))
    threads = told.get("host_threads")
    if threads is None or threads.value != A_THREAD_A_CORE:
        return []
    return [
        f"{threads.where}: deepspeed sets no {THREADS}, as torchrun and accelerate do, so that each rank starts a "
        f"thread a core, and the ranks of a node share all cores (strategy.host_threads); --{BOUND} gives each its own"
    ]
