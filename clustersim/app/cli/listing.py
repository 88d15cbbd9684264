"""``clustersim list`` and ``clustersim schema``: what there is to name, and what a file may say."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import click

from clustersim.app.cli.common import Decorator, json_option, print_json
from clustersim.app.cli.keys import KINDS, first_sentence, keys, schema
from clustersim.app.cli.tables import markdown_table, rich_table, stdout
from clustersim.core.paths import data_path, shipped

Row = dict[str, Any]


def _topologies() -> list[Row]:
    folder = data_path("topologies")
    files = {name: tomllib.loads((folder / f"{name}.toml").read_text("utf-8")) for name in shipped("topologies")}
    return [{"name": name, "about": file.get("title", "")} for name, file in files.items()]


def _models() -> list[Row]:
    from clustersim.model.named_models import catalog, model

    return [{"name": name, "parameters": model(name).parameters} for name in catalog()]


def _devices() -> list[Row]:
    from clustersim.core.device import devices

    return [
        {"name": name, "memory_bytes": device.memory_bytes, "memory_bandwidth_bytes_per_s": device.memory_bandwidth}
        | {"dense_peak_flops": dict(device.peak), "source": device.source}
        for name, device in devices().items()
    ]


def _scenarios() -> list[Row]:
    folder = data_path("scenarios")
    return [{"name": name, "about": _comment(folder / f"{name}.toml")} for name in shipped("scenarios")]


def _comment(path: Path) -> str:
    """The first sentence of the comment that a file begins with."""
    lines = takewhile(lambda line: line.startswith("# "), path.read_text("utf-8").splitlines())
    return re.split(r"(?<=[.?]) ", " ".join(line[2:] for line in lines))[0].rstrip(".")


def _failures() -> list[Row]:
    from clustersim.studies.campaign.causes import sets

    return [{"name": name, "about": cause_set.title, "source": cause_set.source} for name, cause_set in sets().items()]


def _strategies() -> list[Row]:
    from clustersim.training.strategies import STRATEGIES

    return [
        {"name": name, "about": first_sentence(strategy.config).removeprefix("Knobs of ").rstrip(".")}
        for name, strategy in STRATEGIES.items()
    ]


def _schedules() -> list[Row]:
    from clustersim.training.schedules import SCHEDULES

    return [{"name": schedule.name, "also_called": list(schedule.aliases)} for schedule in SCHEDULES.values()]


def _algorithms() -> list[Row]:
    from clustersim.collectives.registry import ALGORITHMS

    return [
        {"name": name, "kinds": sorted(algorithm.kinds), "steps_can_be_played": algorithm.schedule is not None}
        for name, algorithm in ALGORITHMS.items()
    ]


def _formats() -> list[Row]:
    from clustersim.files.read_table import kinds

    return [{"command": kind.command, "name": kind.name, "reads": kind.about} for kind in kinds()]


LISTS: Mapping[str, Callable[[], list[Row]]] = {
    "topologies": _topologies,
    "models": _models,
    "devices": _devices,
    "scenarios": _scenarios,
    "strategies": _strategies,
    "schedules": _schedules,
    "algorithms": _algorithms,
    "failures": _failures,
    "formats": _formats,
}
"""What can be listed."""


@click.command("list", short_help="List what is shipped: topologies, models, devices, scenarios ...")
@click.argument("what", type=click.Choice(list(LISTS)))
@click.option("--markdown", is_flag=True, help="Print a Markdown table instead.")
@json_option
def list_(what: str, markdown: bool, as_json: bool) -> None:
    """List the names that scenarios, topologies, plans and options can use, with a line for each."""
    rows = LISTS[what]()
    if as_json:
        print_json(rows)
        return
    _show([{key: _words(key, value) for key, value in row.items()} for row in rows], what, markdown)


def _words(key: str, value: Any) -> str:
    if key == "parameters":
        units = ((1e9, "B"), (1e6, "M"), (1e3, "K"))
        return next((f"{value / scale:.4g} {unit}" for scale, unit in units if value >= scale), str(value))
    if key == "memory_bytes":
        return f"{value / 2**30:.4g} GiB"
    if key == "memory_bandwidth_bytes_per_s":
        return f"{value / 1e9:,.0f} GB/s"
    if key == "dense_peak_flops":
        return ", ".join(f"{dtype} {rate / 1e12:.4g}" for dtype, rate in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)


_HEADINGS = {
    "memory_bytes": "memory",
    "memory_bandwidth_bytes_per_s": "its rate",
    "dense_peak_flops": "dense peak [TFLOP/s]",
    "also_called": "also called",
    "steps_can_be_played": "plays as chunks",
}


def _show(rows: list[dict[str, str]], title: str, markdown: bool) -> None:
    """A table of texts, for a terminal or in Markdown."""
    headings = [_HEADINGS.get(key, key) for key in rows[0]]
    if markdown:
        click.echo("\n".join(markdown_table(headings, (row.values() for row in rows), words=len(headings))))
        return
    stdout().print(rich_table(title, ((heading, False) for heading in headings), (row.values() for row in rows)))


def _show_keys(kind: str, markdown: bool) -> None:
    rows = [
        {"key": f"`{key.path}`" if markdown else key.path, "holds": key.type, "default": key.default}
        | {"meaning": key.meaning}
        for key in keys(kind)
    ]
    _show(rows, f"keys of a {kind} file", markdown)


def _keys_alone(context: click.Context, _: click.Parameter, kind: str | None) -> None:
    """Print them and leave: no scenario is asked for."""
    if kind is not None:
        _show_keys(kind, markdown=False)
        context.exit()


keys_option: Decorator = click.option(
    "--keys",
    type=click.Choice(list(KINDS)),
    callback=_keys_alone,
    is_eager=True,
    expose_value=False,
    help="Print every key of such a file instead; no SCENARIO is needed.",
)


@click.command("schema", short_help="Print the JSON Schema of a file kind, for editors.")
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("--markdown", is_flag=True, help="Print every key as a Markdown table instead.")
def schema_(kind: str, markdown: bool) -> None:
    """Print the JSON Schema of a scenario, topology, plan or sweep file; editors that know TOML check files by it."""
    if markdown:
        _show_keys(kind, markdown)
    else:
        print_json(schema(kind))
