"""Pictures that move, for a notebook: the bytes of a GIF, and words for those who cannot see it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from clustersim.plots.animation import Film, ring_animation
from clustersim.plots.style import image
from clustersim.units import format_time


@dataclass(frozen=True)
class Movie:
    """A ``gif`` and what it shows, ``alt``."""

    gif: bytes
    alt: str

    def _repr_html_(self) -> str:
        return image(self.gif, "gif", self.alt)


def ring_movie(film: Film, title: str | None = None) -> Movie:
    """The film of :func:`clustersim.plots.animation.ring_run`, shown where it is a notebook cell's last value."""
    with tempfile.TemporaryDirectory() as folder:
        gif = ring_animation(film, Path(folder) / "ring.gif", title).read_bytes()
    alt = (
        f"A film of a ring all-reduce of {film.n} GPUs, {format_time(float(film.end.max()))} long: pieces travel from "
        "each GPU to the next, first to be added up, then to be passed on."
    )
    return Movie(gif, alt)
