"""Part (d): what the figures were measured on: versions, settings, GPUs, their wiring and clocks, the host."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path

from clustersim.calibrate.capture.parts import VERSION, CaptureRow, write_whole
from clustersim.calibrate.capture.world import World

SETTINGS = (
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "UCX_",
    "FI_",
    "OFI_",
    "KMP_",
    "OMPI_MCA_btl",
    "OMPI_MCA_coll",
    "OMPI_MCA_pml",
)
"""Beginnings of environment variables that change times; no others are written down."""


def write_provenance(world: World, folder: Path, options: CaptureRow) -> None:
    """``provenance.json``, with one entry per machine; hosts are numbered, not named."""
    world.say("versions, clocks and wiring")
    own_machine = _machine(world) if world.local_rank == 0 else None
    machines = [m for m in world.gather(own_machine) if m is not None]
    if world.rank == 0:
        document = {
            "clustersim_capture": VERSION,
            "part": "provenance",
            "asked": options,
            **world.said(),
            "ranks_per_node": world.local_size,
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "machines": machines,
        }
        write_whole(folder / "provenance.json", json.dumps(document, indent=2, default=str).encode() + b"\n")


def _machine(world: World) -> CaptureRow:
    torch = world.torch
    return {
        "versions": {"python": platform.python_version(), **world.versions(), "kernel": platform.release()},
        "threads": torch.get_num_threads() if torch else 1,
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS)},
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if world.on_gpu else [],
        "topo": _output("nvidia-smi", "topo", "-m") if world.on_gpu else "",
        "clocks": _output(
            "nvidia-smi",
            "--format=csv",
            "--query-gpu=index,name,driver_version,clocks.sm,clocks.mem,"
            "clocks.max.sm,power.draw,power.limit,temperature.gpu,pcie.link.gen.current,"
            "pcie.link.width.current",
        )
        if world.on_gpu
        else "",
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not available: {error}"
    return done.stdout or f"not available: {done.stderr.strip()}"
