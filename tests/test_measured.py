"""``[measured]``: a few numbers in a machine's file, or in a scenario, move its predictions; impossible ones do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from clustersim import collectives
from clustersim.app.cli import main
from clustersim.calibrate.nccl_tables import measured_rows
from clustersim.calibrate.score import grouped
from clustersim.calibrate.validate_nccl import measured as measured_row
from clustersim.cluster import files as fabrics
from clustersim.collectives import fitted as fitting
from clustersim.collectives import nccl_backend
from clustersim.collectives.base import Group, Request
from clustersim.collectives.costs import costs_of
from clustersim.collectives.fitted import few_numbers, priors
from clustersim.collectives.fitted.machine import moved_costs
from clustersim.collectives.fitted.trusted import improbable
from clustersim.collectives.nccl_backend import NcclChoice, choice
from clustersim.collectives.nccl_backend import seconds as predict
from clustersim.core.costs import flat, most_of
from clustersim.core.errors import ClusterSimError, TopologyError
from clustersim.core.topology import Topology

SMALL = '{nodes = 2, size = "8 B", time = "60 us"}'
LARGE = '{nodes = 4, size = "1 GiB", busbw = "70 GB/s"}'


def machine(folder: Path, *numbers: str, extends: str = "hgx-a100-800g") -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "mine.toml"
    path.write_text(f'name = "mine"\nextends = "{extends}"\n[measured]\nall_reduce = [{", ".join(numbers)}]\n')
    return str(path)


def seconds(topology: Topology, nodes: int, nbytes: float, kind: str = "all_reduce") -> float:
    group = Group(topology, fabrics.mesh(topology, nodes=nodes).gpus)
    return collectives.plan(Request(kind, nbytes), group, backend="nccl").time(topology.link_bandwidth)


def test_numbers_move_what_they_measured_and_everything_like_it(tmp_path):
    plain = fitting.load("hgx-a100-800g", nodes=8)
    mine = fitting.load(machine(tmp_path, SMALL, LARGE), nodes=8)
    assert seconds(mine, 2, 8.0) == pytest.approx(60e-6, rel=0.1)
    assert 2**30 * 2 * 31 / 32 / seconds(mine, 4, 2.0**30) == pytest.approx(
        70e9, rel=0.06
    )  # the law itself is unsure by 0.05
    for kind in ("all_gather", "reduce_scatter"):  # of another collective, on another scale
        assert seconds(mine, 8, 64.0, kind) > 1.1 * seconds(plain, 8, 64.0, kind)
        assert seconds(mine, 8, 2.0**31, kind) > 1.05 * seconds(plain, 8, 2.0**31, kind)


def test_a_number_that_its_kind_already_has_moves_nothing(tmp_path):
    usual = seconds(fitting.load("hgx-a100-800g", nodes=2), 2, 8.0)
    path = machine(tmp_path, f'{{nodes = 2, size = "8 B", time = "{usual * 1e6:.4f} us"}}')
    found = fitting.informed(fabrics.load(path).measured, path)
    assert not found.found.constants
    assert fabrics.load(path).calibration is None


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (['{nodes = 2, size = "8 B"}'], "either time"),
        (['{nodes = 2, size = "8 B", time = "60 us", busbw = "1 GB/s"}'], "not both"),
        (['{nodes = 2, size = "eight", time = "60 us"}'], r"\[0\].size"),
        (['{nodes = 2, gpus = 9, size = "8 B", time = "60 us"}'], "9 GPUs a node"),
    ],
)
def test_a_number_that_is_not_well_written_is_refused(tmp_path, numbers, words):
    with pytest.raises(TopologyError, match=words) as raised:
        fitting.load(machine(tmp_path, *numbers), nodes=4)
    assert "$.measured.all_reduce[" in str(raised.value)


@pytest.mark.parametrize(
    ("numbers", "odd", "words"),
    [
        (['{nodes = 4, size = "1 GiB", busbw = "2 TB/s"}'], 0, "faster than the wires allow"),
        (['{nodes = 2, size = "8 B", time = "50 ms"}'], 0, "more than 100 times"),
        (['{nodes = 2, size = "8 B", time = "150 us"}'], 0, "no other number bears it out"),
        ([SMALL, '{nodes = 2, size = "8 KiB", time = "20 us"}'], 0, "contradicts"),
        (
            ['{nodes = 4, size = "4 GiB", time = "90 ms"}', '{nodes = 4, size = "1 GiB", time = "800 ms"}'],
            1,
            "contradicts",
        ),
        # The first size of a table holds a warm-up spike, and the next say that the machine is as its kind.
        (
            ['{nodes = 2, size = "8 B", time = "85 us"}', '{nodes = 2, size = "64 KiB", time = "40 us"}',
             '{nodes = 2, size = "1 KiB", time = "29 us"}'],
            0,
            "contradicts",
        ),
    ],
)  # fmt: skip
def test_a_number_that_cannot_be_moves_nothing_and_is_named(tmp_path, numbers, odd, words):
    path = machine(tmp_path, *numbers)
    with pytest.warns(fitting.NumberKeptApart, match=words) as said:
        found = fitting.load(path, nodes=4)
    assert f"$.measured.all_reduce[{odd}]" in str(said[0].message)
    rest = [one for i, one in enumerate(numbers) if i != odd]
    without = fitting.load(machine(tmp_path / "rest", *rest) if rest else "hgx-a100-800g", nodes=4)
    for nbytes in (8.0, 2.0**20, 2.0**30):
        assert seconds(found, 4, nbytes) == pytest.approx(seconds(without, 4, nbytes))


def test_a_part_of_something_stays_below_all_of_it():
    """A small number twenty times too long once took more steps from a ring than it has, and its time was complex."""
    topology = fabrics.load("hgx-a100", nodes=1)
    group = Group(topology, fabrics.mesh(topology, nodes=1).gpus)
    kind = costs_of(group)
    choices = [choice(Request("all_reduce", nbytes), group) for nbytes in (65536.0, 8.0)]
    times = [20.0 * predict(choices[0], kind), predict(choices[1], kind)]
    machine_costs = few_numbers(choices, times, kind).costs
    assert 0.25 < machine_costs.empty_steps["LL"] <= 1.0
    assert predict(choices[0], machine_costs) > 2.0 * predict(choices[0], kind)


def test_a_machines_constants_are_its_kinds_times_their_own_moves_and_those_of_the_factors():
    """``base * exp(own + factors)``, a share at most 1 or its kind's; what nothing moves stays."""
    topology = fabrics.load("hgx-h100", nodes=2)
    base = costs_of(Group(topology, fabrics.mesh(topology).gpus))
    before = flat(base)
    factors = priors().factors
    rng = np.random.default_rng(0)
    for names in ((), tuple(name for name in priors().constants if before[name] > 0)):
        moved = 0.3 * rng.standard_normal(len(factors) + len(names))
        own = dict(zip((*factors, *names), moved.tolist(), strict=True))
        after = flat(moved_costs(base, names, moved))
        assert after.keys() == before.keys()
        for name, value in before.items():
            by = (own[name] if name in names else 0.0) + sum(own[f] for f, row in factors.items() if row.moves(name))
            assert after[name] == pytest.approx(min(value * np.exp(by), max(most_of(name), value)), rel=1e-12), name


