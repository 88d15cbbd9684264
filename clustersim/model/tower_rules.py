"""Rules of towers that read images (see :mod:`.rules`)."""

from __future__ import annotations

from clustersim.core.errors import ModelError
from clustersim.model.config import Config
from clustersim.model.hybrid_rules import Values
from clustersim.model.kinds import as_blocks


def image(c: Config, values: Values) -> None:
    """A vision transformer's classes, by their names or their number."""
    named = c.data.get("id2label")
    c.read.update({"id2label", "num_labels"})
    if isinstance(named, dict) and named:
        values["vocab"] = len(named)
    else:
        values["vocab"] = c.number("num_labels", 2, "the number of classes")
    values["seq_len"] = 1


def pooled(c: Config, values: Values) -> None:
    """SigLIP's tower ends in attention of one learned query, unless its config says no."""
    values["pooling"] = c.flag("vision_use_head", True)


def mlp_ratio(c: Config, values: Values) -> None:
    """The MLP is so many times as wide as the tower."""
    ratio = c.value("mlp_ratio")
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or ratio <= 0:
        raise ModelError(
            f"{c.where}: 'mlp_ratio' = {ratio!r} must be a number above zero, the MLP's width over the tower's"
        )
    values["d_ff"] = int(ratio * values["d_model"])
    for field, described in (("use_swiglu_ffn", False), ("use_mask_token", True)):
        if c.flag(field, described, quiet=True) != described:
            words = ("false", "true")
            raise ModelError(
                f"{c.where}: '{field}' = {words[not described]} is not described; only {words[described]} is"
            )


def any_image(c: Config, values: Values) -> None:
    """Pixtral's ``image_size`` is the largest that it takes."""
    side = values["patches.side"]
    values["patches.image"] = min(values["patches.image"], 448 // side * side)
    values["n_positions"] = 0


def position_grid(c: Config, values: Values) -> None:
    """MoonViT's learned positions are a grid, from which those of any image are drawn."""
    sides = [
        c.number(name if c.has(name) or not c.has(f"init_{name}") else f"init_{name}", 64, "positions of a side")
        for name in ("pos_emb_height", "pos_emb_width")
    ]
    values["n_positions"] = sides[0] * sides[1]


def table_of_image(c: Config, values: Values) -> None:
    """GLM-V's learned positions are those of an image of one size, from which those of any are drawn."""
    side = c.side("image_size", 336, "pixels of a side")
    values["n_positions"] = (side // values["patches.side"]) ** 2


def internvl(c: Config, values: Values) -> None:
    """InternVL's tower: norms by their kind, and none behind the last block where its patches are averaged."""
    kind = c.text("norm_type", "layer_norm")
    if kind not in {"layer_norm", "rms_norm"}:
        raise ModelError(f"{c.where}: 'norm_type' = {kind!r} must be 'layer_norm' or 'rms_norm'")
    values |= {"norm": kind.replace("_", ""), "norm_bias": kind == "layer_norm"}
    values["final_norm"] = not c.flag("use_mean_pooling", True, quiet=True)
    positions = c.flag("use_absolute_position_embeddings", True, quiet=True)
    if not positions or c.flag("use_mask_token", False, quiet=True):
        raise ModelError(
            f"{c.where}: a tower without 'use_absolute_position_embeddings' or with 'use_mask_token' is not described"
        )


def two_tables(c: Config, values: Values) -> None:
    """Gemma 4's learned positions are a table for rows of patches and one for columns."""
    values["n_positions"] *= 2
    if c.flag("use_clipped_linears", False, quiet=True):
        raise ModelError(f"{c.where}: 'use_clipped_linears' = true is not described; only false is")


def patch_windows(c: Config, values: Values) -> None:
    """Qwen2.5's tower attends inside windows of so many pixels, but for some blocks."""
    full = c.listed("fullatt_block_indexes", "numbers of blocks that attend to everything")
    side = c.number("window_size", 112, "pixels of a window's side") // values["patches.side"]
    values["window"] = side * side
    values |= as_blocks(["full" if i in full else "chunked" for i in range(values["layers"])]) or {"window": 0}


def minimax_tower(c: Config, values: Values) -> None:
    """MiniMax-M3's published tower says how patches are merged in a table of its own."""
    said = c.table("img_token_compression_config")
    for field in ("spatial_merge_size", "temporal_patch_size"):
        if field in said and said[field] != c.value(field):
            raise ModelError(
                f"{c.where}: img_token_compression_config.{field} = {said[field]!r}, but '{field}' is "
                f"{c.value(field)!r}, by default where it is missing; write the same"
            )
    values["patches.image"] = 448


def squares(c: Config, values: Values) -> None:
    """Gemma 4's 12B reads squares of so many patches a side as one."""
    values["patches.side"] *= c.number("pooling_kernel_size", 3, "patches of a side that become one token")


def registers(c: Config, values: Values) -> None:
    """DINOv2 with registers: further tokens, which have no position."""
    values["patches.tokens"] = 1 + c.whole("num_register_tokens", 4, "learned tokens beside the class's")


def dinov3(c: Config, values: Values) -> None:
    """DINOv3: registers, keys without a bias, and gates in its largest sizes."""
    values["patches.tokens"] = 1 + c.whole("num_register_tokens", 0, "learned tokens beside the class's")
    values["n_positions"] = 0
    for field, described in (("query_bias", True), ("key_bias", False), ("value_bias", True)):
        if c.flag(field, described, quiet=True) != described:
            words = ("false", "true")
            raise ModelError(
                f"{c.where}: '{field}' = {words[not described]} is not described; only {words[described]} is"
            )
    if c.flag("use_gated_mlp", False, quiet=True):
        values["activation"] = {"silu": "swiglu", "gelu": "geglu"}.get(values["activation"], values["activation"])
