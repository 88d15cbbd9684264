"""ResNets from transformers' config.json, with torchvision's names of the same tensors."""

from __future__ import annotations

from clustersim.core.errors import ModelError, nearest
from clustersim.core.model import Model
from clustersim.core.texts import Table
from clustersim.model.config import Config
from clustersim.model.conv_layers import Feature, Trunk, loss
from clustersim.model.convnets import Residual, residual_network
from clustersim.model.families import fields_of

RESNETS = ("resnet",)
"""Each ``model_type`` that is read here."""
OPTIONS = ("image_size", "implementation")
"""What a scenario may say beside the config."""
_KNOWN = ("out_features", "out_indices", "stage_names")
_LAYERS = {"bottleneck": 4, "basic": 1}
"""How many times as wide as its inner convolutions what each kind of block gives is."""
USUAL = 224
"""Pixels of a side where nobody says another number."""


def resnet_config(where: str, data: Table, options: Table) -> tuple[Model, Config]:
    """The model that a config describes, and its fields as they were read.

    ``options`` : of :data:`OPTIONS`. Raises :class:`ModelError` naming file, field and value.
    """
    for option in options:
        if option not in OPTIONS:
            raise ModelError(f"{where}: resnet takes no option {option!r}; {nearest(option, OPTIONS)}")
    c = Config(where, data, "resnet", fields_of("resnet"), _KNOWN)
    net = _residual(c)
    named = c.data.get("id2label")
    c.read.update({"id2label", "num_labels"})
    classes = len(named) if isinstance(named, dict) and named else c.number("num_labels", 2, "the number of classes")
    c.refuse_unread()
    side = options.get("image_size", USUAL)
    if not isinstance(side, int) or isinstance(side, bool) or side < 1:
        raise ModelError(f"{where}: image_size = {side!r} must be a whole number of pixels above zero")
    fused = options.get("implementation", "eager")
    if fused not in {"eager", "flash", "fused"}:
        raise ModelError(f"{where}: unknown implementation {fused!r}; {nearest(str(fused), ['eager', 'fused'])}")
    trunk = Trunk(Feature(3, side, side, image=True), fused == "fused")
    residual_network(net, classes)(trunk)
    layers = (*trunk.layers, loss(classes))
    return Model(where, "convnet", layers, sample="image", notes=(f"{side}x{side} images",)), c


def _residual(c: Config) -> Residual:
    kind = c.text("layer_type", "bottleneck")
    if kind not in _LAYERS:
        raise ModelError(f"{c.where}: 'layer_type' = {kind!r} must be 'bottleneck' or 'basic'")
    depths = c.listed("depths", "blocks of each stage")
    if len(depths) != 4 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in depths):
        raise ModelError(f"{c.where}: 'depths' = {depths!r} must be the blocks of four stages")
    widths = [64 * 2**stage * _LAYERS[kind] for stage in range(4)]
    described = {"hidden_sizes": widths, "embedding_size": 64, "num_channels": 3, "hidden_act": "relu"}
    described |= {"downsample_in_first_stage": False}
    for field, value in described.items():
        if c.value(field) != value:
            raise ModelError(
                f"{c.where}: '{field}' = {c.value(field)!r} is not described of {kind} blocks; only {value!r} is"
            )
    early = c.flag("downsample_in_bottleneck", False, quiet=True) and kind == "bottleneck"
    return Residual(tuple(depths), bottleneck=kind == "bottleneck", early_stride=early)
