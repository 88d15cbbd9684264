"""Tables that tools print, as people paste them: in Markdown, in a grid of reStructuredText, in a sheet, in a page."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from clustersim.cluster.files.nccl_xml import topology_text
from clustersim.core.errors import TopologyError, TraceError
from clustersim.files import traces
from clustersim.files.traces import nccl_tests_page
from clustersim.files.traces.samples import Samples

Rows = list[list[str]]


def markdown(rows: Rows) -> str:
    head, *body = ["| " + " | ".join(row) + " |\n" for row in rows]
    return f"# Title\n\n{head}|{' :---: |' * len(rows[0])}\n{''.join(body)}\nmore | less\n"


def without_edges(rows: Rows) -> str:
    head, *body = [" | ".join(row) + "\n" for row in rows]
    return f"{head}{' | '.join(['---'] * len(rows[0]))}\n{''.join(body)}"


def grid(rows: Rows) -> str:
    """Of reStructuredText: the last name of the head on two lines, and bold labels."""
    rule = "   +" + "+".join(["-" * 24] * len(rows[0])) + "+\n"
    lines = ["   |" + "|".join(f" {cell}".ljust(24) for cell in row) + "|\n" for row in rows]
    blank = "   |" + "|".join([" " * 24] * len(rows[0])) + "|\n"
    return (
        ".. table:: Name\n\n"
        + rule
        + lines[0]
        + blank
        + rule.replace("-", "=")
        + "".join(line.replace(" GPU", "**GPU", 1) + rule for line in lines[1:])
    )


def sheet(rows: Rows) -> str:
    return "".join(",".join(f'"{cell}"' if "," in cell else cell for cell in row) + "\n" for row in rows)


def semicolons(rows: Rows) -> str:
    return "".join(";".join(row) + "\n" for row in rows)


# ---- nvidia-smi topo -m ----------------------------------------------------------------------------------------------

MATRIX = [
    ["", "GPU0", "GPU1", "GPU2", "GPU3", "NIC0", "NIC1", "CPU Affinity", "NUMA Affinity"],
    ["GPU0", "X", "NV4", "SYS", "SYS", "PIX", "SYS", "0-15,32-47", "0"],
    ["GPU1", "NV4", "X", "SYS", "SYS", "NODE", "SYS", "0-15,32-47", "0"],
    ["GPU2", "SYS", "SYS", "X", "NV4", "SYS", "PIX", "16-31,48-63", "1"],
    ["GPU3", "SYS", "SYS", "NV4", "X", "SYS", "NODE", "16-31,48-63", "1"],
    ["NIC0", "PIX", "NODE", "SYS", "SYS", "X", "SYS", "", ""],
    ["NIC1", "SYS", "SYS", "PIX", "NODE", "SYS", "X", "", ""],
]


def machine(folder: Path, text: str, nics: tuple[int, float] | None = (2, 25e9)) -> str:
    """What a topology file says after its name and source."""
    path = folder / "topo.txt"
    path.write_text(text)
    return topology_text(path, "RTX-A6000", nics)


def last_first(rows: Rows) -> str:
    """Affinities before the labels, as a site's pages have them."""
    return markdown([[*row[7:], *row[:7]] for row in rows])


@pytest.mark.parametrize("dress", [markdown, without_edges, grid, sheet, semicolons, last_first])
def test_a_matrix_in_a_pages_table_is_the_matrix(tmp_path: Path, dress: Callable[[Rows], str]):
    """It was "is not XML"."""
    plain = machine(tmp_path, "".join("\t".join(row) + "\n" for row in MATRIX))
    assert machine(tmp_path, dress(MATRIX)) == plain


@pytest.mark.parametrize("self", ["-", "self", "—", ""])
def test_what_a_page_writes_for_a_part_itself_is_no_word(tmp_path: Path, self: str):
    rows = [[self if cell == "X" else cell for cell in row] for row in MATRIX]
    assert machine(tmp_path, markdown(rows)) == machine(tmp_path, markdown(MATRIX))


