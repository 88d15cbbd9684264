"""From a topology file's text to its checked tables, and the clear error where it says what it may not."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from clustersim.cluster.files.measured import MeasuredSpec, numbers
from clustersim.cluster.files.names import expand
from clustersim.cluster.files.schema import (
    FABRICS,
    OWN,
    DomainSpec,
    FabricSpec,
    NodeSpec,
    NoFabric,
    OneFabric,
    TopologyFile,
)
from clustersim.cluster.files.tool_texts import is_amd_report, is_hwloc_tree, is_matrix
from clustersim.core import texts
from clustersim.core.calibrated import MeasuredNumber
from clustersim.core.errors import TopologyError, nearest
from clustersim.core.file_kinds import taken_for
from clustersim.core.texts import Table
from clustersim.core.units import quantity


def decode(data: Table, origin: str) -> TopologyFile:
    """A checked file from parsed TOML. Raises :class:`TopologyError` with file, field path, value and nearest name."""
    try:
        spec = msgspec.convert(data, TopologyFile, dec_hook=quantity)
    except msgspec.ValidationError as error:
        wrong = taken_for(data, TopologyFile.__struct_fields__) or _explain(str(error), data)
        raise TopologyError(f"{origin}: {wrong}") from None
    for part, path in ((spec.node, "$.node"), (spec.domain, "$.domain"), (spec, "$")):
        if part is not None:
            _check_names(part, f"{origin}: {path}")
    return spec


def changed_fabric(fabric: FabricSpec, changes: Table) -> FabricSpec:
    """The fabric with some fields changed; with ``kind``, another one altogether.

    Raises :class:`TopologyError` naming the field, its value and the nearest right name.
    """
    table: Table = {"source": OWN, **changes}
    table.setdefault("kind", fabric.__struct_config__.tag)
    try:
        read: FabricSpec = msgspec.convert({"fabric": table}, OneFabric, dec_hook=quantity).fabric
    except msgspec.ValidationError as error:
        raise TopologyError(_explain(str(error), {"fabric": table})) from None
    if "kind" in changes:
        return read
    return msgspec.structs.replace(fabric, **{name: getattr(read, name) for name in changes})


def _check_names(part: NodeSpec | DomainSpec | TopologyFile, origin: str) -> None:
    """Say which field holds names that cannot be read."""
    for i, vertices in enumerate(part.vertices):
        _readable(vertices.names, f"{origin}.vertices[{i}].names")
        if vertices.node is not None and vertices.node < 0:
            raise TopologyError(f"{origin}.vertices[{i}].node: {vertices.node} is no node; nodes count from 0")
    for i, links in enumerate(part.links):
        _readable(links.a, f"{origin}.links[{i}].a")
        _readable(links.b, f"{origin}.links[{i}].b")


def _readable(names: str, origin: str) -> None:
    try:
        expand(names)
    except TopologyError as error:
        raise TopologyError(f"{origin}: {error}") from None


def read(path: Path) -> TopologyFile:
    """A checked file from disk. Raises :class:`TopologyError`."""
    return parse(texts.text_of(path, TopologyError), str(path))


@lru_cache(maxsize=256)  # more than are shipped, which whoever lists them reads in turn
def parse(text: str, where: str) -> TopologyFile:
    """A checked file from its text; ``where`` is what errors name. Raises :class:`TopologyError`."""
    if text.lstrip().startswith("<") or any(
        recognises(text) for recognises in (is_matrix, is_amd_report, is_hwloc_tree)
    ):
        raise TopologyError(
            f"{where}: is what a tool found on a machine, and no topology file; clustersim new topology machine.toml "
            f"--from {where} makes one of it"
        )
    return decode(texts.toml(text, where, TopologyError), where)


def numbers_of(table: Table, origin: str) -> tuple[MeasuredNumber, ...]:
    """What a parsed table, such as a scenario's, says was measured. Raises :class:`TopologyError`."""
    return numbers(decode({"name": "", "measured": dict(table)}, origin).measured or MeasuredSpec(), origin)


def _explain(message: str, data: Table) -> str:
    """msgspec's message, with the nearest right name added; it gives the field path itself."""
    unknown = re.search(r"unknown field `([^`]+)`(?: - at `\$(.*)`)?", message)
    missing = re.search(r"missing required field `([^`]+)`(?: - at `\$(.*)`)?", message)
    invalid = re.search(r"Invalid (?:enum )?value '(.*)' - at `\$(.*)`", message)
    if named := unknown or missing:
        name, path = named.group(1), named.group(2) or ""
        kind = FABRICS.get(data["fabric"].get("kind"), NoFabric) if path == ".fabric" else _declared(path)
        fields = texts.fields_of(kind)
        if missing:
            return f"missing field {name!r} at ${path}; a table here holds {', '.join(fields)}"
        return f"unknown field {texts.shown(name)} at ${path}; {nearest(name, fields)}"
    if invalid:
        path = invalid.group(2)
        choices = FABRICS if path == ".fabric.kind" else texts.choices_of(_declared(path))
        return f"{invalid.group(1)!r} is no {path.rsplit('.', 1)[-1]} at ${path}; {nearest(invalid.group(1), choices)}"
    if "got `bool` - at `$.node.remove`" in message:
        return 'remove = true at $.node.remove: write which vertices are gone, such as remove = ["nic[4-7]"]'
    return message


def _declared(path: str) -> Any:
    return texts.at_path(None, TopologyFile, path)[1]
