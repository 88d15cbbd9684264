"""What follows from the sizes of a model that launch files say: those that they leave out, and its parameters."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import Table, shown
from clustersim.files.launch.files import OptionValue

Leaves: TypeAlias = dict[str, Any]
"""Sizes and kinds of a model, by the names that the tables of options have for them."""


def completed(stated: Table) -> Leaves:
    """What follows from what is said, as Megatron-LM has it (training/arguments.py ``validate_args``)."""
    leaf_values = {"norm_places": "before"} | {leaf: value for leaf, value in stated.items() if value is not None}
    width = leaf_values["d_model"]
    heads = leaf_values["heads"]
    if leaf_values.get("positions") != "learned":
        leaf_values.pop("n_positions", None)
    if not leaf_values.get("experts.count"):
        leaf_values = {leaf: value for leaf, value in leaf_values.items() if not leaf.startswith("experts.")}
    if leaf_values.get("norm") != "layernorm" or not leaf_values.get("norm_weight", True):
        leaf_values.pop("norm_bias", None)  # which no other norm has
    if leaf_values.get("mlp_bias") is not None:
        leaf_values.setdefault("qkv_bias", leaf_values["mlp_bias"])
    if leaf_values.get("d_ff") is None:
        # Of a gated MLP 2/3 of it, so that there are as many weights.
        leaf_values["d_ff"] = int(4 * width * 2 / 3) // 64 * 64 if leaf_values.get("gated") else 4 * width
    if not leaf_values.get("mla"):
        leaf_values.setdefault("kv_heads", heads)
        leaf_values.setdefault("head_dim", width // heads if heads else 0)
        leaf_values.setdefault("qk_norm", False)
    else:  # whose keys have no heads of their own, and whose qk-layernorm is that of its projections
        leaf_values = {
            leaf: value for leaf, value in leaf_values.items() if leaf not in {"kv_heads", "head_dim", "qk_norm"}
        }
    if leaf_values.get("experts.count"):
        leaf_values.setdefault("experts.width", leaf_values["d_ff"])
        leaf_values = {leaf: value for leaf, value in leaf_values.items() if leaf != "experts.shared" or value}
    return leaf_values


def counted(wanted: Leaves) -> int:
    """Parameters of a decoder of these sizes and kinds.

    >>> sizes = {"layers": 12, "d_model": 768, "heads": 12, "kv_heads": 12, "head_dim": 64, "d_ff": 3072}
    >>> kinds = {"positions": "learned", "n_positions": 1024, "tied": True, "norm": "layernorm", "mlp_bias": True}
    >>> counted(sizes | kinds | {"qkv_bias": True, "vocab": 50257})
    124439808
    """
    width, head = wanted["d_model"], wanted["head_dim"]
    queries, keys = wanted["heads"] * head, wanted["kv_heads"] * head
    bias = bool(wanted.get("mlp_bias"))
    products = 3 if wanted.get("gated") else 2
    norm = width * (bool(wanted.get("norm_weight", True)) + has_norm_bias(wanted))
    attention = width * (2 * queries + 2 * keys) + bool(wanted.get("qkv_bias")) * (queries + 2 * keys)
    attention += bool(wanted.get("out_bias", bias)) * width + bool(wanted.get("qk_norm")) * 2 * head
    count = wanted.get("experts.count", 0)
    inner = wanted.get("experts.width", 0) if count else wanted["d_ff"]
    mlp = products * width * inner + bias * ((products - 1) * inner + width)
    if count:
        mlp = count * (mlp + width) + products * width * wanted.get("experts.shared", 0)
    outside = wanted["vocab"] * width * (1 if wanted.get("tied") else 2) + norm * (
        2 if wanted.get("embedding_norm") else 1
    )
    outside += wanted["n_positions"] * width if wanted.get("positions") == "learned" else 0
    return int(wanted["layers"] * (attention + mlp + 2 * norm) + outside)


def has_norm_bias(wanted: Leaves) -> bool:
    """Whether norms have a bias: LayerNorm's, unless files say none, or that norms have no weights either."""
    plain = wanted.get("norm") == "layernorm" and wanted.get("norm_weight", True)
    return bool(plain and wanted.get("norm_bias", True))


PATTERN = re.compile(r"\(?\[0\]\*(\d{1,4})\+\[1\]\*(\d{1,4})\)?")
"""Of leading dense layers, as Megatron-LM's scripts write them."""


LISTED = re.compile(r"\[(0(?:,0)*)?,?(1(?:,1)*)\]")
"""The same, layer by layer."""


def expert_layers(layers: str, by: OptionValue | None, file: str) -> dict[str, int]:
    """Which blocks have experts: each so many-th, or all behind some that are dense. Raises :class:`ScenarioError` for
    another pattern.

    >>> expert_layers("([0]*3+[1]*58)", None, "a.sh"), expert_layers("[0, 1, 1]", None, "a.yaml")
    ({'dense_first': 3, 'every': 1}, {'dense_first': 1, 'every': 1})
    """
    plain = re.sub(r"[\s'\"]", "", layers)
    pattern, listed = PATTERN.fullmatch(plain), LISTED.fullmatch(plain)
    every = int(plain) if re.fullmatch(r"[1-9]\d{0,3}", plain) else 1
    dense = int(pattern[1]) if pattern else (listed[1] or "").count("0") if listed else 0
    if not pattern and not listed and not plain.isdecimal():
        where = f"{by.where}: {by.name} {shown(by.value)}" if by else f"{file}: {shown(layers)}"
        raise ScenarioError(f"{where}: say a number, or ([0]*3+[1]*58); another pattern is not played")
    return {"dense_first": dense, "every": every}
