"""Rules of families some of whose blocks do not attend: Mamba, gated delta, short convolutions (see :mod:`.rules`)."""

from __future__ import annotations

from math import ceil
from typing import Any

from clustersim.core.errors import ModelError
from clustersim.model.config import Config
from clustersim.model.kinds import Values as Values
from clustersim.model.kinds import as_blocks


def mamba(c: Config, values: Values) -> None:
    """Channels from ``expand`` unless ``intermediate_size`` says how many, as transformers' classes have it; the step's
    rank from the width; a head is a channel."""
    if c.has("intermediate_size"):
        inner = c.number("intermediate_size", 0, "the channels of the state space")
        c.spelled("expand")  # which says nothing then: Falcon Mamba's is 16
    else:
        inner = _expanded(c, values, "expand")
    rank = c.value("time_step_rank")
    values |= {"space.inner": inner, "heads": inner, "kv_heads": inner, "head_dim": 1, "d_ff": 0}
    values["space.rank"] = ceil(values["d_model"] / 16) if rank == "auto" else c.number("time_step_rank", 1, "a rank")
    values |= {"mixers": ("mamba",), "mlps": ("none",)}


def _expanded(c: Config, values: Values, key: str) -> int:
    expand = c.value(key)
    if not isinstance(expand, int | float) or isinstance(expand, bool) or expand <= 0:
        raise ModelError(f"{c.where}: '{key}' = {expand!r} must be a number above zero, channels over the width")
    if not c.has(key):
        c.defaults[key] = expand
    return int(expand * values["d_model"])


def mamba2(c: Config, values: Values) -> None:
    """Channels are heads times their size; the config's ``expand`` must say the same."""
    inner = _expanded(c, values, "expand")
    if values["heads"] * values["head_dim"] != inner:
        raise ModelError(
            f"{c.where}: {values['heads']} heads ('num_heads') of {values['head_dim']} ('head_dim') are "
            f"not the {inner} channels that 'expand' and 'hidden_size' give"
        )
    values |= {"space.inner": inner, "space.heads": values["heads"], "d_ff": 0}
    values |= {"mixers": ("mamba2",), "mlps": ("none",)}


_NEMOTRON = {"M": "mamba2/none", "E": "none/experts", "*": "full/none", "-": "none/dense"}
_NEMOTRON_WORDS = {
    "linear_attention": "mamba2/none",
    "mamba": "mamba2/none",
    "moe": "none/experts",
    "full_attention": "full/none",
    "attention": "full/none",
    "mlp": "none/dense",
}


def nemotron_h(c: Config, values: Values) -> None:
    """Each block has one half: a state space, attention, an MLP or experts, by a pattern of letters or a list."""
    pattern = c.text("hybrid_override_pattern", "")
    words = c.listed("layers_block_type", "a word for each block")
    table = _NEMOTRON if pattern and not words else _NEMOTRON_WORDS
    listed: list[Any] = words or list(pattern)
    if not listed:
        raise ModelError(f"{c.where}: missing 'layers_block_type' (or 'hybrid_override_pattern'), what each block has")
    wrong = [word for word in listed if word not in table]
    if wrong:
        raise ModelError(f"{c.where}: blocks of kind {wrong[0]!r}; known: {', '.join(table)}")
    said = c.data.get("num_hidden_layers")
    if said is not None and said != len(listed):
        raise ModelError(f"{c.where}: 'num_hidden_layers' = {said!r}, but {len(listed)} blocks are described")
    values["layers"] = len(listed)
    values |= as_blocks([table[word] for word in listed])
    values["space.inner"] = values["space.heads"] * c.number("mamba_head_dim", 64, "channels of a head")
    if not any("experts" in table[word] for word in listed):
        for name in [name for name in values if name.startswith("experts.")]:
            del values[name]
    else:
        times = c.whole("n_shared_experts", 1, "the number of shared experts")
        wide = c.number("moe_shared_expert_intermediate_size", values["experts.width"], "the shared expert's width")
        values["experts.shared"] = wide if times else 0


def jamba(c: Config, values: Values) -> None:
    """Jamba: attention in a block of each period, experts in a block of each other period."""
    layers, width = values["layers"], values["d_model"]

    def there(name: str, period: int, offset: int) -> list[bool]:
        """Whether each block has this part."""
        every = c.number(f"{name}_layer_period", period, "blocks from one to the next")
        first = c.whole(f"{name}_layer_offset", offset, "the first of them")
        return [i % every == first for i in range(layers)]

    mixers = ["full" if attends else "mamba" for attends in there("attn", 8, 4)]
    sparse = there("expert", 2, 1)
    if values.get("experts.count") == 1:
        sparse = [False] * layers
    mlps = ["experts" if has else "dense" for has in sparse]
    values |= as_blocks([f"{mixer}/{mlp}" for mixer, mlp in zip(mixers, mlps, strict=True)])
    rank = c.value("mamba_dt_rank")
    values["space.rank"] = (
        ceil(width / 16) if rank is None or rank == "auto" else c.number("mamba_dt_rank", 1, "a rank")
    )
    values["space.inner"] = _expanded(c, values, "mamba_expand")


