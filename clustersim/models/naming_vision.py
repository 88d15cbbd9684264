"""Parameter tensors of vision transformers, named and ordered as timm, torchvision and Hugging Face register them."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from clustersim.model import Tensor
from clustersim.models.base import Shape
from clustersim.models.naming_experts import Tensors, weight

_NORM, _QKV, _HEADS, _OUT, _UP, _DOWN = "norm", "qkv", "heads", "out", "up", "down"


class Style(msgspec.Struct, frozen=True):
    """Whose names.

    Parameters
    ----------
    first : names of the class's token, the patches' projection and the positions, in the order they are registered.
    block_name : of a block, ``{}`` for its number. modules : (what it is, its name) of a block in their order.
    norm, classes : of the last norm and of the head.
    """

    first: tuple[tuple[str, str], ...]
    block_name: str
    modules: tuple[tuple[str, str], ...]
    norm: str
    classes: str

    def embedding(self, s: Shape) -> Tensors:
        """The class's token, the projection of patches, positions: whole on every tensor-parallel rank."""
        p, h = s.patches, s.d_model
        if p is None:
            return ()
        pixels = p.channels * p.side**2
        known = {
            "token": (Tensor("", p.tokens * h),) * bool(p.tokens),
            "patches": (Tensor(".weight", pixels * h), Tensor(".bias", h)),
            "positions": (Tensor("", s.n_positions * h),),
        }
        return tuple(replace(t, name=f"{name}{t.name}") for what, name in self.first for t in known[what])

    def block(self, s: Shape, i: int) -> Tensors:
        """Norms, attention and MLP of block ``i``."""
        h, ahead = s.d_model, self.block_name.format(i)
        known = {
            _QKV: (h, 3 * s.width, "column", s.qkv_bias), _HEADS: (h, s.width, "column", s.qkv_bias),
            _OUT: (s.width, h, "row", s.out_bias), _UP: (h, s.d_ff, "column", s.mlp_bias),
            _DOWN: (s.d_ff, h, "row", s.mlp_bias), _NORM: (1, h, "sequence", s.norm_bias),
        }  # fmt: skip
        made: list[Tensor] = []
        for what, name in self.modules:
            n_in, n_out, cut, bias = known[what]
            made += weight(f"{ahead}.{name}", n_in, n_out, cut, bias=bias)
        # torch.nn.MultiheadAttention holds its projection itself.
        return tuple(replace(t, name=t.name.replace("in_proj.", "in_proj_")) for t in made)

    def head(self, s: Shape) -> Tensors:
        """The norm of all tokens, and the classes of one."""
        made = weight(self.norm, 1, s.d_model, bias=s.norm_bias)
        return (*made, *weight(self.classes, s.d_model, s.vocab, "whole", bias=True))


VISION = {
    "vit": Style(
        (("token", "cls_token"), ("positions", "pos_embed"), ("patches", "patch_embed.proj")),
        "blocks.{}",
        ((_NORM, "norm1"), (_QKV, "attn.qkv"), (_OUT, "attn.proj"), (_NORM, "norm2"), (_UP, "mlp.fc1"),
         (_DOWN, "mlp.fc2")),
        "norm", "head",
    ),
    "vit_torchvision": Style(
        (("token", "class_token"), ("patches", "conv_proj"), ("positions", "encoder.pos_embedding")),
        "encoder.layers.encoder_layer_{}",
        ((_NORM, "ln_1"), (_QKV, "self_attention.in_proj"), (_OUT, "self_attention.out_proj"), (_NORM, "ln_2"),
         (_UP, "mlp.0"), (_DOWN, "mlp.3")),
        "encoder.ln", "heads.head",
    ),
    "vit_hf": Style(
        (("token", "vit.embeddings.cls_token"), ("positions", "vit.embeddings.position_embeddings"),
         ("patches", "vit.embeddings.patch_embeddings.projection")),
        "vit.encoder.layer.{}",
        ((_HEADS, "attention.attention.query"), (_HEADS, "attention.attention.key"),
         (_HEADS, "attention.attention.value"), (_OUT, "attention.output.dense"), (_UP, "intermediate.dense"),
         (_DOWN, "output.dense"), (_NORM, "layernorm_before"), (_NORM, "layernorm_after")),
        "vit.layernorm", "classifier",
    ),
}  # fmt: skip
"""timm's VisionTransformer, torchvision's, and Hugging Face's ViTForImageClassification."""
