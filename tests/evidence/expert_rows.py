"""What a row of measured steps says of experts, in the words of a scenario: dispatcher, overlap, recipe and graphs.

Every word is a field of ``[parallel]``, ``[model]`` or ``[run]``, or is refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from clustersim.core.texts import Table
from tests.evidence.software import PublishedRecipe, Row, SplitStack

DISPATCHERS: Mapping[str, Table] = MappingProxyType(
    {
        "allgather": {"dispatcher": "allgather"},
        "alltoall": {"dispatcher": "alltoall"},
        "flex": {"dispatcher": "flex"},
        "deepep": {"dispatcher": "flex", "flex_backend": "deepep"},
        "hybridep": {"dispatcher": "flex", "flex_backend": "hybridep"},
    }
)
"""Words of ``a2a_dispatcher``: Megatron's ``moe_token_dispatcher_type``, or the ``moe_flex_dispatcher_backend`` of its
``flex``."""

BACKENDS = ("hybridep", "deepep")
"""Of ``flex``, as a row's remarks name them."""

BLOCK_RECIPES = re.compile(r"nvfp4|mxfp8|blockwise")
"""Recipes with a scale for each block of a tensor, as ``float8_recipe`` of ``[model]`` has them."""


GRAPH_KINDS = frozenset({"transformer_engine", "local"})
"""Megatron's ``cuda_graph_impl``."""

GRAPH_SCOPES = ("full_iteration", "attn", "mamba", "mlp", "moe", "moe_router", "moe_preprocess")
"""Megatron's ``cuda_graph_scope`` as ``[run] cuda_graph`` has them."""


def graph_words(row: Row) -> list[str]:
    """Words of ``cuda_graph``; none where there are no graphs."""
    words = row.get("cuda_graph", "").split()
    return [] if words in (["0"], ["none"]) else words


def dispatching(row: Row, recipe: Table) -> Table:
    """Fields of ``[parallel]`` that say how tokens reach their experts.

    recipe : what the row's software sets where the row says nothing. Raises ValueError for a word that is unknown.
    """
    word = row["a2a_dispatcher"].strip().lower()
    if word not in {"", *DISPATCHERS}:
        raise ValueError(f"a2a_dispatcher {word!r} is not known; known: {', '.join(DISPATCHERS)}")
    names = ("dispatcher", "flex_backend")
    way: Table = {name: recipe[name] for name in names if name in recipe}
    if capacity(row):
        # Megatron-Core's TransformerConfig: a capacity factor works with this dispatcher alone.
        way["dispatcher"] = "alltoall"
    if word:
        way |= DISPATCHERS[word]
    if word == "flex":
        remarks = row.get("notes", "").lower()
        named = "uccl" if "over uccl" in remarks else next((name for name in BACKENDS if name in remarks), None)
        way |= {"flex_backend": named} if named else {}
    if way.get("dispatcher") != "flex":
        way.pop("flex_backend", None)
    return way


def overlapping(row: Row, stack: SplitStack, recipe: PublishedRecipe) -> Table:
    """Fields of ``[parallel]`` that say what runs beside dispatch and combine. Raises ValueError for another word."""
    word = row["ep_overlap"].strip()
    if word not in {"", "0", "1"}:
        raise ValueError(f"ep_overlap {word!r} is neither 0 nor 1")
    overlaps = word == "1" or (not word and recipe.ep_overlap)
    return {"ep_overlap": True, **stack.ep_overlap} if overlaps else {}


def capacity(row: Row) -> Table:
    """Fields of ``[parallel]`` of a row whose experts drop tokens.

    NeMo's MegatronTokenDropCallback and Megatron-Bridge's apply_moe_token_drop: a capacity factor of 1, padded.
    """
    words = f"{row.get('other', '')} {row.get('notes', '')}".lower()
    if not re.search(r"token ?drop", words):
        return {}
    factor = re.search(r"capacity factor ([\d.]+\d)", words)
    return {"capacity_factor": float(factor.group(1)) if factor else 1.0, "pad_to_capacity": True}
