"""Primus's experiments: a module, its presets and what it overrides, as options of Megatron-LM or of torchtitan.

Names and meanings: AMD-AGI/Primus at 05b350b3: ``primus/core/launcher/parser.py``, ``runner/primus-cli*``,
``examples/run_pretrain.sh``, and ``rocm_arg_validation.py`` of its Megatron backend at 7e6408ae.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import Table, data_table, shown
from clustersim.core.yamls import yaml_table
from clustersim.files.launch import primus_titan
from clustersim.files.launch.files import Document, Key, OptionValue
from clustersim.files.launch.options import refuse
from clustersim.files.launch.primus_commands import MAIN
from clustersim.files.launch.primus_presets import NAMED, Presets, overlaid, with_variables
from clustersim.files.launch.shapes import CHANGED, leaves
from clustersim.files.launch.table import FrameworkTable, load
from clustersim.model import named_models as models
from clustersim.model.published import known_as

FRAMEWORK: Key = ("config", "primus.framework")
"""The option that tells an experiment whose options are brought into the table's words."""
FRAMEWORKS = ("megatron", "torchtitan")
NAME = "primus"
PRETRAINED = "pre_trainer"
PRESET = r"(?!.*\.\.)[\w.+/-]{1,200}\.ya?ml"
"""A preset's name, which stays within its folder."""
OWN_ARGUMENTS = ("config", "exp", "backend_path", "export_config", "data_path", "debug")
"""Arguments of ``train pretrain`` that are none of the module's."""
STAGES = {
    1: ("moe_use_fused_router_with_aux_score", "moe_permute_fusion"),
    2: ("moe_use_fused_router_with_aux_score", "moe_permute_fusion", "use_turbo_deepep"),
    3: ("moe_use_fused_router_with_aux_score", "moe_permute_fusion", "use_turbo_deepep"),
}
"""What ``turbo_sync_free_moe_stage`` turns on that is played (``_get_sync_free_moe_options``)."""
CUS = 32
"""``turbo_deepep_num_cu`` where nothing is said."""
DEEPEP = ("use_turbo_deepep", "turbo_deepep_num_cu")


def is_launch(file: Document) -> bool:
    """Whether a file is an experiment over Megatron-LM, or a command that starts one."""
    return FRAMEWORK in file.options or file.program == MAIN


def unfolded(read: Sequence[Document], framework: str | None) -> tuple[list[Document], str | None]:
    """Files of a launch with an experiment of Primus in the words of its framework, and without its presets; and the
    framework that is asked for, where that is not Primus itself.

    What the command says counts against the experiment, and that against its presets.
    Raises :class:`ScenarioError` for an experiment that is missing, is no pretraining or is of another framework, and
    for presets that are not known; and where ``asked`` is not whose the files are.
    """
    commands = [file for file in read if file.program == MAIN]
    experiments = [(file, table) for file in read for table in [_experiment(file)] if table is not None]
    if not experiments:
        _ask_for_experiment(commands, read[0].name if framework == NAME else "")
        return list(read), framework
    names = ", ".join(file.name for file, _ in experiments)
    if len(experiments) > 1:
        raise ScenarioError(f"{names}: are {len(experiments)} experiments of Primus; give one")
    if framework not in (None, NAME):
        raise ScenarioError(
            f"{names}: is an experiment of Primus, and --from is {framework}; say --from {NAME}, or nothing"
        )
    file, table = experiments[0]
    for command in commands:
        _named_by(command, file)
    environment = {name: value for document in read for name, value in document.environment.items()}
    given = {
        Path(document.name).name: document.text for document in read if document.kind == "yaml" and document is not file
    }
    presets = Presets("", given, file.name, environment)
    name, module = _module(file, table, presets)
    experiment = _document(file, _overrides(module), _presets(file, name, module, presets), presets)
    for command in commands:
        _changed(command, presets.framework)
    experiment.notes += _notes(experiment, presets, commands)
    left = [document for document in read if document is not file and Path(document.name).name not in presets.read]
    return [experiment, *left], None


def _ask_for_experiment(commands: Sequence[Document], file: str) -> None:
    """Raise :class:`ScenarioError` where a command is there and no experiment, or where a ``file`` was said to be
    one."""
    for command in commands:
        named = next((command.options[key] for key in _naming(command)), None)
        what = f"{named.name} names {named.value}" if named else "names no experiment by --config"
        raise ScenarioError(f"{command.name}: {what}; give that file too")
    if file:
        raise ScenarioError(f"{file}: is no experiment of Primus, which has modules, and of one its framework")


