"""Rules of families of 2025 and 2026 with experts or norms of their own (see :mod:`.rules`)."""

from __future__ import annotations

from typing import Any

from clustersim.core.errors import ModelError
from clustersim.core.limits import counted
from clustersim.model.config import Config
from clustersim.model.hybrid_rules import Values
from clustersim.model.kinds import ATTENTION_WORDS, MLP_WORDS, as_blocks, experts_in, shortest, worded
from clustersim.model.sizes import Heads


def refuse_others(c: Config, known: dict[str, tuple[Any, ...]]) -> None:
    """Raises :class:`ModelError` for a field with another value than those that are described."""
    for field, may_be in known.items():
        value = c.data.get(field)
        c.read.add(field)
        if value not in may_be:
            raise ModelError(f"{c.where}: '{field}' = {value!r} is not described; only {may_be[0]!r} is")


def post_norms(c: Config, values: Values) -> None:
    """HyperCLOVA X has norms behind its halves where its config says so."""
    if c.flag("use_post_norm", False):
        values["norm_places"] = "both"


def bailing(c: Config, values: Values) -> None:
    """Ling's shared experts are as wide as its routed ones; Ming's routers of images and sound are not described."""
    width = values["experts.width"]
    shared = c.data.get("moe_shared_expert_intermediate_size")
    if shared not in (None, width):
        raise ModelError(
            f"{c.where}: 'moe_shared_expert_intermediate_size' = {shared!r} is not described; only {width}, which is "
            "'moe_intermediate_size', is"
        )
    refuse_others(c, {"multi_gate": (False, None), "use_sliding_window": (False, None)})
    if c.kind == "bailing_moe_v2" and not c.has("moe_router_enable_expert_bias"):
        values["experts.correction"] = True


_OF_LING_2_5 = ("group_norm_size", "linear_silu", "linear_rope")
"""Fields of Ling 2.5's linear attention, which has the same ``model_type`` as Ling 3."""


def bailing_hybrid(c: Config, values: Values) -> None:
    """Ling 3; Ling 2.5 has another linear attention under the same ``model_type``."""
    named = " ".join(map(str, c.listed("architectures", "names of classes")))
    other_fields = [field for field in _OF_LING_2_5 if c.has(field)]
    if other_fields or "V2_5" in named:
        why = f"'{other_fields[0]}' = {c.data[other_fields[0]]!r}" if other_fields else f"'architectures' = {named}"
        raise ModelError(
            f"{c.where}: {why} is of Ling 2.5, whose linear attention is Lightning Attention beside latent attention, "
            "which is not described; of bailing_hybrid only Ling 3, with Kimi's delta rule, is"
        )


def longcat(c: Config, values: Values) -> None:
    """LongCat-Flash: each layer is two blocks, the first with experts beside its MLP; some experts are none."""
    refuse_others(c, {"attention_method": ("MLA", None), "zero_expert_type": ("identity", None)})
    for field in ("emb_neighbor_num", "emb_split_num", "ngram_vocab_size_ratio"):
        if c.has(field):
            raise ModelError(
                f"{c.where}: '{field}' = {c.data[field]!r} is of an embedding of n-grams (LongCat-Flash-Lite), which "
                "is not described; null says that there is none"
            )
    blocks = c.data.get("num_hidden_layers")
    if blocks is not None and blocks not in (values["layers"], 2 * values["layers"]):
        raise ModelError(
            f"{c.where}: 'num_hidden_layers' = {blocks!r}, but 'num_layers' = {values['layers']}; leave the first out"
        )
    values["layers"] *= 2
    values |= {"mixers": ("full",), "mlps": ("experts", "dense"), "experts.shared": values["d_ff"]}
    zero = values.get("experts.zero") or 0
    count = values["experts.count"]
    visited = values["experts.per_token"]
    values |= {"experts.zero": zero, "experts.per_token": max(round(visited * count / (count + zero)), 1)}
    values["experts.correction"] = True


