"""Differences to PyTorch's bytes that were found with its own trackers, each with the test that holds it mended."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from torch_peaks import CASES, Case

HERE = Path(__file__).parent


class Difference(NamedTuple):
    """``what`` was found; ``test`` : file and function; ``case`` : of the table of peaks, where it is one of them."""

    what: str
    test: str
    case: Case | None = None


PEAK = "test_bytes_torch.py::test_a_peak_is_torchs_own_within_three_percent"
DIFFERENCES = {
    1: Difference(
        "FSDP2 pads dim 0 of every parameter",
        "test_bytes_fsdp.py::test_every_parameter_is_padded_as_fully_shard_pads_it",
    ),
    2: Difference(
        "at most three stages of a pipeline are unsharded at once",
        "test_bytes_unshard.py::test_chunks_are_gathered_again_as_torchs_runtime_gathers_them",
    ),
    3: Difference("eager attention keeps 6 bytes a score", PEAK, ("llama", "bf16", "eager", "none")),
    4: Difference("logits are 12 bytes an element", PEAK, ("llama", "bf16", "sdpa", "full")),
    5: Difference("norms of queries and keys keep their inputs", PEAK, ("qwen3", "bf16", "sdpa", "none")),
    6: Difference("GPT-2's gelu_new runs op by op", PEAK, ("gpt2", "bf16", "sdpa", "none")),
    7: Difference(
        "torchtitan's embedding, and its norm with the head, are units",
        "test_bytes_fsdp.py::test_torchtitans_ends_are_units_of_their_own",
    ),
    8: Difference("autocast casts an input once a product", PEAK, ("llama", "autocast", "sdpa", "none")),
    9: Difference("ReLU keeps its output alone", PEAK, ("opt", "bf16", "sdpa", "none")),
    10: Difference(
        "transformers 5 has all experts in two tensors",
        "test_strategies.py::test_experts_of_transformers_5_fill_buckets_with_two_tensors_a_block",
    ),
    11: Difference(
        "num_local_experts is num_experts",
        "test_models_configs.py::test_the_experts_of_qwen3_are_counted_under_either_name",
    ),
    12: Difference(
        "Megatron's interleaved schedule needs a multiple of pp",
        "test_split_settings.py::"
        "test_megatron_refuses_micro_batches_that_leave_a_rest_below_pp_and_without_a_framework_the_run_says_it",
    ),
    13: Difference(
        "selective checkpointing keeps no expert's product",
        "test_memory.py::test_selective_checkpointing_keeps_every_second_product_and_none_of_the_experts",
    ),
    14: Difference(
        "OPT-350m's projection out is ready first",
        "test_strategies.py::test_opts_projection_out_is_ready_first_and_alone_in_its_bucket",
    ),
    15: Difference(
        "a SimGrid platform has full routes",
        "test_chakra.py::test_simgrids_platform_has_the_routes_that_transfers_take_here",
    ),
    16: Difference(
        "Open MPI scatters small blocks of five ranks by doubling",
        "test_mpi.py::test_small_blocks_are_scattered_by_recursive_doubling_as_open_mpi_counts_them",
    ),
    17: Difference(
        "Gloo's reduce sends uneven segments",
        "test_gloo.py::test_a_reduction_to_one_rank_sends_what_gloo_sends",
    ),
    18: Difference(
        "Megatron-LM's parameters are in 16 bits",
        "test_split_settings.py::test_megatrons_parameters_have_the_type_of_the_products_unless_it_is_said",
    ),
}


@pytest.mark.parametrize("number", DIFFERENCES)
def test_each_difference_has_its_test(number: int) -> None:
    difference = DIFFERENCES[number]
    file, name = difference.test.split("::")
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert difference.case is None or difference.case in CASES


def test_no_difference_is_missing(shared: Path) -> None:
    page = (shared / "facts" / "PYTORCH_BYTES.md").read_text(encoding="utf-8")
    listed = [int(number) for number in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert listed == list(DIFFERENCES)
