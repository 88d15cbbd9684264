"""The model a row of a measurement table means: by its name, by its columns, or a reason why neither is enough.

Tables name models as people do ("BERT-large", "gpt2-xl ~1.4B", "MPT-30b"). The name finds a shipped config; the columns
``layers``, ``d_model``, ``heads``, ``seq_len`` and ``vocab`` change its dimensions; an exact ``params`` decides between
variants (biases, positions); and the row's words say how it ran (eager, flash, compiled).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from clustersim.core.errors import ModelError
from clustersim.core.model import Model
from clustersim.core.paths import shipped
from clustersim.model.base import TransformerShape
from clustersim.model.convnets import CONVNETS, convnet
from clustersim.model.named_models import NETWORKS, model
from clustersim.model.names import names, what
from clustersim.model.published import config, configs
from clustersim.model.seq2seq import SEQ2SEQ, seq2seq
from clustersim.model.transformer_model import build, execution
from clustersim.model.transformer_xl import TRANSFORMER_XL, transformer_xl
from tests.evidence.electra import electra
from tests.evidence.sized import BY_COUNT, named_shape, of_size, size_in

Row = Mapping[str, str]

# Predictions per sequence in BERT's pretraining scripts: 20 of 128 tokens, 80 of 512.
_MASKED_SHARE = 80 / 512
_BERT_SQUAD_TOKENS = 384


@dataclass(frozen=True)
class ModelColumns:
    """The numbers of a row; 0 where it does not say. ``exact`` when ``params`` is a whole number written out."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    seq_len: int
    vocab: int
    params: float
    exact: bool


def from_row(row: Row, *, implementation: str | None = None, gathers_masked: bool = True) -> Model:
    """The model of a row in the columns of a training-step table (``model``, ``params``, ``layers``, ``d_model``...).

    Parameters
    ----------
    row : column name to text; empty where the source does not say. ``other`` and ``notes`` say how it ran.
    implementation : op lists where the row says nothing of them: ``eager``, ``flash`` or ``fused``.
    gathers_masked : BERT's pretraining head sees only the masked tokens.

    The Model's notes say what was assumed. Raises :class:`ModelError` with the reason when the row does not say enough,
    or the network is of a kind that is not described.

    >>> from_row({"model": "GPT-2 124M", "layers": "12", "d_model": "768", "heads": "12"}).parameters
    124439808
    """
    name = row.get("model", "").strip()
    if not name:
        raise ModelError("the row names no model")
    plain = _plain(name)
    if convnet_name := _convnet_name(plain, row):
        side = re.search(r"(\d+)x\1\b", name)
        return convnet(convnet_name, int(side.group(1)) if side else None, implementation=implementation or "eager")
    if network_name := next((network for network in NETWORKS if plain.startswith(network)), ""):
        return NETWORKS[network_name]()
    if pair := _paired(_letters(name)):
        tokens = _whole(row, "seq_len")
        if pair in SEQ2SEQ:
            return seq2seq(pair, tokens or None, implementation=implementation or "eager")
        if not tokens:
            raise ModelError(f"model {name!r}: the row gives no seq_len, and it runs at any")
        return model(pair, seq_len=tokens, attention="eager", implementation=implementation or "eager")
    for xl_name in TRANSFORMER_XL:
        if plain == _plain(xl_name):
            # Lambda's benchmark calls NVIDIA's script without its --adaptive.
            adaptive = "lambdal/deeplearning-benchmark" not in row.get("source", "")
            return transformer_xl(xl_name, _whole(row, "seq_len") or None, adaptive=adaptive)
    if unknown := what(plain, "rows", "experts"):
        raise ModelError(f"model {name!r}: {unknown} is not described")
    return _transformer(name, plain, row, implementation, gathers_masked)


def _paired(spelling: str) -> str:
    """The encoder-decoder that people mean, by letters and digits: ``t511b``, ``transformer``; empty for none."""
    if spelling in {"transformer", "transformerbig"}:
        return "transformer-big"
    pairs = (name for name in configs() if config(name).get("model_type") in {"t5", "bart"})
    return next((name for name in pairs if spelling.startswith(_letters(name))), "")