def numbered(c: Config, layers: int, usual: range) -> list[str]:
    """What the MLP of each block is, by the numbers of those with experts (``moe_layers_enum``), in a list or a text;
    ``usual`` : where nothing says which."""
    listed = c.value("moe_layers_enum")
    if isinstance(listed, str):
        listed = listed.split(",")
    try:
        sparse = set(usual) if listed is None else {int(number) for number in listed}
    except (TypeError, ValueError):
        raise ModelError(
            f"{c.where}: 'moe_layers_enum' = {c.data['moe_layers_enum']!r} must be numbers of blocks, such as '4,5,6'"
        ) from None
    if not sparse or min(sparse) < 0 or max(sparse) >= layers:
        raise ModelError(
            f"{c.where}: 'moe_layers_enum' = {c.data.get('moe_layers_enum')!r} must name some of the {layers} blocks, "
            f"from 0 to {layers - 1}"
        )
    return ["experts" if i in sparse else "dense" for i in range(layers)]


def step3(c: Config, values: Values) -> None:
    """Step 3: blocks with experts by number, all but the first where nothing says which."""
    layers = values["layers"]
    values |= {"mixers": ("full",), "mlps": shortest(numbered(c, layers, range(1, layers)))}


_GATINGS = {True: "head", "per-head": "head", "per-element": "element", False: ""}


def laguna(c: Config, values: Values) -> None:
    """Laguna's gate behind attention, the heads of each block, and which have experts: all but the first by default."""
    refuse_others(c, {"moe_apply_router_weight_on_input": (False, None)})
    gating = c.value("gating")
    if not isinstance(gating, bool | str) or gating not in _GATINGS:
        raise ModelError(f"{c.where}: 'gating' = {gating!r} must be true, false, 'per-head' or 'per-element'")
    values["output_gate"] = _GATINGS[gating]
    layers = values["layers"]
    mlp_words = worded(c, "mlp_layer_types", MLP_WORDS, layers)
    if not mlp_words:
        c.defaults["mlp_layer_types"] = ["dense", "sparse"]
        mlp_words = ["dense"] + ["experts"] * (layers - 1)
    values |= {"mixers": ("full",), "mlps": shortest(mlp_words)}
    heads_of_blocks = c.listed("num_attention_heads_per_layer", "heads of each block")
    if heads_of_blocks:
        if len(heads_of_blocks) != layers or any(not isinstance(heads, int) or heads < 1 for heads in heads_of_blocks):
            raise ModelError(
                f"{c.where}: 'num_attention_heads_per_layer' must be a number above zero for each of {layers} blocks, "
                f"not {heads_of_blocks!r}"
            )
        kv_heads = values.get("kv_heads") or values["heads"]
        values["heads_of"] = shortest([Heads(heads, kv_heads, values["head_dim"]) for heads in heads_of_blocks])


def cohere2_moe(c: Config, values: Values) -> None:
    """Command A with experts: leading dense blocks of a width of their own, with a period of windows of their own."""
    layers = values["layers"]
    dense = c.whole("first_k_dense_replace", 0, "leading dense blocks") if c.has("first_k_dense_replace") else 0
    mlps = worded(c, "mlp_layer_types", MLP_WORDS, layers)
    mlps = mlps or ["dense" if i < dense else "experts" for i in range(layers)]
    if "dense" in mlps:
        values["d_ff"] = c.need("prefix_dense_intermediate_size", "the width of leading dense blocks")
    c.read.add("prefix_dense_intermediate_size")
    values["norm"] = "rmsnorm" if c.has("rms_norm_eps") else "layernorm"
    ahead = c.number("prefix_dense_sliding_window_pattern", 1, "blocks from one that attends to everything to the next")
    period = c.number("sliding_window_pattern", 4, "blocks from one that attends to everything to the next")
    places = [(i + 1) % ahead for i in range(dense)] + [(i + 1) % period for i in range(layers - dense)]
    windowed = [bool(place) and bool(values.get("window")) for place in places]
    kinds = ["sliding" if there else "full" for there in windowed]
    if listed := worded(c, "layer_types", ATTENTION_WORDS, layers):
        kinds = listed if values.get("window") else ["full"] * layers
    values |= as_blocks([f"{kind}/{mlp}" for kind, mlp in zip(kinds, mlps, strict=True)])
    # Dense blocks rotate though they have no window, unless they have a period of windows of their own.
    rotates = [kind == "sliding" or (mlp == "dense" and ahead == 1) for kind, mlp in zip(kinds, mlps, strict=True)]
    values["rotates"] = shortest(rotates)


