"""The table of memory parts: what is added to it is shown everywhere, and what a step holds is in it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import ROOT
from matplotlib.colors import to_hex

from clustersim import load
from clustersim.app import plots
from clustersim.app.cli import cli
from clustersim.app.report import content
from clustersim.core import memory_parts
from clustersim.core.device import device
from clustersim.core.memory_parts import MEMORY_PARTS, MemoryPart
from clustersim.core.memory_use import MemoryCourse
from clustersim.scenario.run.held import held

SMALL = "ddp_resnet50_1x8_v100"
SPLIT = "gpipe_gpt2_xl_1x8_a100"
PRODUCTS = MemoryPart(
    key="part_of_a_test",
    label="workspace of a test",
    colour="#123456",
    head="products",
    variant_head="products",
    value=lambda columns, gpu: gpu.sms + 100 * columns["parameters"],
)
V100_SMS = 80
A100_SMS = 108


@pytest.fixture
def with_workspace(monkeypatch):
    """The table with one part more, before the last that the framework allocates."""
    monkeypatch.setattr(memory_parts, "MEMORY_PARTS", (*MEMORY_PARTS[:-2], PRODUCTS, *MEMORY_PARTS[-2:]))


@pytest.fixture
def expected(with_workspace):
    """Bytes of the new part of the small run."""
    use = held(load(SMALL)).use
    assert use.part_of_a_test == V100_SMS + 100 * use.parameters > 0
    return use.part_of_a_test


def printed(*words):
    """What a command prints."""
    done = CliRunner().invoke(cli, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_new_part_counts_in_the_peak():
    without = held(load(SMALL)).use
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_parts, "MEMORY_PARTS", (*MEMORY_PARTS, PRODUCTS))
        use = held(load(SMALL)).use
    assert use.allocated == pytest.approx(without.allocated + V100_SMS + 100 * without.parameters)
    assert use.model_states == without.model_states


def test_a_new_part_is_in_the_tables_of_memory_and_in_its_json(expected):
    assert "workspace of a test" in printed("memory", SMALL)
    assert json.loads(printed("memory", SMALL, "--json"))["rows"][0]["largest"]["part_of_a_test"] == expected
    heads = next(line for line in printed("memory", SMALL, "--all").splitlines() if "activ" in line)
    assert "products" in heads


def test_a_new_part_of_a_split_model_is_a_column_of_its_stages(with_workspace):
    heads = next(line for line in printed("memory", SPLIT).splitlines() if "stage" in line and "params" in line)
    assert "products" in heads
    for use in held(load(SPLIT)).split.memory:
        assert use.part_of_a_test == A100_SMS + 100 * use.parameters


def test_a_new_part_is_in_a_run_its_json_and_its_page(expected):
    result = load(SMALL).run()
    assert result.to_dict()["memory"]["by"]["part_of_a_test"] == expected
    assert "workspace of a test" in str(result.verdict)
    assert result.facts().memory_course.columns()["part_of_a_test"].max() == expected
    part = content._memory(result.saved)
    assert "workspace of a test" in dict(part.rows)
    assert any(PRODUCTS.colour in str(picture) for picture in part.svgs)


def test_a_new_part_has_its_colour_in_every_picture_of_memory(expected):
    use = held(load(SMALL)).use
    for figure in (
        plots.footprint(use.at_peak()),
        plots.footprints({"one": use.at_peak()}),
        plots.memory_over_time(use.course.moments, use.course.parts),
    ):
        entries = zip(*figure.axes[0].get_legend_handles_labels(), strict=True)
        (drawn,) = (handle for handle, label in entries if label.startswith("workspace of a test"))
        area = drawn[0] if isinstance(drawn, tuple) else drawn
        assert to_hex(np.ravel(area.get_facecolor())[:3]) == PRODUCTS.colour


def test_a_new_part_is_in_explore(expected):
    from clustersim.app.explore.runs import PlayRequest, RunPlayer

    assert "workspace of a test" in RunPlayer(ROOT / "scenarios" / f"{SMALL}.toml")(PlayRequest()).html


def test_what_a_step_holds_is_a_row():
    moments = ("fwd a", "bwd a", "optimizer")
    rows = [part for part in MEMORY_PARTS if part.of != "driver"]
    columns = {part.key: np.ones(3) for part in rows if part.value is None}
    assert list(MemoryCourse.of(moments, columns, device("V100-SXM2-16GB")).parts) == [part.key for part in rows]
    with pytest.raises(KeyError, match="unheard_of"):
        MemoryCourse.of(moments, columns | {"unheard_of": np.ones(3)})
    del columns["logits"]
    with pytest.raises(KeyError, match="logits"):
        MemoryCourse.of(moments, columns)


def test_a_part_that_is_computed_needs_a_gpu(with_workspace):
    columns = {part.key: np.ones(3) for part in MEMORY_PARTS if part.value is None and part.of != "driver"}
    with pytest.raises(KeyError, match="needs the GPU whose memory it is: part_of_a_test"):
        MemoryCourse.of(("fwd a", "bwd a", "optimizer"), columns)


def test_a_part_that_there_is_not_is_no_attribute():
    with pytest.raises(AttributeError, match="activation"):
        held(load(SMALL)).use.activation  # noqa: B018


def test_no_two_parts_share_a_name_and_each_is_in_one_column():
    assert len({part.key for part in MEMORY_PARTS}) == len({part.label for part in MEMORY_PARTS}) == len(MEMORY_PARTS)
    columns = memory_parts.stage_columns()
    assert sorted(key for keys in columns.values() for key in keys) == sorted(part.key for part in MEMORY_PARTS)
    assert {part.of for part in MEMORY_PARTS} == {"states", "step", "driver"}