def test_blanks_of_a_page_are_blanks(tmp_path: Path):
    plain = "".join("\t".join(row) + "\n" for row in MATRIX)
    assert machine(tmp_path, plain.replace("\t", "\xa0\xa0")) == machine(tmp_path, plain)


def test_the_one_nic_that_has_no_row_is_its_column(tmp_path: Path):
    columns = [0, 1, 2, 3, 4, 5, 7, 8]
    whole = [[row[i] for i in columns] for row in MATRIX[:6]]
    assert machine(tmp_path, markdown(whole[:5]), None) == machine(tmp_path, markdown(whole), None)


def test_two_nics_without_rows_are_asked_for(tmp_path: Path):
    with pytest.raises(TopologyError, match="columns of NIC0, NIC1 and no rows of them"):
        machine(tmp_path, markdown(MATRIX[:5]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (markdown([["", "GPU0", "GPU1"], ["GPU0", "-", "83.0"], ["GPU1", "83.0", "-"]]), "tells no machine"),
        (markdown([["Phase", "GPU0", "GPU1"], ["T1", "Qwen", "Llama"]]), "tells no machine"),
        ("GPU0GPU1CPU AffinityNUMA Affinity\nGPU0XNODE0-310\nGPU1NODEX0-310\n", "run together"),
        ('<system version="1"></system>\n'.join(["$ cat a\n", "$ cat b\n", ""]), "holds 2 dumps"),
    ],
)
def test_what_is_no_matrix_is_not_told_of_xml(tmp_path: Path, text: str, words: str):
    with pytest.raises(TopologyError, match=words):
        machine(tmp_path, text)


def test_a_dump_in_a_page_is_the_dump(tmp_path: Path):
    dump = (
        '<system version="1"><cpu numaid="0" arch="x86_64" vendor="GenuineIntel">'
        '<pci busid="0000:01:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">'
        '<gpu dev="0" sm="86" rank="0"/></pci></cpu></system>\n'
    )
    assert machine(tmp_path, f"This is it:\n```xml\n{dump}```\nthanks\n", None) == machine(tmp_path, dump, None)


# ---- nccl-tests ------------------------------------------------------------------------------------------------------

TIMES = {1 << 20: 40.0, 1 << 24: 160.0, 1 << 30: 5000.0}
"""us by bytes, of an all_reduce of 8 ranks."""
PRINTED = ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]


