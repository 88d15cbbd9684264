"""Parameter tensors of blocks with experts or latent attention, named and ordered as :mod:`~clustersim.models.naming`
has them: Mixtral, DeepSeek-V2 and V3, Qwen2 and Qwen3 MoE, GPT-OSS."""

from __future__ import annotations

from collections.abc import Iterator

from clustersim.model import Tensor
from clustersim.models.base import Experts, Latent, Shape

Tensors = tuple[Tensor, ...]


def weight(name: str, n_in: int, n_out: int, cut: str = "sequence", *, bias: bool = False) -> Tensors:
    """A linear's weight, and its bias, which every rank has whole where the weight is cut by rows.

    By default it is whole on every rank, each of which sees only its own tokens under sequence parallelism.
    """
    made = Tensor(f"{name}.weight", n_in * n_out, cut=cut)
    return (made, Tensor(f"{name}.bias", n_out, cut="sequence" if cut == "row" else cut)) if bias else (made,)


def gated_mlp(prefix: str, s: Shape, width: int, names: tuple[str, str, str], kind: str = "") -> Tensors:
    """Gate, up and down of one MLP, in the order of ``names`` (``down`` is the one whose name has a 2 or says so)."""
    made: list[Tensor] = []
    for name in names:
        down = name in {"w2", "down_proj"}
        n_in, n_out = (width, s.d_model) if down else (s.d_model, width)
        made += weight(f"{prefix}.{name}", n_in, n_out, kind + ("row" if down else "column"))
    return tuple(made)


def experts(prefix: str, s: Shape, e: Experts, names: tuple[str, str, str]) -> Iterator[Tensor]:
    """All tensors of all routed experts."""
    for i in range(e.count):
        yield from gated_mlp(f"{prefix}.{i}", s, e.width, names, "expert_")


_PROJ = ("gate_proj", "up_proj", "down_proj")


def mixtral_moe(s: Shape, e: Experts, p: str) -> Tensors:
    """Mixtral's ``block_sparse_moe``: gate, then w1, w2, w3 of each expert."""
    moe = f"{p}.block_sparse_moe"
    return (
        *weight(f"{moe}.gate", s.d_model, e.count),
        *experts(f"{moe}.experts", s, e, ("w1", "w2", "w3")),
    )


def qwen_moe(s: Shape, e: Experts, p: str) -> Tensors:
    """Qwen's ``mlp``: gate, experts, and Qwen2's shared expert with its gate."""
    shared = gated_mlp(f"{p}.mlp.shared_expert", s, e.shared, _PROJ) if e.shared else ()
    scale = weight(f"{p}.mlp.shared_expert_gate", s.d_model, 1) if e.shared_gate else ()
    router = weight(f"{p}.mlp.gate", s.d_model, e.count)
    return (*router, *experts(f"{p}.mlp.experts", s, e, _PROJ), *shared, *scale)


def deepseek_moe(s: Shape, e: Experts, p: str) -> Tensors:
    """DeepSeek's ``mlp``: experts, gate (with V3's correction of scores), and all shared experts as one."""
    correction = (Tensor(f"{p}.mlp.gate.e_score_correction_bias", e.count),) if e.correction else ()
    shared = gated_mlp(f"{p}.mlp.shared_experts", s, e.shared, _PROJ) if e.shared else ()
    router = weight(f"{p}.mlp.gate", s.d_model, e.count)
    return (*experts(f"{p}.mlp.experts", s, e, _PROJ), *router, *correction, *shared)


def gpt_oss_moe(s: Shape, e: Experts, p: str) -> Tensors:
    """GPT-OSS's ``mlp``: a biased router, and one tensor for all experts' gate and up, one for their down."""
    moe, n = f"{p}.mlp.experts", e.count
    return (
        *weight(f"{p}.mlp.router", s.d_model, n, bias=True),
        Tensor(f"{moe}.gate_up_proj", n * s.d_model * 2 * e.width, cut="expert_column"),
        Tensor(f"{moe}.gate_up_proj_bias", n * 2 * e.width, cut="expert_column"),
        Tensor(f"{moe}.down_proj", n * e.width * s.d_model, cut="expert_row"),
        Tensor(f"{moe}.down_proj_bias", n * s.d_model, cut="expert"),
    )


def latent_attention(s: Shape, a: Latent, p: str) -> Tensors:
    """DeepSeek's ``self_attn``."""
    queries = (
        (
            *weight(f"{p}.q_a_proj", s.d_model, a.q_rank),
            Tensor(f"{p}.q_a_layernorm.weight", a.q_rank, cut="sequence"),
            *weight(f"{p}.q_b_proj", a.q_rank, s.width, "column"),
        )
        if a.q_rank
        else weight(f"{p}.q_proj", s.d_model, s.width, "column")
    )
    return (
        *queries,
        *weight(f"{p}.kv_a_proj_with_mqa", s.d_model, a.kv_rank + a.rope),
        Tensor(f"{p}.kv_a_layernorm.weight", a.kv_rank, cut="sequence"),
        *weight(f"{p}.kv_b_proj", a.kv_rank, s.heads * (a.nope + a.value), "column"),
        *weight(f"{p}.o_proj", s.heads * a.value, s.d_model, "row"),
    )


def dense_mlp(s: Shape, p: str) -> Tensors:
    """The MLP of a block without experts."""
    return gated_mlp(f"{p}.mlp", s, s.d_ff, _PROJ)


def deepseek_mtp(s: Shape, i: int, block: Tensors) -> Tensors:
    """A multi-token prediction module, as the checkpoint numbers it after the last block; embedding and head are the
    trunk's."""
    p, h = f"model.layers.{s.layers + i}", s.d_model
    return (
        Tensor(f"{p}.embed_tokens.weight", s.vocab * h, tied_to="model.embed_tokens.weight", cut="vocab"),
        Tensor(f"{p}.enorm.weight", h, cut="sequence"),
        Tensor(f"{p}.hnorm.weight", h, cut="sequence"),
        *weight(f"{p}.eh_proj", 2 * h, h),
        *block,
        Tensor(f"{p}.shared_head.norm.weight", h, cut="sequence"),
        Tensor(f"{p}.shared_head.head.weight", s.vocab * h, tied_to="lm_head.weight", cut="vocab"),
    )
