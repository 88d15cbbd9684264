"""A job of Kubernetes as YAML -> the script that its pods run, and how many of them there are.

Kubeflow's PyTorchJob, MPIJob and TrainJob, JobSet, Volcano's Job, LeaderWorkerSet and the plain Job: one pod a node.
Names: api/v1 of kubeflow/training-operator and kubeflow/mpi-operator, trainer/v1alpha1 of kubeflow/trainer.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import Table
from clustersim.core.yamls import yaml_table

KINDS = ("PyTorchJob", "MPIJob", "TrainJob", "JobSet", "Job", "RayJob")
"""What is read, by Kubernetes' word for it."""
_OF_RAY = ("RayJob", "RayCluster")
_REPLICAS = ("pytorchReplicaSpecs", "mpiReplicaSpecs", "replicaSpecs")
_SHELLS = {"bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash"}
_SETS = {"nodes": ("PET_NNODES", "WORLD_SIZE"), "ranks": ("PET_NPROC_PER_NODE",)}
"""Variables that the operators set in each pod: of torchrun (PET_*), and how many pods there are."""


@dataclass
class PodJob:
    """A job. text : what a pod runs, as a script. nodes, ranks : pods, and GPUs of each; 0 where nobody says."""

    text: str
    nodes: int = 0
    ranks: int = 0


@dataclass
class _Pods:
    """Pods that are alike: how many, and the container."""

    count: int
    container: Table = field(default_factory=dict)


def is_job(text: str) -> bool:
    """Whether a text is of Kubernetes."""
    return all(re.search(rf"^{key}:\s", text, re.MULTILINE) for key in ("apiVersion", "kind"))


def is_task(text: str) -> bool:
    """Whether a text is a task of SkyPilot."""
    return all(re.search(rf"^{key}", text, re.MULTILINE) for key in (r"run:\s*[|>]", r"(resources|num_nodes):"))


def task(text: str, name: str) -> PodJob:
    """A task of SkyPilot (sky/task.py, sky/skylet/constants.py): what each node runs, and its GPUs."""
    table = yaml_table(text, name, ScenarioError)
    resources = table.get("resources")
    accelerators = resources.get("accelerators") if isinstance(resources, dict) else None
    kinds = accelerators if isinstance(accelerators, dict) else {}
    kind = re.fullmatch(r"[\w.-]+:(\d{1,4})", accelerators) if isinstance(accelerators, str) else None
    gpus = int(kind[1]) if kind else count_in(next(iter(kinds.values()))) if len(kinds) == 1 else 0
    nodes = count_in(table.get("num_nodes")) or 1
    own = {"SKYPILOT_NUM_NODES": nodes} | ({"SKYPILOT_NUM_GPUS_PER_NODE": gpus} if gpus else {})
    envs = table.get("envs")
    settings = {str(key): value for key, value in envs.items() if value is not None} if isinstance(envs, dict) else {}
    lines = [
        f"export {key}={shlex.quote(str(value))}" for key, value in {**own, **settings}.items() if key.isidentifier()
    ]
    return PodJob("\n".join([*lines, str(table.get("run"))]) + "\n", nodes, gpus)


def job(text: str, name: str) -> PodJob:
    """The job of a file, which may hold other things beside it.

    Raises :class:`ScenarioError` where no container of it has a command.
    """
    for part in re.split(r"^---.*$", text, flags=re.MULTILINE):
        if not part.strip() or not is_job(part):
            continue
        table = yaml_table(part, name, ScenarioError)
        if table.get("kind") in _OF_RAY:
            return _of_ray(table, name)
        pods = list(_pods(table.get("spec")))
        if pods:
            return _job(table, pods)
    raise ScenarioError(f"{name}: is of Kubernetes, and no container of it has a command; give the script that it runs")


def _of_ray(table: Table, name: str) -> PodJob:
    """What a RayJob (ray.io/v1) runs: its entrypoint, on the pods that have GPUs, its head and its workers.

    Raises :class:`ScenarioError` for a cluster, which runs nothing by itself.
    """
    spec = table.get("spec")
    fields = spec if isinstance(spec, dict) else {}
    command = fields.get("entrypoint")
    if not isinstance(command, str) or not command.strip():
        raise ScenarioError(f"{name}: is of Ray on Kubernetes, without an entrypoint; give the script that it runs")
    cluster = fields.get("rayClusterSpec")
    parts = cluster if isinstance(cluster, dict) else {}
    groups = [(1, parts.get("headGroupSpec"))]
    groups += [(count_in(group.get("replicas")) or 1, group) for group in _tables(parts.get("workerGroupSpecs"))]
    pods = [
        _Pods(count, pod.container)
        for count, group in groups
        if isinstance(group, dict)
        for pod in _of_template({}, group.get("template"))
    ]
    with_gpus = [pod for pod in pods if _gpus(pod.container)]
    gpus = _gpus(with_gpus[0].container) if with_gpus else 0
    return PodJob(command.strip() + "\n", sum(pod.count for pod in with_gpus), gpus)


