"""Ranks that ``srun`` started, without torchrun: what Slurm says of them, in torchrun's words."""

from __future__ import annotations

import re
from collections.abc import Mapping

from clustersim.core.errors import ClusterSimError

PORTS = 20_000
"""First of the ports on which rank 0 listens; jobs of one machine differ by their number."""


def tasks_of(environment: Mapping[str, str]) -> int:
    """How many tasks ``srun`` started beside this one, itself among them; 1 where torchrun or nobody did.

    A batch script has the number of its job's tasks in its environment, too, but is no step of it.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return 1
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1"))


def as_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables of this task of ``srun``; empty where it did not start several.

    Raises :class:`ClusterSimError` where machines have unlike numbers of tasks.
    """
    size = tasks_of(environment)
    if size == 1:
        return {}
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", str(size))
    match = re.fullmatch(r"(\d+)(?:\(x\d+\))?", per_node)
    if match is None:
        raise ClusterSimError(f"srun started {per_node} tasks on its machines; as many on each (--ntasks-per-node)")
    one_machine = int(match[1]) == size
    step = int(environment.get("SLURM_JOB_ID", "0")) * 7 + int(environment.get("SLURM_STEP_ID", "0"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": match[1],
        "MASTER_ADDR": "127.0.0.1" if one_machine else _first(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(PORTS + step % PORTS),
    }


def own_card(environment: Mapping[str, str]) -> bool:
    """Whether Slurm lets each task see one GPU, its own."""
    return tasks_of(environment) > 1 and any(
        name in environment for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")
    )


def _first(nodes: str) -> str:
    """The first machine of a list as Slurm writes it.

    >>> _first("gpu[007-009,12],login1"), _first("a1,a2"), _first("n[3,5]-ib")
    ('gpu007', 'a1', 'n3-ib')
    """
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes
