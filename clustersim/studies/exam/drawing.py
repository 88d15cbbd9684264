"""From a seed to a planted incident: which job, what goes wrong, where, when and by how much."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from clustersim import scenario as scenarios
from clustersim.core.errors import ClusterSimError, ScenarioError
from clustersim.core.texts import Table
from clustersim.core.timeline import Timeline, step_ends
from clustersim.core.topology import NIC
from clustersim.engine.hang import Hang
from clustersim.scenario.incident_table import KINDS
from clustersim.scenario.running import Prepared

JOBS: tuple[tuple[str, Table], ...] = (
    ("ddp_gpt2_medium_2x4_v100", {}),
    ("ddp_gpt2_medium_2x4_v100", {"cluster.nodes": 4}),
    ("ddp_gpt2_medium_2x4_v100", {"strategy.kind": "fsdp", "cluster.nodes": 3}),
    ("fsdp_mpt_7b_16x8_a100", {"cluster.nodes": 2}),
)
"""Jobs that are quick to play, and what is changed of each."""
STEPS = 8
TRIES = 50
"""How often a draw that cannot be played (a link that nothing crosses) is drawn anew."""


@dataclass(frozen=True)
class Magnitudes:
    """Ranges that are drawn from: how many times as long kernels take; the pause of a batch, and the time that a
    flapping link is down, as shares of a step; what is left of a link. ``seen`` : share of ranks of which files are
    there."""

    slowdown: tuple[float, float]
    pause: tuple[float, float]
    flap: tuple[float, float]
    left: tuple[float, float]
    seen: float


DIFFICULTIES: Mapping[str, Magnitudes] = {
    "easy": Magnitudes((1.25, 2.0), (0.15, 0.5), (0.05, 0.15), (0.1, 0.35), 1.0),
    "hard": Magnitudes((1.08, 1.2), (0.04, 0.12), (0.02, 0.05), (0.4, 0.7), 0.5),
}
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
    def port(self) -> str:
        """The NIC that is struck, as its driver names it, ``"node0/mlx5_0"``; empty for none."""
        name = str(self.incident.get("link", ""))
        host, _, nic = name.partition("/nic")
        return f"{host}/mlx5_{nic}" if name else ""


def planted(seed: int, difficulty: str = "easy") -> PlantedIncident:
    """An incident of this seed; the same seed gives the same one. Raises :class:`ClusterSimError` for a difficulty that
    there is not."""
    if difficulty not in DIFFICULTIES:
        raise ClusterSimError(f"no difficulty {difficulty!r}; known: {', '.join(DIFFICULTIES)}")
    rng = np.random.default_rng([seed, list(DIFFICULTIES).index(difficulty)])
    name, changes = JOBS[int(rng.integers(len(JOBS)))]
    kind = list(KINDS)[int(rng.integers(len(KINDS)))]
    base: Table = {**changes, "run.steps": STEPS, "run.seed": int(rng.integers(2**31))}
    healthy = scenarios.load(name, base).prepare()
    timeline = healthy.play()
    for _ in range(TRIES):
        incident = _drawn(kind, healthy, timeline, DIFFICULTIES[difficulty], rng)
        prepared = scenarios.load(name, {**base, "incident": [incident]}).prepare()
        try:
            played = timeline if KINDS[kind].hangs else prepared.play()
            hang = prepared.hang(played)
        except ScenarioError:
            continue  # nothing crosses this link any more, or all collectives that follow are alike
        return PlantedIncident(seed, difficulty, incident, prepared, played, hang)
    raise ClusterSimError(f"seed {seed}: no {kind} can be played in {name} after {TRIES} draws")


def _drawn(kind: str, run: Prepared, timeline: Timeline, sizes: Magnitudes, rng: np.random.Generator) -> Table:
    """A row of ``[[incident]]``."""
    ends = step_ends(timeline).max(axis=1)
    step = float(ends[-1] - ends[-2])
    row = KINDS[kind]
    incident: Table = {"kind": kind, row.where: _place(row.where, run, rng)}
    since = rng.uniform(ends[2], ends[-4] if not row.hangs else ends[-2])
    incident["at"] = f"{since * 1e3:.3f} ms"
    drawers: dict[str, Callable[[], object]] = {
        "slowdown": lambda: round(float(rng.uniform(*sizes.slowdown)), 3),
        "pause": lambda: f"{step * rng.uniform(*sizes.pause) * 1e3:.3f} ms",
        "left": lambda: round(float(rng.uniform(*sizes.left)), 3),
        "lasts": lambda: f"{step * rng.uniform(*sizes.flap) * 1e3:.3f} ms",
        "every": lambda: f"{step * rng.uniform(0.4, 1.2) * 1e3:.3f} ms",
    }
    return incident | {name: drawers[name]() for name in row.measures}


def _place(where: str, run: Prepared, rng: np.random.Generator) -> int | str:
    if where == "rank":
        return int(rng.integers(run.mesh.workers))
    if where == "node":
        return int(rng.integers(run.mesh.n_nodes))
    names = [
        name
        for name, kind in zip(run.topology.vertex_names, run.topology.vertex_kinds, strict=True)
        if kind == NIC and name.partition("/")[0] in {f"node{n}" for n in range(run.mesh.n_nodes)}
    ]
    return names[int(rng.integers(len(names)))]
