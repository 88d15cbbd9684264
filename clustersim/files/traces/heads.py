"""The beginning of a file, by its structure: what a JSON object's own keys hold, and not which words are near."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path

from clustersim.core.texts import unstyled
from clustersim.files.traces import files, quoted

SIZES = (files.HEAD, 16 * files.HEAD, 256 * files.HEAD)
"""How far a file is looked into [bytes], one after another, until its structure shows: a list of thousands of ranks may
come before a profile's first event."""

LONGEST_END = 32 * 1024
"""Characters at each end of a long line that are looked at."""

_TOKEN = re.compile(rb'"((?:[^"\\]|\\.)*)"(\s*:)?|[{}\[\]]|[^\s,:"{}\[\]]+')
_OPEN = (b"{", b"[")
_CLOSE = (b"}", b"]")


class Likeness(IntEnum):
    """How much a file looks like a format: not at all, by a key or a word, by lines of it among what may be others'
    (any job's log may have NCCL's), or by what it is made of."""

    NONE = 0
    NAMED = 1
    AMONG = 2
    SHAPED = 3


@dataclass
class Member:
    """What a key of a JSON object holds.

    opens : ``{``, ``[`` or ``"``; empty for another value, and for one that is not there yet.
    names : the keys of the object, or of the first object of the list.
    text : of a value that is neither object nor list.
    """

    opens: str = ""
    names: set[str] = field(default_factory=set)
    text: str = ""


@dataclass(frozen=True)
class Head:
    """The first bytes of a file, decompressed; it may end anywhere."""

    data: bytes

    @property
    def members(self) -> dict[str, Member]:
        """What the file's first JSON object holds by key, as far as it goes; empty where it begins with no object."""
        return self._first[0]

    @cached_property
    def _first(self) -> tuple[dict[str, Member], bool]:
        start = self.data.removeprefix(b"\xef\xbb\xbf").lstrip()
        return _members(start) if start[:1] == b"{" else ({}, False)

    def lists(self, key: str, *names: str) -> bool:
        """Whether ``key`` holds a list whose first object has all these ``names``."""
        member = self.members.get(key)
        return member is not None and member.opens == "[" and member.names.issuperset(names) and bool(member.names)

    def holds(self, key: str, *names: str) -> bool:
        """Whether ``key`` holds an object that has all these ``names``."""
        member = self.members.get(key)
        return member is not None and member.opens == "{" and member.names.issuperset(names)

    @property
    def is_row(self) -> bool:
        """Whether the first object ends, and none of its keys holds a list of objects: the first of many rows."""
        members, ended = self._first
        return ended and not any(member.opens == "[" and member.names for member in members.values())

    @cached_property
    def text(self) -> str:
        """The bytes as text without a terminal's colours and a web page's marks, for formats of lines; of a line that
        is longer than any such, its two ends."""
        text = quoted.unescaped(self.data.decode("utf-8-sig", errors="replace"))
        text = unstyled(text)
        if len(text) <= 2 * LONGEST_END:
            return text
        return "".join(map(_ends, text.splitlines(keepends=True)))


def _ends(line: str) -> str:
    return line if len(line) <= 2 * LONGEST_END else f"{line[:LONGEST_END]} {line[-LONGEST_END:]}"


def growing(path: Path) -> Iterator[Head]:
    """The head of a file, then longer ones while there is more. Raises :class:`TraceError` where it cannot be read."""
    for size in SIZES:
        data = files.head(path, size)
        yield Head(data)
        if len(data) < size:
            return


def likeness(*, named: bool, shaped: bool) -> Likeness:
    """The larger of two findings."""
    if shaped:
        return Likeness.SHAPED
    return Likeness.NAMED if named else Likeness.NONE


def _members(data: bytes) -> tuple[dict[str, Member], bool]:
    """Of the object that ``data`` begins with, and whether it ends there. Names of a list are its first object's."""
    found: dict[str, Member] = {}
    inside: list[bytes] = []
    member = Member()
    awaiting = False
    for token in _TOKEN.finditer(data):
        word = token[0]
        depth = len(inside)
        is_key = token[2] is not None and inside[-1:] == [b"{"]
        if depth == 1 and is_key:
            member = found.setdefault(_word(token[1]), Member())
            awaiting = True
        elif awaiting:
            awaiting = False
            member.opens = word[:1].decode() if word[:1] in (b"{", b"[", b'"') else ""
            member.text = _word(token[1] if token[1] is not None else word)
        elif is_key and depth == _depth_of_names(member):
            member.names.add(_word(token[1]))
        if word in _OPEN:
            inside.append(word)
        elif word in _CLOSE:
            inside.pop()
            if not inside:
                return found, True
            if len(inside) == 2 and member.opens == "[" and member.names:
                member = Member()  # of a list, the first object is enough
    return found, False


def _depth_of_names(member: Member) -> int:
    return {"{": 2, "[": 3}.get(member.opens, 0)


def _word(text: bytes) -> str:
    return text[:200].decode("utf-8", errors="replace")
