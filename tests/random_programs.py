"""Random Programs on random machines: everything the engine can be asked to play, in small.

:func:`case` draws from a ``random.Random``, so that one generator serves a seed and hypothesis (:func:`cases`). A
Program ends, unless two of its ops are swapped on purpose.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import msgspec
import numpy as np
import toy
from hypothesis import strategies as st
from random_ops import Draft, Numbers

from clustersim import collectives, scenario
from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Group, Plan, Request
from clustersim.core.label import Label
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective, Compute, Program, Recv, Send, Serve
from clustersim.core.topology import Topology
from clustersim.training.strategies import STRATEGIES

Planner = Callable[[Request, Group], Plan]


@dataclass(frozen=True, eq=False)
class Case:
    """A Program and what it is played on; ``options`` are the engine's, ``planner`` gives the same plans one by one."""

    kind: str
    program: Program
    topology: Topology
    mesh: Mesh
    planner: Planner
    options: dict[str, object]


def one_list(rng: Random, even: bool) -> Draft:
    """One role, whose collectives are of everybody."""
    draft = Draft(rng, [rng.randint(1, 8)], even)
    for _ in range(rng.randint(1, 14)):
        draft.step += rng.random() < 0.2
        if rng.random() < 0.5:
            draft.compute(0)
        else:
            draft.collective([0], whole=True)
    return draft


def groups(rng: Random, even: bool) -> Draft:
    """One role, groups of every size, ranks in none."""
    draft = Draft(rng, [rng.randint(2, 9)], even)
    for _ in range(rng.randint(1, 14)):
        draft.step += rng.random() < 0.2
        if rng.random() < 0.4:
            draft.compute(0)
        else:
            draft.collective([0])
    return draft


def mixed(rng: Random, even: bool) -> Draft:
    """Several roles: kernels, collectives inside and across them, sends."""
    return _mixed(rng, even, [rng.randint(1, 4) for _ in range(rng.randint(1, 4))])


def _mixed(rng: Random, even: bool, sizes: Sequence[int], streams: Sequence[str] = ()) -> Draft:
    draft = Draft(rng, sizes, even)
    draft.streams = streams or draft.streams
    for _ in range(rng.randint(2, 20)):
        draft.step += rng.random() < 0.1
        role = rng.randrange(len(sizes))
        what = rng.random()
        if what < 0.4:
            draft.compute(role)
        elif what < 0.55:
            draft.collective([role])
        elif what < 0.75:
            draft.collective(sorted(rng.sample(range(len(sizes)), rng.randint(1, len(sizes)))))
        else:
            draft.send(role, rng.randrange(len(sizes)))
    return draft


def pipeline(rng: Random, even: bool) -> Draft:
    """A role per stage: micro-batches forward and backward, tensor groups inside, gradients and ends across."""
    stages = rng.randint(2, 4)
    width = rng.choice([1, 2, 2, 3, 4])
    draft = Draft(rng, [width] * stages, even)
    batches = rng.randint(1, 4)
    tensor = rng.random() < 0.6
    nbytes = draft.numbers.nbytes()
    for draft.step in range(rng.randint(1, 2)):
        interleaved = rng.random() < 0.5
        for s in range(stages):
            for action, microbatch in _actions(s, stages, batches, interleaved):
                _stage(draft, s, action, microbatch, nbytes, tensor)
        if rng.random() < 0.7:
            for s in range(stages):
                draft.collective([s], whole=True)
        if rng.random() < 0.5:
            draft.collective([0, stages - 1])
    return draft


def _actions(stage: int, stages: int, batches: int, interleaved: bool) -> list[tuple[str, int]]:
    """All forwards before all backwards, or one of each in turn once the pipe is full."""
    first = min(batches, stages - stage - 1) if interleaved else batches
    order = [("F", m) for m in range(first)]
    for m in range(batches):
        order += [("F", first + m)] if first + m < batches else []
        order.append(("B", m))
    return order


def _stage(draft: Draft, s: int, action: str, microbatch: int, nbytes: float, tensor: bool) -> None:
    """One action of a stage: receive, compute, send."""
    ranks = draft.ranks
    forward = action == "F"
    last = len(draft.ranks) - 1
    source, target = (s - 1, s + 1) if forward else (s + 1, s - 1)
    label = Label("", action, microbatch, 0)
    way = "f" if forward else "b"
    after = ()
    if 0 <= source <= last:
        peer = np.array(ranks[source])
        op = Recv("recv", nbytes, peer, f"{way}_in", (), f"{action}{microbatch}", step=draft.step, label=label)
        after = (draft.add(s, op),)
    k = draft.compute(s, "compute", after)
    if tensor:
        group = np.array([ranks[s]])
        op = Collective("tp", "all_reduce", nbytes, group, "tp", (k,), step=draft.step, label=label)
        k = draft.compute(s, "compute", (draft.add(s, op),))
    if 0 <= target <= last:
        peer = np.array(ranks[target])
        op = Send("send", nbytes, peer, f"{way}_out", (k,), f"{action}{microbatch}", step=draft.step, label=label)
        draft.add(s, op)


