"""Which kind of file a table is of, by its keys: for the error where another kind was asked for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from clustersim.core.texts import Table


@dataclass(frozen=True)
class FileKind:
    """A kind of .toml file.

    name : in sentences. keys : it is known by, all of them. any_of : one of which it has besides. read_by : the command
    that reads it.
    """

    name: str
    keys: frozenset[str]
    read_by: str
    any_of: frozenset[str] = frozenset()

    def has(self, table: Table) -> bool:
        """Whether a table has its keys."""
        return self.keys <= set(table) and (not self.any_of or bool(self.any_of & set(table)))


FILE_KINDS = (
    FileKind("plan", frozenset({"machines", "try"}), "clustersim plan"),
    FileKind("sweep", frozenset({"base", "axes"}), "clustersim sweep"),
    FileKind("scenario", frozenset({"cluster", "model"}), "clustersim run"),
    FileKind(
        "topology",
        frozenset(),
        "clustersim check",
        frozenset({"extends", "node", "nodes", "fabric", "vertices", "links"}),
    ),
)
"""Kinds by what they are known by; a GPU's file is :mod:`clustersim.core.gpu_file`'s."""


def taken_for(table: Table, fields: Collection[str]) -> str:
    """That a table is a file of another kind than one with these fields, and which command reads it; empty where it is
    not.

    >>> taken_for({"cluster": {}, "model": {}}, ["name", "extends", "node"])
    'this is a scenario, which `clustersim run` reads'
    """
    kind = next((kind for kind in FILE_KINDS if kind.has(table)), None)
    if kind is None or (kind.keys or kind.any_of) <= set(fields):
        return ""
    return f"this is a {kind.name}, which `{kind.read_by}` reads"
