"""The whole study of a scenario in plain values, its answer first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from clustersim.outputs import Folder
from clustersim.scenario import Scenario
from clustersim.scenario.rerun import step_time
from clustersim.sensitivity.network import BreakEven, break_even
from clustersim.sensitivity.scaling import Kind, Point, curve, last_worthwhile
from clustersim.sensitivity.tornado import Swing, tornado
from clustersim.texts import Plain
from clustersim.units import format_time

Told = Callable[[str], None]
FILE = "sensitivity.json"
FILES = (FILE, "tornado.png", "network.png", "scaling.png")


@dataclass(frozen=True)
class Asked:
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


def study(
    scenario: Scenario, asked: Asked = Asked(), *, title: str | None = None, tell: Told = lambda _: None
) -> Plain:
    """Tornado, break-even network and scaling of a scenario.

    Parameters
    ----------
    title : None is the scenario's own. tell : called with what is being run.

    Returns a dict: ``verdict``; ``title``, ``step_s``, ``nodes``, ``swing``, ``gain``; ``tornado``, ``network`` (None
    without one), ``strong`` and ``weak`` as dicts of their dataclasses; ``stops``, by kind (nodes, gain) or None.
    """
    prepared = scenario.prepare()
    tell("the scenario as it is")
    now = step_time(prepared.run().timeline)
    swings = tornado(prepared, now, asked.swing, tell)
    network = break_even(prepared, now, asked.growth, tell)
    counts = asked.nodes or _doublings(prepared.mesh.n_nodes)
    kinds: tuple[Kind, ...] = ("strong", "weak")
    curves = {kind: curve(scenario, counts, kind, tell) for kind in kinds}
    stops = {kind: last_worthwhile(points, asked.gain) for kind, points in curves.items()}
    said = (
        _most(now, swings, asked.swing),
        _network(network),
        _scaling(curves["strong"], stops["strong"], asked.gain),
    )
    return {
        "title": scenario.title if title is None else title,
        "verdict": "; ".join(filter(None, said)) + ".",
        "step_s": now,
        "nodes": prepared.mesh.n_nodes,
        "swing": asked.swing,
        "gain": asked.gain,
        "tornado": [asdict(one) for one in swings],
        "network": None if network is None else asdict(network),
        **{kind: [asdict(one) for one in points] for kind, points in curves.items()},
        "stops": stops,
    }


def _doublings(nodes: int) -> list[int]:
    """From an eighth to twice as many, where those are whole."""
    return [nodes // by for by in (8, 4, 2) if nodes % by == 0] + [nodes, 2 * nodes]


def _most(now: float, swings: Sequence[Swing], swing: float) -> str:
    if not swings:
        return f"A step takes {format_time(now)}"
    first, rest = swings[0], swings[1:]
    other = f", then on {rest[0].knob} ({rest[0].loss:.1%})" if rest and rest[0].loss > 0.001 else ""
    return (
        f"A step of {format_time(now)} depends most on {first.knob}: with {swing:.0%} less it is {first.loss:.1%} "
        f"longer{other}"
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


def _scaling(points: Sequence[Point], stop: tuple[int, float] | None, gain: float) -> str:
    ran = [one for one in points if not one.error and one.fits]
    if len(ran) < 2:
        return ""
    first, last = ran[0], ran[-1]
    if stop is not None:
        return f"with the same batch, doubling {stop[0]:,} nodes buys {stop[1]:.0%}, less than {gain:.0%}"
    if last.efficiency > 0.995:
        return f"with the same batch it scales from {first.nodes:,} to {last.nodes:,} nodes without loss"
    why = f", lost to {last.cause}" if last.cause else ""
    return f"with the same batch {last.nodes:,} nodes are {last.efficiency:.0%} as efficient as {first.nodes:,}{why}"


def folder_for(scenario: Scenario, out: str | Path, asked: Asked) -> Folder:
    """Where the study of a scenario goes; ``asked`` : how it is studied. Raises :class:`ClusterSimError` where the
    folder holds something else."""
    folder = Folder(Path(out), "study", scenario.title, FILES, (scenario.inputs(), asdict(asked)))
    folder.check()
    return folder
