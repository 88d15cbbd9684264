"""Encoder-decoders from a config.json: T5 and its kin, BART and its kin, Whisper."""

from __future__ import annotations

import msgspec

from clustersim.core.errors import ModelError, nearest
from clustersim.core.model import Model
from clustersim.core.texts import Table, data_table
from clustersim.model.base import ACTIVATIONS, TransformerShape
from clustersim.model.config import Config
from clustersim.model.families import fields_of
from clustersim.model.pair_layers import Pair, Style, pair_layers
from clustersim.model.shape_checks import checked
from clustersim.model.transformer_model import execution

OPTIONS = ("seq_len", "source_len", "attention", "implementation")
"""What a scenario may say beside the config."""
_BART = Style(post_norm=True, embedding_norm=True, final_norm=False, offset=2)
_T5 = Style(positions="relative", logits_bias=False)
STYLES = {
    "bart": _BART,
    "plbart": _BART,
    "mbart": Style(embedding_norm=True, offset=2),
    "pegasus": Style(positions="sines"),
    "marian": Style(post_norm=True, final_norm=False, positions="sines"),
    "m2m_100": Style(positions="none", logits_bias=False),
    "blenderbot": Style(),
    "blenderbot-small": Style(post_norm=True, embedding_norm=True, final_norm=False),
    "whisper": Style(sound=True, logits_bias=False),
    "t5": _T5,
    "mt5": msgspec.structs.replace(_T5, scaled=False),
    "umt5": msgspec.structs.replace(_T5, every_bias=True),
}
"""How each ``model_type`` is laid out."""


def encoder_decoder(where: str, data: Table, options: Table) -> tuple[Model, Config]:
    """The model that a config describes, and its fields as they were read.

    ``options`` : of :data:`OPTIONS`; ``seq_len`` are tokens of the target and, unless ``source_len`` says other, of the
    source. Raises :class:`ModelError` naming file, field and value.
    """
    kind = str(data["model_type"])
    for option in options:
        if option not in OPTIONS:
            raise ModelError(f"{where}: {kind} takes no option {option!r}; {nearest(option, OPTIONS)}")
    c = Config(where, data, kind, fields_of(kind), tuple(data_table("inert_fields")["encoder_decoders"]))
    pair = (_relative if STYLES[kind].relative else _plain)(c, STYLES[kind], options)
    c.refuse_unread()
    source, target = pair.encoder.seq_len, pair.decoder.seq_len
    sound = pair.style.sound
    note = f"{2 * source} frames of sound to {target} tokens" if sound else f"{source} tokens to {target}"
    rates = [name for name in ("encoder_layerdrop", "decoder_layerdrop") if c.rate(name, 0.0)]
    dropped = (f"blocks that {' and '.join(rates)} skip at random count as if none were",) if rates else ()
    decoder = pair.decoder
    model = Model(
        where,
        "seq2seq",
        pair_layers(pair),
        seq_len=target,
        sample="clip" if sound else "sequence",
        n_blocks=pair.encoder.layers + decoder.layers,
        hidden=decoder.d_model,
        heads=decoder.heads,
        vocab=decoder.vocab,
        notes=(note, *dropped),
        kv_heads=decoder.heads,
        head_dim=decoder.head_dim,
        splits=(),
    )
    return model, c


def _lengths(c: Config, options: Table, usual: int) -> tuple[int, int]:
    """Tokens of a source and of a target."""
    target: int = options.get("seq_len", usual)
    source: int = options.get("source_len", target)
    lengths = (source, target)
    for name, tokens in zip(("source_len", "seq_len"), lengths, strict=True):
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise ModelError(f"{c.where}: {name} = {tokens!r} must be a whole number of tokens above zero")
    return lengths


def _tokens_and_places(c: Config, style: Style, options: Table) -> tuple[tuple[int, int], tuple[int, int]]:
    """Tokens of a source and of a target, and rows of the two tables of positions."""
    longest = c.number("max_target_positions" if style.sound else "max_position_embeddings", 1024, "the longest target")
    source, target = _lengths(c, options, longest)
    if style.sound:
        if "source_len" in options:
            raise ModelError(f"{c.where}: source_len is no option of {c.kind}, whose sound is always as long")
        source = c.number("max_source_positions", 1500, "half the frames of sound")
        if target > longest:
            raise ModelError(f"{c.where}: {target} tokens are more than 'max_target_positions' = {longest}")
        return (source, target), (source, longest)
    if style.positions == "none":
        return (source, target), (0, 0)
    if max(source, target) > longest:
        raise ModelError(f"{c.where}: {max(source, target)} tokens are more than 'max_position_embeddings' = {longest}")
    return (source, target), (longest + style.offset, longest + style.offset)


