"""From a seed to a planted incident: which job, what goes wrong, where, when and by how much."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec
import numpy as np

from clustersim import scenario as scenarios
from clustersim.core.errors import ClusterSimError, ScenarioError
from clustersim.core.texts import Table, data_table
from clustersim.core.timeline import Timeline, step_ends
from clustersim.core.topology import NIC, Topology
from clustersim.engine.hang import Hang
from clustersim.scenario.file.incident_table import KINDS
from clustersim.scenario.run.running import Prepared

_TABLE = data_table("exam")
JOBS: Mapping[str, tuple[str, Table]] = {
    name: (job["scenario"], job["changes"]) for name, job in _TABLE["jobs"].items()
}
"""Jobs, and what is changed of each."""
LAYERS: Mapping[str, int] = _TABLE["layers"]
"""Models have few layers, so that jobs are quick to play and their files small."""
USUAL = ("small", "wide", "sharded", "large")
"""Where any fault may strike."""
OTHER_JOBS = msgspec.convert(_TABLE["other_jobs"], dict[str, tuple[str, ...]])
"""Jobs of kinds that need others: rails, a spine between machines, messages between stages."""
SPINE = "leaf* -> spine*"
"""The links that a neighbour congests."""
DRAWS = 16
"""Seeds of a job's own noise; healthy runs are played once for each."""
STEPS = 8
TRIES = 50
"""How often a draw that cannot be played (a link that nothing crosses) is drawn anew."""


@dataclass(frozen=True)
class Magnitudes:
    """Ranges that are drawn from: how many times as long kernels take; a pause, and the time that a flapping link is
    down, as shares of a step; what is left of a link. ``seen`` : share of ranks of which files are there."""

    slowdown: tuple[float, float]
    pause: tuple[float, float]
    flap: tuple[float, float]
    left: tuple[float, float]
    seen: float


DIFFICULTIES = msgspec.convert(_TABLE["difficulties"], dict[str, Magnitudes])
"""How large a fault is, and of how many ranks there is something to see."""


@dataclass(frozen=True, eq=False)
class PlantedIncident:
    """A run in which something goes wrong, played.

    seed, difficulty : what it was drawn from. incident : the row of ``[[incident]]``. prepared, timeline : the run, up
    to a hang the healthy one. hang : None where it goes on.
    """

    seed: int
    difficulty: str
    incident: Table
    prepared: Prepared
    timeline: Timeline
    hang: Hang | None

    @property
    def hosts(self) -> list[str]:
        """The name of each rank's machine."""
        mesh = self.prepared.mesh
        nodes = self.prepared.topology.vertex_node[mesh.gpus[: mesh.workers]]
        return [f"node{int(node)}" for node in nodes]

    @property
    def healthy(self) -> Topology:
        """The machine before anything went wrong."""
        return self.prepared.scenario.changed({"incident": []}).prepare().topology

    @property
    def port(self) -> str:
        """The NIC that is struck, as its driver names it, ``"node0/mlx5_0"``; empty for none."""
        return port_name(str(self.incident.get("link", "")))


def port_name(vertex: str) -> str:
    """A NIC as its driver names it; empty for what is none.

    >>> port_name("node0/nic2"), port_name("leaf* -> spine*")
    ('node0/mlx5_2', '')
    """
    host, slash, nic = vertex.partition("/nic")
    return f"{host}/mlx5_{nic}" if slash and nic.isdigit() else ""


