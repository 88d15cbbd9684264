"""What dumps of Flight Recorder, watchdogs and launchers say of a run that hangs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from clustersim.core.errors import few
from clustersim.files.traces.told import CollectiveFault, HangReport
from clustersim.studies.diagnosis.suspects import (
    ALMOST_NEVER,
    PARTLY,
    SELDOM,
    SURE,
    UNLIKELY,
    Finding,
    Site,
    Suspect,
    finding,
    hangs,
)

SIGABRT = -6
"""How a process ends whose own watchdog ends it."""
SIGTERM = -15
"""How torchrun ends the others."""
HALF = 0.5
"""How likely a rank whose GPU is stuck has nothing pending, as one that calls nothing has."""
OTHERWISE = {
    "kind": "other_kind",
    "size": "other_size",
    "type": "other_type",
    "order": "other_order",
    "skipped": "missing_call",
    "extra": "other_kind",
}
LONGEST = 600
"""Characters of what dumps say: both calls that differ are in it."""
BARRIER = re.compile(r"barrier|of \[\[1\]\]|elements: 1 in")
"""A call of one element: a barrier of NCCL's."""
SHOWN = 6


def of_dumps(report: HangReport, suspects: Sequence[Suspect], site: Site) -> Iterator[Finding]:
    """What dumps say: the first fault is the cause, what follows from it is not asked."""
    if not report.faults:
        text = "all that was called has ended: nothing hangs"
        yield finding("dumps", text, suspects, lambda s: UNLIKELY if hangs(s) else SURE)
        return
    # Who waits alone in another group is waited for, and waits: both are told, and it is the cause.
    alone = (fault for fault in report.faults if fault.elsewhere and len(fault.look_at) == 1)
    fault = next(alone, report.faults[0])
    unseen = frozenset(fault.no_dump) or frozenset(range(site.ranks)) - frozenset(report.ranks)
    text = fault.text if len(fault.text) < LONGEST else fault.text[: LONGEST - 3] + "..."

    def likely(suspect: Suspect) -> float:
        """P(these dumps | suspect)."""
        if not hangs(suspect):
            return ALMOST_NEVER
        return _of_fault(fault, suspect, unseen, site)

    yield finding("dumps", text, suspects, likely)


def _of_fault(fault: CollectiveFault, suspect: Suspect, unseen: frozenset[int], site: Site) -> float:
    """How likely dumps show this fault, were a suspect to blame."""
    if fault.elsewhere and len(fault.look_at) == 1:
        return max(_named(suspect, fault, "other_group"), SELDOM * _named(suspect, fault, "missing_call"))
    if fault.cause in ("never_called", "no_peer"):
        # A process that waits for its GPU at the end of a step calls nothing either.
        waits = SELDOM * _named(suspect, fault, "stuck_kernel")
        return max(waits, _named(suspect, fault, "missing_call"))
    if fault.cause == "differs":
        barrier = fault.differs_in in ("kind", "size", "skipped") and BARRIER.search(fault.called)
        return _named(suspect, fault, "uneven_batches" if barrier else OTHERWISE[fault.differs_in or "size"])
    if fault.called and fault.cause == "stuck_together":
        return _of_message(suspect, fault)
    if fault.cause == "not_started":
        return _named(suspect, fault, "stuck_kernel")
    if fault.cause == "not_ended":
        return _named(suspect, fault, "stuck_kernel") if suspect.kind != "dead_link" else PARTLY
    if fault.cause == "no_dump" and fault.called and suspect.kind == "stuck_message":
        return PARTLY if _sends(suspect, fault) else ALMOST_NEVER
    if fault.cause == "no_dump":
        return _of_unseen(suspect, unseen, site)
    if unseen:
        return _of_unseen(suspect, unseen, site)
    if suspect.kind in ("dead_link", "stuck_message"):
        return SELDOM  # a GPU inside NCCL's own kernel, or ranks that no dump names, look the same
    return UNLIKELY if suspect.kind in ("stuck_kernel", "stopped_rank") else ALMOST_NEVER


def _of_message(suspect: Suspect, fault: CollectiveFault) -> float:
    """Both ends of a message were called and none ended: named is who sends."""
    if suspect.kind == "stuck_message":
        return SURE if _sends(suspect, fault) else ALMOST_NEVER
    if suspect.kind == "stuck_kernel" and suspect.rank in fault.look_at:
        return UNLIKELY
    return SELDOM if suspect.kind == "dead_link" else ALMOST_NEVER


def _sends(suspect: Suspect, fault: CollectiveFault) -> bool:
    return fault.called == f"a message that rank {suspect.rank} sends"


def _named(suspect: Suspect, fault: CollectiveFault, kind: str) -> float:
    if suspect.kind != kind or (suspect.rank not in fault.look_at and suspect.rank is not None):
        return ALMOST_NEVER
    return SURE / max(1, len(fault.look_at))


def _of_unseen(suspect: Suspect, unseen: frozenset[int], site: Site) -> float:
    """Where all ranks whose dumps are here wait, and of others there is none: they cannot write one any more, or nobody
    collected it."""
    collected_badly = SELDOM if len(unseen) > 1 else UNLIKELY
    if suspect.kind == "dead_link":
        return collected_badly
    if suspect.rank not in unseen and suspect.rank is not None:
        return ALMOST_NEVER
    if suspect.kind == "stopped_rank":
        return SURE if len(unseen) == 1 else collected_badly
    if suspect.kind == "dead_rank":
        together = site.of_host(site.hosts.get(-1 if suspect.rank is None else suspect.rank))
        if together:
            return SURE if unseen == together else collected_badly if unseen >= together else ALMOST_NEVER
        return PARTLY
    return collected_badly


