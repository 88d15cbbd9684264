"""Topologies from files and from Python: machines, what joins them, what is broken, and whether it looks right.

>>> topology = load("hgx-h100", nodes=2)
>>> len(topology.gpus), topology.fabric
(16, 'rail_optimised')
"""

from __future__ import annotations

from clustersim.cluster.files.changes import Change, change, links_of
from clustersim.cluster.files.check import TopologyReport, check
from clustersim.cluster.files.fitted import calibration_text
from clustersim.cluster.files.load import files, load, mesh, node, uncalibrated
from clustersim.cluster.files.networks import dragonfly, fat_tree, one_switch, rail_optimised
from clustersim.cluster.files.reading import numbers_of

__all__ = [
    "Change",
    "TopologyReport",
    "calibration_text",
    "change",
    "check",
    "dragonfly",
    "fat_tree",
    "files",
    "links_of",
    "load",
    "mesh",
    "node",
    "numbers_of",
    "one_switch",
    "rail_optimised",
    "uncalibrated",
]
