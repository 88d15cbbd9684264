"""Networks that are neither a transformer nor of images: each a function of its data's lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from clustersim.model import Model
from clustersim.models.audio import jasper, waveglow
from clustersim.models.fastpitch import fastpitch
from clustersim.models.recurrent import gnmt, tacotron2

NETWORKS: Mapping[str, Callable[..., Model]] = {
    "gnmt": gnmt,
    "tacotron2": tacotron2,
    "waveglow": waveglow,
    "jasper": jasper,
    "fastpitch": fastpitch,
}
"""By name; options are the function's."""