def flint(c: Config, values: Values) -> None:
    """Flint: a window in three of four blocks, but in neither of the first two nor in the last, where no list says
    which; the first two have no experts, where no list says which."""
    layers = values["layers"]
    if not c.has("layer_types") and values.get("window"):
        full = [i < 2 or i % 4 == 1 or i == layers - 1 for i in range(layers)]
        values |= as_blocks(["full" if attends_to_all else "sliding" for attends_to_all in full])
    if not c.has("mlp_only_layers"):
        c.defaults["mlp_only_layers"] = [0, 1]
        step = values.get("experts.every") or 1
        experts_in(values, [i > 1 and (i + 1) % step == 0 for i in range(layers)])


_LARA = ("delta", "sliding", "delta", "full", "sliding")
"""Blocks of Lara Mini, one period."""


def lara_mini(c: Config, values: Values) -> None:
    """Lara Mini: two of five blocks have a delta rule, two a window, where no list says which."""
    if not c.has("layer_types"):
        values |= as_blocks([_LARA[i % len(_LARA)] for i in range(values["layers"])])


def lfm3(c: Config, values: Values) -> None:
    """LFM3: norms behind halves and a gate for each head, where its config says so; of each four blocks two are
    convolutions, where no list says which."""
    if c.flag("use_sandwich_norm", True):
        values["norm_places"] = "both"
    values["output_gate"] = "head" if c.flag("use_attention_gate", True) else ""
    if not c.has("layer_types"):
        places = ["full" if i % 4 == 2 else "conv" if i % 4 or not i else "sliding" for i in range(values["layers"])]
        values |= as_blocks(places)


def axk1(c: Config, values: Values) -> None:
    """A.X K1: all blocks but leading ones have experts, or each so many-th of them, where no list says which."""
    layers = values["layers"]
    if not values.get("latent.q_rank"):
        raise ModelError(f"{c.where}: 'q_lora_rank' = {c.data.get('q_lora_rank')!r}; {c.kind}'s queries need one")
    mlps = worded(c, "mlp_layer_types", MLP_WORDS, layers)
    sparse = [mlp == "experts" for mlp in mlps]
    if not sparse:
        dense = c.whole("first_k_dense_replace", 1, "leading dense blocks")
        step = c.number("moe_layer_freq", 1, "blocks from one with experts to the next")
        sparse = [i >= dense and i % step == 0 for i in range(layers)]
    c.read.update({"first_k_dense_replace", "moe_layer_freq"})
    experts_in(values, sparse)


def olmo_hybrid(c: Config, values: Values) -> None:
    """OLMo Hybrid: heads of the delta rule as those of attention, where nothing says others; of each four blocks the
    last attends, and where there are fewer the last of all."""
    heads = values["heads"]
    layers = values["layers"]
    for name in ("key_heads", "value_heads"):
        if values.get(f"delta.{name}") is None:
            values[f"delta.{name}"] = heads
    if values.get("delta.key_dim") is None:
        values["delta.key_dim"] = int(0.75 * values["d_model"] / values["delta.key_heads"])
    if values.get("delta.value_dim") is None:
        values["delta.value_dim"] = 2 * values["delta.key_dim"]
    if not c.has("layer_types"):
        kinds = ["full" if i % 4 == 3 else "delta" for i in range(layers)]
        kinds[-1] = kinds[-1] if "full" in kinds else "full"
        values |= as_blocks(kinds)
    tables = (c.data, c.table("rope_parameters"))
    if any("rope_theta" in table and table["rope_theta"] is None for table in tables):
        values["positions"] = "none"  # as its published files say


def hy_v4(c: Config, values: Values) -> None:
    """Hy4: a leading dense block where no list says which are; gates and ups of experts are clamped below a limit."""
    clamped(c, values)
    values["experts.dense_first"] = 1
    others = [word for word in c.listed("layer_types", "a word for each block") if word != "indexed_attention"]
    if others:
        raise ModelError(f"{c.where}: 'layer_types' has {others[0]!r}; only 'indexed_attention' is described")


_COMPRESSED = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "compressed_chosen",
    "heavily_compressed_attention": "compressed",
}
_RATIOS = {0: "sliding", 4: "compressed_chosen", 128: "compressed"}
"""What a block is by the tokens of its compressed keys, as published files say it."""


