"""What a table cannot say of a family's config: sizes that follow from others, lists, tables inside the table."""

from __future__ import annotations

from collections.abc import Callable

from clustersim.core.errors import ModelError
from clustersim.model import block_rules, hybrid_rules, later_rules, tower_rules
from clustersim.model.config import Config
from clustersim.model.hybrid_rules import Values
from clustersim.model.kinds import MLP_WORDS, as_blocks, experts_in, shortest, worded


def _offset_positions(c: Config, values: Values) -> None:
    """OPT's position ids start at 2: the table has two rows more."""
    values["n_positions"] = values["seq_len"] + 2


def _padded_positions(c: Config, values: Values) -> None:
    """RoBERTa's position ids start after the padding id: two rows are no position."""
    values["n_positions"] = values["seq_len"]
    values["seq_len"] -= 2


def _narrow_embedding(c: Config, values: Values) -> None:
    """ELECTRA's embedding has a width of its own, and where that is the model's no projection stands behind it."""
    if values.get("embed_dim") == values["d_model"]:
        values["embed_dim"] = 0


def _no_tasks(c: Config, values: Values) -> None:
    """ERNIE without a table of tasks."""
    if c.flag("use_task_id", False, quiet=True):
        raise ModelError(f"{c.where}: 'use_task_id' = true is not described; only false is")


def _esm(c: Config, values: Values) -> None:
    """ESM's positions are rotation or a table, of which two rows are no position."""
    kind = c.text("position_embedding_type", "absolute")
    if kind not in {"absolute", "rotary"}:
        raise ModelError(f"{c.where}: 'position_embedding_type' = {kind!r} must be 'absolute' or 'rotary'")
    for field in ("emb_layer_norm_before", "is_folding_model"):
        if c.flag(field, False, quiet=True):
            raise ModelError(f"{c.where}: '{field}' = true is not described; only false is")
    if kind == "rotary":
        values["positions"] = "rotary"
    else:
        _padded_positions(c, values)


def _python_gelu(c: Config, values: Values) -> None:
    """What the first GPT calls gelu is the formula."""
    if values.get("activation") == "gelu":
        values["activation"] = "gelu_new"


def _opt(c: Config, values: Values) -> None:
    """OPT-350m has norms behind its halves, no final norm and a narrower embedding."""
    bias = c.flag("enable_bias", True)
    before = c.flag("do_layer_norm_before", True)
    values |= {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias, "post_norm": not before}
    values["norm_weight"] = values["norm_bias"]  # neither where the class's norms are not affine
    values["final_norm"] = before and not c.flag("_remove_final_layer_norm", False, quiet=True)
    if values["embed_dim"] in {None, values["d_model"]} or not c.has("word_embed_proj_dim"):
        values["embed_dim"] = 0
        if not c.spelled("word_embed_proj_dim"):
            c.defaults["word_embed_proj_dim"] = values["d_model"]


def _mpt(c: Config, values: Values) -> None:
    """MPT's tables of attention and MLP, as llm-foundry writes them."""
    attn = Config(f"{c.where}: attn_config", c.table("attn_config"))
    ratio = c.data.get("expansion_ratio", c.table("ffn_config").get("expansion_ratio", 4))
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or ratio <= 0:
        raise ModelError(
            f"{c.where}: 'expansion_ratio' = {ratio!r} must be a number above zero, the MLP's width over the model's"
        )
    c.read.update({"expansion_ratio", "ffn_config"})
    alibi = attn.flag("alibi", True)
    if not attn.has("alibi"):
        c.defaults["attn_config.alibi"] = alibi
    positions = "alibi" if alibi else "learned" if c.flag("learned_pos_emb", True) else "none"
    bias = not c.flag("no_bias", False)
    multiquery = attn.text("attn_type", "multihead_attention") == "multiquery_attention"
    values |= {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias, "norm_bias": bias, "positions": positions}
    values |= {
        "kv_heads": attn.number("kv_n_heads", 1 if multiquery else values["heads"], "key-value heads"),
        "d_ff": int(ratio * values["d_model"]),
        "n_positions": values["seq_len"] if positions == "learned" else 0,
        "any_length": True,
        "attn_dropout": attn.rate("attn_pdrop", 0.0),
    }


def _window_flag(c: Config, values: Values) -> None:
    """Qwen2 and its kin: a window counts where ``use_sliding_window`` says so, from block ``max_window_layers`` on."""
    if not c.flag("use_sliding_window", False, quiet=True):
        values["window"] = 0
        c.read.update({"sliding_window", "max_window_layers"})
        return
    if values.get("window") and not c.has("layer_types"):
        full = c.whole("max_window_layers", values["layers"], "leading blocks without a window")
        values |= as_blocks(["full" if i < full else "sliding" for i in range(values["layers"])])


