"""DeepSeek-V4's attention beside a window: keys that stand for several tokens each, which an indexer may choose among,
and a projection out of groups of heads (its ``modeling_deepseek_v4.py`` in Hugging Face's transformers).

A compressed key is a sum of its tokens' projections, each element weighted by a softmax over the tokens of another
projection and a learned bias. Where an indexer chooses, each key also has the tokens of the one before it, by a second
series of both projections, and the indexer has compressed keys of its own.
"""

from __future__ import annotations

from dataclasses import replace

from clustersim.core.model import Kernel, Tensor
from clustersim.model import kernels as K
from clustersim.model.base import TransformerShape
from clustersim.model.sizes import LowRankOutput
from clustersim.model.tensor_parts import Part, Tensors, linear, linear_part

_WEIGHTED = ("h:w w:w w~h hh:h h:", ":h hh:h hh:h h~w ww:w w: w~h")
"""The bias added, softmax over tokens, its cast, the product with what is weighted, and its sum."""
_LAID_OUT = (" :h h:h :w w:w", " :w w:w :h h:h")
"""Two series side by side: both are put into tensors that are filled first."""


def series(s: TransformerShape) -> int:
    """Projections of a token's keys: two where a key overlaps with the one before it."""
    return 2 if "compressed_chosen" in s.mixing else 1


def compressor_kernels(s: TransformerShape) -> K.Kernels:
    """Compressed keys of a block, joined with those of its tokens; none where it has a window alone."""
    if not s.compression:
        return ()
    keys = float(s.seq_len + s.compressed_keys) * s.head_dim
    return (
        *compressed(s, "compressed", s.head_dim),
        K.memory("join_keys", keys, K.Passes(2, 2), cut="whole"),
    )


def compressed(s: TransformerShape, name: str, dim: int) -> K.Kernels:
    """Keys of ``dim`` elements: projections, what is weighted and summed, and a norm."""
    t = s.seq_len
    wide = series(s) * dim
    ahead, back = _WEIGHTED
    launches = (6, 11)
    if series(s) > 1:
        ahead, back = ahead + _LAID_OUT[0], back + _LAID_OUT[1]
        launches = (12, 18)
    weighted = K.memory(f"{name}_weighted", float(t * wide), K.operators(ahead, back, *launches), cut="whole", saved=4)
    return (
        K.sharing_input(K.linear(f"{name}_kv", t, s.d_model, wide)),
        K.sharing_input(K.linear(f"{name}_gate", t, s.d_model, wide)),
        weighted,
        K.norm(s, f"norm_{name}", float(s.compressed_keys * dim)),
    )


def compressor_part(s: TransformerShape, dim: int) -> Part:
    """Tensors of what compresses keys of ``dim`` elements."""
    if not s.compression:
        return lambda name: ()
    wide = series(s) * dim

    def made(name: str) -> Tensors:
        """Its tensors, by its name."""
        return (
            Tensor(f"{name}.position_bias", s.compression * wide, width=wide),
            *linear(f"{name}.kv_proj", s.d_model, wide),
            *linear(f"{name}.gate_proj", s.d_model, wide),
            *linear(f"{name}.kv_norm", 1, dim),
        )

    return made


def output_parts(s: TransformerShape) -> dict[str, Part]:
    """The two products that attention's output goes through."""
    out = s.low_output or LowRankOutput(1, 0)
    narrow = out.groups * out.rank
    return {
        "out_down": linear_part(s.width // out.groups, narrow, "column", there=s.attends),
        "out_up": linear_part(narrow, s.d_model, "row", there=s.attends),
    }


def projected_out(s: TransformerShape) -> K.Kernels:
    """The projection out of attention; of groups of heads, one product for each, and one of all that they become."""
    width = s.heads * s.value_dim
    out = s.low_output
    if out is None:
        return (K.linear("out", s.seq_len, width, s.d_model),)
    grouped = _grouped(s.seq_len, width, out)
    return (grouped, K.linear("out", s.seq_len, out.groups * out.rank, s.d_model))


def _grouped(tokens: int, width: int, out: LowRankOutput) -> Kernel:
    """A product of each group of heads with weights of its own, launched as one."""
    each = K.linear("out_down", tokens, width // out.groups, out.rank)
    return replace(
        each,
        repeat=out.groups,
        flops=each.flops * out.groups,
        backward_flops=each.backward_flops * out.groups,
        nbytes=each.nbytes * out.groups,
        backward_nbytes=each.backward_nbytes * out.groups,
        saved=each.saved * out.groups,
        cut="heads",
    )
