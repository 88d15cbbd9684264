"""Parts of one's own from another package: found, checked by the public contracts, refused with one clear error."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import ROOT

import clustersim
from clustersim import fabrics, simulate
from clustersim.app.cli import cli
from clustersim.collectives.registry import ALGORITHMS
from clustersim.collectives.rounds import Round, RoundSteps, in_rounds, rounds_algorithm
from clustersim.core.errors import ClusterSimError, ModelError, PluginError, ScenarioError
from clustersim.core.optimizers import OPTIMIZERS, OptimizerRow
from clustersim.core.row_table import PluginWarning, RowTable
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.files.traces import FORMATS, Samples
from clustersim.model import from_hf
from clustersim.model.families import FAMILIES, FamilyTable, by_type, families
from clustersim.scenario.run.identity import Fingerprints
from clustersim.testing import check_algorithm, check_reader, check_schedule, check_strategy
from clustersim.training.schedules import SCHEDULES, Action, Schedule, schedule
from clustersim.training.strategies import STRATEGIES, Strategy, StrategyConfig
from clustersim.training.strategies.primitives import collective, wait
from clustersim.training.strategies.walk import WholeModelHooks, walked

OWN = ROOT / "tests" / "data" / "own_parts"
SHIPPED = OptimizerRow(name="sgd", passes=(3, 3), ops=1)


@pytest.fixture
def acme(monkeypatch):
    """The package, which can be imported; tables are read before it is on the path, so that they do not know it."""
    for rows in (STRATEGIES, ALGORITHMS, SCHEDULES, OPTIMIZERS, FORMATS, FAMILIES):
        assert len(rows)
    monkeypatch.setattr(sys, "path", [str(OWN), *sys.path])
    module = importlib.import_module("acme_parts")
    yield module
    del sys.modules["acme_parts"]


def installed(monkeypatch, folder, package, module, entries):
    """A small distribution on the path, and a table that reads its entry points."""
    info = folder / f"{package}-2.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text("[clustersim.optimizers]\n" + entries)
    (folder / f"{package}.py").write_text(module)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    importlib.invalidate_caches()


def table():
    return RowTable("clustersim.optimizers", "optimizer", OptimizerRow, [SHIPPED])


ROW = "from clustersim.core.optimizers import OptimizerRow\nown = OptimizerRow(name={!r}, passes=(5, 5), ops=1)\n"


# ---- a whole package -------------------------------------------------------------------------------------------------

COMMANDS = {
    "a strategy": f"run {OWN / 'local_sgd.toml'} --json",
    "a schedule": "run gpipe_gpt2_xl_1x8_a100 --set parallel.schedule=AcmeLIFO --json",
    "an optimizer": "memory single_gpt2_1x1_a100 --set run.optimizer=signum --json",
    "an algorithm": "collective all_reduce --topology hgx-h100 --algorithm acme_star --json",
    "a log": f"trace {OWN / 'timings.log'} --json",
    "a profile": f"explain {OWN / 'events.log'} --json",
    "all of them": "list formats --json",
}
"""What a person types, with the package installed."""


def asked(*commands, path=OWN):
    """(exit code, output) of each command, in one process that has ``path`` beside its own."""
    code = (
        "import json, sys\nfrom click.testing import CliRunner\nfrom clustersim.app.cli import cli\n"
        "from clustersim.core.errors import ClusterSimError\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    ran = CliRunner().invoke(cli, words)\n"
        "    code = 2 if isinstance(ran.exception, ClusterSimError) else ran.exit_code\n"
        "    print(json.dumps([code, str(ran.exception) if ran.exception else ran.stdout]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([line.split() for line in commands])],
        env=os.environ | {"PYTHONPATH": str(path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("algorithm", "known"), [("Ring", True), ("halving_doubling", False)])
def test_an_algorithm_that_nccl_has_not_has_no_range_of_published_times(algorithm, known):
    """Of one's own it was "half of published times of this machine within 2 %"."""
    words = ["collective", "all_reduce", "--topology", "hgx-h100", "--size", "64M", "--algorithm", algorithm]
    told = CliRunner().invoke(cli, words, catch_exceptions=False).output
    assert ("half of published times" in told) == known
    assert (f"trust: not known: NCCL has no {algorithm} of all_reduce" in told) != known


