"""Options -> the text of a file: TOML, JSON, YAML, or a shell script."""

from __future__ import annotations

import json
import shlex
from typing import Any

from clustersim.errors import ScenarioError, needs
from clustersim.texts import Table
from clustersim.tomls import nested, toml_text


def text_of_form(form: str, options: Table, about: str, command: str = "") -> str:
    """Options, by dotted name, as a text of this form; ``about`` : what a comment says of it, where there are comments.

    ``command`` : of a shell script, what stands before the options.
    """
    tables = nested(options)
    if form == "json":
        return json.dumps(tables, indent=2) + "\n"
    comment = f"# Names as in {about}.\n"
    if form == "toml":
        return comment + toml_text(tables)
    if form == "yaml":
        return comment + _yaml(tables)
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


def _yaml(table: Table) -> str:
    try:
        import yaml
    except ImportError:
        raise ScenarioError(needs("YAML", "exchange")) from None
    return str(yaml.safe_dump(json.loads(json.dumps(table)), sort_keys=False))
