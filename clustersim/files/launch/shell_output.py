"""What commands between ``$(`` and ``)`` print where the script decides it: ``$([ $TP -gt 1 ] && echo --flag)``."""

from __future__ import annotations

from clustersim.core.errors import ScenarioError
from clustersim.files.launch import shell_blocks as grammar
from clustersim.files.launch.shell_expand import UNKNOWN, Variables, echoed, fields, value
from clustersim.files.launch.shell_tests import arithmetic, compared
from clustersim.files.launch.shell_words import Token


class _NotSaidError(Exception):
    """What is printed hangs on what the script does not say, which the argument names."""


def printed(found: list[Token], variables: Variables, depth: int) -> str:
    """What commands print, or a word that names what they hang on and nobody says.

    >>> from clustersim.files.launch.shell_words import tokens
    >>> [printed(tokens("[ $TP -gt 1 ] && echo --sp", ""), said, 0) for said in ({"TP": "2"}, {"TP": "1"}, {})]
    ['--sp', '', '${TP}']
    """
    try:
        lines: list[str] = []
        _follow(grammar.blocks(found, "a command"), dict(variables), lines)
    except _NotSaidError as error:
        return str(error)
    except ScenarioError:
        return "${command}"
    return "\n".join(lines)


def _follow(block: grammar.Block, variables: Variables, lines: list[str]) -> bool:
    """Follow a block, whose lines are added; whether it succeeds."""
    match block:
        case grammar.Sequence():
            answer = True
            for before, one in block.items:
                if before in {"|", "|&", "&"}:
                    raise _NotSaidError("${command}")
                if (before != "&&" or answer) and (before != "||" or not answer):
                    answer = _follow(one, variables, lines)
            return answer
        case grammar.Choice():
            for test, following in block.arms:
                if _follow(test, variables, lines):
                    return _follow(following, variables, lines)
            return _follow(block.otherwise, variables, lines)
        case grammar.Negation():
            return not _follow(block.body, variables, lines)
        case grammar.Group():
            return _follow(block.body, variables, lines)
        case grammar.Condition():
            words = list(block.words)
            held = arithmetic(words[0], variables) if block.arithmetic else compared(words, variables, patterns=True)
            return _decided(held, words, variables)
        case grammar.Command():
            return _command(block, variables, lines)
    raise _NotSaidError("${command}")


def _command(command: grammar.Command, variables: Variables, lines: list[str]) -> bool:
    name, *words = command.words or ("",)
    if command.files:
        raise _NotSaidError("${command}")
    if name in {"[", "test"}:
        inner = words[:-1] if name == "[" else words
        return _decided(compared(inner, variables, patterns=False), inner, variables)
    if name in {"true", ":", "false"}:
        return name != "false"
    if name != "echo":
        raise _NotSaidError("${command}")
    lines.append(echoed([one for word in words for one in fields(word, variables)]))
    return True


def _decided(answer: bool | None, words: list[str], variables: Variables) -> bool:
    """A condition's answer. Raises for one that nobody knows, by the name of what it lacks."""
    if answer is None:
        lacking = next((found[0] for word in words if (found := UNKNOWN.search(value(word, variables)))), "${command}")
        raise _NotSaidError(lacking)
    return answer
