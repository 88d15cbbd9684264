"""What ``trace-model`` is told to trace: somebody's own function, or a library's class; built without memory.

A file that is named runs, as ``python FILE`` would run it. Nothing is downloaded, and code that a config names
(``auto_map``) runs only where it is trusted.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

from clustersim.core.errors import ModelError, few, nearest
from clustersim.core.texts import Table, json_table, plain_file, shown, text_of
from clustersim.model.tracing.step import on_meta

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


class Built(msgspec.Struct, frozen=True):
    """A module on the meta device, and how it is called.

    Parameters
    ----------
    name : what to call the model. loss : the usual one of such a module. more : further arguments of its forward, as
    :func:`clustersim.model.tracing.step.traced_step` has them. tokens, images : what inputs are called that have no
    name; empty where they go by place.
    """

    module: Any
    name: str
    loss: str = "none"
    more: Mapping[str, Any] = {}
    tokens: str = ""
    images: str = ""


class Target(msgspec.Struct, frozen=True):
    """What the command says: ``module:name``, the ``config`` of a Hugging Face class, arguments to build with, and
    whether code that the config brings is trusted."""

    module: str
    attribute: str
    config: Path | None = None
    arguments: Mapping[str, Any] = {}
    trust: bool = False

    @property
    def words(self) -> str:
        """As it is written."""
        return f"{self.module}:{self.attribute}"

    @property
    def file(self) -> Path | None:
        """The file that it names; None for an installed module."""
        return Path(self.module) if self.module.endswith(".py") else None


def target_of(words: str) -> tuple[str, str]:
    """``"my.py:build"`` -> ``("my.py", "build")``. Raises :class:`ModelError`."""
    if "://" in words:
        raise ModelError(f"{words}: nothing is executed from the internet; download it, read it, and name the file")
    module, colon, attribute = words.rpartition(":")
    if not colon or not module or not attribute.replace(".", "_").replace("-", "_").isidentifier():
        raise ModelError(
            f"{shown(words)}: write it as FILE.py:FUNCTION, like my.py:build, or MODULE:NAME, like "
            "timm:vit_base_patch16_224 or transformers:AutoModelForCausalLM with --config"
        )
    return module, attribute


def built(target: Target) -> Built:
    """The module, built on the meta device. Raises :class:`ModelError` for what is not there, and for what is no
    module; whatever the module's own code raises goes through."""
    for name in OFFLINE:
        os.environ.setdefault(name, "1")
    if target.module != "transformers" and target.config is not None:
        raise ModelError(f"--config {target.config}: is for classes of transformers; {target.words} takes --arg")
    if target.module in LIBRARIES:
        _set_aside("torchvision")
        return LIBRARIES[target.module](target)
    source = _imported(target)
    return Built(_constructed(target, _attribute(target, source)), (target.file or Path(target.attribute)).stem)


def _imported(target: Target) -> ModuleType:
    file = target.file
    if file is None:
        return _library(target.module)
    plain_file(file, ModelError)
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"_traced_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ModelError(f"{file}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _library(name: str) -> ModuleType:
    top = name.partition(".")[0]
    try:
        there = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        there = None
    if there is None:
        hint = " in the working folder? then write its name with .py" if Path(f"{name}.py").exists() else ""
        raise ModelError(f"{name}: no module of this name is installed{hint}; pip install it beside torch")
    return importlib.import_module(name)


def _attribute(target: Target, source: ModuleType) -> Any:
    thing: Any = source
    for part in target.attribute.split("."):
        if not hasattr(thing, part):
            own = [name for name, value in vars(thing).items() if callable(value) and not name.startswith("_")]
            raise ModelError(f"{target.words}: {target.module} has no {part!r}; {nearest(part, own or ['nothing'])}")
        thing = getattr(thing, part)
    return thing


def _constructed(target: Target, thing: Any) -> torch.nn.Module:
    """What the function, the class or the module itself comes to."""
    if not isinstance(thing, torch.nn.Module):
        if not callable(thing):
            raise ModelError(f"{target.words}: is {shown(thing)}, and neither a module nor a function that builds one")
        with on_meta():
            thing = thing(**target.arguments)
    if not isinstance(thing, torch.nn.Module):
        raise ModelError(f"{target.words}: returns {shown(thing)}, and not a torch.nn.Module")
    return thing


