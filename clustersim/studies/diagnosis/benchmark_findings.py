"""What times of single collectives say: NCCL's inspector while the job ran, nccl-tests before the fault and now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from clustersim.core.errors import few
from clustersim.core.units import format_time
from clustersim.files.traces import Sample, Samples
from clustersim.studies.diagnosis.suspects import (
    ALMOST_NEVER,
    LATE,
    LINKS_SLOW,
    NOTHING,
    PARTLY,
    RANK_SLOW,
    SELDOM,
    STARTING,
    SURE,
    UNLIKELY,
    Finding,
    Site,
    Suspect,
    finding,
    hangs,
)

LONGER = 0.06
"""Share by which a benchmark's largest message takes longer than before."""
SKEWED = 3.0
"""How many times its usual skew a collective has that a late rank held up."""
HELD = 0.3
"""Share of the usual time of a collective that a late rank adds at least."""
HELD_UP = 3
"""Collectives that one rank must have held up, and the share of those that somebody did."""
MOSTLY = 0.6


def of_tests(tables: Sequence[Samples], suspects: Sequence[Suspect]) -> Iterator[Finding]:
    """What a benchmark of now says beside one from ``before``, by the name of its file."""
    rows = [row for table in tables for row in table.rows if "inspector" not in row.platform]
    before = {_key(row): row.seconds for row in rows if _is_before(row)}
    now = {_key(row): row.seconds for row in rows if not _is_before(row)}
    both = sorted(before.keys() & now.keys(), key=lambda key: key[1])
    if not both:
        return
    ratio = now[both[-1]] / before[both[-1]]
    slower = ratio > 1 + LONGER
    network = STARTING | LINKS_SLOW
    change = f"takes {ratio - 1:.0%} longer than before" if slower else "takes as long as before"
    text = f"tests: {both[-1][0]} of the largest size {change}"

    def likely(suspect: Suspect) -> float:
        """P(this benchmark | suspect)."""
        if suspect.kind in network:
            hidden = SURE if suspect.kind in ("wrong_rail", "other_rack", "flapping_link") else SELDOM
            return SURE if slower else hidden
        return UNLIKELY if slower else SURE

    yield finding("tests", text, suspects, likely)


def _key(row: Sample) -> tuple[str, float, int]:
    return row.kind, row.nbytes, row.ranks


def _is_before(row: Sample) -> bool:
    return "before" in Path(row.source.partition(":")[0]).name


def of_inspector(samples: Samples, suspects: Sequence[Suspect], site: Site) -> Iterator[Finding]:
    """What the inspector says: who came last where a collective was held up, and by how much."""
    rows = [row for row in samples.rows if row.last >= 0 and row.skew == row.skew]
    if len(rows) < HELD_UP:
        return
    usual = float(np.median(sorted(row.skew for row in rows)[: max(1, len(rows) // 2)]))
    least = float(np.median([row.seconds for row in rows])) * HELD
    held_up = [row for row in rows if row.skew > max(SKEWED * usual, usual + least)]
    count = Counter(row.last for row in held_up)
    if len(held_up) < HELD_UP:
        yield _nobody_late(suspects)
        return
    times = max(count.values())
    by_host = Counter(site.hosts.get(row.last, "?") for row in held_up)
    host, together = by_host.most_common(1)[0]
    alone = times / len(held_up)
    if alone < MOSTLY and together < 0.9 * len(held_up):
        yield _nobody_late(suspects)
        return
    seen = {row.last for row in rows}
    worst = max(row.skew for row in held_up)
    text = f"inspector: {few(sorted(count), 6)} came last to {len(held_up)} collectives, by up to {format_time(worst)}"

    def likely(suspect: Suspect) -> float:
        """P(these late ranks | suspect)."""
        if suspect.kind in RANK_SLOW | LATE:
            share = count[-1 if suspect.rank is None else suspect.rank] / len(held_up)
            unseen = UNLIKELY if suspect.rank in seen else SELDOM
            return max(unseen / max(1, site.ranks), share**2)
        if suspect.kind == "slow_host":
            return (PARTLY if alone > MOSTLY else SURE) if suspect.host == host else ALMOST_NEVER
        return UNLIKELY if suspect.kind == NOTHING or hangs(suspect) else SELDOM

    yield finding("inspector", text, suspects, likely)


def _nobody_late(suspects: Sequence[Suspect]) -> Finding:
    def likely(suspect: Suspect) -> float:
        """P(nobody late | suspect)."""
        return PARTLY if suspect.kind in RANK_SLOW | LATE | {"slow_host"} else SURE

    return finding("inspector", "inspector: no rank alone holds up others", suspects, likely)
