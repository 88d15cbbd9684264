"""What a pipeline's stage times mean, in sentences: the slowest stage by name, and what the schedule itself costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clustersim.analysis.pipeline import PARTS, StageTime
from clustersim.units import format_time

SLOW = 1.05
"""A stage that takes this many times the others' median is named as slow."""
LITTLE = 0.01
"""Shares of a step below this are not told."""


def slowest(rows: Sequence[StageTime]) -> tuple[int, float, float]:
    """The stage with the most work, and how many times the others' median its forward and its backward take."""
    if len(rows) < 2:
        return (rows[0].stage, 1.0, 1.0) if rows else (-1, 1.0, 1.0)
    worst = max(rows, key=lambda row: row.forward + row.backward)
    others = [row for row in rows if row is not worst]
    forward, backward = (float(np.median([getattr(r, name) for r in others])) for name in ("forward", "backward"))
    return worst.stage, worst.forward / (forward or 1.0), worst.backward / (backward or 1.0)


def sentences(rows: Sequence[StageTime]) -> list[str]:
    """Why the stages idle, the largest cause first."""
    if not rows:
        return []
    stage, forward, backward = slowest(rows)
    worst = next(row for row in rows if row.stage == stage)
    others = [row for row in rows if row is not worst]
    mid = float(np.median([row.forward + row.backward for row in others])) if others else 0.0
    share = {
        name: float(np.mean([getattr(row, name) / row.window for row in others or rows])) for name in ("idle", *PARTS)
    }
    told = [_slow(worst, mid, forward, backward, share)] if others else []
    bubble = share["fill"] + share["drain"] + share["gaps"]
    parts = [f"{name} {share[name]:.1%}" for name in ("fill", "drain", "gaps") if share[name] > LITTLE]
    told.append(
        f"this schedule leaves {bubble:.1%} of a step idle with equal stages too ({', '.join(parts) or 'all small'}); "
        "more micro-batches make it a smaller share"
    )
    if share["other"] > LITTLE:
        told.append(f"{share['other']:.1%} is uneven time of single actions, transfers and the host between actions")
    if share["outside"] > LITTLE:
        told.append(f"{share['outside']:.1%} is before the first or after the last action: gradients, optimizer, host")
    return told


def _slow(worst: StageTime, mid: float, forward: float, backward: float, share: dict[str, float]) -> str:
    work = worst.forward + worst.backward
    if mid <= 0 or work < SLOW * mid:
        return f"stages take the same time within {work / mid - 1 if mid > 0 else 0:.1%}: no stage waits for a slow one"
    return (
        f"stage {worst.stage} is the slowest: its forward and backward take {forward:.2f} and {backward:.2f} times the "
        f"others' ({format_time(work)} against {format_time(mid)} a micro-batch); the others idle {share['idle']:.1%} "
        f"of a step, {share['imbalance']:.1%} of a step only because they wait for stage {worst.stage}"
    )
