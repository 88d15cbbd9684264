"""Fields of a Hugging Face config.json, read with errors that name file, field and what it is for.

A field that is missing has the default of transformers' configuration class for that ``model_type``, and a note says
so; a field that no class has but that looks like the one that is missing is an error that asks. What is there and is
not read is told, unless it says nothing about size or speed.
"""

from __future__ import annotations

import difflib
from functools import lru_cache
from typing import Any

import msgspec

from clustersim.core.errors import ModelError, nearest
from clustersim.core.texts import Table, data_table
from clustersim.model.families import Family, Fields, base_fields, by_type, families, fields_of

ALIKE = 0.8
"""How alike two names of fields must be for one to be a slip of the pen."""


@lru_cache(maxsize=1)
def inert() -> frozenset[str]:
    """Fields of many families that change neither sizes nor kernels."""
    return frozenset(data_table("inert_fields")["fields"])


@lru_cache(maxsize=1)
def changing() -> frozenset[str]:
    """Fields that change tensors or kernels wherever they are set."""
    return frozenset(data_table("inert_fields")["changing"])


def config_of(where: str, data: Table, kind: str) -> Config:
    """The fields of a ``model_type`` that is described, and as ``table.field`` those inside of tables that its row
    reads. Raises :class:`ModelError` where such a table is none."""
    family = families()[by_type()[kind]]
    config = Config(where, data, kind, fields_of(family.fields_of or kind), family.known)
    opened = {name: config.table(name) for name in _tables(family)}
    if not opened:
        return config
    defaults = {name: table for name in opened if isinstance(table := config.fields.fields.get(name), dict)}
    return msgspec.structs.replace(
        config,
        data={**data, **_dotted(opened)},
        fields=msgspec.structs.replace(config.fields, fields={**config.fields.fields, **_dotted(defaults)}),
    )


def _tables(family: Family) -> list[str]:
    """Names of the tables inside a config of which a row reads a field."""
    keys = (key for text in family.reads.values() for key in text.split("|"))
    return sorted({key.partition(".")[0] for key in keys if "." in key})


def _dotted(tables: dict[str, Table]) -> Table:
    return {f"{name}.{field}": value for name, table in tables.items() for field, value in table.items()}


def _bare(name: str) -> str:
    """A field's own name, without that of the table that it is in."""
    return name.rpartition(".")[2]


