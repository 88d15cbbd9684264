"""Launch files -> a scenario: options by their rows, then the model, the batch and the machine, then the check."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clustersim import scenario
from clustersim.cluster import files as fabrics
from clustersim.collectives import fitted as fitting
from clustersim.core.errors import ClusterSimError, ScenarioError
from clustersim.core.texts import shown
from clustersim.core.tomls import nested
from clustersim.files.launch import (
    adapters,
    batches,
    litgpt,
    megatron_adapters,
    recipes,
    seeing,
    shapes,
    titan_python,
    torchtitan,
    torchtune,
    trainer,
)
from clustersim.files.launch.asked_files import complete, trains
from clustersim.files.launch.files import HOSTS, MODEL, UNSET, Document, Key, OptionValue, documents, framework_of
from clustersim.files.launch.options import ScenarioFields, apply, others, refuse, renamed, together
from clustersim.files.launch.pods import count_in
from clustersim.files.launch.table import FrameworkTable, holds, load
from clustersim.model import named_models as models
from clustersim.model.published import configs, known_as
from clustersim.scenario import Scenario
from clustersim.scenario.file.reading import Table as Tables
from clustersim.scenario.file.splitting import MEGATRON, PLAYED, cause
from clustersim.scenario.run.held import held
from clustersim.scenario.run.parts import model_of
from clustersim.training.strategies.zero_config import HF_AUTO

SIXTEEN = ("bf16.enabled", "fp16.enabled")
"""Of DeepSpeed's file."""

RECOMPUTED = "parallel.recompute_granularity"
EARLIER = ("checkpoint_activations", "activations_checkpoint_method")
"""Options of Megatron-LM before 3.0 for whole layers, a layer at a time unless told otherwise."""


@dataclass(frozen=True)
class LaunchImport:
    """What launch files come to.

    Parameters
    ----------
    scenario : read and checked. tables : it as a file would say it. framework : whose files they were.
    notes : what was assumed or left out, in sentences. mapped : options that became fields. unplayed : those that
        change time or memory and are not played, with what is instead. ignored, unknown : those that change neither,
        and those that nobody knows.
    """

    scenario: Scenario
    tables: Tables
    framework: FrameworkTable
    notes: tuple[str, ...]
    mapped: tuple[str, ...]
    unplayed: Mapping[str, str]
    ignored: tuple[str, ...]
    unknown: tuple[str, ...]


def read(
    files: Sequence[str | Path | Document],
    cluster: Tables,
    *,
    framework: str | None = None,
    model: str | None = None,
    path: str | Path = "scenario.toml",
    run: Tables | None = None,
) -> LaunchImport:
    """A scenario from launch files.

    Parameters
    ----------
    files : a script, or a configuration and the script that names it. cluster : fields of ``[cluster]`` that they do
        not say: ``topology``, and ``nodes`` where no launcher does. framework : whose files they are; found by content
        when absent. model : a shipped model or a config.json, where the files name none. path : of the scenario.
        run : fields of ``[run]`` that no launch file has.

    Raises :class:`ScenarioError` naming file and option.
    """
    parts = _parts_of(files, framework, model, Path(path))
    parts.notes += _launched(parts, cluster)
    used = apply(parts.table, parts.options, parts.fields, parts.model)
    left = _settled(parts, used)
    place, world = machine(parts.fields, cluster, parts.notes, parts.files[0].name, parts.folder)
    batches.ask_for_passes(parts.fields, parts.table)
    result, tables = _made(parts, place, world, run or {})
    parts.notes += _unsaid(parts.fields, result)
    parts.notes += _undecided(parts.fields, parts.options)
    if parts.table.name == "torchtitan":
        parts.notes += torchtitan.wide_experts(parts.options, result)
    mapped = tuple(dict.fromkeys(parts.options[key].name for key in parts.options if key in used))
    return LaunchImport(result, tables, parts.table, tuple(parts.notes), mapped, *left)


