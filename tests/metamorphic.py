"""Random small scenarios, and what must hold of a run beside a run of something better: ``fuzz.py --physics 1000``.

A law compares the step of a scenario with that of the same Program on another machine, or of a better Program on the
same machine. Where a law may be broken by a true anomaly of the real system, :data:`ANOMALIES` names it, with the bound
and the reason; everything beyond is a violation.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
from hostile_documents import CONFIG, MOE_CONFIG

from clustersim import scenario
from clustersim.cluster import files as fabrics
from clustersim.collectives.volume import per_member
from clustersim.core.errors import ClusterSimError
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective, Compute, Recv, Send
from clustersim.scenario.result import Result
from clustersim.scenario.run.running import Prepared

SAME = 1e-9
"""Relative: rounding."""
VIOLATED = "violated"
PART = 50
"""Scenarios that a process plays one after another."""
CONFIGS = {"config.json": CONFIG, "moe.json": MOE_CONFIG, "dense.json": CONFIG | {"num_hidden_layers": 4}}

# ---- scenarios -------------------------------------------------------------------------------------------------------


def drawn(pick: Random) -> dict[str, Any]:
    """A small scenario of data parallelism, of a parameter server, or of a split model."""
    kind = pick.choice(["ddp", "ddp", "fsdp", "zero", "parameter_server", "split", "split", "split", "split"])
    topology = pick.choice(["dgx-1v", "hgx-a100", "hgx-h100", "pcie-a100"])
    cluster = {"topology": topology, "nodes": pick.choice([1, 2])}
    run = {"steps": 3, "jitter": 0.0, "backend": pick.choice(["nccl", "nccl", "ideal"])}
    if kind == "split":
        return _split(pick, cluster, run)
    cluster["gpus_per_node"] = pick.choice([1, 2, 4, 8])
    strategy: dict[str, Any] = {"kind": kind, "micro_batch_size": pick.choice([1, 4, 16])}
    if kind == "zero":
        strategy["zero_optimization"] = {"stage": pick.randint(1, 3)}
    elif kind == "ddp":
        strategy |= {"bucket_cap_mb": pick.choice([1, 25, 1000]), "gradient_accumulation_steps": pick.choice([1, 2])}
    elif kind == "parameter_server":
        strategy |= {"server": pick.choice(["cpu", "gpu"])}
        cluster["gpus_per_node"] = max(2, cluster["gpus_per_node"])
    model = pick.choice([{"name": "resnet18"}, *[{"hf_config": "config.json", "dtype": "bf16"}] * 3])
    return {"cluster": cluster, "model": model, "strategy": strategy, "run": run}


def _split(pick: Random, cluster: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    tp = pick.choice([1, 2])
    pp = pick.choice([1, 2, 4])
    cp = pick.choice([1, 1, 2])
    moe = pick.random() < 0.5
    parallel: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "microbatches": pick.choice([4, 8])}
    if tp > 1:
        parallel["sequence_parallel"] = moe or pick.random() < 0.5
    if moe:
        parallel |= {"ep": pick.choice([1, 2]), "dispatcher": pick.choice(["alltoall", "allgather"])}
        parallel["routing"] = pick.choice(["uniform", "balanced"])
    if pp > 1:
        parallel["schedule"] = pick.choice(["1f1b", "gpipe", "zb_h1", "interleaved"])
        if parallel["schedule"] == "interleaved":
            parallel["vpp"] = 2 if pp == 2 else 1
            parallel["schedule"] = "interleaved" if pp == 2 else "1f1b"
    if pick.random() < 0.5:
        parallel |= {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
    model = {"hf_config": "moe.json" if moe else "dense.json", "dtype": "bf16"}
    return {
        "cluster": cluster,
        "model": model,
        "strategy": {"kind": "ddp", "micro_batch_size": 1},
        "run": run,
        "parallel": parallel,
    }


# ---- better machines and better programs -----------------------------------------------------------------------------


def on(prepared: Prepared, **links: Any) -> Prepared:
    """The same on a machine with other links."""
    return replace(prepared, topology=replace(prepared.topology, **links))


def wider(p: Prepared) -> Prepared:
    """Every link with twice the bandwidth."""
    return on(p, link_bandwidth=p.topology.link_bandwidth * 2)


def nearer(p: Prepared) -> Prepared:
    """Every link with half the latency."""
    return on(p, link_latency=p.topology.link_latency / 2)


def rewritten(p: Prepared, change: Callable[[Any], Any]) -> Prepared:
    """The same with other ops."""
    roles = tuple(replace(role, ops=tuple(map(change, role.ops))) for role in p.program.roles)
    return replace(p, program=replace(p.program, roles=roles))


def lighter(p: Prepared) -> Prepared:
    """Every message and collective with half the bytes."""

    def half(op: Any) -> Any:
        moved = isinstance(op, Collective | Send | Recv)
        return msgspec.structs.replace(op, nbytes=op.nbytes / 2) if moved else op

    return rewritten(p, half)


def quicker(p: Prepared) -> Prepared:
    """Every kernel in half the time."""
    return rewritten(p, lambda op: msgspec.structs.replace(op, duration=op.duration / 2) if type(op) is Compute else op)


def with_idle_node(p: Prepared) -> Prepared:
    """One more node that nobody uses."""
    file = p.scenario.file.cluster
    return replace(p, topology=fabrics.load(file.topology, nodes=(file.nodes or 1) + 1))


def renumbered(p: Prepared) -> Prepared | None:
    """The nodes the other way round; None where there is one."""
    mesh = p.mesh
    per_node = p.topology.vertex_node
    order = list(dict.fromkeys(per_node[mesh.gpus].tolist()))
    if len(order) < 2:
        return None
    place = {node: i for i, node in enumerate(order)}
    gpus = [p.topology.node_gpus(node) for node in order]
    there = [place[int(per_node[gpu])] for gpu in mesh.gpus]
    if any(gpu not in gpus[i] for gpu, i in zip(mesh.gpus.tolist(), there, strict=True)):
        return None  # a server on a CPU
    turned = [gpus[-1 - i][list(gpus[i]).index(gpu)] for gpu, i in zip(mesh.gpus.tolist(), there, strict=True)]
    other = Mesh(np.array(turned), mesh.nproc_per_node, mesh.servers, mesh.dims)
    return replace(p, mesh=other)


def larger(p: Prepared) -> Prepared:
    """Twice the samples of a micro-batch."""
    return p.scenario.changed({"strategy.micro_batch_size": 2 * p.scenario.config.micro_batch_size}).prepare()


def bucketed(p: Prepared) -> Prepared | None:
    """Gradients in small buckets while backward goes on; None where they do not go all at once before."""
    if p.split is not None or p.scenario.table["strategy"].get("bucket_cap_mb") != 1000:
        return None
    return p.scenario.changed({"strategy.bucket_cap_mb": 25}).prepare()


# ---- laws ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Law:
    """``better`` makes of a Prepared another whose samples may not take longer, or (``same``) take as long."""

    name: str
    better: Callable[[Prepared], Prepared | None]
    same: bool = False


LAWS = (
    Law("twice the bandwidth is not slower", wider),
    Law("half the latency is not slower", nearer),
    Law("half the bytes are not slower", lighter),
    Law("kernels of half the time are not slower", quicker),
    Law("samples of a larger batch are not slower", larger),
    Law("buckets are not slower than one", bucketed),
    Law("an idle node changes nothing", with_idle_node, same=True),
    Law("nodes the other way round change nothing", renumbered, same=True),
)


def bytes_agree(result: Result) -> bool | None:
    """Whether what left the GPUs over links is what the formulas of the collectives say; None where the formula is not
    of what links carry: protocols with flags, a switch that adds, GPUs that pass on what is not theirs (in a DGX-1, and
    to the NIC of their rail)."""
    p = result.prepared
    links = result.timeline.links
    passed_on = p.topology.name == "dgx-1v" or (p.split is not None and p.mesh.n_nodes > 1)
    if p.backend != "ideal" or passed_on or p.mesh.servers or links is None:
        return None
    said = 0.0
    ops = result.timeline.per_op()
    for i, op in enumerate(result.timeline.ops):
        if op.kind == "send":
            said += op.nbytes * float(ops["ranks"][i])
        elif op.kind not in {"compute", "recv"}:
            n = int(op.detail["group_size"])
            each = op.detail.get("between")
            factor = each if each is not None else per_member(op.kind, n, str(op.detail["algorithm"]), 1)[0]
            said += op.nbytes * float(factor) * float(ops["ranks"][i])
    leaves = np.isin(p.topology.link_src, p.topology.gpus)
    return bool(abs(float(links.bytes_per_link()[leaves].sum()) - said) <= 1e-6 * max(said, 1.0))


def parts_add_up(result: Result) -> bool:
    """Whether no part of the step is below nothing and all together are the step."""
    shares = result.summary["phase_shares"]
    return abs(sum(shares.values()) - 1) < 1e-6 and min(shares.values()) >= -1e-9


def chosen(result: Result) -> list[tuple[Any, ...]]:
    """Which algorithm, protocol and channels each collective has."""
    keys = ("algorithm", "protocol", "n_channels")
    return [tuple(op.detail.get(key) for key in keys) for op in result.timeline.ops if "algorithm" in op.detail]


@dataclass(frozen=True)
class Anomaly:
    """What makes a better machine slower in truth, too: where (``of`` the run and the better one), by how much at most,
    and ``why``."""

    name: str
    of: Callable[[Result, Result], bool]
    most: float
    why: str


ANOMALIES = (
    Anomaly(
        "NCCL chose otherwise",
        lambda one, other: chosen(one) != chosen(other),
        math.inf,
        "NCCL takes what its own table of bandwidths and latencies says is fastest, which is not always the fastest "
        "(tuning.cc); pinned to the choice of the run, no law is broken",
    ),
    Anomaly(
        "workers that end together",
        lambda one, other: one.prepared.mesh.servers > 0,
        0.06,
        "a synchronous parameter server: workers that end together send together, and those that end apart fill the "
        "servers' pauses (tests/test_physics_slips.py)",
    ),
)


def explained(one: Result, other: Result, by: float) -> str:
    """The anomaly that a violation of ``by`` is, or :data:`VIOLATED`."""
    return next((row.name for row in ANOMALIES if by <= row.most and row.of(one, other)), VIOLATED)


def checks(table: dict[str, Any], folder: Path) -> Iterator[tuple[str, str, float]]:
    """(law, ``holds``, ``does not apply``, an anomaly's name or :data:`VIOLATED`, by how much)."""
    prepared = scenario.from_table(table, str(folder / "mine.toml")).prepare()
    result = prepared.run()
    base = float(result.summary["samples_per_s"])
    yield "the parts of a step add up to it", "holds" if parts_add_up(result) else VIOLATED, 0.0
    agree = bytes_agree(result)
    told = "does not apply" if agree is None else "holds" if agree else VIOLATED
    yield "bytes on links are the formula's", told, 0.0
    for law in LAWS:
        made = law.better(prepared)
        if made is None:
            yield law.name, "does not apply", 0.0
            continue
        other = made.run()
        by = base / float(other.summary["samples_per_s"]) - 1
        wrong = abs(by) if law.same else by
        yield law.name, "holds" if wrong <= SAME else explained(result, other, wrong), wrong


@dataclass
class Ends:
    """How often each law came to which end, and the scenario furthest from it."""

    played: int = 0
    refused: int = 0
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    worst: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)

    def add(self, law: str, end: str, by: float, which: str, times: int = 1) -> None:
        """Count."""
        self.counts[law, end] += times
        self.worst[law, end] = max(self.worst.get((law, end), (-1.0, "")), (by, which))


