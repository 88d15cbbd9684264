"""JSON with comments and commas behind a last value, which DeepSpeed reads (``hjson.load``, its runtime/config.py)."""

from __future__ import annotations

import re

_STRING = r'"(?:[^"\\\n]|\\.)*"?'
_COMMENT = re.compile(rf"{_STRING}|(?P<comment>/\*(?:.*?\*/|.*)|(?://|#)[^\n]*)", re.DOTALL)
_COMMA = re.compile(rf"{_STRING}|(?P<comma>,)(?=\s*[}}\]])")


def plain(text: str) -> str:
    """The text as JSON: blanks for comments, so that an error's line and column stay, and for such commas; strings and
    all else as they are."""
    without = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]) if match["comment"] else match[0], text)
    return _COMMA.sub(lambda match: " " if match["comma"] else match[0], without)
