"""Options -> the text of a file: TOML, JSON, YAML, or a shell script."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from clustersim.errors import ScenarioError


def text_of_form(form: str, options: Mapping[str, Any], about: str, command: str = "") -> str:
    """Options, by dotted name, as a text of this form; ``about`` : what a comment says of it, where there are comments.

    ``command`` : of a shell script, what stands before the options.
    """
    nested = _nested(options)
    if form == "json":
        return json.dumps(nested, indent=2) + "\n"
    comment = f"# Names as in {about}.\n"
    if form == "toml":
        return comment + toml_text(nested)
    if form == "yaml":
        return comment + _yaml(nested)
    lines = [command, *(_argument(name, value) for name, value in options.items())]
    return f"#!/bin/bash\n{comment}" + " \\\n  ".join(line for line in lines if line) + "\n"


def _argument(name: str, value: Any) -> str:
    option = f"--{name}"
    if value is True:
        return option
    if value is False:
        return f"{option} false"
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join([option, *(shlex.quote(_plain(one)) for one in values)])


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in options.items():
        *way, last = name.split(".")
        here = made
        for part in way:
            here = here.setdefault(part, {})
        here[last] = value
    return made


def toml_text(table: Mapping[str, Any]) -> str:
    """Tables of plain values as TOML, nested tables under their own heads."""
    return "\n".join(_tables(table, "")).lstrip("\n") + "\n"


def _tables(table: Mapping[str, Any], head: str) -> Iterator[str]:
    plain = {name: value for name, value in table.items() if not isinstance(value, Mapping) and value is not None}
    if head and (plain or not table):
        yield f"\n[{head}]"
    yield from (f"{_key(name)} = {_value(value)}" for name, value in plain.items())
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _tables(value, f"{head}.{_key(name)}".lstrip("."))


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name) else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {_value(one)}" for name, one in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _yaml(table: Mapping[str, Any]) -> str:
    try:
        import yaml
    except ImportError:
        raise ScenarioError("YAML needs the pyyaml package: pip install 'clustersim[exchange]'") from None
    return str(yaml.safe_dump(json.loads(json.dumps(table)), sort_keys=False))
