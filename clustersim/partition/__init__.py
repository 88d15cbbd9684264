"""A model split over a mesh: local layers with their exchanges, chunks, stages."""

from clustersim.partition.base import Chunk, Exchange, Item, LocalLayer, Partition, Stage, Work
from clustersim.partition.split import partition

__all__ = ["Chunk", "Exchange", "Item", "LocalLayer", "Partition", "Stage", "Work", "partition"]
