"""Collectives of a Program pinned to what NCCL is known to choose on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from clustersim.collectives.nccl.pins import pinned_algorithms, pinned_protocols
from clustersim.program import Collective, Op, Program
from clustersim.scenario.schema import Pin


def pinned(program: Program, pins: Sequence[Pin]) -> Program:
    """The Program with the first pin that fits each collective which its strategy does not pin itself.

    Raises :class:`ProgramError` for an algorithm or a protocol that NCCL has not.
    """
    for pin in pins:
        pinned_algorithms(pin.algorithm, pin.kind)
        pinned_protocols(pin.protocol, pin.kind)
    if not pins:
        return program
    roles = tuple(replace(role, ops=tuple(_pinned(op, pins) for op in role.ops)) for role in program.roles)
    return replace(program, roles=roles)


def _pinned(op: Op, pins: Sequence[Pin]) -> Op:
    if not isinstance(op, Collective) or op.algorithm or op.protocol:
        return op
    pin = next((pin for pin in pins if pin.fits(op.kind, op.nbytes, op.groups.shape[1])), None)
    return op if pin is None else msgspec.structs.replace(op, algorithm=pin.algorithm, protocol=pin.protocol)
