"""Schedules beside PyTorch: its CSV format, and its own classes run as an oracle where torch is installed."""

from __future__ import annotations

import csv
import io
import types

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.training.schedules import SCHEDULES, schedule
from clustersim.training.schedules.base import stage_of
from clustersim.training.schedules.notation import text
from clustersim.training.schedules.torch_csv import from_csv


def to_csv(orders, placement):
    """The orders as PyTorch reads them, one row for each rank; without empty cells, since PyTorch needs none."""
    p = len(orders)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for rank, order in enumerate(orders):
        words = [[f"{stage_of(placement, rank, a.chunk, p)}{a.kind}{a.microbatch}" for a in slot] for slot in order]
        writer.writerow(word[0] if len(word) == 1 else f"({';'.join(word)})OVERLAP_F_B" for word in words)
    return out.getvalue()


HALF = "0F0,0F1,0I0,0W0,0B1\n,1F0,1I0,1W0,1F1,1B1\n"


def read(tmp_path, content: str):
    path = tmp_path / "schedule.csv"
    path.write_text(content)
    return from_csv(path)


def test_a_csv_schedule_is_used_like_any_other(tmp_path):
    row = read(tmp_path, HALF)
    assert (row.chunks, row.placement, row.splits_backward) == (1, "loop", True)
    assert [text(order) for order in row.order(2, 1, 2)] == ["F0 F1 I0 W0 B1", "F0 I0 W0 F1 B1"]


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.placement != "both"])
def test_what_is_written_as_csv_reads_as_the_same_orders(name, tmp_path):
    row = SCHEDULES[name]
    v = row.chunks or 3
    orders = row.order(4, v, 8)
    again = read(tmp_path, to_csv(orders, row.placement))
    assert again.order(4, v, 8) == orders
    assert (again.chunks, again.splits_backward) == (v, row.splits_backward)
    assert again.placement == (row.placement if v > 1 else "loop")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("0F0,0X0", r"row 0, cell 1: cannot read '0X0' as an action; write stage, kind and micro-batch"),
        ("0F0,0B0\n1F0,1RECV_B0", r"row 1, cell 1: '1RECV_B0' computes nothing; leave such actions out"),
        ("0F0,0B0\n,,", r"every pipeline rank needs a row with an action"),
        ("", r"every pipeline rank needs a row with an action"),
        ("0F0,0B0,2F0,2B0\n1F0,1B0", r"3 stages do not divide over 2 rows"),
        ("1F0,1B0\n0F0,0B0", r"row 0 has the stages \[1\]; right would be \[0\] \(going round\) or \[0\] \(as a V\)"),
        ("0F0,3F0,3B0\n1F0,2F0,2B0,1B0", r"pipeline rank 0 never runs B of micro-batch 0, chunk 0"),
        ("0F0,0B0\n1B0,1F0", r"pipeline rank 1 runs B of micro-batch 0, chunk 0 before its F"),
        ("0F0,0B0,(0F1;0F2)OVERLAP_F_B", r"pipeline rank 0 runs \(F1\|F2\) together"),
    ],
)
def test_a_csv_that_is_no_schedule_is_one_line_with_file_and_place(content, problem, tmp_path):
    with pytest.raises(ScenarioError, match=rf"^[^\n]*schedule\.csv: [^\n]*{problem}[^\n]*$"):
        read(tmp_path, content)


def test_a_csv_schedule_says_which_numbers_it_is_for(tmp_path):
    row = read(tmp_path, HALF)
    for numbers, problem in (
        ((3, 1, 2), r"is a schedule of 2 pipeline ranks, not 3 \(at \$.parallel.pp"),
        ((2, 2, 2), r"has 1 chunk on each pipeline rank, not 2; use 1 \(at \$.parallel.vpp"),
        ((2, 1, 4), r"the nearest that works is 2 \(at \$.parallel.microbatches"),
    ):
        with pytest.raises(ScenarioError, match=problem):
            row.order(*numbers)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ScenarioError, match=r"none\.csv: cannot be read: No such file"):
        from_csv(tmp_path / "none.csv")


# ---- PyTorch itself ----


@pytest.fixture(scope="module")
def pipelining():
    """PyTorch's schedules module."""
    pytest.importorskip("torch", reason="needs torch")
    return pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs torch's pipelining")


def stages_of_rank_0(p: int, chunks: int) -> list[types.SimpleNamespace]:
    """What PyTorch's schedules ask of a stage before they run."""
    common = {"num_stages": p * chunks, "group_size": p, "group_rank": 0, "submod": None, "has_backward": True}
    return [types.SimpleNamespace(stage_index=c * p, is_first=c == 0, is_last=False, **common) for c in range(chunks)]


