"""Which layers every stage has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from partitions import (
    small,
)

from clustersim.core.errors import ModelError, ScenarioError
from clustersim.model import model
from clustersim.training.parallel import ParallelConfig
from clustersim.training.parallel.counts import weighted
from clustersim.training.partition import partition


@given(stages=st.integers(1, 12), layers=st.integers(12, 130), first=st.integers(0, 1), last=st.integers(0, 1))
def test_uneven_splits_add_up_and_differ_by_one(stages: int, layers: int, first: int, last: int) -> None:
    assert sum(weighted(layers, stages)) == sum(weighted(layers, stages, first, last)) == layers
    counts = weighted(layers, stages, first, last)
    counts[0] += first
    counts[-1] += last
    assert max(counts) - min(counts) <= 1


def test_first_and_last_ranks_may_have_layers_of_their_own() -> None:
    def blocks(**settings: object) -> list[list[int]]:
        split = partition(small(layers=14), ParallelConfig(**settings))
        return [
            [sum(layer.kind == "block" for layer in chunk.layers) for chunk in stage.chunks] for stage in split.stages
        ]

    ends = {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 4}
    assert blocks(pp=4, **ends) == [[2], [4], [4], [4]]
    assert blocks(pp=4, vpp=2, **ends) == [[1, 1], [2, 2], [2, 2], [2, 2]]
    account = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    assert blocks(pp=4, **account) == [[3], [4], [4], [3]]
    assert blocks(pp=4, vpp=2, **account) == [[1, 2], [2, 2], [2, 2], [2, 1]]
    assert blocks(pp=4, layout=(2, 5, 5, 2)) == [[2], [5], [5], [2]]


def test_placements_give_ranks_their_stages() -> None:
    whole = small(layers=8, tied=True)
    v = partition(whole, ParallelConfig(pp=2, vpp=2), placement="v")
    assert [[chunk.stage for chunk in stage.chunks] for stage in v.stages] == [[0, 3], [1, 2]]
    # Embedding and head are on one rank, which shares the table.
    assert v.tied == 0
    assert sum(stage.parameters for stage in v.stages) == whole.parameters
    both = partition(whole, ParallelConfig(pp=2), placement="both")
    assert [[chunk.stage for chunk in stage.chunks] for stage in both.stages] == [[0, 1], [1, 0]]
    assert sum(stage.parameters for stage in both.stages) == 2 * whole.parameters


def test_models_without_blocks_are_split_by_layers() -> None:
    whole = model("resnet50")
    split = partition(whole, ParallelConfig(pp=2, layout=(40, 33)))
    assert [len(stage.layers) for stage in split.stages] == [40, 33]
    assert split.stages[0].chunks[0].message == whole.layers[40].boundary_bytes
    assert sum(stage.parameters for stage in split.stages) == whole.parameters


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 3}, "tp = 3 does not divide"),
        ({"pp": 3}, "pp = 3: 4 layers do not divide over 3 ranks"),
        ({"pp": 2, "layout": (1, 2)}, "layout has 2 stages of 3 layers together"),
        ({"pp": 2, "layout": "Et|tL"}, "layout has 2 stages with 1 E, 2 t"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_field(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        partition(small(), ParallelConfig(**settings))


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ScenarioError, match="resnet50 has nothing that tensor parallelism cuts"):
        partition(model("resnet50"), ParallelConfig(tp=2))
    with pytest.raises(ModelError, match="cp = 2 needs fused attention"):
        partition(small(attention="eager"), ParallelConfig(cp=2))
    with pytest.raises(ScenarioError, match="gives every rank 2 chunks"):
        partition(small(), ParallelConfig(pp=2), placement="v")