@dataclass
class LaunchParts:
    """What launch files say, while a scenario is made of it.

    Parameters
    ----------
    files, table : as they were read, and the words of their framework. options : what the files say, by place and name.
    path : of the scenario. model : its name or config.json as the scenario has it; None where sizes are said instead.
    fields : of the scenario, by dotted path, so far. notes : what was assumed or left out so far.
    """

    files: list[Document]
    table: FrameworkTable
    options: dict[Key, OptionValue]
    path: Path
    model: str | None
    fields: ScenarioFields
    notes: list[str]

    @property
    def folder(self) -> Path:
        """Of the scenario, whose paths start there."""
        return self.path.parent


def _parts_of(
    files: Sequence[str | Path | Document], framework: str | None, model: str | None, path: Path
) -> LaunchParts:
    """The options of all files, as the framework's table names them; the model's config.json, where one is given."""
    read_files = documents(files)
    table = load(framework_of(read_files, framework))
    trainer.arranged(read_files, table)
    recipes.arranged(read_files, table)
    titan_python.arranged(read_files, table)
    options = renamed(together(read_files), table)
    notes = litgpt.arranged(read_files, options, table)
    refuse(table, options, [(file.program, file.name) for file in read_files if file.program], model)
    notes += [*table.notes, *(note for file in read_files for note in file.notes)]
    notes += torchtitan.arranged(options, table)
    notes += torchtune.arranged(read_files, options, table)
    config = next((file.name for file in read_files if file.kind == MODEL), None)
    if config is not None and model is None:
        model = f"./{os.path.relpath(config, path.parent)}"
    return LaunchParts(read_files, table, options, path, model, ScenarioFields(), notes)


def _launched(parts: LaunchParts, cluster: Tables) -> list[str]:
    """The fields that launchers and lists of hosts say; returns notes."""
    for file in sorted(parts.files, key=lambda file: file.kind != HOSTS):  # a command may use a part of the hosts
        for name, value in file.machine.items():
            parts.fields.launch(name, value)
    notes = _alone(parts.files, parts.fields, cluster)
    return notes + _unlaunched(parts.files, parts.table, parts.fields, cluster)


def _settled(parts: LaunchParts, used: set[Key]) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """Put what follows from several options, the model and the framework into the fields.

    Returns the options that are not played, that are ignored, and that nobody knows.
    """
    table, options, fields, notes = parts.table, parts.options, parts.fields, parts.notes
    notes += _named(fields, table)
    notes += _adapters(parts.files, table, options, fields, used)
    notes += seeing.taken(options, fields, used, parts.model, parts.folder)
    complete(parts.files, table, options, used, notes)
    left = others(table, options, used)
    for name, value in table.fixed.items():
        fields.setdefault(name, value)
    notes += _masters(fields)
    notes += _recomputed(fields)
    notes += _graphs(fields)
    notes += _scores(table, fields)
    unset = next((note for file in parts.files for note in file.notes if UNSET in note), "")
    if unset and parts.model is None and not {"shape.layers", "model.name"} & fields.keys():
        raise ScenarioError(f"{unset}; write their words, or give --model: a name, or a config.json")
    trained = trains(parts.files, table, options) if parts.model is None else ""
    notes += _model(fields, parts.model, (parts.files[0].name, parts.folder), trained)
    notes += filled(fields, parts.folder)
    if fields.get("strategy.kind") == "single":
        for name in ("nodes", "gpus_per_node"):
            fields.setdefault(f"cluster.{name}", 1)
    return left


def _made(parts: LaunchParts, place: Tables, world: int, run: Tables) -> tuple[Scenario, Tables]:
    """The scenario, checked, and its tables without what holds anyway; ``place`` : of ``[cluster]``."""
    if parts.table.name == "torchtitan":
        torchtitan.fill(parts.fields, world)
    tables = _tables(parts.table, parts.fields, place, world)
    tables["run"] = {**tables.get("run", {}), **run}
    check = partial(checked, tables, parts.path, parts.fields, parts.table, parts.files)
    result = adapters.passed_over(tables, parts.notes, check) if parts.table.name == "accelerate" else check()
    tables, result = shorter(tables, result, parts.path)
    return result, tables


def _alone(read: Sequence[Document], fields: ScenarioFields, cluster: Tables) -> list[str]:
    """One node, where a launcher starts ranks on its own alone and nobody says more; returns a note."""
    starter = next((file for file in read if file.alone), None)
    if starter is None or cluster.get("nodes") or {"cluster.nodes", "cluster.world"} & fields.keys():
        return []
    fields["cluster.nodes"] = 1
    return [f"{starter.name}: one node, as {starter.alone} starts ranks on the node that it runs on; or say --nodes"]


