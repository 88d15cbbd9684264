"""A program's lines inside strings of JSON or YAML, as Ansible and other tools report them, taken out.

``stdout: "...\\n..."`` holds them all, ``stdout_lines: ["...", "..."]`` one a string, and a report may have both: lines
of a list that a string before it has said are dropped. What is no such string stays as it is.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import msgspec

_STRING = r'"(?:[^"\\]|\\.)*"'
_ITEM = re.compile(rf"\s*(?:-\s+)?(?:({_STRING})|'((?:[^']|'')*)')\s*,?\s*")
"""A line that is one string of a list."""
_FIELD = re.compile(rf"[\w.-][\"']?\s*:\s*({_STRING})")
"""A key's string."""
_LIST = re.compile(rf"_lines\"?\s*:\s*\[\s*({_STRING}(?:\s*,\s*{_STRING})*)\s*\]")
"""A list of lines in one line."""
_OPENED = re.compile(r"(\s*)((?:-\s+|[\"']?[\w.-]+[\"']?:\s+){1,2})(?:\"((?:[^\"\\]|\\.)*\\?)|'((?:[^']|'')*))$")
"""A line of YAML with a string that goes on in the next."""
_CLOSED = {'"': re.compile(r'(?:[^"\\]|\\.)*"\s*$'), "'": re.compile(r"(?:[^']|'')*'\s*$")}
_ESCAPED = re.compile(r"&(?:lt|gt|amp|quot|nbsp|#\d{1,5}|#x[0-9a-fA-F]{1,4});")
FEWEST = 3
"""Lines of a string that is taken for a program's output: others quote a message, or an error."""


def unescaped(text: str) -> str:
    """A text as it was before a web page: characters of HTML, and blanks that break no line."""
    plain = html.unescape(text) if "&" in text and _ESCAPED.search(text) else text
    return plain.replace("\xa0", " ")


def taken_out(lines: Iterator[str]) -> Iterator[str]:
    """The lines of a text, those inside strings as they were printed."""
    told: set[str] = set()  # by strings of several lines
    for line in _unfolded(lines):
        item = _ITEM.fullmatch(line) if line[-3:].rstrip(" ,")[-1:] in {'"', "'"} else None
        if item is not None:
            printed = _text(item[1]).splitlines() if item[1] else [item[2].replace("''", "'")]
            if len(printed) == 1 and printed[0] in told:
                continue
            yield from printed or [""]
        elif "\\n" in line or "_lines" in line:
            yield from _of_fields(line, told)
        else:
            yield line


def _unfolded(lines: Iterator[str]) -> Iterator[str]:
    """Strings of YAML that are folded into several lines as one of JSON; lines that end in another way as they are."""
    held: list[str] = []
    opened: re.Match[str] | None = None
    for line in lines:
        if opened is None:
            opened = _OPENED.match(line) if "'" in line or '"' in line else None
            held = [line]
        elif line.strip() and len(line) - len(line.lstrip()) <= len(opened[1]):  # which YAML has no string in
            yield from held
            opened = _OPENED.match(line)
            held = [line]
        else:
            held.append(line)
            if _CLOSED['"' if opened[3] is not None else "'"].match(line):
                yield _one_line(opened, held[1:])
                opened, held = None, []
        if opened is None:
            yield from held
            held = []
    yield from held


def _one_line(opened: re.Match[str], more: list[str]) -> str:
    """A folded string: a line's end is a blank, or nothing behind a backslash; an empty line is a line's end."""
    double = opened[3] is not None
    text = opened[3] if double else opened[4]
    empty = 0
    for line in more:
        piece = line.strip() if line is not more[-1] else line.strip()[:-1]
        if not line.strip():
            empty += 1
            continue
        escaped = double and text.endswith("\\") and not text.endswith("\\\\")
        text = text[:-1] if escaped else text.rstrip()
        text += ("\\n" if double else "\n") * empty if empty else "" if escaped else " "
        text += piece.removeprefix("\\") if piece.startswith("\\ ") else piece
        empty = 0
    said = f'"{text}"' if double else msgspec.json.encode(text.replace("''", "'")).decode()
    return f"{opened[1]}{opened[2]}{said}"


def _of_fields(line: str, told: set[str]) -> Iterator[str]:
    """What keys of one line hold, with what is before them, which may name the program; ``told`` gets the lines."""
    outputs = [(match.start(1), _text(match[1]).splitlines()) for match in _FIELD.finditer(line) if "\\n" in match[1]]
    outputs = [(start, printed) for start, printed in outputs if len(printed) >= FEWEST]
    if not outputs:
        found = _LIST.search(line)
        listed = [_text(match[0]) for match in re.finditer(_STRING, found[1])] if found else []
        outputs = [(found.start(1), listed)] if found and len(listed) >= FEWEST and not told.issuperset(listed) else []
    if not outputs:
        yield line
        return
    yield line[: outputs[0][0]]
    for _, printed in outputs:
        told.update(printed)
        yield from printed


def _text(quoted: str) -> str:
    """What a string in double quotes says; without its quotes where it is none of JSON."""
    try:
        return str(msgspec.json.decode(quoted, type=str))
    except (msgspec.DecodeError, UnicodeEncodeError):
        return quoted[1:-1].replace("\\n", "\n").replace("\\t", "\t").replace('\\"', '"').replace("\\e", "\x1b")
