"""Causes of one kind added up: those that the same remedy makes less, and what that remedy would save.

A step's transfers limited by their kernels may be charged to four causes, dispatch and combine, forward and backward:
what is to be done about them is one thing. Links of one class are widened together, whether transfers have them alone
or share them; calls, launches and idle devices are the host's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from clustersim.core.errors import few
from clustersim.core.timeline import OpInfo
from clustersim.explain.booking import Charge
from clustersim.explain.dimensions import dimension
from clustersim.explain.knobs import FACTOR, KNOB_NAMED, WIDER
from clustersim.explain.stalls import Causes, costliest
from clustersim.explain.transfers import CHANGED, OF_LINKS, sort_of
from clustersim.explain.whatif import link_kinds_of, whatif

NAMED = 3
"""Subjects of a kind that are named; of more, their number is told."""
LAUNCHING = frozenset({"calls", "launch", "idle device"})
"""Causes that a faster host, or fewer launches, make less."""
APART = frozenset({"host"})
"""Causes whose subjects need each its own remedy: input is loaded elsewhere than an optimizer runs."""


@dataclass(frozen=True, eq=False)
class CauseKind:
    """``charges`` that one remedy makes less, the costliest first: their ``share`` of the step together, and the
    ``knob`` of :data:`clustersim.explain.knobs.KNOBS` that turns that remedy, empty where none does; ``link_kinds`` of
    the machine."""

    charges: Sequence[Charge]
    share: float
    knob: str
    link_kinds: Collection[str] = ()

    @property
    def first(self) -> Charge:
        """The costliest."""
        return self.charges[0]

    @property
    def remedy(self) -> str:
        """The knob in words, with how far it is turned."""
        return KNOB_NAMED[self.knob].words(FACTOR, self.link_kinds)


@dataclass(frozen=True, eq=False)
class WeighedKind:
    """A ``kind``, and what share of a step its remedy ``saves``; None where none can be tried."""

    kind: CauseKind
    saves: float | None

    @property
    def share(self) -> float:
        """What can be had back of what the kind costs: at most that, and no more than if its time shrank as its knob
        makes it, by ``1 - 1 / FACTOR``."""
        if self.saves is None:
            return self.kind.share
        return min(self.kind.share, max(0.0, self.saves) / (1.0 - 1.0 / FACTOR))


def cause_kinds(causes: Causes) -> list[CauseKind]:
    """Every charge in a kind, the costliest kind first."""
    charges_of: dict[tuple[str, ...], list[Charge]] = {}
    knob_of: dict[tuple[str, ...], str] = {}
    for charge in costliest(causes):
        key, knob = _remedy(causes, charge)
        charges_of.setdefault(key, []).append(charge)
        knob_of[key] = knob
    links = link_kinds_of(causes.timeline)
    kinds = [
        CauseKind(charges, sum(map(causes.share, charges)), knob_of[key], links) for key, charges in charges_of.items()
    ]
    return sorted(kinds, key=lambda kind: -kind.share)


def weighed(causes: Causes, kinds: Sequence[CauseKind], savings: Mapping[str, float]) -> list[WeighedKind]:
    """Kinds whose remedy had to be weighed to say which can be had back most of: that one first, then those that cost
    more and can be had back less.

    savings : by knob, the share of a step that it saves, at :data:`FACTOR`. What is not in them is bounded here.
    """
    tried: list[WeighedKind] = []
    for kind in kinds:
        if tried and max(row.share for row in tried) >= kind.share:
            break
        tried.append(WeighedKind(kind, _saving(causes, kind, savings)))
    best = max(tried, key=lambda row: row.share, default=None)
    return [] if best is None else [best, *(row for row in tried if row is not best)]


def subjects(causes: Causes, kind: CauseKind) -> str:
    """What a kind's charges name, in a few words."""
    if kind.knob in WIDER or kind.first.cause == CHANGED:
        return _links(causes, kind)
    names = list(dict.fromkeys(charge.subject for charge in kind.charges))
    moved = _moved(causes, kind.first)
    if kind.first.cause == "kernels" and len(names) > 1 and moved is not None:
        return f"{len(names)} sorts of {moved.kind} over {dimension(moved)} ({few(names, 1)}) together"
    return few(names, NAMED)


def _links(causes: Causes, kind: CauseKind) -> str:
    """One link by its own name, and whether others are like it."""
    use = causes.timeline.links
    names = {charge.subject for charge in kind.charges}
    link = kind.first.link
    own_name = use.link_names[link] if use is not None and link >= 0 else kind.first.subject
    if kind.first.cause == CHANGED and use is not None:
        alike = (sort_of(use.link_names[int(changing)]) for changing in use.changing)
        several = sum(name in names for name in alike) > 1
    else:
        several = len(names) > 1 or "#" in kind.first.subject
    return f"{'links such as' if several else 'the link'} {own_name}"


def _remedy(causes: Causes, charge: Charge) -> tuple[tuple[str, ...], str]:
    """What distinguishes a charge's kind from others, and the knob of its remedy."""
    if charge.cause in OF_LINKS:
        return _wider(causes, charge)
    moved = _moved(causes, charge)
    if charge.cause == "kernels" and moved is not None:
        return ("kernels", moved.kind, dimension(moved)), ""
    if charge.cause == "latency":
        return ("latency",), "latency"
    if charge.cause in LAUNCHING and not causes.on_cpu:
        return ("host speed",), "host speed"
    if charge.cause in APART:
        return (charge.cause, charge.subject), ""
    return (charge.cause,), ""


def _moved(causes: Causes, charge: Charge) -> OpInfo | None:
    """The op whose transfer is charged: of the holder, where that is one."""
    op = charge.holder_op if charge.holder_op in causes.facts else charge.op
    return causes.timeline.ops[op] if op >= 0 else None


def _wider(causes: Causes, charge: Charge) -> tuple[tuple[str, ...], str]:
    """Links that one knob widens are one kind; a link whose rate changed in the run needs another remedy."""
    use = causes.timeline.links
    own = (charge.cause, charge.subject), ""
    if use is None or charge.link < 0 or charge.link in use.changing or not len(use.link_kinds):
        return own
    link_kind = use.link_kinds[charge.link]
    link_name = use.link_names[charge.link]
    knobs = (knob for knob, widens in WIDER.items() if widens(link_kind, link_name))
    knob = next(knobs, "")
    return (("link", knob), knob) if knob else own


def _saving(causes: Causes, kind: CauseKind, savings: Mapping[str, float]) -> float | None:
    """What a kind's remedy saves of a step; None where nothing turns it, or the run was measured."""
    if not kind.knob or kind.knob in savings:
        return savings.get(kind.knob)
    if causes.timeline.source != "simulated":
        return None
    return float(whatif(causes.timeline, factor=FACTOR, knobs=(kind.knob,))["saving"][0])
