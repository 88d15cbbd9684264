"""Vision transformers (Dosovitskiy et al., arXiv:2010.11929; Zhai et al., 2106.04560): shapes by the names of timm and
torchvision, and the kernels of what is not a transformer's: patches in front of the blocks, classes behind them.

An image is cut in patches, which one convolution turns into tokens; a token for the class stands before them. There is
no vocabulary: embedding and head are whole on every tensor-parallel rank, as Megatron-LM's vit_backbone has them.
"""

from __future__ import annotations

from dataclasses import replace

from clustersim.core.errors import ModelError
from clustersim.core.model import Kernel
from clustersim.model import kernels as K
from clustersim.model.base import Patches, TransformerShape
from clustersim.model.conv_layers import Feature, convolution

_SIZES = {
    "tiny": (192, 12, 3, 768),
    "small": (384, 12, 6, 1536),
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
    "huge": (1280, 32, 16, 5120),
    "giant": (1408, 40, 16, 6144),
    "gigantic": (1664, 48, 16, 8192),
}
"""Width, blocks, heads and width of the MLP."""
_TIMM = (
    "tiny_patch16_224",
    "small_patch16_224",
    "small_patch32_224",
    "base_patch16_224",
    "base_patch16_384",
    "base_patch32_224",
    "large_patch16_224",
    "large_patch16_384",
    "large_patch32_224",
    "huge_patch14_224",
    "giant_patch14_224",
    "gigantic_patch14_224",
)
_TORCHVISION = {"b_16": "base", "b_32": "base", "l_16": "large", "l_32": "large", "h_14": "huge"}
VITS: dict[str, tuple[str, str, int, int]] = {
    f"vit_{name}": ("vit_torchvision", size, int(name[2:]), 224) for name, size in _TORCHVISION.items()
} | {
    f"vit_{name}": ("vit", size, int(patch.removeprefix("patch")), int(side))
    for name in _TIMM
    for size, patch, side in [name.split("_")]
}
"""Name -> whose tensor names, size, and pixels of a patch's and an image's side."""


def vit_shape(
    name: str, *, image_size: int | None = None, class_tokens: int = 1, classes: int = 1000
) -> TransformerShape:
    """The shape of a vision transformer.

    Parameters
    ----------
    name : a key of :data:`VITS`. image_size : pixels of a side; the name's when absent.
    class_tokens : tokens before those of the patches; Megatron-LM has 8, so that tensor-parallel ranks share them out.
    classes : outputs of the head; ImageNet's.

    Raises :class:`ModelError` where patches do not cut the image.

    >>> vit_shape("vit_b_16").seq_len, vit_shape("vit_huge_patch14_224", class_tokens=8).seq_len
    (197, 264)
    """
    style, size, patch, side = VITS[name]
    width, layers, heads, ffn = _SIZES[size]
    patches = Patches(side if image_size is None else image_size, patch, tokens=class_tokens)
    return seeing(
        TransformerShape(
            name=name,
            family=style,
            layers=layers,
            d_model=width,
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            d_ff=ffn,
            vocab=classes,
            seq_len=1,
        ),
        patches,
    )


def seeing(shape: TransformerShape, patches: Patches) -> TransformerShape:
    """The shape with an image's tokens for a sequence's, and a head that says its class.

    Raises :class:`ModelError` where patches do not cut the image.
    """
    for field, value, least in (("image", patches.image, 1), ("patch", patches.side, 1), ("tokens", patches.tokens, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(f"{shape.name}: {field} = {value!r} must be a whole number of at least {least}")
    if patches.image % patches.side:
        near = max(1, round(patches.image / patches.side)) * patches.side
        raise ModelError(
            f"{shape.name}: patches of {patches.side} pixels do not cut an image of {patches.image}; use {near}"
        )
    tokens = patches.grid + patches.tokens
    return replace(shape, patches=patches, seq_len=tokens, n_positions=tokens, head="classes", causal=False, tied=False)


def patch_kernels(s: TransformerShape, p: Patches) -> tuple[Kernel, ...]:
    """Patches to tokens, the class's before them, positions added. Pixels need no gradient, weights keep them."""
    side = p.image // p.side
    elements = float(s.seq_len * s.d_model)
    image = Feature(p.channels, p.image, p.image, image=True)
    conv = convolution(image, Feature(s.d_model, side, side), (p.side, p.side), 1)
    drop = (replace(K.memory("dropout", elements, K.DROPOUT, saved=K.MASK), cut="whole"),) if s.hidden_dropout else ()
    return (
        replace(conv, name="patches", cut="whole", saved=float(image.size)),
        # Forward lays the class's token and the patches' side by side, then reads them and writes the sum.
        K.memory("positions", elements, K.Passes(4, 2, 2, 2), cut="whole"),
        *drop,
    )


def class_kernels(s: TransformerShape) -> tuple[Kernel, ...]:
    """A norm of all tokens; classes and their loss of the first one."""
    return (
        K.norm(s, "norm", saved=1),
        replace(K.linear("classes", 1, s.d_model, s.vocab), cut="whole"),
        replace(K.cross_entropy(s, 1), cut="whole"),
    )
