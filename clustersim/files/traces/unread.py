"""Files that people have of profilers and are not read: what each is, and what to record or export instead.

They are rows of ``data/unread_files.toml``.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from clustersim.core.texts import data_table
from clustersim.files.traces.heads import Head


class UnreadKind(NamedTuple):
    """What a file is, by what its head has, and what is read instead."""

    what: str
    mark: re.Pattern[bytes]
    instead: str


@cache
def _kinds() -> tuple[UnreadKind, ...]:
    """Every kind, the most special first."""
    table = data_table("unread_files")
    return tuple(
        UnreadKind(row["what"], re.compile(row["mark"].encode()), row["instead"].format_map(table["shared"]))
        for row in table["file"]
    )


def shared_advice(name: str) -> str:
    """What is said in place of more than one kind of file: ``"table"``, of collectives, or ``"rocprof"``."""
    return str(data_table("unread_files")["shared"][name])


def advice(head: Head) -> str:
    """What a file is that is not read, and what is; empty where nothing is known of it."""
    for kind in _kinds():
        if kind.mark.search(head.data):
            return f"{kind.what}, which is not read; {kind.instead}"
    return ""
