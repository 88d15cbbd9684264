"""``experts_implementation`` of transformers 5, as axolotl and ms-swift hand it on."""

from __future__ import annotations

from clustersim.files.launch.files import Document, OptionValue
from clustersim.model import named_models
from clustersim.model.published import known_as

GROUPED = ("grouped_mm", "scattermoe", "sonicmoe")
"""Words of ``experts_implementation`` whose experts are one product; ``eager`` and ``batched_mm`` go one by one."""


def taken(document: Document) -> None:
    """Experts in one grouped product, of a model that is known to have some; one that has none reads no such word."""
    asked = document.options.get(("args", "experts_implementation"))
    model = document.options.get(("args", "base_model")) or document.options.get(("args", "model_name_or_path"))
    known = None if model is None else known_as(str(model.value))
    shape = None if known is None else named_models.shape(known, {})
    if asked is None or shape is None or asked.value not in GROUPED:
        return
    del document.options["args", "experts_implementation"]
    if shape.experts is None:
        return
    document.options["args", "grouped_experts"] = OptionValue(asked.name, GROUPED[0], asked.where)
    if asked.value != GROUPED[0]:
        document.notes.append(f"{document.name}: {asked.as_written} is played as {GROUPED[0]}, one grouped product")
