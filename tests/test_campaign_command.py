"""``clustersim campaign``: one command from a scenario to an answer, its files and page; a line for bad input."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from browser import Page, needs_browser, opened, width_on_a_phone
from click.testing import CliRunner
from conftest import ROOT

from clustersim import scenario
from clustersim.app import plots
from clustersim.app.cli import cli
from clustersim.app.report.campaign import campaign_page, pictures
from clustersim.app.report.study import study_html
from clustersim.core.errors import ClusterSimError
from clustersim.studies.campaign import PARTS, CampaignOptions, answer, folder_for, play
from clustersim.studies.campaign.batches import BATCH, played
from clustersim.studies.campaign.causes import causes_of, sets
from clustersim.studies.campaign.job import campaign
from clustersim.studies.campaign.of_scenario import job_of, table_of
from clustersim.studies.sweep.crews import crew
from clustersim.studies.what_if.rerun import step_time

BASE = (ROOT / "scenarios" / "ddp_gpt2_xl_2x8_a100.toml").read_text()
TABLE = """
[campaign]
duration = "20 d"
failures = "rsc1"
factor = 40

[campaign.detection]
report = "2 min"

[campaign.recovery]
policy = "replace"
replace = "1 min"
restart = "4 min"

[[campaign.checkpoints]]
every = "best"

[campaign.storage]
write = "1 GB/s"
read = "2 GB/s"

[campaign.nodes]
spares = 1
repair = "3 h"

