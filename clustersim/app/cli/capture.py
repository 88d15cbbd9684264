"""``clustersim capture``: measure this machine, by running ``torchrun`` on it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from clustersim.app.cli.common import OUT_FOLDER
from clustersim.core.errors import ClusterSimError, needs
from clustersim.core.units import parse_message_size, parse_time


@click.command(short_help="Measure this machine with PyTorch.")
@click.option("--out", type=OUT_FOLDER, required=True, help="The folder to write.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), default=1, help="How many ranks to start, one a GPU.")
@click.option("--budget", default="10min", help="How long it may take.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="What the ranks compute on.")
@click.option(
    "--backend",
    type=click.Choice(["nccl", "gloo", "mpi"]),
    help="What the ranks talk over.  [nccl on cuda, gloo on cpu]",
)
@click.option("--parts", help="What to measure: collectives, compute, steps; commas between.  [all]")
@click.option("--largest", help="Bytes of the largest collective.  [4G]")
@click.option("--share-gpu", is_flag=True, help="Let all ranks use one GPU, and talk over sockets.")
def capture(out: Path, nproc_per_node: int, share_gpu: bool, **options: str | None) -> None:
    """Measure collectives, compute and training steps on this machine with PyTorch; with --backend mpi only
    collectives, with mpi4py. `clustersim calibrate` fits a topology to the folder that this writes.

    On several nodes, start this by srun, a task for each rank, or the module itself on each by torchrun, or once by
    mpirun:

    torchrun --nnodes N --nproc-per-node 8 ... -m clustersim.calibrate.capture --out DIR
    """
    from clustersim.calibrate.capture.parts import free
    from clustersim.calibrate.capture.slurm import tasks_of

    mpi = options["backend"] == "mpi"
    if find_spec("mpi4py" if mpi else "torch") is None:
        message = "capture --backend mpi needs Open MPI and mpi4py: pip install mpi4py"
        raise ClusterSimError(message if mpi else needs("capture", "capture"))
    parse_time(options["budget"] or "")
    if options["largest"]:
        parse_message_size(options["largest"])
    free(out)
    tasks = tasks_of(os.environ)
    if tasks > 1 and nproc_per_node > 1:
        raise ClusterSimError(
            f"srun started {tasks} tasks, each of them a rank; leave out --nproc-per-node {nproc_per_node}"
        )
    if not mpi:
        _check(options["backend"], options["device"] or "cuda", nproc_per_node, share_gpu)
    flags = [word for name, value in options.items() if value for word in (f"--{name}", value)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc_per_node)]
    if tasks > 1:  # each task is a rank
        launcher = [sys.executable]
    elif mpi:  # settings go by the environment, OMPI_MCA_btl=tcp,self
        launcher = ["mpirun", "--oversubscribe", "-n", str(nproc_per_node), sys.executable]
    command = [*launcher, "-m", "clustersim.calibrate.capture", "--out", str(out), *flags]
    code = _launched([*command, *(["--share-gpu"] if share_gpu else [])], out)
    if code:
        left = f"what was measured before is in {out}" if out.exists() else "nothing was measured"
        raise ClusterSimError(f"the capture ended with {code}; {left}")
    click.echo(str(out))


def _check(backend: str | None, device: str, ranks: int, share_gpu: bool) -> None:
    """Say here, in one line, what torchrun would end with in sixty. Raises :class:`ClusterSimError`."""
    import torch

    from clustersim.calibrate.capture.world import cards_for

    cards_for(torch, backend or ("nccl" if device == "cuda" else "gloo"), device, ranks, share_gpu)


def _launched(command: list[str], out: Path) -> int:
    """Run the launcher. Ctrl-C reaches it and the ranks as well: wait until they have stopped."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with subprocess.Popen(command) as launcher:
            try:
                return launcher.wait()
            except KeyboardInterrupt:
                click.echo(f"interrupted; what was measured before is in {out}", err=True)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(timeout=30)
                raise
    except FileNotFoundError:
        raise ClusterSimError(f"capture needs {command[0]}; of Open MPI: apt-get install openmpi-bin") from None
    finally:
        signal.signal(signal.SIGINT, before)
