"""What a strategy exchanges: whether each rank hears of every other's gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clustersim.core.contract import require
from clustersim.core.program import Collective, Compute, Op, Program, Recv, Role, Send, Serve
from clustersim.training.strategies.base import Strategy

Edge = tuple[int, int]
"""A rank, and another that hears of it."""


def check_exchange(row: Strategy, program: Program, period: int) -> None:
    """Within ``period`` steps behind the first each rank that computes hears of each other's gradients.

    program : of at least ``2 * period + 1`` steps, for what is waited for only in the next period.

    What goes out counts where it has bytes, follows a backward of its sender, and is waited for by work of its
    receiver. A chain of messages counts, as through a server. Raises :class:`AssertionError`.
    """
    computing = [role for role in program.roles if any(_is_backward(op) for op in role.ops)]
    workers = [int(rank) for role in computing for rank in role.ranks]
    if len(workers) < 2:
        return
    reached = _reached(_edges(program, range(1, period + 1)))
    for sender in workers:
        for receiver in workers:
            words = (
                f"rank {receiver} hears nothing of what rank {sender} computes in {period} steps: it needs an exchange "
                f"of more than 0 bytes, after a backward of rank {sender}, that work of rank {receiver} waits for"
            )
            require(receiver in reached.get(sender, ()) or receiver == sender, row, words)


def exchanges_nothing(program: Program) -> bool:
    """Whether no rank sends anything to another that follows a backward of its own, in the whole of a Program.

    A look at each op once, for a run to say so: :func:`check_exchange` asks who hears of whom as well.
    """
    for role in program.roles:
        informed = _informed(role, _parents(role.ops))
        for i, op in enumerate(role.ops):
            alone = isinstance(op, Collective) and op.groups.shape[1] < 2
            if informed[i] and isinstance(op, Collective | Send) and op.nbytes > 0 and not alone:
                return False
    return True


def _is_backward(op: Op) -> bool:
    return isinstance(op, Compute) and op.phase == "backward"


def _parents(ops: Sequence[Op]) -> list[tuple[int, ...]]:
    """Of each op those that it waits for: what it names, and the one before it on its stream."""
    last: dict[str, int] = {}
    parents = []
    for i, op in enumerate(ops):
        ordered = op.stream in last and not isinstance(op, Serve)
        parents.append((*op.after, last[op.stream]) if ordered else op.after)
        last[op.stream] = i
    return parents


def _used(ops: Sequence[Op], parents: Sequence[tuple[int, ...]]) -> list[bool]:
    """Whether any work waits for an op; that of a send does so elsewhere."""
    used = [isinstance(op, Send) for op in ops]
    for i in reversed(range(len(ops))):
        if used[i] or isinstance(ops[i], Compute):
            for parent in parents[i]:
                used[parent] = True
    return used


def _informed(role: Role, parents: Sequence[tuple[int, ...]]) -> list[bool]:
    """Whether an op follows a backward of its rank; on a rank that computes none, something that it received."""
    computes = any(_is_backward(op) for op in role.ops)
    informed: list[bool] = []
    for i, op in enumerate(role.ops):
        source = _is_backward(op) if computes else isinstance(op, Recv)
        informed.append(source or any(informed[parent] for parent in parents[i]))
    return informed


def _edges(program: Program, steps: range) -> set[Edge]:
    """Who hears of whom in these steps, without a third between them."""
    edges: set[Edge] = set()
    sent: set[tuple[int, int, str]] = set()
    heard: set[tuple[int, int, str]] = set()
    for role in program.roles:
        parents = _parents(role.ops)
        used = _used(role.ops, parents)
        informed = _informed(role, parents)
        for i, op in enumerate(role.ops):
            if isinstance(op, Compute) or op.step not in steps or op.nbytes <= 0:
                continue
            if isinstance(op, Collective) and used[i] and informed[i]:
                edges.update(_of_collective(op))
            elif isinstance(op, Send) and informed[i]:
                sent.update((rank, peer, op.tag) for rank, peer in _pairs(role, op))
            elif isinstance(op, Recv) and used[i]:
                heard.update((peer, rank, op.tag) for rank, peer in _pairs(role, op))
    return edges | {(sender, receiver) for sender, receiver, _ in sent & heard}


def _pairs(role: Role, op: Send | Recv) -> Iterator[Edge]:
    """Each rank of the role that takes part, and its peer."""
    pairs = zip(role.ranks.tolist(), op.peer.tolist(), strict=True)
    return (pair for pair in pairs if pair[1] >= 0)


def _of_collective(op: Collective) -> Iterator[Edge]:
    """Who hears of whom in a collective's groups."""
    for group in op.groups.tolist():
        root = group[op.root]
        if op.kind in ("reduce", "gather"):
            yield from ((member, root) for member in group)
        elif op.kind in ("broadcast", "scatter"):
            yield from ((root, member) for member in group)
        elif op.kind == "sendrecv":
            yield from zip(group, [*group[1:], group[0]], strict=True)
        else:
            yield from ((sender, receiver) for sender in group for receiver in group)


def _reached(edges: set[Edge]) -> dict[int, set[int]]:
    """Of each rank those that hear of it, through others as well."""
    import networkx as nx  # by the contract alone: a run asks only whether anything is exchanged

    graph = nx.DiGraph(edges)
    return {rank: nx.descendants(graph, rank) for rank in graph}