def _unlaunched(read: Sequence[Document], table: FrameworkTable, fields: ScenarioFields, cluster: Tables) -> list[str]:
    """A note where no launcher starts a script, and nobody says how many ranks there are."""
    known = {"cluster.gpus_per_node", "cluster.world"} & fields.keys() or cluster.get("gpus_per_node")
    if known or not table.one_process:
        return []
    for file in read:
        launcher = file.options.get(("args", "launcher"))
        words = "" if launcher is None else str(launcher.value)
        if words.rsplit("/", 1)[-1].startswith("python") and file.program.endswith(".py"):
            return [
                f"{file.name}: no launcher starts {file.program}, which alone is one rank; all GPUs of each node are "
                "taken as if one did: of one GPU say --nodes 1 --gpus-per-node 1"
            ]
    return []


def _adapters(
    read: Sequence[Document],
    table: FrameworkTable,
    options: dict[Key, OptionValue],
    fields: ScenarioFields,
    used: set[Key],
) -> list[str]:
    """Put the adapters that options ask for into the fields, and what was read into ``used``; returns notes."""
    if table.name in {"accelerate", "foundry"}:
        return adapters.taken(options, fields, used)
    if table.name == "nemo":
        megatron_adapters.taken(read, options, fields, used)
    torchtune.taken(options, fields, used)
    litgpt.taken(options, fields, used)
    return []


def _model(fields: ScenarioFields, model: str | None, files: tuple[str, Path], trained: str) -> list[str]:
    """``[model]``'s name, from its sizes where no name is said; returns notes. ``files`` : the first that is read, and
    the folder of the scenario."""
    file, folder = files
    if model is not None:
        shapes.refuse_contradiction(model, folder, fields, fields.by)
        fields["model.hf_config" if shapes.is_config_path(model) else "model.name"] = model
        return []
    if "model.name" in fields:
        _known(fields)
        return shapes.altered(fields, fields.by)
    layers = fields.pop("shape.experts.layers", None)
    sizes = {name[6:]: value for name, value in fields.items() if name.startswith("shape.")}
    sized_model = shapes.model_for(file, sizes, causal=trained != "encoder")
    if layers is not None:
        sized_model = shapes.with_expert_layers(sized_model, str(layers), fields.by.get("shape.experts.layers"), file)
    by = fields.by.get("shape.layers")
    if by is not None:
        fields.by["model.name"] = by
    fields["model.name"] = sized_model.name
    if sized_model.options:
        fields["model.options"] = sized_model.options
    return [sized_model.note]


def _known(fields: ScenarioFields) -> None:
    """Raise :class:`ScenarioError` for a model that is not shipped, naming the option that names it."""
    name = fields["model.name"]
    by = fields.by.get("model.name")
    if by is None or not isinstance(name, str):
        return
    try:
        models.shape(name, {})
    except ClusterSimError:
        raise ScenarioError(
            f"{by.where}: {by.name} {shown(by.value)}: no shipped model is of this name (clustersim list models); give "
            "its config.json among the files, or with --model"
        ) from None


def _masters(fields: ScenarioFields) -> list[str]:
    """DeepSpeed's ZeRO stage 0 of 16-bit parameters, which DDP would update in place: masters in fp32, and one bucket
    of 16-bit gradients behind backward (deepspeed/runtime/engine.py ``_configure_fp16_optimizer``), as Megatron-Core's
    distributed data parallelism is with gradients of the parameters' type; returns a note."""
    by = fields.by.get("strategy.kind")
    sixteen = fields.get("strategy.param_dtype") in {"bf16", "fp16"} or fields.get("model.dtype") in {"bf16", "fp16"}
    is_unsplit = not any(holds(name, fields) for name in ("tp", "pp", "cp", "ep"))
    if (
        by is None
        or not by.name.endswith(("stage", "deepspeed"))
        or fields["strategy.kind"] != "ddp"
        or not (sixteen and is_unsplit)
    ):
        return []
    fields.setdefault("strategy.param_dtype", fields.get("model.dtype"))
    fields["parallel.framework"] = fields["strategy.framework"] = MEGATRON
    fields["parallel.grad_reduce_in_fp32"] = False
    return ["ZeRO stage 0: masters in fp32, gradients in 16 bits behind backward, played as Megatron-Core's"]