def served(rng: Random, even: bool) -> Draft:
    """Workers push to servers and pull back; a server does first what comes first."""
    workers = rng.randint(1, 6)
    servers = rng.choice([[1], [1, 1], [2], [3, 1]])
    draft = Draft(rng, [workers, *servers], even)
    draft.numbers.idle = False  # who was first, where one came by a kernel of no length at the very same instant?
    nbytes = [draft.numbers.nbytes() for _ in servers]
    for draft.step in range(rng.randint(1, 3)):
        draft.compute(0)
        if rng.random() < 0.3:
            draft.collective([0])
        for k, size in enumerate(servers):
            for first in range(0, workers, size):
                _visit(draft, k + 1, range(first, min(first + size, workers)), nbytes[k])
        if rng.random() < 0.5:
            draft.compute(0, "compute", tuple(i for i, op in enumerate(draft.ops[0]) if isinstance(op, Recv)))
    return draft


def _visit(draft: Draft, role: int, clients: Sequence[int], nbytes: float) -> None:
    """Some workers, one for each server of a role, send their gradients there and get parameters back."""
    worker = draft.ranks[0]
    server = draft.ranks[role]
    rng = draft.rng
    to = {worker[client]: server[i] for i, client in enumerate(clients)}
    by = {b: a for a, b in to.items()}
    out = np.array([to.get(rank, -1) for rank in worker])
    back = np.array([by.get(rank, -1) for rank in server])
    name = f"{role}.{clients[0]}"
    step = draft.step
    kernels = [i for i, op in enumerate(draft.ops[0]) if isinstance(op, Compute)][-1:]
    draft.add(0, Send("push", nbytes, out, f"push{role}", tuple(kernels), "push", step=step))
    came = draft.add(role, Recv("push", nbytes, back, f"in{name}", (), "push", step=step))
    for _ in range(rng.choice([1, 1, 2])):
        duration = draft.numbers.per_rank(len(server))
        came = draft.add(role, Serve("serve", duration, rng.choice(["cpu", "cpu", "compute"]), (came,), step=step))
    draft.add(role, Send("pull", nbytes, back, f"out{name}", (came,), "pull", step=step))
    draft.add(0, Recv("pull", nbytes, out, f"pull{role}", (), "pull", step=step))


def swapped(rng: Random, even: bool) -> Draft:
    """Mixed roles, one of which does two things the other way round: often nobody can go on."""
    draft = _mixed(rng, even, [rng.randint(1, 2) for _ in range(2)], ["comm"])
    role = max(range(len(draft.ops)), key=lambda r: len(draft.ops[r]))
    ops = draft.ops[role]
    meets = [i for i, op in enumerate(ops) if not isinstance(op, Compute)]
    if len(meets) > 1:
        i, j = sorted(rng.sample(meets, 2))
        ops[i], ops[j] = ops[j], ops[i]
        for at in range(i, len(ops)):
            ops[at] = msgspec.structs.replace(ops[at], after=tuple(k for k in ops[at].after if k < i))
    return draft


def machine(rng: Random, even: bool) -> Draft:
    """Mixed roles on a machine of the catalogue, planned by a backend."""
    return _mixed(rng, even, rng.choice([[16], [8, 8], [4, 4, 4, 4], [1, 12, 3]]))


KINDS: dict[str, Callable[[Random, bool], Draft]] = {
    "one list, everybody meets": one_list,
    "one list, groups": groups,
    "several roles": mixed,
    "pipeline of stages": pipeline,
    "servers": served,
    "swapped ops": swapped,
    "real machine": machine,
}
"""What a Program is like."""


