"""What a pipeline schedule is: for each pipeline rank, the passes of its chunks in the order in which it runs them.

A rank of a pipeline holds one or more *chunks* (Megatron's virtual stages) of the model. A pass of one chunk for one
micro-batch is an :class:`Action` of one of four kinds:

====  ==========================================================================================
F     forward
B     the whole backward: the gradient of the chunk's input and of its weights
I     only the gradient of its input, which the stage before waits for
W     only the gradient of its weights, which nobody waits for: it may be put wherever the rank would idle
====  ==========================================================================================

A schedule knows no durations and no messages: who must wait for whom follows from the order and from where the chunks
are (:func:`stage_of`), and how long it takes is found by playing it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from clustersim.core.errors import ScenarioError, nearest

Placement = Literal["loop", "v", "both"]


class Action(NamedTuple):
    """One chunk's pass of one micro-batch: ``kind`` is F, B, I or W; ``chunk`` counts this rank's chunks from 0."""

    kind: str
    microbatch: int
    chunk: int = 0


Slot = tuple[Action, ...]
"""One action, or two (a forward and a backward) that run beside each other."""
Order = tuple[Slot, ...]
"""What one pipeline rank runs."""
Orders = tuple[Order, ...]
"""What every pipeline rank runs, by rank."""
Options: TypeAlias = Mapping[str, Any]
"""What a schedule's options are, by name."""


class ScheduleOption(msgspec.Struct, frozen=True):
    """A knob of one schedule: its name in a scenario, its type, what it is if not given, and the least it may be."""

    name: str
    type: type
    default: Any
    meaning: str
    least: float | None = None

    def check(self, value: object) -> None:
        """Raise :class:`ScenarioError` for a value that this option cannot have."""
        if value is None and self.default is None:
            return
        kinds = (int, float) if self.type is float else (self.type,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and self.type is not bool):
            wanted = f"must be of type {self.type.__name__}"
        elif self.least is not None and isinstance(value, int | float) and value < self.least:
            wanted = f"must be at least {self.least}"
        else:
            return
        raise ScenarioError(f"{self.name} = {value!r} {wanted}: {self.meaning} (at $.parallel.{self.name})")


class PassCosts(NamedTuple):
    """Durations of one chunk's passes, in any unit; a whole backward that is not given is the sum of its parts."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    whole_backward: float | None = None

    @property
    def backward(self) -> float:
        """Of the whole backward."""
        return self.input_gradient + self.weight_gradient if self.whole_backward is None else self.whole_backward

    def of(self, kind: str) -> float:
        """Of an action of this kind."""
        if kind == "B":
            return self.backward
        return self.forward if kind == "F" else self.input_gradient if kind == "I" else self.weight_gradient


UNIT = PassCosts()
"""Every part takes 1, as in the papers' tables."""


