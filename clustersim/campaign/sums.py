"""Sums of a plan on the back of an envelope: bytes and seconds of checkpoints, goodput from counts, what it costs."""

from __future__ import annotations

import math


def checkpoint_bytes(parameters: float, per_parameter: float = 14.0) -> float:
    """[bytes] of a whole checkpoint.

    ``per_parameter`` : 2 of weights alone; 14 of bf16 weights, an fp32 copy and Adam's two moments; 12 without the bf16
    weights; 16 with fp32 gradients. Sharding changes who writes, not how much.
    """
    return parameters * per_parameter


def bytes_per_parameter(nbytes: float, parameters: float) -> float:
    """What was saved of each parameter [bytes]."""
    return nbytes / parameters


def write_time(nbytes: float, bandwidth: float) -> float:
    """[s] to write a checkpoint; ``bandwidth`` [bytes/s] of all writers together."""
    return nbytes / bandwidth


def copy_to_host(nbytes: float, gpus: int, bandwidth: float) -> float:
    """[s] until a checkpoint, shared out evenly, is in host memory; ``bandwidth`` [bytes/s] of one GPU's PCIe."""
    return nbytes / (gpus * bandwidth)


def overhead(stall: float, every: float) -> float:
    """Share of time spent in stalls of which one follows each ``every`` of work: ``d/(tau + d)``.

    >>> round(overhead(40, 100 * 105.22), 5)
    0.00379
    """
    return stall / (every + stall)


def goodput(steps: float, step_s: float, elapsed: float) -> float:
    """Time of new steps over elapsed time: Llama 3's effective training time, Gemini's goodput."""
    return steps * step_s / elapsed


def loss_per_stop(goodput: float, stops: int, time: float) -> float:
    """The most that each stop may cost for this goodput; in ``time``'s unit."""
    return (1.0 - goodput) * time / stops


def lost_to_detection(stops: int, silent: float, timeout: float, time: float) -> float:
    """Share of time waited for a timeout, where a share ``silent`` of stops says nothing."""
    return stops * silent * timeout / time


def cost(gpus: int, hours: float, usd_per_gpu_hour: float) -> float:
    """[USD], of GPUs that are paid for whether they work or not."""
    return gpus * hours * usd_per_gpu_hour


def requeue_time(machines: float) -> float:
    """[s] until a whole job has its pods and images again: ``450 + 104 log2(n/128)``, a fit within 6 % of ByteRobust's
    454, 545, 635 and 768 s at 128, 256, 512 and 1,024 machines (arXiv:2509.16293 table 7)."""
    return 450.0 + 104.0 * math.log2(machines / 128.0)
