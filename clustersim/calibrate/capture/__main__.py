"""``torchrun ... -m clustersim.calibrate.capture --out DIR``: one process of a capture."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from clustersim.calibrate.capture.collectives import LARGEST, capture_collectives
from clustersim.calibrate.capture.compute import capture_compute
from clustersim.calibrate.capture.mpi import mpi_world
from clustersim.calibrate.capture.parts import Budget, CaptureFile, free
from clustersim.calibrate.capture.provenance import write_provenance
from clustersim.calibrate.capture.steps import capture_steps
from clustersim.calibrate.capture.world import World, join_world
from clustersim.core.errors import ClusterSimError
from clustersim.core.units import parse_message_size, parse_time

SHARES = {"collectives": 0.5, "compute": 0.3, "steps": 1.0}
"""Of the time that is left when a part begins."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Raises SystemExit for one it cannot read."""
    read = argparse.ArgumentParser(prog="python -m clustersim.calibrate.capture", description=__doc__)
    read.add_argument("--out", type=Path, required=True, help="the folder to write")
    read.add_argument("--budget", default="10min", help="wall-clock time, such as 90s or 10min (default: 10min)")
    read.add_argument("--backend", choices=["nccl", "gloo", "mpi"], help="default: nccl on cuda, gloo on cpu")
    read.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    read.add_argument("--parts", default=",".join(SHARES), help="what to measure, of: " + ", ".join(SHARES))
    read.add_argument("--largest", default=str(LARGEST), help="largest collective (default: 4G)")
    read.add_argument("--share-gpu", action="store_true", help="let ranks share one card, over sockets (NCCL_HOSTID)")
    read.add_argument("--quiet", action="store_true", help="say nothing of the progress")
    return read.parse_args(argv)


def capture(options: argparse.Namespace) -> None:
    """Measure what was asked for. Raises :class:`ClusterSimError`."""
    seconds = parse_time(options.budget)
    largest = parse_message_size(options.largest)
    parts = [name for name in options.parts.split(",") if name]
    if unknown := [name for name in parts if name not in SHARES]:
        raise ClusterSimError(f"--parts: no part {unknown[0]!r}; known: {', '.join(SHARES)}")
    free(options.out)
    budget = Budget(seconds)
    backend = options.backend or ("nccl" if options.device == "cuda" else "gloo")
    world = _joined(options, backend, parts, seconds)
    try:
        _measure(world, options, parts, budget, largest)
    finally:
        world.close()


def _joined(options: argparse.Namespace, backend: str, parts: list[str], seconds: float) -> World:
    """The world of torchrun, or of mpirun. Raises :class:`ClusterSimError` for what MPI's does not measure."""
    if backend != "mpi":
        return join_world(backend, options.device, options.share_gpu, seconds, quiet=options.quiet)
    if options.device != "cpu" or parts != ["collectives"]:
        raise ClusterSimError(
            "--backend mpi measures --parts collectives on --device cpu; the other parts are PyTorch's"
        )
    return mpi_world(options.quiet)


def _measure(world: World, options: argparse.Namespace, parts: list[str], budget: Budget, largest: int) -> None:
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterSimError(f"{options.out}: cannot be written: {error.strerror}") from None
    write_provenance(
        world,
        options.out,
        {"budget": options.budget, "parts": parts, "largest": largest, "share_gpu": options.share_gpu},
    )
    for name in parts:
        part = CaptureFile(options.out if world.rank == 0 else None, name, world.said())
        seconds = world.told(budget.left * (SHARES[name] if name != parts[-1] else 1.0))
        if name == "collectives":
            capture_collectives(world, part, seconds, largest)
        elif name == "compute":
            capture_compute(world, part, seconds)
        else:
            capture_steps(world, part, options.out, seconds)
        part.done()
        world.say(f"{name}: {part.rows} lines")


def main() -> None:
    """One process: exit code 2 with one line for what cannot be done."""
    # Names of collectives that newer versions rename still exist in all of them.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    try:
        capture(arguments())
    except (ClusterSimError, RuntimeError, OSError) as error:
        print(f"error: rank {os.environ.get('RANK', '0')}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        # A collective that others still wait in must not keep this process: leave at once, they follow.
        os._exit(2)
    except KeyboardInterrupt:  # every rank gets it; what is on disk stays
        os._exit(130)


if __name__ == "__main__":
    main()