def _hugging_face(target: Target) -> Built:
    """A class of transformers with the config of a file."""
    if target.config is None:
        raise ModelError(f"{target.words}: say which model with --config FILE, the config.json of the model")
    path = target.config / "config.json" if target.config.is_dir() else target.config
    table = json_table(text_of(path, ModelError), str(path), ModelError) | dict(target.arguments)
    transformers = _library("transformers")
    config = _config_of(transformers, path, table, trust=target.trust)
    config.use_cache = False
    thing = _attribute(target, transformers)
    attention = {"attn_implementation": str(table["attn_implementation"])} if "attn_implementation" in table else {}
    with on_meta():
        if hasattr(thing, "from_config"):
            module = thing.from_config(config, trust_remote_code=target.trust, **attention)
        elif hasattr(thing, "_from_config"):
            module = thing._from_config(config, **attention)
        else:
            raise ModelError(f"{target.words}: is no class that is built from a config")
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"{target.words}: returns {shown(module)}, and not a torch.nn.Module")
    name = str(table.get("_name_or_path") or "") or (path.parent.name if path.name == "config.json" else path.stem)
    kind = type(module).__name__
    labels = _labels(kind)
    return Built(
        module, name or kind, more={"labels": labels} if labels else {}, tokens="input_ids", images="pixel_values"
    )


def _config_of(transformers: ModuleType, path: Path, table: Table, *, trust: bool) -> Any:
    """The config as its class reads it. Code of its own runs only where it is trusted."""
    own_code = "auto_map" in table
    if own_code and trust:
        return transformers.AutoConfig.from_pretrained(path.parent, trust_remote_code=True)
    kind = table.get("model_type")
    known = list(transformers.CONFIG_MAPPING.keys())
    if kind not in known:
        brings = f"; the code that it brings ({json.dumps(table['auto_map'])[:100]}) runs only with --trust"
        close = brings if own_code else f"; {nearest(str(kind), known)}"
        raise ModelError(f"{path}: this transformers has no model_type {shown(kind)}{close[:300]}")
    fields = {name: value for name, value in table.items() if name not in {"model_type", "auto_map"}}
    return transformers.AutoConfig.for_model(kind, **fields)


def _labels(kind: str) -> str:
    """What the labels of a class are, by its name; nothing where it has none that a shape could be said of."""
    if kind.endswith(("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForPreTraining", "ForConditionalGeneration")):
        return "like input_ids"
    return "classes" if kind.endswith(("ForSequenceClassification", "ForImageClassification")) else ""


def _timm(target: Target) -> Built:
    timm = _library("timm")
    if target.attribute not in timm.list_models():
        known = timm.list_models()
        raise ModelError(f"{target.words}: timm has no such model; {nearest(target.attribute, known)[:300]}")
    with on_meta():
        module = timm.create_model(target.attribute, pretrained=False, **target.arguments)
    return Built(module, target.attribute, loss="cross_entropy")


def _torchvision(target: Target) -> Built:
    models = importlib.import_module("torchvision.models")
    known = models.list_models()
    if target.attribute not in known:
        raise ModelError(f"{target.words}: torchvision has no such model; {nearest(target.attribute, known)[:300]}")
    with on_meta():
        module = models.get_model(target.attribute, weights=None, **target.arguments)
    return Built(module, target.attribute, loss="cross_entropy")


LIBRARIES = {"transformers": _hugging_face, "timm": _timm, "torchvision": _torchvision}
"""Libraries whose models have names or configs."""


def _set_aside(name: str) -> None:
    """A library that is built for another torch fails as it is imported: others do without it where it is not there."""
    if name in sys.modules or importlib.util.find_spec(name) is None:
        return
    try:
        importlib.import_module(name)
    except Exception as wrong:  # whatever its own code raises
        import warnings

        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]
        sys.modules[name] = None  # type: ignore[assignment]
        warnings.warn(f"{name} is installed and cannot be imported ({wrong}): left out", stacklevel=2)


@contextmanager
def one_sequence_a_sample() -> Iterator[None]:
    """transformers looks into positions whether a sample is one sequence, and on fake tensors cannot see that it is."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None or not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
    before = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = before


def frozen(module: torch.nn.Module) -> str:
    """Parameters that are not trained, in words; empty where all are."""
    names = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return f"{len(names)} parameters are frozen, {few(names, 2)}" if names else ""
