"""Parameter tensors of transformers: how large each part of ``data/naming.toml`` is, how tensor parallelism cuts it,
and whether the shape has it (a plain MLP has no gate, a dense block no experts)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import msgspec

from clustersim.core.model import Tensor
from clustersim.core.texts import Table, data_table
from clustersim.model.base import ExpertShape, Latent, Patches, TransformerShape

Tensors = tuple[Tensor, ...]
Part = Callable[[str], Tensors]
"""A part's tensors, by its name."""


class Family(msgspec.Struct, frozen=True):
    """Names of one class, as the file has them."""

    embedding: tuple[str, ...]
    block_name: str
    block: tuple[str, ...]
    head: tuple[str, ...]
    attention: tuple[str, ...] = ()
    mtp: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def families() -> dict[str, Family]:
    """Every class that is known."""
    known: dict[str, Table] = {"": {}}
    for name, table in data_table("naming").items():
        known[name] = known[table.get("like", "")] | table
    return {name: msgspec.convert(table, Family) for name, table in known.items() if name}


def embedding(s: TransformerShape) -> Tensors:
    """Of what stands before the blocks."""
    return _made(s, families()[s.family].embedding)


def block(s: TransformerShape, i: int) -> Tensors:
    """Of block ``i``, whose shape is ``s``."""
    family = families()[s.family]
    return _made(s, family.attention + family.block, family.block_name.format(i) + ".")


def head(s: TransformerShape) -> Tensors:
    """Of the head with its final norm."""
    return _made(s, families()[s.family].head)


def mtp(s: TransformerShape, i: int) -> Tensors:
    """Of the i-th module that predicts further tokens, as the checkpoint numbers it after the last block; embedding and
    head are the trunk's."""
    family = families()[s.family]
    number = s.layers + i
    at = family.mtp.index("block")
    ahead = family.block_name.format(number) + "."
    first, last = (_made(s, rows, ahead) for rows in (family.mtp[:at], family.mtp[at + 1 :]))
    return (*first, *block(s.of_block(number), number), *last)


def _made(s: TransformerShape, rows: Iterable[str], ahead: str = "") -> Tensors:
    known = _parts(s)
    return tuple(tensor for part, name in map(str.split, rows) for tensor in known[part](ahead + name))


def linear(name: str, n_in: int, n_out: int, cut: str = "sequence", *, bias: bool = False) -> Tensors:
    """A linear's weight, and its bias, which every rank has whole where the weight is cut by rows.

    By default it is whole on every rank, each of which sees only its own tokens under sequence parallelism.
    """
    dot = "_" if name.endswith("in_proj") else "."  # torch.nn.MultiheadAttention holds its projection itself
    made = Tensor(f"{name}{dot}weight", n_in * n_out, cut=cut)
    return (made, Tensor(f"{name}{dot}bias", n_out, cut="sequence" if cut == "row" else cut)) if bias else (made,)


def affine(name: str, n_in: int, n_out: int, *, bias: bool = True) -> Tensors:
    """A linear's weight and bias (a norm's, where ``n_in`` is 1), whole on every rank."""
    return linear(name, n_in, n_out, "whole", bias=bias)


def _linear(n_in: int, n_out: int, cut: str = "sequence", *, bias: bool = False, there: bool = True) -> Part:
    return lambda name: linear(name, n_in, n_out, cut, bias=bias) if there else ()


def _tensor(numel: int, cut: str = "whole", *, there: bool = True, tied_to: str = "") -> Part:
    return lambda name: (Tensor(name, numel, tied_to, cut),) if there else ()


@lru_cache(maxsize=64)
def _parts(s: TransformerShape) -> dict[str, Part]:
    return _outside(s) | _of_block(s) | _of_attention(s) | _of_experts(s, s.experts)


def _outside(s: TransformerShape) -> dict[str, Part]:
    """Of embeddings and heads."""
    h = s.d_model
    masked = s.head in {"mlm", "pretraining"}
    p = s.patches or Patches(0, 0, tokens=0)
    words = families()[s.family].embedding[0].removeprefix("words ")
    return {
        "words": _tensor(s.vocab * s.embedding_width, "vocab"),
        "positions": _tensor(s.n_positions * h, there=s.positions == "learned"),
        "segments": _tensor(s.token_types * h, there=s.token_types > 0),
        "project_in": _linear(s.embed_dim, h, there=s.embed_dim > 0),
        "project_out": _linear(h, s.embed_dim, there=s.embed_dim > 0),
        "final_norm": _linear(1, h, bias=s.norm_bias, there=s.final_norm),
        "logits": _tensor(s.vocab * s.embedding_width, "vocab", there=s.head == "lm", tied_to=words if s.tied else ""),
        "pooler": _linear(h, h, bias=True, there=s.head in {"pooler", "pretraining"}),
        "masked_bias": _tensor(s.vocab, "vocab", there=masked),
        "masked_transform": _linear(h, h, bias=True, there=masked),
        "masked_norm": _linear(1, h, bias=s.norm_bias, there=masked),
        "masked_logits": _tensor(s.vocab * h, "vocab", there=masked, tied_to=words),
        "next_sentence": _linear(h, 2, bias=True, there=s.head == "pretraining"),
        "answers": _linear(h, 2, bias=True, there=s.head == "qa"),
        "token": _tensor(p.tokens * h, there=p.tokens > 0),
        "places": _tensor(s.n_positions * h, there=p.side > 0),
        "patches": _linear(p.channels * p.side**2, h, "whole", bias=True, there=p.side > 0),
        "classes": _linear(h, s.vocab, "whole", bias=True),
        "words_again": _tensor(s.vocab * h, "vocab", tied_to=words),
        "logits_again": _tensor(s.vocab * h, "vocab", tied_to="lm_head.weight"),
        "join": _linear(2 * h, h),
    }


