"""``python -m tests.evidence experts``: how good predictions of mixtures of experts are, beside what is aimed for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.common import PATH, json_option, print_json, working
from clustersim.app.cli.validate import markdown_option
from tests.evidence.rows_shown import show_rows

if TYPE_CHECKING:
    from tests.evidence.expert_score import ScoreLine

HEAD = ("what", "reached", "target", "met")


@click.command()
@click.option("--shared", type=PATH, help="The folder of shared measurements, where it is not beside the project.")
@click.option("--steps/--no-steps", default=True, help="Play the measured steps too, which takes minutes.")
@click.option("--deepseek/--no-deepseek", default=False, help="Play DeepSeek-V3's step on 2,048 GPUs, too.")
@markdown_option
@json_option
def experts(shared: Path | None, steps: bool, deepseek: bool, as_json: bool, markdown: bool) -> None:
    """Mixtures of experts: measured steps, a publisher left out, exchanges, order of choices, cliffs, DeepSeek-V3."""
    from tests.evidence import expert_score

    lines = []
    with working("predicting mixtures of experts") as progress:
        for i, line in enumerate(expert_score.score_lines(shared or expert_score.SHARED, steps, deepseek)):
            lines.append(line)
            progress(i, None)
    print_lines("mixtures of experts", lines, as_json=as_json, markdown=markdown)


def print_lines(title: str, lines: list[ScoreLine], *, as_json: bool, markdown: bool) -> None:
    """Print lines of a score as a table, as Markdown or as JSON."""
    cells = [
        (line.subject, line.reached, line.target, ("yes" if line.met else "no") if line.target else "")
        for line in lines
    ]
    if as_json:
        print_json({"lines": [asdict(line) for line in lines]})
    else:
        show_rows(title, HEAD, cells, markdown=markdown, words=4)
