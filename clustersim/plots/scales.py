"""Units of an axis, and the colours of a load."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.colors import Colormap


LOAD_STOPS = ("#E1E4E8", "#FBE3A0", "#F2B134", "#DD6B12", "#A82A10", "#5C0A14")
"""Link load from none, grey, to the most; lightness falls all the way, so the order survives in print."""


def load_map() -> Colormap:
    """Colours of a share of a link's line rate, 0 to 1."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("load", LOAD_STOPS)


def time_unit(seconds: float) -> tuple[float, str]:
    """What to multiply seconds by for an axis this long, and the unit."""
    return next((s, u) for s, u in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if seconds * s >= 2 or s == 1e6)


def byte_unit(nbytes: float) -> tuple[float, str]:
    """What to divide bytes by for an axis up to this many, and the unit."""
    return next(
        (float(2**p), u)
        for p, u in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B"))
        if nbytes >= 2**p or p == 0
    )
