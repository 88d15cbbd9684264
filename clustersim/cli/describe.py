"""``clustersim describe``: a scenario before it runs: its mesh on the machine, one rank's place, and its Program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from clustersim.cli.common import set_option, working
from clustersim.cli.keys import KINDS
from clustersim.cli.listing import show_keys

if TYPE_CHECKING:
    from clustersim.mesh import Mesh
    from clustersim.topology import Topology


@click.command(short_help="Print a scenario's mesh and Program before it runs.")
@click.argument("scenario", required=False)
@click.option("--keys", "kind", type=click.Choice(list(KINDS)), help="Instead: every key of a file of this kind.")
@click.option("--markdown", is_flag=True, help="Print the keys as a Markdown table.")
@set_option
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Whose place and op list.")
@click.option("--mesh", "only_mesh", is_flag=True, help="Only the mesh: degrees, groups, links and the rank's place.")
def describe(
    scenario: str | None, kind: str | None, markdown: bool, changes: tuple[str, ...], rank: int, only_mesh: bool
) -> None:
    """Print a scenario before it runs: the groups of its mesh and the links they use, torchrun's variables of one rank,
    and that rank's streams, buckets, sizes and what waits for what."""
    if kind is not None:
        show_keys(kind, markdown)
        return
    if scenario is None:
        raise click.UsageError("name a scenario, or a kind of file with --keys")
    from clustersim import scenario as scenarios
    from clustersim.scenario.parts import placed

    loaded = scenarios.load(scenario, scenarios.parse_overrides(changes))
    with working(f"building {loaded.name}"):
        topology, mesh = placed(loaded)
        lines = list(_mesh(topology, mesh))
        if rank < mesh.workers or only_mesh:
            lines += ["", *_rank(topology, mesh, rank)]
        if not only_mesh:
            lines += ["", loaded.prepare().describe(rank)]
    click.echo("\n".join(lines))


def _mesh(topology: Topology, mesh: Mesh) -> Iterator[str]:
    from clustersim.scenario.mesh_table import rows

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
    from clustersim.scenario.mesh_table import rank_view

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
