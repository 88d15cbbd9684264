"""``[[incident]]`` of a scenario: something that goes wrong at one place of a run, and from when to when.

Kinds are a table: where one strikes, what says how much, and what it does to the run. Those that slow a run down are
played by what the engine has for slow GPUs, slow hosts and links that change
(:mod:`clustersim.scenario.run.incidents`); those that stop it end in a :class:`clustersim.engine.hang.Hang`; those that
a job begins with change the machine before anything is planned (:mod:`clustersim.scenario.run.misplaced`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import data_table
from clustersim.core.units import Seconds

KindName = Literal[
    "slow_gpu",
    "hot_gpu",
    "ecc_stall",
    "slow_host",
    "slow_data",
    "garbage_collection",
    "blocking_checkpoint",
    "slow_link",
    "flapping_link",
    "congestion",
    "lost_nic",
    "wrong_rail",
    "far_nic",
    "gdr_off",
    "other_rack",
    "dead_link",
    "dead_rank",
    "stopped_rank",
    "stuck_kernel",
    "stuck_message",
    "missing_call",
    "other_kind",
    "other_size",
    "other_type",
    "other_order",
    "other_group",
    "uneven_batches",
]


class IncidentKind(msgspec.Struct, frozen=True):
    """One kind: a row of ``data/incidents.toml``.

    Parameters
    ----------
    does : ``slows`` the run from a moment on, ``hangs`` it at a moment, or is there from the ``start``, before anything
        is planned. words : what it is.
    look_at : what to look at where it is suspected; ``look_at_on_cpu`` where no GPU is, and ``look_at_on_amd`` at AMD's
        GPUs, where that is something else.
    where : the field that says where it strikes; empty: the whole job. measures, optional : fields that say how much,
        those that must be there and those that may.
    widely : it has no place that files could name: the whole job, or a network that all share.
    """

    does: Literal["slows", "hangs", "start"]
    words: str
    look_at: str
    look_at_on_cpu: str = ""
    look_at_on_amd: str = ""
    where: str = ""
    measures: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    widely: bool = False

    @property
    def hangs(self) -> bool:
        """Whether the run cannot go on."""
        return self.does == "hangs"


KINDS = msgspec.convert(data_table("incidents"), dict[str, IncidentKind])
"""Every kind of incident."""

PLACES = ("rank", "node", "link")
MEASURES = ("slowdown", "pause", "left", "lasts", "every", "interval", "other")


class Incident(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[[incident]]``: something that goes wrong at one place of a run.

    Parameters
    ----------
    kind : what goes wrong: the run slows down (``slow_gpu`` to ``congestion``), was set up wrongly (``lost_nic`` to
        ``other_rack``), or hangs (all others).
    rank : of a GPU or a process. node : a machine, counted from 0. link : a vertex (``"node0/nic0"``: all its links) or
        links, as ``match`` of ``cluster.changes`` names them. other : of ``wrong_rail``, the NIC it is swapped with.
    at : since when, of the run; from its beginning when absent. A kind that hangs needs it: what the rank does then is
        what goes wrong.
    lasts : how long; to the end of the run when absent. Of ``flapping_link`` how long it is down each time, of
        ``hot_gpu`` how long it gets hotter.
    slowdown : how many times as long kernels take. pause : how much longer each batch takes to load, or how long a
        rank stands still. interval : steps from one pause to the next. left : share of the bandwidth that is left, of
        ``flapping_link`` while it is down. every : after how long a flap comes back.
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
    interval: Annotated[int, Meta(ge=1)] | None = None
    other: str | None = None

    def __post_init__(self) -> None:
        row = KINDS[self.kind]
        if row.where and getattr(self, row.where) is None:
            raise ValueError(f'an incident of kind "{self.kind}" says where: {row.where} = ...')
        allowed = {row.where, *row.measures, *row.optional} - {""}
        for name in (*PLACES, *MEASURES):
            if getattr(self, name) is not None and name not in allowed:
                raise ValueError(
                    f'an incident of kind "{self.kind}" has no {name}; it has {", ".join(sorted(allowed)) or "at"}'
                )
        for name in row.measures:
            if getattr(self, name) is None:
                raise ValueError(f'an incident of kind "{self.kind}" says how much: {name} = ...')
        if row.does == "start" and self.at is not None:
            raise ValueError(f'an incident of kind "{self.kind}" is there from the start of the run; leave out at')
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
        field = KINDS[self.kind].where
        return f"{field} {getattr(self, field)}" if field else "the whole job"

    @property
    def since(self) -> float:
        """When it begins [s]."""
        return float(self.at or 0.0)

    @property
    def until(self) -> float:
        """When it ends [s]; infinite where it stays. A link flaps, and a GPU that got hot is hot, to the end."""
        stays = self.lasts is None or self.every is not None or self.kind == "hot_gpu"
        return float("inf") if stays else self.since + float(self.lasts or 0.0)

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
            elif later.kind != earlier.kind and later.link == earlier.link and _go_on_with(earlier, later):
                wrong = f"{earlier} and {later} change one link; keep one"
            else:
                continue
            raise ScenarioError(f"incident[{j}] and incident[{i}] exclude each other: {wrong} (at $.incident[{i}])")


def _hidden(first: Incident, second: Incident) -> bool:
    hanging, slow = (first, second) if first.hangs else (second, first)
    return slow.since >= hanging.since and KINDS[slow.kind].does != "start"


def _go_on_with(*incidents: Incident) -> bool:
    """Whether all are of links, and none hangs the run."""
    return all(incident.link is not None and not incident.hangs for incident in incidents)


def _overlap(first: Incident, second: Incident) -> bool:
    return first.since < second.until and second.since < first.until