def _job(table: Table, pods: list[_Pods]) -> PodJob:
    spec = table["spec"]
    mpi = "mpiReplicaSpecs" in spec
    first = next((pod.container for pod in pods if _words(pod.container)), {})
    nodes = sum(pod.count for pod in pods[1 if mpi else 0 :])
    ranks = (
        count_in(spec.get("slotsPerWorker"))
        or count_in(spec.get("nprocPerNode"))
        or count_in(first.get("numProcPerNode"))
    )
    gpus = next((n for pod in reversed(pods) if (n := _gpus(pod.container))), 0)
    ranks = ranks or gpus
    own = {} if mpi else dict.fromkeys(_SETS["nodes"], nodes) | {name: ranks for name in _SETS["ranks"] if ranks}
    listed = first.get("env")
    settings = {str(entry.get("name")): entry["value"] for entry in _tables(listed) if "value" in entry}
    lines = [
        f"export {name}={shlex.quote(str(value))}" for name, value in {**own, **settings}.items() if name.isidentifier()
    ]
    return PodJob("\n".join([*lines, _command(_words(first))]) + "\n", nodes, ranks)


def _pods(spec: Any) -> Iterator[_Pods]:
    """Pods of a job that run something, the leader's first."""
    if not isinstance(spec, dict):
        return
    trainer = spec.get("trainer")
    if isinstance(trainer, dict) and _words(trainer):
        yield _Pods(count_in(trainer.get("numNodes")) or 1, trainer)
    specs: Table = next((spec[key] for key in _REPLICAS if isinstance(spec.get(key), dict)), {})
    leaders = sorted(specs, key=lambda role: role not in ("Master", "Launcher"))
    several = [spec[key] for key in ("tasks", "replicatedJobs") if isinstance(spec.get(key), list)]
    for part in [*(specs[role] for role in leaders), *(part for children in several for part in _tables(children))]:
        if isinstance(part, dict):
            yield from _of_template(part, part.get("template"))
    group = spec.get("leaderWorkerTemplate")
    if isinstance(group, dict):
        yield from _of_template({"replicas": group.get("size")}, group.get("workerTemplate"))
    elif not specs and not several and "template" in spec:
        yield from _of_template({"replicas": spec.get("parallelism") or spec.get("replicas")}, spec["template"])


def _of_template(part: Table, template: Any) -> Iterator[_Pods]:
    inner = template.get("spec") if isinstance(template, dict) else None
    if not isinstance(inner, dict):
        return
    count = count_in(part.get("replicas")) or 1
    if isinstance(inner.get("template"), dict):  # a job of jobs
        yield from _of_template({"replicas": (count_in(inner.get("parallelism")) or 1) * count}, inner["template"])
        return
    for container in list(_tables(inner.get("containers")))[:1]:
        yield _Pods(count, container)


def _words(container: Table) -> list[str]:
    parts = [container.get(key) for key in ("command", "args")]
    return [str(word) for part in parts if isinstance(part, list) for word in part]


def _command(words: list[str]) -> str:
    """As a line of a script; Kubernetes' ``$(NAME)`` is the shell's ``${NAME}``."""
    words = [re.sub(r"\$\(([A-Za-z_]\w*)\)", r"${\1}", word) for word in words]
    if len(words) >= 3 and words[0] in _SHELLS and re.fullmatch(r"-\w*c", words[-2]):
        return words[-1]
    open_words = re.compile(r"[\w./:=,@%+\-]*\$\{\w+\}[\w./:=,@%+\-]*")
    return " ".join(word if open_words.fullmatch(word) else shlex.quote(word) for word in words)


def _gpus(container: Table) -> int:
    resources = container.get("resources", container.get("resourcesPerNode"))
    limits = resources.get("limits", resources.get("requests")) if isinstance(resources, dict) else None
    if not isinstance(limits, dict):
        return 0
    return max((count_in(count) for name, count in limits.items() if str(name).endswith("/gpu")), default=0)


def _tables(value: Any) -> Iterator[Table]:
    yield from (entry for entry in value if isinstance(entry, dict)) if isinstance(value, list) else ()


def count_in(value: Any) -> int:
    """What a launcher says, where it is a number; 0 else (an elastic ``1:4``, a variable of the scheduler)."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 8 else 0
