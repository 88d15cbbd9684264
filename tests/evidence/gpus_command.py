"""``python -m tests.evidence gpus``: how good predictions of any GPU are, beside what is aimed for."""

from __future__ import annotations

from collections.abc import Iterator
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
@click.option("--nanotron/--no-nanotron", default=True, help="Play nanotron's rows: minutes.")
@click.option("--steps/--no-steps", default=True, help="Play the rows of every source with one known: minutes.")
@click.option("--most-gpus", type=click.IntRange(min=16), default=64, help="Of the steps that are played.")
@markdown_option
@json_option
def gpus(kernels: bool, nanotron: bool, steps: bool, most_gpus: int, as_json: bool, markdown: bool) -> None:
    """Any GPU: kernels in sample and left out, nanotron's steps, steps with one own measurement known."""
    lines = []
    with working("predicting GPUs that are left out") as progress:
        for i, line in enumerate(_lines(kernels, nanotron, steps, most_gpus)):
            lines.append(line)
            progress(i, None)
    print_lines("any GPU", lines, as_json=as_json, markdown=markdown)


def _lines(kernels: bool, nanotron: bool, steps: bool, most_gpus: int) -> Iterator[ScoreLine]:
    from tests.evidence import gpu_score
    from tests.evidence.expert_score import SHARED, ScoreLine

    def absent(subject: str) -> ScoreLine:
        return ScoreLine(subject, f"{WITHOUT} --no-{subject}", "", float("nan"), False)

    if kernels:
        yield from gpu_score.kernel_lines()
    else:
        yield absent("kernels")
    if nanotron:
        yield from gpu_score.nanotron_lines(most_gpus)
    else:
        yield absent("nanotron")
    if steps:
        tables = (SHARED / "training_steps.csv", SHARED / "training_steps_hybrid.csv")
        yield from gpu_score.known_lines(tables, most_gpus)
    else:
        yield absent("steps")
