"""1F1B by hand: its order, its times by arithmetic alone, a Program of it, and a recorded folder of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from toy import mesh, plan, star

from clustersim.core.label import Label
from clustersim.core.program import Compute, Program, Recv, Role, Send
from clustersim.core.timeline import Timeline
from clustersim.engine import simulate

Order = list[tuple[str, int]]


def one_f_one_b(p: int, m: int, stage: int) -> Order:
    """Actions of a stage: (F or B, micro-batch)."""
    warm = min(m, p - 1 - stage)
    order = [("F", i) for i in range(warm)]
    for i in range(m - warm):
        order += [("F", warm + i), ("B", i)]
    return order + [("B", i) for i in range(m - warm, m)]


def gpipe(p: int, m: int, stage: int) -> Order:
    """All forwards, then all backwards."""
    return [("F", i) for i in range(m)] + [("B", i) for i in range(m)]


def simulated(
    forward: Sequence[float],
    backward: Sequence[float],
    m: int,
    *,
    order: Callable[[int, int, int], Order] = one_f_one_b,
    replicas: int = 1,
    steps: int = 1,
    transfer: float = 0.0,
    tail: float = 0.0,
) -> Timeline:
    """A run of one F and one B op per stage and micro-batch, each message ``transfer`` seconds, ``tail`` at the end."""
    p = len(forward)
    roles = []
    for s in range(p):
        ops: list[object] = []
        ranks = np.arange(s * replicas, (s + 1) * replicas, dtype=np.int64)
        for step in range(steps):
            for action, i in order(p, m, s):
                ahead = 1 if action == "F" else -1
                about = {"step": step, "label": Label(action=action, microbatch=i, chunk=0, dim="pp")}
                after: tuple[int, ...] = ()
                if 0 <= s - ahead < p:
                    ops.append(Recv("recv", 1.0, ranks - ahead * replicas, f"recv {action}", (), action, **about))
                    after = (len(ops) - 1,)
                seconds = (forward if action == "F" else backward)[s]
                label = Label("layers", action, i, 0)
                phase = "forward" if action == "F" else "backward"
                ops.append(Compute(phase, float(seconds), after=after, phase=phase, step=step, label=label))
                if 0 <= s + ahead < p:
                    peer = ranks + ahead * replicas
                    ops.append(Send("send", 1.0, peer, f"send {action}", (len(ops) - 1,), action, **about))
            if tail:
                ops.append(Compute("optimizer", tail, phase="optimizer", step=step))
        roles.append(Role(f"stage {s}", ranks, tuple(ops), stage=s))
    topology = star(p * replicas)
    return simulate(
        Program(p * replicas, tuple(roles)),
        topology,
        mesh(topology),
        planner=lambda request, group: plan(request, [], transfer),
    )


def spans(forward: Sequence[float], backward: Sequence[float], m: int) -> list[tuple[int, str, int, float, float]]:
    """(stage, action, micro-batch, start, end) of 1F1B with free transfers, by arithmetic alone."""
    p = len(forward)
    end = {}
    free = [0.0] * p
    left = [one_f_one_b(p, m, s) for s in range(p)]
    found = []
    while any(left):
        for s in range(p):
            while left[s]:
                action, i = left[s][0]
                source = s - 1 if action == "F" else s + 1
                if 0 <= source < p and (source, action, i) not in end:
                    break
                start = max(free[s], end.get((source, action, i), 0.0))
                free[s] = end[s, action, i] = start + (forward if action == "F" else backward)[s]
                found.append((s, action, i, start, free[s]))
                left[s].pop(0)
    return found


def record(folder: Path, forward: Sequence[float], backward: Sequence[float], m: int, steps: int = 3) -> Path:
    """The folder that a recorder would have written of it, in milliseconds; the first step is warm-up."""
    folder.mkdir(exist_ok=True)
    done = spans(forward, backward, m)
    p = len(forward)
    length = max(end for *_, end in done)
    ops = ["step,rank,op,microbatch,start_ms,end_ms"]
    lengths = ["step,rank,schedule_ms"]
    for step in range(1, steps + 1):
        late = 1000.0 * length if step == 1 else 0.0
        ops += [f"{step},{s},{a},{i},{1000 * b + late:.6f},{1000 * e + late:.6f}" for s, a, i, b, e in done]
        lengths += [f"{step},{s},{1000 * length + late:.6f}" for s in range(p)]
    (folder / "ops.csv").write_text("\n".join(ops) + "\n")
    (folder / "steps.csv").write_text("\n".join(lengths) + "\n")
    return folder