def _experiment(file: Document) -> Table | None:
    """The table of an experiment; None for another file."""
    if file.kind != "yaml" or "modules:" not in file.text or "framework:" not in file.text:
        return None
    table = yaml_table(file.text, file.name, ScenarioError)
    modules = table.get("modules")
    if not isinstance(modules, Mapping):
        return None
    is_own = any(isinstance(module, Mapping) and "framework" in module for module in modules.values())
    return table if is_own else None


def _naming(command: Document) -> list[Key]:
    return [key for key in (("args", "config"), ("args", "exp")) if key in command.options]


def _named_by(command: Document, file: Document) -> None:
    """Raise :class:`ScenarioError` where a command names another experiment than the one that is given."""
    for key in _naming(command):
        option = command.options[key]
        value = str(option.value)
        if not value.startswith("$") and Path(value).name != Path(file.name).name:
            raise ScenarioError(f"{option.where}: {option.name} names {value}, and {file.name} is given; give that one")


def _module(file: Document, table: Table, presets: Presets) -> tuple[str, Table]:
    """The module that trains, by its name; its framework is put into ``presets``. Raises :class:`ScenarioError` for
    others and for several."""
    modules = with_variables(table["modules"], presets.environment, presets.defaulted, file.name)
    if len(modules) > 1:
        raise ScenarioError(
            f"{file.name}: modules has {len(modules)}, {', '.join(map(str, modules))}; one trains, leave one there"
        )
    key, module = next(iter(modules.items()))
    name = str(key)  # which YAML reads as null or a number, where it looks like one
    framework = module["framework"]
    if "post" in name or str(module.get("config", "")).startswith(("sft_", "post_", "posttrain")):
        raise ScenarioError(
            f"{file.name}: modules.{name}: finetunes, which is not read of Primus's files; of full weights write "
            "pre_trainer with as many tokens, of adapters [model.adapter] in a scenario (clustersim new scenario)"
        )
    if framework not in FRAMEWORKS:
        raise ScenarioError(
            f"{file.name}: modules.{name}.framework {shown(framework)} is not read; known: {', '.join(FRAMEWORKS)}"
        )
    presets.framework = str(framework)
    return name, dict(module)


def _overrides(module: Mapping[str, Any]) -> Table:
    """What an experiment says itself."""
    own = module.get("overrides") or module.get("params") or {}
    return dict(own) if isinstance(own, Mapping) else {}


def _presets(file: Document, name: str, module: Mapping[str, Any], presets: Presets) -> Table:
    """What the presets of a module and of its model say. Raises :class:`ScenarioError` where one is not named."""
    for key in ("config", "model"):
        if not re.fullmatch(PRESET, str(module.get(key))):
            raise ScenarioError(f"{file.name}: modules.{name} names no {key}, such as {key}: {PRETRAINED}.yaml")
    return overlaid(presets.preset("modules", module["config"]), presets.preset("models", module["model"]))


def _document(file: Document, own: Table, base: Table, presets: Presets) -> Document:
    """An experiment with its presets below it, as a file of its framework."""
    titan = presets.framework == "torchtitan"
    experiment = Document(file.name, "toml" if titan else "yaml", notes=list(file.notes))
    stated = dict(_flat(own))
    plain = data_table("primus_presets")[presets.framework]["plain"]
    judged = _judged(load("torchtitan" if titan else "primus"))
    for path, value in _flat(overlaid(base, own)):
        is_own = path in stated
        if value is None or (path in plain and plain[path] == value) or (not is_own and not _matters(path, *judged)):
            continue
        source = file.name if is_own else f"presets of {file.name}"
        experiment.options["config", path] = OptionValue(path, value, source)
    if titan:
        primus_titan.yielded(experiment, set(stated))
        primus_titan.arranged(experiment)
    else:
        experiment.options[FRAMEWORK] = OptionValue("framework", presets.framework, file.name)
    return experiment


NEEDED = ("tokenizer_model", "turbo_sync_free_moe_stage", "enable_primus_turbo", "pp_algorithm")
"""Options of presets that others are read with."""


