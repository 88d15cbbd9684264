"""What a new file is made of: the machine that was meant, its number format, the model, and how a file is written."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import click

from clustersim.errors import ClusterSimError
from clustersim.outputs import fresh, writing


def machine_of(gpu: str | None, topology: str | None) -> str:
    """The topology asked for; of a GPU, the plainest shipped machine that carries it."""
    from clustersim import fabrics
    from clustersim.device import device_from_text
    from clustersim.paths import shipped

    if topology is not None:
        fabrics.load(topology)
        return topology
    named, known = gpu or "H100", shipped("topologies")
    if (plain := f"hgx-{named.lower()}") in known:  # A100 alone is the 80 GB one there, and the 40 GB one elsewhere
        return plain
    wanted = device_from_text(named).name
    carry = [name for name in known if devices(name) == {wanted}]
    if not carry:
        raise ClusterSimError(f"--gpu {gpu}: no shipped machine carries {wanted}; clustersim list topologies")
    return min(carry, key=lambda name: (not name.startswith(("dgx", "hgx", "pcie")), len(name)))


def devices(topology: str) -> set[str]:
    """GPUs of a machine."""
    from clustersim import fabrics

    return {kind.device for kind in fabrics.load(topology).node_types}


def dtype_of(topology: str) -> str:
    """bf16, or fp16 on GPUs without it."""
    from clustersim.device import device

    return "bf16" if all("bf16" in device(name).peak for name in devices(topology)) else "fp16"


def model_line(name: str, file: Path) -> str:
    """The line of ``[model]`` that names it; a path is written relative to the file."""
    from clustersim.models.catalog import model

    path = Path(name)
    if path.suffix != ".json" and not path.is_dir():
        return f'name = "{model(name).name}"'
    return f'hf_config = "{os.path.relpath(path, file.parent)}"'


def as_written(machine: str, file: Path) -> str:
    """A machine's name, or its path from the folder of the file that names it."""
    return os.path.relpath(machine, file.parent) if machine.endswith(".toml") else machine


def has_tokens(name: str) -> bool:
    """Whether a model reads text."""
    from clustersim.models.catalog import file

    return file(name) is not None


def fits(text: str, file: Path) -> bool:
    """Whether a GPU has the memory that a scenario of this text, in this file, needs."""
    from clustersim.scenario import from_table
    from clustersim.scenario.held import held

    found = held(from_table(tomllib.loads(text), file))
    return found.use.fits(found.card).ok


def write_new(file: Path, text: str, load: Callable[[Path], object], *, said: bool = True) -> None:
    """The file, if it can be read back as what it is; an existing one is left alone."""
    if file.exists():
        raise ClusterSimError(f"{file}: is there already; choose another name")
    if file.suffix != ".toml":
        raise ClusterSimError(f"{file}: these files end in .toml")
    with writing(file), fresh(file) as path:
        path.write_text(re.sub(r"\n\n\n+", "\n\n", text), encoding="utf-8")
        load(path)
    if said:
        click.echo(f"wrote {file}")
