"""clustersim memory: parts, peak, savings, and the largest micro-batch that fits."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from clustersim import scenario
from clustersim.app.cli.memory import _cells
from clustersim.core.memory_states import likelihood, verdict_of
from clustersim.scenario.run.held import held
from clustersim.studies.what_if.memory_table import MemoryRow, table
from clustersim.training.strategies import STRATEGIES

NAME = "zero3_llama3_8b_2x8_a100"


@pytest.fixture(scope="module")
def rows():
    return table(NAME, {"model.seq_len": 1024}, every=True)


def test_every_strategy_has_a_row_and_the_scenarios_own_comes_first(rows):
    assert rows[0].variant == "as written"
    assert {row.strategy for row in rows} == set(STRATEGIES)


def test_the_own_row_is_what_a_run_says():
    (row,) = table(NAME, {"run.steps": 1})
    result = scenario.load(NAME, {"run.steps": 1}).run()
    assert row.total_bytes == result.memory.total
    assert row.fits == result.fits
    assert sum(row.at_peak.values()) == pytest.approx(row.total_bytes)
    assert all(row.at_peak[name] <= nbytes for name, nbytes in row.largest.items())


def test_zero_saves_four_eight_and_n_times_as_its_table_says():
    """1x, 4x, 8x, Nx for many ranks (arXiv:1910.02054, figure 1); 64 ranks are 3.8, 7.2 and 64 times."""
    found = []
    for stage in (1, 2, 3):
        (row,) = table(NAME, {"cluster.nodes": 8, "strategy.zero_optimization.stage": stage})
        found.append(row.saving)
    assert found == pytest.approx([16 / (4 + 12 / 64), 16 / (2 + 14 / 64), 64])


def test_the_largest_micro_batch_fits_and_one_more_does_not(rows):
    largest = rows[0].largest_micro_batch
    assert largest > 1
    for extra, fits in ((0, True), (1, False)):
        changes = {"model.seq_len": 1024, "strategy.micro_batch_size": largest + extra}
        assert table(NAME, changes)[0].fits is fits


def test_what_does_not_fit_at_all_has_no_micro_batch():
    (row,) = table("ddp_llama3_8b_128x8_h100", {"cluster.nodes": 1})
    assert not row.fits
    assert row.largest_micro_batch == 0


def test_the_command_prints_parts_every_strategy_or_json(clustersim):
    one = clustersim("memory", NAME)
    assert one.returncode == 0, one.stderr
    assert "largest micro-batch that fits" in one.stdout
    every = clustersim("memory", NAME, "--all")
    assert all(kind in every.stdout for kind in STRATEGIES)
    assert json.loads(clustersim("memory", NAME, "--json").stdout)["rows"][0]["strategy"] == "zero"
    wrong = clustersim("memory", "zero4")
    assert wrong.returncode == 2
    assert "no scenario 'zero4'" in wrong.stderr


def test_what_a_config_leaves_out_is_said_where_a_scenario_is_made_and_where_its_memory_is(clustersim, tmp_path):
    fields = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    fields |= {"intermediate_size": 512, "vocab_size": 1000, "num_key_value_heads": 4, "max_position_embeddings": 128}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(fields))
    made = clustersim("new", "scenario", str(tmp_path / "s.toml"), "--model", str(config), "--gpu", "A100")
    told = "not in the config, so as transformers' llama has it by default: tie_word_embeddings false"
    assert told in made.stdout
    assert told in clustersim("memory", str(tmp_path / "s.toml")).stdout
    assert told not in clustersim("memory", NAME).stdout


@pytest.mark.parametrize("kind", ["fsdp", "zero", "ddp"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_rows_that_are_compared_have_one_precision(tmp_path, kind, dtype):
    """8 bytes a parameter beside 16 was "saving 8.0x" beside 4.0x of the same split; ZeRO keeps its masters always."""
    path = tmp_path / "s.toml"
    tables = {
        "cluster": 'topology = "hgx-a100"',
        "model": 'name = "gpt2"\ndtype = "bf16"',
        "strategy": f'kind = "{kind}"\nparam_dtype = "{dtype}"',
    }
    path.write_text("\n".join(f"[{name}]\n{text}" for name, text in tables.items()))
    rows = [row for row in table(str(path), every=True) if isinstance(row, MemoryRow)]
    own = rows[0].bytes_per_parameter
    alike = [row for row in rows if row.strategy != "zero" or own >= 16]
    assert {round(row.bytes_per_parameter) for row in alike} == {round(own)}
    assert {round(row.bytes_per_parameter) for row in rows if row.strategy == "zero"} == {16}


def test_what_leaves_the_gpus_is_in_the_hosts_memory():
    """What DeepSpeed's estimator counts, 16 bytes a parameter with the optimizer and 18 with the parameters, and 2 more
    of the gradients' buffer (stage3.py of 007cca6a, ``grad_partitions_flat_buffer``), over the ranks of a node."""
    own = scenario.load("zero3_llama3_8b_2x8_a100", {"cluster.nodes": 1})
    away = {"device": "cpu"}
    for offloaded, each in (
        ({"offload_optimizer": away}, 18),
        ({"offload_optimizer": away, "offload_param": away}, 20),
    ):
        table = {"kind": "zero", "param_dtype": "bf16", "zero_optimization": {"stage": 3, **offloaded}}
        parts = held(scenario.load(own.path, {"cluster.nodes": 1, "strategy": table}))
        assert parts.host.kept_bytes == pytest.approx(each * parts.model.parameters, rel=0.001)
    assert held(own).host.kept_bytes == 0.0


@pytest.mark.parametrize(
    ("device_bytes", "words"),
    [
        (70.0, "may run out (75%)"),
        (86.0, "fits (20%)"),
        (84.0, "may run out (30%)"),
        (90.0, "fits"),
        (50.0, "does not fit"),
    ],
)
def test_a_table_says_how_likely_a_row_runs_out(rows, device_bytes, words):
    bounds = {"shown_range_bytes": (60.0, 90.0), "shown_bytes": 80.0, "device_bytes": device_bytes}
    out = likelihood((60.0, 90.0), 80.0, device_bytes)
    state = verdict_of(60.0, device_bytes, out)
    row = msgspec.structs.replace(rows[0], verdict=state, runs_out=out, **bounds)
    assert _cells(row, [], on_the_host=False)[-2] == words


@pytest.mark.parametrize(("topology", "smi"), [("hgx-mi300x", "amd-smi"), ("hgx-h100", "nvidia-smi")])
def test_memory_in_use_is_what_the_driver_s_own_command_shows(topology, smi):
    (row,) = table(NAME, {"cluster.topology": topology, "model.seq_len": 1024})
    assert row.smi == smi


def test_the_table_of_stages_says_what_the_line_below_it_says(clustersim):
    """Its last column said "yes" beside a line that said how likely memory runs out."""
    scenario_of_stages = "1f1b_gpt2_xl_1x8_a100"
    (row,) = table(scenario_of_stages)
    size = f"strategy.micro_batch_size={row.largest_that_may_fit}"
    done = clustersim("memory", scenario_of_stages, "--set", size)
    (line,) = (text for text in done.stdout.splitlines() if "likelihood of running out" in text)
    state, share = re.search(r"most, (.*) \(likelihood of running out (.*?)\)", line).groups()
    assert f"{state} ({share})" in done.stdout
    (row,) = table(scenario_of_stages, {"strategy.micro_batch_size": row.largest_that_may_fit})
    fullest = row.stages[row.stage]
    assert (fullest.verdict, fullest.runs_out) == (row.verdict, row.runs_out)