def _decoder_step(c: Config, values: Values) -> None:
    """Qwen's blocks with experts: each ``decoder_sparse_step``-th that is not among ``mlp_only_layers``."""
    dense = c.listed("mlp_only_layers", "numbers of blocks without experts")
    step = values.get("experts.every") or 1
    if not dense:
        return
    if not all(isinstance(i, int) and 0 <= i < values["layers"] for i in dense):
        raise ModelError(
            f"{c.where}: 'mlp_only_layers' = {dense!r} must be numbers of blocks, from 0 to {values['layers'] - 1}"
        )
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(values["layers"])]
    experts_in(values, sparse)


def _mlp_words(c: Config, values: Values) -> None:
    """A word for each block says whether it has experts (``mlp_layer_types``)."""
    if mlps := worded(c, "mlp_layer_types", MLP_WORDS, values["layers"]):
        experts_in(values, [mlp == "experts" for mlp in mlps])


def _no_mixture(c: Config, values: Values) -> None:
    """DeepSeek's class without routed experts is dense: null says so, and a missing field is an error."""
    if "n_routed_experts" in c.data and c.data["n_routed_experts"] is None:
        for name in [name for name in values if name.startswith("experts.")]:
            del values[name]
        c.read.update({"moe_intermediate_size", "n_shared_experts", "first_k_dense_replace", "num_experts_per_tok"})


TOPK_METHODS = ("noaux_tc", "group_limited_greedy", "greedy")
"""Of DeepSeek's modeling_deepseek.py."""


def _deepseek(c: Config, values: Values) -> None:
    """Scores are corrected where ``topk_method`` is noaux_tc, which V3 is without saying so."""
    if c.data.get("moe_layer_freq", 1) != 1:
        raise ModelError(f"{c.where}: 'moe_layer_freq' = {c.data['moe_layer_freq']!r} is not described; only 1 is")
    c.read.add("moe_layer_freq")
    usual = "greedy" if c.kind == "deepseek_v2" else "noaux_tc"
    method = c.text("topk_method", usual)
    if method not in TOPK_METHODS:
        raise ModelError(f"{c.where}: 'topk_method' = {method!r} must be one of {', '.join(TOPK_METHODS)}")
    values["experts.correction"] = method == "noaux_tc"


def _gpt_oss(c: Config, values: Values) -> None:
    """Every block has a window but each second, unless ``layer_types`` says otherwise."""
    if not values.get("window"):
        values["window"] = 128


def _llama4(c: Config, values: Values) -> None:
    """Blocks with experts and those that attend to a chunk: lists, or each so many-th."""
    layers = values["layers"]
    moe = c.listed("moe_layers", "numbers of blocks with experts")
    step = c.number("interleave_moe_layer_step", 1, "blocks from one with experts to the next")
    experts_in(values, [i in moe if moe else (i + 1) % step == 0 for i in range(layers)])
    values["experts.shared"] = values["experts.width"]
    rotated = _rotated(c, values)
    if not c.has("layer_types") and values.get("window"):
        values["mixers"] = shortest(["chunked" if there else "full" for there in rotated])


def _rotated(c: Config, values: Values) -> list[bool]:
    """Which blocks rotate, by a list or all but each so many-th (Llama 4, SmolLM 3)."""
    layers = values["layers"]
    interval = c.number("no_rope_layer_interval", 4, "blocks from one without rotation to the next")
    listed = c.listed("no_rope_layers", "1 for each block with rotation")
    if listed and (len(listed) != layers or any(entry not in (0, 1) for entry in listed)):
        raise ModelError(
            f"{c.where}: 'no_rope_layers' must be 1 for each block with rotation and 0 for each without, of {layers} "
            f"blocks, not {listed!r}"
        )
    rotated = [bool(entry) for entry in listed] or [(i + 1) % interval != 0 for i in range(layers)]
    values["rotates"] = shortest(rotated)
    return rotated


def _smollm3(c: Config, values: Values) -> None:
    """SmolLM 3: a window, where there is one, in the blocks that do not rotate."""
    rotated = _rotated(c, values)
    c.defaults.pop("no_rope_layer_interval", None)
    if values.get("window") and c.flag("use_sliding_window", False, quiet=True) and not c.has("layer_types"):
        values |= as_blocks(["full" if there else "sliding" for there in rotated])


def _two_sided_window(c: Config, values: Values) -> None:
    """Gemma 3 as an encoder looks to both sides of a token."""
    if c.flag("use_bidirectional_attention", False, quiet=True):
        values["causal"] = False


