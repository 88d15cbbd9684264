"""When a pipeline rank sends and receives, and what it waits for: the p2p calls between the actions of a schedule.

What is imitated (Megatron-LM core/pipeline_parallel/{schedules,p2p_communication}.py; facts: MODEL_PARALLEL.md 2.3):

* ``blocking``: plain 1F1B. Each transfer is waited for before the next kernel. A forward followed by a backward, or the
  other way round, fuses what the first sends and the second receives into one call; like after like are two calls.
* ``batched``: interleaved 1F1B without overlap. One call after each forward of the warm-up, each backward of the
  cool-down, and each *pair* of the steady state: all that the pair sends, and all that the next pair receives.
* ``overlapped``: PyTorch's pipelining runtime, and interleaved 1F1B with ``overlap_p2p_communication_warmup_flush``.
  After each action its output is sent, and the input of the next action of the same direction is asked for; only that
  action waits.
* ``steady``: interleaved 1F1B as from Megatron's command line: overlapped in the steady state alone; what a forward of
  the warm-up or a backward of the cool-down sends, and what the next one receives, is one call that is waited for.

A call is a group of transfers that end together for whoever waits. Transfers of one direction run in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

import msgspec

from clustersim.core.label import Label
from clustersim.core.mesh import Ints
from clustersim.core.model import Kernel
from clustersim.core.program import DTYPE_BYTES, Recv, Send
from clustersim.training.builder.stage_ops import StageOps
from clustersim.training.partition.dispatch import HOST_WAITS
from clustersim.training.schedules.base import Action, Order, Slot, rank_and_chunk, stage_of

SHAPE_BYTES = 3.0 * DTYPE_BYTES["int64"]
READ = Kernel("read_shapes", "host", launches=HOST_WAITS, backward_launches=0)
MODES = ("blocking", "batched", "steady", "overlapped")


class Transfer(msgspec.Struct, frozen=True):
    """One message of one rank: the activation or gradient of a micro-batch at the border of two stages.

    sends : whether this rank sends it. direction : ``"F"`` activation, ``"B"`` gradient.
    action : of this rank, which made it or needs it.
    """

    sends: bool
    direction: str
    action: Action


class TransferCall(msgspec.Struct, frozen=True):
    """Transfers issued together after slot ``at`` of a rank's order (-1: before the first).

    ``waited`` : whether everything behind waits for all of them; else each receive is waited for by its action alone.
    """

    at: int
    transfers: tuple[Transfer, ...]
    waited: bool


def calls(
    order: Sequence[Slot], sends: Callable[[Action], bool], receives: Callable[[Action], bool], mode: str
) -> list[TransferCall]:
    """The p2p calls of one rank, in the order it makes them.

    order : its slots. sends, receives : whether an action's result goes to another rank, and its input comes from one.
    mode : one of :data:`MODES`.
    """
    if mode == "overlapped":
        return _overlapped(order, sends, receives)
    if mode == "steady":
        return _steady(order, sends, receives)
    blocks = _pairs(order) if mode == "batched" else [[i] for i in range(len(order))]
    calls: list[TransferCall] = []
    for k in range(-1, len(blocks)):
        block_slots = [order[i] for i in blocks[k]] if k >= 0 else []
        following = [order[i] for i in blocks[k + 1]] if k + 1 < len(blocks) else []
        out = [Transfer(True, direction(a), a) for slot in block_slots for a in slot if a.kind != "W" and sends(a)]
        into = [Transfer(False, direction(a), a) for slot in following for a in slot if a.kind != "W" and receives(a)]
        position = blocks[k][-1] if k >= 0 else -1
        fused = mode == "batched" or (block_slots and following and _kind(block_slots[-1]) != _kind(following[0]))
        calls += [
            TransferCall(position, tuple(group), True) for group in ([out + into] if fused else [out, into]) if group
        ]
    return calls


def direction(action: Action) -> str:
    """Which way an action's message travels: ``F`` down the pipeline, ``B`` up."""
    return "F" if action.kind == "F" else "B"


def _kind(slot: Slot) -> str:
    return direction(slot[-1])


def _pairs(order: Sequence[Slot]) -> list[list[int]]:
    """Slots between which an interleaved rank makes calls: a forward and the backward behind it are one block.

    With as many micro-batches as ranks all forwards are warm-up (``all_warmup_microbatches``), and no slots are paired.
    """
    warm_up = next((i for i, slot in enumerate(order) if _kind(slot) == "B"), len(order)) - 1
    if all(_kind(slot) == "B" for slot in order[warm_up + 1 :]):
        return [[i] for i in range(len(order))]
    blocks: list[list[int]] = []
    for i, slot in enumerate(order):
        after_forward = bool(blocks) and len(blocks[-1]) == 1 and _kind(order[blocks[-1][0]]) == "F"
        if _kind(slot) == "B" and after_forward and blocks[-1][0] >= warm_up:
            blocks[-1].append(i)
        else:
            blocks.append([i])
    return blocks


def _overlapped(
    order: Sequence[Slot], sends: Callable[[Action], bool], receives: Callable[[Action], bool]
) -> list[TransferCall]:
    """Sends behind each action; each receive is posted behind the last action of its direction."""
    transfers: list[tuple[int, Transfer]] = []
    posted = {"F": -1, "B": -1}
    for i, slot in enumerate(order):
        for action in slot:
            if action.kind == "W":
                continue
            toward = direction(action)
            if receives(action):
                transfers.append((posted[toward], Transfer(False, toward, action)))
            if sends(action):
                transfers.append((i, Transfer(True, toward, action)))
        for action in slot:
            posted[direction(action)] = i if action.kind != "W" else posted[direction(action)]
    transfers.sort(key=lambda pair: pair[0])
    return [TransferCall(position, (transfer,), False) for position, transfer in transfers]