def test_parts_of_an_installed_package_are_used_by_name_in_every_command():
    answers = dict(zip(COMMANDS, asked(*COMMANDS.values()), strict=True))
    assert {name: code for name, (code, _) in answers.items()} == dict.fromkeys(COMMANDS, 0), answers
    assert "local_sgd" in answers["a strategy"][1]
    assert "acme_star" in answers["an algorithm"][1]
    assert "Rank 1 is slow" in answers["a profile"][1]  # 5 ms of forward beside 4
    assert {row["name"] for row in json.loads(answers["all of them"][1])} >= {"acme_log", "acme_events", "kineto"}


def test_every_part_of_the_package_keeps_its_public_contract(acme):
    check_strategy(acme.LOCAL_SGD)
    check_schedule(acme.FILL_DRAIN)
    check_algorithm(acme.STAR)
    check_reader(acme.LOG, OWN / "timings.log")
    check_reader(acme.EVENTS, OWN / "events.log")
    assert "acme_log" not in FORMATS


def test_the_whole_example_of_the_page_runs_and_its_message_takes_what_its_bytes_take():
    page = (ROOT / "clustersim" / "OWN_PARTS.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(from typing import Literal\n.*?)```", page, re.S)
    names = {}
    try:
        exec(compile(code, "OWN_PARTS.md", "exec", dont_inherit=True), names)
    finally:
        STRATEGIES.withdraw("one_message")
    assert names["own"].prepared.model.parameters * 4 == names["sent"][-1]
    wire = 2 * 15 / 16 * names["sent"][-1] / names["seconds"][-1]
    assert wire == pytest.approx(192e9, rel=0.02)  # the busbw that the page names
    longer = names["own"].summary["step_time_s"] - names["ddp"].summary["step_time_s"]
    assert (round(longer * 1e3), round(names["seconds"][-1] * 1e3)) == (44, 61)  # as the page says


# ---- what the contracts refuse ---------------------------------------------------------------------------------------


def test_a_contract_says_what_does_not_hold(acme):
    lost = msgspec.structs.replace(acme.STAR, sends=lambda kind, n, islands: (1.0, 1.0))
    with pytest.raises(AssertionError, match=r"acme_star: all_reduce of 3: sends says \(1.0, 1.0\), the traffic has"):
        check_algorithm(lost)
    with pytest.raises(AssertionError, match=r"acme_fill_drain: pp 1, vpp 1, 1 micro-batches: rank 0 holds 1, peak"):
        check_schedule(replace(acme.FILL_DRAIN, peak=lambda rank, p, chunks, m: m + 1))
    with pytest.raises(AssertionError, match=r"acme_fill_drain: .*bubble says"):
        check_schedule(replace(acme.FILL_DRAIN, bubble=lambda p, chunks, m, cost: 7.5))
    free = msgspec.structs.replace(acme.LOCAL_SGD, config=STRATEGIES["ddp"].config)
    with pytest.raises(msgspec.ValidationError, match="local_sgd"):  # the tag of its knobs must be its name
        check_strategy(free)
    lazy = msgspec.structs.replace(
        acme.LOCAL_SGD,
        build=lambda model, cost, mesh, config, steps, seed: acme.LOCAL_SGD.build(
            model, cost, mesh, msgspec.structs.replace(config, gradient_accumulation_steps=1), steps, seed
        ),
    )
    with pytest.raises(AssertionError, match=r"local_sgd: a rank computes 2.16e\+11 FLOPs, the model has 6.48e\+11"):
        check_strategy(lazy)

    def never(model, cost, mesh, config, steps, seed):  # a knob's 0 that nobody refuses is divided by
        return acme.LOCAL_SGD.build(model, cost, mesh, config, steps + 0 % config.often, seed)

    class Loose(StrategyConfig, frozen=True, tag_field="kind", tag="local_sgd"):
        every: int = 4
        often: int = 4

    with pytest.raises(AssertionError, match="local_sgd: often = 0 must work or be refused, not end in ZeroDivisionEr"):
        check_strategy(msgspec.structs.replace(acme.LOCAL_SGD, config=Loose, build=never))
    log = OWN / "timings.log"
    with pytest.raises(AssertionError, match=r"acme_log: empty timings.log: a TraceError is wanted, not IndexError"):
        check_reader(replace(acme.LOG, read=lambda paths: acme.LOG.read([*paths][paths[0].read_bytes()[0] * 0 :])), log)


