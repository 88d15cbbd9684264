"""The words of distributed training, each as ops a timeline shows: push, pull, scatter, reduce, wait...

*Push* is started by the sender: the receiver has its receive posted and waits. *Pull* is started by the receiver: a
small request travels first, then the data. Collectives keep their torch.distributed names. *Wait* makes a stream stand
still until other ops have ended.

Every function appends to an :class:`~clustersim.training.strategies.base.OpList` and returns the index others may wait
on.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

import msgspec

from clustersim.core.mesh import Ints
from clustersim.core.program import COMPUTE_STREAM, Collective, Compute, Recv, Send
from clustersim.training.strategies import base

REQUEST_BYTES = 64.0
"""A pull's request: a key and a header."""


class Link(msgspec.Struct, frozen=True):
    """One direction of talk between two kinds of ranks, as one side sees it.

    peer : (n_ranks,) int, the global rank each rank of the role talks to; -1 for ranks that do not.
    stream : of the data; ``tag`` : tells parallel talks of one pair apart.
    """

    peer: Ints
    stream: str
    tag: str = ""


def push(ops: base.OpList, tensor_name: str, nbytes: float, link: Link, after: tuple[int, ...] = ()) -> int:
    """The sender's side of a push: ``tensor_name`` is like ``"layers.3 worker 2 -> server"``."""
    return ops.add(Send(f"push {tensor_name}", nbytes, link.peer, link.stream, after, f"push{link.tag}", step=ops.step))


def take(ops: base.OpList, tensor_name: str, nbytes: float, link: Link) -> int:
    """The receiver's side of a push: a receive that was posted long before."""
    return ops.add(Recv(f"push {tensor_name}", nbytes, link.peer, link.stream, (), f"push{link.tag}", step=ops.step))


def request(ops: base.OpList, tensor_name: str, link: Link, after: tuple[int, ...] = ()) -> int:
    """A pull begins at the receiver: it asks, once ``after`` has ended. One request may ask for several pieces."""
    return ops.add(Send(f"pull request {tensor_name}", REQUEST_BYTES, link.peer, *_asks(link, after), step=ops.step))


def requested(ops: base.OpList, tensor_name: str, link: Link) -> int:
    """The sender's side: it has been asked."""
    return ops.add(Recv(f"pull request {tensor_name}", REQUEST_BYTES, link.peer, *_asks(link, ()), step=ops.step))


def _asks(link: Link, after: tuple[int, ...]) -> tuple[str, tuple[int, ...], str]:
    """Stream, needs and tag of a request."""
    return f"{link.stream} request", after, f"pull request{link.tag}"


def pull(ops: base.OpList, tensor_name: str, nbytes: float, link: Link, request_op: int) -> int:
    """The receiver's side of a pull: what the request ``request_op`` brings."""
    return ops.add(
        Recv(f"pull {tensor_name}", nbytes, link.peer, link.stream, (request_op,), f"pull{link.tag}", step=ops.step)
    )


def answer(ops: base.OpList, tensor_name: str, nbytes: float, link: Link, after: tuple[int, ...]) -> int:
    """The sender's side of a pull: the data leaves once it was asked for and the rest of ``after`` has ended."""
    return ops.add(Send(f"pull {tensor_name}", nbytes, link.peer, link.stream, after, f"pull{link.tag}", step=ops.step))


class CollectiveFields(TypedDict, total=False):
    """Fields of a :class:`clustersim.core.program.Collective` that most leave as they are."""

    stream: str
    dtype: str
    redop: str
    root: int
    communicator: str
    algorithm: str | None
    protocol: str | None


def collective(
    ops: base.OpList,
    kind: str,
    tensor_name: str,
    nbytes: float,
    groups: Ints,
    after: tuple[int, ...] = (),
    **how: Unpack[CollectiveFields],
) -> int:
    """One of :data:`clustersim.core.program.COLLECTIVES`; ``nbytes`` is the full tensor, ``root`` a position in a
    group."""
    return ops.add(Collective(f"{kind} {tensor_name}".strip(), kind, nbytes, groups, after=after, step=ops.step, **how))


def wait(ops: base.OpList, tensor_name: str, after: tuple[int, ...], *, stream: str = COMPUTE_STREAM) -> int:
    """A stream stands still until these ops have ended: no work of its own, the gap before it is the wait."""
    return ops.add(
        Compute(f"wait {tensor_name}", 0.0, stream, after, "other", "communication", step=ops.step, paced=False)
    )