def _steady(
    order: Sequence[Slot], sends: Callable[[Action], bool], receives: Callable[[Action], bool]
) -> list[TransferCall]:
    """Overlapped calls, of which those behind a forward of the warm-up or a backward of the cool-down are joined."""
    back = [i for i, slot in enumerate(order) if any(action.kind != "F" for action in slot)]
    forth = [i for i, slot in enumerate(order) if any(action.kind == "F" for action in slot)]
    first = min(back, default=len(order))
    last = max(forth, default=-1)
    warm = first - (len(order[first]) == 1) if first < last else first  # its last forward is the steady state's
    joined: dict[tuple[int, str], list[Transfer]] = {}
    calls: list[TransferCall] = []
    for call in _overlapped(order, sends, receives):
        (transfer,) = call.transfers
        if call.at < warm if transfer.direction == "F" else call.at > last:
            joined.setdefault((call.at, transfer.direction), []).append(transfer)
        else:
            calls.append(call)
    calls += [TransferCall(position, tuple(transfers), True) for (position, _), transfers in joined.items()]
    return sorted(calls, key=lambda call: call.at)


class Route(msgspec.Struct, frozen=True):
    """Where a stage's messages go.

    Parameters
    ----------
    placement : of chunks on ranks. rank : this pipeline rank.
    peers : (n,) int of every pipeline rank: its ranks, position by position.
    borders : elements per sample that one rank sends over each border, named by the global stage above it.
    """

    placement: str
    rank: int
    peers: tuple[Ints, ...]
    borders: tuple[float, ...]

    def crosses(self, action: Action, *, out: bool) -> bool:
        """Whether an action's result goes to another rank (``out``), or its input comes from one."""
        rank, border = self.border(action, out=out)
        return 0 <= border < len(self.borders) - 1 and rank != self.rank

    def border(self, action: Action, *, out: bool) -> tuple[int, int]:
        """Pipeline rank on the other side of the border that an action's result or input crosses, and the border.

        A border is named by the stage above it; the ends of the pipeline are -1 and the last stage.
        """
        ranks = len(self.peers)
        stage = stage_of(self.placement, self.rank, action.chunk, ranks)
        down = (direction(action) == "F") == out
        target = stage + 1 if down else stage - 1
        rank, _ = rank_and_chunk(self.placement, target % len(self.borders), ranks, action.chunk)
        return rank, min(stage, target)


@dataclass
class StageMessages:
    """The messages of one stage: :class:`clustersim.training.strategies.walk.Messages`.

    Parameters
    ----------
    order : the stage's slots. mode : how it sends, see above.
    shapes : a call sends the shapes of its tensors first, and the host waits for those that come before it asks for
        the tensors (Megatron-LM p2p_communication.py ``_communicate_shapes``).
    """

    stage_ops: StageOps
    route: Route
    order: InitVar[Order]
    mode: InitVar[str]
    shapes: bool = False
    _calls: dict[int, list[TransferCall]] = field(default_factory=dict, init=False)
    _arrived: dict[Action, tuple[int, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self, order: Order, mode: str) -> None:
        route = self.route
        for call in calls(order, lambda a: route.crosses(a, out=True), lambda a: route.crosses(a, out=False), mode):
            self._calls.setdefault(call.at, []).append(call)

    def arrived(self, action: Action) -> tuple[int, ...]:
        """Receives in flight that an action needs."""
        return self._arrived.pop(action, ())

    def call(self, position: int) -> None:
        """The calls made after a slot: waited for by everything behind, or each receive by its action alone."""
        for call in self._calls.get(position, ()):
            if self.shapes:
                self._read(tuple(self._transfer(transfer, shape=True) for transfer in call.transfers))
            done = tuple(self._transfer(transfer) for transfer in call.transfers)
            if call.waited:
                self.stage_ops.ops.waits = (*self.stage_ops.ops.waits, *done)
                continue
            for transfer, op in zip(call.transfers, done, strict=True):
                if not transfer.sends:
                    self._arrived[transfer.action] = (*self._arrived.get(transfer.action, ()), op)

    def _read(self, shapes: tuple[int, ...]) -> None:
        """The host waits for the device, and for shapes."""
        ops = self.stage_ops.ops
        cost = self.stage_ops.cost.work((((READ,), "F"),), dense=False)
        after, ops.waits = (*ops.waits, *shapes), ()
        ops.kernel = ops.compute("read shapes", cost.seconds, "other", "host", after=after)

    def _transfer(self, transfer: Transfer, *, shape: bool = False) -> int:
        """A send follows the kernel that made its data, and whatever the host waited for before it."""
        ops = self.stage_ops.ops
        stage_ops = self.stage_ops
        action = transfer.action
        toward = transfer.direction
        rank, border = self.route.border(action, out=transfer.sends)
        nbytes = float(self.route.borders[border] * stage_ops.cost.micro_batch_size * DTYPE_BYTES[stage_ops.dtype])
        after = (*ops.waits, *((ops.kernel,) if ops.kernel >= 0 else ()))
        tag = f"{toward} {border}.{action.chunk if self.route.placement == 'both' else 0} mb {action.microbatch}"
        kind, verb = (Send, "send") if transfer.sends else (Recv, "recv")
        content = "activation" if toward == "F" else "gradient"
        if shape:
            nbytes = SHAPE_BYTES
            tag = f"{tag} shape"
            content = f"shape of {content}"
        label = Label("", action.kind, action.microbatch, action.chunk, "pp")
        stream = f"pp {verb} {toward} {rank}"  # a pair of ranks has a communicator of its own
        return ops.add(
            kind(f"{verb} {content}", nbytes, self.route.peers[rank], stream, after, tag, step=ops.step, label=label)
        )
