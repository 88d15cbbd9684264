"""Figures. matplotlib is imported inside the functions; figures need no display and are saved with ``savefig``.

One file a picture; each takes a Timeline, a Topology or a table and returns a matplotlib Figure, whose
:func:`alt_text` says in words what it shows. A picture of one axes can be drawn on the caller's instead of a figure of
its own: ``ax``.
"""

from __future__ import annotations

from clustersim.app.plots.accuracy import accuracy as accuracy
from clustersim.app.plots.animation import ring_run as ring_run
from clustersim.app.plots.animation import swap_run as swap_run
from clustersim.app.plots.degrees import degrees as degrees
from clustersim.app.plots.drawing import alt_text as alt_text
from clustersim.app.plots.drawing import save as save
from clustersim.app.plots.exchange import exchange_times as exchange_times
from clustersim.app.plots.footprint import footprint as footprint
from clustersim.app.plots.footprint import footprints as footprints
from clustersim.app.plots.footprint import memory_over_time as memory_over_time
from clustersim.app.plots.front import FrontDot as FrontDot
from clustersim.app.plots.front import front as front
from clustersim.app.plots.front import tradeoff as tradeoff
from clustersim.app.plots.heat import link_heat as link_heat
from clustersim.app.plots.lines import Axis as Axis
from clustersim.app.plots.lines import lines as lines
from clustersim.app.plots.machine import link_loads as link_loads
from clustersim.app.plots.machine import loaded_topology as loaded_topology
from clustersim.app.plots.movie import Movie as Movie
from clustersim.app.plots.movie import movie as movie
from clustersim.app.plots.movie import pipeline_movie as pipeline_movie
from clustersim.app.plots.movie import ring_movie as ring_movie
from clustersim.app.plots.movie import swap_movie as swap_movie
from clustersim.app.plots.of_run import PICTURES as PICTURES
from clustersim.app.plots.of_run import View as View
from clustersim.app.plots.of_run import picture as picture
from clustersim.app.plots.of_run import picture_file as picture_file
from clustersim.app.plots.of_sweep import scaling as scaling
from clustersim.app.plots.of_sweep import sweep_curves as sweep_curves
from clustersim.app.plots.pipeline import pipeline_grid as pipeline_grid
from clustersim.app.plots.shares import breakdown as breakdown
from clustersim.app.plots.shares import breakdowns as breakdowns
from clustersim.app.plots.shares import working_groups as working_groups
from clustersim.app.plots.storyboard import storyboard as storyboard
from clustersim.app.plots.studies import efficiency_losses as efficiency_losses
from clustersim.app.plots.studies import network_speed as network_speed
from clustersim.app.plots.studies import tornado as tornado
from clustersim.app.plots.style import palette as palette
from clustersim.app.plots.table import PlotTable as PlotTable
from clustersim.app.plots.table import table as table
from clustersim.app.plots.timeline import gantt as gantt
from clustersim.app.plots.timeline import gantt_pair as gantt_pair
from clustersim.app.plots.waterfall import waterfall as waterfall
from clustersim.explain.representatives import last_step as last_step
from clustersim.explain.representatives import representatives as representatives
from clustersim.files.slices import worth_a_trace as worth_a_trace
