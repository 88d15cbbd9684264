"""The ``[model]`` table of a measured hybrid-parallel row: a shipped model of its family in the row's own sizes."""

from __future__ import annotations

import re

from clustersim.core.device import Device
from clustersim.core.paths import shipped
from clustersim.core.texts import Table
from clustersim.training.parallel import padded_vocab
from tests.evidence.generic import read_columns
from tests.evidence.sized import HEAD, named_shape, of_size
from tests.evidence.software import Row, SplitStack
from tests.evidence.step_rows import whole


def model_table(row: Row, stack: SplitStack, dtype: str, device: Device) -> Table:
    """``[model]``; a GPU that the stack's attention kernel does not run on takes PyTorch's choice.

    Raises ValueError where the row does not say the sizes.
    """
    family = _family(row)
    name, options = _experts(row) if family == "experts" else (NAMED[family], _sizes(row))
    if family in {"gpt", "bert"}:
        options["n_positions"] = whole(row, "seq_len")
        options |= {"activation": "gelu"} if family == "gpt" else {"head": "pretraining"}
    if stack.vocab and "vocabulary assumed" in row.get("notes", ""):
        options["vocab"] = stack.vocab
    if stack.pads_vocab:
        options["vocab"] = padded_vocab(options["vocab"], stack.pads_vocab, whole(row, "tp", 1))
    if family == "gpt" and not stack.tied:
        options["tied"] = False
    if not stack.dropout or family in {"gated", "experts"}:
        options |= {"attn_dropout": False, "hidden_dropout": False}
    if stack.fused_scores_and_loss:
        options |= {"attn_dropout": False, "fused_loss": True}
    if family == "experts":
        options |= {"experts_implementation": "grouped_mm"}
    unfused = re.search(r"attention backend (unfused|local)", row.get("notes", ""))
    kernel = "eager" if unfused else stack.attention
    return {
        "name": name,
        "seq_len": whole(row, "seq_len"),
        "dtype": dtype,
        "attention": kernel if kernel in {"eager", *device.attention} else "flash",
        "implementation": stack.implementation,
        "options": options,
    }


def _family(row: Row) -> str:
    if row.get("experts"):
        return "experts"
    if row["model"].lower().startswith("bert"):
        return "bert"
    return "gated" if row.get("gated") == "1" else "gpt"


NAMED = {"gpt": "gpt2", "bert": "bert-large-uncased", "gated": "llama2-7b"}
"""The shipped model of each dense family: Megatron's GPT (learned positions of the sequence's length, tied embeddings,
biases, GELU by one kernel); its BERT, whose head sees every position, not only the masked ones; Llama and its kin
(rotary positions, RMSNorm, gated MLP, untied embeddings)."""


def _experts(row: Row) -> tuple[str, Table]:
    """A shipped mixture of experts of that name in the row's sizes, else blocks of its kind in all of them."""
    name = _named(row["model"])
    if not name:
        return _sized_experts(row)
    base = named_shape(name)
    options: Table = {"vocab": whole(row, "vocab")}
    if whole(row, "layers") != base.layers:
        options["layers"] = whole(row, "layers")
    if base.experts is None:
        raise ValueError(f"model {row['model']!r} has experts in the row, and none as {name}")
    sizes = {"count": base.experts.count, "per_token": base.experts.per_token, "width": base.experts.width}
    said = {key: whole(row, column, sizes[key]) for key, column in EXPERTS.items()}
    if said != sizes:
        options["experts"] = said
    if whole(row, "d_model", base.d_model) != base.d_model:
        options["d_model"] = whole(row, "d_model")
    return name, options


EXPERTS = {"count": "experts", "per_token": "topk", "width": "moe_ffn"}
"""Sizes of a mixture of experts by the columns that say them."""


def _named(model: str) -> str:
    """The shipped config that a model's name begins with, or the only one that begins with it; empty for none."""
    plain = _letters(model)
    known = sorted(shipped("data/models", ".json"), key=len, reverse=True)
    begun = [name for name in known if plain.startswith(_letters(name))]
    longer = [name for name in known if _letters(name).startswith(plain)]
    return begun[0] if begun else longer[0] if len(longer) == 1 else ""


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _sized_experts(row: Row) -> tuple[str, Table]:
    """Mixtral's blocks in the row's sizes, Qwen2's where experts are shared or not gated, DeepSeek-V3's where attention
    is latent. Raises ValueError for others."""
    attention = row["attention"].lower()
    if re.search(r"hybrid|mamba|linear|delta", attention):
        raise ValueError(f"model {row['model']!r}: no shipped mixture of experts has this name; attention {attention}")
    missing = [column for column in ("moe_ffn", "topk", "heads") if not row.get(column, "").strip()]
    if missing:
        raise ValueError(
            f"model {row['model']!r}: no shipped mixture of experts has this name, nor does the row say its "
            f"{', '.join(missing)}"
        )
    shared = _count(row, "shared_experts") * whole(row, "moe_ffn")
    experts = {key: whole(row, column) for key, column in EXPERTS.items()}
    experts |= {"shared": shared, "dense_first": _count(row, "dense_layers")}
    sizes = _sizes(row)
    if "mla" in attention:
        del sizes["head_dim"]
        sizes["kv_heads"] = sizes["heads"]
        return "deepseek-v3", sizes | {"experts": experts | {"groups": 0, "group_limit": 0}}
    if not experts["dense_first"]:
        del sizes["d_ff"]
    if row["gated"] == "0":
        # Megatron's GPT where no option says otherwise: GELU, and learned positions of the sequence's length.
        sizes |= {"activation": "gelu", "positions": "learned", "n_positions": whole(row, "seq_len")}
    if not shared and row["gated"] != "0":
        return "mixtral-8x22b", sizes | {"experts": experts}
    return "qwen2-57b-a14b", sizes | {"qkv_bias": False, "experts": experts | {"shared_gate": False}}


def _count(row: Row, column: str) -> int:
    """A whole number that may be zero, which an empty cell is too."""
    return int(float(row.get(column, "").strip() or 0))


def stands_in(row: Row) -> tuple[str, ...]:
    """Whose blocks are played for a model that is not shipped, a sentence; nothing for one that is, or is dense."""
    if not row.get("experts") or _named(row["model"]):
        return ()
    name, _ = _sized_experts(row)
    return (f"{row['model']} is played as {name}'s blocks in the row's sizes",)


def completed(row: Row) -> Row:
    """The row with sizes: a GPT named by its parameters alone has GPT-3's width for them, and heads GPT-3's size."""
    if not row.get("layers") and not row.get("d_model") and _family(row) == "gpt" and row.get("params"):
        gpt = of_size(named_shape("gpt2-xl"), read_columns(row).params)
        row = {**row, "layers": str(gpt.layers), "d_model": str(gpt.d_model)}
    return row if row.get("heads") else {**row, "heads": str(whole(row, "d_model") // HEAD)}


def _sizes(row: Row) -> Table:
    width = whole(row, "d_model")
    heads = whole(row, "heads")
    return {
        "layers": whole(row, "layers"),
        "d_model": width,
        "heads": heads,
        "vocab": whole(row, "vocab"),
        "kv_heads": whole(row, "kv_heads", heads),
        "head_dim": whole(row, "head_dim", width // heads),
        "d_ff": whole(row, "ffn", 4 * width),
    }
