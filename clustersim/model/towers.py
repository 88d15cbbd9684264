"""Decoders with a tower in front that reads images: the config's two tables, and the layers between them.

A sample is one sequence of the decoder, among whose tokens are those of its images; how many images, and of how many
pixels where the tower takes any, a config does not say: one of the tower's size, or of 448 x 448 pixels, unless
``images`` and ``image_size`` say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from clustersim.core.errors import ModelError
from clustersim.core.model import Kernel, Layer, Tensor
from clustersim.core.texts import Table
from clustersim.model import kernels as K
from clustersim.model import naming
from clustersim.model.base import Tower, TransformerShape
from clustersim.model.config import Config, config_of
from clustersim.model.families import Family, by_type, families
from clustersim.model.shapes import shape_of
from clustersim.model.sizes import Bridge, Patches
from clustersim.model.tensor_parts import affine

KernelsOf = Callable[[TransformerShape], tuple[Kernel, ...]]


def with_tower(c: Config, family: Family) -> tuple[TransformerShape, list[Config], str]:
    """The decoder's shape with its tower, the configs of both, and a note on what images were assumed.

    Raises :class:`ModelError` naming file, field and value.
    """
    for key in family.without:
        if c.table(key):
            raise ModelError(f"{c.where}: '{key}' is a part of {c.kind} that is not described; null leaves it out")
    text = _part(c, "text_config", family.text, flat=True, own=family.own_parts)
    vision = _part(c, "vision_config", family.vision, own=family.own_parts)
    shape = _shape(text, family.text)
    if not family.head_to:  # a decoder of its own class decides for itself
        shape = replace(shape, tied=_tied(c, text))
    seen = _shape(vision, family.vision)
    seen = sized(seen, seen.patches.image if seen.patches else 0)
    tower = Tower(seen, (), 0, family.vision_to, family.text_to, family.head_to)
    tokens = _merged(c, vision, family.merged, seen)
    bridges = _bridges((vision, c), family, seen, shape, tokens)
    shape = replace(shape, tower=replace(tower, bridges=bridges, tokens=tokens[0]))
    return shape, [text, vision], image_note(shape)


def image_note(shape: TransformerShape) -> str:
    """What images a sample has."""
    if shape.tower is None or shape.tower.shape.patches is None:
        return ""
    side = shape.tower.shape.patches.image
    return (
        f"{shape.images} image{'s' * (shape.images != 1)} of {side} x {side} pixels a sample, "
        f"{shape.tower.tokens:,} of its tokens each; images and image_size under model.options say otherwise"
    )


def counted_images(name: str, images: object) -> int:
    """A number of images. Raises :class:`ModelError` for what is none."""
    if not isinstance(images, int) or isinstance(images, bool) or images < 1:
        raise ModelError(f"{name}: images = {images!r} must be a whole number above zero, of a sample")
    return images


def _part(c: Config, key: str, usual: str, *, flat: bool = False, own: bool = False) -> Config:
    """The config of one part; ``flat`` : it may stand at the top instead, as before transformers 5; ``own`` : it is of
    the usual type whatever it says."""
    table: Table = c.table(key)
    if not table and not flat:
        raise ModelError(
            f"{c.where}: missing '{key}', the table of the {usual} in front of the decoder; of the decoder alone give "
            "its 'text_config' as a config.json of its own"
        )
    if not table:
        table = {name: value for name, value in c.data.items() if name not in {"vision_config", "model_type"}}
        c.read.update(table)
    said = table.get("model_type")
    kind = said if not own and isinstance(said, str) and _is_part(said, usual) else usual
    return config_of(f"{c.where}: {key}", table, kind)


def _is_part(kind: str, usual: str) -> bool:
    """Whether a type stands for the same kind of part as the usual one: a tower, or a decoder."""
    if kind not in by_type():
        return False
    rows = (families()[by_type()[name]] for name in (kind, usual))
    towers = ["patches.side" in row.reads for row in rows]
    return towers[0] == towers[1] and not families()[by_type()[kind]].vision


def _shape(c: Config, usual: str) -> TransformerShape:
    row = by_type()[c.kind or usual]
    return shape_of(c, row, families()[row])


def _tied(c: Config, text: Config) -> bool:
    """The whole config decides; one of before transformers 5 may say it of the decoder."""
    if not c.has("tie_word_embeddings"):
        usual = bool(c.default("tie_word_embeddings"))
        tied = usual or bool(text.data.get("tie_word_embeddings"))
        text.read.add("tie_word_embeddings")
        text.defaults["tie_word_embeddings"] = tied
        return tied
    return c.flag("tie_word_embeddings", False)


def sized(s: TransformerShape, pixels: int) -> TransformerShape:
    """A tower's shape for one image of so many pixels a side.

    Raises :class:`ModelError` where patches do not cut it, unless its own images are so: what is behind the last whole
    patch (of 384 pixels in patches of 14) no patch sees.
    """
    if s.patches is None:
        raise ModelError(f"{s.name}: no tower of images; its family has no patches")
    is_cut = isinstance(pixels, int) and pixels >= s.patches.side
    if not is_cut or isinstance(pixels, bool) or (pixels % s.patches.side and pixels != s.patches.image):
        near = max(1, round((pixels if isinstance(pixels, int) else 1) / s.patches.side)) * s.patches.side
        raise ModelError(f"{s.name}: patches of {s.patches.side} pixels do not cut an image of {pixels!r}; use {near}")
    patches = msgspec.structs.replace(s.patches, image=pixels)
    tokens = patches.grid + patches.tokens
    places = s.n_positions or (tokens if s.positions == "learned" else 0)
    return replace(s, patches=patches, seq_len=tokens, n_positions=places, tied=False)


def resized(s: TransformerShape, pixels: int) -> TransformerShape:
    """A decoder whose images have another size; a tower with learned positions takes the size of its config alone."""
    tower = s.tower
    if tower is None or tower.shape.patches is None:
        raise ModelError(f"{s.name}: image_size = {pixels!r}, but the model reads no images")
    if tower.shape.positions == "learned" and pixels != tower.shape.patches.image:
        raise ModelError(
            f"{s.name}: image_size = {pixels!r}, but the tower has learned positions for images of "
            f"{tower.shape.patches.image}; change 'image_size' in the config"
        )
    ratio = tower.shape.patches.grid / tower.tokens
    seen = sized(replace(tower.shape, n_positions=tower.shape.n_positions), pixels)
    tokens = round((seen.patches.grid if seen.patches else 0) / ratio)
    return replace(s, tower=replace(tower, shape=seen, tokens=max(1, tokens)))


def _merged(c: Config, vision: Config, rule: str, seen: TransformerShape) -> tuple[int, int]:
    """Tokens of the decoder that an image becomes, and patches of each.

    ``all`` : a token for each patch. ``field:KEY`` : as the config says. ``square:KEY``, ``own:KEY`` : squares of so
    many patches a side, by the tower's table or the config's own. ``side:N`` : of N patches a side. ``ratio:KEY``,
    ``own_ratio:KEY`` : a side is scaled by that number.
    """
    grid = seen.patches.grid if seen.patches else 0
    kind, _, key = rule.partition(":")
    if kind == "field":
        tokens = c.number(key, 0, "tokens of an image")
        return tokens, max(1, round(grid / tokens))
    if kind in {"square", "own"}:
        side = (vision if kind == "square" else c).side(key, 2, "patches of a side that become one token")
        return max(1, grid // side**2), side**2
    if kind == "side":
        return max(1, grid // int(key) ** 2), int(key) ** 2
    if kind in {"ratio", "own_ratio"}:
        table = vision if kind == "ratio" else c
        ratio = table.value(key)
        if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 < ratio <= 1:
            raise ModelError(f"{table.where}: '{key}' = {ratio!r} must be a number above zero, at most 1")
        return max(1, round(grid * ratio**2)), max(1, round(1 / ratio**2))
    return grid, 1


def _bridges(
    tables: tuple[Config, Config],
    family: Family,
    seen: TransformerShape,
    text: TransformerShape,
    tokens: tuple[int, int],
) -> tuple[Bridge, ...]:
    """The projector's lines with widths in numbers; ``tables`` : the tower's, and the whole config. ``tokens`` : of
    an image, and patches of each."""
    vision, whole = tables
    merged = tokens[1]
    widths = {"v": seen.d_model, "t": text.d_model, "m": seen.d_model * merged, "tm": text.d_model * merged}

    def width(word: str) -> int:
        """A word's width, or a part of it: one that is given, maybe so many times, or a field of the config or the
        tower's."""
        word, _, parts = word.partition("/")
        bare = word.lstrip("0123456789")
        if bare in widths:
            return int(word.removesuffix(bare) or 1) * widths[bare]
        table = whole if whole.has(word) or whole.default(word) is not None else vision
        return table.number(word, 0, "a width of the projector") // int(parts or 1)

    listed: list[tuple[str, list[str]]] = []
    for line in family.projector:
        first, *rest = line.split()
        word, _, field = first.partition(":")
        if word == "each":
            kind, name, *sizes = rest
            count = len(vision.listed(field, "numbers of blocks"))
            listed += [(kind, [name.format(i), *sizes]) for i in range(count)]
        elif word != "if":
            listed.append((first, rest))
        elif whole.flag(field, True, quiet=True):
            listed.append((rest[0], rest[1:]))
    listed.sort(key=lambda item: _number(item[1][0]))
    made = []
    for kind, (name, *sizes) in listed:
        ends, _, field = sizes[-1].partition(":")
        numbers = [width(word) for word in sizes[: len(sizes) - (ends == "bias")]]
        bias = ends == "bias" and (not field or whole.flag(field, True, quiet=True))
        kind, _, times = kind.partition("*")
        made.append(Bridge(kind, name, numbers[0], numbers[-1], bias, int(times or 1)))
    return tuple(made)


