"""A simulated step beside the one that its scenario's source has, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from clustersim.core.figures import FIGURES, value_text

if TYPE_CHECKING:
    from clustersim.scenario.result import Result
    from clustersim.scenario.result.trust import Trust

FREE = frozenset({"run.steps", "run.seed"})
"""Fields that may be changed, and it is still the published run."""


def beside_published(result: Result, trust: Trust) -> Iterator[str]:
    """A sentence for each figure that the source has: simulated, how far in time, and within which range of
    predictions of this kind; nothing where the scenario was changed, for then it is another run."""
    published = result.scenario.file.published
    if published is None or not result.scenario.changes.keys() <= FREE:
        return
    of_source = {
        "step_time_s": published.step_time,
        "mfu": published.mfu,
        "tokens_per_s_per_gpu": published.tokens_per_s_per_gpu,
    }
    rows = {figure.key: figure for figure in FIGURES}
    for key, value in of_source.items():
        simulated = result.summary.get(key)
        if value is None or simulated is None:
            continue
        real = float(value)
        off = real / simulated - 1.0 if key == "step_time_s" else simulated / real - 1.0
        figure = rows[key]
        differs = f"; of that run this file has otherwise: {published.differs}" if published.differs else ""
        longer = "longer" if off > 0 else "shorter"
        yield (
            f"published: {figure.label} {value_text(real, figure.unit)} ({published.source}), simulated "
            f"{value_text(simulated, figure.unit)}: the published step is {abs(off):.0%} {longer}, "
            f"{_within(off, trust)}{differs}"
        )


def _within(off: float, trust: Trust) -> str:
    """In which range of predictions a measured step lies, relative to the predicted one."""
    if abs(off) <= trust.p50:
        return f"within +-{trust.p50:.0%}, as half of such steps"
    if abs(off) <= trust.p90:
        return f"within +-{trust.p90:.0%}, as nine in ten of such steps"
    return f"beyond the +-{trust.p90:.0%} of nine in ten such steps"