def exchanging(finish):
    """A strategy of the name of DDP's knobs, whose step ends with ``finish(ops, mesh)``."""

    class Hooks(WholeModelHooks):
        def finish(self):
            finish(self.ops, self.mesh)
            super().finish()

        def notes(self):
            return ("own",)

    class Knobs(StrategyConfig, frozen=True, tag_field="kind", tag="own"):
        pass

    return Strategy("own", Knobs, walked(Hooks))


def summed(ops, groups, nbytes=4.0, after=None, waits=True):
    here = ops.here if after is None else after
    sums = collective(ops, "all_reduce", "gradients", nbytes, groups, here)
    if waits:
        wait(ops, "gradients", (sums,))


def passed_on(ops, mesh):
    """Sums of neighbours, then of pairs with a gap: each hears of all others through a third."""
    neighbours = np.arange(mesh.world_size).reshape(-1, 2)
    summed(ops, neighbours)
    summed(ops, neighbours.T.copy())


@pytest.mark.parametrize(
    ("finish", "breach"),
    [
        (passed_on, ""),
        (lambda ops, mesh: None, "own: rank 1 hears nothing of what rank 0 computes in 1 steps: it needs an exchange"),
        (lambda ops, mesh: summed(ops, np.arange(mesh.world_size).reshape(-1, 2)), "own: rank 2 hears nothing of what"),
        (lambda ops, mesh: summed(ops, mesh.world_group(), nbytes=0.0), "own: rank 1 hears nothing of what rank 0"),
        (lambda ops, mesh: summed(ops, mesh.world_group(), waits=False), "own: rank 1 hears nothing of what rank 0"),
        (lambda ops, mesh: summed(ops, mesh.world_group(), after=()), "own: rank 1 hears nothing of what rank 0"),
        (lambda ops, mesh: summed(ops, mesh.world_group(), nbytes=-5.0), "own: a collective of -5.0 bytes"),
    ],
)
def test_a_strategy_whose_ranks_do_not_hear_of_each_other_breaks_the_contract(finish, breach):
    """One that exchanged nothing at all passed, and was the fastest of all."""
    if not breach:
        check_strategy(exchanging(finish))
        return
    with pytest.raises(AssertionError, match=re.escape(breach)):
        check_strategy(exchanging(finish))


def gossip(ops, mesh):
    """Pairs average; who is whose partner changes from step to step."""
    ranks = np.arange(mesh.world_size)
    hop = 1 << ops.step % (mesh.world_size.bit_length() - 1)
    summed(ops, np.stack([ranks, ranks ^ hop], axis=1)[ranks < ranks ^ hop])


def test_partners_that_change_are_part_of_the_period_which_may_hold_several_repeats():
    """Four ranks repeat after two steps, sixteen after four."""
    for period in (2, 4):
        check_strategy(msgspec.structs.replace(exchanging(gossip), period=period))
    for period in (1, 3):
        with pytest.raises(AssertionError, match=f"own: its steps repeat after 2, its period is {period}"):
            check_strategy(msgspec.structs.replace(exchanging(gossip), period=period))


def test_a_reader_may_not_name_ranks_sizes_or_times_that_cannot_be(acme):
    log = OWN / "timings.log"

    def reading(answer):
        return replace(acme.LOG, read=lambda paths: (acme.LOG.read(paths), answer)[1])

    (sample, *_) = acme.LOG.read([log]).rows
    for change, words in (
        ({"ranks": -1}, "a sample of -1 ranks"),
        ({"last": sample.ranks}, f"rank {sample.ranks}, of a group of {sample.ranks}"),
        ({"seconds": float("nan")}, "a sample of nan s"),
        ({"nbytes": -1.0}, "a sample of -1.0 bytes"),
    ):
        with pytest.raises(AssertionError, match=words):
            check_reader(reading(Samples((replace(sample, **change),), "log")), log)
    op = OpInfo("op", "compute", "compute")
    for rank, end, words in (
        (-1, 1.0, r"rank \[-1\], of a world of 1"),
        (1, 1.0, r"rank \[1\]"),
        (0, -1.0, "ends before"),
    ):
        none = np.zeros(1, dtype=np.int64)
        timeline = Timeline(
            1, (op,), (np.array([rank]),), none, none, np.zeros(1), np.zeros(1), np.full(1, end), source="log"
        )
        with pytest.raises(AssertionError, match=words):
            check_reader(reading(timeline), log)


