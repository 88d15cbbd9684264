"""Record the traces of lesson 15 on two CPU cores: PyTorch's own pipeline over Gloo, and a step of tiny operators.

    python notebooks/traces/record.py pipeline 4 4 notebooks/traces/pipeline_4_4
    python notebooks/traces/record.py pipeline 6 2 notebooks/traces/pipeline_6_2
    python notebooks/traces/record.py tiny 64 notebooks/traces/tiny_64.json.gz

Files are what PyTorch's profiler writes, without what tells one machine from another (:func:`scrubbed`).
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.profiler import ProfilerActivity, profile, schedule

PATCH, WIDTH, TOKENS, WORDS, MICROBATCHES = 192, 256, 128, 12288, 8
STEPS = 3
KEPT = {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
ARGS = {"Input Dims", "Input type"}
SHAPED = {"aten::linear", "aten::mm", "aten::addmm"}


class Block(nn.Module):
    """A transformer's block: attention of four heads, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(n, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, t, -1))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def stage_of(rank: int, blocks: list[int]) -> nn.Module:
    """The first stage has the layer that patches of a picture go through, the last one the output layer."""
    parts: list[nn.Module] = [Block() for _ in range(blocks[rank])]
    if rank == 0:
        parts.insert(0, nn.Linear(PATCH, WIDTH))
    if rank == len(blocks) - 1:
        parts += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)]
    return nn.Sequential(*parts)


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def profiled() -> profile:
    """Three steps to warm up, then those that are kept."""
    when = schedule(wait=2, warmup=1, active=STEPS)
    return profile(activities=[ProfilerActivity.CPU], schedule=when, record_shapes=True)


def pipeline(rank: int, blocks: list[int], folder: str, meeting: str) -> None:
    """One stage of a pipeline with eight micro-batches of one sequence, 1F1B."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=len(blocks))
    model = stage_of(rank, blocks)
    stage = PipelineStage(model, rank, len(blocks), torch.device("cpu"))
    order = ScheduleInterleaved1F1B([stage], MICROBATCHES, loss_fn=loss_of)
    adam = torch.optim.AdamW(model.parameters(), fused=True)
    patches, words = torch.randn(MICROBATCHES, TOKENS, PATCH), torch.randint(WORDS, (MICROBATCHES, TOKENS))
    with profiled() as seen:
        for _ in range(3 + STEPS):
            adam.zero_grad()
            order.step(patches) if rank == 0 else order.step(target=words)
            adam.step()
            seen.step()
    export(seen, Path(folder) / f"rank{rank}.json.gz")
    dist.destroy_process_group()


def tiny(samples: int, file: Path) -> None:
    """A narrow MLP of 24 layers, with an optimizer that takes one parameter after the other."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(24) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())))
    adam = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.randn(samples, 64)
    with profiled() as seen:
        for _ in range(3 + STEPS):
            adam.zero_grad()
            model(x).square().mean().backward()
            adam.step()
            seen.step()
    export(seen, file)


def export(seen: profile, file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(raw))
        trace = scrubbed(json.loads(raw.read_text()))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), 9, mtime=0))


def scrubbed(trace: dict) -> dict:
    """Events with their shapes, and who of how many it was; no names of hosts, paths or processes.

    Of operators that call others only the outermost stays: a tenth of the file, and the same time.
    """
    events = []
    until: dict[object, float] = {}
    for event in sorted(trace["traceEvents"], key=lambda e: (e.get("ts", 0.0), -e.get("dur", 0.0))):
        if event.get("cat") == "cpu_op" and event["name"].startswith("aten::"):
            inside = event["ts"] < until.get(event["tid"], -1.0)
            until[event["tid"]] = max(until.get(event["tid"], -1.0), event["ts"] + event["dur"])
        else:
            inside = event.get("cat") != "user_annotation"
        if not inside:
            events.append({key: value for key, value in event.items() if key in KEPT} | {"pid": 1})
    threads = {tid: i for i, tid in enumerate(dict.fromkeys(event["tid"] for event in events))}
    for event in events:
        event["tid"] = threads[event["tid"]]
        shapes = event["name"] in SHAPED or event["name"].startswith("gloo:")
        event["args"] = {key: value for key, value in event.get("args", {}).items() if key in ARGS and shapes}
    kept = {key: trace[key] for key in ("schemaVersion", "baseTimeNanoseconds", "displayTimeUnit") if key in trace}
    told = trace.get("distributedInfo")
    if told:
        kept["distributedInfo"] = {key: told[key] for key in ("backend", "rank", "world_size")}
    return {**kept, "hostName": "two-cores", "traceEvents": events}


def main() -> None:
    what, *given = sys.argv[1:]
    if what == "tiny":
        return tiny(int(given[0]), Path(given[1]))
    *blocks, folder = given
    meeting = tempfile.mktemp()
    arguments = ([int(n) for n in blocks], folder, meeting)
    torch.multiprocessing.spawn(pipeline, args=arguments, nprocs=len(blocks))
    os.path.exists(meeting) and os.unlink(meeting)
    return None


if __name__ == "__main__":
    main()
