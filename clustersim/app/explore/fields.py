"""The form: every knob of a scenario as a field, read off the JSON Schema of the file kind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from clustersim.app.explore.fence import FILES
from clustersim.core.device import devices
from clustersim.core.errors import ScenarioError
from clustersim.core.optimizers import OPTIMIZERS
from clustersim.core.paths import shipped
from clustersim.core.tomls import flat, toml_value
from clustersim.model.named_models import catalog
from clustersim.scenario import Scenario
from clustersim.scenario.file.reading import parse_overrides
from clustersim.training.schedules import SCHEDULES

Node = Mapping[str, Any]

TABLES = {
    "cluster": "Machine",
    "model": "Model",
    "strategy": "Strategy",
    "parallel": "How the model is split",
    "run": "Run",
}
"""Tables whose fields are offered, and their headings; no step depends on the others."""
IDLE = ("without effect here", "refused where")
"""In the meaning of a field that changes nothing."""


@dataclass(frozen=True)
class KnobField:
    """One knob.

    Parameters
    ----------
    key : as ``--set`` has it. value : what the file says, as text; empty where it says nothing. default : as text.
    meaning : with bounds. unit : of a number. choices : of a list. low, high : bounds of a number, as text.
    number, whole : whether it is one, and a whole one. textual : whether its value is text, whatever it looks like.
    fixed : a file's name, which stays as it is. kinds : strategies that have it; empty for a field of all.
    """

    key: str
    value: str = ""
    default: str = ""
    meaning: str = ""
    unit: str = ""
    choices: tuple[str, ...] = ()
    low: str = ""
    high: str = ""
    number: bool = False
    whole: bool = False
    textual: bool = False
    fixed: bool = False
    kinds: tuple[str, ...] = ()

    def setting(self, text: str) -> str:
        """``KEY=VALUE`` as ``--set`` takes it; an empty text takes the field away."""
        bare = f"{self.key}={text.strip()}"
        if not text.strip() or not self.textual or parse_overrides([bare])[self.key] == text.strip():
            return bare
        return f"{self.key}={json.dumps(text.strip(), ensure_ascii=False)}"


@dataclass(frozen=True)
class KnobSection:
    """Fields under a heading; ``kind`` is the only strategy they are of."""

    heading: str
    fields: tuple[KnobField, ...]
    kind: str = ""


@dataclass(frozen=True)
class KnobForm:
    """All sections: what the file says itself, then the other knobs by table."""

    sections: tuple[KnobSection, ...]
    known: Mapping[str, KnobField] = field(default_factory=dict)

    def settings(self, values: Mapping[str, str]) -> tuple[str, ...]:
        """``--set`` texts of what differs from the file. Raises :class:`ScenarioError` for a key that is no field."""
        settings = []
        for key, text in values.items():
            if key not in self.known:
                raise ScenarioError(f"{key}: is no field of this page (at $.{key})")
            if text.strip() != self.known[key].value:
                table = ".".join(key.split(".")[:2])
                gone = key != table and all(not values.get(own_key, "kept").strip() for own_key in self._own(table))
                settings.append(f"{table}=" if gone else self.known[key].setting(text))
        return tuple(dict.fromkeys(settings))

    def _own(self, table: str) -> list[str]:
        """What the file says in a table inside a table; without it the table itself is gone."""
        return [key for key, form_field in self.known.items() if form_field.value and key.startswith(f"{table}.")] or [
            ""
        ]


def form_of(scenario: Scenario, schema: Node) -> KnobForm:
    """The form of a scenario as it was opened; ``schema`` : of ``clustersim schema scenario``."""
    offered = dict(_offered(schema))
    own = [
        _own(key, value, offered)
        for key, value in flat(dict(scenario.table)).items()
        if key.partition(".")[0] in TABLES
    ]
    own_keys = {form_field.key for form_field in own}
    sections = [KnobSection("This scenario", tuple(own))]
    for table, heading in TABLES.items():
        rest = [
            form_field
            for (_, key), form_field in offered.items()
            if key.startswith(f"{table}.") and key not in own_keys
        ]
        if table != "strategy":
            sections.append(KnobSection(heading, tuple(rest)))
            continue
        kinds = dict.fromkeys(kind for kind, _ in offered if kind)
        sections += [
            KnobSection(
                f"{heading}: {kind}", tuple(form_field for form_field in rest if kind in form_field.kinds), kind
            )
            for kind in kinds
        ]
    filled = tuple(part for part in sections if part.fields)
    return KnobForm(filled, {form_field.key: form_field for part in reversed(filled) for form_field in part.fields})


def _own(key: str, value: object, offered: Mapping[tuple[str, str], KnobField]) -> KnobField:
    same = [other_field for (_, name), other_field in offered.items() if name == key]
    text = toml_value(value)
    own_field = same[0] if same else KnobField(key)
    if not (own_field.choices or own_field.number or own_field.textual):
        own_field = _of_value(own_field, value)
    own_field = replace(
        own_field,
        kinds=() if key == "strategy.kind" else tuple(kind for other_field in same for kind in other_field.kinds),
    )
    shown = text if not isinstance(value, str) else value
    choices = own_field.choices if not own_field.choices or shown in own_field.choices else (shown, *own_field.choices)
    return replace(own_field, value=shown, choices=choices, fixed=key in FILES and not choices)


def _of_value(form_field: KnobField, value: object) -> KnobField:
    """A field of which the schema does not say one type: it has its value's."""
    if isinstance(value, bool):
        return replace(form_field, choices=("true", "false"))
    number = isinstance(value, int | float)
    return replace(form_field, number=number, whole=isinstance(value, int), textual=isinstance(value, str))


