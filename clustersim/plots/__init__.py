"""Figures. matplotlib is imported inside the functions; figures need no display and are saved with ``savefig``.

One file a picture; each takes a Timeline, a Topology or a table and returns a matplotlib Figure, whose
:func:`alt_text` says in words what it shows.
"""

from __future__ import annotations

from clustersim.plots.style import alt_text, palette, save
from clustersim.plots.timeline import gantt, representatives

__all__ = ["alt_text", "gantt", "palette", "representatives", "save"]
