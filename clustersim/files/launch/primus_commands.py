"""Primus's commands, spelt as the torchrun that they come to: ``primus-cli MODE ... -- train ...``, and
``EXP=FILE bash examples/run_pretrain.sh`` with its kin (AMD-AGI/Primus, ``runner/`` and ``examples/``)."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from itertools import pairwise

from clustersim.files.launch.shell_directives import ScriptVariables, directed_options

MAIN = "primus/cli/main.py"
"""What every one of them starts."""
CLI = "primus-cli"
SCRIPTS = ("run_pretrain.sh", "run_local_pretrain.sh", "run_slurm_pretrain.sh")
"""Scripts that take the experiment from ``EXP``."""
GPUS = "8"
"""``GPUS_PER_NODE`` where nothing is said."""
_SHELLS = ("bash", "sh", "exec", "env", "time", "nohup", "sudo")
"""Words before a command that start no ranks."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def spelt_out(words: Sequence[str], variables: ScriptVariables, given: Container[str]) -> list[str] | None:
    """The words of torchrun that a command of Primus comes to; None for another command, and for another program of
    Primus's than training.

    given : names of scripts beside it, which are followed and not spelt out.

    >>> spelt_out("bash examples/run_pretrain.sh --tp 2".split(), {"EXP": "a.yaml"}, ())
    ... # doctest: +NORMALIZE_WHITESPACE
    ['torchrun', '--nnodes', '1', '--nproc_per_node', '8', 'primus/cli/main.py', 'train', 'pretrain',
     '--config', 'a.yaml', '--tp', '2']
    >>> " ".join(spelt_out("./primus-cli slurm srun -N 4 -- train pretrain --config a.yaml".split(), {}, ()))
    'torchrun --nnodes 4 --nproc_per_node 8 primus/cli/main.py train pretrain --config a.yaml'
    """
    for i, word in enumerate(words):
        name = word.rsplit("/", 1)[-1]
        if name != CLI and name not in SCRIPTS:
            continue
        own = {**variables, **_assigned(words[:i])}
        before = [ahead for ahead in words[:i] if ahead not in _SHELLS and not _ASSIGNMENT.fullmatch(ahead)]
        if name == CLI:
            return _of_cli(list(words[i + 1 :]), before, own)
        experiment = str(own.get("EXP", ""))
        if name not in given and experiment.endswith((".yaml", ".yml")):
            return [*before, *_torchrun(before, "", own), "train", "pretrain", "--config", experiment, *words[i + 1 :]]
    return None


def _assigned(words: Sequence[str]) -> dict[str, str]:
    """Variables of ``env NAME=VALUE``."""
    return {match[1]: match[2] for match in map(_ASSIGNMENT.fullmatch, words) if match}


def _of_cli(words: list[str], before: list[str], variables: ScriptVariables) -> list[str] | None:
    """``[OPTIONS] direct|slurm|container [OPTIONS] -- [direct|container ... --] train pretrain ...``."""
    if "train" not in words:
        return None
    start = words.index("train")
    ahead = words[:start]
    own = {**variables, **_assigned([word for option, word in pairwise(ahead) if option == "--env"])}
    nodes = ""
    if "slurm" in ahead:
        slurm = ahead[ahead.index("slurm") + 1 :]
        slurm = slurm[: slurm.index("--")] if "--" in slurm else slurm
        nodes = directed_options(slurm).get("nodes", "${SLURM_NNODES}")
    return [*before, *_torchrun(before, nodes, own), *words[start:]]


def _torchrun(before: Sequence[str], nodes: str, variables: ScriptVariables) -> list[str]:
    """torchrun as Primus starts it: on one node, unless ``NNODES`` or Slurm says more."""
    alone = "${NNODES}" if before else "1"
    count = nodes or str(variables.get("NNODES") or alone)
    return ["torchrun", "--nnodes", count, "--nproc_per_node", str(variables.get("GPUS_PER_NODE") or GPUS), MAIN]
