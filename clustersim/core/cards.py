"""What a notebook shows of a value whose parts are too many to print: a title and a few rows."""

from __future__ import annotations

from collections.abc import Iterable


def card(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """A table in HTML of (what, how much).

    >>> card("a < b", [("ranks", "8")])
    '<table><caption>a &lt; b</caption><tr><th>ranks</th><td>8</td></tr></table>'
    """
    from html import escape  # its table of entities is more than a run has to read

    cells = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in rows)
    return f"<table><caption>{escape(title)}</caption>{cells}</table>"