def own_run(gpus):
    """A short run of the strategy that is registered as ``own``, collectives by the textbook."""
    changes = {"strategy": {"kind": "own", "micro_batch_size": 1}, "model.name": "gpt2", "run.backend": "ideal"}
    machine = {"cluster.nodes": 1, "cluster.gpus_per_node": gpus}
    return clustersim.load("ddp_gpt2_xl_2x8_a100", changes | machine)


@pytest.mark.parametrize(
    ("finish", "silent"),
    [
        (lambda ops, mesh: None, True),
        (lambda ops, mesh: summed(ops, mesh.world_group(), nbytes=0.0), True),
        (lambda ops, mesh: summed(ops, mesh.world_group(), after=()), True),
        (lambda ops, mesh: summed(ops, np.arange(mesh.world_size)[:, None]), True),
        (lambda ops, mesh: summed(ops, mesh.world_group()), False),
    ],
)
def test_a_run_says_that_an_own_strategy_exchanges_nothing(finish, silent):
    """It once was the fastest of all, without a word."""
    STRATEGIES.register(exchanging(finish))
    try:
        notes = own_run(2).prepare().notes
        assert any("own: no rank hears what another computes" in note for note in notes) == silent
        assert not any("no rank hears" in note for note in own_run(1).prepare().notes)
    finally:
        STRATEGIES.withdraw("own")


def _exchanged(kind, n, root=0):
    """Neighbours swap: of an odd group the last has no neighbour."""
    members = np.arange(n)
    return RoundSteps((Round(members, members ^ 1, 1.0, lambda _: [0], True),), np.ones(1))


def _counted_from_the_end(request, group, channels):
    return replace(in_rounds(_exchanged("all_reduce", 2).rounds, group), dst=np.array([-3, 0]))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (rounds_algorithm("swap", frozenset({"all_reduce"}), _exchanged), "IndexError"),
        (
            msgspec.structs.replace(
                rounds_algorithm("swap", frozenset({"all_reduce"}), _exchanged), traffic=_counted_from_the_end
            ),
            "its traffic names member -3",
        ),
    ],
)
def test_an_algorithm_that_cannot_do_a_size_and_does_not_refuse_it_is_named(row, words):
    """A run once ended in a raw IndexError, and a member below 0 was counted from the group's end."""

    def finish(ops, mesh):
        sums = collective(ops, "all_reduce", "gradients", 4.0, mesh.world_group(), ops.here, algorithm="swap")
        wait(ops, "gradients", (sums,))

    ALGORITHMS.register(row)
    STRATEGIES.register(exchanging(finish))
    try:
        with pytest.raises(ClusterSimError, match=f"algorithm 'swap' fails at all_reduce of 3 ranks: {words}"):
            own_run(3).run()
        if words == "IndexError":
            own_run(2).run()  # a size that it can do
    finally:
        STRATEGIES.withdraw("own")
        ALGORITHMS.withdraw("swap")


# ---- a name that is taken, a package that is broken ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "row", "message"),
    [
        (STRATEGIES, STRATEGIES["ddp"], "strategy 'ddp' is taken: clustersim ships it; choose another name"),
        (ALGORITHMS, ALGORITHMS["ring"], "algorithm 'ring' is taken: clustersim ships it"),
        (SCHEDULES, replace(SCHEDULES["gpipe"], name="x", aliases=("1F1B",)), "schedule '1f1b' is taken"),
        (OPTIMIZERS, SHIPPED, "optimizer 'sgd' is taken"),
        (FORMATS, FORMATS["kineto"], "trace format 'kineto' is taken"),
        (FAMILIES, FamilyTable("x", {"like": "llama", "types": ["llama"]}), "model family 'llama' is taken"),
        (FAMILIES, FamilyTable("x", {"like": "lama"}), "model family 'x' cannot be used: like = 'lama' is no shipped"),
        (OPTIMIZERS, "signum", "a row of clustersim.optimizers must be of type OptimizerRow, not str"),
    ],
)
def test_a_row_that_is_taken_or_none_is_refused_and_the_table_stays(rows, row, message):
    before = list(rows)
    with pytest.raises(PluginError, match=message):
        rows.register(row)
    assert list(rows) == before