def _head_channels(c: Config, inner: int, heads: int) -> None:
    """Mamba-2's heads share the channels evenly, and the config says no other size of a head."""
    size = c.value("mamba_d_head")
    if inner % heads or (isinstance(size, int) and size * heads != inner):
        raise ModelError(f"{c.where}: {heads} heads ('mamba_n_heads') of {size} ('mamba_d_head') are not the {inner} "
                         "channels that 'mamba_expand' and 'hidden_size' give")  # fmt: skip


def bamba(c: Config, values: Values) -> None:
    """Bamba: blocks that attend by number (``attn_layer_indices``), unless a list of words says it."""
    values["space.inner"] = _expanded(c, values, "mamba_expand")
    _head_channels(c, values["space.inner"], values["space.heads"])
    if c.kind != "bamba" or c.has("layers_block_type"):
        return
    attends = c.listed("attn_layer_indices", "numbers of blocks that attend")
    values |= as_blocks(["full" if i in attends else "mamba2" for i in range(values["layers"])])


def falcon_h1(c: Config, values: Values) -> None:
    """Falcon-H1: channels of the state space are a field of their own."""
    if c.has("mamba_d_ssm") or "mamba_d_ssm" not in c.data:
        values["space.inner"] = c.number("mamba_d_ssm", 1024, "channels of the state space")
    else:
        values["space.inner"] = _expanded(c, values, "mamba_expand")
    _head_channels(c, values["space.inner"], values["space.heads"])


def granite_hybrid(c: Config, values: Values) -> None:
    """Granite 4: without routed experts the shared one is the MLP; attention rotates where its config says so."""
    if c.text("position_embedding_type", "none") != "rope":
        values["positions"] = "none"
    if not values.get("experts.count"):
        values["d_ff"] = values.get("experts.shared") or c.number("shared_intermediate_size", 1024, "the MLP's width")


def lfm2_moe(c: Config, values: Values) -> None:
    """Its class has no order of blocks of its own."""
    if not c.has("layer_types"):
        raise ModelError(f"{c.where}: missing 'layer_types', full_attention or conv for each block")


def lfm2(c: Config, values: Values) -> None:
    """LFM2's MLP is two thirds of what the config says, rounded up; blocks attend by number or by words."""
    if c.flag("block_auto_adjust_ff_dim", True):
        wide = int(2 * values["d_ff"] / 3)
        times = c.value("block_ffn_dim_multiplier")
        step = c.number("block_multiple_of", 256, "what the MLP's width is a multiple of")
        if times is not None:
            wide = int(times * wide)
        values["d_ff"] = step * ceil(wide / step)
    if not c.has("layer_types"):
        attends = c.listed("full_attn_idxs", "numbers of blocks that attend")
        if not attends:
            attends = list(range(values["layers"]))
            c.defaults["full_attn_idxs"] = attends
        values |= as_blocks(["full" if i in attends else "conv" for i in range(values["layers"])])


def kimi_linear(c: Config, values: Values) -> None:
    """Kimi Linear's own table of linear attention, as its checkpoint has it; blocks are numbered from one there."""
    layers = values["layers"]
    table = Config(f"{c.where}: linear_attn_config", c.table("linear_attn_config"), c.kind)
    named = {"head_dim": ("key_dim", "value_dim"), "num_heads": ("key_heads", "value_heads")}
    for field, dimensions in (named | {"short_conv_kernel_size": ("conv",)}).items():
        if table.has(field):
            values |= {f"delta.{name}": table.number(field, 1, "of the delta rule") for name in dimensions}
    attends = [number - 1 for number in table.listed("full_attn_layers", "numbers of blocks that attend")]
    if not attends:
        attends = [i for i in range(layers) if i and i % 4 == 0]
    if not c.has("layer_types"):
        values |= as_blocks(["full" if i in attends else "kda" for i in range(layers)])
    values["experts.dense_first"] = c.whole("first_k_dense_replace", 1, "the number of leading dense blocks")
    if table.flag("use_full_rank_gate", False, quiet=True):
        raise ModelError(f"{table.where}: 'use_full_rank_gate' = true is not described; only false is")
