"""What commands between ``$(`` and ``)`` print where the script decides it: ``$([ $TP -gt 1 ] && echo --flag)``."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from clustersim.core.errors import ScenarioError
from clustersim.files.launch import shell_blocks as grammar
from clustersim.files.launch.shell_expand import UNKNOWN, Variables, echoed, fields, function_key, sum_of, value
from clustersim.files.launch.shell_tests import arithmetic, compared
from clustersim.files.launch.shell_words import Token, tokens

_SET = re.compile(r"(\w+)=([^(].*|)", re.DOTALL)
_DECLARES = {"local", "declare", "readonly", "typeset", "export"}


class _Returned(Exception):
    """``return`` was reached."""


class _NotSaidError(Exception):
    """What is printed hangs on what the script does not say, which the argument names."""


def printed(found: list[Token], variables: Variables) -> str:
    """What commands print, or a word that names what they hang on and nobody says.

    >>> from clustersim.files.launch.shell_words import tokens
    >>> [printed(tokens("[ $TP -gt 1 ] && echo --sp", ""), said) for said in ({"TP": "2"}, {"TP": "1"}, {})]
    ['--sp', '', '${TP}']
    """
    try:
        lines: list[str] = []
        _follow(grammar.blocks(found, "a command"), dict(variables), lines)
    except _Returned:
        pass
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
            said = len(lines)
            for before, one in block.items:
                if before == "|":
                    lines[said:] = [_filtered(one, "\n".join(lines[said:]), variables)]
                elif before in {"|&", "&"}:
                    raise _NotSaidError("${command}")
                elif (before != "&&" or answer) and (before != "||" or not answer):
                    said = len(lines)
                    answer = _follow(one, variables, lines)
            return answer
        case grammar.Choice():
            for test, following in block.arms:
                if _follow(test, variables, lines):
                    return _follow(following, variables, lines)
            return _follow(block.otherwise, variables, lines)
        case grammar.Match():
            return _match(block, variables, lines)
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
    if [mark for mark, *_ in command.files] == ["<<<"]:
        read = value(command.files[0][1], variables)
        lines.append(_filtered(grammar.Command(command.words, command.line), read, variables))
        return True
    if command.files:
        raise _NotSaidError("${command}")
    if name in {"[", "test"}:
        inner = words[:-1] if name == "[" else words
        return _decided(compared(inner, variables, patterns=False), inner, variables)
    if name in {"true", ":", "false"}:
        return name != "false"
    if name == "return":
        raise _Returned
    if (name in _DECLARES and words) or _SET.fullmatch(name):
        _assign(words if name in _DECLARES else [name, *words], variables)
        return True
    if variables.get(function_key(name)):
        _call(name, [one for word in words for one in fields(word, variables)], variables, lines)
        return True
    if name != "echo":
        raise _NotSaidError("${command}")
    lines.append(echoed([one for word in words for one in fields(word, variables)]))
    return True


def _match(match: grammar.Match, variables: Variables, lines: list[str]) -> bool:
    held = value(match.word, variables)
    if unknown := UNKNOWN.search(held):
        raise _NotSaidError(unknown[0])
    for patterns, following in match.arms:
        if any(fnmatchcase(held, value(pattern, variables)) for pattern in patterns):
            return _follow(following, variables, lines)
    return True


def _assign(words: list[str], variables: Variables) -> None:
    """Set variables; a list is not followed, and neither is an option of ``declare``."""
    for word in words:
        match = _SET.fullmatch(word)
        if match is not None:
            variables[match[1]] = value(match[2], variables)
        elif not re.fullmatch(r"\w+", word):
            raise _NotSaidError("${command}")


def _call(name: str, arguments: list[str], variables: Variables, lines: list[str]) -> None:
    """What a function of the script prints, whose variables are its own here: nothing of them is seen behind ``$( )``.
    One that runs itself is not followed."""
    inner = {key: held for key, held in variables.items() if not key.isdecimal() and key != function_key(name)}
    inner |= {"@": list(arguments), "*": list(arguments), "#": str(len(arguments))}
    inner |= {str(i): argument for i, argument in enumerate(arguments, 1)}
    text = variables[function_key(name)]
    try:
        _follow(grammar.blocks(tokens(str(text), "a function"), "a function"), inner, lines)
    except _Returned:
        return


def _decided(answer: bool | None, words: list[str], variables: Variables) -> bool:
    """A condition's answer. Raises for one that nobody knows, by the name of what it lacks."""
    if answer is None:
        lacking = next((found[0] for word in words if (found := UNKNOWN.search(value(word, variables)))), "${command}")
        raise _NotSaidError(lacking)
    return answer


_COUNTED_FIELDS = re.compile(r"\{ *print +NF *;? *\}")


def _filtered(block: grammar.Block, text: str, variables: Variables) -> str:
    """What ``tr``, ``wc``, ``awk '{print NF}'`` and ``bc`` make of a text: how scripts count and divide GPUs."""
    if not isinstance(block, grammar.Command) or block.files or not block.words:
        raise _NotSaidError("${command}")
    unknown = UNKNOWN.search(text)
    if unknown:
        raise _NotSaidError(unknown[0])
    name, *words = [one for word in block.words for one in fields(word, variables)]
    if name == "tr" and len(words) == 2:
        old, new = (word.replace("\\n", "\n") for word in words)
        if len(old) == len(new) == 1:
            return text.replace(old, new)
    elif name == "wc" and words in (["-l"], ["-w"]):
        return str(len(text.split()) if words == ["-w"] else text.count("\n") + 1)
    elif name == "bc" and not words and (total := sum_of(text, variables)) is not None:
        return str(total)
    elif name == "awk" and words and _COUNTED_FIELDS.fullmatch(words[-1]):
        between = "".join(words[:-1])
        if re.fullmatch(r"-F[^\s\\|.*+?^$()\[\]]", between):
            return "\n".join(str(len(line.split(between[2:]))) for line in text.split("\n"))
    raise _NotSaidError("${command}")