def case(rng: Random, kind: str | None = None) -> Case:
    """A random Program of a kind, with its machine."""
    kind = kind or rng.choice(list(KINDS))
    even = rng.random() < 0.25
    draft = KINDS[kind](rng, even)
    world = sum(map(len, draft.ranks))
    program = draft.program(stages=kind == "pipeline of stages", serves=range(1, 9) if kind == "servers" else ())
    if kind == "real machine":
        return _on_real(rng, _scaled(program))
    topology = toy.star(world, per_node=1)
    dead = rng.random() < 0.1
    bandwidth = [rng.choice([4.0, 8.0, 8.0, 16.0]) if even else rng.uniform(2.0, 20.0) for _ in range(2 * world)]
    if dead:
        bandwidth[rng.randrange(2 * world)] = 0.0
    topology = replace(topology, link_bandwidth=np.array(bandwidth))
    planner = _planner(rng.randrange(2**32), even, np.array(bandwidth), rng.random() < 0.3)
    return Case(kind, program, topology, toy.mesh(topology), planner, {"planner": planner})


def _planner(seed: int, even: bool, bandwidth: np.ndarray, blind: bool) -> Planner:
    """Any links, weights, ceilings and latencies, the same for the same question; ``blind`` to links that are dead."""

    def plan(request: Request, group: Group) -> Plan:
        rng = Random(zlib.crc32(repr((seed, request, group.gpus.tolist())).encode()))
        numbers = Numbers(rng, even)
        n = len(bandwidth) // 2
        links = {int(gpu) for gpu in group.gpus} if rng.random() < 0.7 else set()
        links |= {n + int(gpu) for gpu in group.gpus} if rng.random() < 0.5 else set()
        links |= set(rng.sample(range(2 * n), rng.randint(0, min(3, n))))
        crossed = np.array(sorted(link for link in links if blind or bandwidth[link] > 0), dtype=np.int64)
        if rng.random() < 0.3:
            rng.shuffle(crossed)
        weights = np.array([numbers.of(1.0, 1.0, 0.5, 2.0, 0.0) for _ in crossed])
        latency = rng.choice([0.0, numbers.of(0.25, 0.5)])
        ceiling = numbers.of(1.0, 4.0) if not weights.any() or rng.random() < 0.3 else np.inf
        nbytes = request.nbytes * rng.choice([1.0, 1.0, 1.0, 0.0])
        host = latency * rng.choice([0.0, 0.0, 0.5])
        return Plan(request.kind, "toy", "Simple", 1, nbytes, latency, crossed, weights, ceiling, host=host)

    return plan


def _scaled(program: Program) -> Program:
    """The same with times of milliseconds and MiB for bytes, as a real machine has them."""
    roles = []
    for role in program.roles:
        ops = []
        for op in role.ops:
            if isinstance(op, Compute):
                ops.append(msgspec.structs.replace(op, duration=op.duration * 2e-4))
            else:
                ops.append(msgspec.structs.replace(op, nbytes=op.nbytes * 2.0**20))
        roles.append(replace(role, ops=tuple(ops)))
    return replace(program, roles=tuple(roles))


@cache
def _machine(name: str, slow: int) -> Topology:
    """Two nodes of the catalogue; ``slow``: so many NICs at half speed."""
    topology = fabrics.load(name, nodes=2)
    names = [topology.vertex_names[nic] for nic in topology.nics[:slow]]
    return fabrics.change(topology, *(fabrics.Change(nic, factor=0.5) for nic in names)) if names else topology


def _on_real(rng: Random, program: Program) -> Case:
    topology = _machine(rng.choice(["hgx-h100", "hgx-a100", "dgx-1v"]), rng.choice([0, 0, 1, 2]))
    backend = rng.choice(["ideal"] * 12 + ["nccl"])  # NCCL's search takes a second for groups as odd as these

    def planner(request: Request, group: Group) -> Plan:
        return collectives.plan(request, group, backend)

    return Case("real machine", program, topology, fabrics.mesh(topology), planner, {"backend": backend})


def of_scenario(name: str, changes: dict[str, object]) -> Case:
    """A shipped scenario, as it would be run."""
    prepared = scenario.load(name, changes).prepare()
    file = prepared.scenario.file
    backend = prepared.backend
    launch = STRATEGIES[file.strategy["kind"]].launch or file.run.launch

    def planner(request: Request, group: Group) -> Plan:
        return collectives.plan(request, replace(group, launch=launch), backend)

    options: dict[str, object] = {"backend": backend, "launch": launch}
    return Case(name, prepared.program, prepared.topology, prepared.mesh, planner, options)


def cases(kind: str | None = None) -> st.SearchStrategy[Case]:
    """Hypothesis' strategy for the same."""
    return st.builds(case, st.randoms(use_true_random=False), st.just(kind) if kind else st.sampled_from(list(KINDS)))
