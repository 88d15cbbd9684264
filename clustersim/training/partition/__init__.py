"""A model split over a mesh: local layers with their exchanges, chunks, stages."""

from clustersim.training.partition.base import Chunk, Exchange, Item, LocalLayer, Partition, Stage, Work
from clustersim.training.partition.split import partition

__all__ = ["Chunk", "Exchange", "Item", "LocalLayer", "Partition", "Stage", "Work", "partition"]