def _of_block(s: TransformerShape) -> dict[str, Part]:
    h = s.d_model
    return {
        "norm": _linear(1, h, bias=s.norm_bias),
        "qkv": _linear(h, s.width + 2 * s.kv_width, "column", bias=s.qkv_bias),
        "q": _linear(h, s.width, "column", bias=s.qkv_bias),
        "kv": _linear(h, s.kv_width, "column", bias=s.qkv_bias),
        "out": _linear(s.width, h, "row", bias=s.out_bias),
        "gate": _linear(h, s.d_ff, "column", bias=s.mlp_bias, there=s.gated),
        "up": _linear(h, s.d_ff, "column", bias=s.mlp_bias),
        "down": _linear(s.d_ff, h, "row", bias=s.mlp_bias),
    }


def _of_attention(s: TransformerShape) -> dict[str, Part]:
    """Of attention that may be latent."""
    h = s.d_model
    plain = s.latent is None
    a = s.latent or Latent(0, 0, 0, 0, 0)
    low = a.q_rank > 0
    return {
        "sinks": _tensor(s.heads, "column", there=s.sinks and plain),
        "qk_norm": _tensor(s.head_dim, "sequence", there=s.qk_norm and plain),
        "q_down": _linear(h, a.q_rank, there=low),
        "q_norm": _tensor(a.q_rank, "sequence", there=low),
        "q_up": _linear(a.q_rank, s.width, "column", there=low),
        "q_whole": _linear(h, s.width, "column", bias=s.qkv_bias and plain, there=not low),
        "kv_whole": _linear(h, s.kv_width, "column", bias=s.qkv_bias, there=plain),
        "kv_down": _linear(h, a.kv_rank + a.rope, there=not plain),
        "kv_norm": _tensor(a.kv_rank, "sequence", there=not plain),
        "kv_up": _linear(a.kv_rank, s.heads * (a.nope + a.value), "column", there=not plain),
        "values_out": _linear(s.heads * s.value_dim, h, "row", bias=s.out_bias and plain),
    }


_GATED = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
_GATED_W = {"w1": "column", "w2": "row", "w3": "column"}


def _gated_mlp(name: str, s: TransformerShape, width: int, names: dict[str, str], kind: str = "") -> Tensors:
    """Gate, up and down of one MLP in the order of ``names``, each with how it is cut."""
    sizes = {"column": (s.d_model, width), "row": (width, s.d_model)}
    return tuple(tensor for one, cut in names.items() for tensor in linear(f"{name}.{one}", *sizes[cut], kind + cut))


def _of_experts(s: TransformerShape, e: ExpertShape | None) -> dict[str, Part]:
    """Of a block with experts (none where it has no experts), and of the MLP that it has without."""
    if e is None:
        absent = ("router", "experts", "experts_w", "experts_joined", "correction", "shared", "shared_gate")
        return {part: lambda _: () for part in absent} | {"dense": lambda name: _gated_mlp(name, s, s.d_ff, _GATED)}

    def each(names: dict[str, str]) -> Part:
        every = range(e.count)
        return lambda name: tuple(t for i in every for t in _gated_mlp(f"{name}.{i}", s, e.width, names, "expert_"))

    def joined(name: str) -> Tensors:
        n = e.count
        h = s.d_model
        f = e.width
        up = f"{name}.gate_up_proj"
        down = f"{name}.down_proj"
        return (
            Tensor(up, n * h * 2 * f, cut="expert_column"),
            Tensor(f"{up}_bias", n * 2 * f, cut="expert_column"),
            Tensor(down, n * f * h, cut="expert_row"),
            Tensor(f"{down}_bias", n * h, cut="expert"),
        )

    return {
        "router": _linear(s.d_model, e.count, bias=e.bias),
        "experts": each(_GATED),
        "experts_w": each(_GATED_W),
        "experts_joined": joined,
        "correction": _tensor(e.count, there=e.correction),
        "shared": lambda name: _gated_mlp(name, s, e.shared, _GATED) if e.shared else (),
        "shared_gate": _linear(s.d_model, 1, there=e.shared_gate),
        "dense": lambda _: (),
    }