def test_what_no_constant_has_a_say_in_is_worked_out_once_for_a_fit(monkeypatch):
    asked = []
    monkeypatch.setattr(nccl_backend, "host_memory_rate", lambda *what: asked.append(what) or np.inf)
    topology = fabrics.load("hgx-a100", nodes=2)
    group = Group(topology, fabrics.mesh(topology, nodes=2).gpus)
    choices = [choice(Request("all_reduce", nbytes), group) for nbytes in (8.0, 2.0**30)]
    few_numbers(choices, [60e-6, 0.02], costs_of(group))
    assert 0 < len(asked) <= len({chosen.picked for chosen in choices})


EVERY = 3
"""One published case in so many is tried, of which 97 % get worse by no more than 4 points, and none by 7. Of all 462,
96 % do, and one gets worse by 12; of one in sixteen a single case was enough to break the 95 %."""


def changes(rows: list[dict[str, str]]) -> Iterator[float]:
    """By how much one, two and three numbers of a case raise the median error of its other sizes."""
    log = sorted_log(rows)
    kind = costs_of(log[0][1].group)
    for count in (1, 2, 3):
        known = [log[0], log[len(log) // 2], log[-1]][:count]
        apart = improbable([chosen for _, chosen in known], [time for time, _ in known], kind, ())
        used = [one for i, one in enumerate(known) if i not in apart]
        moved = few_numbers([chosen for _, chosen in used], [time for time, _ in used], kind).costs
        rest = [one for one in log if one not in known]
        before, after = (
            np.median([abs(predict(chosen, costs) / time - 1.0) for time, chosen in rest]) for costs in (kind, moved)
        )
        yield float(after - before)


def sorted_log(rows: list[dict[str, str]]) -> list[tuple[float, NcclChoice]]:
    """Seconds and what NCCL picks of a case's rows, by size."""
    log = [(seconds, choice(request, group)) for seconds, request, group in map(measured_row, rows)]
    return sorted(log, key=lambda one: one[1].request.nbytes)


def published_cases(every: int) -> list[list[dict[str, str]]]:
    """One in so many of the published cases with six sizes at least."""
    tables = [ROOT / "tests" / "data" / "measurements" / name for name in ("nccl_tests.csv.gz", "nccl_one_node.csv.gz")]
    cases = grouped(measured_rows(tables), lambda row: row["case_id"]).values()
    return [rows for rows in cases if len(rows) >= 6][::every]


def test_slips_planted_into_published_tables_are_found_and_true_numbers_are_not():
    """A number six times too long among three: nine in ten are named; of what was published, one in twenty."""
    found = planted = apart = true = 0
    for rows in published_cases(4):
        log = sorted_log(rows)
        known = [log[0], log[len(log) // 2], log[-1]]
        kind = costs_of(known[0][1].group)
        choices = [chosen for _, chosen in known]
        times = [time for time, _ in known]
        apart += len(improbable(choices, times, kind, ()))
        true += len(times)
        for i in range(len(times)):
            slipped = [6.0 * time if k == i else time for k, time in enumerate(times)]
            found += i in improbable(choices, slipped, kind, ())
            planted += 1
    assert planted >= 75
    assert found >= 0.9 * planted
    assert apart <= 0.05 * true


def test_numbers_of_a_published_table_do_not_make_the_rest_of_it_worse():
    """By no more than the 4 points that measurements repeat to in 95 of 100 cases, and by 10 in none."""
    tried = [change for rows in published_cases(EVERY) for change in changes(rows)]
    assert len(tried) >= 100
    assert np.mean(np.array(tried) < 0.04) >= 0.95
    assert max(tried) < 0.10


def test_a_misspelt_field_is_told_with_the_nearest(tmp_path):
    with pytest.raises(TopologyError, match="did you mean 'busbw'"):
        fitting.load(machine(tmp_path, '{nodes = 2, size = "8 B", busbww = "1 GB/s"}'))


def test_check_says_how_far_the_machine_is_from_its_kind(tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["check", machine(tmp_path, SMALL, LARGE)])
    said = capsys.readouterr().out
    assert "as a whole, against its kind: host +" in said
    assert "all_reduce of 8 B over 2 node(s): 60 us measured" in said


def test_a_scenario_may_bring_the_numbers(tmp_path):
    from clustersim import scenario
    from clustersim.scenario.run.parts import machine as machine_of

    text = '[cluster]\ntopology = "hgx-a100-800g"\nnodes = 2\n{}\n[model]\nname = "gpt2"\n[strategy]\nkind = "ddp"\n'
    times = []
    for table in ("", f"measured = {{all_reduce = [{SMALL}]}}"):
        path = tmp_path / "run.toml"
        path.write_text(text.format(table))
        times.append(seconds(machine_of(scenario.load(path))[0], 2, 8.0))
    assert times[0] < 50e-6
    assert times[1] == pytest.approx(60e-6, rel=0.1)
    path.write_text(text.format('measured = {all_reduce = [{nodes = 2, size = "8 B"}]}'))
    with pytest.raises(ClusterSimError, match=r"either time.*cluster.measured"):
        machine_of(scenario.load(path))
