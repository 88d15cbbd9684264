"""Words of Colossal-AI's benchmark that are one letter, before options are read (``benchmark.py`` of its
``examples/language/llama``)."""

from __future__ import annotations

import re
from collections.abc import Sequence

SHORT = {
    "-c": "--config",
    "-p": "--plugin",
    "-b": "--batch_size",
    "-s": "--num_steps",
    "-i": "--ignore_steps",
    "-g": "--grad_checkpoint",
    "-l": "--max_length",
    "-w": "--warmup_ratio",
    "-m": "--memory_limit",
    "-x": "--xformers",
}
"""The benchmark's options of one letter."""


def spelt_out(words: Sequence[str]) -> list[str]:
    """Words of the benchmark with long options, also where a letter and its value are one word.

    >>> spelt_out(["-p", "3d", "-g", "--tp", "4", "-b16"])
    ['--plugin', '3d', '--grad_checkpoint', '--tp', '4', '--batch_size', '16']
    """
    long = []
    for word in words:
        letter = re.fullmatch(r"(-[a-z])(.*)", word)
        if letter is None or letter[1] not in SHORT:
            long.append(word)
        else:
            long += [SHORT[letter[1]], *([letter[2].lstrip("=")] if letter[2] else [])]
    return long


def is_benchmark(program: str, command: Sequence[str]) -> bool:
    """Whether a command starts a benchmark by Colossal-AI's own launcher."""
    return stem(program) == "benchmark" and "colossalai" in {word.rsplit("/", 1)[-1] for word in command}


def stem(program: str) -> str:
    """A program's name without its folder and ending."""
    return program.removesuffix(".py").rsplit("/", 1)[-1]
