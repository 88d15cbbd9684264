"""V-Half and V-Min: pipelines with half and a third of the activations (Qi et al., arXiv 2405.15362).

Rank r holds stage r and stage 2p-1-r. How much a rank holds is how long its chunk passes live, from F to W, over the
six slots (F, I, W of two chunks) that a micro-batch takes in the steady state. In a V a rank whose chunk 0 lives long
has a chunk 1 that lives short, so the ranks hold equally much. How much that is, is chosen by how fast a micro-batch
walks through the V:

========  =============================================  ============================
schedule  slots from rank to rank going F0, F1, I1, I0   chunk passes held (1F1B: 2p)
========  =============================================  ============================
V-Min     1, 1, 1, 1                                     2*floor((p+1)/3) + 2
V-Half    2, 1, 2, 1                                     2*floor(p/2) + 2
========  =============================================  ============================

The pattern repeats every six slots; a few idle slots between F1 and I1 keep the passes of different micro-batches out
of each other's slots. It is then squeezed, as the authors' zbv_greedy.py does it: at the head and the tail of the
step, where the pattern leaves slots empty, each pass moves to the earliest empty slot after its input at which the
rank holds no more than before. W takes what is empty. Bubbles remain for what is saved; the paper has no formula.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from clustersim.training.schedules.base import Action, Orders, Schedule

PASSES = (("F", 0), ("F", 1), ("I", 1), ("I", 0))
"""A micro-batch's way over a rank; the numbers of these passes below are positions in here, and W is 4."""
WEIGHT = 4
EMPTY = -1
PERIOD = 6
Slots = list[list[int]]
"""Of one rank: for each of the passes, and perhaps for W, the slot of each micro-batch."""


def v_min_pattern(rank: int, p: int) -> tuple[int, int, int, int]:
    """Slots of the first micro-batch's F0, F1, I1 and I0."""
    gap = 2 if p % 3 == 0 else 0
    return rank, 2 * p - 1 - rank, 2 * p + gap + rank, 4 * p - 1 + gap - rank


def v_half_pattern(rank: int, p: int) -> tuple[int, int, int, int]:
    """Slots of the first micro-batch's F0, F1, I1 and I0."""
    gap = 3 if p % 2 == 0 else 0
    return 2 * rank, 3 * p - 2 - rank, 3 * p - 1 + gap + 2 * rank, 6 * p - 2 + gap - rank


def squeezed(pattern: Callable[[int, int], tuple[int, ...]], p: int, m: int) -> Orders:
    """The pattern of m micro-batches, squeezed with W in it; then its tail once more, with W only where it is empty."""
    ranks: list[Slots] = [
        [list(range(first, first + PERIOD * m, PERIOD)) for first in pattern(rank, p)] for rank in range(p)
    ]
    ranks = _at_once(_squeeze([slots + _weights(slots) for slots in ranks]))
    ranks = _squeeze([slots[:WEIGHT] for slots in ranks])
    ranks = _at_once([slots + _weights(slots) for slots in ranks])
    return tuple(map(_order, (slots[:WEIGHT] for slots in ranks)))


def _order(slots: Slots) -> tuple[tuple[Action], ...]:
    """The passes and the W of one rank by slot. A W of chunk 1 goes before one of chunk 0 that could go too."""
    timed = [(slot, Action(PASSES[k][0], j, PASSES[k][1])) for k in range(WEIGHT) for j, slot in enumerate(slots[k])]
    for chunk, weights in zip((1, 0), _weights(slots, apart=True), strict=True):
        timed += [(slot, Action("W", j, chunk)) for j, slot in enumerate(weights)]
    return tuple((action,) for _, action in sorted(timed, key=lambda pair: pair[0]))


def _occupied(slots: Slots) -> list[int]:
    """Which pass is in each slot of a rank."""
    line = [EMPTY] * (1 + max(column[-1] for column in slots))
    for kind, column in enumerate(slots):
        for slot in column:
            line[slot] = kind
    return line


def _weights(slots: Slots, apart: bool = False) -> Slots:
    """Slots for W: the empty ones that have a W due, and what it takes at the end. ``apart``: by chunk, 1 and 0."""
    weight_slots: Slots = [[], []]
    due = [0, 0]
    line = _occupied(slots)
    for slot, kind in enumerate(line):
        if kind in (2, 3):
            due[kind - 2 if apart else 0] += 1
        elif kind == EMPTY and any(due):
            which = 0 if due[0] else 1
            weight_slots[which].append(slot)
            due[which] -= 1
    end = len(line)
    for which in (0, 1):
        weight_slots[which] += range(end, end + due[which])
        end += due[which]
    return weight_slots if apart else weight_slots[:1]


def _in_time(ranks: list[Slots]) -> Iterator[tuple[int, int, int]]:
    """Rank, pass and micro-batch of everything, by slot; of equal slots the first rank first."""
    timed = [
        (slot, rank, kind, j)
        for rank, slots in enumerate(ranks)
        for kind, column in enumerate(slots)
        for j, slot in enumerate(column)
    ]
    return ((rank, kind, j) for _, rank, kind, j in sorted(timed))


