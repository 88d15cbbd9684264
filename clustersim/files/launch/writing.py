"""A scenario -> launch files, by the rows that read them; what a framework has no word for is found by reading back."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from clustersim.core import texts
from clustersim.core.dims import ORDERS
from clustersim.core.errors import ClusterSimError, ScenarioError, needs
from clustersim.core.mesh import Mesh
from clustersim.core.tomls import flat, nested, toml_text
from clustersim.engine.hang import Watchdogs
from clustersim.files.launch import batches, programs_need, shapes, torchtitan
from clustersim.files.launch.files import document
from clustersim.files.launch.reading import read
from clustersim.files.launch.table import NAMES, FrameworkTable, LaunchOption, holds, load
from clustersim.model.base import TransformerShape
from clustersim.model.transformer_model import execution
from clustersim.scenario import Scenario
from clustersim.scenario.file.schema import Run
from clustersim.scenario.file.splitting import ddp_of, splits, with_micro_batches
from clustersim.scenario.run.parts import located, model_of, placed, stops_early, transformer_of
from clustersim.training.schedules import schedule
from clustersim.training.strategies import STRATEGIES

OURS = tuple(texts.data_table("launch_words")["ours"])
"""What no launch file says: machine and simulation; and what is said by the model's sizes."""

DEGREES = ("tp", "pp", "cp", "ep")
EFFECT: Mapping[str, list[str]] = texts.data_table("parallel_fields")["effect"]
"""Beginnings of ``[parallel]``'s fields that say nothing unless a degree is above 1, or there are experts."""


@dataclass(frozen=True)
class LaunchFiles:
    """Launch files of a scenario.

    texts : file name -> text; the first is the framework's own configuration. wordless : settings that it has no word
        for, each with what it would be instead. framework : whose files they are. machine : settings of the machine and
        of the play, which no framework's files have.
    """

    texts: Mapping[str, str]
    wordless: tuple[str, ...]
    framework: FrameworkTable
    machine: tuple[str, ...] = ()


def written(exported: Scenario, to: str, stem: str = "launch") -> LaunchFiles:
    """A scenario as a framework's launch files.

    to : the framework. stem : of the files' names, before the suffix.

    Raises :class:`ScenarioError` where the framework cannot launch it.
    """
    table = load(to)
    if exported.file.model.file is not None:
        raise ScenarioError(
            f"{exported.path}: {exported.file.model.file} was traced from a module of its own, for which {table.title} "
            "has no option; launch the script that trains it (at $.model.file)"
        )
    _launches(exported, table)
    leaves, mesh = _leaves(exported)
    leaves = programs_need.shards_unsaid(leaves, mesh)
    args, config = _options(table, leaves | {"model.name": exported.file.model.name})
    args |= {name: value for name, value in programs_need.positions(exported, table, leaves) if name not in args}
    args |= {name: value for name, value in programs_need.untimed(exported, table) if name not in args}
    unwritten = programs_need.unsaid(table.name, leaves)
    if table.name == "torchtitan":
        config |= torchtitan.converters(leaves)
        unwritten += torchtitan.unconverted(leaves)
    if table.name == "accelerate":
        args = programs_need.trainer_words(args)
        config |= programs_need.accelerate_words(leaves, mesh, str(exported.path))
    if table.name == "deepspeed":
        args |= programs_need.megatron_deepspeed_words(leaves)
    file_texts = _exporting(_texts(table, args, config, mesh, stem), exported.file.run.nccl_environment)
    unwritten += [*_wordless(exported, leaves, table, file_texts), *_of_the_process(exported)]
    return LaunchFiles(file_texts, tuple(dict.fromkeys(unwritten)), table, tuple(_of_the_machine(exported)))