def played(budget: int, first: int) -> Ends:
    """So many scenarios, other ones for each ``first``."""
    pick = Random(first)
    ends = Ends()
    with tempfile.TemporaryDirectory() as made:
        for name, config in CONFIGS.items():
            (Path(made) / name).write_text(json.dumps(config))
        while ends.played < budget:
            table = drawn(pick)
            try:
                found = list(checks(table, Path(made)))
            except ClusterSimError:
                ends.refused += 1
                continue
            ends.played += 1
            for law, end, by in found:
                ends.add(law, end, by, json.dumps(table))
    return ends


def main(budget: int, first: int, jobs: int, say: Callable[[str], None]) -> int:
    """The table by law; 1 where a violation is not explained."""
    parts = -(-budget // PART)
    every = Ends()
    with ProcessPoolExecutor(jobs) as pool:
        sizes = [min(PART, budget - PART * i) for i in range(parts)]
        for one in pool.map(played, sizes, range(first * parts, (first + 1) * parts)):
            every.played, every.refused = every.played + one.played, every.refused + one.refused
            for (law, end), count in one.counts.items():
                every.add(law, end, *one.worst[law, end], count)
    say(f"{every.played} scenarios; {every.refused} that were drawn beside them are refused")
    for (law, end), count in sorted(every.counts.items()):
        by, which = every.worst[law, end]
        say(f"{law:<42}{end:<24}{count:>6}" + (f"  by at most {by:.2%}" if by > SAME else ""))
        if end == VIOLATED:
            say(f"    {which}")
    return int(any(end == VIOLATED for _, end in every.counts))
