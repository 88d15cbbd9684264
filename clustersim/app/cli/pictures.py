"""What the commands that draw share: a picture's path, and writing it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from clustersim.core.errors import ClusterSimError
from clustersim.core.outputs import fresh, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")


def picture_path(path: Path) -> Path:
    """A path a picture can be written to. Raises :class:`ClusterSimError` for another suffix, or no folder."""
    if path.suffix not in PICTURES:
        raise ClusterSimError(f"{path}: a picture is a .png, .svg or .pdf, not {path.suffix or 'nothing'!r}")
    if not path.parent.is_dir():
        raise ClusterSimError(f"{path}: cannot be written: there is no folder {str(path.parent)!r}")
    return path


def write_picture(figure: Figure, path: Path, dpi: int = 180) -> str:
    """Write a figure, whole or not at all; returns the line that says so. Raises :class:`ClusterSimError`."""
    from clustersim.app import plots

    with writing(path), fresh(picture_path(path)) as temporary:
        plots.save(figure, temporary, dpi)
    return f"wrote {path}: {plots.alt_text(figure)}"
