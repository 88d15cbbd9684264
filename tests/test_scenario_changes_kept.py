"""What changes a scenario is the caller's, and stays as it was."""

from clustersim import scenario


def test_a_changed_table_is_not_written_into_by_the_fields_changed_beside_it():
    strategy = {"kind": "fsdp", "version": 2}
    changes = {"strategy": strategy, "strategy.data_parallel_replicate_degree": 2}
    first = scenario.load("zero1_llama3_8b_2x8_a100", changes)
    assert first.config.data_parallel_replicate_degree == 2
    assert strategy == {"kind": "fsdp", "version": 2}
    assert (
        scenario.load("zero1_llama3_8b_2x8_a100", {"strategy": strategy}).config.data_parallel_replicate_degree is None
    )
