"""Frameworks whose launch files are not read, by what tells them (``data/unread_frameworks.toml``): a file of theirs is
refused by its framework's name, and never read as another's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import pairwise

import msgspec

from clustersim.core.texts import data_table


class UnreadFramework(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A framework that is not read.

    Parameters
    ----------
    title : its name. commands : words of a command, one or two that stand together. programs : packages whose modules a
        command runs, or globs of its programs' paths. keys : options (globs) that together tell one, any one group,
        parted by ``|``. values : of an option, words (globs) that no other framework has.
    why : what of its files says too little. instead : what to give in their place.
    """

    title: str
    why: str
    instead: str
    commands: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    values: dict[str, tuple[str, ...]] = {}

    @property
    def refusal(self) -> str:
        """Whose a file is, why it is not read, and what to give in its place."""
        return f"is of {self.title}, whose files are not read: {self.why}; {self.instead}"


@lru_cache(maxsize=1)
def frameworks() -> tuple[UnreadFramework, ...]:
    """Every row."""
    return tuple(msgspec.convert(row, UnreadFramework) for row in data_table("unread_frameworks").values())


def of_command(words: Sequence[str]) -> UnreadFramework | None:
    """The framework of a command, by its words: those of its commands without their folders, paths as they are."""
    names = [word.rsplit("/", 1)[-1] for word in words]
    pairs = {*names, *(" ".join(pair) for pair in pairwise(names))}
    for row in frameworks():
        paths = [glob for glob in row.programs if "/" in glob]
        if pairs & set(row.commands) or any(fnmatchcase(word, glob) for word in words for glob in paths):
            return row
    return None


def of_file(program: str, options: Mapping[str, object]) -> UnreadFramework | None:
    """The framework of a file.

    Parameters
    ----------
    program : that a command runs, a module or a path; empty for none. options : values by plain name.
    """
    package = re.split(r"[./]", program)[0]
    for row in frameworks():
        if program and (package in row.programs or any(fnmatchcase(program, glob) for glob in row.programs)):
            return row
        if has_group(list(options), row.keys):
            return row
        for name, globs in row.values.items():
            if name in options and any(fnmatchcase(str(options[name]), glob) for glob in globs):
                return row
    return None


def has_group(names: Sequence[str], groups: Sequence[str]) -> bool:
    """Whether all globs of any one group, which ``|`` parts, are met."""
    return any(all(any(fnmatchcase(name, glob) for name in names) for glob in group.split("|")) for group in groups)
