"""The setting of low-rank adapters, ``[model.adapter]``: their rank, which linears have one, and what is kept beside.

Modules are named as PEFT names them, or as Megatron does; :mod:`clustersim.model.adapters` says what of a model that
makes.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from clustersim.core.errors import ModelError

ALL_LINEAR = "all-linear"
"""PEFT's word for every linear but the head."""
BLOCK = 64
"""Weights that share one scale in 4 bits (bitsandbytes, functional.py, ``quantize_4bit``)."""
SCALES = 256
"""Scales that share one scale, where they are quantised too."""


MEGATRON_LINEARS = {
    "linear_qkv": ("q", "k", "v", "qkv"),
    "linear_proj": ("out",),
    "linear_fc1": ("gate", "up"),
    "linear_fc2": ("down",),
    "linear_q": ("q",),
    "linear_k": ("k",),
    "linear_v": ("v",),
    "linear_fc1_gate": ("gate",),
    "linear_fc1_up": ("up",),
}
"""Megatron's linears, and the products that each is: one adapter stands beside all of them (Megatron-Bridge
peft/lora.py; the last five, with an adapter each, are those of canonical_lora.py)."""
LONGEST_PATTERN = 500
"""Characters of a pattern of names."""


def is_pattern(target: str) -> bool:
    """Whether a target is a regular expression, and no name.

    >>> is_pattern("self_attn.q_proj"), is_pattern(r".*\\.(q|v)_proj")
    (False, True)
    """
    return re.fullmatch(r"[\w.-]+", target) is None


def compiled(target: str) -> re.Pattern[str]:
    """A target's pattern. Raises :class:`ModelError` for none, and for one that may take for ever to match: a repeated
    group with something repeated in it."""
    try:
        pattern = re.compile(target) if len(target) <= LONGEST_PATTERN else None
    except (re.error, OverflowError, RecursionError):
        pattern = None
    if pattern is None or re.search(r"[*+}][^()]*\)+[*+{]", target):
        raise ModelError(
            f"target_modules: {target[:60]!r} is no regular expression of names, or one of repeats in repeats"
        )
    return pattern


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[model.adapter]``: low-rank adapters beside frozen weights, which alone are trained.

    Parameters
    ----------
    rank : of the adapters' products (PEFT's ``r``).
    target_modules : linears that have one, by the last parts of their names (``["q_proj", "v_proj"]``), by a pattern
        of their whole names (a regular expression, as PEFT takes one), or ``["all-linear"]`` for all but the head; or
        by Megatron's names (``["linear_qkv"]``), of which one adapter is beside all products of a linear.
    dropout : a share of the adapters' inputs is dropped, so that each keeps an input of its own.
    modules_to_save : modules that are trained as a whole beside the adapters; what they were is kept, too.
    load_in_4bit : the frozen linears but the head are kept in 4 bits with a scale for 64 (bitsandbytes' NF4 and FP4).
    bnb_4bit_use_double_quant : those scales are kept in 8 bits: 4.127 bits a weight for 4.5.
    base_dtype : of what is frozen and not in 4 bits; ``dtype`` of the model where it has 16 bits, else fp32.
    """

    rank: Annotated[int, Meta(ge=1, le=65_536)]
    target_modules: Annotated[tuple[str, ...], Meta(min_length=1)]
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    modules_to_save: tuple[str, ...] = ()
    load_in_4bit: bool = False
    bnb_4bit_use_double_quant: bool = False
    base_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.base_dtype not in {None, "fp32", "bf16", "fp16"}:
            raise ValueError(f"base_dtype {self.base_dtype!r} must be 'bf16', 'fp16' or 'fp32'")
        if self.bnb_4bit_use_double_quant and not self.load_in_4bit:
            raise ValueError("bnb_4bit_use_double_quant needs load_in_4bit = true")

    @property
    def packed_bytes(self) -> float:
        """Bytes of a weight in 4 bits with its part of the scales.

        >>> round(8 * Adapter(rank=8, target_modules=("q_proj",), load_in_4bit=True).packed_bytes, 3)
        4.5
        """
        scale = (8.0 + 32.0 / SCALES) / BLOCK if self.bnb_4bit_use_double_quant else 32.0 / BLOCK
        return (4.0 + scale) / 8.0


class UnknownTarget(ModelError):
    """A target that names no linear, which PEFT passes over beside others that do. target : its name."""

    def __init__(self, message: str, target: str) -> None:
        super().__init__(message)
        self.target = target
