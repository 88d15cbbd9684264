"""``[[incident]]`` of a scenario: something that goes wrong at one place of a run, and from when to when.

Kinds are a table: where one strikes, what says how much, and whether the run can go on. Those that slow a run down are
played by what the engine has for slow GPUs, slow hosts and links that change (:mod:`clustersim.scenario.incidents`);
those that stop it end in a :class:`clustersim.engine.hang.Hang`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from clustersim.core.errors import ScenarioError
from clustersim.core.units import Seconds

KindName = Literal[
    "slow_gpu",
    "slow_host",
    "slow_data",
    "slow_link",
    "flapping_link",
    "dead_link",
    "dead_rank",
    "stopped_rank",
    "stuck_kernel",
    "missing_call",
    "other_kind",
    "other_size",
    "other_type",
    "other_order",
]


class IncidentKind(NamedTuple):
    """One kind: the field that says ``where`` it strikes, those that say how much, whether the run ``hangs`` there, and
    what it is in ``words``."""

    where: str
    measures: tuple[str, ...]
    hangs: bool
    words: str


KINDS: dict[str, IncidentKind] = {
    "slow_gpu": IncidentKind("rank", ("slowdown",), False, "a GPU runs its kernels slower (clock, heat, power cap)"),
    "slow_host": IncidentKind("node", ("slowdown",), False, "all ranks of a machine compute slower"),
    "slow_data": IncidentKind("rank", ("pause",), False, "a rank waits longer for each batch"),
    "slow_link": IncidentKind("link", ("left",), False, "a link has less bandwidth: a bad cable, or a neighbour's job"),
    "flapping_link": IncidentKind("link", ("lasts", "every"), False, "a link is down for a moment, again and again"),
    "dead_link": IncidentKind("link", (), True, "a link or a NIC is down for good, and what crosses it never ends"),
    "dead_rank": IncidentKind("rank", (), True, "a process ends: an exception, out of memory, a signal"),
    "stopped_rank": IncidentKind("rank", (), True, "a process stands still, its watchdog too (SIGSTOP, a stuck host)"),
    "stuck_kernel": IncidentKind("rank", (), True, "a GPU never ends a kernel; its process goes on"),
    "missing_call": IncidentKind("rank", (), True, "a rank never calls a collective that others call"),
    "other_kind": IncidentKind("rank", (), True, "a rank calls a collective of another kind than the others"),
    "other_size": IncidentKind("rank", (), True, "a rank calls a collective with a tensor of another size"),
    "other_type": IncidentKind("rank", (), True, "a rank calls a collective with a tensor of another type"),
    "other_order": IncidentKind("rank", (), True, "a rank calls two collectives in the other order"),
}
"""Every kind of incident."""

PLACES = ("rank", "node", "link")
MEASURES = ("slowdown", "pause", "left", "lasts", "every")


class Incident(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[[incident]]``: something that goes wrong at one place of a run.

    Parameters
    ----------
    kind : what goes wrong: the run slows down (``slow_gpu``, ``slow_host``, ``slow_data``, ``slow_link``,
        ``flapping_link``), or hangs (all others).
    rank : of a GPU or a process. node : of ``slow_host``, counted from 0. link : a vertex (``"node0/nic0"``: all its
        links) or links, as ``match`` of ``cluster.changes`` names them.
    at : since when, of the run; from its beginning when absent. A kind that hangs needs it: what the rank does then is
        what goes wrong.
    lasts : how long; to the end of the run when absent. Of ``flapping_link`` how long it is down each time.
    slowdown : how many times as long kernels take. pause : how much longer each batch takes to load. left : share of
        the bandwidth that is left, of ``flapping_link`` while it is down. every : after how long a flap comes back.
    """

    kind: KindName
    rank: Annotated[int, Meta(ge=0)] | None = None
    node: Annotated[int, Meta(ge=0)] | None = None
    link: str | None = None
    at: Seconds | None = None
    lasts: Seconds | None = None
    slowdown: Annotated[float, Meta(gt=1, le=1e3)] | None = None
    pause: Seconds | None = None
    left: Annotated[float, Meta(ge=1e-6, lt=1)] | None = None
    every: Seconds | None = None

    def __post_init__(self) -> None:
        row = KINDS[self.kind]
        if getattr(self, row.where) is None:
            raise ValueError(f'an incident of kind "{self.kind}" says where: {row.where} = ...')
        optional = {"left"} if self.kind == "flapping_link" else set() if row.hangs else {"lasts"}
        allowed = {row.where, *row.measures, *optional}
        for name in (*PLACES, *MEASURES):
            if getattr(self, name) is not None and name not in allowed:
                raise ValueError(
                    f'an incident of kind "{self.kind}" has no {name}; it has {", ".join(sorted(allowed))}'
                )
        for name in row.measures:
            if getattr(self, name) is None:
                raise ValueError(f'an incident of kind "{self.kind}" says how much: {name} = ...')
        if row.hangs and self.at is None:
            raise ValueError(f'an incident of kind "{self.kind}" says when: at = "1.5 s"')
        if self.lasts is not None and self.lasts <= 0:
            raise ValueError("lasts must be longer than 0 s")
        if self.every is not None and self.lasts is not None and not (self.every > self.lasts and self.every >= 1e-6):
            raise ValueError("every must be longer than lasts, and at least 1 us")

    @property
    def hangs(self) -> bool:
        """Whether the run cannot go on."""
        return KINDS[self.kind].hangs

    @property
    def place(self) -> str:
        """Where it strikes, in words: ``"rank 3"``."""
        where = KINDS[self.kind].where
        return f"{where} {getattr(self, where)}"

    @property
    def since(self) -> float:
        """When it begins [s]."""
        return float(self.at or 0.0)

    @property
    def until(self) -> float:
        """When it ends [s]; infinite where it stays. A flapping link flaps to the end."""
        return float("inf") if self.lasts is None or self.every is not None else self.since + float(self.lasts)

    def __str__(self) -> str:
        return f"{self.kind} of {self.place}"


def together(incidents: Sequence[Incident]) -> None:
    """Raise :class:`ScenarioError` for two incidents of which one would hide the other."""
    for i, later in enumerate(incidents):
        for j, earlier in enumerate(incidents[:i]):
            if later.hangs and earlier.hangs:
                wrong = f"{earlier} and {later} both hang the run; what comes second is never seen: keep one"
            elif later.hangs != earlier.hangs and _hidden(earlier, later):
                wrong = f"{earlier} and {later}: one begins when the other has hung the run already: begin it earlier"
            elif (later.kind, later.place) == (earlier.kind, earlier.place) and _overlap(earlier, later):
                wrong = f"{earlier} is there twice at the same time; keep one, or let it end before the other begins"
            elif {later.kind, earlier.kind} == {"slow_link", "flapping_link"} and later.link == earlier.link:
                wrong = f"{earlier} and {later} change one link; keep one"
            else:
                continue
            raise ScenarioError(f"incident[{j}] and incident[{i}] exclude each other: {wrong} (at $.incident[{i}])")


def _hidden(first: Incident, second: Incident) -> bool:
    hanging, slow = (first, second) if first.hangs else (second, first)
    return slow.since >= hanging.since


def _overlap(first: Incident, second: Incident) -> bool:
    return first.since < second.until and second.since < first.until