def deepseek_v4(c: Config, values: Values) -> None:
    """DeepSeek-V4: which blocks have compressed keys, by words or by how many tokens one stands for; of how many they
    are; and how much of a head is rotated."""
    layers = values["layers"]
    kinds = worded(c, "layer_types", _COMPRESSED, layers)
    ratios = c.listed("compress_ratios", "tokens of a compressed key, for each block")
    if ratios and not kinds:
        if len(ratios) < layers or not all(isinstance(ratio, int) and ratio in _RATIOS for ratio in ratios):
            raise ModelError(
                f"{c.where}: 'compress_ratios' = {ratios!r} must be 0, 4 or 128 for each of {layers} blocks; of blocks "
                "of other ratios say 'layer_types' and 'compress_rates'"
            )
        kinds = [_RATIOS[ratio] for ratio in ratios[:layers]]
    usual = ["compressed_chosen" if i % 2 and i > 1 else "compressed" for i in range(layers)]
    values |= as_blocks(kinds or usual)
    rates = Config(f"{c.where}: compress_rates", c.table("compress_rates"))
    for name, key, older, tokens in (
        ("chosen", "compressed_sparse_attention", "compress_rate_csa", 4),
        ("all", "heavily_compressed_attention", "compress_rate_hca", 128),
    ):
        said = c if c.has(older) else rates
        values[f"compressor.{name}"] = said.number(older if c.has(older) else key, tokens, "tokens of a compressed key")
    c.defaults.pop("compress_rate_csa", None)
    c.defaults.pop("compress_rate_hca", None)
    values["indexer.pool"] = values["compressor.chosen"]
    values["rotated"] = c.number("qk_rope_head_dim", _rotated(c, values["head_dim"]), "elements of a head's rotation")
    c.defaults.pop("qk_rope_head_dim", None)
    refuse_others(c, {"n_shared_experts": (1, None), "num_key_value_heads": (1, None)})
    _refuse_other_groups(c, values)
    hashed = c.listed("mlp_layer_types", "a word for each block")
    if any(word not in ("hash_moe", "moe") for word in hashed) or len(hashed) not in (0, layers):
        raise ModelError(f"{c.where}: 'mlp_layer_types' = {hashed!r} must be 'hash_moe' or 'moe' for each block")
    values["experts.shared"] = values["experts.width"]
    clamped(c, values)


def _rotated(c: Config, head_dim: int) -> int:
    """Elements of a head that are rotated, where a share of them says how many."""
    share = c.value("partial_rotary_factor")
    share = 0.125 if share is None else share  # of the class: 64 of 512
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise ModelError(f"{c.where}: 'partial_rotary_factor' = {share!r} must be a number above zero, at most 1")
    return max(1, int(head_dim * share))


def _refuse_other_groups(c: Config, values: Values) -> None:
    """Raises :class:`ModelError` where heads are not shared evenly by the groups of the projection out."""
    groups = values["low_output.groups"]
    if values["heads"] % groups:
        raise ModelError(f"{c.where}: 'o_groups' = {groups} does not divide {values['heads']} heads evenly")


MOST_ROWS = 10**10
"""Of an n-gram head's table: the next prime from such a number on is looked for."""
MOST_ITERATIONS = 1000
"""Of Sinkhorn's: published models have twenty."""


def clamped(c: Config, values: Values) -> None:
    """Whether gates and ups of experts are clamped: below a limit, unless it is zero."""
    counted(values.get("sinkhorn") or 0, MOST_ITERATIONS, f"{c.where}: 'hc_sinkhorn_iters'", ModelError)
    limit = c.value("swiglu_limit")
    if not isinstance(limit, int | float) or isinstance(limit, bool):
        raise ModelError(f"{c.where}: 'swiglu_limit' = {limit!r} must be a number; zero says that nothing is clamped")
    values["experts.clamped"] = limit > 0


