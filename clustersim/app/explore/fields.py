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
from clustersim.core.paths import shipped
from clustersim.core.tomls import flat, toml_value
from clustersim.model.catalog import catalog
from clustersim.model.seconds.optimizer import STATES
from clustersim.scenario import Scenario
from clustersim.scenario.reading import parse_overrides
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
        found = []
        for key, text in values.items():
            if key not in self.known:
                raise ScenarioError(f"{key}: is no field of this page (at $.{key})")
            if text.strip() != self.known[key].value:
                table = ".".join(key.split(".")[:2])
                gone = key != table and all(not values.get(one, "kept").strip() for one in self._own(table))
                found.append(f"{table}=" if gone else self.known[key].setting(text))
        return tuple(dict.fromkeys(found))

    def _own(self, table: str) -> list[str]:
        """What the file says in a table inside a table; without it the table itself is gone."""
        return [key for key, one in self.known.items() if one.value and key.startswith(f"{table}.")] or [""]


def form_of(scenario: Scenario, schema: Node) -> KnobForm:
    """The form of a scenario as it was opened; ``schema`` : of ``clustersim schema scenario``."""
    offered = dict(_offered(schema))
    own = [
        _own(key, value, offered)
        for key, value in flat(dict(scenario.table)).items()
        if key.partition(".")[0] in TABLES
    ]
    mine = {one.key for one in own}
    sections = [KnobSection("This scenario", tuple(own))]
    for table, heading in TABLES.items():
        rest = [one for (_, key), one in offered.items() if key.startswith(f"{table}.") and key not in mine]
        if table != "strategy":
            sections.append(KnobSection(heading, tuple(rest)))
            continue
        kinds = dict.fromkeys(kind for kind, _ in offered if kind)
        sections += [
            KnobSection(f"{heading}: {kind}", tuple(one for one in rest if kind in one.kinds), kind) for kind in kinds
        ]
    kept = tuple(part for part in sections if part.fields)
    return KnobForm(kept, {one.key: one for part in reversed(kept) for one in part.fields})


def _own(key: str, value: object, offered: Mapping[tuple[str, str], KnobField]) -> KnobField:
    same = [one for (_, name), one in offered.items() if name == key]
    text = toml_value(value)
    known = same[0] if same else KnobField(key)
    if not (known.choices or known.number or known.textual):
        known = _of_value(known, value)
    known = replace(known, kinds=() if key == "strategy.kind" else tuple(kind for one in same for kind in one.kinds))
    shown = text if not isinstance(value, str) else value
    choices = known.choices if not known.choices or shown in known.choices else (shown, *known.choices)
    return replace(known, value=shown, choices=choices, fixed=key in FILES and not choices)


def _of_value(known: KnobField, value: object) -> KnobField:
    """A field of which the schema does not say one type: it has its value's."""
    if isinstance(value, bool):
        return replace(known, choices=("true", "false"))
    number = isinstance(value, int | float)
    return replace(known, number=number, whole=isinstance(value, int), textual=isinstance(value, str))


def _offered(schema: Node) -> Iterator[tuple[tuple[str, str], KnobField]]:
    """((strategy or nothing, key), field) of everything that the schema lists; one field per key and strategy."""
    definitions = schema["$defs"]
    properties = definitions[schema["$ref"].rpartition("/")[2]]["properties"]
    kinds = [_named(one, definitions) for one in properties["strategy"]["anyOf"]]
    every = tuple(kind["properties"]["kind"]["enum"][0] for kind in kinds)
    yield ("", "strategy.kind"), KnobField("strategy.kind", choices=every, textual=True, meaning="what each rank does")
    for table in TABLES:
        if table != "strategy":
            for one in _walk(_bare(properties[table], definitions), table, definitions):
                yield ("", one.key), one
    for kind, name in zip(kinds, every, strict=True):
        for one in _walk(kind, "strategy", definitions):
            if one.key != "strategy.kind":
                yield (name, one.key), replace(one, kinds=(name,))


def _walk(struct: Node, path: str, definitions: Node) -> Iterator[KnobField]:
    for name, node in struct["properties"].items():
        key = f"{path}.{name}"
        inner = _bare(node, definitions)
        if "properties" in inner:
            yield from _walk(inner, key, definitions)
        elif (key not in FILES or key in CHOICES) and not any(one in node.get("description", "") for one in IDLE):
            yield _field(key, node, inner)


def _field(key: str, node: Node, inner: Node) -> KnobField:
    meaning = str(node.get("description", ""))
    default = node.get("default")
    unit = re.match(r"\[(\w[\w/]*)\][,;]? ?", meaning)
    empty = default is None or (hasattr(default, "__len__") and not len(default))
    said = "" if empty else default if isinstance(default, str) else toml_value(default)
    low = inner.get("minimum")
    high = inner.get("maximum")
    return KnobField(
        key,
        default=said,
        meaning=meaning[unit.end() :] if unit else meaning,
        unit=unit.group(1) if unit else "",
        choices=_choices(key, inner),
        number=inner.get("type") in {"integer", "number"},
        whole=inner.get("type") == "integer",
        textual=inner.get("type") == "string" or any(isinstance(one, str) for one in inner.get("enum", ())),
        low="" if low is None else f"{low:g}",
        # One that nobody meets but by a slip of the hand is the error's to tell.
        high="" if high is None or high >= 1e6 else f"{high:g}",
    )


def _choices(key: str, inner: Node) -> tuple[str, ...]:
    if key in CHOICES:
        return tuple(CHOICES[key]())
    if inner.get("type") == "boolean":
        return "true", "false"
    return tuple(map(str, inner.get("enum", ())))


def _named(node: Node, definitions: Node) -> Node:
    found: Node = definitions[node["$ref"].rpartition("/")[2]]
    return found


def _bare(node: Node, definitions: Node) -> Node:
    """A node's one type: without ``null``, and a definition in its name's place; empty for several types."""
    kinds = [one for one in node.get("anyOf", [node]) if one.get("type") != "null"]
    if len(kinds) > 1:
        return {}
    return _named(kinds[0], definitions) if "$ref" in kinds[0] else kinds[0]


CHOICES: Mapping[str, Callable[[], Iterable[str]]] = {
    "cluster.topology": partial(shipped, "topologies"),
    "cluster.device": devices,
    "model.name": catalog,
    "parallel.schedule": SCHEDULES.keys,
    "run.optimizer": lambda: (*STATES, "none"),
}
"""Fields that name what there is, of which the schema says only that they are text."""