def of_watchdog(report: HangReport, suspects: Sequence[Suspect], site: Site) -> Iterator[Finding]:
    """What watchdogs say: who timed out, who was told to dump by others, who says nothing."""
    yield from _of_exits(report, suspects, site)
    if not report.ranks and not report.told_to_dump:
        return
    alive = frozenset(report.told_to_dump)
    silent = frozenset(range(site.ranks)) - frozenset(report.ranks) - alive
    differs = next((fault for fault in report.faults if fault.cause == "differs"), None)
    alone = next((fault for fault in report.faults if fault.elsewhere and len(fault.look_at) == 1), None)
    text = f"watchdog: rank(s) {few(report.ranks, SHOWN)} waited in vain"
    if alive:
        text += f"; rank(s) {few(sorted(alive), SHOWN)} did not, and wrote that others had"
    if silent:
        text += f"; rank(s) {few(sorted(silent), SHOWN)} wrote nothing"
    if differs:
        text += f"; rank(s) {few(differs.look_at, SHOWN)} called another {differs.differs_in or 'size'}"

    def likely(suspect: Suspect) -> float:
        """P(these lines of watchdogs | suspect)."""
        if not hangs(suspect):
            return ALMOST_NEVER
        if differs:
            return _differing(suspect, differs)
        if alone:
            return _named(suspect, alone, "other_group")
        if silent:
            return _of_silent(suspect, silent, site)
        if alive:
            # A host that waits for its GPU calls nothing either, from the end of a step on.
            share = {"missing_call": SURE, "stuck_kernel": HALF}.get(suspect.kind, ALMOST_NEVER)
            return share / len(alive) if suspect.rank in alive else ALMOST_NEVER
        # All waited: their GPUs or the network; a type is not in these lines, and a size of both orders is.
        waiting = ("stuck_kernel", "dead_link", "other_type", "stuck_message")
        return SURE if suspect.kind in waiting else UNLIKELY

    yield finding("watchdog", text, suspects, likely)


def _differing(suspect: Suspect, fault: CollectiveFault) -> float:
    """These lines have kind and elements of the first call that did not end: two that changed places look like one of
    another size or kind."""
    kinds = {OTHERWISE[fault.differs_in or "size"], "other_order"}
    if BARRIER.search(fault.called):
        kinds = {"uneven_batches"}
    if suspect.kind not in kinds or (suspect.rank is not None and suspect.rank not in fault.look_at):
        return ALMOST_NEVER
    return SURE / max(1, len(fault.look_at))


def _of_silent(suspect: Suspect, silent: frozenset[int], site: Site) -> float:
    """Ranks that write nothing: stopped, or ended with the others of their machine."""
    if suspect.rank not in silent:
        return ALMOST_NEVER
    if suspect.kind == "dead_rank":
        return SURE if silent == site.of_host(site.hosts.get(suspect.rank)) else PARTLY
    if suspect.kind == "stopped_rank":
        return SURE if len(silent) == 1 else UNLIKELY
    return UNLIKELY


def _of_exits(report: HangReport, suspects: Sequence[Suspect], site: Site) -> Iterator[Finding]:
    """Of each machine the process that ended first: by a signal it ended by itself; by its watchdog (SIGABRT) the job
    hung; by an exception it may have waited for another until a timeout raised it. torchrun ends those that follow."""
    if not report.exits:
        return
    own = [ended for ended in report.exits if ended.first and ended.code not in (0, SIGABRT, SIGTERM)]
    if own:
        ranks = [ended.rank for ended in own]
        killed = any(ended.code < 0 for ended in own)
        # Where nothing timed out, an exception that follows from another's fault is by chance this rank's.
        timed_out = bool(report.ranks or report.told_to_dump)
        otherwise = PARTLY if timed_out else UNLIKELY / max(1, site.ranks)
        text = f"launcher: rank(s) {few(ranks, SHOWN)} ended with exit code {own[0].code}, first of all"

        def likely(suspect: Suspect) -> float:
            """P(these ranks ended first | suspect)."""
            if suspect.kind == "dead_rank" and suspect.rank in ranks:
                return SURE / len(ranks)
            return ALMOST_NEVER if killed or not hangs(suspect) or suspect.kind == "dead_rank" else otherwise

        yield finding("launcher", text, suspects, likely)
        return
    reporting = {ended.host for ended in report.exits}
    acted = {ended.rank for ended in report.exits if ended.first and ended.code == SIGABRT}
    text = f"launcher of {few(sorted(reporting), SHOWN)}: no process ended by itself; watchdogs ended them"

    def by_itself(suspect: Suspect) -> float:
        """P(processes ended themselves | suspect)."""
        if suspect.kind == "stopped_rank" and suspect.rank in acted:
            return ALMOST_NEVER  # a process that stands still does not end itself
        if suspect.kind != "dead_rank":
            return SURE if hangs(suspect) else UNLIKELY
        host = site.hosts.get(-1 if suspect.rank is None else suspect.rank)
        return UNLIKELY if host in reporting or host is None else PARTLY

    yield finding("launcher", text, suspects, by_itself)