def glm5_next(c: Config, values: Values) -> None:
    """GLM-5.3: a delta rule in three of four blocks, where no list says which; the others attend to chosen pools of
    keys and those of the last pool, which is not whole. The first three have no experts, where no list says which."""
    layers = values["layers"]
    refuse_others(c, {"qk_rope_head_dim": (0, None)})
    values["latent.rope"] = 0
    chooses = values["mixers"]
    kinds = worded(c, "layer_types", {"linear_attention": "kda", "indexed_attention": "", "full_attention": ""}, layers)
    kinds = kinds or ["kda" if i % 4 != 3 else "" for i in range(layers)]
    values["mixers"] = shortest([kind or chooses[i % len(chooses)] for i, kind in enumerate(kinds)])
    top = values["indexer.top"]
    pool = values["indexer.pool"]
    if top % pool:
        raise ModelError(f"{c.where}: 'index_kpool' = {pool} does not divide 'index_topk' = {top} evenly")
    values["window"] = top + (pool - 1 if c.flag("index_kpool_always_select_tail", True, quiet=True) else 0)
    values["experts.dense_first"] = min(3, layers)
    clamped(c, values)


def qwen4_exp(c: Config, values: Values) -> None:
    """Qwen4-Exp: a delta rule in three of four blocks, where no list says which; the others attend to chosen pools of
    keys and those of the last pool, which is not whole. Some blocks have features of n-grams."""
    layers = values["layers"]
    kinds = worded(
        c,
        "layer_types",
        {"linear_attention": "delta", "indexed_attention": "sliding", "full_attention": "sliding"},
        layers,
    )
    if not kinds:
        every = c.number("full_attention_interval", 4, "blocks from one that attends to the next")
        c.defaults.pop("full_attention_interval", None)
        kinds = ["delta" if (i + 1) % every else "sliding" for i in range(layers)]
    values["mixers"] = shortest(kinds)
    refuse_others(c, {"indexer_kv_heads": (1,)})
    top = values["indexer.top"]
    pool = values["indexer.pool"]
    if top is None or pool is None or top % pool:
        raise ModelError(
            f"{c.where}: 'indexer_compress_ratio' = {pool!r} must divide 'indexer_budget' = {top!r}, the keys that a "
            "token attends to"
        )
    values["window"] = top + pool - 1
    numbers = c.listed("ple_layer_ids", "numbers of blocks, from one")
    if not numbers:
        for name in [name for name in values if name.startswith("ngrams.")]:
            del values[name]
        return
    if not all(isinstance(i, int) and 1 <= i <= layers for i in numbers):
        raise ModelError(f"{c.where}: 'ple_layer_ids' = {numbers!r} must be numbers of blocks, from 1 to {layers}")
    counted(values["ngrams.base"], MOST_ROWS, f"{c.where}: 'ngram_vocab_size_base'", ModelError)
    values["ngrams.blocks"] = tuple(sorted({i - 1 for i in numbers}))
    values["ngrams.width"] = values.get("ngrams.width") or values["d_model"]
    heads = (values["ngrams.longest"] - 1) * values["ngrams.heads"]
    if not heads or values["ngrams.width"] % heads:
        raise ModelError(
            f"{c.where}: 'ple_embed_dim' = {values['ngrams.width']} is not shared evenly by {heads} heads, which "
            "'ngram_size' and 'heads_per_ngram' give"
        )


def dbrx(c: Config, values: Values) -> None:
    """DBRX's experts read what the model's blocks have, and their gates are SiLU's."""
    width = c.data.get("ffn_config.hidden_size", values["d_model"])
    if width != values["d_model"]:
        raise ModelError(f"{c.where}: ffn_config.hidden_size = {width!r} must be 'd_model' = {values['d_model']}")
    activation = c.data.get("ffn_config.ffn_act_fn")
    if activation not in (None, {"name": "silu"}):
        raise ModelError(f"{c.where}: ffn_config.ffn_act_fn = {activation!r} is not described; only silu is")
    c.read.update({"ffn_config.hidden_size", "ffn_config.ffn_act_fn"})


def modernbert_decoder(c: Config, values: Values) -> None:
    """ModernBERT's decoder sees the half of its encoder's window that is behind a token."""
    values["window"] = (values.get("window") or 0) // 2
    for field, described in (("decoder_bias", True), ("classifier_bias", False), ("tie_word_embeddings", True)):
        if c.flag(field, described, quiet=True) != described:
            words = ("false", "true")
            raise ModelError(
                f"{c.where}: '{field}' = {words[not described]} is not described; only {words[described]} is"
            )