def row_of(nbytes: int, place: float = 1.0) -> dict[str, str]:
    rate = nbytes / (TIMES[nbytes] * place) / 1e3
    return {
        "size": str(nbytes), "count": str(nbytes // 4), "type": "float", "redop": "sum", "root": "-1",
        "time": f"{TIMES[nbytes] * place:.2f}", "algbw": f"{rate:.2f}", "busbw": f"{rate * 1.75:.2f}", "#wrong": "0",
    }  # fmt: skip


def table(names: dict[str, str]) -> Rows:
    """Rows with these columns, by what a page calls them."""
    return [list(names), *([row_of(nbytes)[name] for name in names.values()] for nbytes in TIMES)]


def samples(folder: Path, text: str) -> Samples:
    path = folder / "page.txt"
    path.write_text(text)
    answer = traces.read([path])
    assert isinstance(answer, Samples)
    return answer


OWN = {name: name for name in PRINTED}
CALLED = {
    "Size (B)": "size", "Data Type": "type", "op": "redop", "Root": "root", "Time (us)": "time",
    "AlgBW (GB/s)": "algbw", "Bus Bandwidth": "busbw", "Errors": "#wrong",
}  # fmt: skip
OUT_OF_PLACE = {{"time": "oop_time", "busbw": "oop_busbw"}.get(name, name): name for name in PRINTED}


@pytest.mark.parametrize("names", [OWN, CALLED, OUT_OF_PLACE], ids=["own", "called", "out of place"])
@pytest.mark.parametrize("dress", [markdown, without_edges, sheet, semicolons, grid])
def test_rows_of_nccl_tests_in_a_pages_table_are_the_rows(
    tmp_path: Path, dress: Callable[[Rows], str], names: dict[str, str]
):
    """They were refused: no header, or columns that commas part."""
    answer = samples(tmp_path, dress(table(names)))
    assert {row.nbytes: row.seconds for row in answer.rows} == pytest.approx({n: us / 1e6 for n, us in TIMES.items()})
    assert {(row.kind, row.ranks, row.launch) for row in answer.rows} == {("all_reduce", 8, "")}
    assert answer.skipped == {}


def test_times_in_place_stand_behind_whatever_their_order(tmp_path: Path):
    names = [
        *PRINTED[:5],
        *(f"in-place {name}" for name in PRINTED[5:8]),
        *(f"out-of-place {name}" for name in PRINTED[5:8]),
    ]
    rows = [
        [*list(row_of(n).values())[:5], *list(row_of(n, 2.0).values())[5:8], *list(row_of(n).values())[5:8]]
        for n in TIMES
    ]
    for row in samples(tmp_path, markdown([names, *rows])).rows:
        assert (row.seconds, row.seconds_in_place) == pytest.approx((TIMES[row.nbytes] / 1e6, TIMES[row.nbytes] / 5e5))


@pytest.mark.parametrize("thousands", [1024, 1000])
def test_sizes_with_a_prefix_are_those_that_the_bandwidth_says(tmp_path: Path, thousands: int):
    sizes = {"64 MB": 64 * thousands**2, "**1 GB**": thousands**3}
    rows = [[word, f"{nbytes / 200e3:,.1f}", "200.00", "**350.00**"] for word, nbytes in sizes.items()]
    page = "all_reduce_perf:\n\n" + markdown([["Size", "Time (us)", "algbw (GB/s)", "busbw (GB/s)"], *rows])
    answer = samples(tmp_path, page)
    assert [row.nbytes for row in answer.rows] == list(sizes.values())
    assert any("has no types" in note for note in answer.notes)


def test_without_times_they_are_size_over_bandwidth_and_said(tmp_path: Path):
    rows = [["size", "algbw", "busbw"], ["1 GB", "200.00", "350.00"]]
    answer = samples(tmp_path, "all_reduce_perf:\n\n" + markdown(rows))
    assert [row.seconds for row in answer.rows] == pytest.approx([2**30 / 200e9])
    assert any("has no times" in note for note in answer.notes)


@pytest.mark.parametrize(
    "rows",
    [
        [["Config", "size", "time", "algbw", "busbw"], ["1n", "1000000", "100", "10.00", "17.50"]],
        [["size", "time", "algbw", "busbw"], ["1000000", "250", "10.00", "17.50"]],
        [["size", "time (minutes)", "algbw", "busbw"], ["1000000", "100", "10.00", "17.50"]],
        [["size", "time", "algbw (Gb/s)", "busbw (Gb/s)"], ["1000000", "100", "10.00", "17.50"]],
        [["size", "time", "algbw", "busbw"], ["", "", "", ""]],
        [["size", "time", "algbw", "busbw"], ["large", "100", "10.00", "17.50"]],
    ],
    ids=["another column", "no agreement", "minutes", "gigabits", "empty", "a word"],
)
def test_a_table_of_something_else_is_told_what_to_give(tmp_path: Path, rows: Rows):
    with pytest.raises(
        TraceError, match=r"not nccl-tests' .* give the log as it was printed, or a CSV with the columns"
    ):
        samples(tmp_path, "all_reduce_perf:\n\n" + markdown(rows))


def test_a_log_as_it_was_printed_is_the_same_text():
    text = "#  size  count  type  time  algbw  busbw\n  1024  256  float  9.5  0.11  0.19\n| busbw | a, b |"
    assert nccl_tests_page.as_printed(text)[0] is text


@pytest.mark.parametrize("cell", ['"' + "x" * 200_000, "\0", '"', "|" * 5000])
def test_cells_that_no_table_has_are_no_traceback(tmp_path: Path, cell: str):
    for text in (sheet(table(OWN)), markdown(table(OWN)), sheet(MATRIX), markdown(MATRIX)):
        path = tmp_path / "page.txt"
        path.write_text(text.replace("X", cell, 1).replace("float", cell, 1))
        with suppress(TraceError):
            traces.read([path])
        with suppress(TopologyError):
            topology_text(path, "RTX-A6000")
