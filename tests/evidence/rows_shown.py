"""How commands about evidence print their rows: as a table on the terminal, or as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from clustersim.app.cli.tables import markdown_table, number_table, stdout


def show_rows(
    title: str, head: Sequence[str], rows: Iterable[Iterable[str]], *, markdown: bool, words: int = 1
) -> None:
    """Print rows whose first ``words`` columns are words and whose others are numbers; Markdown has no title."""
    if markdown:
        click.echo("\n".join(markdown_table(head, rows, words)))
    else:
        stdout().print(number_table(title, head, rows, words))
