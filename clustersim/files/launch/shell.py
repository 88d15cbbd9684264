"""A launch script's words: variables, arrays and simple conditions are followed; nothing is run."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import short

MOST = 2**16
"""Characters that a value may grow to: variables of variables would make gigabytes."""

_ASSIGNMENT = re.compile(r"(?:(?:export|local|declare|readonly)\s+)?(\w+)(\+?)=(.*)", re.DOTALL)
_OPENERS = {"for", "while", "until", "case", "select", "function"}
_CLOSERS = {"done", "esac"}
_VARIABLE = re.compile(
    r"\$\(\((?P<sum>.*?)\)\)|\$\((?P<run>[^()]*)\)|`(?P<tick>[^`]*)`"
    r"|\$\{(?P<name>\w+)(?:\[[@*]\])?(?P<op>:?[-=])?(?P<default>[^{}]*)\}|\$(?P<bare>\w+)"
)
_SUMS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_TESTS = {
    "==": operator.eq,
    "=": operator.eq,
    "!=": operator.ne,
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}

_NO_COMMAND = "holds no command with options; write it like torchrun ... pretrain_gpt.py --num-layers 32"


@dataclass
class Script:
    """What a script says.

    command : words of the command that launches training. variables : as they are where it stands.
    directives : of its ``#SBATCH`` lines. notes : what was not followed.
    """

    command: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    directives: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def script(text: str, where: str) -> Script:
    """The words of the command with most options. Raises :class:`ScenarioError` for a script that ends within a quote
    or a list, or has no such command."""
    found = Script()
    taken: list[bool | None] = []  # of each open if: whether its branch is taken; None in one that is not followed
    deep = 0  # loops and functions that are open
    for number, line in _lines(text, where):
        first = re.split(r"[\s;]", line, maxsplit=1)[0]
        if first in _OPENERS or re.match(r"\w+\s*\(\)", line):
            if not deep:
                found.notes.append(f"{where}: line {number} begins a loop or function, which is not followed")
            deep += not line.rstrip("; ").endswith(("done", "esac"))
        elif first in _CLOSERS or (first == "}" and deep):
            deep = max(0, deep - 1)
        elif deep:
            continue
        elif first == "if":
            answer = _test(line, found.variables)
            if answer is None:
                untold = "tests what the script does not say; what it does is left out"
                found.notes.append(f"{where}: line {number} {untold}")
            if not re.search(r"\bfi$", line):
                taken.append(answer)
        elif first in {"elif", "else"} and taken:
            taken[-1] = None if taken[-1] is not False else True if first == "else" else _test(line, found.variables)
        elif first == "fi":
            taken = taken[:-1]
        elif all(taken):
            _statement(line, found, where)
    if not found.command:
        raise ScenarioError(f"{where}: {_NO_COMMAND}")
    return found


def _statement(line: str, found: Script, where: str) -> None:
    if line.startswith("#SBATCH"):
        found.directives += line.split()[1:]
        return
    assigned = _ASSIGNMENT.fullmatch(line)
    if assigned and (assigned[3].startswith("(") or len(_split(_VARIABLE.sub("x", assigned[3]), where)) <= 1):
        name, more, value = assigned.groups()
        value = value[1:].rstrip()[:-1] if value.startswith("(") else value
        expanded = " ".join(" ".join(_split(expand(value, found.variables), where)).split())
        found.variables[name] = f"{found.variables.get(name, '')} {expanded}" if more else expanded
        return
    expanded = expand(line, found.variables)
    words = [
        part for word in _split(expanded, where) for part in (word.split() if word.strip().startswith("--") else [word])
    ]
    if _options(words) > _options(found.command):
        found.command = words


def _options(words: list[str]) -> int:
    return sum(word.startswith("--") for word in words)


def _lines(text: str, where: str) -> Iterator[tuple[int, str]]:
    """Logical lines with their numbers: continued ones joined, lists and quotes whole, comments gone."""
    held = ""
    start = 0
    for number, physical in enumerate(text.splitlines(), 1):
        line = physical.strip() if physical.lstrip().startswith("#SBATCH") else _without_comment(physical).strip()
        if line.startswith("#!") or (not line and not held):
            continue
        start = start if held else number
        held = f"{held} {line.removesuffix(chr(92))}".strip()
        if not line.endswith("\\") and _closed(held):
            yield start, held
            held = ""
    if held:
        raise ScenarioError(
            f"{where}: ends within a quote, a list or a continued line (line {start}); is a part missing?"
        )


def _without_comment(line: str) -> str:
    quote = ""
    for i, char in enumerate(line):
        if char in "'\"" and (i == 0 or line[i - 1] != "\\"):
            quote = "" if char == quote else quote or char
        elif char == "#" and not quote and (i == 0 or line[i - 1].isspace()):
            return line[:i]
    return line


def _closed(text: str) -> bool:
    """Whether quotes are, and the list of an assignment is."""
    plain = re.sub(r"\\.", "", text)
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", plain)
    if "'" in bare or '"' in bare:
        return False
    return not re.match(r"(\w+\s+)?\w+\+?=\(", bare) or bare.count("(") == bare.count(")")


def _split(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as wrong:
        raise ScenarioError(f"{where}: {short(text)!r}: {str(wrong).lower()}") from None


def expand(text: str, variables: dict[str, str]) -> str:
    """Text with its variables put in; one that nothing sets, and what only running tells, stay ``${NAME}``."""

    def one(match: re.Match[str]) -> str:
        if match["sum"] is not None:
            total = _sum(expand(re.sub(r"(?<![$\w{])([A-Za-z_]\w*)", r"${\1}", match["sum"]), variables))
            return "${arithmetic}" if total is None else str(total)
        if match["run"] is not None or match["tick"] is not None:
            return "${command}"
        name = match["name"] or match["bare"]
        if name in variables and (variables[name] or not (match["op"] or "").startswith(":")):
            return variables[name]
        if match["op"] is not None:
            value = expand(match["default"], variables).strip("\"'")
            if match["op"].endswith("="):
                variables[name] = value
            return value
        return f"${{{name}}}"

    made = _VARIABLE.sub(one, text)
    if len(made) > MOST:
        raise ScenarioError(
            f"a script's {short(text[:60])!r} grows to {len(made):,} characters; at most {MOST:,} are read"
        )
    return made


def _sum(text: str) -> int | None:
    """A sum of whole numbers; None for anything else."""
    try:
        tree = ast.parse(text.strip().replace("/", "//"), mode="eval").body if len(text) < 200 else None
        return _of(tree)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, KeyError):
        return None


def _of(tree: ast.AST | None) -> int:
    if isinstance(tree, ast.Constant) and type(tree.value) is int and abs(tree.value) < 2**63:
        return tree.value
    if isinstance(tree, ast.BinOp):
        return int(_SUMS[type(tree.op)](_of(tree.left), _of(tree.right)))
    raise ValueError


def _test(line: str, variables: dict[str, str]) -> bool | None:
    """What an ``if`` comes to; None where the script does not say."""
    inside = re.search(r"\[\[?\s+(.*?)\s+\]\]?\s*(;|then|$)", line)
    if inside is None or re.search(r"&&|\|\||\s-[ao]\s", line):
        return None
    empty = re.fullmatch(r"(!?)\s*-([zn])\s+(.*)", inside[1])
    if empty:
        value = re.sub(r"\$\{\w+\}", "", expand(empty[3], variables)).strip("\"' ")
        return ((value == "") == (empty[2] == "z")) != bool(empty[1])
    compared = re.fullmatch(r"(.+?)\s+(==|=|!=|-eq|-ne|-gt|-ge|-lt|-le)\s+(.+)", inside[1])
    if compared is None:
        return None
    one, other = (expand(compared[i], variables).strip("\"' ") for i in (1, 3))
    if "${" in one + other:
        return None
    if compared[2].startswith("-"):
        left = _sum(one)
        right = _sum(other)
        return None if left is None or right is None else bool(_TESTS[compared[2]](left, right))
    return bool(_TESTS[compared[2]](one, other))
