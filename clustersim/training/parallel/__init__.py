"""How a model is split: the ``[parallel]`` table, the names other frameworks have for it, and what must divide what.

It knows no model and no machine: a model's sizes come as a :class:`ModelShape`, a machine as its number of ranks.
"""

from clustersim.training.parallel.checks import ModelShape, check, padded_vocab
from clustersim.training.parallel.config import ParallelConfig, Routing
from clustersim.training.parallel.counts import blocks_of_stages
from clustersim.training.parallel.layout import stages_of
from clustersim.training.parallel.names import FIELDS, field_for, preset, translate
from clustersim.training.parallel.recompute import Recompute, recompute

__all__ = [
    "FIELDS",
    "ModelShape",
    "ParallelConfig",
    "Recompute",
    "Routing",
    "blocks_of_stages",
    "check",
    "field_for",
    "padded_vocab",
    "preset",
    "recompute",
    "stages_of",
    "translate",
]
