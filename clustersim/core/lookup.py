"""A package whose names are looked up when first used, so that importing one of its modules loads no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def looked_up(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    ``homes`` : module of the package -> the names that are taken from there, parted by blanks. Only those outside the
    package take them from it: inside, a name is imported from its module.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}

    def look_up(name: str) -> Any:
        """Import the module that has the name. Raises AttributeError for a name that no module has."""
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home_of[name]}"), name)

    return look_up
