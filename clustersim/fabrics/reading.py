"""From a topology file's text to its checked tables, and the clear error where it says what it may not."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from clustersim import texts
from clustersim.errors import TopologyError, nearest
from clustersim.fabrics.names import expand
from clustersim.fabrics.schema import (
    FABRIC_KINDS,
    CalibrationSpec,
    ChangeSpec,
    ConstantSpec,
    DomainSpec,
    Dragonfly,
    FabricSpec,
    FatTree,
    LinksSpec,
    MeasuredSpec,
    NodeSpec,
    NodesSpec,
    NoFabric,
    NumberSpec,
    OneFabric,
    OneSwitch,
    RailOptimised,
    TopologyFile,
    VerticesSpec,
)  # fmt: skip
from clustersim.units import quantity


def decode(data: dict[str, Any], where: str) -> TopologyFile:
    """A checked file from parsed TOML. Raises :class:`TopologyError` with file, field path, value and nearest name."""
    try:
        spec = msgspec.convert(data, TopologyFile, dec_hook=quantity)
    except msgspec.ValidationError as error:
        raise TopologyError(f"{where}: {_explain(str(error), data)}") from None
    for part, path in ((spec.node, "$.node"), (spec.domain, "$.domain"), (spec, "$")):
        if part is not None:
            _check_names(part, f"{where}: {path}")
    return spec


def changed_fabric(fabric: FabricSpec, changes: dict[str, Any]) -> FabricSpec:
    """The fabric with some fields changed; with ``kind``, another one altogether.

    Raises :class:`TopologyError` naming the field, its value and the nearest right name.
    """
    table: dict[str, Any] = {"source": "the scenario's own", **changes}
    table.setdefault("kind", fabric.__struct_config__.tag)
    try:
        read: FabricSpec = msgspec.convert({"fabric": table}, OneFabric, dec_hook=quantity).fabric
    except msgspec.ValidationError as error:
        raise TopologyError(_explain(str(error), {"fabric": table})) from None
    if "kind" in changes:
        return read
    return msgspec.structs.replace(fabric, **{name: getattr(read, name) for name in changes})


def _check_names(part: NodeSpec | DomainSpec | TopologyFile, where: str) -> None:
    """Say which field holds names that cannot be read."""
    for i, vertices in enumerate(part.vertices):
        _readable(vertices.names, f"{where}.vertices[{i}].names")
        if vertices.node is not None and vertices.node < 0:
            raise TopologyError(f"{where}.vertices[{i}].node: {vertices.node} is no node; nodes count from 0")
    for i, links in enumerate(part.links):
        _readable(links.a, f"{where}.links[{i}].a")
        _readable(links.b, f"{where}.links[{i}].b")


def _readable(names: str, where: str) -> None:
    try:
        expand(names)
    except TopologyError as error:
        raise TopologyError(f"{where}: {error}") from None


def read(path: Path) -> TopologyFile:
    """A checked file from disk. Raises :class:`TopologyError`."""
    return parse(text_of(path), str(path))


def text_of(path: Path) -> str:
    """What a file says. Raises :class:`TopologyError`."""
    return texts.text_of(path, TopologyError)


@lru_cache(maxsize=64)
def parse(text: str, where: str) -> TopologyFile:
    """A checked file from its text; ``where`` is what errors name. Raises :class:`TopologyError`."""
    return decode(texts.toml(text, where, TopologyError), where)


def _explain(message: str, data: dict[str, Any]) -> str:
    """msgspec's message, with the nearest right name added; it gives the field path itself."""
    unknown = re.search(r"unknown field `([^`]+)`(?: - at `\$(.*)`)?", message)
    invalid = re.search(r"Invalid (?:enum )?value '(.*)' - at `\$(.*)`", message)
    if unknown:
        known = _fields_at(unknown.group(2) or "", data)
        return f"unknown field {unknown.group(1)!r} at ${unknown.group(2) or ''}; {nearest(unknown.group(1), known)}"
    if invalid:
        field = invalid.group(2).rsplit(".", 1)[-1]
        known = FABRIC_KINDS if invalid.group(2) == ".fabric.kind" else _choices(invalid.group(2), field)
        return f"{invalid.group(1)!r} is no {field} at ${invalid.group(2)}; {nearest(invalid.group(1), known)}"
    return message


_BY_PATH: dict[str, type[msgspec.Struct]] = {
    "": TopologyFile,
    ".node": NodeSpec,
    ".domain": DomainSpec,
    ".vertices[]": VerticesSpec,
    ".links[]": LinksSpec,
    ".nodes[]": NodesSpec,
    ".changes[]": ChangeSpec,
    ".calibration": CalibrationSpec,
    ".calibration.nccl[...]": ConstantSpec,
    ".calibration.gloo[...]": ConstantSpec,
    ".calibration.mpi[...]": ConstantSpec,
    ".calibration.device[...]": ConstantSpec,
    ".measured": MeasuredSpec,
    **{f".measured.{kind}[]": NumberSpec for kind in MeasuredSpec.__struct_fields__},
}


def _struct_at(path: str) -> type[msgspec.Struct] | None:
    generic = re.sub(r"\[\d+\]", "[]", path)
    return _BY_PATH.get(generic) or _BY_PATH.get("." + generic.rsplit(".", 1)[-1])


def _fields_at(path: str, data: dict[str, Any]) -> tuple[str, ...]:
    if path == ".fabric":
        kinds = {"one_switch": OneSwitch, "rail_optimised": RailOptimised, "fat_tree": FatTree, "dragonfly": Dragonfly}
        return kinds.get(data["fabric"].get("kind"), NoFabric).__struct_fields__
    struct = _struct_at(path)
    return struct.__struct_fields__ if struct else ()


def _choices(path: str, field: str) -> tuple[str, ...]:
    struct = _struct_at(path.rsplit(".", 1)[0])
    for info in msgspec.structs.fields(struct) if struct else ():
        if info.name == field:
            found: tuple[str, ...] = tuple(re.findall(r"'(\w+)'", str(info.type)))
            return found
    return ()
