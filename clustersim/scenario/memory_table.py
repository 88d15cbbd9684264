"""Who keeps what in memory: one scenario part by part and stage by stage, or every strategy beside it."""

from __future__ import annotations

from clustersim.errors import ClusterSimError
from clustersim.memory_use import MemoryUse
from clustersim.scenario import load
from clustersim.scenario.comparison import OWN, forms, scenario_of, told
from clustersim.scenario.held import Held, held
from clustersim.scenario.reading import Changes
from clustersim.texts import Plain

MOST = 1 << 20
"""Micro-batches beyond this are not looked for."""
FIGURES = (
    "peak", "allocated_bytes", "reserved_bytes", "shown_bytes", "total_bytes", "model_states_bytes", "saving", "fits",
    "largest_micro_batch",
)  # fmt: skip


def table(path: str, changes: Changes | None = None, *, every: bool = False) -> list[Plain]:
    """A row for the scenario as it is written, and with ``every`` one for each other strategy, or way to split it.

    Parameters
    ----------
    path, changes : as for :func:`clustersim.scenario.load`.

    Returns
    -------
    list of dict: ``strategy``, ``variant``, ``device``, ``device_bytes``; ``largest``, each part's own maximum
    [bytes], and ``at_peak``, the parts at the fullest moment; ``peak`` (its name), ``allocated_bytes``,
    ``total_bytes`` (with the driver's context), ``reserved_bytes`` (by the allocator, roughly) and ``shown_bytes`` (by
    nvidia-smi, roughly), ``model_states_bytes``, ``saving`` (one GPU's model states over these),
    ``fits`` and ``largest_micro_batch`` (0 if not even one sample fits). Of a split model these are of the stage that
    holds most, ``stage``, and ``stages`` has ``peak``, ``at_peak``, ``total_bytes`` and ``fits`` of each. Strategies
    that cannot run have ``reason`` and None.

    Raises :class:`ScenarioError` for a scenario that cannot be read.
    """
    own = load(path, changes)
    rows = [_row(held(own), own.file.strategy["kind"], OWN)]
    for form in forms(own) if every else ():
        if form.own:
            continue
        try:
            rows.append(_row(held(scenario_of(own, form)), form.kind, form.variant))
        except ClusterSimError as error:
            row = {"strategy": form.kind, "variant": form.variant, "reason": told(str(error))}
            rows.append(row | dict.fromkeys(FIGURES))
    return rows


def _row(found: Held, kind: str, variant: str) -> Plain:
    use, card = found.use, found.card
    states = found.whole().model_states
    split = found.split
    return {
        "strategy": kind,
        "variant": variant,
        "device": card.name,
        "device_bytes": card.memory_bytes,
        "largest": use.parts(),
        **_at_peak(use),
        "allocated_bytes": use.allocated,
        "reserved_bytes": use.reserved,
        "shown_bytes": use.shown,
        "model_states_bytes": use.model_states,
        "saving": states / use.model_states if use.model_states else None,
        "fits": use.fits(card).ok,
        "largest_micro_batch": largest_micro_batch(found),
        "stage": None if split is None else split.worst,
        "stages": [] if split is None else [_at_peak(one) | {"fits": one.fits(card).ok} for one in split.memory],
        "reason": "",
    }


def _at_peak(use: MemoryUse) -> Plain:
    return {"peak": use.peak, "at_peak": use.at_peak(), "total_bytes": use.total}


def largest_micro_batch(found: Held) -> int:
    """The largest ``micro_batch_size`` whose step fits on the card, everything else as written; 0 if none does."""
    card = found.card

    def fits(size: int) -> bool:
        return found.resized(size).fits(card).ok

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
