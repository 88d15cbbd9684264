"""Figures. matplotlib is imported inside the functions; figures need no display and are saved with ``savefig``.

One file a picture; each takes a Timeline, a Topology or a table and returns a matplotlib Figure, whose
:func:`alt_text` says in words what it shows.
"""

from __future__ import annotations

from clustersim.plots.accuracy import accuracy
from clustersim.plots.animation import ring_run, swap_run
from clustersim.plots.curves import scaling
from clustersim.plots.degrees import Cell, degrees
from clustersim.plots.exchange import exchange_times
from clustersim.plots.footprint import footprint, memory_over_time
from clustersim.plots.footprints import footprints
from clustersim.plots.front import Dot, front
from clustersim.plots.heat import link_heat
from clustersim.plots.lines import Axis, lines
from clustersim.plots.machine import link_loads, loaded_topology
from clustersim.plots.movie import Movie, movie, pipeline_movie, ring_movie, swap_movie
from clustersim.plots.of_run import PICTURES, View, picture
from clustersim.plots.of_sweep import sweep_curves
from clustersim.plots.pair import gantt_pair
from clustersim.plots.pipeline import pipeline_grid
from clustersim.plots.runs import breakdowns
from clustersim.plots.shares import breakdown
from clustersim.plots.storyboard import storyboard
from clustersim.plots.studies import efficiency_losses, network_speed, tornado
from clustersim.plots.style import alt_text, palette, save
from clustersim.plots.table import Table, table
from clustersim.plots.timeline import gantt
from clustersim.plots.tracks import last_step, representatives, worth_a_trace
from clustersim.plots.tradeoff import tradeoff
from clustersim.plots.waterfall import waterfall

__all__ = [
    "PICTURES",
    "Axis",
    "Cell",
    "Dot",
    "Movie",
    "Table",
    "View",
    "accuracy",
    "alt_text",
    "breakdown",
    "breakdowns",
    "degrees",
    "efficiency_losses",
    "exchange_times",
    "footprint",
    "footprints",
    "front",
    "gantt",
    "gantt_pair",
    "last_step",
    "lines",
    "link_heat",
    "link_loads",
    "loaded_topology",
    "memory_over_time",
    "movie",
    "network_speed",
    "palette",
    "picture",
    "pipeline_grid",
    "pipeline_movie",
    "representatives",
    "ring_movie",
    "ring_run",
    "save",
    "scaling",
    "storyboard",
    "swap_movie",
    "swap_run",
    "sweep_curves",
    "table",
    "tornado",
    "tradeoff",
    "waterfall",
    "worth_a_trace",
]
