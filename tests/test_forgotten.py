"""A GPU left out: what was measured on it is forgotten, and steps are predicted without."""

from __future__ import annotations

from statistics import median

import pytest
from conftest import ROOT

from clustersim.calibrate.score import evaluate, predicted, read_table
from clustersim.core.texts import data_table
from clustersim.model.seconds.kernel_law import constants
from tests.evidence.evidence import evidence
from tests.evidence.forgotten import LAWS, chip_of_row, forgotten, left_out_rows, without
from tests.evidence.step_rows import COLUMNS
from tests.evidence.validate_steps import predict_step

TABLE = ROOT / "tests" / "data" / "measurements" / "training_steps.csv.gz"


def share(chip: str, name: str, dtype: str) -> float:
    """A share of the peak of a device, with a chip forgotten."""
    table = forgotten(data_table("devices"), chip)
    entry = table["device"][name]
    return (entry.get("matmul", {}).get(dtype) or [table["family"][entry["family"]]["matmul"][dtype]])[0]


def test_a_gpu_alone_in_its_generation_gets_the_median_of_what_was_measured_on_others():
    shipped = data_table("devices")
    table = forgotten(shipped, "A100")
    others = [
        entry["matmul"]["bf16"]
        for name, entry in shipped["device"].items()
        if not name.startswith("A100") and "bf16" in entry.get("matmul", {})
    ]
    known = [value for value, source in others if not source.startswith("estimated")]
    assert share("A100", "A100-SXM4-40GB", "bf16") == pytest.approx(median(known))
    assert "stream" not in table["device"]["A100-SXM4-80GB"]
    assert table["family"]["sm90"] == shipped["family"]["sm90"]


def test_in_fp32_a_forgotten_gpu_is_as_those_with_as_many_units():
    """GeForce and workstation cards, whose SMs have twice the units, had a V100 at 0.66 of its peak for 0.9."""
    assert share("V100", "V100-SXM2-16GB", "fp32") > 0.85
    assert share("V100", "V100-SXM2-16GB", "fp16") < 0.85


def test_a_gpu_of_no_known_generation_is_the_median_of_what_was_measured():
    table = data_table("devices")
    for dtype, share in table["family"]["other"]["matmul"].items():
        figures = [entry.get("matmul", {}).get(dtype) for entry in table["device"].values()]
        known = [value for value, source in filter(None, figures) if not source.startswith("estimated")]
        assert not known or share == pytest.approx(median(known), abs=0.01), dtype


def test_attention_of_a_forgotten_gpu_follows_the_law_whatever_was_charted_of_it():
    for chip, arch in (("V100", "sm70"), ("MI300X", "gfx942")):
        kernels = forgotten(data_table("devices"), chip)["family"][arch]["attention"]
        assert kernels.keys() == data_table("devices")["family"][arch]["attention"].keys()
        assert not any(kernels.values())


def test_a_gpu_with_kin_gets_theirs_and_estimates_keep_their_ratio():
    shipped = data_table("devices")
    kin = shipped["device"]["GH200-96GB"]["matmul"]["bf16"][0]
    assert share("H100", "H100-SXM5-80GB", "bf16") == pytest.approx(kin)
    estimate = shipped["device"]["H100-SXM5-96GB-500W"]["matmul"]["bf16"][0]
    ratio = share("H100", "H100-PCIe-80GB", "bf16") / shipped["device"]["H100-PCIe-80GB"]["matmul"]["bf16"][0]
    assert ratio == pytest.approx(kin / shipped["family"]["sm90"]["matmul"]["bf16"])
    assert shipped["device"]["H100-SXM5-96GB-500W"]["matmul"]["bf16"][0] == estimate, "the shipped table is as it was"


def test_the_law_without_a_gpu_has_every_constant_and_no_level_of_a_generation_that_was_only_that_gpu():
    shipped = data_table("kernel_law")
    law = without("A100")
    assert law["products"].keys() == shipped["products"].keys()
    assert law["products"]["all"].keys() == shipped["products"]["all"].keys() - {"source"}
    assert law["products"]["all"] != constants.without_sources(shipped)["products"]["all"]
    assert law["attention"]["bf16"] != constants.without_sources(shipped)["attention"]["bf16"]
    assert "sm80" not in law["levels"]["bf16"]
    assert "sm80" not in law["levels"]["attention"]
    assert without("V100")["products"] == shipped["products"]
    assert LAWS.exists()


def test_steps_of_a_forgotten_gpu_are_predicted_otherwise_and_those_of_no_known_gpu_are_not():
    rows = [row for row in read_table(TABLE, COLUMNS) if row["strategy"].startswith("single")]
    rows = [row for row in rows if chip_of_row(row) == "A100"][:3]
    known = predicted(evaluate(rows, predict_step))
    left_out = left_out_rows([*rows, {**rows[0], "gpu": "a GPU of nobody"}])
    assert [row.measured for row in left_out] == [row.measured for row in known]
    moved = [abs(out.predicted / own.predicted - 1.0) for out, own in zip(left_out, known, strict=True)]
    assert min(moved) > 0.001, "this process forgets nothing, another did"
    assert max(moved) > 0.004


def test_lines_of_steps_have_both_columns_where_they_were_played_again(monkeypatch, tmp_path):
    from tests.evidence import evidence as module

    every = [row for row in read_table(TABLE, COLUMNS) if row["strategy"].startswith("single")]
    monkeypatch.setattr(module, "known_rows", lambda rows: evaluate(rows, lambda row: (1.0, 1.02)))
    monkeypatch.setattr(module, "left_out_rows", lambda rows: predicted(evaluate(rows, lambda row: (1.0, 1.25))))
    text = [",".join(every[0]), *(",".join(f'"{cell}"' for cell in row.values()) for row in every[:4])]
    (tmp_path / "training_steps.csv").write_text("\n".join(text) + "\n")
    (line,) = [line for line in evidence(tmp_path) if line.what == "steps, single"]
    assert line.gpu_left_out == pytest.approx((0.25, 0.25))
    assert line.one_step == pytest.approx((0.02, 0.02))
    (quick,) = [line for line in evidence(tmp_path, again=False) if line.what == "steps, single"]
    assert quick.gpu_left_out is None