def theirs(pipelining, name: str, p: int, chunks: int, m: int) -> list[list[str]]:
    """Each rank's actions as PyTorch's class generates them."""
    made = pipelining.get_schedule_class(name)(stages_of_rank_0(p, chunks), m)
    return [[str(action) for action in made.pipeline_order[rank] if action is not None] for rank in range(p)]


@pytest.mark.parametrize(
    ("name", "chunks", "numbers"),
    [
        ("Interleaved1F1B", 2, [(4, 8), (4, 10), (3, 5), (8, 24), (5, 4)]),
        ("Interleaved1F1B", 3, [(4, 8), (6, 12)]),
        ("LoopedBFS", 2, [(4, 8), (3, 2)]),
        ("InterleavedZeroBubble", 1, [(4, 8), (4, 4), (6, 18)]),
        ("InterleavedZeroBubble", 3, [(4, 8), (3, 5), (8, 16)]),
        ("ZBVZeroBubble", 2, [(4, 8), (4, 3), (8, 20), (1, 3), (5, 1)]),
        ("DualPipeV", 2, [(4, 10), (8, 16), (1, 4), (5, 23)]),
    ],
)
def test_pytorchs_own_classes_generate_the_same_orders(pipelining, name, chunks, numbers):
    row = schedule(name)
    for p, m in numbers:
        ours = to_csv(row.order(p, chunks, m), row.placement).splitlines()
        assert [line.split(",") for line in ours] == theirs(pipelining, name, p, chunks, m)


class Recorded(Exception):
    """Ends a run of PyTorch's schedule after its last backward."""


@pytest.mark.parametrize(("name", "p", "m"), [("GPipe", 4, 6), ("1F1B", 4, 8), ("1F1B", 5, 5), ("1F1B", 1, 3)])
def test_pytorchs_single_stage_schedules_run_the_same_orders(pipelining, monkeypatch, name, p, m):
    monkeypatch.setattr(pipelining, "_batch_p2p", lambda *args, **kwargs: [])
    for rank, order in enumerate(schedule(name).order(p, 1, m)):
        ran: list[str] = []
        stage = types.SimpleNamespace(
            stage_index=rank,
            num_stages=p,
            is_last=rank == p - 1,
            has_backward=True,
            get_fwd_recv_ops=lambda k: [],
            get_fwd_send_ops=lambda k: [],
            get_bwd_recv_ops=lambda k: [],
            get_bwd_send_ops=lambda k: [],
            forward_one_chunk=lambda k, *args, ran=ran, **kwargs: ran.append(f"F{k}"),
            backward_one_chunk=lambda k, ran=ran, **kwargs: ran.append(f"B{k}"),
            perform_reduce_grad=lambda scale: None,
        )
        made = pipelining.get_schedule_class(name)(stage, m)
        made._has_backward = True
        monkeypatch.setattr(made, "_initialize_stage", lambda *args: None)
        for quiet in ("_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
            monkeypatch.setattr(made, quiet, lambda *args: None)
        made._step_microbatches([()] * m, [{}] * m)
        assert " ".join(ran) == text(order)


@pytest.mark.parametrize("name", ["zb_h1", "zb_2p", "zbv", "v_half", "v_min", "naive", "gpipe", "1f1b", "dualpipev"])
def test_pytorch_reads_and_validates_what_we_write(pipelining, name):
    row = SCHEDULES[name]
    lines = to_csv(row.order(4, row.chunks, 8), row.placement).splitlines()
    actions = {rank: [pipelining._Action.from_str(cell) for cell in line.split(",")] for rank, line in enumerate(lines)}
    where = pipelining._validate_schedule(actions, 4, 4 * row.chunks, 8)
    pipelining._add_send_recv(actions, lambda stage: where[stage], 4 * row.chunks)  # raises on a deadlock


def test_autograd_takes_split_inputs_back_in_reverse_order():
    torch = pytest.importorskip("torch", reason="needs torch")
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    ran: dict[int, list[int]] = {0: [], 1: []}

    def through(layer: int, split: int, x):
        y = (first, second)[layer](x)
        y.register_hook(lambda _: ran[layer].append(split))
        return y

    # PyTorch's model-parallel tutorial, PipelineParallelResNet50.forward: split k on the second GPU, k+1 on the first.
    outputs = []
    before = through(0, 0, torch.ones(1, 2))
    for split in range(1, 5):
        outputs.append(through(1, split - 1, before))
        before = through(0, split, torch.ones(1, 2))
    outputs.append(through(1, 4, before))
    torch.cat(outputs).sum().backward()
    backwards = [[a.microbatch for (a,) in order if a.kind == "B"] for order in schedule("naive").order(2, 1, 5)]
    assert [ran[0], ran[1]] == backwards