def _transformer(name: str, plain: str, row: Row, implementation: str | None, gathers_masked: bool) -> Model:
    columns = read_columns(row)
    shape, notes = _named_shape(name, plain, columns)
    seq_len, head, positions = _task(name, shape, columns, row)
    positions = positions if gathers_masked else 0
    attention, implementation = _execution(shape.family, row, implementation)
    shape = replace(shape, name=name, seq_len=seq_len, attention=attention, implementation=implementation, head=head)
    if shape.n_positions and shape.family in {"gpt2", "mpt"}:
        # Training scripts size the table to the sequence; GPT-2's own never has fewer than 1,024 rows.
        rows = max(1024, seq_len) if shape.family == "gpt2" else seq_len
        shape = replace(shape, n_positions=rows)
    # Composer's MPT has flash-attn's loss unless it is told otherwise (llm-foundry modeling_mpt.py, ``loss_fn``).
    shape = replace(shape, head_positions=positions, fused_loss="llm-foundry" in _words(row))
    pairs = "electra" in plain and head == "pretraining"
    model = electra(shape) if pairs else build(_variant(shape, columns), notes)
    if columns.params and abs(model.parameters / columns.params - 1) > (0 if columns.exact else 0.05):
        notes += (f"{model.parameters:,} parameters where the row says {columns.params:,.0f}",)
    return replace(model, notes=notes)


def read_columns(row: Row) -> ModelColumns:
    """A row's numbers: ``32 (8 kv)`` heads, ``340M`` or ``1.5e9`` parameters.

    Raises :class:`ModelError` for text in a numeric column that is no number.
    """
    heads = re.fullmatch(r"(\d+)?(?: \((\d+) kv\))?", row.get("heads", "").strip())
    if heads is None:
        raise ModelError(f"model {row.get('model')!r}: heads = {row['heads']!r} is neither '32' nor '32 (8 kv)'")
    text = row.get("params", "").strip()
    params = re.fullmatch(r"([\d.]+(?:e\d+)?)([MBT]?)", text)
    if text and params is None:
        raise ModelError(f"model {row.get('model')!r}: params = {text!r} is neither a number nor text such as '1.3B'")
    scale = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}
    return ModelColumns(
        layers=_whole(row, "layers"),
        d_model=_whole(row, "d_model"),
        heads=int(heads.group(1) or 0),
        kv_heads=int(heads.group(2) or 0),
        seq_len=_whole(row, "seq_len"),
        vocab=_whole(row, "vocab"),
        params=float(params.group(1)) * scale[params.group(2)] if params else 0.0,
        exact=text.isdigit(),
    )


def _whole(row: Row, column: str) -> int:
    text = (row.get(column) or "").strip()
    if text and not re.fullmatch(r"\d+(\.0)?", text):
        raise ModelError(f"model {row.get('model')!r}: {column} = {text!r} is not a whole number")
    return int(float(text)) if text else 0


def _plain(name: str) -> str:
    """Letters, digits and dots of a name, without what stands in parentheses or a size after a space."""
    return _letters(re.sub(r"\s~?[\d.]+(?:e\d+|[bmt])\b", "", name, flags=re.IGNORECASE))


def _convnet_name(plain: str, row: Row) -> str:
    plain = plain.removesuffix("v1.5")
    convnet_names = {_plain(name): name for name in CONVNETS} | names()["convnets"]
    name = convnet_names.get(plain, "")
    if "tf_cnn_benchmarks" in row.get("other", ""):
        # TensorFlow's benchmark strides in the first 1x1 and trains Inception without its auxiliary classifier.
        name = next((v for v in (f"{name}_v1", f"{name}_no_aux") if v in CONVNETS), name)
    return name


def _named_shape(name: str, plain: str, c: ModelColumns) -> tuple[TransformerShape, tuple[str, ...]]:
    """The shipped shape of that name where dimensions agree, else its family with the row's dimensions."""
    family = next((family for word, family in names()["families"].items() if word in plain), "")
    if not family:
        raise ModelError(f"model {name!r}: not a known name, and its architecture is not stated")
    configs = [config for config in shipped("data/models", ".json") if config.startswith(family)]
    shapes = {_plain(config): named_shape(config) for config in configs}
    size = c.params or size_in(name)
    for spelling, parameter_count in ((_letters(name), c.params), (plain, size)):
        spelling = _alias(spelling)
        if spelling in shapes and _agrees(shapes[spelling], replace(c, params=parameter_count)):
            return replace(shapes[spelling], vocab=c.vocab or shapes[spelling].vocab), ()
    begun = [s for key, s in shapes.items() if key.startswith(_alias(plain)) or _alias(_letters(name)).startswith(key)]
    for close in (begun, list(shapes.values())):
        fits = [s for s in close if size and _agrees(s, replace(c, params=size), 0.05)]
        if fits:
            best = min(fits, key=lambda s: abs(build(s).parameters - size))
            return replace(best, vocab=c.vocab or best.vocab), (f"taken for {best.name} by its parameter count",)
    first = min(shapes.values(), key=lambda s: s.layers * s.d_model)
    if size and not (c.layers or c.d_model or first.experts):
        sized = of_size(replace(first, vocab=c.vocab or first.vocab), size)
        return sized, (f"taken for {sized.layers} layers of {sized.d_model} {BY_COUNT}",)
    if not (c.layers and c.d_model):
        raise ModelError(f"model {name!r}: not a known size, and the row gives no layers and d_model")
    if first.gated:
        raise ModelError(f"model {name!r}: not a known size, and the row does not give the width of its gated MLP")
    return _resized(first, c, name), (f"{first.family} blocks with the row's dimensions",)