def _recomputed(fields: ScenarioFields) -> list[str]:
    """How many layers are computed again, which Megatron-LM reads of full granularity alone: none of a stage where
    blocks have 0; returns a note."""
    by = fields.by.get(RECOMPUTED)
    if by is not None and by.name.lstrip("-").replace("-", "_") in EARLIER and fields[RECOMPUTED] == "full":
        fields.setdefault("parallel.recompute_num_layers", 1)
    layers = fields.get("parallel.recompute_num_layers")
    full = fields.get(RECOMPUTED) == "full"
    if full and layers == 0 and fields.get("parallel.recompute_method") == "block":
        for name in ("granularity", "method", "num_layers"):
            del fields[f"parallel.recompute_{name}"]
        return ["no layer is computed again: blocks of 0 layers are"]
    if not full and "parallel.recompute_method" in fields and not _asked(fields, "recompute_method"):
        del fields["parallel.recompute_method"]  # NeMo reads it of full granularity alone
    if layers is not None and not full and fields.get("parallel.framework", MEGATRON) == MEGATRON:
        del fields["parallel.recompute_num_layers"]
    return []


def _asked(fields: ScenarioFields, name: str) -> bool:
    """Whether an option of Megatron-LM's own name says a field, which then checks it."""
    by = fields.by.get(f"parallel.{name}")
    return by is not None and by.name.lstrip("-").replace("-", "_").rsplit(".", 1)[-1] == name


def _scores(table: FrameworkTable, fields: ScenarioFields) -> list[str]:
    """Kernels of Megatron-DeepSpeed, whose scores of attention are in memory where no option asks for flash attention
    (megatron/model/transformer.py ``CoreAttention``); returns a note."""
    if table.name != "deepspeed":
        return []
    is_set = "model.attention" in fields.by
    if "shape.layers" not in fields:  # another script than Megatron-DeepSpeed's
        if not is_set:
            fields.pop("model.attention", None)
        return []
    if fields.get("model.attention") != "eager":
        return []
    fields.setdefault("model.implementation", "megatron")
    return (
        [] if is_set else ["no --use-flash-attn-v2: scores of attention are in memory, as Megatron-DeepSpeed has them"]
    )


def _graphs(fields: ScenarioFields) -> list[str]:
    """What CUDA graphs replay: by Megatron-LM's default nothing, whatever the scope is; whole layers, where no scope is
    said, or ``full`` is (``TransformerConfig.__post_init__``, NVIDIA/Megatron-LM at 002526d8); returns a note."""
    how = fields.pop("graphs.impl", None)
    scopes = fields.pop("run.cuda_graph", None) or []
    if how is None:
        return []
    words = ["full_iteration"] if how == "full_iteration" else [word for word in scopes if word != "full"]
    fields["run.cuda_graph"] = words or ["attn", "mamba", "mlp", "moe"]
    return []


def _named(fields: ScenarioFields, table: FrameworkTable) -> list[str]:
    """A model by the name that it has on the hub, or of the folder that it is in; returns a note."""
    name = fields.get("model.name")
    if not isinstance(name, str) or name in configs():
        return []
    packed = adapters.NAMED if table.name == "accelerate" else None  # which says of adapters that they are beside it
    shipped_name = known_as(packed.sub("", name) if packed else name)
    if shipped_name is None or shipped_name == name:
        return []
    fields["model.name"] = shipped_name
    return [f"{name} has the sizes of {shipped_name}"]


def _unsaid(fields: ScenarioFields, made: Scenario) -> list[str]:
    """Notes on the length of a sequence and the samples of a pass where nobody says them."""
    notes = []
    sizes = ("batch.micro", "batch.local", "batch.global")
    if not any(name in fields.by for name in sizes):
        usual = next((fields[name] for name in sizes if name in fields), 1)
        notes.append(f"no file says how many samples a rank takes at once: {usual}")
    tokens = model_of(made).seq_len
    if tokens and "model.seq_len" not in fields:
        notes.append(f"no file says how long a sequence is: {tokens:,} tokens are taken (model.seq_len)")
    return notes


