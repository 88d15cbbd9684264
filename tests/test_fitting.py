"""Tables fit the terminal at 80, 100 and 160 columns, and no figure in them is ever cut."""

import io
import re

import pytest
from rich.table import Table

from clustersim.app.cli.fitting import Terminal, fitted


def table(columns, rows):
    made = Table(title="a table")
    for name, justify in columns:
        made.add_column(name, justify=justify)
    for row in rows:
        made.add_row(*row)
    return made


WIDE = table(
    [("strategy", "left"), *((f"figure number {i}", "right") for i in range(14))],
    [[f"parameter_server async, staleness {k}", *(f"{1000 * k + i}.25 GiB" for i in range(14))] for k in range(1, 6)],
)


def shown(what, width):
    out = io.StringIO()
    Terminal(file=out, width=width, highlight=False).print(what)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_is_wider_than_the_terminal_and_every_figure_is_whole(width):
    text = shown(WIDE, width)
    assert max(map(len, text.splitlines())) <= width
    for k in range(1, 6):
        for i in range(14):
            assert f" {1000 * k + i}.25 GiB " in text
    assert "…" not in text
    assert text.count("a table") == 1


def test_what_fits_is_one_table_as_rich_prints_it():
    small = table([("a", "left"), ("b", "right")], [["x", "1"]])
    (one,) = fitted(small, 80)
    assert one.row_count == 1


def test_the_first_column_is_in_every_part():
    for part in fitted(WIDE, 80):
        assert part.columns[0].header == "strategy"


COMMANDS = (
    ("run", "fsdp_llama3_8b_64x8_h100", "--set", "cluster.nodes=2"),
    ("memory", "ddp_gpt2_xl_2x8_a100", "--all"),
    ("list", "devices"),
    ("list", "strategies"),
    ("describe", "--keys", "sweep"),
)


def fits(text, width):
    """Whether there is a table in a text, none of it wider, and none cut."""
    framed = [line for line in text.splitlines() if re.search("[│┃━─]", line)]
    return bool(framed) and max(map(len, framed)) <= width and not any("…" in line for line in framed)


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0] + words[-1])
def test_tables_of_commands_fit(clustersim, words, width):
    done = clustersim(*words, columns=width)
    assert done.returncode == 0, done.stderr
    assert fits(done.stdout, width)
