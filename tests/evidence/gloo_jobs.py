"""The programs that :mod:`tests.evidence.gloo_faults` runs: one that hangs, one that is slow, with faults by name.

A job adds up tensors over Gloo, step by step. The odd rank of step ``at`` does what its fault says. Calls that differ
end processes of Gloo at once, so there the odd one calls first, and the recorder is written before anybody waits.
"""

from __future__ import annotations

from typing import NamedTuple

HANGING = """
import datetime, os, signal, sys, threading, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json

fault, odd, at, folder, timeout = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5])
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20 * timeout))
pair = dist.new_group([odd, (odd + 1) % 4])
DIFFERS = fault.startswith(("other", "uneven"))

def dump():
    path = os.path.join(folder, f"trace_rank_{rank}.json")
    part = os.path.join(folder, f".{rank}")
    with open(part, "wb") as file:
        file.write(_dump_fr_trace_json(True, False))
    os.replace(part, path)

def watch():
    while time.monotonic() - last[0] < timeout:
        time.sleep(0.05)
    dump()
    time.sleep(timeout)
    os.abort()  # as NCCL's watchdog does

last = [time.monotonic()]
dist.all_reduce(torch.ones(8))
threading.Thread(target=watch, daemon=True).start()

def add(tensor, group=None):
    return dist.all_reduce(tensor, async_op=True, group=group)

def gather(tensor):
    return dist.all_gather([torch.empty_like(tensor) for _ in range(4)], tensor, async_op=True)

def calls(step):
    big, small = torch.ones(1024), torch.ones(256)
    usual = [lambda: add(big), lambda: add(small)]
    if step != at or rank != odd:
        return usual
    first = {
        "other_kind_broadcast": lambda: dist.broadcast(big, 0, async_op=True),
        "other_kind_gather": lambda: gather(big),
        "other_size_half": lambda: add(torch.ones(512)),
        "other_size_one_less": lambda: add(torch.ones(1023)),
        "other_type_double": lambda: add(big.double()),
        "other_type_half": lambda: add(big.bfloat16()),
        "other_group_pair": lambda: add(big, pair),
        "uneven_batches_barrier": lambda: dist.barrier(async_op=True),
    }
    if fault in first:
        return [first[fault], *(usual[1:] if fault.startswith(("other_k", "other_s", "other_t")) else [])]
    return usual[::-1] if fault == "other_order_swapped" else usual

def strike():
    if fault == "missing_call_sleep":
        time.sleep(100 * timeout)
    if fault == "missing_call_lock":
        lock = threading.Lock()
        lock.acquire(), lock.acquire()
    if fault == "missing_call_loop":
        while True:
            sum(range(10**5))
    if fault == "stopped_rank_signal":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "dead_rank_killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "dead_rank_segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "dead_rank_exception":
        raise MemoryError("out of memory")
    if fault == "dead_rank_exit":
        os._exit(7)

for step in range(at + 3):
    if step == at:
        time.sleep(0.5)  # Gloo's threads tell late that earlier calls have ended
    if step == at and rank != odd and DIFFERS:
        while not os.path.exists(os.path.join(folder, f"trace_rank_{odd}.json")):
            time.sleep(0.02)
    if step == at and rank == odd:
        strike()
    try:
        works = [call() for call in calls(step)]
        if step == at and DIFFERS:
            dump()
        for work in works:
            work.wait()
    except Exception as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        time.sleep(100 * timeout)
    last[0] = time.monotonic()
time.sleep(100 * timeout)
"""

SLOW = """
import os, sys, time
from datetime import datetime
import torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

fault, odd, at, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.set_num_threads(1)
left, right = torch.randn(256, 256), torch.randn(256, 256)
gradient = torch.ones(1 << 16)
STEPS = 8

def times(step):
    if rank != odd or step < at:
        return 1.0
    return {"slow_gpu_always": 3.0, "hot_gpu_more": 1.0 + min(step - at + 1, 4)}.get(fault, 1.0)

def pause(step):
    mine = rank == odd and step >= at
    if fault == "slow_data_sleep" and mine:
        time.sleep(0.25)
    if fault == "garbage_collection_sleep" and mine and (step - at) % 2 == 0:
        time.sleep(0.3)
    if fault == "blocking_checkpoint_save" and step >= at and (step - at) % 2 == 0:
        began = time.monotonic()
        with open(os.path.join(folder, f"saved_{rank}.pt"), "wb") as file:
            torch.save(gradient, file)
        time.sleep(0.3)
        dist.barrier()
        took = time.monotonic() - began
        log(f"Finished saving the checkpoint (or staging if async is enabled) in {took:.2f} seconds.")
        os.remove(os.path.join(folder, f"saved_{rank}.pt"))

def log(text):
    now = datetime.now()
    if rank == 0:
        with open(os.path.join(folder, "steps.log"), "a") as file:
            clock = f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d}"
            file.write(f"[titan] {clock} - root - INFO - {text}\\n")

def train(step):
    for _ in range(round(60 * times(step))):
        torch.mm(left, right)
    if fault == "ecc_stall_once" and rank == odd and step == at:
        big = torch.randn(1400, 1400)
        torch.mm(big, big)
        torch.mm(big, big)
    dist.all_reduce(gradient)

for _ in range(2):
    train(-1)
dist.barrier()
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
    for step in range(STEPS):
        pause(step)
        began = time.monotonic()
        with torch.profiler.record_function(f"ProfilerStep#{step}"):
            train(step)
        log(f"step: {step + 1:2d}  loss:  7.1234  memory: 1.00GiB(1.00%)  tps: 100  tflops: 1.00  mfu: 1.00%")
profiler.export_chrome_trace(os.path.join(folder, f"profile_rank_{rank}.json"))
dist.barrier()
"""


class RealFaultKind(NamedTuple):
    """A fault by name, the kind of ``[[incident]]`` that it is, and the program that it strikes."""

    fault: str
    kind: str
    program: str


_HANGS = (
    "missing_call_sleep",
    "missing_call_lock",
    "missing_call_loop",
    "stopped_rank_signal",
    "dead_rank_killed",
    "dead_rank_segfault",
    "dead_rank_exception",
    "dead_rank_exit",
    "other_kind_broadcast",
    "other_kind_gather",
    "other_size_half",
    "other_size_one_less",
    "other_type_double",
    "other_type_half",
    "other_order_swapped",
    "other_group_pair",
    "uneven_batches_barrier",
)
_SLOWS = (
    "slow_gpu_always",
    "slow_data_sleep",
    "garbage_collection_sleep",
    "blocking_checkpoint_save",
)


def _row(fault: str, program: str) -> RealFaultKind:
    from clustersim.scenario.file.incident_table import KINDS

    return RealFaultKind(fault, next(kind for kind in KINDS if fault.startswith(kind)), program)


REAL_FAULTS: dict[str, RealFaultKind] = {
    fault: _row(fault, program) for program, faults in ((HANGING, _HANGS), (SLOW, _SLOWS)) for fault in faults
}
"""Every fault that a real job of Gloo is struck by."""