def _alias(plain: str) -> str:
    """A shipped config's plain name from how people write it."""
    plain = plain.replace("squad", "").replace("electra", "bert").removesuffix("small").removeprefix("meta")
    return names()["configs"].get(plain, plain)


def _letters(name: str) -> str:
    name = re.sub(r"\([^)]*\)", "", name.rsplit("/", 1)[-1])
    return "".join(c for c in name.lower() if c.isalnum() or c == ".").rstrip(".")


def _agrees(shape: TransformerShape, c: ModelColumns, tolerance: float = 0.15) -> bool:
    """Whether no column contradicts the shape; an approximate ``params`` may differ by ``tolerance``."""
    if c.layers or c.d_model:
        pairs = ((c.layers, shape.layers), (c.d_model, shape.d_model), (c.heads, shape.heads))
        return all(not stated or stated == own for stated, own in pairs)
    return not c.params or abs(build(shape).parameters / c.params - 1) <= tolerance


def _resized(shape: TransformerShape, c: ModelColumns, name: str) -> TransformerShape:
    """The family's shape with the row's dimensions and an MLP of the same ratio."""
    heads = c.heads or max(1, c.d_model // 64)
    if c.d_model % heads:
        raise ModelError(f"model {name!r}: {heads} heads do not divide d_model {c.d_model} evenly")
    return replace(
        shape,
        layers=c.layers,
        d_model=c.d_model,
        heads=heads,
        kv_heads=c.kv_heads or heads,
        head_dim=c.d_model // heads,
        d_ff=c.d_model * shape.d_ff // shape.d_model,
        vocab=c.vocab or shape.vocab,
    )


def _task(name: str, shape: TransformerShape, c: ModelColumns, row: Row) -> tuple[int, str, int]:
    """Tokens per sample, the head that is trained, and the positions the head sees (0: all)."""
    text = _words(row)
    if shape.family != "bert":
        return c.seq_len or shape.seq_len, "lm", 0
    squad = "squad" in text
    seq_len = c.seq_len or (_BERT_SQUAD_TOKENS if squad else 0)
    if not seq_len:
        raise ModelError(f"model {name!r}: the row gives no seq_len, and BERT trains at 128, 384 or 512")
    if squad:
        return seq_len, "qa", 0
    gathers = "hf transformers" not in text and "huggingface" not in text
    return seq_len, "pretraining", max(1, round(seq_len * _MASKED_SHARE)) if gathers else 0


def _execution(family: str, row: Row, implementation: str | None = None) -> tuple[str, str]:
    """How the row ran: what it says, else eager for GPT-2, OPT and BERT and flash attention for the rest."""
    text = _words(row)
    compiled = "torch.compile" in text and not re.search(r"(no|before|without) (torch\.)?compile", text)
    if compiled:
        return execution("flash", "fused")
    if "eager" in text or "no flash" in text:
        return execution("eager", None)
    if "flash" in text or family not in {"gpt2", "opt", "bert"} or "before torch.compile" in text:
        return execution("flash", None)
    return execution("eager", "fused" if "megatron" in text else implementation)


def _words(row: Row) -> str:
    return " ".join(row.get(key, "") for key in ("model", "source", "other", "notes")).lower()


def _variant(shape: TransformerShape, c: ModelColumns) -> TransformerShape:
    """The shape, or that of its usual variants that has exactly the row's parameters: with learned positions or ALiBi
    (MPT has both), and with or without biases."""
    variants = [shape]
    for positions in ("learned", "alibi") if shape.family == "mpt" else (shape.positions,):
        rows = (shape.n_positions or shape.seq_len) if positions == "learned" else 0
        for bias in (True, False):
            norm_bias = bias and shape.norm == "layernorm"
            variants.append(
                replace(
                    shape,
                    positions=positions,
                    n_positions=rows,
                    qkv_bias=bias,
                    out_bias=bias,
                    mlp_bias=bias,
                    norm_bias=norm_bias,
                )
            )
    return next((s for s in variants if build(s).parameters == c.params), shape) if c.exact else shape
