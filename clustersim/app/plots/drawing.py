"""What all figures are made with: a page and its axes, titles and legends, words that stand in for a picture, files."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from html import escape
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from clustersim.app.plots.style import INK, QUIET
from clustersim.core.arrays import Floats
from clustersim.core.errors import ProgramError
from clustersim.core.texts import headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:  # matplotlib is loaded where something is drawn; whoever only speaks of its figures needs no more than names
    Axes = Figure = Any

WIDTH = 10.0
"""Inches of a figure: 90 dots an inch fill a README's column, and 9 points are read at ease there."""


PHONE = 4.8
"""Inches of a figure for a window of 390 pixels, at the same size of letters."""
_usual: ContextVar[float] = ContextVar("width", default=WIDTH)


@contextmanager
def narrow() -> Iterator[None]:
    """Figures made inside are as wide as a phone, for pages that show one of two pictures."""
    before = _usual.set(PHONE)
    try:
        yield
    finally:
        _usual.reset(before)


def is_narrow(figure: Figure) -> bool:
    """Whether a figure is as wide as a phone."""
    return bool(figure.get_size_inches()[0] <= PHONE)


def columns_of(figure: Figure, most: int) -> int:
    """How many entries of a legend are beside each other."""
    return 2 if is_narrow(figure) else most


def new_figure(height: float, width: float | None = None) -> Figure:
    """An empty figure that needs no display, laid out by its contents. Sizes in inches.

    A notebook shows it, with its words beside it, where it is a cell's last value.
    """
    return _shown_by_notebooks()(figsize=(_usual.get() if width is None else width, height), layout="constrained")


@cache
def _shown_by_notebooks() -> type[Figure]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import PlaceHolderLayoutEngine
    from matplotlib.text import Text
    from matplotlib.ticker import LogFormatterMathtext, NullFormatter

    class Picture(Figure):
        """Texts of a picture come from files: matplotlib must not read ``$`` in them as mathematics."""

        _laid_out = False
        """Whether its texts were told so when the layout was made, which saving does just before it draws."""

        def draw(self, renderer: Any) -> None:
            """Draw with texts as they stand; for a renderer that draws nothing only the layout is made."""
            for axis in (axis for axes in self.axes for axis in (axes.xaxis, axes.yaxis)):
                if isinstance(axis.get_major_formatter(), LogFormatterMathtext):  # which writes ``$10^3$``
                    axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
                    axis.set_minor_formatter(NullFormatter())
            with rc_context({"text.parse_math": False}):  # for labels of ticks, which are made while it is drawn
                engine = self.get_layout_engine()
                if not (self._laid_out and isinstance(engine, PlaceHolderLayoutEngine)):
                    for text in self.findobj(Text):
                        text.set_parse_math(False)
                self._laid_out = engine is not None and not _draws(renderer)
                if engine is None or _draws(renderer):
                    super().draw(renderer)
                elif self.axes:
                    with suppress(ValueError):  # as matplotlib does
                        engine.execute(self)

        def _repr_html_(self) -> str:
            return html(self)

    return Picture


def _draws(renderer: Any) -> bool:
    """Whether anything comes of what is drawn with it.

    Before matplotlib saves a figure it draws it for the layout alone, with functions that do nothing in the place of
    the renderer's methods: the layout needs no walk over the marks.
    """
    return isinstance(renderer.draw_path, MethodType)


def html(figure: Figure) -> str:
    """A figure as an HTML image that carries its pixels and its words."""
    drawn = io.BytesIO()
    _save_png(figure, drawn, dpi=144)
    return image(drawn.getvalue(), "png", alt_text(figure))


def image(data: bytes, kind: str, alt: str) -> str:
    """Bytes of a PNG or GIF as an HTML image with ``alt`` for those who cannot see it."""
    alt_text = escape(alt, quote=True)
    pixels = base64.b64encode(data).decode()
    return f'<img alt="{alt_text}" style="max-width:100%" src="data:image/{kind};base64,{pixels}">'


def plain_axes(axes: Axes, keep: tuple[str, ...] = ("bottom",)) -> None:
    """Take away every line that carries no information."""
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)
        spine.set_color(QUIET)
    axes.tick_params(colors=INK, labelsize=9, length=3, color=QUIET)
    if "left" not in keep:
        axes.tick_params(axis="y", length=0)