def _input(ranks: list[Slots], rank: int, kind: int, j: int) -> int:
    """The slot of the last pass that this one must come after; W is not asked about. -1 if there is none."""
    slots = ranks[rank]
    after = [slots[kind][j - 1]] if j else []
    if kind < WEIGHT:
        peer = rank - 1 if kind in (0, 2) else rank + 1
        after += [ranks[peer][kind][j]] if 0 <= peer < len(ranks) else []
        after += [slots[kind - 1][j]] if kind else []
    return max(after, default=-1)


def _at_once(ranks: list[Slots]) -> list[Slots]:
    """The same order on every rank, with every pass in the first slot that it can have."""
    moved: list[Slots] = [[[0] * len(column) for column in slots] for slots in ranks]
    free = [0] * len(ranks)
    for rank, kind, j in _in_time(ranks):
        slot = max(free[rank], _input(moved, rank, kind, j) + 1)
        moved[rank][kind][j] = slot
        free[rank] = slot + 1
    return moved


class _RankSlots:
    """One rank's slots while they are squeezed; after each, what it holds and which W are due if W has no slots."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.explicit = len(slots) > WEIGHT
        self.line = _occupied(slots)
        self.gradients = sorted(slots[2] + slots[3])
        self.after: list[tuple[int, int]] = []
        state = (0, 0)
        for kind in self.line:
            state = self._step(*state, kind)
            self.after.append(state)

    def _step(self, held_passes: int, due: int, kind: int) -> tuple[int, int]:
        if kind in (0, 1):
            return held_passes + 1, due
        if kind == WEIGHT or (kind == EMPTY and due):
            return held_passes - 1, due - (kind == EMPTY)
        return held_passes, due + (kind in (2, 3) and not self.explicit)

    @property
    def most(self) -> int:
        """The most it ever holds."""
        return max(held_passes for held_passes, _ in self.after)

    def move(self, kind: int, j: int, new: int, limit: int) -> bool:
        """Put a micro-batch's pass into an earlier empty slot, unless more than the limit were then held."""
        old = self.slots[kind][j]
        states = []
        state = self.after[new - 1] if new else (0, 0)
        for slot in range(new, len(self.line)):
            state = self._step(*state, kind if slot == new else EMPTY if slot == old else self.line[slot])
            if state[0] > limit:
                return False
            if slot >= old and state == self.after[slot]:
                break
            states.append(state)
        if kind in (2, 3):
            del self.gradients[bisect_left(self.gradients, old)]
            insort(self.gradients, new)
        self.slots[kind][j] = new
        self.line[new], self.line[old] = kind, EMPTY
        self.after[new : new + len(states)] = states
        return True


def _squeeze(ranks: list[Slots]) -> list[Slots]:
    """Move passes of the head (with W in slots only) and of the tail into the earliest empty slots that do.

    The head is what comes before rank 0's first I0, the tail what comes after the first last F0 from then on.
    """
    lines = [_RankSlots([list(column) for column in slots]) for slots in ranks]
    now = [line.slots for line in lines]
    limit = max(line.most for line in lines)
    last = len(ranks[0][0]) - 1
    phase = "head"
    for rank, kind, j in _in_time(ranks):
        if phase == "head" and (rank, kind) == (0, 3):
            phase = "steady"
        if phase == "steady":
            phase = "tail" if kind == 0 and j == last else phase
        elif phase == "tail" or lines[rank].explicit:
            _move_early(lines[rank], _input(now, rank, kind, j), kind, j, limit)
    return now


def _move_early(line: _RankSlots, after: int, kind: int, j: int, limit: int) -> None:
    """Move one pass to the earliest empty slot after slot ``after``, if there is one before its own."""
    old = line.slots[kind][j]
    if kind == WEIGHT:
        after = max(after, line.gradients[j])
    for slot in range(after + 1, old):
        if line.line[slot] == EMPTY and line.move(kind, j, slot, limit):
            return


def _v_min_peak(rank: int, p: int, chunks: int, m: int) -> int | None:
    """The table's, once the pattern has repeated; rank 0 sometimes holds one less if p leaves 2 when divided by 3."""
    return 2 * ((p + 1) // 3) + 2 if m > p and (rank > 0 or p % 3 != 2) else None


def _v_half_peak(rank: int, p: int, chunks: int, m: int) -> int | None:
    """The table's, once the pattern has repeated."""
    return 2 * (p // 2) + 2 if m > p else None


V_MIN = Schedule(
    "v_min",
    lambda p, chunks, m: squeezed(v_min_pattern, p, m),
    placement="v",
    chunks=2,
    splits_backward=True,
    peak=_v_min_peak,
)
V_HALF = Schedule(
    "v_half",
    lambda p, chunks, m: squeezed(v_half_pattern, p, m),
    placement="v",
    chunks=2,
    splits_backward=True,
    peak=_v_half_peak,
)
