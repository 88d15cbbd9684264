"""The whole study of a scenario, its answer first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from clustersim.core.errors import several
from clustersim.core.outputs import Folder
from clustersim.core.units import format_time
from clustersim.scenario import Scenario
from clustersim.studies.sensitivity.scaling import Kind, ScalingPoint, curve, last_worthwhile
from clustersim.studies.sensitivity.turned import BreakEven, Swing, Told, break_even, tornado
from clustersim.studies.what_if.rerun import step_time

FILE = "sensitivity.json"
FILES = (FILE, "tornado.png", "network.png", "scaling.png")


@dataclass(frozen=True)
class StudyRequest:
    """What a study asks.

    Parameters
    ----------
    nodes : to scale over; None doubles from an eighth of the scenario's to twice. swing : of every hardware number.
    growth : of the step that a slower network may cost. gain : of throughput that a doubling of nodes must buy.
    """

    nodes: Sequence[int] | None = None
    swing: float = 0.2
    growth: float = 0.05
    gain: float = 0.5


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """What a step depends on, in a sentence; ``step_s`` [s] and ``nodes`` as the scenario has them, swing and gain as
    asked. ``network`` : None without one. ``stops`` : by kind of scaling the number of nodes whose doubling does not
    pay, and what it buys."""

    title: str
    verdict: str
    step_s: float
    nodes: int
    swing: float
    gain: float
    tornado: list[Swing]
    network: BreakEven | None
    strong: list[ScalingPoint]
    weak: list[ScalingPoint]
    stops: dict[str, tuple[int, float] | None]

    @property
    def curves(self) -> dict[str, list[ScalingPoint]]:
        """By kind of scaling."""
        return {"strong": self.strong, "weak": self.weak}


def study(
    scenario: Scenario, request: StudyRequest = StudyRequest(), *, title: str | None = None, tell: Told = lambda _: None
) -> Study:
    """Tornado, break-even network and scaling of a scenario.

    title : None is the scenario's own. tell : called with what is being run.
    """
    prepared = scenario.prepare()
    tell("the scenario as it is")
    now = step_time(prepared.run().timeline)
    swings = tornado(prepared, now, request.swing, tell)
    network = break_even(prepared, now, request.growth, tell)
    own = prepared.mesh.n_nodes
    counts = request.nodes or [*(own // by for by in (8, 4, 2) if own % by == 0), own, 2 * own]
    kinds: tuple[Kind, ...] = ("strong", "weak")
    curves = {kind: curve(scenario, counts, kind, tell) for kind in kinds}
    stops = {kind: last_worthwhile(points, request.gain) for kind, points in curves.items()}
    sentences = (
        _most(now, swings, request.swing),
        _network(network),
        _scaling(curves["strong"], stops["strong"], request.gain),
    )
    return Study(
        title=scenario.title if title is None else title,
        verdict="; ".join(filter(None, sentences)) + ".",
        step_s=now,
        nodes=own,
        swing=request.swing,
        gain=request.gain,
        tornado=swings,
        network=network,
        strong=curves["strong"],
        weak=curves["weak"],
        stops={kind: stops[kind] for kind in kinds},
    )


def _most(now: float, swings: Sequence[Swing], swing: float) -> str:
    if not swings:
        return f"A step takes {format_time(now)}"
    first = swings[0]
    rest = swings[1:]
    second_text = f", then on {rest[0].knob} ({rest[0].loss:.1%})" if rest and rest[0].loss > 0.001 else ""
    return (
        f"A step of {format_time(now)} depends most on {first.knob}: with {swing:.0%} less it is {first.loss:.1%} "
        f"longer{second_text}"
    )


def _network(network: BreakEven | None) -> str:
    if network is None:
        return ""
    if network.at is None:
        slowest = gigabits(network.speeds[0])
        return f"a network down to {slowest} a NIC makes it no more than {network.growth:.0%} longer"
    return (
        f"NICs may be {network.nic / network.at:.1f} times slower ({gigabits(network.at)} instead of "
        f"{gigabits(network.nic)}) before it grows by more than {network.growth:.0%}"
    )


def gigabits(rate: float) -> str:
    """A network's rate [bytes/s] as its data sheet says it.

    >>> gigabits(50e9)
    '400 Gb/s'
    """
    return f"{rate * 8e-9:.3g} Gb/s"


def _scaling(points: Sequence[ScalingPoint], stop: tuple[int, float] | None, gain: float) -> str:
    ran = [point for point in points if not point.error and point.fits]
    if len(ran) < 2:
        return ""
    first = ran[0]
    last = ran[-1]
    if stop is not None:
        return f"with the same batch, doubling {several(stop[0], 'node')} buys {stop[1]:.0%}, less than {gain:.0%}"
    if last.efficiency > 0.995:
        return f"with the same batch it scales from {first.nodes:,} to {several(last.nodes, 'node')} without loss"
    why = f", lost to {last.cause}" if last.cause else ""
    return f"with the same batch {last.nodes:,} nodes are {last.efficiency:.0%} as efficient as {first.nodes:,}{why}"


def folder_for(scenario: Scenario, out: str | Path, request: StudyRequest) -> Folder:
    """Where the study of a scenario goes; ``request`` : how it is studied. Raises :class:`ClusterSimError` where the
    folder holds something else."""
    folder = Folder(Path(out), "study", scenario.title, FILES, (scenario.inputs(), asdict(request)))
    folder.check()
    return folder
