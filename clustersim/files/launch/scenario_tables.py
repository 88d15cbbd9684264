"""The tables of a scenario from the fields that launch files say: its machine, the check, and the shortest words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from clustersim import scenario
from clustersim.cluster import files as fabrics
from clustersim.collectives import fitted as fitting
from clustersim.core.errors import ClusterSimError, ScenarioError
from clustersim.core.texts import shown
from clustersim.core.tomls import nested
from clustersim.core.topology import Topology
from clustersim.files.launch import (
    batches,
)
from clustersim.files.launch.files import Document
from clustersim.files.launch.open_questions import OpenQuestion
from clustersim.files.launch.options import ScenarioFields
from clustersim.files.launch.pods import count_in
from clustersim.files.launch.table import FrameworkTable, holds
from clustersim.scenario import Scenario
from clustersim.scenario.file.reading import Table as Tables
from clustersim.scenario.file.splitting import MEGATRON, PLAYED, cause
from clustersim.scenario.run.held import held


def tables_of(table: FrameworkTable, fields: ScenarioFields, place: Tables, world: int) -> Tables:
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
        nodes = "" if _tells_nodes(fields, cluster) else f"; {NODES}"
        raise OpenQuestion(
            file,
            "does not say on what machine it runs; give --topology, such as --topology dgx-h100 "
            f"(clustersim list topologies){nodes}",
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
    if world:
        _place(cluster_table, world, topology, fields)
    if "nodes" not in cluster_table:
        raise OpenQuestion(file, NODES)
    built = fitting.load(
        topology, cluster_table["nodes"], cluster_table.get("device"), cluster_table.get("fabric", {}), ()
    )
    notes += _on_rocm(fields, built)
    ranks = fabrics.mesh(built, nproc_per_node=cluster_table.get("gpus_per_node")).world_size
    if world and ranks != world:
        by = fields.by["cluster.world"]
        notes.append(f"{ranks} ranks as asked for; {by.where}: {by.name} says {world}")
    return cluster_table, ranks


def _place(cluster_table: Tables, world: int, topology: str, fields: ScenarioFields) -> None:
    """Put so many ranks on nodes, where nothing says how many of these.

    Raises :class:`ScenarioError` where they do not fill them.
    """
    if "nodes" not in cluster_table:
        gpus = cluster_table.get("gpus_per_node") or len(fabrics.load(topology, nodes=1).gpus)
        cluster_table["nodes"] = max(1, world // gpus)
        if world > gpus and world % gpus:
            by = fields.by["cluster.world"]
            raise ScenarioError(
                f"{by.where}: {by.name} {world} does not fill nodes of {gpus} GPUs; give --nodes and --gpus-per-node"
            )
    alone = cluster_table["nodes"] == 1 and "gpus_per_node" not in cluster_table
    if alone and world <= len(fabrics.load(topology, nodes=1).gpus):  # it may have more GPUs
        cluster_table["gpus_per_node"] = world


NODES = "does not say on how many nodes it runs; give --nodes, such as --nodes 4"


def _tells_nodes(fields: ScenarioFields, cluster: Tables) -> bool:
    """Whether files or the command say how many nodes, or how many ranks in all."""
    return bool(cluster.get("nodes")) or any(count_in(fields.get(f"cluster.{name}")) for name in ("nodes", "world"))


def _on_rocm(fields: ScenarioFields, built: Topology) -> list[str]:
    """Put the kernel that ROCm's Transformer Engine takes where an option asks for fused attention, which is cuDNN's of
    NVIDIA's: Composable Kernel's, and AOTriton's where that cannot (``nvte_get_fused_attn_backend`` of ROCm's
    TransformerEngine, ``transformer_engine/common/fused_attn_rocm/fused_attn.cpp``); returns a note."""
    by = fields.by.get("model.attention")
    if by is None or fields.get("model.attention") != "cudnn" or not all(node.gpu.amd for node in built.node_types):
        return []
    fields["model.attention"] = "fa2"
    return [
        f"{by.where}: {by.as_written} is Composable Kernel's flash attention (fa2) on {built.node_types[0].gpu.name}, "
        "which ROCm's Transformer Engine takes before AOTriton's"
    ]


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
