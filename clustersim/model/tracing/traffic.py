"""What one aten operator costs: bytes that it reads and writes, GPU kernels that it launches, and its FLOPs.

Bytes are of the tensors that it takes and gives, each element once; ``read_again`` of :data:`OPERATORS` has those that
go over their input more than once. FLOPs are those of torch's own ``flop_counter``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from clustersim.core.texts import data_table

aten = torch.ops.aten


class OperatorTable(msgspec.Struct, frozen=True):
    """Operators of ``data/operators.toml``, which says of each field what it has of them."""

    free: frozenset[str]
    writes_only: frozenset[str]
    overwrites: frozenset[str]
    looks_up: frozenset[str]
    picks: frozenset[str]
    uncounted: tuple[str, ...]
    spreads: frozenset[str]
    widened: frozenset[str]
    read_again: Mapping[str, float]
    launches: Mapping[str, int]


OPERATORS = msgspec.convert(data_table("operators"), OperatorTable)
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm"})
CONVOLUTIONS = frozenset({"convolution", "convolution_backward", "_convolution"})


def short_name(func: Any) -> str:
    """``aten.add.Tensor`` -> ``add``; of another library, with its name: ``flash_attn_fwd``."""
    space, _, name = func._schema.name.partition("::")
    return name if space == "aten" else f"{space}_{name}"


def is_free(func: Any) -> bool:
    """Whether an operator launches nothing: it makes a view, or memory."""
    name = short_name(func)
    if name in OPERATORS.free or func.namespace == "prim":
        return True
    returns = func._schema.returns
    aliased = [r.alias_info is not None and not r.alias_info.is_write for r in returns]
    return bool(aliased) and all(aliased)


def tensors(tree: Any) -> list[Any]:
    """Tensors inside arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def distinct(tensor: Any) -> int:
    """Elements of a tensor that lie apart in memory: an expanded dimension is one."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= int(size) if stride else min(1, int(size))
    return count


def nbytes(tensor: Any) -> float:
    """Bytes of a tensor, as :func:`distinct` counts them."""
    return float(distinct(tensor) * tensor.element_size())


def traffic(func: Any, operands: Sequence[Any], results: Sequence[Any]) -> float:
    """Bytes that an operator moves."""
    if is_free(func):
        return 0.0
    name = short_name(func)
    written = sum(map(nbytes, results))
    if name in OPERATORS.writes_only:
        return written
    if name in OPERATORS.looks_up:
        return 2.0 * written + sum(map(nbytes, operands[1:]))
    if name in OPERATORS.overwrites:
        operands = operands[1:]
    once = {(tensor.untyped_storage()._cdata, tensor.storage_offset()): nbytes(tensor) for tensor in operands}
    largest = max(once.values(), default=0.0)
    if name in OPERATORS.picks:
        return written + sum(once.values()) - largest
    return written + sum(once.values()) + OPERATORS.read_again.get(name, 0.0) * largest


def launches(func: Any, results: Sequence[Any]) -> int:
    """GPU kernels that an operator launches."""
    if is_free(func):
        return 0
    name = short_name(func)
    if name == "convolution_backward":
        return sum(1 for tensor in results if tensor.dim() > 1)
    return OPERATORS.launches.get(name, 1)


def flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    """FLOPs as ``torch.utils.flop_counter`` counts them; of an operator that it does not know, none, but those of
    grouped products, which are one product of all rows together. The gradient of a grouped convolution's weight has
    those of the convolution: the counter takes it for one without groups."""
    if short_name(func) == "_grouped_mm":
        left, right = args[:2]
        return 2.0 * int(left.numel()) * int(right.shape[-1])
    if short_name(func) == "convolution_backward":
        gradient, taken, weight = args[:3]
        large = taken if args[7] else gradient
        products = int(large.numel()) // int(large.shape[1]) * int(weight.numel())
        return 2.0 * products * sum(map(int, args[10][:2]))
    count = flop_registry.get(func._overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=out))


def is_uncounted(func: Any) -> bool:
    """Whether an operator may do arithmetic that no formula counts: one of another library, or of dense algebra."""
    if func._overloadpacket in flop_registry or func.namespace in {"prim", "profiler"}:
        return False
    return func.namespace != "aten" or short_name(func).startswith(OPERATORS.uncounted)
