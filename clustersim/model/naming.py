"""Parameter tensors of transformers: how large each part of a family's row is, how tensor parallelism cuts it, and
whether the shape has it (a plain MLP has no gate, a dense block no experts)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

from clustersim.core.model import Tensor
from clustersim.model.base import Experts, Latent, Patches, TransformerShape
from clustersim.model.families import families

Tensors = tuple[Tensor, ...]
Part = Callable[[str], Tensors]
"""A part's tensors, by its name."""


def embedding(s: TransformerShape) -> Tensors:
    """Of what stands before the blocks."""
    return _made(s, families()[s.family].embedding)


def block(s: TransformerShape, i: int) -> Tensors:
    """Of block ``i``, whose shape is ``s``."""
    family = families()[s.family]
    rows = family.attention + family.block
    if i == 0:
        rows = tuple(row for row in rows if not row.startswith("norm_later "))
    return _made(s, rows, family.block_name.format(i) + ".")


def head(s: TransformerShape) -> Tensors:
    """Of the head with its final norm."""
    return _made(s, families()[s.family].head)


def mtp(s: TransformerShape, i: int) -> Tensors:
    """Of the i-th module that predicts further tokens, as the checkpoint numbers it after the last block; embedding and
    head are the trunk's."""
    family = families()[s.family]
    number = s.layers + i
    block_place = family.mtp.index("block")
    ahead = family.block_name.format(number) + "."
    first, last = (_made(s, rows, ahead) for rows in (family.mtp[:block_place], family.mtp[block_place + 1 :]))
    return (*first, *block(s.of_block(number), number), *last)


@lru_cache(maxsize=256)
def _block_parts(family: str) -> frozenset[str]:
    row = families()[family]
    return frozenset(line.split()[0] for line in row.attention + row.block)


def has(s: TransformerShape, part: str) -> bool:
    """Whether the family's blocks list a part (``qkv`` for one projection of all three)."""
    return part in _block_parts(s.family)


def _made(s: TransformerShape, rows: Iterable[str], ahead: str = "") -> Tensors:
    parts = _parts(s)
    return tuple(tensor for part, name in map(str.split, rows) for tensor in parts[part](ahead + name))


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


def _linear(n_in: int, n_out: int, cut: str = "sequence", *, bias: bool = False, there: bool = True) -> Part:
    return lambda name: linear(name, n_in, n_out, cut, bias=bias) if there else ()


def _of_gpt2(s: TransformerShape, n_in: int, n_out: int, cut: str, *, bias: bool, there: bool) -> Part:
    """A linear that is a Conv1D in Hugging Face's GPT-2."""
    transposed = s.family == "gpt2"
    return lambda name: linear(name, n_in, n_out, cut, bias=bias, transposed=transposed) if there else ()


def _tensor(numel: int, cut: str = "whole", *, there: bool = True, tied_to: str = "", width: int = 1) -> Part:
    return lambda name: (Tensor(name, numel, tied_to, cut, width),) if there else ()


@lru_cache(maxsize=64)
def _parts(s: TransformerShape) -> dict[str, Part]:
    parts = _outside(s) | _of_block(s) | _of_attention(s) | _of_experts(s, s.experts)
    return parts | _of_delta(s) | _of_space(s) | _of_lightning(s)