def _judged(table: FrameworkTable) -> tuple[set[str], list[str], list[str]]:
    """Options of rows, and options (globs) that are told or refused, and that change nothing."""
    tables = [table, *(load(name) for name in table.also)]
    rows = {name for row in table.every() for name in row.option.split("+")}
    globs = [glob for option_table in tables for glob in option_table.unplayed]
    globs += [
        glob.partition("=")[0] for option_table in tables for glob in (*option_table.refused, *option_table.unsized)
    ]
    return rows, globs, [glob for option_table in tables for glob in option_table.ignored]


def _matters(path: str, rows: set[str], globs: Sequence[str], idle: Sequence[str]) -> bool:
    """Whether an option of a preset is a row's, or is told or refused; what changes nothing is passed over."""
    if path in rows or path in NEEDED or path.startswith(primus_titan.MODEL):
        return True
    ends = (path, path.rsplit(".", 1)[-1])
    return not any(fnmatchcase(path, g) for g in idle) and any(fnmatchcase(end, g) for end in ends for g in globs)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every leaf, null among them."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


AMOUNTS = (
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
    "training.local_batch_size",
    "training.seq_len",
)
"""Samples and tokens, which people rarely leave to presets."""


def _notes(experiment: Document, presets: Presets, commands: Sequence[Document]) -> list[str]:
    """What is taken of presets and variables that nobody gave, in sentences."""
    notes = []
    if presets.tabulated:
        notes.append(
            f"{experiment.name}: presets that no file holds are as Primus has them: {', '.join(presets.tabulated)}"
        )
    named = experiment.options.get(("config", NAMED))
    if named is not None:
        notes.append(f"{experiment.name}: of the model's preset the name alone is known: its sizes are {named.value}'s")
    if presets.defaulted:
        names = ", ".join(dict.fromkeys(presets.defaulted))
        notes.append(f"{experiment.name}: no script sets these variables, which have the file's defaults: {names}")
    stated = {key for command in commands for key in command.overrides}
    amounts = [
        experiment.options[key]
        for name in AMOUNTS
        if (key := ("config", name)) in experiment.options and key not in stated
    ]
    usual = [option.as_written for option in amounts if option.where != experiment.name]
    if usual:
        notes.append(f"{experiment.name}: the presets say {', '.join(usual)}, and nobody else")
    return notes


def _changed(command: Document, framework: str) -> None:
    """A command whose options are the experiment's, in place of those of a script."""
    for key in [key for key in command.options if key[0] == "args" and key[1] != "launcher"]:
        option = command.options.pop(key)
        if key[1] not in OWN_ARGUMENTS:
            value = True if option.value == [] else option.value
            command.overrides["config", key[1]] = OptionValue(option.name, value, option.where)
    if framework == "torchtitan":
        command.program = "torchtitan.train"


def arranged(options: dict[Key, OptionValue], table: FrameworkTable, model: str | None) -> list[str]:
    """Turn on and off what options of Primus do together. Changes ``options``; returns notes.

    Raises :class:`ScenarioError` for what Primus's own checks refuse, and for a model that is known by its name alone
    and is changed in kind.
    """
    if table.name != "primus":
        return []
    for key in [key for key in options if key[0] == "config" and options[key].value in ("None", None)]:
        del options[key]
    if _has(options, "moe_shared_expert_intermediate_size"):
        options.pop(("config", "num_shared_experts"), None)  # which Megatron-LM has no option for
    _algorithm(options)
    notes = _turbo(options)
    notes += _vocabulary(options)
    refuse(load("megatron"), options, [], model)
    if model is None:
        _of_its_kind(options, table)
    return notes


def _algorithm(options: dict[Key, OptionValue]) -> None:
    """Drop Primus's own pipeline where it runs what Megatron-LM runs."""
    key: Key = ("config", "patch_primus_pipeline")
    algorithm = options.get(("config", "pp_algorithm"))
    if key in options and algorithm is not None and algorithm.value in {"1f1b", "1f1b-interleaved"}:
        del options[key]