def test_a_registered_row_is_there_until_it_is_withdrawn(acme):
    FAMILIES.register(acme.FAMILY)
    FAMILIES.register(acme.FAMILY)
    assert families()[by_type()["acme_llama"]].note == "Acme's blocks are Llama's"
    assert families()["acme_llama"].block == families()["llama"].block
    FAMILIES.withdraw("acme_llama")
    assert "acme_llama" not in by_type()
    SCHEDULES.register(acme.FILL_DRAIN)
    assert schedule("Acme-LIFO") is schedule("acme_fill_drain") is acme.FILL_DRAIN
    SCHEDULES.withdraw("acme_fill_drain")


MIXTURE = {
    "model_type": "acme_twice",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def test_a_family_that_lists_a_tensor_twice_is_refused_and_not_counted_twice():
    """A row's attention is inherited beside a block of its own: its projections would be there twice."""
    block = ["q self_attn.q_proj", "kv self_attn.k_proj", "kv self_attn.v_proj", "out self_attn.o_proj"]
    table = {"like": "mixtral", "block": [*block, *families()["mixtral"].block]}
    FAMILIES.register(FamilyTable("acme_twice", table))
    try:
        with pytest.raises(ModelError, match=r"family 'acme_twice' lists the tensor 'model.layers.0.self_attn.q_proj"):
            from_hf(MIXTURE)
    finally:
        FAMILIES.withdraw("acme_twice")


NESTED = FamilyTable(
    "acme_experts",
    {
        "like": "mixtral",
        "reads": {
            "layers": "n_layers",
            "d_model": "d_model",
            "heads": "n_heads",
            "kv_heads": "attn_config.kv_n_heads",
            "head_dim": "",
            "d_ff": "ffn_config.ffn_hidden_size",
            "seq_len": "max_seq_len",
            "window": "",
            "experts.count": "ffn_config.moe_num_experts",
            "experts.per_token": "ffn_config.moe_top_k",
            "experts.width": "ffn_config.ffn_hidden_size",
        },
        "sets": {"norm": "layernorm"},
    },
)
"""DBRX's sizes stand in tables inside its config, which no row could read: a package cannot bring a rule."""
DBRX = {
    "model_type": "acme_experts",
    "d_model": 6144,
    "n_heads": 48,
    "n_layers": 40,
    "max_seq_len": 32768,
    "vocab_size": 100352,
    "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 5e5},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@pytest.fixture
def nested():
    FAMILIES.register(NESTED)
    yield
    FAMILIES.withdraw("acme_experts")


def test_a_row_reads_fields_of_tables_inside_the_config(nested):
    """Parameters as databricks/dbrx-base counts them; what changes nothing is told as of any field, rope_theta not."""
    model = from_hf(DBRX)
    assert model.parameters == 131_596_523_520
    assert [note for note in model.notes if "nothing" in note] == [
        "fields that change nothing here: attn_config.clip_qkv 8"
    ]
    assert from_hf({**DBRX, "attn_config": None}).parameters > model.parameters  # as many keys as queries


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ffn_config": {}}, "missing 'ffn_config.ffn_hidden_size', the width of the MLP"),
        ({"ffn_config": 3}, "'ffn_config' = 3 must be a table of fields"),
        ({"attn_config": {"kv_n_heads": "x"}}, "'attn_config.kv_n_heads' = 'x' must be a whole number above zero"),
        ({"attn_config": {"kv_heads_n": 8}}, "'attn_config.kv_heads_n' = 8 is no field .* 'attn_config.kv_n_heads'"),
        ({"ffn_config": {**DBRX["ffn_config"], "index_topk": 9}}, "'ffn_config.index_topk' = 9 changes a model"),
    ],
)
def test_a_field_inside_a_table_is_refused_by_its_place(nested, change, message):
    with pytest.raises(ModelError, match=message):
        from_hf({**DBRX, **change})


