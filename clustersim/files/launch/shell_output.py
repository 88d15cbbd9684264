"""What commands between ``$(`` and ``)`` print where the script decides it: ``$([ $TP -gt 1 ] && echo --flag)``."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from clustersim.core.errors import ScenarioError
from clustersim.files.launch import shell_blocks as grammar
from clustersim.files.launch.shell_tests import arithmetic, compared
from clustersim.files.launch.shell_values import UNKNOWN, Expansion, Variables, echoed, function_key
from clustersim.files.launch.shell_words import Token, tokens

_SET = re.compile(r"(\w+)=([^(].*|)", re.DOTALL)
_COUNTED_FIELDS = re.compile(r"\{ *print +NF *;? *\}")
_DECLARES = {"local", "declare", "readonly", "typeset", "export"}


class _Returned(Exception):
    """``return`` was reached."""


class _NotSaidError(Exception):
    """What is printed hangs on what the script does not say, which the argument names."""


def printed(found: list[Token], variables: Variables, expansion: Expansion) -> str:
    """What commands print, or a word that names what they hang on and nobody says.

    >>> from clustersim.files.launch.shell_expand import EXPANSION
    >>> [printed(tokens("[ $TP -gt 1 ] && echo --sp", ""), said, EXPANSION) for said in ({"TP": "2"}, {"TP": "1"}, {})]
    ['--sp', '', '${TP}']
    """
    commands = _PrintedCommands(expansion)
    try:
        commands.follow(grammar.blocks(found, "a command"), dict(variables))
    except _Returned:
        pass
    except _NotSaidError as error:
        return str(error)
    except ScenarioError:
        return "${command}"
    return "\n".join(commands.lines)


class _PrintedCommands:
    """What is followed between ``$(`` and ``)``; ``lines`` : what was printed so far."""

    def __init__(self, expansion: Expansion) -> None:
        self.expansion = expansion
        self.lines: list[str] = []

    def follow(self, block: grammar.Block, variables: Variables) -> bool:
        """Follow a block, whose lines are added; whether it succeeds."""
        match block:
            case grammar.Sequence():
                answer = True
                said = len(self.lines)
                for before, one in block.items:
                    if before == "|":
                        self.lines[said:] = [self._filtered(one, "\n".join(self.lines[said:]), variables)]
                    elif before in {"|&", "&"}:
                        raise _NotSaidError("${command}")
                    elif (before != "&&" or answer) and (before != "||" or not answer):
                        said = len(self.lines)
                        answer = self.follow(one, variables)
                return answer
            case grammar.Choice():
                for test, following in block.arms:
                    if self.follow(test, variables):
                        return self.follow(following, variables)
                return self.follow(block.otherwise, variables)
            case grammar.Match():
                return self._match(block, variables)
            case grammar.Negation():
                return not self.follow(block.body, variables)
            case grammar.Group():
                return self.follow(block.body, variables)
            case grammar.Condition():
                words = list(block.words)
                held = (
                    arithmetic(words[0], variables, self.expansion)
                    if block.arithmetic
                    else compared(words, variables, self.expansion, patterns=True)
                )
                return self._decided(held, words, variables)
            case grammar.Command():
                return self._command(block, variables)
        raise _NotSaidError("${command}")

    def _command(self, command: grammar.Command, variables: Variables) -> bool:
        name, *words = command.words or ("",)
        if [mark for mark, *_ in command.files] == ["<<<"]:
            read = self.expansion.value(command.files[0][1], variables)
            self.lines.append(self._filtered(grammar.Command(command.words, command.line), read, variables))
            return True
        if command.files:
            raise _NotSaidError("${command}")
        if name in {"[", "test"}:
            inner = words[:-1] if name == "[" else words
            return self._decided(compared(inner, variables, self.expansion, patterns=False), inner, variables)
        if name in {"true", ":", "false"}:
            return name != "false"
        if name == "return":
            raise _Returned
        if (name in _DECLARES and words) or _SET.fullmatch(name):
            self._assign(words if name in _DECLARES else [name, *words], variables)
            return True
        if variables.get(function_key(name)):
            self._call(name, [one for word in words for one in self.expansion.fields(word, variables)], variables)
            return True
        if name != "echo":
            raise _NotSaidError("${command}")
        self.lines.append(echoed([one for word in words for one in self.expansion.fields(word, variables)]))
        return True

    def _match(self, match: grammar.Match, variables: Variables) -> bool:
        held = self.expansion.value(match.word, variables)
        if unknown := UNKNOWN.search(held):
            raise _NotSaidError(unknown[0])
        for patterns, following in match.arms:
            if any(fnmatchcase(held, self.expansion.value(pattern, variables)) for pattern in patterns):
                return self.follow(following, variables)
        return True

    def _assign(self, words: list[str], variables: Variables) -> None:
        """Set variables; a list is not followed, and neither is an option of ``declare``."""
        for word in words:
            match = _SET.fullmatch(word)
            if match is not None:
                variables[match[1]] = self.expansion.value(match[2], variables)
            elif not re.fullmatch(r"\w+", word):
                raise _NotSaidError("${command}")

    def _call(self, name: str, arguments: list[str], variables: Variables) -> None:
        """What a function of the script prints, whose variables are its own here: nothing of them is seen behind
        ``$( )``. One that runs itself is not followed."""
        inner = {key: held for key, held in variables.items() if not key.isdecimal() and key != function_key(name)}
        inner |= {"@": list(arguments), "*": list(arguments), "#": str(len(arguments))}
        inner |= {str(i): argument for i, argument in enumerate(arguments, 1)}
        text = variables[function_key(name)]
        try:
            self.follow(grammar.blocks(tokens(str(text), "a function"), "a function"), inner)
        except _Returned:
            return

    def _decided(self, answer: bool | None, words: list[str], variables: Variables) -> bool:
        """A condition's answer. Raises for one that nobody knows, by the name of what it lacks."""
        if answer is None:
            lacking = next(
                (found[0] for word in words if (found := UNKNOWN.search(self.expansion.value(word, variables)))),
                "${command}",
            )
            raise _NotSaidError(lacking)
        return answer

    def _filtered(self, block: grammar.Block, text: str, variables: Variables) -> str:
        """What ``tr``, ``wc``, ``awk '{print NF}'`` and ``bc`` make of a text: how scripts count and divide GPUs."""
        if not isinstance(block, grammar.Command) or block.files or not block.words:
            raise _NotSaidError("${command}")
        unknown = UNKNOWN.search(text)
        if unknown:
            raise _NotSaidError(unknown[0])
        name, *words = [one for word in block.words for one in self.expansion.fields(word, variables)]
        if name == "tr" and len(words) == 2:
            old, new = (word.replace("\\n", "\n") for word in words)
            if len(old) == len(new) == 1:
                return text.replace(old, new)
        elif name == "wc" and words in (["-l"], ["-w"]):
            return str(len(text.split()) if words == ["-w"] else text.count("\n") + 1)
        elif name == "bc" and not words and (total := self.expansion.sum_of(text, variables)) is not None:
            return str(total)
        elif name == "awk" and words and _COUNTED_FIELDS.fullmatch(words[-1]):
            between = "".join(words[:-1])
            if re.fullmatch(r"-F[^\s\\|.*+?^$()\[\]]", between):
                return "\n".join(str(len(line.split(between[2:]))) for line in text.split("\n"))
        raise _NotSaidError("${command}")
