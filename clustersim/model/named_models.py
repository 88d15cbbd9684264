"""Models by name: shipped configs, convolutional networks, or a path."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from clustersim.core.errors import ModelError
from clustersim.core.model import Model
from clustersim.core.texts import Table, is_folder
from clustersim.model.audio import jasper, waveglow
from clustersim.model.base import TransformerShape
from clustersim.model.convnets import CONVNETS, convnet
from clustersim.model.fastpitch import fastpitch
from clustersim.model.hf import MISSING, config_file, from_hf, has_no_shape, shape_from_hf
from clustersim.model.names import described, plain, same_family
from clustersim.model.options import with_options
from clustersim.model.published import config, configs, known_as, source
from clustersim.model.recurrent import gnmt, tacotron2
from clustersim.model.seq2seq import SEQ2SEQ, seq2seq
from clustersim.model.traced import read_traced
from clustersim.model.transformer_model import build, execution
from clustersim.model.transformer_xl import TRANSFORMER_XL, transformer_xl
from clustersim.model.vision import VITS, vit_shape

NETWORKS: Mapping[str, Callable[[], Model]] = {
    "gnmt": gnmt,
    "tacotron2": tacotron2,
    "waveglow": waveglow,
    "jasper": jasper,
    "fastpitch": fastpitch,
}
"""Networks that are neither a transformer nor of images, by name."""

_SEEN = ("image_size", "class_tokens", "classes")
"""What may be said of a vision transformer."""


def _vit(name: str, attention: str | None = None, implementation: str | None = None, **seen: Any) -> Model:
    attention, implementation = execution(attention, implementation)
    return build(dataclasses.replace(vit_shape(name, **seen), attention=attention, implementation=implementation))


_DESCRIBED: Mapping[str, tuple[Callable[..., Model], set[str]]] = {
    **dict.fromkeys(CONVNETS, (convnet, {"image_size", "implementation"})),
    **dict.fromkeys(TRANSFORMER_XL, (transformer_xl, {"seq_len"})),
    **dict.fromkeys(SEQ2SEQ, (seq2seq, {"seq_len", "implementation"})),
    **dict.fromkeys(VITS, (_vit, {*_SEEN, "attention", "implementation"})),
    **dict.fromkeys(NETWORKS, (lambda name: NETWORKS[name](), set())),
}
"""Networks that are described in Python: how each is built from its name, and which options it takes."""


def catalog() -> tuple[str, ...]:
    """Every name :func:`model` knows: the shipped configs, then the networks described in Python."""
    return (*configs(), *_DESCRIBED)


def model(name_or_path: str | Path, **overrides: Any) -> Model:
    """A model by name, or by the path of a Hugging Face config.json (or its folder) or of a model file.

    Parameters
    ----------
    name_or_path : ``"llama3-8b"``, ``"resnet50"``, ``"configs/my_llama/config.json"``; a name is read without regard
        to case, ``_`` or a leading organisation (``meta-llama/``).
    overrides : ``seq_len``, ``attention``, ``implementation`` and the other options of
        :func:`~clustersim.model.hf.from_hf`, or ``image_size`` of :func:`~clustersim.model.convnets.convnet`.

    Raises :class:`ModelError` for a name that is neither, with the nearest known one.

    >>> model("gpt2").parameters, model("ResNet50").parameters
    (124439808, 25557032)
    """
    path = Path(name_or_path)
    if is_model_file(path):
        return _traced(path, overrides)
    if _is_config(name_or_path):
        return from_hf(path, **overrides)
    shipped_name = _known(str(name_or_path))
    try:
        return _shipped(shipped_name, tuple((key, type(value), value) for key, value in sorted(overrides.items())))
    except TypeError:  # an override that cannot be hashed
        return _named(shipped_name, overrides)


@lru_cache(maxsize=64)
def _shipped(name: str, overrides: tuple[tuple[str, type, Any], ...]) -> Model:
    """A shipped model; a plan asks for it with each of its options."""
    return _named(name, {key: value for key, _, value in overrides})


def _named(name: str, overrides: Table) -> Model:
    if name in _DESCRIBED:
        network, known = _DESCRIBED[name]
        return network(name, **_only(name, overrides, known))
    made = from_hf(_config(name), name=name, **overrides)
    # What a publisher's own file leaves out is meant so.
    return dataclasses.replace(made, notes=tuple(note for note in made.notes if not note.startswith(MISSING)))


def file(name_or_path: str | Path) -> Path | None:
    """The config.json that :func:`model` reads; None for a model that is described in Python. Raises as it does."""
    path = Path(name_or_path)
    if is_model_file(path):
        return path
    if _is_config(name_or_path):
        return path / "config.json" if is_folder(path) else path
    name = _known(str(name_or_path))
    return None if name in _DESCRIBED else source(name)


def config_of(name_or_path: str | Path) -> Table:
    """The fields of :func:`file`; none of a model that is described in Python. Raises as :func:`model`."""
    path = Path(name_or_path)
    if _is_config(name_or_path):
        return config_file(path)[1]
    name = _known(str(name_or_path))
    return {} if name in _DESCRIBED else config(name)


def shape(name_or_path: str | Path, options: Table) -> TransformerShape | None:
    """What a transformer was built from; None for a network that is no stack of equal blocks. Raises as :func:`model`.

    ``options`` : as of :func:`model`.
    """
    path = Path(name_or_path)
    if is_model_file(path) or (_is_config(name_or_path) and has_no_shape(path)):
        return None
    name = "" if _is_config(name_or_path) else _known(str(name_or_path))
    if name not in _DESCRIBED:
        known = {field.name for field in dataclasses.fields(TransformerShape)}
        said = {name: value for name, value in options.items() if name in known}
        whole = _shipped_shape(name) if name else shape_from_hf(path)[0]
        return None if whole is None else with_options(whole, said)
    return vit_shape(name, **{key: options[key] for key in _SEEN if key in options}) if name in VITS else None


@cache
def _shipped_shape(name: str) -> TransformerShape | None:
    """The shape of a shipped config as it is, None where it has none: who looks for the model of some sizes asks for
    each, again and again."""
    fields = _config(name)
    return None if has_no_shape(fields) else shape_from_hf(fields, name=name)[0]


@cache
def _names() -> dict[str, str]:
    """Each name of the catalog by what is compared of it."""
    return {plain(name): name for name in catalog()}


_WAYS = "`clustersim list models` names all, and hf_config takes the path of any other's config.json"
"""What helps where a name is not known."""


def _known(word: str) -> str:
    name = _names().get(plain(word)) or known_as(word) or ""
    if not name and (why := described(word)):
        raise ModelError(f"model {word!r} is {why}")
    if not name:
        raise ModelError(f"unknown model {word!r}; {same_family(word, catalog())}; {_WAYS}")
    return name


def is_model_file(path: Path) -> bool:
    """Whether it is named as ``clustersim trace-model`` names its files."""
    return path.name.endswith(".model.json")


def _traced(path: Path, overrides: Table) -> Model:
    """A traced model, in the first types that it was traced in."""
    if overrides:
        name, value = next(iter(overrides.items()))
        raise ModelError(f"{path}: {name} = {value!r}: a traced model is what was traced; trace it again to change it")
    return read_traced(path)


def _is_config(name_or_path: str | Path) -> bool:
    """Whether it is somebody's config; a folder without one that has a shipped model's name is none, and no name at
    all is none either, though pathlib reads it as the folder that we are in."""
    path = Path(name_or_path)
    if not str(name_or_path):
        return False
    if path.suffix == ".json" or not is_folder(path):
        return path.suffix == ".json"
    return (path / "config.json").exists() or plain(str(path)) not in map(plain, catalog())


def _config(name: str) -> Path | Table:
    """A shipped config: its file, or its row."""
    path = source(name)
    return path if path.suffix == ".json" else config(name)


def _only(name: str, overrides: Table, known: set[str]) -> Table:
    for option in overrides:
        if option not in known:
            raise ModelError(
                f"{name}: unknown option {option!r}; it takes {', '.join(map(repr, sorted(known))) or 'none'}"
            )
    return overrides