def _outside(s: TransformerShape) -> dict[str, Part]:
    """Of embeddings and heads."""
    h = s.d_model
    masked = s.head in {"mlm", "pretraining"}
    p = s.patches or Patches(0, 0, tokens=0)
    embedding_name = families()[s.family].embedding[0].removeprefix("words ")
    return {
        "words": _tensor(s.vocab * s.embedding_width, "vocab", width=s.embedding_width),
        "positions": _tensor(s.n_positions * h, there=s.positions == "learned", width=h),
        "segments": _tensor(s.token_types * h, there=s.token_types > 0, width=h),
        "project_in": _linear(s.embed_dim, h, there=s.embed_dim > 0),
        "project_out": _linear(h, s.embed_dim, there=s.embed_dim > 0),
        "embedding_norm": _linear(1, h, bias=s.norm_bias),
        "final_norm": _linear(1, h, bias=s.norm_bias, there=s.final_norm),
        "logits": _tensor(
            s.vocab * s.embedding_width,
            "vocab",
            there=s.head == "lm",
            tied_to=embedding_name if s.tied else "",
            width=s.embedding_width,
        ),
        "logits_bias": _tensor(s.vocab, "vocab", there=s.head == "lm" and s.head_bias),
        "pooler": _linear(h, h, bias=True, there=s.head in {"pooler", "pretraining"}),
        "masked_bias": _tensor(s.vocab, "vocab", there=masked),
        "masked_transform": _linear(h, h, bias=True, there=masked),
        "masked_norm": _linear(1, h, bias=s.norm_bias, there=masked),
        "masked_logits": _tensor(s.vocab * h, "vocab", there=masked, tied_to=embedding_name, width=h),
        "next_sentence": _linear(h, 2, bias=True, there=s.head == "pretraining"),
        "answers": _linear(h, 2, bias=True, there=s.head == "qa"),
        "token": _tensor(p.tokens * h, there=p.tokens > 0, width=p.tokens * h),
        "mask_token": _tensor(h, width=h),
        "places": _tensor(s.n_positions * h, there=p.side > 0, width=s.n_positions * h),
        "patches": _linear(p.channels * p.side**2 * p.depth, h, "whole", bias=True, there=p.side > 0),
        "patches_plain": _linear(p.channels * p.side**2 * p.depth, h, "whole", there=p.side > 0),
        "pooling": lambda name: _pooling(name, s) if s.pooling else (),
        "classes": _linear(h, s.vocab, "whole", bias=True),
        "words_again": _tensor(s.vocab * h, "vocab", tied_to=embedding_name, width=h),
        "logits_again": _tensor(s.vocab * h, "vocab", tied_to="lm_head.weight", width=h),
        "join": _linear(2 * h, h),
    }


def _pooling(name: str, s: TransformerShape) -> Tensors:
    """SigLIP's head: attention of one learned query to all patches, a norm and an MLP."""
    h = s.d_model
    return (
        Tensor(f"{name}.probe", h, width=h),
        *affine(f"{name}.attention.in_proj", h, 3 * h),
        *affine(f"{name}.attention.out_proj", h, h),
        *affine(f"{name}.layernorm", 1, h),
        *affine(f"{name}.mlp.fc1", h, s.d_ff),
        *affine(f"{name}.mlp.fc2", s.d_ff, h),
    )


def _of_block(s: TransformerShape) -> dict[str, Part]:
    h = s.d_model
    attends = s.attends
    dense = s.d_ff > 0 and not s.experts
    queries = s.width * (2 if s.attn_gate else 1)
    return {
        "norm": _linear(1, h, bias=s.norm_bias, there=s.norm_weight),
        "norm_later": _linear(1, h, bias=s.norm_bias),
        "norm_2": _linear(1, h, bias=s.norm_bias, there=not s.norm_places.startswith("parallel")),
        "two_norm": _linear(1, h, bias=s.norm_bias, there=s.norm_places == "parallel_two"),
        "not_two_norm": _linear(1, h, bias=s.norm_bias, there=s.norm_places != "parallel_two"),
        "layer_scale": _tensor(h),
        "qkv": _of_gpt2(s, h, queries + 2 * s.kv_width, "column", bias=s.qkv_bias, there=attends),
        "q": _linear(h, queries, "column", bias=s.qkv_bias, there=attends),
        "kv": _linear(h, s.kv_width, "column", bias=s.qkv_bias, there=attends),
        "k": _linear(h, s.kv_width, "column", bias=s.qkv_bias, there=attends and s.kv_from != "earlier"),
        "v": _linear(h, s.kv_heads * s.value_dim, "column", bias=s.qkv_bias, there=attends and s.kv_from == "own"),
        "mixer_norm": _linear(1, h, bias=s.norm_bias, there="none" not in s.mixing),
        "mlp_norm": _linear(1, h, bias=s.norm_bias, there=s.d_ff > 0 or s.experts is not None),
        "k_plain": _linear(h, s.kv_width, "column", there=attends),
        "out": _of_gpt2(s, s.width, h, "row", bias=s.out_bias, there=attends),
        "gate": _of_gpt2(s, h, s.d_ff, "column", bias=s.mlp_bias, there=s.gated and dense),
        "up": _of_gpt2(s, h, s.d_ff, "column", bias=s.mlp_bias, there=dense),
        "gate_up": _linear(h, 2 * s.d_ff, "column", bias=s.mlp_bias, there=dense),
        "down": _of_gpt2(s, s.d_ff, h, "row", bias=s.mlp_bias, there=dense),
        "scalar": _tensor(1, there=dense),
    }


