"""Tables of what there is to choose from, to which others add rows of their own: strategies, algorithms, formats ...

A row comes from this package, from :meth:`RowTable.register`, or from an installed package that names it as an entry
point of the table's group. Entry points are looked up when somebody asks for a name that is not shipped or goes
through the whole table, and only the row that is asked for is imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar

from clustersim.core.errors import PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class NamedRow(Protocol):
    """What a row of any table has."""

    @property
    def name(self) -> str:
        """The name that files and options use."""


AnyRow = TypeVar("AnyRow", bound=NamedRow)


REGISTERED = "this program registered it"
"""Whose a row is that no package names."""


class PluginWarning(UserWarning):
    """A row of another package that is left out, and why."""


class RowTable(Mapping[str, AnyRow]):
    """Rows by name: shipped ones first, then those of others.

    Parameters
    ----------
    group : the group of entry points that add rows. noun : a row in words, for errors. row_type : what a row is.
    rows : the shipped ones; gone through when the table is first read. names : every name that a row answers to, as
        it is compared with others'. checked : ``row -> row``, which may refuse a row or guard its functions.

    >>> from types import SimpleNamespace
    >>> table = RowTable("doc.rows", "row", SimpleNamespace, [SimpleNamespace(name="a")])
    >>> table.register(SimpleNamespace(name="b"))
    >>> list(table)
    ['a', 'b']
    >>> table.register(SimpleNamespace(name="a"))
    Traceback (most recent call last):
    clustersim.core.errors.PluginError: row 'a' is taken: clustersim ships it; choose another name
    """

    def __init__(
        self,
        group: str,
        noun: str,
        row_type: type[AnyRow],
        rows: Iterable[AnyRow],
        *,
        names: Callable[[AnyRow], Iterable[str]] = lambda row: (row.name,),
        checked: Callable[[AnyRow], AnyRow] = lambda row: row,
    ) -> None:
        self.group = group
        self.noun = noun
        self._row_type = row_type
        self._shipped = rows
        self._names = names
        self._checked = checked
        self._owners: dict[str, str] = {}
        self._added: dict[str, AnyRow] = {}
        self._refused: dict[str, str] = {}
        self._edition = 1

    def register(self, row: AnyRow) -> None:
        """Add a row of one's own, in this process; the very same row again changes nothing.

        Raises :class:`PluginError` for a name that is taken, and for what is no such row.
        """
        name = getattr(row, "name", None)
        if name in self._added and self._added[name] is row:
            return
        if name in self._pending:
            raise PluginError(f"{self.noun} {name!r} is taken: {_package(self._pending[name][0])} adds it")
        self._add(row, REGISTERED)

    def withdraw(self, name: str) -> None:
        """Take out a row that was registered, for tests: what was worked out with it may be kept in caches."""
        row = self._added.pop(name)
        del self._rows[name]
        for word in self._names(row):
            del self._owners[word]
        self._edition += 1

    def own(self, name: str) -> AnyRow | None:
        """The row of this name that a program or another package added; None where it is shipped, or nobody's.

        Raises :class:`PluginError` for a package that cannot be imported.
        """
        if name not in self._rows:
            self._load(name)
        return self._added.get(name)

    @property
    def edition(self) -> int:
        """A number that is another when rows are others, for caches of what follows from all of them."""
        return len(self) and self._edition

    def __getitem__(self, name: str) -> AnyRow:
        row = self._rows.get(name)
        if row is None:
            self._load(name)
            row = self._rows[name]
        return row

    def __iter__(self) -> Iterator[str]:
        for name in tuple(self._pending):
            try:
                self._load(name)
            except PluginError as wrong:
                warnings.warn(f"{wrong}; it is left out", PluginWarning, stacklevel=2)
        return iter(self._rows)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @cached_property
    def _rows(self) -> dict[str, AnyRow]:
        rows = {row.name: self._checked(row) for row in self._shipped}
        self._owners.update({word: "clustersim ships it" for row in rows.values() for word in self._names(row)})
        return rows

    @cached_property
    def _pending(self) -> dict[str, list[EntryPoint]]:
        """Entry points that nobody has asked for yet, by name."""
        from importlib.metadata import entry_points

        pending: dict[str, list[EntryPoint]] = {}
        for entry in entry_points(group=self.group):
            pending.setdefault(entry.name, []).append(entry)
        return pending

    def _load(self, name: str) -> None:
        """Import the row of this name, if a package has it. Raises :class:`PluginError` for a broken one, each time."""
        entries = self._pending.pop(name, [])
        if entries:
            try:
                self._take(name, entries)
            except PluginError as wrong:
                self._refused[name] = str(wrong)
                raise
        elif name in self._refused:
            raise PluginError(self._refused[name])

    def _take(self, name: str, entries: list[EntryPoint]) -> None:
        packages = sorted({_package(entry) for entry in entries})
        if len({entry.value for entry in entries}) > 1:
            raise PluginError(f"{self.noun} {name!r} is of {' and of '.join(packages)}; keep one of them installed")
        where = f"{self.noun} {name!r} of {packages[0]} (entry point {self.group}: {entries[0].value})"
        try:
            row = entries[0].load()
        except Exception as wrong:
            raise PluginError(f"{where} cannot be imported: {type(wrong).__name__}: {_line(wrong)}") from wrong
        if isinstance(row, self._row_type) and row.name != name:
            raise PluginError(f"{where} calls itself {row.name!r}; the entry point must have the same name")
        try:
            self._add(row, f"{packages[0]} adds it")
        except PluginError as wrong:
            raise PluginError(f"{where}: {wrong}") from None

    def _way_out(self, row: AnyRow) -> str:
        """What somebody does whose row has a taken name: mostly a notebook's cell that is run again."""
        again = self._owners.get(row.name) == REGISTERED
        return f"withdraw({row.name!r}) takes that row out first" if again else "choose another name"

    def _add(self, row: AnyRow, owner: str) -> None:
        if not isinstance(row, self._row_type):
            raise PluginError(
                f"a row of {self.group} must be of type {self._row_type.__name__}, not {type(row).__name__}"
            )
        rows = self._rows
        words = tuple(self._names(row))
        for word in words:
            if word in self._owners:
                raise PluginError(f"{self.noun} {word!r} is taken: {self._owners[word]}; {self._way_out(row)}")
        try:
            checked = self._checked(row)
        except Exception as wrong:
            raise PluginError(f"{self.noun} {row.name!r} cannot be used: {_line(wrong)}") from wrong
        rows[row.name] = checked
        self._added[row.name] = row
        self._owners.update(dict.fromkeys(words, owner))
        self._edition += 1


def _package(entry: EntryPoint) -> str:
    """The package of an entry point, with its release."""
    return f"package {entry.dist.name} {entry.dist.version}" if entry.dist else "a package without a name"


def _line(wrong: Exception) -> str:
    """An error's words on one line."""
    return " ".join(str(wrong).split()) or "no reason given"
