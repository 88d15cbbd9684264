"""Every option of a framework is judged: read, told as not played, refused, or known to change nothing."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from test_launch_kinds import megatron

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch.table import load

OPTIONS = Path(__file__).parent / "data" / "megatron_options.txt"


def judged(option: str) -> bool:
    """Whether a row, a reason or a list of Megatron's table is about an option."""
    table = load("megatron")
    refused = (glob.partition("=")[0] for glob in (*table.refused, *table.unsized))
    globs = (*(row.option for row in table.every()), *table.ignored, *table.unplayed, *refused)
    return any(fnmatchcase(option, glob) for glob in globs)


def test_no_option_of_megatron_is_unjudged() -> None:
    listed = [line for line in OPTIONS.read_text("utf-8").splitlines() if not line.startswith("#")]
    assert len(listed) > 600
    assert [option for option in listed if not judged(option)] == []
    assert not judged("an_option_of_nobody")


def test_a_quick_geglu_of_megatron_multiplies_two_projections() -> None:
    gated, plain = megatron("--quick-geglu"), megatron("")
    assert exchange.canonical(gated.scenario)["shape.gated"] is True
    assert not exchange.canonical(plain.scenario).get("shape.gated")


def test_mindspeeds_list_of_layers_is_a_layout_of_stages() -> None:
    made = megatron("--pipeline-model-parallel-size 2 --num-layer-list 3,1")
    assert made.scenario.file.parallel.layout == "Ettt|tL"
    with pytest.raises(ScenarioError, match=r"--num-layer-list: '3,x' does not fit: expected layers of each pipeline"):
        megatron("--pipeline-model-parallel-size 2 --num-layer-list 3,x")


@pytest.mark.parametrize(
    "words",
    [
        "--use-mup",
        "--softmax-type vanilla",
        "--softmax-type off-by-one",
        "--glu-linear-offset 1.0",
        "--num-zero-experts 0",
    ],
)
def test_what_changes_neither_products_nor_bytes_is_known_and_changes_nothing(words: str) -> None:
    made = megatron(words)
    assert (made.unknown, dict(made.unplayed)) == ((), {})
    assert exchange.canonical(made.scenario) == exchange.canonical(megatron("").scenario)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--softmax-type learnable", "a learned score in each head's softmax"),
        ("--num-zero-experts 256", "has experts that compute nothing"),
        ("--n-shared-experts 2", "has shared experts in the words of a fork"),
        ("--enable-hyper-connections", "hands on several streams between its blocks"),
        ("--hybrid-override-pattern M-M*-", "has state-space layers"),
        ("--qk-l2-norm", "has norms of queries and keys without weights"),
        ("--moe-tp-extend-ep", "spreads experts over the ranks of tensor parallelism"),
        ("--noop-layers 60,61", "has layers that do nothing on some stages"),
        ("--perform-rl-step", "trains by reinforcement learning"),
        ("--use-mp-args-from-checkpoint-args", "takes its degrees from a checkpoint"),
    ],
)
def test_what_makes_another_model_or_another_split_is_refused(words: str, why: str) -> None:
    with pytest.raises(ScenarioError, match=why):
        megatron(words)
