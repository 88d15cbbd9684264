"""Frameworks whose launch files are read and written; it loads nothing, so that a command can offer them as choices."""

from __future__ import annotations

NAMES = (
    "megatron",
    "torchtitan",
    "deepspeed",
    "accelerate",
    "nemo",
    "torchtune",
    "neox",
    "nanotron",
    "foundry",
    "olmo",
    "lightning",
    "litgpt",
    "nanogpt",
    "openrlhf",
    "cookbook",
    "verl",
    "colossal",
    "primus",
    "automodel",
    "prime-rl",
)
"""A new framework is a file ``data/exchange/NAME.toml`` and its name here."""
WRITTEN = NAMES[:4]
"""Those whose files are written, too."""