def _of_the_process(exported: Scenario) -> Iterator[str]:
    """What a launch begins with and no option of the frameworks says: torchrun's processes, and NCCL between GPUs."""
    run = exported.file.run
    if run.launch != "process_per_gpu":
        yield f"run.launch = {run.launch}: it would be process_per_gpu"
    if run.backend not in {None, "nccl"}:
        yield f"run.backend = {run.backend}: it would be nccl between GPUs"


PLAY = ("cluster", "run", "incident", "watchdog", "campaign", "measured")
"""Tables whose settings are of the machine or of the play."""
NAMED = ("cluster.topology", "cluster.nodes", "cluster.gpus_per_node", "run.backend", "run.launch", "run.steps")
"""Of these, what the program's command says, what is told above, and how many steps are played."""


def _of_the_machine(exported: Scenario) -> Iterator[str]:
    """Fields of the machine and of the play that the scenario states: no launch file has them."""
    usual = flat({"run": msgspec.to_builtins(Run()), "watchdog": msgspec.to_builtins(Watchdogs())})
    for name, value in flat({table: exported.inputs().get(table) or {} for table in PLAY}).items():
        if not name.startswith(OURS) or name.startswith(NAMED) or value in (None, [], {}, ()):
            continue
        if value != usual.get(name):
            yield name


def _launches(exported: Scenario, table: FrameworkTable) -> None:
    kind = exported.file.strategy["kind"]
    if not table.writes:
        raise ScenarioError(f"{table.title} is read only; write to {', '.join(n for n in NAMES if load(n).writes)}")
    if kind not in table.kinds:
        able = [name for name in NAMES if load(name).writes and kind in load(name).kinds]
        raise ScenarioError(
            f"{table.title} does not launch strategy {kind!r}, which {exported.path} has; "
            f"{', '.join(able) or 'none of these frameworks'} would (at $.strategy.kind)"
        )
    if table.parallel == "always" and exported.file.parallel is None:
        raise ScenarioError(
            f"{table.title} has replicas of its own, which a table [parallel] describes; {exported.path} "
            "has PyTorch's (at $.parallel)"
        )


def canonical(exported: Scenario) -> texts.Table:
    """What a scenario means, leaf by leaf, however it was written: the model by its sizes, the batch by its passes, the
    schedule by its own name; without the machine and what only a simulation has."""
    return _leaves(exported)[0]


def _trained_shape(exported: Scenario) -> TransformerShape | None:
    """A transformer's shape with samples as long as the scenario's; None of another network."""
    shape = transformer_of(exported)
    length = exported.file.model.seq_len
    return shape if shape is None or length is None else replace(shape, seq_len=length)


def _leaves(exported: Scenario) -> tuple[texts.Table, Mesh]:
    _, mesh = placed(exported)
    config = with_micro_batches(exported, mesh).config
    leaf_values = {name: value for name, value in flat(exported.inputs()).items() if not name.startswith(OURS)}
    shape = _trained_shape(exported)
    model = model_of(exported)
    parallel = exported.file.parallel
    leaf_values["model.seq_len"], leaf_values["strategy.framework"] = model.seq_len or None, ddp_of(exported)
    leaf_values |= _kernels_of(leaf_values)
    if leaf_values.get("model.activation_checkpointing") == "full":
        leaf_values["model.early_stop"] = stops_early(exported)
    sizes = (
        {"name": str(exported.file.model.name or exported.file.model.hf_config)}
        if shape is None
        else shapes.leaves(shape)
    )
    leaf_values |= {f"shape.{name}": value for name, value in sizes.items()}
    pipeline = parallel is not None and parallel.pp > 1
    replicas = mesh.size("dp") if parallel is not None else mesh.workers
    for name in (*batches.OF, "run.nccl_environment"):  # whose variables are leaves of their own
        leaf_values.pop(name, None)
    leaf_values |= batches.told(config.micro_batch_size, config.gradient_accumulation_steps, replicas, pipeline)
    left = programs_need.shards_left(leaf_values, mesh)
    leaf_values |= {name: left for name in programs_need.SHARDS if leaf_values.get(name) == -1}
    if graphs := exported.file.run.cuda_graph:
        leaf_values["graphs.impl"] = "local" if "full_iteration" in graphs else "transformer_engine"
        leaf_values["run.cuda_graph"] = list(graphs)
    if parallel is None:
        return leaf_values, mesh
    name = parallel.schedule_name(model.n_blocks or len(model.layers))
    leaf_values["parallel.order"] = ORDERS.get(parallel.order, parallel.order)
    leaf_values["parallel.schedule"] = schedule(name).name if not parallel.schedule_csv else None
    idle = tuple(f"parallel.{name}" for when, names in EFFECT.items() if not holds(when, leaf_values) for name in names)
    if parallel.framework != "megatron" and not splits(exported):
        idle = ("parallel.",)
    return {name: value for name, value in leaf_values.items() if not (idle and name.startswith(idle))}, mesh


