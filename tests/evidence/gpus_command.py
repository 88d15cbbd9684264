"""``python -m tests.evidence gpus``: how good predictions of any GPU are, beside what is aimed for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.common import json_option, working
from clustersim.app.cli.validate import markdown_option
from tests.evidence.expert_command import print_lines

if TYPE_CHECKING:
    from tests.evidence.expert_score import ScoreLine

WITHOUT = "not computed: asked to leave out with"


@click.command()
@click.option("--kernels/--no-kernels", default=True, help="Fit kernels with each GPU left out: two minutes.")
@click.option("--published/--no-published", default=True, help="Play every published step in sample: minutes.")
@click.option("--nanotron/--no-nanotron", default=True, help="Play nanotron's rows: minutes.")
@click.option("--steps/--no-steps", default=True, help="Play the rows of every source with one known: minutes.")
@click.option("--most-gpus", type=click.IntRange(min=16), default=64, help="Of the steps that are played.")
@markdown_option
@json_option
def gpus(most_gpus: int, as_json: bool, markdown: bool, **parts: bool) -> None:
    """Any GPU: kernels in sample and left out, published steps, nanotron's, steps with one own measurement known."""
    lines = []
    with working("predicting GPUs that are left out") as progress:
        for i, line in enumerate(_lines(parts, most_gpus)):
            lines.append(line)
            progress(i, None)
    print_lines("any GPU", lines, as_json=as_json, markdown=markdown)


def _lines(parts: Mapping[str, bool], most_gpus: int) -> Iterator[ScoreLine]:
    """The lines of each part that is asked for; of another, that it is not computed."""
    from tests.evidence import gpu_score
    from tests.evidence.expert_score import SHARED, ScoreLine

    tables = (SHARED / "training_steps.csv", SHARED / "training_steps_hybrid.csv")
    lines_of: dict[str, Callable[[], Iterator[ScoreLine]]] = {
        "kernels": gpu_score.kernel_lines,
        "published": gpu_score.published_lines,
        "nanotron": lambda: gpu_score.nanotron_lines(most_gpus),
        "steps": lambda: gpu_score.known_lines(tables, most_gpus),
    }
    for part, lines in lines_of.items():
        if parts[part]:
            yield from lines()
        else:
            yield ScoreLine(part, f"{WITHOUT} --no-{part}", "", float("nan"), False)
