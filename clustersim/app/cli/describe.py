"""``clustersim describe``: a scenario before it runs: its mesh on the machine, one rank's place, and its Program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click
from msgspec import to_builtins

from clustersim.app.cli.common import json_option, print_json, set_option, working
from clustersim.app.cli.folding import folded, shortened
from clustersim.app.cli.listing import keys_option

if TYPE_CHECKING:
    from clustersim.core.mesh import Mesh
    from clustersim.core.topology import Topology
    from clustersim.scenario.run.running import Prepared


@click.command(short_help="Print a scenario's mesh and Program before it runs.")
@click.argument("scenario")
@keys_option
@set_option
@click.option("--rank", type=click.IntRange(min=0), default=0, help="The rank whose place and ops are printed.")
@click.option("--mesh", "only_mesh", is_flag=True, help="Only the mesh: degrees, groups, links and the rank's place.")
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="Print every op; without, repeats are printed once and a long list by its ends.",
)
@json_option
def describe(scenario: str, changes: tuple[str, ...], rank: int, only_mesh: bool, every: bool, as_json: bool) -> None:
    """Print a scenario before it runs: the groups of its mesh and the links they use, torchrun's variables of one rank,
    and that rank's streams, buckets, sizes and what waits for what."""
    from clustersim import scenario as scenarios
    from clustersim.scenario.run.parts import placed

    loaded = scenarios.load(scenario, scenarios.parse_overrides(changes))
    with working(f"building {loaded.name}"):
        topology, mesh = placed(loaded)
        prepared = None if only_mesh else loaded.prepare()
        if as_json:
            print_json(_facts(topology, mesh, rank, prepared))
            return
        lines = list(_mesh(topology, mesh))
        if rank < mesh.workers or only_mesh:
            lines += ["", *_rank(topology, mesh, rank)]
        if prepared is not None:
            text = prepared.describe(rank).splitlines()
            lines += ["", *(text if every else shortened(folded(text)))]
    click.echo("\n".join(lines))


def _facts(topology: Topology, mesh: Mesh, rank: int, prepared: Prepared | None) -> dict[str, object]:
    """The same in plain values: what ``--json`` prints."""
    from clustersim.scenario.run.mesh_table import rank_view, rows

    layout = mesh.layout
    facts: dict[str, object] = {
        "ranks": mesh.workers,
        "nodes": mesh.n_nodes,
        "order": list(layout.tokens),
        "degrees": {name: layout.sizes[name] for name in ("tp", "cp", "dp", "pp", "ep", "etp", "edp")},
        "groups": [to_builtins(row) for row in rows(topology, mesh)],
    }
    if rank < mesh.workers:
        view = rank_view(topology, mesh, rank)
        groups = [{"dims": list(dims), "ranks": list(members)} for dims, members in view.groups.items()]
        facts["rank"] = {"rank": rank, "vertex": view.vertex, "environment": view.environment, "groups": groups}
    if prepared is not None:
        facts |= _program(prepared, rank)
    return facts


def _program(prepared: Prepared, rank: int) -> dict[str, object]:
    """What a rank computes and holds, and its op list."""
    # which says where there is no such rank
    split = prepared.split
    text = prepared.program.describe(rank)
    role = next(role for role in prepared.program.roles if rank in role.ranks)
    stages = () if split is None else zip(split.partition.stages, split.memory, strict=True)
    return {
        "scenario": prepared.scenario.name,
        "model": prepared.model.name,
        "parameters": prepared.model.parameters,
        "trained_parameters": prepared.model.trained,
        "device_bytes": prepared.device.memory_bytes,
        "memory_bytes": prepared.memory.total,
        "memory_verdict": prepared.verdict.state,
        "stages": [
            {
                "layers": [[layer.name for layer in chunk.layers] for chunk in stage.chunks],
                "parameters": stage.parameters + stage.expert_parameters,
                "memory_bytes": use.total,
                "peak": use.peak,
            }
            for stage, use in stages
        ],
        "notes": list(prepared.notes),
        "ops": [
            {
                "name": op.name,
                "stream": op.stream,
                "step": op.step,
                "phase": op.phase,
                "bytes": op.nbytes,
                "after": list(op.after),
                "text": line.strip(),
            }
            for op, line in zip(role.ops, text.splitlines(), strict=True)
        ],
    }


def _mesh(topology: Topology, mesh: Mesh) -> Iterator[str]:
    from clustersim.scenario.run.mesh_table import rows

    d = mesh.layout
    degrees = [f"{name} {d.sizes[name]}" for name in ("tp", "cp", "dp", "pp")]
    if d.ep > 1 or d.etp is not None:
        degrees.append("experts: " + ", ".join(f"{name} {d.sizes[name]}" for name in ("etp", "ep", "edp")))
    yield f"mesh      {mesh.workers} ranks on {mesh.n_nodes} node(s): {', '.join(degrees)}"
    yield f"order     {'-'.join(d.tokens)}, the first varies fastest"
    table = rows(topology, mesh)
    if not table:
        return
    yield ""
    yield _line("groups over", "ranks", "groups", "the first", "on one node", "neighbours over")
    for row in table:
        inside = "all" if row.inside == row.groups else f"{row.inside:,}" if row.inside else f"none, {row.nodes} nodes"
        first = ranks_words(row.first, 22)
        yield _line(" x ".join(row.dims), f"{row.degree:,}", f"{row.groups:,}", first, inside, ", ".join(row.links))


def _line(name: str, degree: str, groups: str, first: str, inside: str, links: str) -> str:
    return f"{name:13s} {degree:>6s} {groups:>7s}  {first:22s}  {inside:16s}  {links}".rstrip()


def _rank(topology: Topology, mesh: Mesh, rank: int) -> Iterator[str]:
    from clustersim.scenario.run.mesh_table import rank_view

    view = rank_view(topology, mesh, rank)
    yield f"rank {rank} drives {view.vertex}"
    yield "torchrun  " + " ".join(f"{name}={value}" for name, value in view.environment.items())
    for dims, group in view.groups.items():
        place = group.index(rank)
        yield f"{' x '.join(dims):9s} {place} of {len(group)}: {ranks_words(group, 70)}"


def ranks_words(ranks: Sequence[int], width: int) -> str:
    """Ranks within so many columns: all of them, or the first ones and the last.

    >>> ranks_words([0, 8, 16, 24], 22), ranks_words(range(0, 1024, 8), 22)
    ('0, 8, 16, 24', '0, 8, 16, ..., 1016')
    """
    text = ", ".join(map(str, ranks))
    shown = len(ranks)
    while len(text) > width and shown > 1:
        shown -= 1
        text = f"{', '.join(map(str, ranks[:shown]))}, ..., {ranks[-1]}"
    return text
