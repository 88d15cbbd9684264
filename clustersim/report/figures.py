"""matplotlib's figures as SVG that may stand in one page with others."""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING

import msgspec

from clustersim.plots.style import alt_text

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure


class Chart(msgspec.Struct, frozen=True):
    """A picture under a heading."""

    name: str
    svg: Markup


def markup(figure: Figure, name: str) -> Markup:
    """A figure as :func:`inline_svg` gives it, which a template prints as it is."""
    return trusted(inline_svg(figure, name))


def trusted(svg: str) -> Markup:
    """Text that a template prints as it is: made by the SVG writers, which escape what they print."""
    from markupsafe import Markup

    return Markup(svg)


def inline_svg(figure: Figure, name: str) -> str:
    """A figure as an ``<svg>`` element; ids begin with ``name``, so that figures of one page do not mix theirs up."""
    import matplotlib as mpl

    out = io.StringIO()
    # Text stays text: it can be searched and read aloud, and is smaller than outlines.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\g<1>{name}-", text)
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups()  # type: ignore[union-attr]
    head = f'<svg role="img" aria-label="{escape(alt_text(figure))}" viewBox="0 0 {width} {height}" '
    head += 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return head + text[text.index(">") + 1 :].strip()