BROKEN = {
    "an import that fails": ("import nothing_of_this_name\n", "x = beta:own\n", "cannot be imported: ModuleNotFound"),
    "no such attribute": ("", "x = beta:own\n", "cannot be imported: AttributeError"),
    "another thing": ("own = 3\n", "x = beta:own\n", "must be of type OptimizerRow, not int"),
    "another name": (ROW.format("y"), "x = beta:own\n", "calls itself 'y'; the entry point must have the same name"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_package_is_named_where_it_is_asked_for_and_left_out_elsewhere(monkeypatch, tmp_path, what):
    module, entries, message = BROKEN[what]
    installed(monkeypatch, tmp_path, "beta", module, entries)
    monkeypatch.delitem(sys.modules, "beta", raising=False)
    rows = table()
    assert rows["sgd"] is SHIPPED
    for _ in range(2):
        with pytest.raises(PluginError, match=f"optimizer 'x' of package beta 2.5 .*{message}"):
            _ = rows["x"]
    again = table()
    with pytest.warns(PluginWarning, match=r"optimizer 'x' of package beta 2.5 .*; it is left out"):
        assert list(again) == ["sgd"]
    assert list(again) == ["sgd"]
    assert "never" not in again
    monkeypatch.delitem(sys.modules, "beta", raising=False)


def test_a_package_does_not_replace_what_is_shipped_nor_another_packages_row(monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path / "one", "gamma", ROW.format("sgd"), "sgd = gamma:own\nx = gamma:own\n")
    installed(monkeypatch, tmp_path / "two", "delta", ROW.format("x"), "x = delta:own\n")
    rows = table()
    assert rows["sgd"] is SHIPPED
    with pytest.raises(PluginError, match=r"'x' is of package delta 2.5 and of package gamma 2.5; keep one of them"):
        _ = rows["x"]
    with pytest.warns(PluginWarning, match=r"package gamma 2.5 .*'sgd' is taken: clustersim ships it"):
        assert list(rows) == ["sgd"]


def test_a_name_of_an_installed_package_is_taken_too_and_only_what_is_asked_for_is_imported(monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path, "epsilon", ROW.format("x"), "x = epsilon:own\ny = nowhere:own\n")
    rows = table()
    with pytest.raises(PluginError, match=r"'x' is taken: package epsilon 2.5 adds it"):
        rows.register(OptimizerRow(name="x", passes=(1, 1), ops=1))
    assert "epsilon" not in sys.modules
    assert rows["x"].passes == (5, 5)
    del sys.modules["epsilon"]


@pytest.mark.parametrize("slot", [Action("F", 0), (), ("F", 0)])
def test_a_place_that_is_no_tuple_of_actions_is_named(slot):
    """An action for a tuple of one ended in 'str' object has no attribute 'kind'."""
    row = Schedule("bare", lambda p, chunks, m: ((slot, (Action("B", 0),)),) * p)
    with pytest.raises(AssertionError, match=r"pipeline rank 0 has .* in place 0; a place is a tuple of one Action"):
        check_schedule(row)


def test_a_cluster_made_in_python_has_the_times_of_the_file_that_says_the_same():
    """As the end of OWN_PARTS.md has it; the switches' numbers are those of the file."""
    prepared = clustersim.load("ddp_gpt2_xl_2x8_a100", {"model.name": "gpt2", "cluster.topology": "hgx-a100"}).prepare()
    switches = {"radix": 40, "nodes_per_unit": 20, "port_latency": 300e-9, "switch_latency": 230e-9}
    made = fabrics.rail_optimised([fabrics.node("hgx-a100")] * 2, **switches)
    ends = [simulate(prepared.program, machine, prepared.mesh).spans()["end"] for machine in (made, prepared.topology)]
    assert np.array_equal(*ends)
    slower = fabrics.change(made, fabrics.Change(match="node0/nic0", bandwidth=5e9))
    assert simulate(prepared.program, slower, prepared.mesh).spans()["end"].max() > ends[0].max()


def _places(*passes):
    return tuple((Action(kind, microbatch),) for kind, microbatch in passes)


def _leaves_out(p, chunks, m):
    return (_places(*(("F", k) for k in range(m - 1)), *(("B", k) for k in range(m - 1))),) * p


def _backward_first(p, chunks, m):
    return (_places(*(("B", k) for k in range(m)), *(("F", k) for k in range(m))),) * p


def _of_one_rank(p, chunks, m):
    return (_places(*(("F", k) for k in range(m)), *(("B", k) for k in range(m))),)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (_leaves_out, "pipeline rank 0 never runs F of micro-batch 23, chunk 0"),
        (_backward_first, "pipeline rank 0 runs B of micro-batch 0, chunk 0 before its F"),
        (_of_one_rank, "schedule 'wrong' gives 1 orders for 8 pipeline ranks"),
        (lambda p, chunks, m: None, "schedule 'wrong' gives None for 8 pipeline ranks"),
    ],
)
def test_a_schedule_of_ones_own_that_cannot_be_is_refused_by_a_run(rule, text):
    """One that left out a micro-batch was played, 4 % faster than it is, with samples that nobody computed."""
    SCHEDULES.register(Schedule("wrong", rule))
    try:
        with pytest.raises(ScenarioError, match=re.escape(text)):
            clustersim.load("1f1b_gpt2_xl_1x8_a100", {"parallel.schedule": "wrong"}).run()
    finally:
        SCHEDULES.withdraw("wrong")


