"""An op list as text without its repetitions: equal layers and equal micro-batches are printed once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

LONGEST = 256
"""Lines of a block that is looked for again right behind itself."""
_LINE = re.compile(r"^ *(\d+)  (.*?)(?:  after ([\d, ]+))?$")
_NUMBERS = re.compile(r"(?<=[a-z]\.)\d+|(?<=bucket )\d+|(?<=parameters )\d+")


class RepeatedLines(msgspec.Struct, frozen=True):
    """Lines that stand for ``times`` runs of themselves in a row. ``key`` : what is equal in all of them."""

    key: object
    lines: tuple[str, ...]
    first: int
    last: int
    times: int = 1

    def text(self) -> Iterator[str]:
        """The lines, and how often they come again."""
        yield from self.lines
        if self.times > 1:
            length = (self.last - self.first + 1) // self.times
            which = f"op {self.first}" if length == 1 else f"ops {self.first} to {self.first + length - 1}"
            yield f"       ... {which}, {self.times - 1} more time{'s' * (self.times > 2)}, to op {self.last}"


def folded(lines: Sequence[str]) -> list[str]:
    """The lines of :meth:`clustersim.core.program.Program.describe`, repetitions folded, shorter ones first.

    Two ops are equal when they differ only in the number of a layer or bucket, and wait for ops as far back.

    >>> ops = ["    0  compute  fwd layers.0  1 ms", "    1  compute  fwd layers.1  1 ms  after 0",
    ...        "    2  compute  fwd layers.2  1 ms  after 1", "    3  compute  fwd layers.3  1 ms  after 2"]
    >>> print("\\n".join(folded(ops)))
        0  compute  fwd layers.0  1 ms
        1  compute  fwd layers.1  1 ms  after 0
           ... op 1, 2 more times, to op 3
    """
    import numpy as np

    blocks = [_block(line) for line in lines]
    numbers = np.zeros(0, dtype=np.int64)
    for size in range(1, LONGEST + 1):
        if len(blocks) < 2 * size:
            break
        if len(blocks) != len(numbers):
            number_of: dict[object, int] = {}
            numbers = np.array([number_of.setdefault(block.key, len(number_of)) for block in blocks])
        # So many in a row must be equal to what stands so far behind them: most lists have none of most sizes.
        unlike = np.flatnonzero(numbers[size:] != numbers[:-size])
        if np.diff(unlike, prepend=-1, append=len(numbers) - size).max() > size:
            blocks = list(_fold(blocks, size))
    return [text for block in blocks for text in block.text()]


def _block(line: str) -> RepeatedLines:
    match = _LINE.match(line)
    if match is None:
        return RepeatedLines(line, (line,), -1, -1)
    index = int(match[1])
    waits = tuple(index - int(op) for op in (match[3] or "").split(", ") if op)
    return RepeatedLines((_NUMBERS.sub("#", match[2]), waits), (line,), index, index)


def _fold(blocks: list[RepeatedLines], size: int) -> Iterator[RepeatedLines]:
    """Runs of ``size`` blocks that come again right behind themselves, as one block each."""
    keys = [block.key for block in blocks]
    i = 0
    while i < len(blocks):
        times = 1
        if keys[i] == (keys[i + size] if i + size < len(keys) else None):
            while keys[i : i + size] == keys[i + times * size : i + (times + 1) * size]:
                times += 1
        if times == 1:
            yield blocks[i]
            i += 1
            continue
        unit = blocks[i : i + size]
        lines = tuple(text for block in unit for text in block.text())
        key = (tuple(keys[i : i + size]), times)
        i += times * size
        yield RepeatedLines(key, lines, unit[0].first, blocks[i - 1].last, times)


def shortened(lines: list[str], first: int = 80, last: int = 24) -> list[str]:
    """The first and the last of many lines, with a line that says how many are left out.

    >>> shortened(list("abcdefgh"), 2, 1)
    ['a', 'b', '       ... 5 more lines: --all prints every op', 'h']
    """
    if len(lines) <= first + last:
        return lines
    left_out = f"       ... {len(lines) - first - last:,} more lines: --all prints every op"
    return [*lines[:first], left_out, *lines[-last:]]
