"""What launch files leave to others: the machine; and a scenario of their fields, checked, and without the usual."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from clustersim import fabrics, fitting, scenario
from clustersim.errors import ClusterSimError, ScenarioError
from clustersim.exchange import batches
from clustersim.exchange.options import Fields
from clustersim.scenario import Scenario
from clustersim.scenario.parts import model_of, placed
from clustersim.scenario.reading import Table as Tables
from clustersim.scenario.splitting import with_micro_batches
from clustersim.texts import shown


def machine(fields: Fields, cluster: Tables, notes: list[str], file: str, folder: Path) -> tuple[Tables, int]:
    """``[cluster]``, and how many ranks it has; where the file says other than asked, ``notes`` get a sentence.

    Raises :class:`ScenarioError` where nobody says what machine it is, or how many.
    """
    if not cluster.get("topology"):
        raise ScenarioError(
            f"{file}: does not say on what machine it runs; give --topology, such as --topology dgx-h100 "
            "(clustersim list topologies)"
        )
    told = {name: _count(fields.get(f"cluster.{name}")) for name in ("nodes", "gpus_per_node")}
    whole: Tables = {name: value for name, value in told.items() if value}
    whole |= {name: value for name, value in cluster.items() if value is not None}
    for name, value in told.items():
        if value and whole[name] != value:
            notes.append(f"{name} = {whole[name]} as asked for; {fields.by[f'cluster.{name}'].where} says {value}")
    topology = str(whole["topology"])
    if topology.endswith(".toml") or "/" in topology:
        topology = str(folder / topology)
    world = _count(fields.get("cluster.world"))
    if world and told["nodes"] and world % told["nodes"] == 0 and not cluster.get("nodes"):
        whole.setdefault("gpus_per_node", world // told["nodes"])
    if "nodes" not in whole and world:
        whole["nodes"] = max(1, world // (whole.get("gpus_per_node") or len(fabrics.load(topology, nodes=1).gpus)))
    if "nodes" not in whole:
        raise ScenarioError(f"{file}: does not say on how many nodes it runs; give --nodes, such as --nodes 4")
    built = fitting.load(topology, whole["nodes"], whole.get("device"), whole.get("fabric", {}), ())
    return whole, fabrics.mesh(built, nproc_per_node=whole.get("gpus_per_node")).world_size


def _count(value: Any) -> int:
    """What a launcher says, where it is a number; 0 else (an elastic ``1:4``, a variable of the scheduler)."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 8 else 0


def checked(tables: Tables, path: Path, fields: Fields) -> Scenario:
    """The scenario, on its machine. Raises :class:`ScenarioError` that names the option behind the wrong field."""
    try:
        made = scenario.from_table(tables, path)
        _, mesh = placed(made)
        with_micro_batches(made, mesh)
        model_of(made)
    except ClusterSimError as wrong:
        found = re.search(r"\(at \$\.([\w.]+)", str(wrong))
        field = found[1] if found else ""
        inside = (by for name, by in fields.by.items() if field and name.startswith(f"{field}."))
        by = fields.by.get(field) or fields.by.get(batches.OF.get(field, "")) or next(inside, None)
        if by is None:
            raise
        what = str(wrong).removeprefix(f"{path}: ")
        raise ScenarioError(f"{by.where}: {by.name} {shown(by.value)}: {what}") from None
    return made


def shorter(tables: Tables, made: Scenario, path: Path) -> tuple[Tables, Scenario]:
    """The tables without what holds anyway, where the scenario stays the same."""
    parallel = tables.get("parallel", {})
    decide = {
        name: parallel[name] for name in ("framework", "tp", "pp", "cp", "ep", "schedule", "vpp") if name in parallel
    }
    model = {name: tables["model"][name] for name in ("name", "hf_config") if name in tables["model"]}
    bare: Tables = {"cluster": tables["cluster"], "model": model, "strategy": {"kind": tables["strategy"]["kind"]}}
    always = {name for name, value in decide.items() if value not in (1, "megatron")} | {
        *model,
        "kind",
        "steps",
        "seq_len",
    }
    usual = scenario.from_table(bare | ({"parallel": decide} if parallel else {}), path).inputs()
    kept: Tables = {}
    for name in (name for name in ("cluster", "model", "parallel", "strategy", "run") if tables.get(name)):
        table, has = tables[name], usual.get(name, {})
        kept[name] = {k: v for k, v in table.items() if name == "cluster" or k in always or has.get(k) != v}
    short = scenario.from_table(kept, path)
    if short.inputs() == made.inputs():
        return kept, short
    return tables, dataclasses.replace(made, table=tables)