NAMED = {
    "strategy local_sgd": ("ddp_gpt2_xl_2x8_a100", {"strategy": {"kind": "local_sgd"}}),
    "schedule acme_fill_drain": ("gpipe_gpt2_xl_1x8_a100", {"parallel.schedule": "Acme-LIFO"}),
    "algorithm acme_star": ("ddp_gpt2_xl_2x8_a100", {"strategy.algorithm": "acme_star"}),
    "optimizer signum": ("ddp_gpt2_xl_2x8_a100", {"run.optimizer": "signum"}),
    "model family acme_llama": ("ddp_gpt2_xl_2x8_a100", {"model": {"hf_config": "CONFIG", "seq_len": 512}}),
}
"""Scenarios that name a part of one's own: what the part is called in their identity, and what is changed of which."""


def identities(folder, code):
    """Of each of :data:`NAMED` its key, with the parts of a module of this code; their names in the identity hold."""
    folder.mkdir()
    (folder / "walk_parts.py").write_text(code)
    (folder.parent / "config.json").write_text(json.dumps({"model_type": "acme_llama", "hidden_size": 256}))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    parts = importlib.import_module("walk_parts")
    rows = [(STRATEGIES, parts.LOCAL_SGD), (SCHEDULES, parts.FILL_DRAIN), (ALGORITHMS, parts.STAR)]
    rows += [(OPTIMIZERS, parts.SIGNUM), (FAMILIES, parts.FAMILY)]
    keys = {}
    try:
        for table_of_rows, row in rows:
            table_of_rows.register(row)
        for name, (base, changes) in NAMED.items():
            text = json.dumps(changes).replace("CONFIG", str(folder.parent / "config.json"))
            identity = Fingerprints()(clustersim.load(base, json.loads(text)))
            assert [file for file in identity.files if file.startswith("part/")] == [f"part/{name}"]
            keys[name] = identity.key
    finally:
        for table_of_rows, row in rows:
            table_of_rows.withdraw(row.name)
        sys.path.remove(str(folder))
        del sys.modules["walk_parts"]
    return keys


def test_a_scenario_that_names_a_part_of_ones_own_is_another_when_that_is(tmp_path):
    """A sweep kept the rows of a strategy's older code: what has a row is not simulated again."""
    text = (OWN / "acme_parts.py").read_text()
    keys = identities(tmp_path / "first", text)
    assert identities(tmp_path / "again", text) == keys
    other_code = identities(tmp_path / "code", text.replace("(self.ops.step + 1) % ", "(self.ops.step + 3) % "))
    other_data = identities(tmp_path / "data", text.replace("(5, 12), ops=5", "(5, 14), ops=5"))
    other_note = identities(tmp_path / "note", text.replace("Acme's blocks are Llama's", "Llama's blocks"))
    assert other_code["strategy local_sgd"] != keys["strategy local_sgd"]
    assert other_data["optimizer signum"] != keys["optimizer signum"]
    assert other_note["model family acme_llama"] != keys["model family acme_llama"]
    assert other_note["optimizer signum"] == keys["optimizer signum"]  # a row of plain values is its values
    shipped = Fingerprints()(clustersim.load("ddp_gpt2_xl_2x8_a100"))
    assert not any(file.startswith("part/") for file in shipped.files)


def test_a_cell_that_is_run_again_is_told_how_to_register_its_row_again(acme):
    again = msgspec.structs.replace(acme.SIGNUM)
    OPTIMIZERS.register(acme.SIGNUM)
    with pytest.raises(PluginError, match=r"'signum' is taken: this program registered it; withdraw\('signum'\) takes"):
        OPTIMIZERS.register(again)
    OPTIMIZERS.withdraw("signum")
    OPTIMIZERS.register(again)
    OPTIMIZERS.withdraw("signum")
