"""Chakra's files as its jsonizer writes them: GlobalMetadata and the nodes as JSON objects, one behind another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from clustersim.core.errors import TraceError

_DECODER = json.JSONDecoder()
_ABOUT = {"version", "attr"}
"""Fields of GlobalMetadata."""


def is_jsonized(head: bytes) -> bool:
    """Whether a file begins with GlobalMetadata as JSON, and a node behind it as far as it goes."""
    if head.lstrip()[:1] != b"{":
        return False
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    try:
        about, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return False
    behind = text[end:].lstrip()
    return isinstance(about, dict) and bool(about) and about.keys() <= _ABOUT and behind[:1] in ("{", "")


def messages_of(data: bytes | bytearray, kinds: dict[str, Any], source: str) -> Iterator[Any]:
    """GlobalMetadata, then the nodes. Raises :class:`TraceError` where the file is cut off or holds something else."""
    from google.protobuf import json_format

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{source}: not text of Chakra's jsonizer: {error}") from None
    at = 0
    kind = "GlobalMetadata"
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        try:
            table, at = _DECODER.raw_decode(text, at)
            yield json_format.ParseDict(table, kinds[kind](), ignore_unknown_fields=True)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{source}: character {at:,}: cut off, or no JSON: {str(error)[:120]}") from None
        except (json_format.ParseError, AttributeError, TypeError) as error:
            raise TraceError(f"{source}: before character {at:,}: no {kind} of Chakra: {str(error)[:120]}") from None
        kind = "Node"
