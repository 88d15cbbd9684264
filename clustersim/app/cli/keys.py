"""Every key of a file kind, read off the Structs that files are read by: field, type, default, meaning.

The meaning is the Struct's own docstring: in ``Parameters``, ``name : what it is`` or ``one, other : what both are``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import cast

import msgspec
from msgspec import inspect

from clustersim.core.texts import Table
from clustersim.core.units import Seconds, format_time


class Key(msgspec.Struct, frozen=True):
    """One key: where it stands (``cluster.changes[].match``), what it may hold, what holds when it is absent
    (``"required"``: it may not be), and what it means."""

    path: str
    type: str
    default: str
    meaning: str


def keys(kind: str) -> list[Key]:
    """Every key of a scenario, topology, plan or sweep."""
    all_keys = [key for path, struct in _roots(kind) for key in _of(struct, path)]
    common = {key.path.rpartition(".")[2] for key in all_keys if key.path.startswith("strategy.")}
    return [key for key in all_keys if not ("[kind=" in key.path and key.path.partition("].")[2] in common)]


def schema(kind: str) -> Table:
    """The JSON Schema (2020-12) of a file kind, for editors that check TOML by one."""
    roots = dict(_roots(kind))
    document = msgspec.json.schema(roots.pop(""), schema_hook=_unit_schema)
    strategies = [struct for path, struct in roots.items() if "=" in path]
    if strategies:  # a scenario's own schema says no more of [strategy] than that it is a table
        union, definitions = msgspec.json.schema_components(
            strategies, schema_hook=_unit_schema, ref_template="#/$defs/{name}"
        )
        document["$defs"] |= definitions
        document["$defs"]["ScenarioFile"]["properties"]["strategy"] = {"anyOf": list(union)}
    for struct in _classes(kind):
        if struct.__name__ in document["$defs"]:
            _describe(document["$defs"][struct.__name__], struct)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}


def _describe(definition: Table, struct: type) -> None:
    """What the docstring says, where an editor shows it."""
    definition["description"] = first_sentence(struct)
    for name, meaning in said(struct, list(definition["properties"])).items():
        if meaning:
            definition["properties"][name]["description"] = meaning


def _classes(kind: str) -> set[type]:
    classes: set[type] = set()
    left = [struct for _, struct in _roots(kind)]
    while left:
        struct = left.pop()
        if struct not in classes:
            classes.add(struct)
            left += [struct.cls for field in _info(struct).fields for struct in _structs(field.type)]
    return classes


def _unit_schema(kind: type) -> Table:
    if hasattr(kind, "example"):
        other = ["object"] * hasattr(kind, "law") + [*getattr(kind, "also", ())]
        return {"type": ["string", *other] if other else "string", "description": kind.example}
    raise NotImplementedError(kind)


KINDS = {
    "scenario": ("clustersim.scenario.file.schema", "ScenarioFile"),
    "topology": ("clustersim.cluster.files.schema", "TopologyFile"),
    "device": ("clustersim.core.gpu_file", "DeviceFile"),
    "plan": ("clustersim.studies.plan.spec", "PlanFile"),
    "sweep": ("clustersim.studies.sweep.spec", "SweepFile"),
}
"""Kinds of files, and the module and Struct they are read by."""


def _roots(kind: str) -> Iterator[tuple[str, type]]:
    """Where in a file a Struct stands; a scenario's strategy is read by one for each ``kind`` of it."""
    module, name = KINDS[kind]
    yield "", getattr(import_module(module), name)
    if kind == "scenario":
        from clustersim.training.strategies import STRATEGIES, StrategyConfig

        yield "strategy", StrategyConfig
        yield from ((f"strategy[kind={name}]", strategy.config) for name, strategy in STRATEGIES.items())


