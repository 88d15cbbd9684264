"""nanotron's stages: cut by what blocks and head compute."""

from __future__ import annotations

import clustersim
from clustersim import scenario
from clustersim.scenario.run.parts import model_of
from clustersim.training.partition.stages import split

TABLE = {
    "cluster": {"topology": "dgx-h100", "nodes": 1},
    "model": {"name": "llama3-8b", "seq_len": 4096, "dtype": "bf16", "implementation": "fused"},
    "strategy": {"kind": "ddp", "param_dtype": "bf16"},
    "parallel": {"framework": "nanotron", "pp": 4, "microbatches": 8},
    "run": {"steps": 1},
}


def stages(pp: int, **options: object) -> list[int]:
    """Layers of each stage, embedding and head with them."""
    table = TABLE | {"parallel": TABLE["parallel"] | {"pp": pp}, "model": TABLE["model"] | {"options": options}}
    loaded = scenario.from_table(table)
    assert loaded.file.parallel is not None
    return [stop - start for start, stop in split(model_of(loaded), loaded.file.parallel, pp)]


def test_a_head_weighs_as_many_blocks_as_its_product_is_as_large() -> None:
    # A block of Llama-3-8B counts 4 x 4096^2 + 3 x 14336 x 4096 = 243 million, the head 525 million: 34.2 blocks.
    assert stages(4) == [1 + 9, 9, 8, 6 + 1]
    assert stages(2) == [1 + 18, 14 + 1]


def test_keys_and_values_count_as_wide_as_all_heads() -> None:
    assert stages(4) == stages(4, kv_heads=32)


def test_a_head_that_outweighs_a_share_leaves_no_stage_empty() -> None:
    # The head is 8 blocks here, of 16 in all: nanotron gives it the third stage and the loss alone the fourth.
    assert stages(4, layers=8, vocab=474_000) == [1 + 4, 3, 1, 1]


def test_stages_that_are_even_in_work_take_a_shorter_step_than_stages_of_equal_blocks() -> None:
    options = {"options": {"layers": 16, "d_model": 2048, "heads": 32, "kv_heads": 32, "d_ff": 8192, "vocab": 131_072}}
    table = TABLE | {"model": TABLE["model"] | options}
    even = table | {"parallel": table["parallel"] | {"partition_method": "uniform"}}
    assert (
        scenario.from_table(table).run().summary["step_time_s"] < scenario.from_table(even).run().summary["step_time_s"]
    )


def test_only_nanotron_is_cut_so() -> None:
    assert clustersim.load("tp8_pp4_llama3_70b_32x8_h100").file.parallel.partition_method is None