def _number(name: str) -> int:
    """Which of repeated modules a name is of; those that are not repeated stand first."""
    return next((int(word) + 1 for word in name.split(".")[3:4] if word.isdigit() and "_list" in name), 0)


def tower_layers(s: TransformerShape, tower: Tower, kernels_of: KernelsOf) -> tuple[Layer, ...]:
    """The tower's layers and the projector's, for all images of a sample; ``kernels_of`` : a block's."""
    seen = tower.shape
    patches = seen.patches or Patches(1, 1)
    seen = replace(
        seen, seq_len=seen.seq_len * s.images, attention="flash", implementation=s.implementation, fused_loss=False
    )
    t = seen.seq_len
    h = seen.d_model
    pixels = patches.channels * patches.side**2 * patches.depth
    entry = K.linear("patches", patches.grid * s.images, pixels, h)
    # Pixels need no gradient.
    kernels: list[Kernel] = [replace(entry, backward_flops=entry.flops, backward_nbytes=entry.nbytes)]
    if seen.n_positions:
        kernels.append(K.memory("positions", float(t * h), K.Passes(3, 1, 1, 1)))
    layers = [
        Layer("vision.embedding", "embedding", naming.embedding(seen), tuple(kernels), activation_bytes=K.kept(kernels))
    ]
    shapes = [seen.of_block(i) for i in range(seen.layers)]
    bodies = {variant: kernels_of(variant) for variant in dict.fromkeys(shapes)}
    boundary = float(t * h)
    for i, block in enumerate(shapes):
        body = bodies[block]
        layers.append(
            Layer(
                f"vision.{i}",
                "block",
                naming.block(block, i),
                body,
                activation_bytes=K.kept(body),
                boundary_bytes=boundary,
            )
        )
    layers.append(_end(seen, boundary))
    named = [
        replace(layer, tensors=tuple(replace(tensor, name=tower.names + tensor.name) for tensor in layer.tensors))
        for layer in layers
        if layer.tensors
    ]
    return (*named, _projector(s, tower))