def planted(seed: int, difficulty: str = "easy") -> PlantedIncident:
    """An incident of this seed; the same seed gives the same one. Raises :class:`ClusterSimError` for a difficulty that
    there is not."""
    if difficulty not in DIFFICULTIES:
        raise ClusterSimError(f"no difficulty {difficulty!r}; known: {', '.join(DIFFICULTIES)}")
    rng = np.random.default_rng([seed, list(DIFFICULTIES).index(difficulty)])
    kind = list(KINDS)[int(rng.integers(len(KINDS)))]
    jobs = OTHER_JOBS.get(kind, USUAL)
    job = jobs[int(rng.integers(len(jobs)))]
    healthy, timeline = well(job, int(rng.integers(DRAWS)))
    for _ in range(TRIES):
        incident = _drawn(kind, healthy, timeline, DIFFICULTIES[difficulty], rng)
        scenario = healthy.scenario.changed({"incident": [incident]})
        try:
            # What hangs a run leaves its Program as it is, and a hang is derived from the run without it.
            prepared = replace(healthy, scenario=scenario) if KINDS[kind].hangs else scenario.prepare()
            played = timeline if KINDS[kind].hangs else prepared.play()
            hang = prepared.hang(played)
        except ScenarioError:
            continue  # nothing crosses this link any more, or all collectives that follow are alike
        return PlantedIncident(seed, difficulty, incident, prepared, played, hang)
    raise ClusterSimError(f"seed {seed}: no {kind} can be played in {healthy.scenario.title} after {TRIES} draws")


@lru_cache(maxsize=len(JOBS) * DRAWS)
def well(job: str, draw: int) -> tuple[Prepared, Timeline]:
    """A job of :data:`JOBS` in which nothing goes wrong, and its run."""
    name, changes = JOBS[job]
    size: Table = {"model.options": {"layers": LAYERS[name]}, "run.steps": STEPS, "run.seed": draw}
    healthy = scenarios.load(name, {**changes, **size}).prepare()
    return healthy, healthy.play()


def _drawn(kind: str, run: Prepared, timeline: Timeline, sizes: Magnitudes, rng: np.random.Generator) -> Table:
    """A row of ``[[incident]]``."""
    ends = step_ends(timeline).max(axis=1)
    step = float(ends[-1] - ends[-2])
    row = KINDS[kind]
    incident: Table = {"kind": kind}
    if row.where:
        incident[row.where] = SPINE if kind == "congestion" else _place(row.where, run, timeline, rng)
    if row.does != "start":
        since = rng.uniform(ends[2], ends[-2] if row.hangs else ends[-4])
        incident["at"] = f"{since * 1e3:.3f} ms"
    flap = kind == "flapping_link"
    drawers: dict[str, Callable[[], object]] = {
        "slowdown": lambda: round(float(rng.uniform(*sizes.slowdown)), 3),
        "pause": lambda: f"{step * rng.uniform(*sizes.pause) * 1e3:.3f} ms",
        "left": lambda: round(float(rng.uniform(*sizes.left)), 3),
        "lasts": lambda: f"{step * rng.uniform(*(sizes.flap if flap else (1.5, 3.0))) * 1e3:.3f} ms",
        "every": lambda: f"{step * rng.uniform(0.4, 1.2) * 1e3:.3f} ms",
        "interval": lambda: int(rng.integers(2, 4)),
        "other": lambda: _place("link", run, timeline, rng, str(incident["link"]).partition("/")[0]),
    }
    return incident | {name: drawers[name]() for name in row.measures}


def _place(where: str, run: Prepared, timeline: Timeline, rng: np.random.Generator, node: str = "") -> int | str:
    """A rank, a node, or a NIC that the job uses; ``node`` : of this machine."""
    if where == "rank":
        return int(rng.integers(run.mesh.workers))
    if where == "node":
        return int(rng.integers(run.mesh.n_nodes))
    names = [name for name in used_nics(run.topology, timeline) if name.startswith(f"{node}/" if node else "")]
    return names[int(rng.integers(len(names)))]


def used_nics(topology: Topology, timeline: Timeline) -> list[str]:
    """NICs that a run's transfers cross."""
    crossed: set[int] = set()
    for links, _ in () if timeline.links is None else timeline.links.loads:
        crossed |= set(topology.link_src[links].tolist()) | set(topology.link_dst[links].tolist())
    return [topology.vertex_names[v] for v in sorted(crossed) if topology.vertex_kinds[v] == NIC]
