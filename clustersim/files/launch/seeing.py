"""Which parts of a model that reads images are trained, by LLaMA-Factory's and ms-swift's words for it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import isqrt
from pathlib import Path

from clustersim.core.errors import ClusterSimError, ScenarioError
from clustersim.core.texts import shown
from clustersim.files.launch.adapters import flag
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.options import ScenarioFields
from clustersim.model import named_models as models
from clustersim.model.adapter_setting import ALL_LINEAR
from clustersim.model.base import Tower, TransformerShape
from clustersim.model.towers import image_note, resized

TOWER, PROJECTOR, DECODER = "freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"
PARTS = {
    TOWER: (
        "model.visual.patch_embed*",
        "model.visual.pos_embed*",
        "model.visual.blocks.*",
        "model.vision_tower.*",
        "vision_model.*",
    ),
    PROJECTOR: (
        "model.visual.merger.*",
        "model.visual.deepstack_merger_list.*",
        "model.multi_modal_projector.*",
        "multi_modal_projector.*",
    ),
}
"""Parameters of each part, in transformers' classes of these models."""
LARGEST = ("image_max_pixels", "max_pixels")
"""Options for the most pixels of an image: LLaMA-Factory's, and ms-swift's."""
USUAL = " (by default)"
_ALL = r"^(?!.*(visual|vision_tower|vision_model|multi_modal_projector)).*"
"""Modules of the decoder alone, as a pattern of PEFT."""


def by_default(one: Document) -> None:
    """What LLaMA-Factory (hparams/finetuning_args.py, 0.9.5) and ms-swift (arguments/base_args, 4.6) leave as it is."""
    for name in (TOWER, PROJECTOR):
        one.options.setdefault(("args", name), OptionValue(f"{name}{USUAL}", True, one.name))


def taken(
    options: dict[Key, OptionValue], fields: ScenarioFields, used: set[Key], model: str | None, folder: Path
) -> list[str]:
    """Put the parts that are not trained into ``model.frozen``, or adapters into the decoder alone, and what was read
    into ``used``; returns notes, also on the images that no launch file describes.

    Raises :class:`ScenarioError` where the decoder is not trained.
    """
    said = {name: options["args", name] for name in (TOWER, PROJECTOR, DECODER) if ("args", name) in options}
    for name, option in said.items():
        if option.name.endswith(USUAL):
            del options["args", name]
    named = model if model is not None else fields.get("model.name")
    try:
        known = str(folder / named) if isinstance(named, str) and named.endswith(".json") else named
        shape = models.shape(known, {}) if isinstance(known, str) else None
    except ClusterSimError:  # which is told where the model is read
        shape = None
    if shape is None or known is None:
        return []
    used.update(key for name in said if (key := ("args", name)) in options)
    if shape.tower is None:
        return []
    still = [name for name, option in said.items() if flag(option)]
    if DECODER in still:
        option = said[DECODER]
        raise ScenarioError(
            f"{option.where}: {option.name} {shown(option.value)} trains an image encoder or a projector alone, which "
            "is not played"
        )
    notes = _images(options, fields, used, shape, shape.tower)
    if not still:
        return notes
    if "model.adapter.rank" in fields:
        if TOWER in still:
            fields["model.adapter.target_modules"] = [_in_decoder(fields["model.adapter.target_modules"])]
            notes.append(f"adapters are in the decoder alone, as {said[TOWER].name} has it")
        return notes
    tensors = [tensor.name for layer in models.model(known).layers for tensor in layer.tensors]
    globs = [glob for part in still for glob in PARTS[part] if any(fnmatchcase(name, glob) for name in tensors)]
    fields["model.frozen"] = globs
    words = " and ".join(said[part].name for part in still)
    return [*notes, f"not trained: {', '.join(globs)}, as {words} has it"]


def _images(
    options: dict[Key, OptionValue], fields: ScenarioFields, used: set[Key], shape: TransformerShape, tower: Tower
) -> list[str]:
    """Images as small as the pixels that an option allows, where a tower takes images of any size; a note on them.

    Sides are of whole patches that the projector merges, as ``smart_resize`` of transformers' Qwen2-VL has them.
    """
    key = next((key for name in LARGEST if (key := ("args", name)) in options), None)
    patches = tower.shape.patches
    if key is None or patches is None or tower.shape.positions == "learned":
        return [f"no file says what images are read: {image_note(shape)}"]
    option = options[key]
    used.add(key)
    step = patches.side * max(1, isqrt(patches.grid // tower.tokens))
    pixels = int(option.value) if str(option.value).isdecimal() else 0
    if pixels < step * step:
        raise ScenarioError(
            f"{option.where}: {option.name} {shown(option.value)} must be a number of pixels, {step * step} or more"
        )
    side = min(isqrt(pixels) // step * step, patches.image)
    if side < patches.image:
        fields["model.options"] = {**fields.get("model.options", {}), "image_size": side}
        shape = resized(shape, side)
    return [f"no file says what images are read, of at most {pixels:,} pixels ({option.name}): {image_note(shape)}"]


def _in_decoder(modules: list[str]) -> str:
    """Modules' names, or one pattern of them, as a pattern that the tower's and the projector's do not match."""
    if ALL_LINEAR in modules:
        return f"{_ALL}_proj"
    return f"{_ALL}\\b({'|'.join(modules)})"
