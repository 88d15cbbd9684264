"""Launch configurations of training frameworks, read into scenarios and written from them.

``clustersim import`` and ``clustersim export-config`` are its front. What a framework's options mean is one table a
framework, in ``data/exchange/``; a row is read and written.
"""

from clustersim.files.launch.reading import Imported, read
from clustersim.files.launch.table import NAMES, load
from clustersim.files.launch.writing import Exported, canonical, written

__all__ = ["NAMES", "Exported", "Imported", "canonical", "load", "read", "written"]
