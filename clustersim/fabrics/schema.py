"""What a topology file may say, and the clear error when it says something else.

A file describes one node and what joins nodes (``[node]``, ``[fabric]``), or extends another file, or mixes node types
(``[[nodes]]``), or lists a whole cluster itself (``[[vertices]]``, ``[[links]]``); ``[[changes]]`` then degrade or
remove parts. Every bandwidth is a line rate of one direction, with its unit, and every number has a ``source``.
"""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from clustersim.errors import TopologyError, nearest
from clustersim.units import Bandwidth, Seconds, quantity


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base: a misspelt field is an error."""


class VerticesSpec(_Strict, frozen=True):
    """One or more vertices of a kind; ``names = "gpu[0-7]"``.

    ``bandwidth`` is the port of a NIC. ``node`` places a vertex of a whole-cluster file.
    """

    names: str
    kind: Literal["gpu", "cpu", "nic", "pcie_switch", "nvswitch", "switch"]
    bandwidth: Bandwidth | None = None
    node: int | None = None
    source: str = ""


class LinksSpec(_Strict, frozen=True):
    """Links of every a with every b (``all``) or pairwise (``zip``; of unequal lengths, consecutive runs share).

    Both directions, unless ``directed``.
    """

    a: str
    b: str
    bandwidth: Bandwidth
    kind: Literal["nvlink", "xgmi", "c2c", "pcie", "cpu", "net"]
    source: str
    latency: Seconds = Seconds(0.0)
    pattern: Literal["all", "zip"] = "all"
    directed: bool = False


class NodeSpec(_Strict, frozen=True):
    """One machine: the traits of :class:`clustersim.topology.NodeType`, its vertices and links.

    In a file that extends another, traits given replace the base's, ``remove`` (globs) takes vertices out, and vertices
    and links are added, or replace those of the same name or ends.
    """

    device: str | None = None
    cpu_vendor: Literal["intel", "amd", "arm", "power"] | None = None
    cpu_model: str | None = None
    net: Literal["ib", "roce", "slingshot", "efa", "tcpx", "opa", "tcp", "none"] | None = None
    nvls: bool | None = None
    p2p: bool | None = None
    pcie_gen: int | None = None
    net_share: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    cores: Annotated[int, msgspec.Meta(ge=1)] | None = None
    sources: dict[str, str] = {}
    remove: list[str] = []
    vertices: list[VerticesSpec] = []
    links: list[LinksSpec] = []


TRAITS = ("cpu_vendor", "cpu_model", "net", "nvls", "p2p", "pcie_gen", "net_share", "cores")
"""Fields of ``[node]`` that are :class:`clustersim.topology.NodeType`'s of the same name, beside ``device``."""


class DomainSpec(_Strict, frozen=True):
    """Parts that ``nodes`` consecutive nodes share, such as the switches of an NVLink rack."""

    nodes: int
    vertices: list[VerticesSpec]
    links: list[LinksSpec]


class _Fabric(_Strict, frozen=True, tag_field="kind"):
    source: str
    routing: Literal["destination", "hash"] = "destination"
    port_latency: Seconds = Seconds(300e-9)
    switch_latency: Seconds = Seconds(230e-9)


class NoFabric(_Strict, frozen=True, tag_field="kind", tag="none"):
    """Nodes that nothing joins."""

    source: str = ""


class OneSwitch(_Fabric, frozen=True, tag="one_switch"):
    """Every NIC on one non-blocking switch."""


class RailOptimised(_Fabric, frozen=True, tag="rail_optimised"):
    """NIC i of the nodes of a scalable unit on the unit's leaf i; spines join the leaves."""

    radix: int = 64
    nodes_per_unit: int | None = None
    oversubscription: float = 1.0


class FatTree(_Fabric, frozen=True, tag="fat_tree"):
    """A folded Clos of ``levels`` tiers; ``oversubscription`` is leaf down-links : up-links."""

    radix: int = 64
    levels: int | None = None
    oversubscription: float = 1.0