def _late_windows(c: Config, values: Values) -> None:
    """dots.llm1: a window from block ``max_window_layers`` on."""
    full = c.whole("max_window_layers", values["layers"], "leading blocks without a window")
    c.defaults.pop("max_window_layers", None)
    if c.has("layer_types") or not values.get("window"):
        return
    described = as_blocks(["full" if i < full else "sliding" for i in range(values["layers"])])
    values |= described or {"window": 0}


def _stablelm(c: Config, values: Values) -> None:
    """StableLM 2's 12B has attention and MLP side by side behind one norm."""
    if c.flag("use_parallel_residual", False):
        values["norm_places"] = "parallel"


def _hunyuan_moe(c: Config, values: Values) -> None:
    """Hunyuan has one shared expert, as wide as a routed one; widths may differ from block to block."""
    said = {"moe_intermediate_size": (values["experts.width"], "intermediate_size"), "num_shared_expert": (1, "one")}
    for key, (described, words) in said.items():
        if c.has(key) and c.number(key, described, "of a block's experts") != described:
            raise ModelError(f"{c.where}: '{key}' = {c.data[key]!r}; only {words}, {described}, is described")
    values["experts.shared"] = values["experts.width"]


def _ernie_moe(c: Config, values: Values) -> None:
    """ERNIE's blocks with experts: each ``moe_layer_interval``-th from the first to the last of them."""
    layers = values["layers"]
    first = c.whole("moe_layer_start_index", 1, "the first block with experts")
    step = c.number("moe_layer_interval", 1, "blocks from one with experts to the next")
    last = c.value("moe_layer_end_index")
    if last is not None and (not isinstance(last, int) or isinstance(last, bool)):
        raise ModelError(
            f"{c.where}: 'moe_layer_end_index' = {last!r} must be the number of a block, or -1 for the last"
        )
    last = layers - 1 if last is None or last == -1 else last
    experts_in(values, [(i + 1) % step == 0 and first <= i <= last for i in range(layers)])


def _lite_words(c: Config, values: Values) -> None:
    """GLM-4.7's leading dense block, unless ``mlp_layer_types`` says otherwise."""
    values["experts.dense_first"] = 1
    _mlp_words(c, values)


def _sparse_attention(c: Config, values: Values) -> None:
    """DeepSeek-V3.2: each token attends to as many keys as the indexer keeps, as to a window of that length."""
    if not values.get("latent.q_rank"):
        raise ModelError(
            f"{c.where}: 'q_lora_rank' = {c.data.get('q_lora_rank')!r}, but the indexer of {c.kind} reads the queries' "
            "projection of that rank; write it"
        )
    values |= {"window": values["indexer.top"], "mixers": ("sliding",)}


_INDEXERS = {"full": "sliding", "F": "sliding", "shared": "reused", "S": "reused"}
"""Whether a block chooses keys itself or has those of the block before it, in words and letters."""


def _shared_indexers(c: Config, values: Values) -> None:
    """GLM-5.2 chooses keys in some blocks for those behind them, which have no indexer: by a list, by letters, or in
    each so many-th block."""
    layers = values["layers"]
    field = "indexer_types" if c.has("indexer_types") else "index_topk_pattern"
    words = c.value(field)
    if words is None:
        usual = 4 if c.kind == "hy_v4" else 1  # as the class has it behind the first block
        every = usual
        if c.has("index_topk_freq"):
            every = c.number("index_topk_freq", usual, "blocks from one indexer to the next")
        first = c.whole("index_skip_topk_offset", 2, "the leading blocks with an indexer") if every > 1 else 0
        c.read.add("index_skip_topk_offset")
        words = ["shared" if max(i - first + 1, 0) % every else "full" for i in range(layers)]
    known = isinstance(words, str | list) and all(isinstance(word, str) and word in _INDEXERS for word in words)
    if not known or len(words) != layers or words[0] not in {"full", "F"}:
        raise ModelError(
            f"{c.where}: '{field}' = {words!r} must be 'full' or 'shared' for each of {layers} blocks, the first 'full'"
        )
    values["mixers"] = shortest([_INDEXERS[word] for word in words])


def _neox(c: Config, values: Values) -> None:
    """GPT-NeoX's halves stand side by side unless the config says no."""
    values["norm_places"] = "parallel_two" if c.flag("use_parallel_residual", True) else "before"


def _one_key(c: Config, values: Values) -> None:
    """StarCoder's first: one key-value head for all (``multi_query``)."""
    if c.flag("multi_query", True):
        values["kv_heads"] = 1