def _end(seen: TransformerShape, boundary: float) -> Layer:
    """The tower's last norm, and its pooling by one learned query."""
    kernels: list[Kernel] = [K.norm(seen, "norm", saved=1)]
    if seen.pooling:
        kernels += [K.linear("pooled_keys", seen.seq_len, seen.d_model, 2 * seen.d_model)]
    tensors = naming.head(seen)
    return Layer(
        "vision.head", "norm", tensors, tuple(kernels), activation_bytes=K.kept(kernels), boundary_bytes=boundary
    )


def _projector(s: TransformerShape, tower: Tower) -> Layer:
    """Tokens of images in the decoder's width."""
    merged = tower.tokens * s.images
    patches = tower.shape.patches.grid * s.images if tower.shape.patches else merged
    tensors: list[Tensor] = []
    kernels: list[Kernel] = []
    for bridge in tower.bridges:
        rows = patches if bridge.kind == "each_patch" else merged * bridge.times
        if bridge.kind == "vector":
            tensors.append(Tensor(bridge.name, bridge.n_in))
            continue
        if bridge.kind == "raw":
            tensors.append(Tensor(bridge.name, bridge.n_in * bridge.n_out))
        elif bridge.kind in {"norm", "plain"}:
            if bridge.kind == "norm":
                tensors += affine(bridge.name, 1, bridge.n_in, bias=bridge.bias)
            kernels.append(K.norm(s, "projector_norm", float(rows * bridge.n_in), saved=1))
            continue
        else:
            tensors += affine(bridge.name, bridge.n_in, bridge.n_out, bias=bridge.bias)
        kernels.append(K.linear("projector", rows, bridge.n_in, bridge.n_out))
    kernels.append(K.memory("placed", float(merged * s.d_model), K.Passes(3, 3)))
    boundary = float(tower.shape.seq_len * s.images * tower.shape.d_model)
    return Layer(
        "projector",
        "projector",
        tuple(tensors),
        tuple(kernels),
        activation_bytes=K.kept(kernels),
        boundary_bytes=boundary,
    )


def renamed(tower: Tower, layer: Layer) -> Layer:
    """A decoder's layer with the names that its tensors have behind a tower."""

    def name(old: str) -> str:
        """A tensor's name behind the tower."""
        if old.startswith("model."):
            return tower.text_names + old.removeprefix("model.")
        return tower.head_names + old if old else ""

    tensors = tuple(replace(tensor, name=name(tensor.name), tied_to=name(tensor.tied_to)) for tensor in layer.tensors)
    return replace(layer, tensors=tensors)