def _kernels_of(leaf_values: texts.Table) -> texts.Table:
    """``[model]``'s kernels without what is played anyway: attention fused by PyTorch's own choice of a kernel, and the
    implementation that comes with the attention."""
    attention, implementation = execution(leaf_values.get("model.attention"), leaf_values.get("model.implementation"))
    usual = execution(attention, None)[1]
    return {
        "model.attention": None if attention == "flash" else attention,
        "model.implementation": None if implementation == usual else implementation,
    }


def _options(table: FrameworkTable, leaves: texts.Table) -> tuple[texts.Table, texts.Table]:
    """What is said in arguments of the script and in the file; of the framework's defaults those that its table has."""
    options: dict[str, texts.Table] = {"args": {}, "config": {}}
    for row in table.every():
        if not row.write or not holds(row.when, leaves):
            continue
        for option, value in _of_row(row, leaves):
            said = table.says_default(option)
            if said and leaves.get(row.field) is None:
                value = row.default
            if value is None or (value == row.default and not said) or option in options[row.at]:
                continue
            if "+" in option:
                options[row.at].update(zip(option.split("+"), str(value).split(" ", 1), strict=True))
            else:
                options[row.at][option] = value
    for first, second in table.beside.items():
        name, _, chosen = first.partition("=")
        other, _, value = second.partition("=")
        for stated in options.values():
            if name in stated and fnmatchcase(str(stated[name]), chosen):
                stated[other] = value or True
    return options["args"], options["config"]


def _of_row(row: LaunchOption, leaves: texts.Table) -> Iterator[tuple[str, Any]]:
    if not row.option.endswith(".*"):
        yield row.option, row.written(leaves.get(row.field))
        return
    usual = flat({"strategy": msgspec.to_builtins(STRATEGIES[str(leaves["strategy.kind"])].config())})
    for field, value in leaves.items():
        if field.startswith(row.field[:-1]) and (value != usual.get(field) or field.endswith(".stage")):
            yield row.option[:-1] + field[len(row.field) - 1 :], value


def _texts(table: FrameworkTable, args: texts.Table, config: texts.Table, mesh: Mesh, stem: str) -> dict[str, str]:
    name = f"{stem}.{'sh' if table.document == 'shell' else table.document}"
    nodes = mesh.n_nodes
    per_node = mesh.nproc_per_node
    if table.name == "accelerate":
        config = {
            "compute_environment": "LOCAL_MACHINE",
            "num_machines": nodes,
            "num_processes": nodes * per_node,
        } | config
    texts = {} if table.document == "shell" else {name: text_of_form(table.document, config, table.version)}
    command = table.program.format(nodes=nodes, gpus=per_node, config=name)
    if table.document == "toml":
        texts[name] = f"# {command}\n{texts[name]}"
    if table.document != "toml":
        named = {option.replace("_", "-") if table.dashes else option: value for option, value in args.items()}
        texts[f"{stem}.sh"] = text_of_form("shell", named, table.version, command)
    return texts


