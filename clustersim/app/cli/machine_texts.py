"""The topology files that ``clustersim new topology`` writes, as changes to machines that there are."""

from __future__ import annotations

from pathlib import Path

from clustersim.app.cli.machines import MachineChoice, as_written, machine_of
from clustersim.core.errors import ClusterSimError
from clustersim.core.texts import short
from clustersim.core.tomls import toml_value


def changed_machine(file: Path, machine: MachineChoice, nics: str | None, oversubscription: float | None) -> str:
    """The file of a machine with another GPU, other NICs, or another network.

    nics : as ``8x400Gb/s``. oversubscription : of leaf switches, bandwidth down to nodes over bandwidth up.
    """
    base = machine.topology
    parts = [
        f"# A machine of your own, as changes to {machine.label}: `clustersim check {short(file.name)} --nodes 4`.",
        "# Keys: `clustersim describe --keys topology`; every number has a source.\n",
        f"name = {toml_value(file.stem)}",
        f'title = "{base}, changed"',
        f'extends = "{as_written(base, file)}"',
    ]
    node_lines = [*machine.node_lines(), *(_nics(nics, base) if nics else [])]
    parts += ["", "[node]", *node_lines] if node_lines else []
    parts += _fabric(oversubscription) if oversubscription else []
    return "\n".join([*parts, *machine.device_table()]) + "\n"


def mixed_machine(file: Path, mix: tuple[str, ...], oversubscription: float | None) -> str:
    """The file of a cluster of several kinds of nodes.

    mix : each as ``hgx-a100:2``, a machine and how many nodes of it.
    """
    parts = [
        f"# Nodes of several kinds, each rank at its own GPU's pace: `clustersim check {short(file.name)}`.",
        "",
        f"name = {toml_value(file.stem)}",
    ]
    for text in mix:
        machine, colon, count = text.rpartition(":")
        if not colon or not count.isdecimal() or not int(count):
            raise ClusterSimError(f"--mix {text!r}: write a machine and how many nodes of it, such as hgx-a100:2")
        parts += [
            "",
            "[[nodes]]",
            f'type = "{as_written(machine_of(None, machine).topology, file)}"',
            f"count = {int(count)}",
        ]
    return "\n".join([*parts, *_fabric(oversubscription or 1.0)]) + "\n"


def _fabric(oversubscription: float) -> list[str]:
    return ["", "[fabric]", 'kind = "fat_tree"', f"oversubscription = {oversubscription}", 'source = "..."']


def _nics(text: str, base: str) -> list[str]:
    from clustersim.cluster import files as fabrics
    from clustersim.cluster.files.boards import nics_in_words

    count, rate = nics_in_words(text)
    machine = fabrics.load(base)
    has = sum(kind == "nic" for kind in machine.vertex_kinds)
    if not 1 <= count <= has:
        raise ClusterSimError(f"--nics {text!r}: {base} has {has} NICs; extend a machine with at least {count}")
    # Spread over the sockets and switches of the machine, as a maker would: the first ones may all be on one CPU.
    kept_nics = [i * has // count for i in range(count)]
    gone = [i for i in range(has) if i not in kept_nics]
    removed = [f'remove = ["{_numbered(gone)}"]'] if gone else []
    vertices = ["[[node.vertices]]", f'names = "{_numbered(kept_nics)}"', 'kind = "nic"']
    return [*removed, *vertices, f'bandwidth = "{rate}"', 'source = "..."']


def _numbered(which: list[int]) -> str:
    """NICs by name, as a topology writes several."""
    if len(which) == 1:
        return f"nic{which[0]}"
    together = which[-1] - which[0] == len(which) - 1
    return f"nic[{which[0]}-{which[-1]}]" if together else f"nic[{','.join(map(str, which))}]"