def draw_boxes(axes: Axes, across: Floats, upright: Floats, **look: Any) -> None:
    """Boxes as one mark, however many, in the order in which they are given; the axes' limits stay as they are.

    across, upright : from where to where each is, a row a box, in the axes' units. look : of a PolyCollection, one for
    all or one a box.
    """
    from matplotlib.collections import PathCollection, PolyCollection
    from matplotlib.path import Path

    left, right = across.T
    low, high = upright.T
    corners: Any = np.stack(
        [np.column_stack([left, left, right, right]), np.column_stack([low, high, high, low])], axis=2
    )
    if not look.get("hatch"):
        axes.add_collection(PolyCollection(corners, **look), autolim=False)
        return
    # A hatch is laid anew for each path: boxes that all have one are one path.
    closed = np.concatenate([corners, corners[:, :1]], axis=1)
    codes = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY] * len(closed)
    axes.add_collection(PathCollection([Path(closed.reshape(-1, 2), codes)], **look), autolim=False)


def percents(axis: Any) -> None:
    """Have the ticks of an axis in percent."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def colour_bar(figure: Figure, axes: Axes, colours: Any, words: str, size: float, **placing: Any) -> None:
    """What the ``colours`` of shares mean, beside the axes; ``size`` : of the figures [points]."""
    bar = figure.colorbar(colours, ax=axes, **placing)
    percents(bar.ax.xaxis if bar.orientation == "horizontal" else bar.ax.yaxis)
    bar.ax.tick_params(labelsize=size, color=QUIET, labelcolor=INK)
    bar.outline.set_visible(False)
    bar.set_label(words, fontsize=8.5, color=INK)


def drawn_on(ax: Axes | None, height: float, width: float | None = None) -> tuple[Figure, Axes]:
    """Where a picture of one axes is drawn: on the caller's, or on those of a new figure of so many inches."""
    if ax is not None:
        return ax.get_figure(root=True), ax  # type: ignore[return-value]
    figure = new_figure(height, width)
    return figure, figure.add_subplot()


def only_one(ax: Axes | None, picture: str) -> None:
    """Raises :class:`ProgramError` where the caller has one ``ax`` for a picture that is several."""
    if ax is not None:
        raise ProgramError(f"{picture} is a picture of several axes, and cannot be drawn on one (ax): leave ax out")


def inches_wide(axes: Axes) -> float:
    """How wide an axes will about be beside its labels, before it is laid out: 8 inches of a figure of its own."""
    figure: Any = axes.get_figure(root=True)
    return float(figure.get_figwidth() * axes.get_position().width / 0.775 * 0.8)


ENTRY = 0.17
"""Inches that a row of a legend takes."""


def legend_below(
    figure: Figure,
    ax: Axes | None,
    axes: Axes,
    handles: Sequence[Any] | None = None,
    *,
    side: str = "lower center",
    **options: Any,
) -> None:
    """The legend of an axes' marks, or of ``handles``, beside the figure; below the axes where those are the caller's
    ``ax``, in columns that it has room for."""
    from matplotlib.transforms import ScaledTranslation

    handles = axes.get_legend_handles_labels()[0] if handles is None else handles
    options = {"handles": handles, "frameon": False, "fontsize": 8.5} | options
    if ax is None:
        if is_narrow(figure):
            options["ncols"] = min(len(handles), columns_of(figure, 2))
            rows = -(-len(handles) // max(options["ncols"], 1))
            figure.set_figheight(figure.get_figheight() + max(rows - 1, 0) * ENTRY)  # not taken from the bars
        options["handles"] = in_rows(options["handles"], options.get("ncols", 1))
        figure.legend(**options | {"loc": f"outside {side}"})
        return
    options["ncols"] = min(len(handles), MOST_COLUMNS)
    options["handles"] = in_rows(options["handles"], options["ncols"])
    below = ax.transAxes + ScaledTranslation(0.0, -BELOW / 72, figure.dpi_scale_trans)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), bbox_transform=below, borderaxespad=0.0, **options)


def legend_of_all(figure: Figure, entries: Mapping[str, Any], most: int) -> None:
    """One legend below several axes, of handles by their labels, in ``most`` columns or as many as have room."""
    ncols = columns_of(figure, most)
    handles = in_rows(list(entries.values()), ncols)
    labels = in_rows(list(entries), ncols)
    look = {"frameon": False, "fontsize": 8.5, "handlelength": 1.4}
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols, **look)