def _exporting(file_texts: dict[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """The texts, of which scripts export NCCL's variables before their command."""
    lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(variables.items()))
    head = re.compile(r"(?:#.*\n)+")
    return {
        name: head.sub(lambda match: match[0] + lines, text, count=1) if text.startswith("#!") else text
        for name, text in file_texts.items()
    }


def _wordless(
    exported: Scenario, leaves: texts.Table, table: FrameworkTable, texts: Mapping[str, str]
) -> Iterator[str]:
    """Every setting that reading the texts back does not give."""
    back, model = _back(exported, table, texts)
    again = programs_need.shards_unsaid(*_leaves(back))
    for name in DEGREES:
        if (leaves.get(f"parallel.{name}") or 1) != (again.get(f"parallel.{name}") or 1):
            degree = f"{name} = {leaves.get(f'parallel.{name}', 1)}"
            raise ScenarioError(f"{exported.path}: {table.title} has no word for {degree} (at $.parallel.{name})")
    if model is not None:
        yield f"model = {model}: its files name none; say it to the training script"
    for field in sorted(leaves.keys() | again.keys()):
        if leaves.get(field) != again.get(field):
            instead = "its default" if again.get(field) is None else _shown(again.get(field))
            yield f"{field} = {_shown(leaves.get(field))}: it would be {instead}"
    for name, own, other in shapes.unlike(_trained_shape(exported), _trained_shape(back)):
        yield f"shape.{name} = {_shown(own)}: it would be {_shown(other)}"


def _back(exported: Scenario, table: FrameworkTable, texts: Mapping[str, str]) -> tuple[Scenario, str | None]:
    """What the texts are read as on the same machine; and the model, where whoever launches them has to say it."""
    documents = [document(text, name) for name, text in texts.items()]
    input_tables = exported.inputs()
    cluster = {name: value for name, value in input_tables["cluster"].items() if value}
    cluster["topology"] = located(exported, "cluster.topology", cluster["topology"])
    run = {name: value for name, value in input_tables["run"].items() if f"run.{name}" in OURS and value is not None}
    file = exported.file.model
    name = file.name or located(exported, "model.hf_config", str(file.hf_config))

    def again(model: str | None) -> Scenario:
        """The scenario that the texts are read as, with this model."""
        path = exported.path.with_suffix(".launch")
        return read(documents, cluster, framework=table.name, model=model, path=path, run=run).scenario

    with suppress(ClusterSimError):
        return again(None), None
    try:
        return again(name), name
    except ClusterSimError as wrong:
        raise ScenarioError(f"{exported.path}: {table.title} cannot be told to do the same: {wrong}") from None


def _shown(value: Any) -> str:
    return "not said" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def text_of_form(form: str, options: texts.Table, about: str, command: str = "") -> str:
    """Options, by dotted name, as a text of this form; ``about`` : what a comment says of it, where there are comments.

    ``command`` : of a shell script, what stands before the options.
    """
    tables = nested(options)
    if form == "json":
        return json.dumps(tables, indent=2) + "\n"
    comment = f"# Names as in {about}.\n"
    if form == "toml":
        return comment + toml_text(tables)
    if form == "yaml":
        return comment + _yaml(tables)
    lines = [command, *(_argument(name, value) for name, value in options.items())]
    return f"#!/bin/bash\n{comment}" + " \\\n  ".join(line for line in lines if line) + "\n"


def _argument(name: str, value: Any) -> str:
    option = f"--{name}"
    if value is True:
        return option
    if value is False:
        return f"{option} false"
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join(
        [option, *(shlex.quote(f"{value:g}" if isinstance(value, float) else str(value)) for value in values)]
    )


def _yaml(table: texts.Table) -> str:
    try:
        import yaml
    except ImportError:
        raise ScenarioError(needs("YAML", "exchange")) from None
    return str(yaml.safe_dump(json.loads(json.dumps(table)), sort_keys=False))
