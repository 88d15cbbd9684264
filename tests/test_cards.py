"""What Python and a notebook show of large values is short, and says what they are."""

from __future__ import annotations

import pytest

import clustersim
from clustersim.studies.sweep import spec


@pytest.fixture(scope="module")
def values():
    result = clustersim.load("ddp_resnet50_1x8_v100").run()
    prepared = result.prepared
    return {
        "Scenario": result.scenario,
        "Prepared": prepared,
        "Model": prepared.model,
        "Topology": prepared.topology,
        "Program": prepared.program,
        "Timeline": result.timeline,
        "Result": result,
        "Explanation": result.explain(),
        "SavedRun": result.saved,
        "Sweep": spec.load("sweep_oversubscription_fsdp_8b"),
    }


def test_every_large_value_prints_as_its_name_and_one_line(values):
    for name, value in values.items():
        assert repr(value).startswith(f"<{name}"), repr(value)
        assert len(repr(value)) <= 200, repr(value)
        assert "\n" not in repr(value)


def test_a_line_counts_what_is_there(values):
    timeline = values["Timeline"]
    spans = len(timeline.spans()["rank"])
    assert f"{timeline.world_size} ranks, " in repr(timeline)
    assert f"{len(timeline.ops):,} ops, {spans:,} spans" in repr(timeline)
    assert f"{values['Model'].parameters:,} parameters" in repr(values["Model"])


@pytest.mark.parametrize("name", ["Scenario", "Timeline", "Result", "Sweep"])
def test_a_notebook_shows_a_small_table(values, name):
    html = values[name]._repr_html_()
    assert html.startswith("<table><caption>")
    assert 2 <= html.count("<tr>") <= 24
    assert len(html) < 3000


def test_the_version_is_the_packages():
    from importlib.metadata import version

    assert clustersim.__version__ == version("clustersim")