def in_rows(handles: Sequence[Any], ncols: int) -> list[Any]:
    """Entries in the order that a legend of so many columns, which Matplotlib fills column by column, shows row by row
    as they were given.

    >>> in_rows("abcde", 2)
    ['a', 'c', 'e', 'b', 'd']
    """
    return [handle for column in range(max(1, ncols)) for handle in list(handles)[column :: max(1, ncols)]]


BELOW = 32
MOST_COLUMNS = 3
"""Points that ticks and the words of an axis take below it, and columns of the legend under those."""
LETTERS_AN_INCH = 12.0
"""Of a title's second line, at most."""


def titled(figure: Figure, title: str | None, alt: str, ax: Axes | None = None) -> Figure:
    """A title over the figure, or over the caller's ``ax``, and, for those who cannot see it, what it shows.

    What was changed, in the parentheses that end a title, is a line of its own where both are too long for one; the
    rest of what is too long is left out.
    """
    if ax is not None:
        above = "\n" if ax.get_title(loc="left") + ax.get_title(loc="right") else ""  # whose line is taken
        ax.set_title(capped(title or "", 60) + above, fontsize=10, color=INK)
        figure.set_label(" ".join(text for text in (alt_text(figure), alt) if text))
        return figure
    if title:
        most = int(figure.get_size_inches()[0] * LETTERS_AN_INCH)
        first, changes = headline(title) if len(title) > 0.7 * most else (title, "")
        lines = [capped(first, int(0.7 * most)), *([capped(changes, most)] if changes else [])]
        figure.suptitle("\n".join(lines), fontsize=10 if changes else 12, color=INK)
    figure.set_label(alt)
    return figure


def capped(text: str, most: int) -> str:
    """A text of at most so many letters.

    >>> capped("cluster.nodes=16", 12)
    'cluster.n...'
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


def alt_text(figure: Figure) -> str:
    """What a figure shows, in words."""
    return str(figure.get_label())


Pixels = npt.NDArray[np.uint8]
"""(height, width, 3) of a picture."""


def save(figure: Figure, path: Any, dpi: int = 180) -> None:
    """Write a figure. It carries the words for it where it can; neither a date nor a random name is in it, so that the
    same figure is the same bytes."""
    import matplotlib as mpl

    name = str(path)
    if name.endswith(".svg"):
        with mpl.rc_context({"svg.hashsalt": "clustersim"}):
            figure.savefig(path, metadata={"Date": None, "Description": alt_text(figure)})
    elif name.endswith(".png"):
        _save_png(figure, path, dpi)
    else:
        figure.savefig(path, dpi=dpi, metadata={"CreationDate": None})


def _save_png(figure: Figure, path: Any, dpi: int) -> None:
    """256 colours are enough for flat areas and smooth text, and make a third of the bytes: where they are enough."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi, pil_kwargs={"compress_level": 0})  # it is packed below
    metadata = PngInfo()
    metadata.add_itxt("Description", alt_text(figure))
    full_colour = Image.open(drawn).convert("RGB")
    few = full_colour.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    image = few if _alike(np.asarray(full_colour), np.asarray(few.convert("RGB"))) else full_colour
    image.save(path, format="png", dpi=(dpi, dpi), pnginfo=metadata)


def _alike(drawn: Pixels, few: Pixels) -> bool:
    """Whether each colour of an area is the one that was drawn, but for a difference that nobody sees; edges of letters
    may differ. Of many colours the rare ones go first, and those are what a legend has."""
    further = (np.maximum(drawn, few) - np.minimum(drawn, few)) > SEEN
    changed = drawn[further[..., 0] | further[..., 1] | further[..., 2]]
    packed = changed.astype(np.uint32) @ np.array([65536, 256, 1], dtype=np.uint32)
    colours, counts = np.unique(packed, return_counts=True)
    return not len(colours) or int(counts.max()) < AREA


SEEN = 10
"""Steps of 255 by which a channel of an area may be off: neighbours in a legend differ by more."""
AREA = 40
"""Pixels of one colour that are an area, and no edge: half of the smallest mark of a legend."""
