"""Launch configurations of training frameworks, read into scenarios and written from them.

``clustersim import`` and ``clustersim export-config`` are its front. What a framework's options mean is one table a
framework, in ``data/exchange/``; a row is read and written.
"""

from clustersim.files.launch.reading import LaunchImport, read
from clustersim.files.launch.table import NAMES, load
from clustersim.files.launch.writing import LaunchFiles, canonical, written

__all__ = ["NAMES", "LaunchFiles", "LaunchImport", "canonical", "load", "read", "written"]
