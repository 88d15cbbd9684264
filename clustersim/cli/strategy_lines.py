"""The figures only one strategy has, as lines under a result: staleness, servers, phases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clustersim.units import format_bytes, format_time


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Lines for people from what a strategy's report holds; what is not known here is left to ``--json``."""
    for phase in figures.get("phases", ()):
        yield (
            f"phase {phase['phase']}: {format_time(phase['seconds'])}, {phase['bound']}-bound, GPUs idle for "
            f"{phase['idle']:.0%} of it"
        )
    if any(figures.get("staleness", ())):
        reads = ", ".join(f"{count} at {steps}" for steps, count in figures["staleness"].items())
        yield f"staleness of reads [steps]: {reads}; {figures['staleness_mean']:.2f} on average"
    if rates := figures.get("samples_per_s_by_worker"):
        yield f"samples per second of one GPU, each at its own pace: {min(rates):,.1f} to {max(rates):,.1f}"
    for server in figures.get("servers", ()):
        links = max(server.get("link_use_in", 0.0), server.get("link_use_out", 0.0))
        yield (
            f"server at {server['vertex']}: {format_bytes(server['bytes_in'])} in and "
            f"{format_bytes(server['bytes_out'])} out a step, {server['busy']:.0%} busy with them, its busiest link "
            f"used at {links:.0%}"
        )