@dataclass(frozen=True)
class Schedule:
    """A row of :data:`clustersim.training.schedules.SCHEDULES`.

    Parameters
    ----------
    name : how a scenario writes it. aliases : other systems' names for it.
    rule : (stages, chunks, microbatches, **options) -> Orders, for values that :meth:`order` has checked: of each rank
        a tuple of places, each a tuple of one :class:`Action`, or of a forward and a backward that run together.
    placement : where the chunks are; see :func:`stage_of`.
    chunks : how many a rank must have; None for any number.
    splits_backward : whether the orders have I and W instead of B (or beside it).
    synchronous : False where micro-batches of the next step enter before this step's gradients are applied.
    accumulates : False where a stage updates its weights after each micro-batch instead of once in a step.
    microbatches : (stages, microbatches, options) -> whether this number works; ``needs`` says the rule in words.
    even_stages : whether the number of pipeline ranks must be even.
    bubble : (stages, chunks, microbatches, Costs of a chunk) -> makespan less computing time by the paper's formula, in
        the unit of the costs, for equal chunks, free transfers and pairs that take as long as their two passes in a
        row. It is None, or returns None, where no formula is stated: for too few micro-batches, for unequal costs.
    peak : (rank, stages, chunks, microbatches, **options) -> how many forward passes of one chunk a rank holds at most
        (until their weight gradient is done); None, or returns None, in the same way.
    versions, staleness : (rank, stages) -> copies of the weights a rank keeps, and by how many updates the weights
        that a gradient was computed with are older than those it is applied to.
    """

    name: str
    rule: Callable[..., Orders]
    placement: Placement = "loop"
    chunks: int | None = 1
    splits_backward: bool = False
    synchronous: bool = True
    accumulates: bool = True
    aliases: tuple[str, ...] = ()
    options: tuple[ScheduleOption, ...] = ()
    microbatches: Callable[[int, int, Options], bool] | None = None
    needs: str = ""
    even_stages: bool = False
    bubble: Callable[[int, int, int, PassCosts], float | None] | None = None
    peak: Callable[..., int | None] | None = None
    versions: Callable[[int, int], int] = lambda rank, stages: 1
    staleness: Callable[[int, int], int] = lambda rank, stages: 0

    def order(self, stages: int, chunks: int, microbatches: int, **options: Any) -> Orders:
        """The actions of each of ``stages`` pipeline ranks with ``chunks`` chunks each, for ``microbatches``.

        Raises :class:`ScenarioError` naming the field of ``[parallel]``, its value and the nearest that works.
        """
        _at_least_one(stages, "pp")
        _at_least_one(chunks, "vpp")
        _at_least_one(microbatches, "microbatches")
        given = self.with_defaults(options)
        if self.even_stages and stages % 2:
            raise ScenarioError(
                f"{self.name} runs two directions on mirrored ranks, so pp must be even, not {stages}; "
                f"use {stages + 1} (at $.parallel.pp)"
            )
        if self.chunks is not None and chunks != self.chunks:
            raise ScenarioError(
                f"{self.name} has {self.chunks} chunk{'s' * (self.chunks > 1)} on each pipeline rank, not {chunks}; "
                f"use {self.chunks} (at $.parallel.vpp)"
            )
        if self.microbatches is not None and not self.microbatches(stages, microbatches, given):
            raise ScenarioError(
                f"{self.name} on {stages} pipeline ranks needs {self.needs}, not {microbatches} micro-batches; "
                f"{self._advice(stages, microbatches, given)} (at $.parallel.microbatches)"
            )
        return self.rule(stages, chunks, microbatches, **given)

    def with_defaults(self, options: Options) -> Options:
        """Every option of this schedule with its value. Raises :class:`ScenarioError` on an unknown or mistyped one."""
        known_options = {option.name: option for option in self.options}
        for name, value in options.items():
            if name not in known_options:
                hint = nearest(name, known_options) if known_options else f"{self.name} has no options"
                raise ScenarioError(f"{self.name} knows no option {name!r}; {hint} (at $.parallel.{name})")
            known_options[name].check(value)
        return {option.name: options.get(option.name, option.default) for option in self.options}

    def _advice(self, stages: int, microbatches: int, options: Options) -> str:
        """The nearest number of micro-batches that works, the larger of two equally near ones."""
        test = self.microbatches
        for distance in range(1, 4 * (stages + microbatches)):
            for number in (microbatches + distance, microbatches - distance):
                if test is not None and number >= 1 and test(stages, number, options):
                    return f"the nearest that works is {number}"
        return "no number near it works"


def _at_least_one(value: int, field: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ScenarioError(f"{field} = {value!r} must be a whole number of at least 1 (at $.parallel.{field})")


def stage_count(placement: str, p: int, chunks: int) -> int:
    """How many global stages the model is cut into: one for each chunk, but each half as many times for "both"."""
    return p if placement == "both" else p * chunks


def stage_of(placement: str, rank: int, chunk: int, p: int) -> int:
    """The global stage (0 has the embedding) that is chunk ``chunk`` of pipeline rank ``rank`` of ``p``.

    "loop": the stages go round the ranks, chunk c of rank r is stage c*p + r. "v": they go there and back, chunk 0 is
    stage r and chunk 1 is stage 2p-1-r, so that the last stage is on rank 0 again. "both": two copies of the model run
    in opposite directions, chunk 0 is stage r and chunk 1 is stage p-1-r (its micro-batches are others).

    >>> [stage_of("loop", 1, chunk, 4) for chunk in range(2)], [stage_of("v", 1, chunk, 4) for chunk in range(2)]
    ([1, 5], [1, 6])
    >>> [stage_of("both", 1, chunk, 4) for chunk in range(2)]
    [1, 2]
    """
    forward = chunk % 2 == 0 or placement == "loop"
    lap = 0 if placement == "both" else chunk * p
    return lap + (rank if forward else p - 1 - rank)


def rank_and_chunk(placement: str, stage: int, p: int, direction: int = 0) -> tuple[int, int]:
    """Where a global stage is, as :func:`stage_of` has it; of the two places of "both", the one of ``direction``.

    >>> rank_and_chunk("loop", 5, 4), rank_and_chunk("v", 6, 4), rank_and_chunk("both", 2, 4, direction=1)
    ((1, 1), (1, 1), (1, 1))
    """
    chunk = direction if placement == "both" else stage // p
    along = stage % p
    forward = chunk % 2 == 0 or placement == "loop"
    return (along if forward else p - 1 - along), chunk
