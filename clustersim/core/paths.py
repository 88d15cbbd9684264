"""Where the shipped files are, beside the package in a checkout and inside it in a wheel; and what JSON can hold."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

RUN_FILE = "run.npz"
"""What a saved run is called in its folder."""
_PACKAGE = Path(__file__).resolve().parents[1]


def data_path(kind: str) -> Path:
    """Folder of the shipped ``topologies``, ``scenarios`` or ``data`` files.

    A wheel carries the top-level folders inside the package; an editable install reads the checkout's own.
    """
    inside = _PACKAGE / kind
    return inside if inside.is_dir() else _PACKAGE.parent / kind


def checkout() -> Path | None:
    """Root of the checkout that the package is used from; None where it was installed from a wheel."""
    above = _PACKAGE.parent
    return above if (above / "tests" / "evidence").is_dir() else None


def shipped(kind: str, suffix: str = ".toml") -> list[str]:
    """Names, without suffix, of every shipped file of a kind, sorted."""
    folder = data_path(kind)
    file_names = os.listdir(folder) if folder.is_dir() else []
    return sorted(name.removesuffix(suffix) for name in file_names if name.endswith(suffix))


def _finite(value: Any) -> bool:
    return bool(abs(value).max(initial=0.0) < math.inf)  # comparing with NaN is false


def plain(value: Any) -> Any:
    """Numpy, Structs, dataclasses and infinities as what JSON can hold: not-a-number and infinity become null."""
    if isinstance(value, msgspec.Struct):
        return plain(msgspec.to_builtins(value, str_keys=True, enc_hook=plain))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        listed = value.tolist()  # of numbers that JSON can hold as they are: most, and a run has a hundred thousand
        return listed if value.dtype.kind in "biu" or (value.dtype.kind == "f" and _finite(value)) else plain(listed)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def json_text(value: Any) -> bytes:
    """Indented JSON of plain values and numpy, ending in a newline."""
    return msgspec.json.format(msgspec.json.encode(plain(value)), indent=2) + b"\n"
