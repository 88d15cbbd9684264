"""Primus's presets: files of a module and of a model, each upon those that it extends, and what an experiment changes.

Format: ``primus/core/config`` (``yaml_loader.py``, ``preset_loader.py``) and ``primus/core/launcher/parser.py`` of
AMD-AGI/Primus at 1a5c8190 and 0158a866. Presets that are not among the files: ``data/primus_presets.toml``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import Table, data_table, shown, text_of
from clustersim.core.yamls import yaml_table

_VARIABLE = re.compile(r"\$\{([^:{}]+)(?::([^}]*))?\}")
EXTENDS = ("extends", "includes", "bases")
"""Keys of a preset that name those below it, the newest release's first."""
DEEPEST = 12
"""Presets that extend each other; more go in a circle."""
BASE = "language_model.yaml"
"""What presets of Megatron-LM's models all extend."""
NAMED = "preset"
"""The option that names a shipped model, where a model's preset is known by its name alone."""


@dataclass
class Presets:
    """Presets of one framework, and what was found of them.

    Parameters
    ----------
    framework : ``megatron`` or ``torchtitan``. given : texts of files by name without folders. experiment : the path of
        the experiment, above which ``primus/configs`` may lie. environment : variables that a script sets.
    defaulted : variables that nothing sets, whose defaults are taken. tabulated : presets that no file holds.
    read : names of ``given`` that were read.
    """

    framework: str
    given: Mapping[str, str]
    experiment: str
    environment: Mapping[str, str]
    defaulted: list[str] = field(default_factory=list)
    tabulated: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)

    def preset(self, kind: str, name: str) -> Table:
        """What a preset says with all that it extends. ``kind`` : ``modules`` or ``models``. Raises
        :class:`ScenarioError` for one that is neither given nor tabulated."""
        return self._preset(kind, name, None, 0)

    def _preset(self, kind: str, name: str, folder: Path | None, depth: int) -> Table:
        if depth > DEEPEST:
            raise ScenarioError(f"{self.experiment}: preset {shown(name)} extends itself")
        preset_file = self._text(kind, name, folder)
        rows = data_table("primus_presets")[self.framework]
        own = Path(name).name
        if preset_file is None:
            return self._tabulated(kind, own, rows, depth)
        text, path = preset_file
        table = with_variables(yaml_table(text, str(path), ScenarioError), self.environment, self.defaulted, str(path))
        merged: Table = {}
        for below in [below for key in EXTENDS for below in _names(table.pop(key, None))]:
            merged = overlaid(merged, self._preset(kind, below, path.parent, depth + 1))
        return overlaid(merged, table)

    def _tabulated(self, kind: str, name: str, rows: Table, depth: int) -> Table:
        if name in rows["bases"]["names"]:
            return {}
        of_modules = kind == "models" and name not in rows["models"] and name in rows["modules"]
        table = dict(rows["modules" if of_modules else kind].get(name, {}))
        if not table and kind == "models" and name in rows["named"]:
            table = {"extends": [BASE], NAMED: rows["named"][name]}
        if not table:
            raise ScenarioError(
                f"{self.experiment}: {kind.removesuffix('s')} preset {shown(name)} is not known here; give "
                f"primus/configs/{kind}/{self.framework}/{name} among the files too"
                + (", with those that it extends" if depth == 0 else "")
            )
        if depth == 0:
            self.tabulated.append(name)
        merged: Table = {}
        for below in table.pop("extends", []):
            merged = overlaid(merged, self._tabulated(kind, below, rows, depth + 1))
        return overlaid(merged, table)

    def _text(self, kind: str, name: str, folder: Path | None) -> tuple[str, Path] | None:
        """The text of a preset and its path: of a file that was given, or of Primus's folders around the experiment."""
        own = Path(name).name
        if own in self.given:
            self.read.add(own)
            return self.given[own], Path(own)
        inside = Path("primus/configs") / kind / self.framework / name
        above = Path(self.experiment).resolve().parents
        places = [folder / name] if folder is not None else []
        for path in [*places, *(parent / inside for parent in above)]:
            if path.is_file():
                return text_of(path, ScenarioError), path
        return None


def _names(value: Any) -> list[str]:
    """Names of presets, of one or of a list."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [str(name)[:200] for name in values]


def overlaid(below: Table, above: Mapping[str, Any]) -> Table:
    """One table upon another: tables of both are merged, other values of the upper one count, null too.

    >>> overlaid({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": None}, "c": 4})
    {'a': {'x': 1, 'y': None}, 'b': 3, 'c': 4}
    """
    merged = dict(below)
    for key, value in above.items():
        before = merged.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[key] = overlaid(dict(before or {}), value) if both else value
    return merged


def with_variables(value: Any, environment: Mapping[str, str], defaulted: list[str], where: str) -> Any:
    """A value whose ``${NAME:default}`` are variables that are set, or their defaults, which are put into
    ``defaulted``; what becomes a number is one.

    >>> with_variables({"a": "${TP:1}", "b": "${M:own}.yaml"}, {"TP": "8"}, [], "a.yaml")
    {'a': 8, 'b': 'own.yaml'}

    Raises :class:`ScenarioError` for ``false``, which Primus's reader makes a text of, and a text counts as true.
    """
    if isinstance(value, Mapping):
        return {key: with_variables(below, environment, defaulted, where) for key, below in value.items()}
    if isinstance(value, list):
        return [with_variables(below, environment, defaulted, where) for below in value]
    if not isinstance(value, str) or "${" not in value:
        return value

    def set_by(match: re.Match[str]) -> str:
        """A variable's value."""
        name, default = match.groups()
        if name in environment:
            return environment[name]
        if default is not None:
            defaulted.append(name)
        return match[0] if default is None else default

    text = _VARIABLE.sub(set_by, value)
    if text.lower() == "false":
        raise ScenarioError(
            f"{where}: {value} becomes the text {text!r}, which counts as true in Primus; write a plain false"
        )
    return {"null": None, "None": None, "true": True, "True": True}.get(text, _number(text))


def _number(text: str) -> Any:
    """A text as a number, where it is one."""
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d+\.?\d*([eE][+-]?\d{1,3})?", text) else text
