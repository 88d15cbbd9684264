"""The environment of what a launch script starts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import takewhile

from clustersim.collectives.nccl.settings import settings_of
from clustersim.core.texts import data_table, short
from clustersim.files.launch.shell_directives import ScriptVariables

CHANGES: dict[str, tuple[str, list[str]]] = {
    name: (row["what"], usual) for row in data_table("launch_words")["played"] for name, usual in row["usual"].items()
}
"""Variables of CUDA and Primus-Turbo that change what a step takes and that no field says: what is played, and the
values that ask for that (CUDA's programming guide)."""


def of_nccl(variables: ScriptVariables) -> dict[str, str]:
    """NCCL's variables whose values are known, in order."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(("NCCL_", "RCCL_")) and isinstance(value, str) and "$" not in value
    }


def unplayed(variables: ScriptVariables) -> list[str]:
    """A line for each variable that changes time and is not played.

    >>> unplayed({"NCCL_IB_DISABLE": "0", "NCCL_SHM_DISABLE": "1", "TP": "4"})  # doctest: +ELLIPSIS
    ['NCCL_SHM_DISABLE=1 is not played: GPUs of a node that do not read each other meet in host memory...']
    """
    lines = list(settings_of(of_nccl(variables)).notes)
    for name in sorted(CHANGES.keys() & variables.keys()):
        why, usual = CHANGES[name]
        value = variables[name]
        if isinstance(value, str) and value not in usual and "$" not in value:
            lines.append(f"{name}={short(value)} is not played: {why}")
    return lines


_AMONG = re.compile(r"(?:^|[,=])([NR]CCL_\w+|CUDA_\w+|PRIMUS_TURBO_\w+)=([^,]*)")


def among(words: list[str]) -> dict[str, str]:
    """Variables of NCCL, CUDA and Primus-Turbo that a command hands on: of mpirun's ``-x``, a container's ``--env``,
    srun.

    >>> among(["mpirun", "-x", "NCCL_ALGO=Ring", "--export=ALL,NCCL_PROTO=LL", "python"])
    {'NCCL_ALGO': 'Ring', 'NCCL_PROTO': 'LL'}
    """
    return {name: value for word in words for name, value in _AMONG.findall(word)}


def set_by(program: ast.Module) -> dict[str, str]:
    """Texts that a program puts under names: in a table, or as ``os.environ["NAME"] = "1"``.

    >>> set_by(ast.parse("a = {'NCCL_ALGO': 'Ring'}; os.environ['NCCL_PROTO'] = 'LL'"))
    {'NCCL_PROTO': 'LL', 'NCCL_ALGO': 'Ring'}
    """
    return {
        key.value: value.value
        for key, value in _entries(program)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
        if isinstance(key.value, str) and isinstance(value.value, str)
    }


def _entries(program: ast.Module) -> Iterator[tuple[ast.expr | None, ast.expr]]:
    for node in ast.walk(program):
        if isinstance(node, ast.Dict):
            yield from zip(node.keys, node.values, strict=True)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            yield node.targets[0].slice, node.value


def handed_on(text: str, variables: ScriptVariables) -> dict[str, str]:
    """Variables that a script exports, or sets in front of a command.

    Parameters
    ----------
    text : of the script. variables : what its words come to, by name.

    >>> handed_on("export TP=4\\nPP=2 torchrun train.py\\nDP=8\\n", {"TP": "4", "PP": "2", "DP": "8"})
    {'PP': '2', 'TP': '4'}
    """
    names: set[str] = set()
    for line in text.splitlines():
        line_words = line.split()
        if line_words[:1] == ["export"] or line_words[:2] == ["declare", "-x"]:
            names.update(word.partition("=")[0] for word in line_words[1:])
            continue
        line_words = line_words[1:] if line_words[:1] == ["env"] else line_words
        ahead = list(takewhile(lambda word: re.match(r"[A-Za-z_]\w*=", word), line_words))
        names.update(word.partition("=")[0] for word in ahead if len(line_words) > len(ahead))
    exported: dict[str, str] = {}
    for name in sorted(names & variables.keys()):
        value = variables[name]
        only = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(only, str) and "$" not in only:
            exported[name] = only
    return exported
