"""What the commands that draw share: writing a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from clustersim.core.outputs import fresh, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_picture(figure: Figure, path: Path, dpi: int = 180) -> str:
    """Write a figure, whole or not at all; returns the line that says so. Raises :class:`ClusterSimError`."""
    from clustersim.app import plots

    with writing(path), fresh(path) as temporary:
        plots.save(figure, temporary, dpi)
    return f"wrote {path}: {plots.alt_text(figure)}"