def _undecided(fields: ScenarioFields, options: Mapping[Key, OptionValue]) -> list[str]:
    """A note where DeepSpeed's file leaves its arithmetic to a Trainer whose arguments are not there."""
    auto = [option for key, option in options.items() if key[1] in SIXTEEN and option.value == "auto"]
    if not auto or "model.dtype" in fields:
        return []
    names = " and ".join(option.name for option in auto)
    return [f"{auto[0].where}: {names} auto is what --bf16 or --fp16 of the Trainer says, and no file has it: fp32"]


def _width(fields: ScenarioFields, folder: Path) -> int | None:
    """The model's, where it is a transformer."""
    config = fields.get("model.hf_config")
    name = folder / config if isinstance(config, str) else fields.get("model.name")
    shape = models.shape(name, dict(fields.get("model.options", {}))) if isinstance(name, str | Path) else None
    return None if shape is None else shape.d_model


def filled(fields: ScenarioFields, folder: Path = Path()) -> list[str]:
    """What Hugging Face's integration puts for ``"auto"`` in DeepSpeed's file, from the model; returns a note.

    As ``HfTrainerDeepSpeedConfig.trainer_config_finalize`` (transformers) and ``Accelerator._prepare_deepspeed``.
    folder : of the scenario, whose paths start there.
    """
    auto = [name for name in HF_AUTO if fields.get(f"strategy.zero_optimization.{name}") == "auto"]
    if not auto:
        return []
    width = _width(fields, folder)
    if width is None:
        return []  # which the strategy's own reader tells what it would be
    values = {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }
    for name in auto:
        fields[f"strategy.zero_optimization.{name}"] = values[name]
    words = ", ".join(f"{name} = {values[name]:,}" for name in auto)
    return [f'"auto" of a model {width:,} wide: {words}']


def _tables(table: FrameworkTable, fields: ScenarioFields, place: Tables, world: int) -> Tables:
    """The scenario's tables; ``[parallel]`` where it has an effect."""
    scenario_fields = {
        name: value for name, value in fields.items() if not name.startswith(("shape.", "batch.", "cluster."))
    }
    degrees = ("tp", "pp", "cp", "ep")
    parted = any(holds(name, fields) for name in degrees)
    settings = {name: fields.get(f"parallel.{name}") for name in PLAYED}
    masters = fields.get("parallel.grad_reduce_in_fp32") is False  # which nothing else says of a whole model
    split = table.parallel == "always" or parted or masters or any(settings.values())
    scenario_fields |= batches.said(fields, world, split)
    if (scenario_fields.get("parallel.framework"), scenario_fields.get("strategy.kind")) == (MEGATRON, "ddp") and not (
        parted or cause(settings, {})
    ):
        scenario_fields["strategy.framework"] = MEGATRON  # of a whole model nothing else says it
    if not split:
        scenario_fields = {name: value for name, value in scenario_fields.items() if not name.startswith("parallel.")}
    return {"cluster": place} | nested(scenario_fields)


