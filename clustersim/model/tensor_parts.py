"""Tensors of one linear, norm or table by its name, as families and models of other kinds make them up."""

from __future__ import annotations

from collections.abc import Callable

from clustersim.core.model import Tensor
from clustersim.model.base import TransformerShape

Tensors = tuple[Tensor, ...]


Part = Callable[[str], Tensors]
"""A part's tensors, by its name."""


def linear(
    name: str, n_in: int, n_out: int, cut: str = "sequence", *, bias: bool = False, transposed: bool = False
) -> Tensors:
    """A linear's weight, and its bias, which every rank has whole where the weight is cut by rows.

    By default it is whole on every rank, each of which sees only its own tokens under sequence parallelism.
    ``transposed`` : the weight is (in, out), as Hugging Face's Conv1D has it, and not (out, in).
    """
    dot = "_" if name.endswith("in_proj") and "attention" in name else "."  # torch.nn.MultiheadAttention's own
    weight = Tensor(f"{name}{dot}weight", n_in * n_out, cut=cut, width=n_out if transposed else n_in)
    return (weight, Tensor(f"{name}{dot}bias", n_out, cut="sequence" if cut == "row" else cut)) if bias else (weight,)


def affine(name: str, n_in: int, n_out: int, *, bias: bool = True) -> Tensors:
    """A linear's weight and bias (a norm's, where ``n_in`` is 1), whole on every rank."""
    return linear(name, n_in, n_out, "whole", bias=bias)


def linear_part(n_in: int, n_out: int, cut: str = "sequence", *, bias: bool = False, there: bool = True) -> Part:
    """A linear of a part's name, as :func:`linear`; no tensor where it is not ``there``."""
    return lambda name: linear(name, n_in, n_out, cut, bias=bias) if there else ()


def gpt2_part(s: TransformerShape, n_in: int, n_out: int, cut: str, *, bias: bool, there: bool) -> Part:
    """A linear that is a Conv1D in Hugging Face's GPT-2."""
    transposed = s.family == "gpt2"
    return lambda name: linear(name, n_in, n_out, cut, bias=bias, transposed=transposed) if there else ()


def tensor_part(numel: int, cut: str = "whole", *, there: bool = True, tied_to: str = "", width: int = 1) -> Part:
    """One tensor of a part's name with ``numel`` elements; none where it is not ``there``."""
    return lambda name: (Tensor(name, numel, tied_to, cut, width),) if there else ()
