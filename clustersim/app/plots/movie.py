"""Pictures that move, for a notebook: a film is any figure function drawn at one moment after the other."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clustersim.app.plots.animation import Film, film_frame
from clustersim.app.plots.drawing import Figure, image
from clustersim.app.plots.pipeline import pipeline_frame, pipeline_grid, usual_step
from clustersim.core.errors import ProgramError
from clustersim.core.outputs import fresh
from clustersim.core.timeline import Timeline
from clustersim.core.units import format_time

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

FPS = 12
FRAMES_A_STEP = 9
FRAMES = 36
HOLD = 14
"""Frames a second, frames for one ring step, frames of a pipeline's step, frames that the last moment stands still."""
DPI = 90


@dataclass(frozen=True)
class Movie:
    """A ``gif`` and what it shows, ``alt``."""

    gif: bytes = field(repr=False)
    alt: str

    def _repr_html_(self) -> str:
        return image(self.gif, "gif", self.alt)

    def save(self, path: str | Path) -> Path:
        """Write the GIF; returns its path."""
        with fresh(Path(path)) as temporary:
            temporary.write_bytes(self.gif)
        return Path(path)


def movie(frame: Callable[[float], Figure], moments: Sequence[float], alt: str) -> Movie:
    """The figures that ``frame`` draws at these moments, one after the other, for ever; the last one stands still.

    All figures must be of one size. Raises :class:`ProgramError` without moments.
    """
    if not len(moments):
        raise ProgramError("a film needs moments to show")
    from PIL import Image

    frames = [_pixels(frame(float(moment))) for moment in moments]
    palette = _palette(frames)
    few = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [1000 // FPS] * (len(few) - 1) + [1000 * HOLD // FPS]
    drawn = io.BytesIO()
    few[0].save(drawn, format="gif", save_all=True, append_images=few[1:], duration=times, loop=0)
    return Movie(drawn.getvalue(), alt)


def _pixels(figure: Figure) -> Pixels:
    """Drawn once: saving a figure would lay it out and draw it a second time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    figure.set_dpi(DPI)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def _palette(frames: Sequence[Pixels]) -> Pixels:
    """One set of colours for the whole film, of its first, middle and last frame: nothing flickers."""
    from PIL import Image

    width, height = frames[0].size
    sheet = Image.new("RGB", (width, 3 * height))
    for k, frame in enumerate((frames[0], frames[len(frames) // 2], frames[-1])):
        sheet.paste(frame, (0, k * height))
    return sheet.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)


def ring_movie(film: Film, title: str | None = None) -> Movie:
    """The film of :func:`clustersim.app.plots.animation.ring_run`, shown where it is a notebook cell's last value."""
    meaning = "pieces travel from each GPU to the next, first to be added up, then to be passed on"
    return _flights(film, title, f"a ring all-reduce of {film.n} GPUs", meaning, 2 * (film.n - 1) * FRAMES_A_STEP + 1)


def swap_movie(film: Film, title: str | None = None) -> Movie:
    """The film of :func:`clustersim.app.plots.animation.swap_run`: everybody has a piece for everybody."""
    meaning = "every GPU has a piece for every other one, and all travel at once"
    return _flights(film, title, f"an all-to-all of {film.n} GPUs", meaning, FRAMES)


def _flights(film: Film, title: str | None, subject: str, meaning: str, frames: int) -> Movie:
    last = float(film.end.max())
    moments = np.linspace(0.0, last, frames).tolist()
    alt = f"A film of {subject}, {format_time(last)} long: {meaning}."
    return movie(lambda time: film_frame(film, time, title), moments, alt)


def pipeline_movie(timeline: Timeline, window: tuple[float, float] | None = None, title: str | None = None) -> Movie:
    """The grid of :func:`clustersim.app.plots.pipeline_grid` as it comes about; idle shares are those until then."""
    begin, end = window or usual_step(timeline)
    alt = str(pipeline_grid(timeline, (begin, end)).get_label())
    moments = np.linspace(begin, end, FRAMES).tolist()
    return movie(lambda time: pipeline_frame(timeline, (begin, end), time, title), moments, f"A film. {alt}")
