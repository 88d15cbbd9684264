"""What ``--input`` says: ``tokens[4, 8192]``, ``images[8, 3, 224, 224]``, ``NAME=floats[4, 1000, 80]``."""

from __future__ import annotations

import math
import re
from typing import Literal

import msgspec

from clustersim.core.errors import ModelError, nearest
from clustersim.core.texts import shown

KINDS = ("tokens", "images", "floats", "bools")
"""Whole numbers; numbers in the type of the parameters, as pixels or as anything; truth values (masks)."""
MOST_ELEMENTS = 2**40
_SPELLED = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)\s*=\s*)?(?P<kind>\w+)\s*\[(?P<shape>[^\[\]]*)\]")


class InputSpec(msgspec.Struct, frozen=True):
    """An input of a module: its ``kind`` of :data:`KINDS`, its ``shape`` with the samples first, and the ``name`` of
    the argument that it is given as; by place where that is empty."""

    kind: Literal["tokens", "images", "floats", "bools"]
    shape: tuple[int, ...]
    name: str = ""

    def __str__(self) -> str:
        given = f"{self.name}=" if self.name else ""
        return f"{given}{self.kind}[{', '.join(map(str, self.shape))}]"


def read_input(text: str) -> InputSpec:
    """An input as it is written on the command line. Raises :class:`ModelError`.

    >>> read_input("tokens[4, 8192]").shape
    (4, 8192)
    """
    match = _SPELLED.fullmatch(text.strip())
    if not match:
        raise ModelError(
            f"--input {shown(text)}: write it as KIND[SAMPLES, SIZE, ...], like tokens[4, 8192] or "
            f"pixel_values=images[8, 3, 224, 224]; kinds are {', '.join(KINDS)}"
        )
    kind = match["kind"]
    if kind not in KINDS:
        raise ModelError(f"--input {shown(text)}: unknown kind {kind!r}; {nearest(kind, KINDS)}")
    sizes = [size.strip() for size in match["shape"].split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,11}", size) for size in sizes):
        raise ModelError(f"--input {shown(text)}: sizes are whole numbers above zero, the samples first")
    shape = tuple(map(int, sizes))
    if math.prod(shape) > MOST_ELEMENTS:
        raise ModelError(f"--input {shown(text)}: {math.prod(shape):,} elements are more than any batch has")
    return InputSpec(kind, shape, match["name"] or "")  # type: ignore[arg-type]


def batch_of(inputs: tuple[InputSpec, ...]) -> int:
    """Samples that the inputs hold. Raises :class:`ModelError` where they do not agree."""
    first = inputs[0]
    for spec in inputs[1:]:
        if spec.shape[0] != first.shape[0]:
            raise ModelError(f"--input {spec}: holds {spec.shape[0]} samples, and {first} holds {first.shape[0]}")
    return first.shape[0]