def _of_attention(s: TransformerShape) -> dict[str, Part]:
    """Of attention that may be latent."""
    h = s.d_model
    attends = s.attends
    a = s.latent or Latent(0, 0, 0, 0, 0)
    plain = attends and s.latent is None
    latent = attends and s.latent is not None
    low = latent and a.q_rank > 0
    normed = s.qk_norm and plain
    wide = s.qk_norm_of in {"width", "heads"}
    each = s.qk_norm_of in {"head", "values"}
    index = attends and s.indexer is not None
    seen = a.q_rank if latent else h
    return {
        "sinks": _tensor(s.heads, "column", there=s.sinks and plain),
        **_of_inputs(s),
        "qk_norm": _tensor(s.head_dim, "sequence", there=normed and each),
        "k_norm": _tensor(s.head_dim, "sequence", there=normed and each and s.kv_from != "earlier"),
        "qk_norm_affine": _linear(1, s.head_dim, bias=True, there=normed),
        "q_wide_norm": _tensor(s.width, "column", there=normed and wide),
        "k_wide_norm": _tensor(s.kv_width, "column", there=normed and wide),
        "q_each_norm": _each_norm(s.heads, s.head_dim, there=normed),
        "k_each_norm": _each_norm(s.kv_heads, s.head_dim, there=normed),
        "q_down": _linear(h, a.q_rank, bias=s.qkv_bias, there=low),
        "q_norm": _tensor(a.q_rank, "sequence", there=low),
        "q_up": _linear(a.q_rank, s.width, "column", there=low),
        "q_whole": _linear(h, s.width, "column", bias=s.qkv_bias and plain, there=attends and not low),
        "kv_whole": _linear(h, s.kv_width, "column", bias=s.qkv_bias, there=plain),
        "kv_down": _linear(h, a.kv_rank + a.rope, bias=s.qkv_bias, there=latent),
        "kv_norm": _tensor(a.kv_rank, "sequence", there=latent),
        "kv_up": _linear(a.kv_rank, s.heads * (a.nope + a.value), "column", there=latent),
        "values_out": _linear(s.heads * s.value_dim, h, "row", bias=s.out_bias, there=attends),
        "index_q": _linear(seen, s.indexer.heads * s.indexer.dim if s.indexer else 0, there=index),
        "index_k": _linear(h, s.indexer.dim if s.indexer else 0, there=index),
        "index_k_norm": _linear(1, s.indexer.dim if s.indexer else 0, bias=True, there=index),
        "index_norm": _tensor(s.indexer.dim if s.indexer else 0, there=index),
        "index_weights": _linear(h, s.indexer.heads if s.indexer else 0, there=index and latent),
    }


def _of_inputs(s: TransformerShape) -> dict[str, Part]:
    """What blocks are told of their token: tables of all blocks, and what one block does with its own."""
    there = s.inputs is not None
    width = s.inputs.width if s.inputs else 0
    rows = s.inputs.vocab if s.inputs else 0
    every = s.layers * width
    return {
        "inputs_table": _tensor(rows * every, there=there, width=every),
        "inputs_projection": _linear(s.d_model, every, there=there),
        "inputs_norm": _linear(1, width, bias=s.norm_bias, there=there),
        "input_gate": _linear(s.d_model, width, there=there),
        "input_projection": _linear(width, s.d_model, there=there),
        "input_norm": _linear(1, s.d_model, bias=s.norm_bias, there=there),
    }


def _each_norm(heads: int, dim: int, *, there: bool) -> Part:
    """A norm of its own for each head (StableLM)."""
    return lambda name: tuple(Tensor(f"{name}.{i}.weight", dim) for i in range(heads)) if there else ()


