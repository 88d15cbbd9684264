"""The job that `tests/data/traces/gloo_1_2` and `gloo_et` are recordings of: DDP over Gloo, one thread a rank.

    torchrun --nproc-per-node 2 tests/gloo_job.py FOLDER --bucket 1

writes `rankN.json.gz`, and with `--et` the execution trace of the same steps, `etN.json.gz`. `gloo_1_2` is of torch
2.13 on a machine of two cores that others used: one rank, two, and two with buckets of 4 MiB (`one`, `two`,
`two_small`), one after another. `gloo_et` is `--et --steps 1 --width 64 --layers 3 --batch 8 --bucket 0.03`. Host names
are replaced.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import torch
from torch import distributed, nn
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--et", action="store_true")
    for name, value in (("steps", 8), ("width", 1536), ("layers", 2), ("batch", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--bucket", type=float, default=25.0)
    said = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    said.folder.mkdir(exist_ok=True)
    layers = [layer for _ in range(said.layers) for layer in (nn.Linear(said.width, said.width), nn.GELU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=said.bucket)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = torch.randn(said.batch, said.width)
    observer = ExecutionTraceObserver()
    if said.et:
        observer.register_callback(str(said.folder / f"et{rank}.json"))
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=WARM_UP, active=said.steps),
        record_shapes=True,
        execution_trace_observer=observer if said.et else None,
        on_trace_ready=lambda done: done.export_chrome_trace(str(said.folder / f"rank{rank}.json")),
    ) as profiler:
        for _ in range(WARM_UP + said.steps):
            optimizer.zero_grad()
            model(samples).square().mean().backward()
            optimizer.step()
            profiler.step()
    if said.et:
        observer.unregister_callback()
    distributed.destroy_process_group()
    for file in said.folder.glob(f"*{rank}.json"):
        told = json.loads(file.read_text())
        told |= {"host_name": "host"} if "host_name" in told else {}
        file.with_suffix(".json.gz").write_bytes(gzip.compress(json.dumps(told).encode(), mtime=0))
        file.unlink()


if __name__ == "__main__":
    main()
