"""A world that ``mpirun`` started: the same rows over Open MPI, with mpi4py and numpy buffers instead of PyTorch.

    mpirun -n 4 --mca btl tcp,self python -m clustersim.calibrate.capture --backend mpi --device cpu ...

What ``--mca`` says of transports and forced algorithms is in the environment of every rank and goes into the rows; a
run with forced algorithms measures their kinds alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from clustersim.calibrate.capture.parts import CaptureRow
from clustersim.calibrate.capture.world import World
from clustersim.collectives.mpi_rules import kinds
from clustersim.core.errors import ClusterSimError

FORCED = "OMPI_MCA_coll_tuned_{}_algorithm"
"""Environment variable that ``--mca coll_tuned_NAME_algorithm K`` sets; it counts with
``coll_tuned_use_dynamic_rules``."""


def forced(environment: Mapping[str, str]) -> dict[str, str]:
    """The algorithm that the environment forces, by kind.

    >>> forced({"OMPI_MCA_coll_tuned_bcast_algorithm": "6", "OMPI_MCA_coll_tuned_use_dynamic_rules": "1"})
    {'broadcast': '6'}
    """
    if environment.get("OMPI_MCA_coll_tuned_use_dynamic_rules", "0").lower() not in {"1", "true", "yes"}:
        return {}
    forced_values = {kind: environment.get(FORCED.format(rules.variable), "0") for kind, rules in kinds().items()}
    return {kind: value for kind, value in forced_values.items() if value not in {"0", "ignore"}}


def transport(environment: Mapping[str, str]) -> str:
    """How ranks of one node talk: ``"tcp"``, ``"vader"`` (shared memory, single copies) or ``"vader/none"`` (double).

    >>> transport({"OMPI_MCA_btl": "tcp,self"}), transport({})
    ('tcp', 'vader')
    """
    if "tcp" in re.split("[,^]", environment.get("OMPI_MCA_btl", "")):
        return "tcp"
    return "vader/none" if environment.get("OMPI_MCA_btl_vader_single_copy_mechanism") == "none" else "vader"


@dataclass
class MpiWorld(World):
    """This process among those of ``mpirun``; ``control`` is a communicator of its own."""

    mpi: Any = None

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        return list(self.control.allgather(value))

    def told(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.control.bcast(value, root=0)

    def wait(self) -> None:
        """Until every rank is here."""
        self.control.Barrier()

    def group(self, ranks: list[int]) -> Any:
        """A communicator of these ranks."""
        return self.mpi.COMM_WORLD.Create(self.mpi.COMM_WORLD.Get_group().Incl(ranks))

    def kinds(self) -> tuple[str, ...]:
        """What is measured where not everything is: kinds with a forced algorithm."""
        return tuple(forced(os.environ))

    def setting(self, kind: str) -> CaptureRow:
        """What a row says of how it ran."""
        return {"transport": transport(os.environ), "algorithm": forced(os.environ).get(kind, "")}

    def versions(self) -> dict[str, str]:
        """Of the library that is measured."""
        version_words = self.mpi.Get_library_version().split(",")[0].split()
        return {"mpi": " ".join(version_words[:3])}

    def close(self) -> None:
        """Leave in peace."""
        self.wait()

    def call(
        self, kind: str, size: int, comm: Any, ranks: tuple[int, ...], asynchronous: bool
    ) -> tuple[Callable[[], Any], Callable[[], int | None]]:
        """(the collective, how many elements came out wrong in its first call)."""
        n, position, total = len(ranks), ranks.index(self.rank), len(ranks) * (len(ranks) + 1) / 2.0
        count = max(1, size // 4 // n)
        part, many = np.full(count, position + 1.0, np.float32), np.full(count * n, position + 1.0, np.float32)
        send_buffer, out = (
            np.full(max(1, size // 4), position + 1.0, np.float32),
            np.zeros(max(count * n, size // 4), np.float32),
        )
        into, few = out[: len(send_buffer)], np.zeros_like(part)
        blocks = out[: count * n]
        calls: dict[str, tuple[Callable[[], Any], Any, float]] = {
            "all_reduce": (lambda: comm.Allreduce(send_buffer, into), into, total),
            "all_gather": (lambda: comm.Allgather(part, blocks), blocks[-1:], float(n)),
            "reduce_scatter": (lambda: comm.Reduce_scatter_block(many, few), few, total),
            "all_to_all": (lambda: comm.Alltoall(many, blocks), blocks[-1:], float(n)),
            "broadcast": (lambda: comm.Bcast(send_buffer, root=0), send_buffer, 1.0),
            "reduce": (
                lambda: comm.Reduce(send_buffer, into if position == 0 else None, root=0),
                into[: position == 0],
                total,
            ),
            "scatter": (lambda: comm.Scatter(many if position == 0 else None, few, root=0), few, 1.0),
            "gather": (
                lambda: comm.Gather(part, blocks if position == 0 else None, root=0),
                blocks[-1:][: position == 0],
                n,
            ),
            "sendrecv": (
                lambda: comm.Sendrecv(send_buffer, (position + 1) % n, 0, into, (position - 1) % n, 0),
                into,
                (position - 1) % n + 1.0,
            ),
            "barrier": (comm.Barrier, few[:0], 0.0),
        }
        run, result, right = calls[kind]
        return run, lambda: int((result != right).sum())


def mpi_world(quiet: bool) -> MpiWorld:
    """Join the others that ``mpirun`` started. Raises :class:`ClusterSimError` without mpi4py."""
    try:
        from mpi4py import MPI  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ClusterSimError("capture --backend mpi needs mpi4py and Open MPI: pip install mpi4py") from None
    comm = MPI.COMM_WORLD
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    return MpiWorld(
        None,
        comm.rank,
        comm.size,
        local.rank,
        local.size,
        "mpi",
        SimpleNamespace(type="cpu"),
        control=comm.Dup(),
        quiet=quiet,
        mpi=MPI,
    )
