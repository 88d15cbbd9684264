"""Launch configurations of training frameworks, read into scenarios and written from them.

``clustersim import`` and ``clustersim export-config`` are its front. What a framework's options mean is one table a
framework, in ``data/exchange/``; a row is read and written.
"""

from clustersim.exchange.reading import Imported, read
from clustersim.exchange.table import NAMES, load
from clustersim.exchange.writing import Exported, canonical, written

__all__ = ["NAMES", "Exported", "Imported", "canonical", "load", "read", "written"]
