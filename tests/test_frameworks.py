"""Whose data parallelism is played: a neutral [parallel] changes nothing, and a framework is a field."""

from __future__ import annotations

import re

import pytest

from clustersim import scenario
from clustersim.core.errors import ScenarioError

WHOLE = """
[cluster]
topology = "hgx-a100"
nodes = 2

[model]
name = "gpt2"
seq_len = 1024
dtype = "bf16"

[strategy]
{strategy}
micro_batch_size = 2
gradient_accumulation_steps = {passes}
param_dtype = "bf16"

[run]
steps = 3
jitter = 0.0
"""
KINDS = {
    "ddp": 'kind = "ddp"',
    "ddp of PyTorch": 'kind = "ddp"\nframework = "pytorch"',
    "fsdp": 'kind = "fsdp"',
    "fsdp 1": 'kind = "fsdp"\nversion = 1',
    "zero 1": 'kind = "zero"\nzero_optimization = {stage = 1}',
    "zero 2": 'kind = "zero"\nzero_optimization = {stage = 2}',
    "zero 3": 'kind = "zero"\nzero_optimization = {stage = 3}',
}
NEUTRAL = {
    "degrees": {"tp": 1, "pp": 1, "cp": 1, "ep": 1},
    "schedule": {"schedule": "1f1b"},
    "by another name": {"schedule": "1F1B", "tp": 1, "pp": 1},
    "interleaved": {"schedule": "interleaved_1f1b", "vpp": 1},
    "switches that are off": {"schedule": "1f1b", "use_distributed_optimizer": False, "overlap_grad_reduce": False},
}


def read(strategy='kind = "ddp"', passes=1, changes=None):
    import tomllib

    table = tomllib.loads(WHOLE.format(strategy=strategy, passes=passes))
    return scenario.from_table(table, "whole.toml", changes or {})


def figures(ran):
    told = ran.to_dict()
    return {
        name: told[name]
        for name in ("step_time_s", "first_step_s", "peak_memory_bytes", "bytes_sent_per_gpu", "memory", "volume")
    }


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_neutral_table_changes_neither_time_nor_memory_nor_what_is_sent(kind, passes):
    plain = read(KINDS[kind], passes)
    expected = figures(plain.run())
    for neutral in NEUTRAL.values():
        changed = plain.changed({f"parallel.{name}": value for name, value in neutral.items()})
        assert changed.file.parallel is not None
        assert figures(changed.run()) == expected, neutral


@pytest.mark.parametrize("kind", ["single", "sgd_steps", "parameter_server", "data_parallel"])
def test_strategies_that_no_split_model_has_take_a_neutral_table_too(kind):
    node = {"cluster.nodes": 1} | ({"cluster.gpus_per_node": 1} if kind == "single" else {})
    plain = read(f'kind = "{kind}"', changes=node)
    assert figures(plain.changed({"parallel.schedule": "1f1b"}).run()) == figures(plain.run())
    with pytest.raises(ScenarioError, match="whole model on every worker"):
        plain.changed({"parallel.overlap_grad_reduce": True}).run()


def test_a_framework_is_a_field_and_settings_that_are_megatrons_say_whose_ddp_they_play():
    plain = read()
    same = read('kind = "ddp"\nframework = "pytorch"')
    megatron = read('kind = "ddp"\nframework = "megatron"')
    assert figures(same.run()) == figures(plain.run())
    assert figures(megatron.run()) != figures(plain.run())
    # The same as it was by a table that named no framework but had to be Megatron's.
    gpipe = plain.changed({"parallel.schedule": "gpipe"})  # of one micro-batch the same order
    assert figures(gpipe.run()) == figures(megatron.run())
    (told,) = [note for note in gpipe.prepare().notes if note.startswith("ddp: ")]
    assert "parallel.schedule = 'gpipe'" in told
    (told,) = [note for note in megatron.prepare().notes if note.startswith("ddp: ")]
    assert "that of Megatron-Core (one bucket behind backward, gradients in fp32, fp32 main parameters)" in told
    assert told.endswith("not PyTorch's")


def test_megatrons_ddp_of_a_whole_model_has_main_parameters_and_fp32_gradients():
    parameters = read().prepare().model.parameters
    pytorch, megatron = (
        read(f'kind = "ddp"\nframework = "{name}"').prepare().memory for name in ("pytorch", "megatron")
    )
    assert pytorch.master_weights == 0
    assert megatron.master_weights == pytest.approx(4 * parameters, rel=0.01)  # a padded vocabulary
    assert megatron.gradients == pytest.approx(2 * pytorch.gradients, rel=0.2)


@pytest.mark.parametrize(
    ("framework", "changes", "words"),
    [
        ("pytorch", {"parallel.tp": 2}, "[parallel] splits it; use 'megatron' (at $.strategy.framework)"),
        ("pytorch", {"parallel.use_distributed_optimizer": True}, "parallel.use_distributed_optimizer = True is not"),
        ("pytorch", {"parallel.schedule": "gpipe"}, "parallel.schedule = 'gpipe' is not PyTorch's"),
        ("megatron", {"parallel.framework": "torchtitan"}, "parallel.framework = 'torchtitan' contradict each other"),
    ],
)
def test_a_framework_that_does_not_play_what_is_asked_for_is_an_error(framework, changes, words):
    made = read(f'kind = "ddp"\nframework = "{framework}"', changes=changes)
    with pytest.raises(ScenarioError, match=re.escape(words)):
        made.prepare()


def test_beside_a_split_model_ddp_is_megatrons_whether_said_or_not():
    split = {"parallel.tp": 2}
    said = read('kind = "ddp"\nframework = "megatron"', changes=split)
    assert figures(said.run()) == figures(read(changes=split).run())


def test_what_a_run_was_before_the_field_it_still_is():
    assert "framework" not in read().inputs()["strategy"]
    assert read('kind = "ddp"\nframework = "megatron"').inputs()["strategy"]["framework"] == "megatron"