def _falcon(c: Config, values: Values) -> None:
    """Falcon: heads of keys, and norms, by which of its architectures it is."""
    later, side_by_side = c.flag("new_decoder_architecture", False), c.flag("parallel_attn", True)
    if later:
        values["kv_heads"] = c.number("num_kv_heads", values["heads"], "key-value heads")
    elif c.flag("multi_query", True):
        values["kv_heads"] = 1
    norms = c.value("num_ln_in_parallel_attn")
    two = later and side_by_side and (norms is None or norms == 2)
    values["norm_places"] = "parallel_two" if two else "parallel" if side_by_side else "before"
    values["positions"] = "alibi" if c.flag("alibi", False) else "rotary"


_REACH = {"global": "full", "local": "sliding"}


def _gpt_neo(c: Config, values: Values) -> None:
    """GPT-Neo: which blocks have a window, as lists of words with how often each is repeated."""
    layers = values["layers"]
    types = c.value("attention_types") or [[["global", "local"], layers // 2]]
    described: list[str] = []
    try:
        if sum(len(words) * times for words, times in types) == layers:
            described = [_REACH[word] for words, times in types for word in list(words) * times]
    except (KeyError, TypeError, ValueError):
        described = []
    if len(described) != layers:
        raise ModelError(
            f"{c.where}: 'attention_types' = {types!r} must be lists of 'global' and 'local' with how often each is "
            f"repeated, {layers} words in all, such as [[['global', 'local'], {layers // 2}]]"
        )
    values |= as_blocks(described)


Rule = Callable[[Config, Values], None]
RULES: dict[str, Rule] = {
    "offset_positions": _offset_positions,
    "padded_positions": _padded_positions,
    "narrow_embedding": _narrow_embedding,
    "no_tasks": _no_tasks,
    "esm": _esm,
    "python_gelu": _python_gelu,
    "opt": _opt,
    "mpt": _mpt,
    "image": tower_rules.image,
    "pooled": tower_rules.pooled,
    "mlp_ratio": tower_rules.mlp_ratio,
    "any_image": tower_rules.any_image,
    "position_grid": tower_rules.position_grid,
    "table_of_image": tower_rules.table_of_image,
    "internvl": tower_rules.internvl,
    "registers": tower_rules.registers,
    "dinov3": tower_rules.dinov3,
    "two_tables": tower_rules.two_tables,
    "squares": tower_rules.squares,
    "patch_windows": tower_rules.patch_windows,
    "window_flag": _window_flag,
    "decoder_step": _decoder_step,
    "mlp_words": _mlp_words,
    "no_mixture": _no_mixture,
    "deepseek": _deepseek,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "smollm3": _smollm3,
    "two_sided_window": _two_sided_window,
    "late_windows": _late_windows,
    "stablelm": _stablelm,
    "hunyuan_moe": _hunyuan_moe,
    "ernie_moe": _ernie_moe,
    "lite_words": _lite_words,
    "sparse_attention": _sparse_attention,
    "shared_indexers": _shared_indexers,
    "mamba": hybrid_rules.mamba,
    "mamba2": hybrid_rules.mamba2,
    "nemotron_h": hybrid_rules.nemotron_h,
    "jamba": hybrid_rules.jamba,
    "bamba": hybrid_rules.bamba,
    "falcon_h1": hybrid_rules.falcon_h1,
    "granite_hybrid": hybrid_rules.granite_hybrid,
    "lfm2": hybrid_rules.lfm2,
    "lfm2_moe": hybrid_rules.lfm2_moe,
    "kimi_linear": hybrid_rules.kimi_linear,
    "gemma4": block_rules.gemma4,
    "mimo_v2": block_rules.mimo_v2,
    "searched": block_rules.searched,
    "minimax_m3": block_rules.minimax_m3,
    "minimax_tower": tower_rules.minimax_tower,
    "post_norms": later_rules.post_norms,
    "bailing": later_rules.bailing,
    "bailing_hybrid": later_rules.bailing_hybrid,
    "longcat": later_rules.longcat,
    "step3": later_rules.step3,
    "step3p5": block_rules.step3p5,
    "laguna": later_rules.laguna,
    "cohere2_moe": later_rules.cohere2_moe,
    "flint": later_rules.flint,
    "lara_mini": later_rules.lara_mini,
    "lfm3": later_rules.lfm3,
    "axk1": later_rules.axk1,
    "hy_v4": later_rules.hy_v4,
    "deepseek_v4": later_rules.deepseek_v4,
    "glm5_next": later_rules.glm5_next,
    "qwen4_exp": later_rules.qwen4_exp,
    "dbrx": later_rules.dbrx,
    "modernbert_decoder": later_rules.modernbert_decoder,
    "olmo_hybrid": later_rules.olmo_hybrid,
    "neox": _neox,
    "one_key": _one_key,
    "falcon": _falcon,
    "gpt_neo": _gpt_neo,
}
"""Rules by name, which rows list."""
