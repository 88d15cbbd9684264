"""The processes of a capture: who they are, how they agree, and how a call is timed on their device."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from clustersim.calibrate.capture.parts import CaptureRow
from clustersim.calibrate.capture.slurm import as_torchrun, own_card
from clustersim.core.errors import ClusterSimError, needs

SHARED_CARD = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""Beside a distinct NCCL_HOSTID per rank: what makes ranks on one card talk over sockets."""


LOOPS = (5, 25)
"""Fewest and most loops of calls."""

WINDOW = 2e-3
"""A loop's length [s] where calls are shorter: less than a time slice of Linux's scheduler (about 3 ms), so that other
work falls between loops, and enough calls for the host's clock."""


@dataclass
class World:
    """This process among the others.

    ``control`` is a Gloo group over the host, so that ranks agree without touching what is measured; None where one
    rank is alone.
    """

    torch: Any
    rank: int
    size: int
    local_rank: int
    local_size: int
    backend: str
    device: Any
    control: Any = None
    quiet: bool = False

    @property
    def nodes(self) -> int:
        """Machines."""
        return max(1, self.size // self.local_size)

    @property
    def on_gpu(self) -> bool:
        """Whether tensors live on a GPU."""
        return bool(self.device.type == "cuda")

    def say(self, text: str) -> None:
        """Progress, from rank 0 to stderr."""
        if self.rank == 0 and not self.quiet:
            print(f"capture: {text}", file=sys.stderr, flush=True)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.control is None:
            return [value]
        gathered: list[Any] = [None] * self.size
        self.torch.distributed.all_gather_object(gathered, value, group=self.control)
        return gathered

    def told(self, value: Any) -> Any:
        """Rank 0's value, on every rank: decisions (sizes, repeats, the budget) are its alone."""
        if self.control is None:
            return value
        box = [value]
        self.torch.distributed.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def wait(self) -> None:
        """Until every rank is here."""
        if self.control is not None:
            self.torch.distributed.barrier(group=self.control)

    def group(self, ranks: list[int]) -> Any:
        """A communicator of these ranks; every rank of the world asks for it."""
        return self.torch.distributed.new_group(ranks)

    def kinds(self) -> tuple[str, ...]:
        """What is measured where not everything is; empty for all."""
        return ()

    def said(self) -> CaptureRow:
        """What the head of a part says."""
        return {"backend": self.backend, "device": self.device.type, "ranks": self.size, "nodes": self.nodes}

    def setting(self, kind: str) -> CaptureRow:
        """What a row says of how it ran; nothing where the library alone chooses."""
        return {}

    def versions(self) -> dict[str, str]:
        """Of the libraries that are measured."""
        nccl = self.torch.cuda.nccl.version() if self.on_gpu and self.backend == "nccl" else ()
        return {"torch": self.torch.__version__, "cuda": self.torch.version.cuda, "nccl": ".".join(map(str, nccl))}

    def close(self) -> None:
        """Leave the others."""
        if self.size > 1:
            self.torch.distributed.destroy_process_group()

    def sync(self) -> None:
        """Until the device has done everything."""
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def loop(self, call: Callable[[], Any], repeats: int) -> float:
        """Seconds per call of ``repeats`` calls in a row: CUDA events on a GPU, the host's clock on a CPU."""
        if self.on_gpu:
            first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(repeats):
                call()
            last.record()
            last.synchronize()
            return float(first.elapsed_time(last)) * 1e-3 / repeats
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats

    def free_memory(self) -> float:
        """Bytes a rank may still take, the host's shared among the ranks on it."""
        if self.on_gpu:
            free = float(self.torch.cuda.mem_get_info()[0])
            return free if self.torch.cuda.device_count() >= self.local_size else free / self.local_size
        return _host_memory() / self.local_size


def _host_memory() -> float:
    """Bytes free on the host, or up to the container's limit where that is lower."""
    free = float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        used = (group / "memory.current").read_text()
    except OSError:
        return free
    return free if limit == "max" else min(free, float(limit) - float(used))


def agreed(world: World, failures: tuple[type[Exception], ...], make: Callable[[], Any]) -> tuple[Any, str]:
    """What this rank made, and what a rank says that could not, agreed over all."""
    result = None
    failed = ""
    try:
        result = make()
    except failures as error:
        failed = str(error).split("\n", 1)[0][:200] or type(error).__name__
    return result, next(filter(None, world.gather(failed)), "")


def repeats_for(once: float, seconds: float, most: int = 200) -> int:
    """How many calls of ``once`` seconds fill ``seconds``: between 2 and ``most``."""
    return int(min(most, max(2, seconds / max(once, 1e-7))))


def loops_for(once: float, between: float, seconds: float) -> tuple[int, int]:
    """(calls in a loop, loops) that fill ``seconds``: a call takes ``once``, two loops lie ``between`` apart.

    >>> loops_for(1e-4, 1e-4, 1.0), loops_for(1e-4, 1e-4, 0.0), loops_for(0.5, 1e-4, 4.0)
    ((20, 25), (2, 5), (2, 5))
    """
    least, most = LOOPS
    repeats = repeats_for(once, min(WINDOW, seconds / least))
    return repeats, int(min(most, max(least, seconds / (repeats * once + between))))


def join_world(
    backend: str, device: str, share_gpu: bool, patience: float, timeout: float = 120.0, quiet: bool = False
) -> World:
    """Join the others, as the environment of ``torchrun``, or of a plain ``srun``, says; alone where there is none.

    ``patience`` [s] is how long a rank may wait for one that measures alone, on top of ``timeout``, the longest that a
    collective may take.

    Raises :class:`ClusterSimError` for a backend or device that this machine does not have.
    """
    try:
        import torch
    except ImportError:
        raise ClusterSimError(needs("capture", "capture")) from None
    # The profiler reports its own start and stop otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    own = own_card(os.environ)
    os.environ |= as_torchrun(os.environ)
    rank = int(os.environ.get("RANK", "0"))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on = _device(torch, backend, device, local, 1 if own else local_size, share_gpu)
    world = World(torch, rank, size, local, local_size, backend, on, quiet=quiet)
    if size > 1:
        if share_gpu:
            os.environ |= {"NCCL_HOSTID": f"clustersim-{rank}", **SHARED_CARD}
        limit = timedelta(seconds=timeout)
        torch.distributed.init_process_group(backend, timeout=limit)
        world.control = torch.distributed.new_group(backend="gloo", timeout=limit + timedelta(seconds=patience))
    return world


def _device(torch: Any, backend: str, device: str, local: int, local_size: int, share: bool) -> Any:
    cards = cards_for(torch, backend, device, local_size, share)
    if device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
        return torch.device("cpu")
    torch.cuda.set_device(local % cards)
    return torch.device("cuda", local % cards)


def cards_for(torch: Any, backend: str, device: str, local_size: int, share: bool) -> int:
    """How many GPUs so many ranks of a machine have; 0 on CPUs. Raises :class:`ClusterSimError` where it cannot be."""
    if device == "cpu":
        if backend == "nccl":
            raise ClusterSimError("nccl needs --device cuda; on CPUs use --backend gloo")
        return 0
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not cards:
        raise ClusterSimError("this PyTorch sees no GPU; use --device cpu --backend gloo")
    if local_size > cards and not share:
        raise ClusterSimError(f"{local_size} ranks on {cards} GPU(s); start fewer, or let them share with --share-gpu")
    return int(cards)