def _of_delta(s: TransformerShape) -> dict[str, Part]:
    """Of the gated delta rule, with one gate a head or (``kda``) one a channel."""
    d = s.delta
    h = s.d_model
    parts = ("dt", "log", "conv", "in", "gates", "qkv", "z", "one", "norm", "out")
    channel = ("q", "v", "dt", "down", "up", "out_up")
    if d is None or not s.mixing & {"delta", "kda"}:
        return {f"delta_{part}": lambda _: () for part in parts} | {f"kda_{part}": lambda _: () for part in channel}
    keys = d.key_width
    values = d.value_width
    heads = d.value_heads
    return {
        "delta_dt": _tensor(heads, "column"),
        "delta_log": _tensor(heads, "column"),
        "delta_conv": _tensor((2 * keys + values) * d.conv, "column", width=d.conv),
        "delta_in": _linear(h, 2 * keys + 2 * values, "column"),
        "delta_gates": _linear(h, 2 * heads, "column"),
        "delta_qkv": _linear(h, 2 * keys + values, "column"),
        "delta_z": _linear(h, values, "column"),
        "delta_one": _linear(h, heads, "column"),
        "delta_norm": _tensor(d.value_dim, "sequence"),
        "delta_out": _linear(values, h, "row"),
        "kda_q": _linear(h, keys, "column"),
        "kda_v": _linear(h, values, "column"),
        "kda_dt": _tensor(keys, "column"),
        "kda_down": _linear(h, d.value_dim),
        "kda_up": _linear(d.value_dim, keys, "column"),
        "kda_out_up": _linear(d.value_dim, values, "column"),
    }


def _of_space(s: TransformerShape) -> dict[str, Part]:
    """Of state spaces and short convolutions; those of the first Mamba begin with ``scan``, of the second with
    ``ssd``."""
    p = s.space
    h = s.d_model
    mixing = s.mixing
    first = ("log", "d", "conv", "in", "x", "step", "out", "step_norm", "state_norm")
    second = ("dt", "log", "d", "conv", "in", "norm", "out")
    absent = [*(f"scan_{part}" for part in first), *(f"ssd_{part}" for part in second)]
    absent += ["gap_in", "gap_conv", "gap_out"]
    parts: dict[str, Part] = {part: lambda _: () for part in absent}
    if p is None:
        return parts
    if "mamba" in mixing:
        parts |= {
            "scan_log": _tensor(p.inner * p.state, "column", width=p.state),
            "scan_d": _tensor(p.inner, "column"),
            "scan_conv": _linear(p.conv, p.inner, "column", bias=p.conv_bias),
            "scan_in": _linear(h, 2 * p.inner, "column", bias=p.bias),
            "scan_x": _linear(p.inner, p.rank + 2 * p.state, "row"),
            "scan_step": _linear(p.rank, p.inner, "column", bias=True),
            "scan_out": _linear(p.inner, h, "row", bias=p.out_bias),
            "scan_step_norm": _tensor(p.rank, there=p.inner_norms),
            "scan_state_norm": _tensor(p.state, there=p.inner_norms),
        }
    if "mamba2" in mixing:
        parts |= {
            "ssd_dt": _tensor(p.heads, "column"),
            "ssd_log": _tensor(p.heads, "column"),
            "ssd_d": _tensor(p.heads, "column"),
            "ssd_conv": _linear(p.conv, p.conv_width, "column", bias=p.conv_bias),
            "ssd_in": _linear(h, p.inner + p.conv_width + p.heads, "column", bias=p.bias),
            "ssd_norm": _tensor(p.inner, "column", there=p.gated_norm),
            "ssd_out": _linear(p.inner, h, "row", bias=p.out_bias),
        }
    if "conv" in mixing:
        parts |= {
            "gap_in": _linear(h, 3 * h, "column", bias=p.bias),
            "gap_conv": _linear(p.conv, h, "column", bias=p.bias),
            "gap_out": _linear(h, h, "row", bias=p.bias),
        }
    return parts


def _of_lightning(s: TransformerShape) -> dict[str, Part]:
    there = "lightning" in s.mixing
    return {
        "lightning_norm": _tensor(s.width, "column", there=there),
        "lightning_qkv": _linear(s.d_model, 3 * s.width, "column", there=there),
        "lightning_out": _linear(s.width, s.d_model, "row", there=there),
        "lightning_gate": _linear(s.d_model, s.width, "column", there=there),
    }


_GATED = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
_GATED_W = {"w1": "column", "w2": "row", "w3": "column"}
_PLAIN = {"up_proj": "column", "down_proj": "row"}