def machine(fields: ScenarioFields, cluster: Tables, notes: list[str], file: str, folder: Path) -> tuple[Tables, int]:
    """``[cluster]``, and how many ranks it has; where the file says other than asked, ``notes`` get a sentence.

    Raises :class:`ScenarioError` where nobody says what machine it is, or how many.
    """
    if not cluster.get("topology"):
        raise ScenarioError(
            f"{file}: does not say on what machine it runs; give --topology, such as --topology dgx-h100 "
            "(clustersim list topologies)"
        )
    counts = {name: count_in(fields.get(f"cluster.{name}")) for name in ("nodes", "gpus_per_node")}
    cluster_table: Tables = {name: value for name, value in counts.items() if value}
    cluster_table |= {name: value for name, value in cluster.items() if value is not None}
    for name, value in counts.items():
        by = fields.by.get(f"cluster.{name}")
        if value and cluster_table[name] != value and by is not None:
            notes.append(f"{name} = {cluster_table[name]} as asked for; {by.where} says {value}")
    topology = str(cluster_table["topology"])
    if topology.endswith(".toml") or "/" in topology:
        topology = str(folder / topology)
    world = count_in(fields.get("cluster.world"))
    if world and counts["nodes"] and world % counts["nodes"] == 0 and not cluster.get("nodes"):
        cluster_table.setdefault("gpus_per_node", world // counts["nodes"])
    if world and "nodes" not in cluster_table:
        gpus = cluster_table.get("gpus_per_node") or len(fabrics.load(topology, nodes=1).gpus)
        cluster_table["nodes"] = max(1, world // gpus)
        if world > gpus and world % gpus:
            by = fields.by["cluster.world"]
            raise ScenarioError(
                f"{by.where}: {by.name} {world} does not fill nodes of {gpus} GPUs; give --nodes and --gpus-per-node"
            )
    alone = world and cluster_table.get("nodes") == 1 and "gpus_per_node" not in cluster_table
    if alone and world <= len(fabrics.load(topology, nodes=1).gpus):  # it may have more GPUs
        cluster_table["gpus_per_node"] = world
    if "nodes" not in cluster_table:
        raise ScenarioError(f"{file}: does not say on how many nodes it runs; give --nodes, such as --nodes 4")
    built = fitting.load(
        topology, cluster_table["nodes"], cluster_table.get("device"), cluster_table.get("fabric", {}), ()
    )
    ranks = fabrics.mesh(built, nproc_per_node=cluster_table.get("gpus_per_node")).world_size
    if world and ranks != world:
        by = fields.by["cluster.world"]
        notes.append(f"{ranks} ranks as asked for; {by.where}: {by.name} says {world}")
    return cluster_table, ranks


def checked(
    tables: Tables, path: Path, fields: ScenarioFields, table: FrameworkTable, read: Sequence[Document]
) -> Scenario:
    """The scenario, on its machine, as far as ``clustersim run`` checks it before it writes a step.

    Raises :class:`ScenarioError` that names the option behind the wrong field, or the one whose default it is.
    """
    try:
        checked_scenario = scenario.from_table(tables, path)
        held(checked_scenario)
    except ClusterSimError as wrong:
        match = re.search(r"\(at \$\.([\w.]+)", str(wrong))
        field = match[1] if match else ""
        inside = (by for name, by in fields.by.items() if field and name.startswith(f"{field}."))
        by = fields.by.get(field) or fields.by.get(batches.OF.get(field, "")) or next(inside, None)
        problem = str(wrong).removeprefix(f"{path}: ")
        if by is not None:
            raise ScenarioError(f"{by.where}: {by.name} {shown(by.value)}: {problem}") from None
        row = next((row for row in table.every() if row.field == field and row.default == fields.get(field)), None)
        if row is None or row.default is None:
            raise
        silent = next((file.name for file in read if any(at == row.at for at, _ in file.options)), read[0].name)
        raise ScenarioError(f"{silent}: no {row.option}, which is {shown(row.default)} then: {problem}") from None
    return checked_scenario


def shorter(tables: Tables, checked_scenario: Scenario, path: Path) -> tuple[Tables, Scenario]:
    """The tables without what holds anyway, where the scenario stays the same."""
    parallel = tables.get("parallel", {})
    decide = {
        name: parallel[name] for name in ("framework", "tp", "pp", "cp", "ep", "schedule", "vpp") if name in parallel
    }
    model = {name: tables["model"][name] for name in ("name", "hf_config") if name in tables["model"]}
    bare: Tables = {"cluster": tables["cluster"], "model": model, "strategy": {"kind": tables["strategy"]["kind"]}}
    always = {"kind", "steps", "seq_len", *model} | {k for k, value in decide.items() if value not in (1, "megatron")}
    usual = scenario.from_table(bare | ({"parallel": decide} if parallel else {}), path).inputs()
    shortened: Tables = {}
    for name in (name for name in ("cluster", "model", "parallel", "strategy", "run") if tables.get(name)):
        table = tables[name]
        has = usual.get(name, {})
        shortened[name] = {k: v for k, v in table.items() if name == "cluster" or k in always or has.get(k) != v}
    short = scenario.from_table(shortened, path)
    if short.inputs() == checked_scenario.inputs():
        return shortened, short
    return tables, dataclasses.replace(checked_scenario, table=tables)
