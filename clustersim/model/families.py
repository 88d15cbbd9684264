"""Families of models, a row each (``data/families/*.toml``): what the fields of a config.json hold, and the tensors.

A row says which field of the config holds which dimension of a :class:`~clustersim.model.base.TransformerShape`
(``reads``), what the class has whatever its config says (``sets``), which blocks attend to what (``kinds``), and its
parameter tensors in the order in which ``named_parameters()`` prints them. :mod:`clustersim.model.hf` reads configs by
it, :mod:`clustersim.model.naming` sizes its tensors.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from clustersim.core.errors import nearest
from clustersim.core.paths import data_path
from clustersim.core.row_table import RowTable
from clustersim.core.texts import Table

_MERGED = ("reads", "sets")
_OWN = ("types", "like")
Answer = TypeVar("Answer")


class Kinds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which blocks are of which kind, where not all are alike.

    Parameters
    ----------
    field : of the config, a list with a word for each block. words : what its words mean, as kinds of
        :data:`~clustersim.model.base.MIXERS`, with ``/`` and one of :data:`~clustersim.model.base.MLPS` where a word
        says that too.
    rest : the kind of blocks where the list is missing, but for each ``period``-th, which is ``full``; the period may
        be under the field ``every``. first : the first of a period is full, instead of its last.
    """

    field: str = "layer_types"
    words: dict[str, str] = {}
    rest: str = "full"
    period: int = 0
    every: str = ""
    first: bool = False


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row.

    Parameters
    ----------
    types : each ``model_type`` that it reads; its own name where it says nothing. like : the row whose keys it has
        where it says nothing else; ``reads`` and ``sets`` are added to that row's.
    embedding, attention, block, head : ``"PART NAME"`` of each module or tensor, parts of
        :mod:`clustersim.model.naming`; a block's attention stands before its other parts.
    block_name : what stands before a block's names, ``{}`` for its number; where two blocks are one layer of the class,
        ``{pair}`` for the layer's, and ``{half}`` in a block's names for which of the two it is.
    mtp : of modules that predict further
        tokens, numbered after the last block.
    scores : whose passes over attention scores its eager code makes, a key of ``SCORES``.
    reads : dimensions of a Shape (``experts.count`` for one of its parts) to fields of the config; the first that is
        there counts where several are joined by ``|``; ``table.field`` is one of a table inside the config.
    sets : dimensions that the class fixes. ``gated`` says that the MLP multiplies two projections, ``rotated_windows``
        that blocks with a window or a chunk alone rotate (EXAONE 4, Command A).
    rules : functions of :data:`clustersim.model.rules.RULES` for what a table cannot say, in order.
    needs : dimensions that a config must have, beside the usual ones. optional : usual ones that it need not, as
        published configs leave out what the class has by default.
    fields_of : the ``model_type`` of transformers whose defaults count, where it is not the config's own.
    text, vision : of a decoder with a tower in front, the ``model_type`` of each where its table does not say.
        text_to, head_to, vision_to : what stands before the names of its tensors. merged : how many tokens the
        patches of an image become, as :mod:`clustersim.model.towers` reads it. projector : what stands between.
    own_parts : its tables are of ``text`` and ``vision`` whatever their ``model_type`` says.
    without : tables of parts that are not described: they must be missing or null.
    known : further fields that say nothing about size or speed, or are read by a rule.
    note : a sentence on what is assumed.
    """

    types: tuple[str, ...] = ()
    like: str = ""
    embedding: tuple[str, ...] = ()
    block_name: str = ""
    attention: tuple[str, ...] = ()
    block: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    mtp: tuple[str, ...] = ()
    scores: str = "llama"
    reads: dict[str, str] = {}
    sets: dict[str, Any] = {}
    kinds: Kinds | None = None
    rules: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    fields_of: str = ""
    text: str = ""
    vision: str = ""
    text_to: str = ""
    head_to: str = ""
    vision_to: str = ""
    merged: str = ""
    projector: tuple[str, ...] = ()
    own_parts: bool = False
    without: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    note: str = ""


class Fields(msgspec.Struct, frozen=True):
    """What transformers' configuration class of a ``model_type`` has.

    ``fields`` : each with its default. ``also`` : other names to these.
    """

    fields: dict[str, Any] = {}
    also: dict[str, str] = {}


class FamilyTable(msgspec.Struct, frozen=True):
    """A family as it is written, before it has what the row has that it is like.

    Parameters
    ----------
    name : of the row. table : its keys, as in a file of ``data/families``.
    """

    name: str
    table: Table


@lru_cache(maxsize=1)
def _shipped() -> dict[str, Table]:
    tables: dict[str, Table] = {}
    for path in sorted((data_path("data") / "families").glob("*.toml")):
        tables |= tomllib.loads(path.read_text(encoding="utf-8"))
    return tables


def _rows() -> Iterator[FamilyTable]:
    yield from (FamilyTable(name, table) for name, table in _shipped().items())


def _whole_family(row: FamilyTable) -> Family:
    return msgspec.convert(_whole(row.name, {**_shipped(), row.name: row.table}), Family)


def _checked(row: FamilyTable) -> FamilyTable:
    """The row, if it is one: of shipped ones its own tests say so."""
    if row.name not in _shipped():
        parent = row.table.get("like")
        if parent is not None and parent not in _shipped():
            raise ValueError(f"like = {parent!r} is no shipped family; {nearest(str(parent), _shipped())}")
        _whole_family(row)
    return row


def _types(row: FamilyTable) -> tuple[str, ...]:
    """Each ``model_type`` of a row, and its name."""
    return tuple(dict.fromkeys((row.name, *row.table.get("types", ()))))


FAMILIES = RowTable("clustersim.families", "model family", FamilyTable, _rows(), names=_types, checked=_checked)
"""Every family as it is written, by name."""


class ShippedFirst(Mapping[str, Answer]):
    """What follows from the rows of a table, by a name: packages are asked for names that are not shipped."""

    def __init__(self, shipped: Mapping[str, Answer], every: Callable[[], Mapping[str, Answer]]) -> None:
        self._near = shipped
        self._every = every

    def __getitem__(self, name: str) -> Answer:
        return self._near[name] if name in self._near else self._every()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._every())

    def __len__(self) -> int:
        return len(self._every())


@lru_cache(maxsize=1)
def families() -> Mapping[str, Family]:
    """Every row by its name."""
    shipped = {name: msgspec.convert(_whole(name, _shipped()), Family) for name in _shipped()}

    @lru_cache(maxsize=1)
    def every(_edition: int) -> Mapping[str, Family]:
        """As of one edition of the table."""
        return {name: shipped.get(name) or _whole_family(row) for name, row in FAMILIES.items()}

    return ShippedFirst(shipped, lambda: every(FAMILIES.edition))


def _whole(name: str, tables: dict[str, Table]) -> Table:
    """A row with what it has from the rows that it is like."""
    table = tables[name]
    types = {"types": table.get("types", [name])}
    if "like" not in table:
        return table | types
    parent = _whole(table["like"], tables)
    inherited = {key: value for key, value in parent.items() if key not in _OWN}
    merged = {key: inherited.get(key, {}) | table.get(key, {}) for key in _MERGED}
    return inherited | table | merged | types


@lru_cache(maxsize=1)
def by_type() -> Mapping[str, str]:
    """The row of each ``model_type``."""

    def typed(names: Iterable[str]) -> Mapping[str, str]:
        """The family of each type of these names."""
        return {kind: name for name in names for kind in families()[name].types}

    @lru_cache(maxsize=1)
    def every(_edition: int) -> Mapping[str, str]:
        """As of one edition of the table."""
        return typed(FAMILIES)

    return ShippedFirst(typed(_shipped()), lambda: every(FAMILIES.edition))


@lru_cache(maxsize=1)
def _fields() -> dict[str, Fields]:
    text = (data_path("data") / "families" / "fields.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, Fields])


def fields_of(kind: str) -> Fields:
    """The fields of a ``model_type``; none for one that transformers does not have."""
    return _fields().get(kind, Fields())


def base_fields() -> frozenset[str]:
    """Fields that every configuration has, and that say nothing about a model's size."""
    return frozenset(_fields()[""].fields)
