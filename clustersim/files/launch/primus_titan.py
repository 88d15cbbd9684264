"""Primus over torchtitan: what its experiments say beside torchtitan's own options.

Names: ``primus/configs/modules/torchtitan/pre_trainer.yaml`` of AMD-AGI/Primus at 04aa8ac4, and ``config_extension.py``
of its torchtitan backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import shown
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.table import load
from clustersim.model import named_models as models

TURBO = "primus_turbo."
CONVERTER = "primus_turbo"
"""Primus's converter of a model, which exchanges kernels."""
LOGS = ("sink_level", "file_sink_level", "stderr_sink_level", "master_sink_level", "trainable")
TURBO_DEFAULTS = {"enable_primus_turbo": True, "use_moe_fp8": True}
"""Options of Primus-Turbo that are on where nobody says them."""
IN_EIGHT_BITS = ("enable_attention_float8",)
MODEL = "model."
FLAVOR = "model.name+model.flavor"
"""The row of torchtitan's table that names a model."""
UNCHANGED = {f"{MODEL}{name}" for name in ("hf_assets_path", "tokenizer_path", "print_after_conversion")} | {
    f"{MODEL}{name}" for name in ("attn_type", "attn_mask_type", "use_flex_attn", "norm_type")
}
"""Options of a model that leave its flavor's sizes as they are, and are judged by torchtitan's table."""


def yielded(experiment: Document, stated: Set[str]) -> None:
    """Leave out what presets say of a field of which the experiment says it by another name, as earlier releases of
    torchtitan have it (``training.batch_size``). Changes the document.

    stated : options that the experiment itself says.
    """
    fields = {row.option: row.field for row in load("torchtitan").every()}
    own = {fields[path] for path in stated if path in fields and ("config", path) in experiment.options}
    for at, path in list(experiment.options):
        if path not in stated and fields.get(path) in own:
            del experiment.options[at, path]


def arranged(experiment: Document) -> None:
    """Bring an experiment over torchtitan to torchtitan's options alone, with notes on the others. Changes it.

    Raises :class:`ScenarioError` for a model that is changed in size, and for experts alone in 8 bits.
    """
    options = experiment.options
    for name in LOGS:
        options.pop(("config", name), None)
    _refuse_sizes(experiment)
    _converters(options)
    turbo = {key[1].removeprefix(TURBO): options.pop(key) for key in list(options) if key[1].startswith(TURBO)}
    is_on = TURBO_DEFAULTS | {name: option.is_on for name, option in turbo.items()}
    if not is_on["enable_primus_turbo"]:
        return
    names = [name for name in ("use_turbo_grouped_mm", "use_turbo_grouped_gemm") if is_on.get(name)]
    if names and is_on["use_moe_fp8"]:
        raise ScenarioError(
            f"{turbo[names[0]].where}: {TURBO}{names[0]} beside use_moe_fp8 (true, unless it is said) has experts "
            f"alone in 8 bits, which is not played; say {TURBO}use_moe_fp8: false"
        )
    experiment.notes.append(
        f"{experiment.name}: Primus-Turbo's kernels are the device's usual ones ({TURBO}enable_primus_turbo)"
    )
    for name in IN_EIGHT_BITS:
        if is_on.get(name):
            experiment.notes.append(f"{experiment.name}: {TURBO}{name}: attention is played in 16 bits")


def _converters(options: dict[Key, OptionValue]) -> None:
    """Leave Primus's converter out of those of a model; of grouped products those of a model that has none."""
    key: Key = ("config", "model.converters")
    option = options.get(key)
    if option is None or not isinstance(option.value, list):
        return
    options[key] = OptionValue(option.name, [name for name in option.value if name != CONVERTER], option.where)


def _refuse_sizes(experiment: Document) -> None:
    """Raise :class:`ScenarioError` for sizes of a model that its flavor may not have, of whoever says them (Primus's
    override of models); its own number of layers is passed over."""
    known = {name for row in load("torchtitan").every() for name in row.option.split("+")} | UNCHANGED
    layers = _layers(experiment.options)
    for (at, path), option in list(experiment.options.items()):
        if not path.startswith(MODEL) or path in known:
            continue
        if path != f"{MODEL}n_layers" or option.value != layers:
            raise ScenarioError(
                f"{option.where}: {path} {shown(option.value)} changes the model of this flavor, which is not read; "
                "leave it out, and give the model as a config.json: --model PATH"
            )
        del experiment.options[at, path]


def _layers(options: Mapping[Key, OptionValue]) -> int | None:
    """Layers of the flavor that is named; None where it is no shipped model."""
    row = next(row for row in load("torchtitan").every() if row.option == FLAVOR)
    words = [str(options[key].value) for name in FLAVOR.split("+") if (key := ("config", name)) in options]
    named = next((pair[1] for pair in row.map or () if pair[0] == " ".join(words)), None)
    shape = None if named is None else models.shape(named, {})
    return None if shape is None else shape.layers