def _plain(c: Config, style: Style, options: Table) -> Pair:
    """BART's kin, and Whisper."""
    (source, target), rows = _tokens_and_places(c, style, options)
    vocab = c.need("vocab_size", "the number of tokens")
    if c.value("decoder_vocab_size") not in (None, vocab) or c.value("share_encoder_decoder_embeddings") is False:
        raise ModelError(f"{c.where}: a decoder with words of its own is not described; only one with the encoder's is")
    if c.flag("use_weighted_layer_sum", False, quiet=True):
        raise ModelError(f"{c.where}: 'use_weighted_layer_sum' = true is not described; only false is")
    common = {
        "d_model": c.need("d_model", "the width of the model"),
        "activation": _activation(c, c.text("activation_function", "gelu")),
        "vocab": vocab,
        "attn_dropout": c.rate("attention_dropout", 0.0),
        "hidden_dropout": c.rate("dropout", 0.0),
        "post_norm": style.post_norm,
    }
    sizes = [
        common
        | {
            "layers": c.need(f"{part}_layers", f"the {part}'s blocks"),
            "heads": c.need(f"{part}_attention_heads", f"the {part}'s attention heads"),
            "d_ff": c.need(f"{part}_ffn_dim", f"the width of the {part}'s MLP"),
            "seq_len": tokens,
            "n_positions": positions,
        }
        for part, tokens, positions in zip(("encoder", "decoder"), (source, target), rows, strict=True)
    ]
    encoder, decoder = (_shape(c, size, options, causal=i == 1) for i, size in enumerate(sizes))
    mels = c.number("num_mel_bins", 80, "of a spectrogram") if style.sound else 0
    inner = c.rate("activation_dropout", 0.0)
    tied = c.flag("tie_word_embeddings", True)
    if not tied and not style.sound:
        raise ModelError(f"{c.where}: 'tie_word_embeddings' = false is not described of {c.kind}; only true is")
    return Pair(style, encoder, decoder, tied, mels=mels, inner_dropout=inner)


def _relative(c: Config, style: Style, options: Table) -> Pair:
    """T5's kin, whose class has no attention but the one with scores in memory (modeling_t5.py of transformers)."""
    options = {"attention": "eager"} | options
    source, target = _lengths(c, options, 512)
    words = c.text("feed_forward_proj", "relu").split("-")
    if words[-1] not in {"relu", "gelu"} or len(words) > 2 or words[0] not in {"gated", words[-1]}:
        said = c.data.get("feed_forward_proj")
        raise ModelError(
            f"{c.where}: 'feed_forward_proj' = {said!r} must be 'relu', 'gelu', 'gated-gelu' or 'gated-relu'"
        )
    gated = len(words) == 2
    plain = {"relu": "relu", "gelu": "gelu"}[words[-1]]
    if not c.has("feed_forward_proj"):
        c.defaults["feed_forward_proj"] = words[-1]
    drops = c.rate("dropout_rate", 0.0)
    layers = c.need("num_layers", "the encoder's blocks")
    common = {
        "d_model": c.need("d_model", "the width of the model"),
        "heads": c.need("num_heads", "attention heads"),
        "head_dim": c.number("d_kv", 64, "the size of a head"),
        "d_ff": c.need("d_ff", "the width of the MLP"),
        "vocab": c.need("vocab_size", "the number of tokens"),
        "activation": "geglu" if gated else plain,
        "attn_dropout": drops,
        "hidden_dropout": drops,
        "norm": "rmsnorm",
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "norm_bias"), False),
    }
    behind = c.number("num_decoder_layers", layers, "the decoder's blocks")
    encoder = _shape(c, common | {"layers": layers, "seq_len": source}, options, causal=False)
    decoder = _shape(c, common | {"layers": behind, "seq_len": target}, options, causal=True)
    buckets = c.number("relative_attention_num_buckets", 32, "of relative positions")
    # False says that a checkpoint has a head of its own; the class ties what it makes anew all the same.
    tied = c.flag("tie_word_embeddings", True)
    return Pair(style, encoder, decoder, tied, buckets=buckets, inner_dropout=drops)


def _activation(c: Config, name: str) -> str:
    plain = {"swish": "silu", "gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu"}.get(name, name)
    if plain not in ACTIVATIONS or plain in {"swiglu", "geglu"}:
        raise ModelError(f"{c.where}: 'activation_function' = {name!r} is not described; {nearest(name, ACTIVATIONS)}")
    return plain


def _shape(c: Config, sizes: Table, options: Table, *, causal: bool) -> TransformerShape:
    attention, implementation = execution(options.get("attention"), options.get("implementation"))
    heads = sizes["heads"]
    if "head_dim" not in sizes and sizes["d_model"] % heads:
        raise ModelError(f"{c.where}: {heads} attention heads do not divide a width of {sizes['d_model']} evenly")
    how = {"attention": attention, "implementation": implementation, "causal": causal, "final_norm": False}
    how |= {"head": "mlm"}  # of whose logits, too, the loss makes no copy in fp32
    how |= {"positions": "learned" if sizes.get("n_positions") else "none", "kv_heads": heads}
    whole = {"name": c.where, "family": "bert", "head_dim": sizes["d_model"] // heads, **sizes, **how}
    return checked(TransformerShape(**whole))
