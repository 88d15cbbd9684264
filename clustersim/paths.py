"""Where the shipped files are: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_path(kind: str) -> Path:
    """Folder of the shipped ``topologies``, ``scenarios`` or ``data`` files.

    A wheel carries the top-level folders inside the package; an editable install reads the checkout's own.
    """
    inside = _PACKAGE / kind
    return inside if inside.is_dir() else _PACKAGE.parent / kind


def shipped(kind: str, suffix: str = ".toml") -> list[str]:
    """Names, without suffix, of every shipped file of a kind, sorted."""
    return sorted(path.stem for path in data_path(kind).glob(f"*{suffix}"))