def _of(struct: type, path: str) -> Iterator[Key]:
    info = _info(struct)
    meanings = said(struct, [field.encode_name for field in info.fields])
    if info.tag_field is not None and "[" not in path:
        yield Key(_joined(path, info.tag_field), f'"{info.tag}"', "required", first_sentence(struct))
    for field in info.fields:
        place = _joined(path, field.encode_name)
        inner = list(_structs(field.type))
        meaning = meanings.get(field.encode_name) or (first_sentence(inner[0].cls) if len(inner) == 1 else "")
        yield Key(place, _type(field.type), _default(field), meaning)
        bare = _bare(field.type)
        kinds = bare.types if isinstance(bare, inspect.UnionType) else (bare,)
        several = any(isinstance(kind, inspect.ListType | inspect.VarTupleType) for kind in kinds)
        for struct_type in inner:
            name = f"{struct_type.tag_field}={struct_type.tag}" if struct_type.tag_field else struct_type.cls.__name__
            yield from _of(struct_type.cls, place + ("[]" if several else "") + (f"[{name}]" if len(inner) > 1 else ""))


def _info(struct: type) -> inspect.StructType:
    return cast(inspect.StructType, inspect.type_info(struct))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None or value in ("", (), [], {}) or isinstance(value, msgspec.Struct):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Seconds):
        return format_time(value)
    return msgspec.json.encode(value).decode()


def _bare(kind: inspect.Type) -> inspect.Type:
    """Without ``None``, where that leaves one type."""
    if isinstance(kind, inspect.UnionType):
        rest = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
        return rest[0] if len(rest) == 1 else inspect.UnionType(tuple(rest))
    return kind


def _structs(kind: inspect.Type) -> Iterator[inspect.StructType]:
    kind = _bare(kind)
    if isinstance(kind, inspect.StructType):
        yield kind
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _structs(member)
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
        yield from _structs(kind.item_type)
    elif isinstance(kind, inspect.DictType):
        yield from _structs(kind.value_type)


_PLAIN: Mapping[type[inspect.Type], str] = {
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.StrType: "text",
    inspect.BoolType: "true, false",
    inspect.AnyType: "any",
    inspect.StructType: "table",
    inspect.DictType: "table",
}


def _type(kind: inspect.Type) -> str:
    kind = _bare(kind)
    if isinstance(kind, inspect.UnionType):
        return " or ".join(dict.fromkeys(_type(member) for member in kind.types))
    if isinstance(kind, inspect.LiteralType):
        return ", ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in kind.values)
    if isinstance(kind, inspect.CustomType):
        return str(getattr(kind.cls, "kind_text", "text"))
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return f"list of {_type(kind.item_type)}"
    if isinstance(kind, inspect.TupleType):
        return f"[{', '.join(_type(item_type) for item_type in kind.item_types)}]"
    word = _PLAIN.get(type(kind), type(kind).__name__)
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [f"{sign} {getattr(kind, name)}" for name, sign in signs.items() if getattr(kind, name, None) is not None]
    return " ".join([word, " and ".join(bounds)]).strip()


OTHERS = "others"
"""In a docstring's parameters, all that are not named."""


def first_sentence(struct: type) -> str:
    """What a Struct is, in its docstring's first words."""
    return _plain((struct.__doc__ or "").split("\n\n")[0])


def said(struct: type, names: list[str]) -> dict[str, str]:
    """What the docstrings of a Struct and of its bases say of each field."""
    meanings: dict[str, str] = {}
    field = "|".join(sorted(map(re.escape, [*names, OTHERS]), key=len, reverse=True))
    head = re.compile(rf"(?:^|(?<=[.:;] )|(?<=\n))((?:{field})(?:, (?:{field}))*) :\s", re.MULTILINE)
    for base in reversed(struct.__mro__):
        text = re.sub(r"[ \t]*\n[ \t]+", "\n", (base.__dict__.get("__doc__") or "").partition("----------")[2])
        parts = head.split(text)[1:]
        for heads, meaning in zip(parts[::2], parts[1::2], strict=True):
            meanings.update(dict.fromkeys(heads.split(", "), _plain(meaning.split("\n\n")[0])))
    rest = meanings.pop(OTHERS, "")
    for name in names:
        if name not in meanings:
            referring = (name_of for name_of, meaning in meanings.items() if f"`{name}`" in meaning)
            meanings[name] = next((f"see `{name_of}`" for name_of in referring), rest)
    return meanings


def _plain(text: str) -> str:
    """Without Sphinx's roles, on one line."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"\1", text).replace("``", "`")
    return " ".join(text.split())