def _mlp(
    name: str, s: TransformerShape, width: int, names: dict[str, str], kind: str = "", *, bias: bool = False
) -> Tensors:
    """Projections of one MLP in the order of ``names``, each with how it is cut."""
    sizes = {"column": (s.d_model, width), "row": (width, s.d_model)}
    return tuple(
        tensor
        for projection, cut in names.items()
        for tensor in linear(f"{name}.{projection}", *sizes[cut], kind + cut, bias=bias)
    )


def _of_experts(s: TransformerShape, e: Experts | None) -> dict[str, Part]:
    """Of a block with experts (none where it has no experts), and of the MLP that it has without."""
    names = _GATED if s.gated else _PLAIN
    if e is None:
        absent = ["router", "experts", "experts_w", "experts_joined", "correction", "shared", "shared_plain"]
        absent += ["shared_joined", "shared_gate", "latent_in", "latent_out"]
        absent += ["shared_gate_up", "expert_norm", "router_scale", "expert_scale"]
        parts: dict[str, Part] = {part: lambda _: () for part in absent}
        there = s.d_ff > 0
        parts["dense_joined"] = lambda name: _shared_joined(name, s, s.d_ff) if there else ()
        parts["dense"] = lambda name: _mlp(name, s, s.d_ff, names, bias=s.mlp_bias) if there else ()
        return parts

    row = e.row(s.d_model)
    routed = replace(s, d_model=row)

    def each(names: dict[str, str]) -> Part:
        if s.experts_joined:
            return lambda name: _joined(name, routed, e)
        every = range(e.count)
        return lambda name: tuple(t for i in every for t in _mlp(f"{name}.{i}", routed, e.width, names, "expert_"))

    return {
        "router": _linear(s.d_model, e.count, bias=e.bias),
        "expert_norm": _linear(1, s.d_model, bias=s.norm_bias, there=e.norms),
        "router_scale": _tensor(s.d_model, there=e.scales),
        "expert_scale": _tensor(e.count, there=e.scales),
        "experts": each(names),
        "experts_w": each(_GATED_W),
        "experts_joined": lambda name: _joined(name, routed, e),
        "latent_in": _linear(s.d_model, row, bias=s.mlp_bias, there=e.latent > 0),
        "latent_out": _linear(row, s.d_model, bias=s.mlp_bias, there=e.latent > 0),
        "correction": _tensor(e.count, there=e.correction),
        "shared": lambda name: _mlp(name, s, e.shared, names, bias=s.mlp_bias) if e.shared else (),
        "shared_plain": lambda name: _mlp(name, s, e.shared, names) if e.shared else (),
        "shared_gate_up": lambda name: _shared_gate_up(name, s, e.shared) if e.shared else (),
        "shared_joined": lambda name: _shared_joined(name, s, e.shared) if e.shared else (),
        "shared_gate": _linear(s.d_model, 1, there=e.shared_gate),
        "dense": lambda _: (),
        "dense_joined": lambda _: (),
    }


def _joined(name: str, s: TransformerShape, e: Experts) -> Tensors:
    """One tensor for all experts' gate and up, one for their down, as transformers 5 has them."""
    n = e.count
    h = s.d_model
    f = e.width
    wide = 2 * f if s.gated else f
    up = f"{name}.{'gate_up' if s.gated else 'up'}_proj"
    down = f"{name}.down_proj"
    tensors = [Tensor(up, n * h * wide, cut="expert_column", width=h * wide)]
    if e.bias:
        tensors.append(Tensor(f"{up}_bias", n * wide, cut="expert_column", width=wide))
    tensors.append(Tensor(down, n * f * h, cut="expert_row", width=f * h))
    if e.bias:
        tensors.append(Tensor(f"{down}_bias", n * h, cut="expert", width=h))
    return tuple(tensors)


def _shared_gate_up(name: str, s: TransformerShape, width: int) -> Tensors:
    """The same under other names (MiniMax-M3)."""
    up = linear(f"{name}.gate_up_proj", s.d_model, 2 * width, "column")
    return (*up, *linear(f"{name}.down_proj", width, s.d_model, "row"))


def _shared_joined(name: str, s: TransformerShape, width: int) -> Tensors:
    """Gate and up of a shared expert as one (Granite)."""
    up = linear(f"{name}.input_linear", s.d_model, 2 * width, "column")
    return (*up, *linear(f"{name}.output_linear", width, s.d_model, "row"))