def _offered(schema: Node) -> Iterator[tuple[tuple[str, str], KnobField]]:
    """((strategy or nothing, key), field) of everything that the schema lists; one field per key and strategy."""
    definitions = schema["$defs"]
    properties = definitions[schema["$ref"].rpartition("/")[2]]["properties"]
    kinds = [_named(member, definitions) for member in properties["strategy"]["anyOf"]]
    every = tuple(kind["properties"]["kind"]["enum"][0] for kind in kinds)
    yield ("", "strategy.kind"), KnobField("strategy.kind", choices=every, textual=True, meaning="what each rank does")
    for table in TABLES:
        if table != "strategy":
            for member in _walk(_bare(properties[table], definitions), table, definitions):
                yield ("", member.key), member
    for kind, name in zip(kinds, every, strict=True):
        for member in _walk(kind, "strategy", definitions):
            if member.key != "strategy.kind":
                yield (name, member.key), replace(member, kinds=(name,))


def _walk(struct: Node, path: str, definitions: Node) -> Iterator[KnobField]:
    for name, node in struct["properties"].items():
        key = f"{path}.{name}"
        inner = _bare(node, definitions)
        if "properties" in inner:
            yield from _walk(inner, key, definitions)
        elif (key not in FILES or key in CHOICES) and not any(
            idle_word in node.get("description", "") for idle_word in IDLE
        ):
            yield _field(key, node, inner)


def _field(key: str, node: Node, inner: Node) -> KnobField:
    meaning = str(node.get("description", ""))
    default = node.get("default")
    unit = re.match(r"\[(\w[\w/]*)\][,;]? ?", meaning)
    empty = default is None or (hasattr(default, "__len__") and not len(default))
    default_text = "" if empty else default if isinstance(default, str) else toml_value(default)
    low = inner.get("minimum")
    high = inner.get("maximum")
    types = _types(inner)
    return KnobField(
        key,
        default=default_text,
        meaning=meaning[unit.end() :] if unit else meaning,
        unit=unit.group(1) if unit else "",
        choices=_choices(key, inner),
        number=bool(types & {"integer", "number"}),
        whole="integer" in types,
        textual="string" in types or any(isinstance(enum_value, str) for enum_value in inner.get("enum", ())),
        low="" if low is None else f"{low:g}",
        # One that nobody meets but by a slip of the hand is the error's to tell.
        high="" if high is None or high >= 1e6 else f"{high:g}",
    )


def _types(inner: Node) -> frozenset[str]:
    """The types that a field's schema lets it have: one, or some of a list."""
    types = inner.get("type", ())
    return frozenset([types] if isinstance(types, str) else types)


def _choices(key: str, inner: Node) -> tuple[str, ...]:
    if key in CHOICES:
        return tuple(CHOICES[key]())
    if _types(inner) == {"boolean"}:
        return "true", "false"
    return tuple(map(str, inner.get("enum", ())))


def _named(node: Node, definitions: Node) -> Node:
    definition: Node = definitions[node["$ref"].rpartition("/")[2]]
    return definition


def _bare(node: Node, definitions: Node) -> Node:
    """A node's one type: without ``null``, and a definition in its name's place; empty for several types."""
    kinds = [member for member in node.get("anyOf", [node]) if member.get("type") != "null"]
    if len(kinds) > 1:
        return {}
    return _named(kinds[0], definitions) if "$ref" in kinds[0] else kinds[0]


CHOICES: Mapping[str, Callable[[], Iterable[str]]] = {
    "cluster.topology": partial(shipped, "topologies"),
    "cluster.device": devices,
    "model.name": catalog,
    "parallel.schedule": SCHEDULES.keys,
    "run.optimizer": lambda: (*OPTIMIZERS, "none"),
}
"""Fields that name what there is, of which the schema says only that they are text."""