[[campaign.degraded]]
name = "hot GPU"
rate = "1 per 30 node-days"
lasts = { mean = "2 h", law = "exponential" }
speed = 0.8
"""


def file(folder: Path, table: str = TABLE) -> Path:
    path = folder / "weeks.toml"
    path.write_text(BASE + table)
    return path


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return scenario.load(file(tmp_path_factory.mktemp("campaign")))


@pytest.fixture(scope="module")
def said(loaded):
    return answer(loaded, CampaignOptions(replicas=200, what_if=True))


def test_steps_between_failures_are_the_simulators_own(loaded):
    job, bill = job_of(loaded)
    prepared = loaded.prepare()
    now = step_time(prepared.run().timeline)
    assert (job.step_s, job.nodes, job.gpus, job.replicas, job.copies) == (now, 2, 16, 16, 16)
    slow = loaded.changed({"cluster.slow": [{"ranks": [15], "speed": 0.8}]})
    assert job.slower == {"hot GPU": step_time(slow.run().timeline) / now}
    assert 1.0 < job.slower["hot GPU"] <= 1.25
    assert job.bytes_per_parameter == 12.0  # fp32 parameters and Adam's two moments
    assert bill.busy_w > bill.idle_w > 0


def test_an_answer_about_a_step_that_does_not_fit_begins_with_that(loaded):
    said = answer(loaded.changed({"strategy.micro_batch_size": 4096}), CampaignOptions(replicas=5))
    assert said.job.lacking > 0
    assert said.verdict.startswith("It does not fit: a GPU lacks ")


def test_an_answer_says_days_goodput_and_a_ledger_that_adds_up(said):
    assert said.finishes
    assert said.days.p5 <= said.days.p50 <= said.days.p95
    assert said.days.p50 > said.plan.ideal_days == pytest.approx(20.0)
    assert list(said.ledger) == list(PARTS)
    assert sum(one.days for one in said.ledger.values()) == pytest.approx(said.days.mean)
    assert sum(one.share for one in said.ledger.values()) == pytest.approx(1.0)
    new_steps = said.ledger["productive"].days / said.days.mean
    assert said.mfu.mean == pytest.approx(said.job.mfu * new_steps, rel=0.01)
    price = said.cost.usd.mean / said.days.mean
    assert price == pytest.approx(said.cost.ideal_usd / 20 * 24 / 16)  # the spare node is paid for


SHARDED = {"parallel": {"use_distributed_optimizer": True}}
HYBRID = {"strategy": {"kind": "fsdp", "micro_batch_size": 1, "data_parallel_replicate_degree": 2}}


@pytest.mark.parametrize(
    ("changes", "copies", "told"),
    [
        ({}, 16, "16 whole copies of the optimizer states: drop_replica goes on without one of them"),
        (SHARDED, 1, "one copy of the optimizer states sharded over them: none can be dropped (no drop_replica)"),
        (HYBRID, 2, "2 whole copies of the optimizer states: drop_replica goes on without one of them"),
    ],
)
def test_replicas_are_counted_and_how_many_can_be_lost_is_another_count(loaded, changes, copies, told):
    one = loaded.changed(changes | {"campaign.degraded": []})
    job, _ = job_of(one)
    assert (job.replicas, job.copies) == (16, copies)
    found = campaign_page(answer(one, CampaignOptions(replicas=2))).sections
    items = dict(next(part for part in found if part.id == "job").items)
    assert items["replicas"] == f"16 data-parallel replicas of the model, {told}"
    dropping = one.changed({"campaign.recovery.policy": "drop_replica"})
    if copies > 1:
        assert campaign(table_of(dropping), job).policy == "drop_replica"
    else:
        with pytest.raises(ClusterSimError, match=r"replicas of the model \(16\) keep one copy"):
            campaign(table_of(dropping), job)


def test_what_ifs_go_the_way_they_must(said):
    days = {one.question: one.days_p50 for one in said.what_if}
    now = days.pop("as it is")
    assert days["half as many failures"] < now
    assert days["find failures at once"] < now
    assert days["save for free"] < now
    assert days["no spare nodes"] > now
    assert days["nothing is ever slow"] < now
    lost = {one.x: 1 - one.simulated for one in said.interval}
    assert min(lost, key=lost.get) == pytest.approx(said.plan.saves[0].interval, rel=0.51)
    assert [one.simulated for one in said.nodes] == sorted([one.simulated for one in said.nodes])[::-1]


def test_a_campaign_that_was_broken_off_gives_the_same_table(loaded, tmp_path):
    asked = CampaignOptions(replicas=2 * BATCH, seed=3)
    whole = answer(loaded, asked)
    folder = folder_for(loaded, tmp_path / "out", asked)
    first = answer(loaded, CampaignOptions(replicas=BATCH, seed=3), folder)
    again = answer(loaded, asked, folder)
    rows = (tmp_path / "out" / "results.jsonl").read_bytes().splitlines()
    assert len(rows) == 2
    assert again == whole
    assert first.days != whole.days
    torn = (tmp_path / "out" / "results.jsonl").read_bytes()[:-50]
    (tmp_path / "out" / "results.jsonl").write_bytes(torn)
    assert answer(loaded, asked, folder) == whole


def test_processes_are_used_without_a_folder_too(loaded, monkeypatch):
    asked = CampaignOptions(replicas=2 * BATCH, jobs=2)
    used = []
    monkeypatch.setattr(
        "clustersim.studies.campaign.batches.crew", lambda executor, jobs: used.append(jobs) or crew(None, jobs)
    )
    assert answer(loaded, asked) == answer(loaded, CampaignOptions(replicas=2 * BATCH))
    assert used == [2]


def test_steps_that_vary_enter_a_campaign_as_they_are_distributed(loaded):
    loaded = loaded.changed({"model.options": {"layers": 4}})  # two thousand steps are played
    one = loaded.changed({"run.variation": {"step_cv": 0.01, "slow_hosts": 0.3, "slow_factor": 1.2}})
    job, _ = job_of(one.changed({"campaign.degraded": []}))
    steady, _ = job_of(loaded.changed({"run.jitter": 0.0, "campaign.degraded": []}))
    assert job.step_s == steady.step_s
    assert len(job.machines) == 40
    assert min(job.machines) < 1.05 < 1.15 < max(job.machines)
    assert np.mean(job.swapped) < np.mean(job.machines)
    made = campaign(table_of(loaded.changed({"campaign.factor": 0, "campaign.degraded": []})), job)
    runs = play(made, 500, seed=0)
    pace = (runs.part("productive") + runs.part("step variation")) / runs.part("productive")
    assert pace.mean() == pytest.approx(np.mean(job.machines), rel=0.01)
    assert pace.std() == pytest.approx(np.std(job.machines), rel=0.1)


def test_a_step_that_does_not_vary_has_no_variation_to_the_bit(loaded):
    """The difference of two clocks was told as 0.0004657 ns of a campaign."""
    steady = {"campaign.degraded": [], "campaign.factor": 1, "run.jitter": 0.0, "model.options": {"layers": 4}}
    bare = loaded.changed(steady)
    job, _ = job_of(bare)
    assert not play(campaign(table_of(bare), job), 50, seed=0).part("step variation").any()


def test_a_source_of_variation_of_size_0_leaves_a_campaign_as_it_was_to_the_bit(loaded):
    bare = loaded.changed({"campaign.degraded": [], "run.jitter": 0.0})
    without = answer(bare, CampaignOptions(replicas=20))
    zero = answer(bare.changed({"run.variation": {"gpu_cv": 0.0}}), CampaignOptions(replicas=20))
    assert (zero.days, zero.ledger, zero.job) == (without.days, without.ledger, without.job)


def test_it_does_not_matter_who_plays_the_batches(loaded, tmp_path):
    table = table_of(loaded)
    made = campaign(table, job_of(loaded)[0])
    folder = folder_for(loaded, tmp_path / "out", CampaignOptions())
    with ThreadPoolExecutor(2) as executor:
        spread = played(made, CampaignOptions(2 * BATCH + 7, 5), folder, executor=executor)
    alone = played(made, CampaignOptions(2 * BATCH + 7, 5))
    np.testing.assert_array_equal(spread.ledger, alone.ledger)
    np.testing.assert_array_equal(spread.elapsed, alone.elapsed)
    with pytest.raises(ClusterSimError, match="holds another campaign"):
        folder_for(loaded.changed({"campaign.factor": 2}), tmp_path / "out", CampaignOptions())


@pytest.mark.parametrize("changes", [{"campaign.factor": 0}, {"campaign.recovery.policy": "drop_replica"}])
def test_other_campaigns_have_a_page_too(loaded, changes, tmp_path):
    one = loaded.changed(changes)
    asked = CampaignOptions(replicas=20, what_if=True)
    folder = folder_for(one, tmp_path / "out", asked)
    found = answer(one, asked, folder)
    folder.write("campaign.json", found)
    assert "A month" in study_html(tmp_path / "out")
    if changes == {"campaign.factor": 0}:
        assert found.failures.p95 == 0
        assert found.ledger["lost work"].days == 0


def test_the_command_prints_writes_and_draws(tmp_path):
    out = tmp_path / "out"
    command = [
        "campaign",
        str(file(tmp_path)),
        "--replicas",
        "50",
        "--out",
        str(out),
        "--report",
        str(tmp_path / "p.html"),
    ]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    assert "days instead of 20.0" in done.output
    assert "effective training time" in done.output
    lines = done.output.splitlines()
    assert any(line.startswith("job: step: ") and "simulated" in line for line in lines)
    assert any(line.startswith("from [campaign]: recovery: ") for line in lines)
    assert any(line.startswith("from: compute: ") and "arXiv" in line for line in lines)
    assert "assumed: idle: waiting at full clocks" in lines
    assert not any("assumed: assumed" in line or line.startswith("assumed: job") for line in lines)
    assert {path.name for path in out.iterdir()} >= {"campaign.json", "month.png", "ledger.png", "results.jsonl"}
    page = Page((tmp_path / "p.html").read_text())
    assert {"ledger", "goodput", "month", "causes", "job", "inputs", "sources", "assumed"} <= set(page.ids)
    shown = json.loads(CliRunner().invoke(cli, [*command[:4], "--json"]).output)
    kept = json.loads((out / "campaign.json").read_text())
    assert shown == kept


def test_every_picture_says_in_words_what_it_shows(said):
    drawn = pictures(said)
    assert set(drawn) == {"month", "ledger", "interval", "nodes"}
    assert "lost work" in plots.alt_text(drawn["month"])
    assert "productive 20 d" in plots.alt_text(drawn["ledger"])


@needs_browser
def test_the_page_opens_and_fits_a_phone(loaded, tmp_path):
    asked = CampaignOptions(replicas=50, what_if=True)
    folder = folder_for(loaded, tmp_path / "out", asked)
    folder.write("campaign.json", answer(loaded, asked, folder))
    text = study_html(tmp_path / "out")
    _, console = opened(text, tmp_path, "console.log('seen');")
    assert ["seen" in line for line in console] == [True]
    assert width_on_a_phone(text, tmp_path) <= 390


def test_a_campaign_that_cannot_finish_is_an_answer(tmp_path):
    path = file(tmp_path, TABLE.replace('restart = "4 min"', 'restart = "12 d"'))
    done = CliRunner().invoke(
        cli, ["campaign", str(path), "--out", str(tmp_path / "o"), "--report", str(tmp_path / "p")]
    )
    assert done.exit_code == 0, done.output
    assert "Does not finish" in done.output


def test_waiting_for_nodes_without_end_is_an_answer(tmp_path):
    path = file(tmp_path, TABLE.replace('repair = "3 h"', 'repair = "4000 d"'))
    done = CliRunner().invoke(cli, ["campaign", str(path), "--replicas", "20", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert not said["finishes"]
    assert "Not every replica finishes" in said["verdict"]


WRONG = {
    "a rate without unit": ('failures = "rsc1"', 'failures = [{name = "a", rate = 6.5}]', "6.5 per 1000 node-days"),
    "GPUs of a GPU": (
        'failures = "rsc1"',
        'failures = [{name = "a", rate = "6 per 1000 gpu-days of 8 GPUs"}]',
        "only nodes are said to be of so many GPUs: 'node-days of 8 GPUs'",
    ),
    "no such rate": ('failures = "rsc1"', 'failures = [{name = "a", rate = "6.5 a week"}]', "cannot read '6.5 a week'"),
    "no such set": ('"rsc1"', '"rsc-1"', "did you mean 'rsc1'?"),
    "a save longer than its interval": ('every = "best"', 'every = "1 s"', "longer than its interval"),
    "more spares than nodes": ("spares = 1", "spares = 3", "more than the job's 2 node(s)"),
    "a law without a mean": ('repair = "3 h"', 'repair = { median = "3 h" }', "a law without a mean"),
    "a median above the mean": ('repair = "3 h"', 'repair = {mean = "1 h", median = "3 h"}', "not above its mean"),
    "silence without a timeout": ('"rsc1"', '[{name="a", rate="1 per day", silent=0.5}]', "timeout"),
    "racks of no size": ('failures = "rsc1"', 'failures = [{name="a", rate="1 per rack-day"}]', "campaign.nodes.rack"),
    "nothing that survives": ('every = "best"', 'every = "best"\ntier = "local"', 'tier = "storage"'),
    "no time to be written": ('every = "best"', 'every = "best"\nasynchronous = true', "campaign.storage.copy"),
    "maintenance after steps": (
        "[campaign.nodes]",
        '[[campaign.calendar]]\nname="a"\nkind="maintenance"\nevery="9 steps"\n[campaign.nodes]',
        "write elapsed time",
    ),
    "no time to write": ('write = "1 GB/s"', 'write = "1 GB"', "'400 Gb/s' or '50 GB/s'"),
    "two lengths": ('duration = "20 d"', 'duration = "20 d"\nsteps = 5', "one of tokens, steps and duration"),
    "a misspelt field": ("[campaign.recovery]", '[campaign.recovery]\npolcy = "x"', "did you mean 'policy'?"),
    "an unknown policy": ('policy = "replace"', 'policy = "hope"', "is not a choice"),
    "two ways to be slow": ("speed = 0.8", "speed = 0.8\nfactor = 2", "one of factor, speed and match"),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_input_is_one_line_that_says_what_would_be_right(what, tmp_path, clustersim):
    old, new, told = WRONG[what]
    assert old in TABLE
    done = clustersim("campaign", file(tmp_path, TABLE.replace(old, new)), "--replicas", "2")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert told in done.stderr
    assert "$.campaign" in done.stderr
    assert "weeks.toml" in done.stderr


def test_a_scenario_without_a_table_says_so(clustersim):
    done = clustersim("campaign", "ddp_gpt2_xl_2x8_a100")
    assert done.returncode == 2
    assert "add a table [campaign]" in done.stderr


@pytest.mark.parametrize("name", sets())
def test_every_shipped_set_of_failures_has_its_source(name):
    found = sets()[name]
    assert found.source
    assert found.title
    assert all(one.rate > 0 for one in found.failures)


def test_llama_3s_causes_are_its_419_interruptions():
    table = SimpleNamespace(failures="llama3", factor=1.0, nodes=SimpleNamespace(repair=None))
    causes = causes_of(table, SimpleNamespace(nodes=2048, gpus=16384))
    assert sum(cause.expected(54 * 86400.0) for cause in causes) == pytest.approx(419)


def test_512_gpus_fail_as_often_in_trays_of_4_as_in_nodes_of_8():
    """A count of 8-GPU nodes is one of their GPUs: twice as many machines of half the size fail about as often."""
    for name in sets():
        table = SimpleNamespace(failures=name, factor=1.0, nodes=SimpleNamespace(repair=None))
        rates = [
            sum(cause.expected(86400.0) for cause in causes_of(table, SimpleNamespace(nodes=512 // n, gpus=512)))
            for n in (8, 4)
        ]
        assert rates[1] <= 1.12 * rates[0], name  # what a node has once: host maintenance and other parts
        assert rates[1] >= rates[0], name


def test_a_gpu_without_a_price_says_that_its_cost_is_not_known(clustersim, tmp_path):
    machine = ("--set", "cluster.topology=pcie-l40s", "--set", "cluster.device=L40S")
    done = clustersim("campaign", file(tmp_path), *machine)
    assert "give campaign.price.usd_per_gpu_hour" in done.stdout, done.stderr