def _turbo(options: dict[Key, OptionValue]) -> list[str]:
    """What Primus-Turbo does to experts: nothing where its main switch is off, and beside tensor parallelism no DeepEP
    (``_is_turbo_deepep_enabled`` of its patches); returns notes."""
    stage_option = options.get(("config", "turbo_sync_free_moe_stage"))
    stage = int(str(stage_option.value)) if stage_option is not None and str(stage_option.value).isdecimal() else 0
    on = _on(options, "enable_primus_turbo")
    if stage_option is not None and stage:
        if stage not in STAGES or not on:
            why = "has stages 1 to 3" if stage not in STAGES else "needs enable_primus_turbo, as Primus does"
            raise ScenarioError(f"{stage_option.where}: {stage_option.as_written} {why}")
        for name in STAGES[stage]:
            options["config", name] = OptionValue(name, True, stage_option.where)
        if _has(options, "fp8"):
            padding = "moe_router_padding_for_quantization"
            options["config", padding] = OptionValue(padding, True, stage_option.where)
    deepep = options.get(("config", "use_turbo_deepep"))
    if deepep is None or not _on(options, "use_turbo_deepep"):
        _dropped(options, DEEPEP)
        return []
    degree = options.get(("config", "tensor_model_parallel_size"))
    if not on or (degree is not None and str(degree.value) != "1"):
        _dropped(options, DEEPEP)
        why = "tensor parallelism is beside it" if on else "enable_primus_turbo is off"
        return [f"{deepep.where}: {deepep.name} is without effect: {why}"]
    _refused_beside_deepep(options, deepep)
    cus = OptionValue("turbo_deepep_num_cu", CUS, deepep.where)
    options.setdefault(("config", "turbo_deepep_num_cu"), cus)
    _dropped(options, ("moe_flex_dispatcher_backend", "moe_token_dispatcher_type", "moe_enable_deepep"))
    _dropped(options, ("moe_deepep_num_sms",))
    return []


def _refused_beside_deepep(options: Mapping[Key, OptionValue], deepep: OptionValue) -> None:
    """Raise :class:`ScenarioError` where Primus does beside DeepEP (``validate_args_on_rocm``)."""
    if not _has(options, "num_experts"):
        return
    router = options.get(("config", "moe_router_dtype"))
    if _on(options, "moe_shared_expert_overlap"):
        raise ScenarioError(f"{deepep.where}: {deepep.name} needs moe_shared_expert_overlap false, as Primus does")
    if router is None or router.value != "fp32":
        raise ScenarioError(f"{deepep.where}: {deepep.name} needs moe_router_dtype fp32, as Primus does")


def _dropped(options: dict[Key, OptionValue], names: Sequence[str]) -> None:
    for name in names:
        options.pop(("config", name), None)


def _has(options: Mapping[Key, OptionValue], name: str) -> bool:
    return ("config", name) in options


def _on(options: Mapping[Key, OptionValue], name: str) -> bool:
    option = options.get(("config", name))
    return option is not None and option.is_on


def _vocabulary(options: dict[Key, OptionValue]) -> list[str]:
    """The vocabulary of the tokenizer's own model, where no file says another; returns a note."""
    tokenizer = options.get(("config", "tokenizer_model"))
    if tokenizer is None or any(_has(options, name) for name in ("vocab_size", "padded_vocab_size", NAMED)):
        return []
    name = known_as(str(tokenizer.value))
    shape = models.shape(name, {}) if name is not None else None
    if shape is None:
        return []
    options["config", "vocab_size"] = OptionValue(tokenizer.name, shape.vocab, tokenizer.where)
    return [f"{tokenizer.where}: no vocab_size: {shape.vocab:,} tokens, as {name} has, whose tokenizer it names"]


def _of_its_kind(options: Mapping[Key, OptionValue], table: FrameworkTable) -> None:
    """Raise :class:`ScenarioError` where an experiment changes the kind of a model that is known by its name alone."""
    named = options.get(("config", NAMED))
    shape = models.shape(str(named.value), {}) if named is not None else None
    if named is None or shape is None:
        return
    has = leaves(shape)
    for row in table.every():
        option = options.get(("config", row.option))
        leaf = row.field.removeprefix("shape.")
        if option is None or leaf == row.field or leaf in CHANGED or leaf == "grouped":
            continue
        value = row.read(option.value)
        if value not in (None, has.get(leaf)):
            raise ScenarioError(
                f"{option.where}: {option.as_written} makes another kind of model than {named.value}, whose preset is "
                "known by its name alone; give that preset among the files"
            )
