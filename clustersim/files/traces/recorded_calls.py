"""What a rank recorded of its last calls, and how they are told in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clustersim.core.errors import few
from clustersim.core.texts import short

SHOWN = 8
"""Ranks named in a line."""


@dataclass(frozen=True)
class Call:
    """A collective as a rank called it.

    seq : counts within its group. name : empty where a dump does not tell. sizes : of inputs, in words.
    inputs, outputs : elements of all tensors.
    started : None where the backend does not tell. where : the job's own line of code.
    created : float [s]. timeout : float [s], 0 where not told.
    """

    group: str
    seq: int
    name: str
    sizes: str
    dtype: str
    done: bool
    where: str
    started: bool | None = None
    inputs: int = 0
    outputs: int = 0
    created: float = 0.0
    timeout: float = 0.0

    @property
    def kind(self) -> str:
        """What it is called, without the backend."""
        return self.name.rpartition(":")[2]

    @property
    def elements(self) -> int:
        """Of a message, whose one end has inputs and the other outputs, or both the same."""
        return max(self.inputs, self.outputs)


@dataclass(frozen=True)
class Message:
    """A ``send`` to or a ``recv`` from ``peer``, by its place in the group."""

    call: Call
    way: str
    peer: int


@dataclass(frozen=True)
class Dump:
    """What one rank recorded; ``members`` of groups by name; ``forgot`` : whether its oldest calls are overwritten."""

    calls: tuple[Call, ...]
    messages: tuple[Message, ...] = ()
    members: Mapping[str, frozenset[int]] = field(default_factory=dict)
    forgot: bool = False


def rank_list(ranks: list[int]) -> str:
    """``"rank 2"`` or ``"ranks 0, 1"``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {few(ranks, SHOWN)}"


def wait_word(ranks: list[int]) -> str:
    """The verb that goes with so many ranks."""
    return "waits" if len(ranks) == 1 else "wait"


def described(call: Call) -> str:
    """A call with its sizes, type and line of code."""
    if not call.name:
        return "a collective that the dump does not name"
    return short(f"{call.name} of {call.sizes} {call.dtype}" + (f" ({call.where})" if call.where else ""))
