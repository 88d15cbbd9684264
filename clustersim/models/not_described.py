"""Models that nobody has described here, by what they are: one that computes something else is no answer for them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from clustersim.errors import nearest
from clustersim.models.hf_experts import NAMES_NOT_DESCRIBED

OTHERS = {
    "gemma3n": "a Gemma 3n, whose layers are nested and share keys and values",
    "gemma3": "a Gemma 3, with local and global attention and norms on both sides of a block",
    "gemma2": "a Gemma 2, with capped attention scores and norms on both sides of a block",
    "gemma": "a Gemma, whose heads are wider than its model",
    "whisper": "an encoder-decoder for speech (Whisper)",
    "wav2vec2": "an encoder for speech (wav2vec 2.0)",
    "hubert": "an encoder for speech (HuBERT)",
    "pegasus": "an encoder-decoder (PEGASUS)",
    "m2m": "an encoder-decoder (M2M-100)",
    "nllb": "an encoder-decoder (NLLB)",
    "led": "an encoder-decoder with windowed attention (LED)",
    "blenderbot": "an encoder-decoder (BlenderBot)",
    "mamba": "a state space model (Mamba)",
    "falconmamba": "a state space model (Falcon Mamba)",
    "zamba": "a state space model with attention (Zamba)",
    "bamba": "a state space model with attention (Bamba)",
    "recurrentgemma": "a recurrent network (RecurrentGemma)",
    "rwkv": "a recurrent network (RWKV)",
    "xlstm": "a recurrent network (xLSTM)",
    "lstm": "a recurrent network (LSTM)",
    "gru": "a recurrent network (GRU)",
    "rnn": "a recurrent network",
    "swin": "a vision transformer with shifted windows (Swin)",
    "deit": "a vision transformer (DeiT)",
    "beit": "a vision transformer (BEiT)",
    "dinov": "a vision transformer (DINO)",
    "convnext": "a convolutional network (ConvNeXt)",
    "efficientnet": "a convolutional network (EfficientNet)",
    "mobilenet": "a convolutional network (MobileNet)",
    "clip": "a pair of an image and a text encoder (CLIP)",
    "siglip": "a pair of an image and a text encoder (SigLIP)",
    "llava": "a language model with images (LLaVA)",
    "unet": "a diffusion network (U-Net)",
    "stablediffusion": "a diffusion network (Stable Diffusion)",
    "dit": "a diffusion transformer (DiT)",
    "dlrm": "a recommender (DLRM)",
    "phi": "a Phi, with its own blocks",
    "falcon": "a Falcon, with parallel blocks",
    "gptneo": "a GPT-Neo",
    "gptj": "a GPT-J, with parallel blocks",
    "cohere": "a Command R, with parallel blocks",
    "deberta": "a DeBERTa, with disentangled attention",
    "distilbert": "a DistilBERT",
    "albert": "an ALBERT, whose layers share their weights",
    "electra": "an ELECTRA, which trains two networks",
    "longformer": "an encoder with windowed attention (Longformer)",
    "bigbird": "an encoder with sparse attention (BigBird)",
}
"""What they are, by the beginning of names and model types in lower-case letters, digits and dots."""

FAMILY = 0.75
"""How alike the first words of two names must be for one to be a slip of the pen."""


def what(name: str, kinds: Mapping[str, str]) -> str:
    """What a name is that begins as one of these do, the longest first; empty for none.

    >>> what("gemma-2-9b", OTHERS)
    'a Gemma 2, with capped attention scores and norms on both sides of a block'
    """
    plain = "".join(c for c in name.rsplit("/", 1)[-1].lower() if c.isalnum() or c == ".")
    return next((kinds[start] for start in sorted(kinds, key=len, reverse=True) if plain.startswith(start)), "")


def described(name: str) -> str:
    """Why a name is not known, to follow ``model 'x' is``; empty where nobody here knows what it is."""
    said = what(name, {**OTHERS, **NAMES_NOT_DESCRIBED})
    return f"{said}, which is not described" if said else ""


def same_family(name: str, known: Iterable[str]) -> str:
    """:func:`~clustersim.errors.nearest` among names of the same family; else the list of all.

    >>> same_family("lama2-13b", ["llama2-13b", "gpt2"]), same_family("mystery-13b", ["llama2-13b", "gpt2"])
    ("did you mean 'llama2-13b'?", 'known: gpt2, llama2-13b')
    """
    names, head = list(known), _head(name)
    close = [one for one in names if _head(one) == head] or [one for one in names if _slip(head, _head(one))]
    return nearest(name, close) if close else nearest("", names)


def _slip(one: str, other: str) -> bool:
    """Whether one word is the other, with letters that changed places or a few that are wrong.

    >>> _slip("gtp", "gpt"), _slip("lama", "llama"), _slip("mamba", "llama")
    (True, True, False)
    """
    return sorted(one) == sorted(other) or difflib.SequenceMatcher(None, one, other).ratio() >= FAMILY


def _head(name: str) -> str:
    """The letters a name begins with.

    >>> _head("GPT2-xl"), _head("bert-base")
    ('gpt', 'bert')
    """
    plain = name.rsplit("/", 1)[-1].lower()
    return plain[: next((i for i, c in enumerate(plain) if not c.isalpha()), len(plain))]
