"""Models that are named by their size alone."""

from __future__ import annotations

import pytest

from clustersim.core.errors import ModelError
from clustersim.model.transformer_model import build
from tests.evidence.generic import from_row
from tests.evidence.sized import named_shape, of_size


@pytest.mark.parametrize(
    ("parameters", "layers", "width"),
    [(2.7e9, 32, 2560), (6.7e9, 32, 4096), (13e9, 40, 5120), (175e9, 96, 12288), (530e9, 105, 20480)],
)
def test_the_published_models_of_gpt3s_sizes_are_met(parameters: float, layers: int, width: int) -> None:
    shape = of_size(named_shape("gpt2-xl"), parameters)
    assert shape.d_model == width
    assert shape.layers == pytest.approx(layers, rel=0.05)


@pytest.mark.parametrize("family", ["gpt2-xl", "llama2-7b", "llama2-70b", "opt-6.7b"])
@pytest.mark.parametrize("parameters", [1.16e9, 3e9, 8e9, 24e9, 400e9])
def test_the_count_is_met_to_half_a_layer(family: str, parameters: float) -> None:
    shape = of_size(named_shape(family), parameters)
    assert build(shape).parameters == pytest.approx(parameters, rel=0.6 / shape.layers)
    assert shape.heads % shape.kv_heads == 0


def test_a_row_with_a_size_alone_is_read_and_says_what_was_assumed() -> None:
    model = from_row({"model": "GPT-2 style 52B", "params": "52B", "seq_len": "1024"})
    assert model.parameters == pytest.approx(52e9, rel=0.01)
    assert any("64 layers of 8192" in note for note in model.notes)


def test_fewer_parameters_than_the_vocabulary_has_are_refused() -> None:
    with pytest.raises(ModelError, match="fewer than one layer"):
        of_size(named_shape("llama3-8b"), 50e6)
