"""Rules of families whose blocks differ in their heads or in the width of their MLPs (see :mod:`.rules`)."""

from __future__ import annotations

from math import ceil
from typing import Any

from clustersim.core.errors import ModelError
from clustersim.model.config import Config
from clustersim.model.hybrid_rules import Values
from clustersim.model.kinds import ATTENTION_WORDS, MLP_WORDS, as_blocks, shortest, worded
from clustersim.model.later_rules import numbered, refuse_others
from clustersim.model.sizes import Heads


def _kinds(c: Config, values: Values, default: list[str]) -> list[str]:
    """Of each block, whether it attends to all tokens or to a window: ``layer_types``, else the class's own."""
    kinds = worded(c, "layer_types", ATTENTION_WORDS, values["layers"])
    if not kinds:
        named = {kind: word for word, kind in ATTENTION_WORDS.items()}
        c.defaults["layer_types"] = [named[kind] for kind in shortest(default)]
    return kinds or default


def gemma4(c: Config, values: Values) -> None:
    """Gemma 4: blocks that attend to all tokens have wider and fewer heads, whose values their keys may be; the last
    blocks may have the keys and values of earlier ones; beside the MLP may stand experts."""
    layers = values["layers"]
    kinds = _kinds(c, values, ["sliding" if (i + 1) % 6 else "full" for i in range(layers)])
    kinds[-1] = "full"  # as the class has it whatever the list says
    shared = c.whole("num_kv_shared_layers", 0, "last blocks with the keys of earlier ones")
    if shared >= layers or set(kinds) != set(kinds[: layers - shared]):
        raise ModelError(
            f"{c.where}: 'num_kv_shared_layers' = {shared} leaves no block of each kind of 'layer_types' ahead of them "
            "that makes keys and values"
        )
    values["mixers"] = shortest(kinds)
    values["heads_of"] = shortest([_gemma4_heads(c, values, i, kinds[i], layers - shared) for i in range(layers)])
    if shared and c.flag("use_double_wide_mlp", False):
        values["widths"] = tuple(values["d_ff"] * (2 if i >= layers - shared else 1) for i in range(layers))
    seen = c.value("use_bidirectional_attention")
    if seen not in (None, "vision", "all"):
        raise ModelError(f"{c.where}: 'use_bidirectional_attention' = {seen!r} must be 'vision', 'all' or null")
    if seen == "all":
        values |= {"causal": False, "window": 2 * (values["window"] // 2) + 1}
    _gemma4_experts(c, values)
    usual = c.default("hidden_size_per_layer_input") or 0  # the class of the 12B has no such field
    told = (
        c.whole("hidden_size_per_layer_input", usual, "the width of what a block is told of its token") if usual else 0
    )
    if told:
        rows = c.number("vocab_size_per_layer_input", values["vocab"], "rows of the table that blocks are told from")
        values |= {"inputs.width": told, "inputs.vocab": rows}


def _said_of_blocks(c: Config, layers: int, known: set[str]) -> dict[int, Config]:
    """What a config says of single blocks, by their number, as transformers saves what differs (``per_layer_config``).

    Raises :class:`ModelError` for a number of no block, or a field that is not ``known``.
    """
    said = {}
    for name, table in c.table("per_layer_config").items():
        if not name.isdecimal() or int(name) >= layers or not isinstance(table, dict) or set(table) - known:
            raise ModelError(
                f"{c.where}: per_layer_config.{name} = {table!r} must be a table of {' and '.join(sorted(known))} of a "
                f"block, by its number from 0 to {layers - 1}"
            )
        said[int(name)] = Config(f"{c.where}: per_layer_config.{name}", table, c.kind)
    return said


def _gemma4_heads(c: Config, values: Values, block: int, kind: str, makers: int) -> Heads:
    """Attention of one block; those behind the first ``makers`` have the keys of earlier ones."""
    kv_heads, dim, source = values.get("kv_heads") or values["heads"], values["head_dim"], "own"
    said = _said_of_blocks(c, values["layers"], {"head_dim", "num_key_value_heads"})
    if kind == "full":
        source = "keys" if c.flag("attention_k_eq_v", False) else "own"
    if said:
        own = said.get(block, Config(c.where, {}, c.kind))
        dim = own.number("head_dim", dim, "the size of a head")
        kv_heads = own.number("num_key_value_heads", kv_heads, "key-value heads")
    elif kind == "full":
        dim = c.number("global_head_dim", 512, "the size of a head of blocks that attend to all tokens")
        if source == "keys" and c.has("num_global_key_value_heads"):
            kv_heads = c.number("num_global_key_value_heads", 1, "key-value heads of those blocks")
    c.read.add("num_global_key_value_heads")
    return Heads(values["heads"], kv_heads, dim, 0, source if block < makers else "earlier")


def _gemma4_experts(c: Config, values: Values) -> None:
    """Where ``enable_moe_block`` is true every block has experts beside its MLP, which every token visits."""
    if c.flag("enable_moe_block", False, quiet="enable_moe_block" not in c.fields.fields):
        for name, field in (
            ("count", "num_experts"),
            ("per_token", "top_k_experts"),
            ("width", "moe_intermediate_size"),
        ):
            values[f"experts.{name}"] = c.need(field, f"{name} of the experts that 'enable_moe_block' asks for")
        values |= {"experts.shared": values["d_ff"], "experts.norms": True, "experts.scales": True}
        if values.get("widths"):
            raise ModelError(f"{c.where}: 'use_double_wide_mlp' = true beside experts is not described; only false is")
    c.read.update({"num_experts", "top_k_experts", "moe_intermediate_size", "use_double_wide_mlp"})


def mimo_v2(c: Config, values: Values) -> None:
    """MiMo-V2: blocks with a window have twice the key-value heads, and a learned score in their softmax."""
    layers = values["layers"]
    full = [i == 0 or (i + 1) % 6 == 0 for i in range(layers)]
    pattern = c.listed("hybrid_layer_pattern", "0 for a block that attends to all tokens, 1 for one with a window")
    if pattern:
        full = [not windowed for windowed in _truths(c, "hybrid_layer_pattern", pattern, layers)]
    kinds = _kinds(c, values, ["full" if is_full else "sliding" for is_full in full])
    heads, kv_heads = values["heads"], values.get("kv_heads") or values["heads"]
    usual = {"heads": heads, "kv_heads": kv_heads, "head_dim": values["head_dim"]}
    usual["value_size"] = c.number("v_head_dim", values["head_dim"], "elements of a head's value")
    windowed = usual | {"kv_heads": 2 * kv_heads}
    fields = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    for size, field in (fields | {"value_size": "v_head_dim"}).items():
        if c.has(f"swa_{field}"):
            windowed[size] = c.number(f"swa_{field}", windowed[size], "of blocks with a window")
    sinks = {
        "full": c.flag("add_full_attention_sink_bias", False, quiet=True),
        "sliding": c.flag("add_swa_attention_sink_bias", True, quiet=True),
    }
    sized = {kind: Heads(**sizes, sinks=sinks[kind]) for kind, sizes in (("full", usual), ("sliding", windowed))}
    values |= {"mixers": shortest(kinds), "heads_of": shortest([sized[kind] for kind in kinds])}
    if c.has("sliding_window_size"):  # so many tokens before each one
        values["window"] = c.number("sliding_window_size", 128, "the tokens of a window") + 1
    values["value_size"] = usual["value_size"]
    _mimo_experts(c, values)


def _mimo_experts(c: Config, values: Values) -> None:
    """Blocks with experts: a truth value for each (``moe_layer_freq``), all but the first by default."""
    layers = values["layers"]
    sparse = c.listed("moe_layer_freq", "1 for each block with experts")
    sparse_blocks = _truths(c, "moe_layer_freq", sparse, layers) if sparse else [i > 0 for i in range(layers)]
    _mlp_words(c, values, sparse_blocks, told=not sparse)
    if c.has("n_shared_experts"):
        raise ModelError(
            f"{c.where}: 'n_shared_experts' = {c.data['n_shared_experts']!r} is not described; only null is"
        )


def minimax_m3(c: Config, values: Values) -> None:
    """MiniMax-M3: in most blocks small heads choose blocks of keys, to which alone a query attends."""
    layers = values["layers"]
    table = Config(f"{c.where}: sparse_attention_config", c.table("sparse_attention_config"), c.kind)
    older = {"heads": "sparse_num_index_heads", "dim": "sparse_index_dim"}
    sizes = {"heads": "index_n_heads", "dim": "index_head_dim"}

    def size(field: str, old: str, meaning: str) -> int:
        """A size, by its older name where the table has that."""
        return table.need(old, meaning) if table.has(old) else c.number(field, 1, meaning)

    for name, field in sizes.items():
        values[f"indexer.{name}"] = size(field, older[name], "of the heads that choose keys")
    block = size("index_block_size", "sparse_block_size", "keys of a block")
    chosen = size("index_topk_blocks", "sparse_topk_blocks", "blocks of keys that a query attends to")
    values["indexer.top"] = values["window"] = block * chosen
    if values["indexer.heads"] != (values.get("kv_heads") or values["heads"]):
        raise ModelError(
            f"{c.where}: {values['indexer.heads']} heads choose keys for {values.get('kv_heads')} key-value heads; "
            "only one for each is described"
        )
    kinds = worded(c, "layer_types", {"full_attention": "full", "minimax_m3_sparse": "sliding"}, layers)
    listed = table.listed("sparse_attention_freq", "1 for each block whose keys are chosen")
    if not kinds:
        sparse = _truths(table, "sparse_attention_freq", listed, layers) if listed else [False] * layers
        kinds = ["sliding" if chosen else "full" for chosen in sparse]
        if not listed:
            c.defaults["layer_types"] = ["full_attention"]
    if not table.flag("use_sparse_attention", True, quiet=True):
        raise ModelError(f"{table.where}: 'use_sparse_attention' = false is not described; leave the whole table out")
    values["mixers"] = shortest(kinds)
    freq = c.listed("moe_layer_freq", "1 for each block with experts")
    sparse_blocks = _truths(c, "moe_layer_freq", freq, layers) if freq else [True] * layers
    _mlp_words(c, values, sparse_blocks, told=not freq)
    refuse_others(c, {"n_shared_experts": (1, None), "attention_output_gate": (False, None)})
    if c.data.get("moe_intermediate_size") not in {None, values["experts.width"]}:
        raise ModelError(
            f"{c.where}: 'moe_intermediate_size' = {c.data['moe_intermediate_size']!r}, but 'intermediate_size' = "
            f"{values['experts.width']}, which is the experts' width, too; they must be one number"
        )


def _mlp_words(c: Config, values: Values, sparse_blocks: list[bool], *, told: bool) -> None:
    """Which blocks have experts, by words where the config has them; else by ``sparse_blocks``, which is ``told``."""
    mlps = worded(c, "mlp_layer_types", MLP_WORDS, values["layers"])
    if told and not mlps:
        c.defaults["mlp_layer_types"] = list(
            shortest(["sparse" if is_sparse else "dense" for is_sparse in sparse_blocks])
        )
    values["mlps"] = shortest(mlps or ["experts" if is_sparse else "dense" for is_sparse in sparse_blocks])


def _truths(c: Config, field: str, listed: list[Any], layers: int) -> list[bool]:
    """A truth value for each block. Raises :class:`ModelError` for anything else."""
    if len(listed) != layers or any(value not in (0, 1) for value in listed):
        raise ModelError(f"{c.where}: '{field}' must be 0 or 1 for each of {layers} blocks, not {c.value(field)!r}")
    return [bool(value) for value in listed]


def searched(c: Config, values: Values) -> None:
    """Llama-Nemotron, whose blocks a search found (Puzzle): each has heads and an MLP of its own, or none."""
    layers = values["layers"]
    listed = c.listed("block_configs", "a table for each block")
    if len(listed) != layers:
        raise ModelError(
            f"{c.where}: 'block_configs' has {len(listed)} entries for {layers} blocks; it must have one each"
        )
    kinds: list[str] = []
    heads: list[Heads | None] = []
    widths: list[int] = []
    for i, block in enumerate(listed):
        if not isinstance(block, dict) or not all(isinstance(block.get(half), dict) for half in ("attention", "ffn")):
            raise ModelError(f"{c.where}: block_configs[{i}] = {block!r} must be a table with 'attention' and 'ffn'")
        parts = {half: Config(f"{c.where}: block_configs[{i}].{half}", block[half]) for half in ("attention", "ffn")}
        for part in parts.values():
            _refuse_other(part)
        attends, computes = (not parts[half].flag("no_op", False) for half in ("attention", "ffn"))
        kinds.append(f"{'full' if attends else 'none'}/{'dense' if computes else 'none'}")
        heads.append(_searched_heads(parts["attention"], values) if attends else None)
        widths.append(_searched_width(parts["ffn"], values["d_model"]) if computes else 0)
    usual = next((own for own in heads if own), None)
    if usual is None or not any(widths):
        raise ModelError(f"{c.where}: 'block_configs' has no block with attention, or none with an MLP")
    values |= as_blocks(kinds) | {"widths": tuple(widths), "heads_of": shortest([own or usual for own in heads])}
    values |= {"kv_heads": usual.kv_heads, "d_ff": max(widths)}


def _searched_heads(part: Config, values: Values) -> Heads:
    group = part.need("n_heads_in_group", "query heads that share keys")
    if values["heads"] % group:
        raise ModelError(f"{part.where}: 'n_heads_in_group' = {group} does not divide {values['heads']} heads")
    if values["d_model"] % values["heads"]:
        raise ModelError(f"{part.where}: {values['heads']} heads do not divide a width of {values['d_model']} evenly")
    return Heads(values["heads"], values["heads"] // group, values["d_model"] // values["heads"])


def _searched_width(part: Config, width: int) -> int:
    """Two thirds of so many times the model's width, to the next multiple of 256 (DeciLM's code)."""
    times = part.value("ffn_mult")
    if not isinstance(times, int | float) or isinstance(times, bool) or times <= 0:
        raise ModelError(f"{part.where}: 'ffn_mult' = {times!r} must be a number above zero")
    return 256 * ceil(int(2 * times * width / 3) / 256)


def _refuse_other(part: Config) -> None:
    """Raises :class:`ModelError` for a half that is neither what its kind is nor nothing."""
    for field, value in part.data.items():
        if field not in {"no_op", "n_heads_in_group", "ffn_mult"} and value not in (None, False):
            raise ModelError(f"{part.where}: '{field}' = {value!r} is not described; only null and false are")


def step3p5(c: Config, values: Values) -> None:
    """Step 3.5 and 3.7: blocks with a window may have more heads; all blocks but the first three have experts where
    nothing says which. Lists may have words for blocks that predict further tokens, behind the others."""
    layers = values["layers"]
    told = c.has("num_nextn_predict_layers")
    further = c.whole("num_nextn_predict_layers", 0, "blocks that predict further tokens") if told else 0
    kinds = worded(c, "layer_types", ATTENTION_WORDS, layers, further) or ["full"] * layers
    if not values.get("window"):
        kinds = ["full"] * layers
    mlps = worded(c, "mlp_layer_types", MLP_WORDS, layers, further)
    if not mlps:
        mlps = numbered(c, layers + further, range(min(3, layers - 1), layers))[:layers]
    values |= {"mixers": shortest(kinds), "mlps": shortest(mlps)}
    heads, kv_heads = values["heads"], values.get("kv_heads") or values["heads"]
    other = Config(f"{c.where}: attention_other_setting", c.table("attention_other_setting"), c.kind)
    refuse_others(
        other,
        {
            "attention_type": ("sliding_attention", None),
            "num_attention_groups": (kv_heads, None),
            "head_dim": (values["head_dim"], None),
            "true_head_dim": (values["head_dim"], None),
        },
    )
    windowed = other.number("num_attention_heads", heads, "heads of blocks with a window")
    windowed = c.number("num_sliding_attention_heads", windowed, "heads of blocks with a window")
    c.defaults.pop("num_sliding_attention_heads", None)
    said = _said_of_blocks(c, layers, {"num_attention_heads"})
    counts = [windowed if kind == "sliding" and not said else heads for kind in kinds]
    for block, own in said.items():
        counts[block] = own.number("num_attention_heads", heads, "heads of a block")
    values["heads_of"] = shortest([Heads(count, kv_heads, values["head_dim"]) for count in counts])
