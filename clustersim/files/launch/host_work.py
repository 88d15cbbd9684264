"""How many threads a rank updates with on the host, by what starts it: of an optimizer that is offloaded."""

from __future__ import annotations

from collections.abc import Sequence

from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.options import ScenarioFields

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
    for tool, options in script.launch.tools if script.launch is not None else ():
        if tool == "accelerate" and str(options.get(OF_ACCELERATE)).isdecimal():
            told["host_threads"] = OptionValue(f"--{OF_ACCELERATE}", int(str(options[OF_ACCELERATE])), script.name)
        if tool == "deepspeed" and BOUND in options:
            told["bind_cores"] = OptionValue(f"--{BOUND}", True, script.name)
    variable = script.environment.get(THREADS, "")
    if variable.isdecimal() and not told:  # which DeepSpeed's launcher overwrites where it binds, and accelerate
        told["host_threads"] = OptionValue(THREADS, int(variable), script.name)
    return told


def taken(read: Sequence[Document], fields: ScenarioFields, used: set[Key]) -> list[str]:
    """Put threads and cores of ranks into the fields, where an optimizer is on the host; else they change nothing.

    Returns notes: ``deepspeed`` leaves ranks a thread a core, and what is played without a word is torchrun's one.
    """
    if not any(fields.get(name) in {True, "cpu"} for name in AWAY):
        return []
    told = {field: option for file in read for field, option in _told(file).items()}
    for field, option in told.items():
        fields.say(f"strategy.{field}", option.value, option)
        used.add(("config", OF_ACCELERATE))
    launched = [(file.name, file.launch.tools) for file in read if file.launch is not None]
    by_deepspeed = [name for name, tools in launched if any(tool == "deepspeed" for tool, _ in tools)]
    if told or not by_deepspeed:
        return []
    return [
        f"{by_deepspeed[0]}: deepspeed sets no {THREADS}, as torchrun and accelerate do, so that each rank starts "
        f"a thread a core; one a rank is played: say strategy.host_threads, or start with --{BOUND}"
    ]