class Dragonfly(_Fabric, frozen=True, tag="dragonfly"):
    """Groups of fully joined switches, all groups joined."""

    switches_per_group: int = 32
    nics_per_switch: int = 16
    global_links_per_switch: int = 16
    taper: float = 1.0


FabricSpec: TypeAlias = NoFabric | OneSwitch | RailOptimised | FatTree | Dragonfly
FABRIC_KINDS = ("none", "one_switch", "rail_optimised", "fat_tree", "dragonfly")


class _OneFabric(_Strict, frozen=True):
    fabric: FabricSpec


class NodesSpec(_Strict, frozen=True):
    """``count`` nodes of the type another file describes."""

    type: str
    count: int


class ChangeSpec(_Strict, frozen=True):
    """Something degraded or gone, by vertex (``"node3/nic0"``) or link (``"node0/gpu0 -> node0/nvswitch*"``); globs."""

    match: str | None = None
    factor: float | None = None
    bandwidth: Bandwidth | None = None
    remove: str | None = None
    source: str = ""


class ConstantSpec(_Strict, frozen=True):
    """A fitted constant and its 95 % interval, each with its unit where it has one (``"17.2 us"``)."""

    value: str | float
    low: str | float | None = None
    high: str | float | None = None


class CalibrationSpec(_Strict, frozen=True):
    """Constants fitted to this machine's own measurements (:class:`clustersim.calibrated.Calibration`)."""

    date: str = ""
    data: list[str] = []
    versions: list[str] = []
    rows: int = 0
    nccl: dict[str, ConstantSpec] = {}
    gloo: dict[str, ConstantSpec] = {}
    device: dict[str, ConstantSpec] = {}
    refused: dict[str, str] = {}


class TopologyFile(_Strict, frozen=True):
    """A whole file."""

    name: str
    title: str = ""
    extends: str | None = None
    node: NodeSpec | None = None
    domain: DomainSpec | None = None
    fabric: FabricSpec | None = None
    nodes: list[NodesSpec] = []
    vertices: list[VerticesSpec] = []
    links: list[LinksSpec] = []
    changes: list[ChangeSpec] = []
    calibration: CalibrationSpec | None = None


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
        read: FabricSpec = msgspec.convert({"fabric": table}, _OneFabric, dec_hook=quantity).fabric
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
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"{path}: cannot be read: {error}") from None


@lru_cache(maxsize=64)
def parse(text: str, where: str) -> TopologyFile:
    """A checked file from its text; ``where`` is what errors name. Raises :class:`TopologyError`."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TopologyError(f"{where}: not TOML: {error}") from None
    return decode(data, where)


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
    ".calibration.device[...]": ConstantSpec,
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


def expand(names: str) -> list[str]:
    """``"gpu[0-3]"`` -> gpu0..gpu3; ``"nic[0,2]"``; several brackets multiply; commas outside brackets list.

    >>> expand("gpu[0-2]")
    ['gpu0', 'gpu1', 'gpu2']
    >>> expand("node[0-1]/nic[0,3]")
    ['node0/nic0', 'node0/nic3', 'node1/nic0', 'node1/nic3']
    """
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]+\])+", names):
        raise TopologyError(f"cannot read the names {names!r}; write them like 'gpu[0-7]' or 'nic[0,2]'")
    out: list[str] = []
    for part in re.split(r",(?![^\[]*\])", names):
        expanded = [""]
        for literal, group in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part.strip()):
            options = [literal] if literal else _numbers(group, names)
            expanded = [head + option for head in expanded for option in options]
        out += expanded
    return out


def _numbers(group: str, whole: str) -> list[str]:
    out: list[str] = []
    for item in group.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
        if not found or (found.group(2) and int(found.group(2)) < int(found.group(1))):
            raise TopologyError(f"cannot read the names {whole!r}; write them like 'gpu[0-7]' or 'nic[0,2]'")
        out += [str(i) for i in range(int(found.group(1)), int(found.group(2) or found.group(1)) + 1)]
    return out