class Config(msgspec.Struct, frozen=True):
    """A config.json's fields and where they came from, for messages that name both.

    Parameters
    ----------
    where, data : the file, and its table. kind : its ``model_type``. fields : what transformers' class of it has.
    known : fields of the family that say nothing about size or speed. read : names of fields that were asked for,
        filled on the way. defaults : those that were missing, with what counts in their place.
    """

    where: str
    data: Table
    kind: str = ""
    fields: Fields = Fields()
    known: tuple[str, ...] = ()
    read: set[str] = msgspec.field(default_factory=set)
    defaults: dict[str, Any] = msgspec.field(default_factory=dict)

    def spellings(self, key: str) -> tuple[str, ...]:
        """Every name of one field, the one that was asked for first."""
        real = self.fields.also.get(key, key)
        return tuple(dict.fromkeys((key, real, *(name for name, to in self.fields.also.items() if to == real))))

    def spelled(self, key: str) -> str:
        """The name under which a field is there, be it null; empty where it is missing.

        Raises :class:`ModelError` for two numbers under two of its names: transformers takes the one that stands last.
        """
        names = self.spellings(key)
        self.read.update(names)
        there = [name for name in names if name in self.data]
        numbers = {name: self.data[name] for name in there if isinstance(self.data[name], int | float)}
        if len(set(numbers.values())) > 1:
            pairs = ", ".join(f"'{name}' = {number}" for name, number in numbers.items())
            raise ModelError(f"{self.where}: {pairs}: these are two names of one field; leave one of them out")
        return next((name for name in there if self.data[name] is not None), there[0] if there else "")

    def value(self, key: str) -> Any:
        """What a field holds; the class's default where it is missing, None where neither says anything."""
        name = self.spelled(key)
        if name:
            return self.data[name]
        self.refuse_slip(key)
        return self.default(key)

    def default(self, key: str) -> Any:
        """What transformers' class of this ``model_type`` takes where a field is missing; None for nothing."""
        return next((self.fields.fields[name] for name in self.spellings(key) if name in self.fields.fields), None)

    def has(self, key: str) -> bool:
        """Whether a field is there and is not null."""
        name = self.spelled(key)
        return bool(name) and self.data[name] is not None

    def need(self, key: str, meaning: str) -> int:
        """The whole number under ``key``; ModelError naming file, key and what it is for when it is not there."""
        if not self.has(key):
            self.spelled(key)
            raise ModelError(f"{self.where}: missing '{key}', {meaning}{self._hint(key, self.default(key))}")
        return self.number(key, 0, meaning)

    def number(self, key: str, default: int, meaning: str) -> int:
        """The whole number under ``key``; where it is missing the class's, then ``default``."""
        value = self.value(key)
        if value is None:
            value = default
        if not self.has(key):
            self.defaults[key] = value
        return self._whole(self.spelled(key) or key, value, meaning)

    def whole(self, key: str, default: int, meaning: str) -> int:
        """As :meth:`number`, where zero is a number too."""
        return (
            0 if self.value(key) == 0 and not isinstance(self.value(key), bool) else self.number(key, default, meaning)
        )

    def side(self, key: str, default: int, meaning: str) -> int:
        """As :meth:`number`, where that number may be there twice, once for each side."""
        value = self.value(key)
        if not isinstance(value, list):
            return self.number(key, default, meaning)
        sides = [side for side in value if isinstance(side, int) and not isinstance(side, bool) and side > 0]
        if len(value) != 2 or len(sides) != 2 or sides[0] != sides[1]:
            raise ModelError(f"{self.where}: '{key}' = {value!r} must be one whole number above zero, twice")
        return sides[0]

    def flag(self, key: str, default: bool, *, quiet: bool = False) -> bool:
        """The truth value under ``key``; ``quiet`` : nobody needs to be told what counts where it is missing."""
        value = self.value(key)
        if value is None:
            value = default
        if not quiet and not self.spelled(key):
            self.defaults[key] = value
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: '{key}' = {value!r} must be true or false")
        return value

    def rate(self, key: str, default: float) -> bool:
        """Whether a dropout probability is above zero."""
        value = self.value(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise ModelError(f"{self.where}: '{key}' = {value!r} must be a probability from 0 to 1")
        if value > 0 and not self.spelled(key):
            self.defaults[key] = value
        return value > 0

    def text(self, key: str, default: str) -> str:
        """The text under ``key``."""
        value = self.value(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise ModelError(f"{self.where}: '{key}' = {value!r} must be text such as {default!r}")
        return value

    def listed(self, key: str, what: str) -> list[Any]:
        """The list under ``key``; empty where it is missing or null."""
        value = self.value(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise ModelError(f"{self.where}: '{key}' = {value!r} must be a list, {what}")
        return value

    def table(self, key: str) -> Table:
        """The table under ``key``; empty where it is missing or null."""
        value = self.data.get(key)
        self.read.add(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ModelError(f"{self.where}: '{key}' = {value!r} must be a table of fields")
        return value

    def _whole(self, key: str, value: object, meaning: str) -> int:
        blocks = self.data.get("num_hidden_layers")
        if isinstance(value, list) and value and len(value) == blocks and value.count(value[0]) == blocks:
            value = value[0]  # one for each block, as Hunyuan's files write what all blocks share
        if isinstance(value, float) and value.is_integer() and value < 2**53:  # from where on none has units
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.where}: '{key}' = {value!r} must be a whole number above zero, {meaning}")
        return value

    def unknown(self) -> list[str]:
        """Fields that no configuration class of this kind has, nor was asked for."""
        mine = set(self.fields.fields) | set(self.fields.also) | base_fields() | inert() | self.read | set(self.known)
        return [name for name in self.data if not {name, _bare(name)} & mine and not name.startswith("_")]

    def refuse_slip(self, key: str) -> None:
        """Raises :class:`ModelError` where a field is missing and one that no class has is nearly called so."""
        for name in self.unknown():
            if any(_alike(name, right) for right in self.spellings(key)):
                raise ModelError(
                    f"{self.where}: missing '{key}'; '{name}' = {self.data[name]!r} is no field of {self.kind}: "
                    f"did you mean '{key}'?"
                )

    def refuse_unread(self) -> None:
        """Raises :class:`ModelError` for a field that changes tensors or kernels, and that the family does not read."""
        asked = self.read | set(self.known)
        for name, value in self.data.items():
            if {name, _bare(name)} & asked or name.startswith("_"):
                continue
            if _bare(name) in changing() and value not in (None, False, 0, [], {}):
                said = repr(value) if isinstance(value, int | float | str) else f"a {type(value).__name__}"
                raise ModelError(
                    f"{self.where}: '{name}' = {said} changes a model's tensors, but is not described of "
                    f"{self.kind}; null says that there is none"
                )

    def _hint(self, key: str, default: object) -> str:
        hint = nearest(key, self.unknown()) if self.unknown() else ""
        words = f"; {hint}" if hint.startswith("did you mean") else self._related(key)
        if default is None:
            return words
        return f"{words}; write it, {default!r} if it is as transformers' {self.kind} has it by default"

    def _related(self, key: str) -> str:
        """Fields that no class has and that share a word with the one that is missing."""
        words = {word for spelling in self.spellings(key) for word in _words(spelling)}
        close = [name for name in self.unknown() if words & _words(name) and isinstance(self.data[name], int)]
        return f"; is it {' or '.join(map(repr, close))}, which {self.kind} does not have?" if close else ""

    def unread(self) -> list[str]:
        """Fields that say something else than the class's default and were not read."""
        defaults = self.fields.fields
        mine = self.read | inert() | base_fields() | set(self.known)
        return [
            name
            for name, value in self.data.items()
            if not {name, _bare(name)} & mine
            and not name.startswith("_")
            and value is not None
            and value != defaults.get(name, ...)
        ]


def _words(name: str) -> set[str]:
    """What a field's name is about: ``n_routed_experts`` is about experts."""
    common = {"num", "n", "size", "per", "tok", "layers", "layer", "hidden", "of", "use", "max", "dim", "config"}
    whole = name.lower().replace("kv", "key_value")
    return {word.rstrip("s") for word in whole.split("_")} - common - {""}


def _alike(name: str, right: str) -> bool:
    """Whether a name is another one mistyped, or with its words in another order or form.

    >>> _alike("head_dims", "head_dim"), _alike("key_value_heads", "num_key_value_heads"), _alike("ep_size", "d_ff")
    (True, True, False)
    """
    if difflib.SequenceMatcher(None, name, right).ratio() >= ALIKE:
        return True
    mine = _words(name)
    other = _words(right)
    return len(other) > 1 and (mine == other)
