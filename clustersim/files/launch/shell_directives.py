"""Words of what starts ranks, and options of Slurm's ``#SBATCH`` lines and srun."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

from clustersim.core.texts import data_table

ScriptVariables: TypeAlias = Mapping[str, "str | list[str]"]
"""What a script sets, by name; a list is an array."""
LAUNCHERS = frozenset(data_table("launch_words")["launchers"])
"""What starts ranks."""
DIRECTIVES: Mapping[str, str] = data_table("launch_words")["directives"]
"""Short options of sbatch and srun."""


def directed_options(words: list[str]) -> dict[str, str]:
    """Options of sbatch or srun by their long names, with ``_``; ``gpus_per_node`` from ``--gres`` too."""
    found: dict[str, str] = {}
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if word.startswith("--"):
            name, equals, said = word[2:].partition("=")
            if not equals and i < len(words) and not words[i].startswith("-"):
                said = words[i]
                i += 1
            found[name.replace("-", "_")] = said
        elif re.fullmatch(r"-[A-Za-z].*", word) and word[1] in DIRECTIVES:
            said = word[2:].lstrip("=")
            if not said and i < len(words):
                said = words[i]
                i += 1
            found[DIRECTIVES[word[1]]] = said
    gres = re.search(r"\bgpu(?::[A-Za-z][\w.-]*)?(?::(\d+))?", found.get("gres", ""))
    if gres:
        found.setdefault("gpus_per_node", gres[1] or "1")
    for name in ("gpus_per_node", "gpus"):
        counted = re.fullmatch(r"[A-Za-z][\w.-]*:(\d+)", found.get(name, ""))
        if counted:
            found[name] = counted[1]
    per_node = re.fullmatch(r"(\d+)\(x\d+\)", found.get("ntasks_per_node", ""))
    if per_node:
        found["ntasks_per_node"] = per_node[1]
    return found
