"""Writes ``clustersim/data/families/fields.json``: fields and defaults of transformers' configuration classes.

    python tests/hf_fields.py

needs transformers; the file is what :mod:`clustersim.model.config` reads without it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "clustersim" / "data" / "families" / "fields.json"


def without_torchvision() -> None:
    """Let transformers do without a torchvision that does not go with the installed torch; before it is imported."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision"] = None  # type: ignore[assignment]


def plain(value: Any) -> Any:
    """A default as JSON has it; None for what it cannot hold."""
    if value is dataclasses.MISSING:
        return None
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return None


def own(cls: Any, base: set[str]) -> dict[str, Any]:
    """Fields of a class that not all have, with their defaults."""
    return {
        field.name: plain(
            field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        )
        for field in dataclasses.fields(cls)
        if field.name not in base
    }


def rotated_share(cls: Any) -> dict[str, float]:
    """What share of each head a class rotates by default, where it reads one."""
    try:
        rotation = cls().rope_parameters
    except Exception:  # of a class that needs fields, or that rotates nothing
        return {}
    share = rotation.get("partial_rotary_factor") if isinstance(rotation, dict) else None
    return {"partial_rotary_factor": share} if isinstance(share, float) else {}


def tables(kinds: list[str]) -> dict[str, Any]:
    """What the file holds, for these model types and, under an empty name, for all."""
    without_torchvision()
    warnings.filterwarnings("ignore")
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    base = {field.name: plain(field.default) for field in dataclasses.fields(PretrainedConfig)}
    whole: dict[str, Any] = {"": {"fields": base}}
    for kind in kinds:
        if kind in CONFIG_MAPPING:
            cls = CONFIG_MAPPING[kind]
            whole[kind] = {"fields": own(cls, set(base)) | rotated_share(cls), "also": dict(cls.attribute_map)}
    return whole


def kinds_of_rows() -> list[str]:
    """Every model type that a row reads, or whose defaults it takes."""
    from clustersim.model.families import families
    from clustersim.model.hf import UNSHAPED

    rows = families().values()
    return sorted({kind for row in rows for kind in (*row.types, row.fields_of) if kind} | set(UNSHAPED))


def main() -> None:
    """Write the file, a line for each model type."""
    whole = tables(kinds_of_rows())
    lines = [f"{json.dumps(kind)}: {json.dumps(table, sort_keys=True)}" for kind, table in whole.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
