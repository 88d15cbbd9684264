"""A parameter server beside a ring: one grows with the number of devices, the other does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clustersim.app.plots.drawing import Axes, Figure
from clustersim.app.plots.lines import lines

_WORDS = {
    "parameter_server": "parameter server",
    "sequential": "one after the other",
    "direct": "everyone to everyone",
    "ring_unsplit": "unsplit ring",
}


def exchange_times(
    rows: Sequence[Mapping[str, Any]],
    *,
    nbytes: float | None = None,
    bandwidth: float | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Figure:
    """How long an exchange of gradients takes, over the number of devices, a curve for each way.

    Parameters
    ----------
    rows : of :func:`clustersim.studies.what_if.exchange.exchanges`. nbytes [bytes], bandwidth [bytes/s] of a device's
        link: given both, the formulas for a server, 2 N Z / B, and a ring, 2 (N-1)/N Z / B, are drawn as well.
    """
    from clustersim.studies.what_if.exchange import SERVER  # the engine is not needed to draw other pictures

    hows = list(dict.fromkeys(row["how"] for row in rows))
    curves = {
        _WORDS.get(how, how): (
            [r["n"] for r in rows if r["how"] == how],
            [r["seconds"] for r in rows if r["how"] == how],
        )
        for how in hows
    }
    laws = {}
    if nbytes and bandwidth:
        n = np.arange(2, max(int(row["n"]) for row in rows) + 1)
        shard_s = nbytes / bandwidth
        laws = {"2 N Z / B": (n, 2 * n * shard_s)} if SERVER in hows else {}
        laws |= {"2 (N-1)/N Z / B": (n, 2 * (n - 1) / n * shard_s)} if "ring" in hows else {}
    return lines(curves, x="devices N", y="time of an exchange [s]", laws=laws, title=title, ax=ax)
