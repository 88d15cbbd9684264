"""``python -m tests.evidence bytes``: models beside transformers' classes and torch's trackers."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from clustersim.app.cli.common import json_option, print_json, working
from clustersim.app.cli.validate import markdown_option
from clustersim.core.errors import ModelError
from clustersim.model import from_hf
from tests.evidence.rows_shown import show_rows

HEAD = ("what", "now", "target")
TESTS = Path(__file__).parents[1]
NEEDS = ("torch", "transformers")


@click.command("bytes")
@click.option("--configs", default=3, help="Random configs of each model type.")
@markdown_option
@json_option
def torch_bytes(configs: int, as_json: bool, markdown: bool) -> None:
    """What is said of models beside transformers' own classes on the meta device and torch's MemTracker.

    Rows that need a package that is not there say so.
    """
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    with working("looking at models"):
        rows = [*_of_classes(configs), *_of_peaks()]
    if as_json:
        print_json([dict(zip(HEAD, row, strict=True)) for row in rows])
    else:
        show_rows("bytes as PyTorch has them", HEAD, rows, markdown=markdown)


Row = tuple[str, str, str]


def _of_classes(configs: int) -> Iterator[Row]:
    """Model types and random configs whose parameters are those of transformers' class."""
    absent = [name for name in NEEDS if find_spec(name) is None]
    if absent:
        needs = f"needs {' and '.join(absent)}"
        yield "model types read as transformers registers them", needs, "90"
        yield "parameters of random configs", needs, "all but refused ones"
        return
    import test_models_families as families
    import transformers

    transformers.logging.set_verbosity_error()
    exact: dict[str, int] = {}
    refused = 0
    for kind in (*families.KINDS, *sorted(families.SEEING)):
        rng = random.Random(zlib.crc32(kind.encode()))
        make = families.seeing_config if kind in families.SEEING else families.random_config
        exact[kind] = 0
        for _ in range(configs):
            try:
                exact[kind] += _agrees(families, make(kind, rng))
            except ModelError:
                refused += 1
    whole = [kind for kind in exact if exact[kind] == configs]
    others = ", ".join(kind for kind in exact if kind not in whole)
    types = f"{len(whole)} of {len(exact)}" + (f"; not {others}" if others else "")
    yield "model types read as transformers registers them", types, "90"
    agree = f"{sum(exact.values())} of {configs * len(exact)}, {refused} refused"
    yield "parameters of random configs", agree, "all but refused ones"
    changed, wrong = _silently_wrong(families)
    yield (
        "configs with a field taken away or renamed that are silently wrong",
        f"{len(wrong)} of {changed}" + (f"; {', '.join(wrong)}" if wrong else ""),
        "0 of 2,000",
    )


def _silently_wrong(families: Any) -> tuple[int, list[str]]:
    """How many configs were changed, and those read as another model with neither an error nor a note of the field; one
    without a field is as the class reads it, by the class's own default."""
    changed = 0
    wrong = []
    for kind in families.KINDS:
        whole = families.random_config(kind, random.Random(11))
        size = _parameters(families, whole)
        for field in whole:
            if field == "model_type":
                continue
            rest = {name: value for name, value in whole.items() if name != field}
            for config in (rest, rest | {f"my_{field}": whole[field]}):
                changed += 1
                try:
                    made = from_hf(config)
                except ModelError:
                    continue
                noted = any(field in note for note in made.notes)
                told = sum(numel for _, numel in families.as_rows(made))
                if not noted and told != size and not (config is rest and _agrees(families, rest)):
                    wrong.append(f"{kind} without {field}")
    return changed, wrong


def _agrees(families: Any, config: dict[str, Any]) -> bool:
    """Whether a config has the class's parameters, in all; not where the class cannot be made of it."""
    try:
        theirs = families.as_transformers(config)
    except (TypeError, ValueError, AttributeError):
        return False
    return _parameters(families, config) == sum(numel for _, numel in theirs)


def _parameters(families: Any, config: dict[str, Any]) -> int:
    return sum(numel for _, numel in families.as_rows(from_hf(config)))


def _of_peaks() -> Iterator[Row]:
    """Peaks of the frozen table."""
    import torch_peaks

    off = {case: torch_peaks.predicted(*case) / torch_peaks.kept()[case] - 1.0 for case in torch_peaks.CASES}
    near, far = (sum(abs(error) <= bound for error in off.values()) for bound in (0.03, 0.05))
    worst = max(off, key=lambda case: abs(off[case]))
    yield (
        f"peak of memory beside MemTracker, {len(off)} cases",
        f"{near} within 3 %, {far} within 5 %; worst {off[worst]:+.1%} ({' '.join(worst)})",
        "all within 5 %, 9 of 10 within 3 %",
    )
