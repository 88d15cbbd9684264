"""A shell script's text -> tokens: words with their quotes, operators, redirections with the text behind them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clustersim.core.errors import ScenarioError

DEPTH = 40
"""How deep quotes, substitutions and blocks may lie in each other."""

OPERATORS = (";;&", ";;", ";&", "&&", "||", "|&", ";", "|", "&", "(", ")")
_REDIRECTION = re.compile(r"(?:\d+)?(<<<|<<-|<<|<&|<>|>>|>&|>\||>|<)|(&>>|&>)")
_PLACEHOLDER = re.compile(r"<([A-Za-z](?:[\w ./:-]*\w)?)>(?=[\s/;,]|$)")
"""A word in angle brackets that a person is to fill in. A shell would read a file of its name and write into one of the
next word's, which nobody means: the option behind it would be left out."""
_ARRAY = re.compile(r"\w+(\[[^\]]*\])?\+?=")


@dataclass(frozen=True)
class Token:
    """A word as it is written, or an operator.

    text : with its quotes. line : it begins on, from 1. kind : ``word``, ``operator`` (a newline is ``;``) or
    ``redirection``. body : of a redirection ``<<``, the lines behind it; ``plain`` : whose variables are not expanded.
    """

    text: str
    line: int
    kind: str = "word"
    body: str = ""
    plain: bool = False


def tokens(text: str, where: str) -> list[Token]:
    """The tokens of a script. Raises :class:`ScenarioError` for one that ends within a quote or a list."""
    return _Lexer(text, where).all()


def skipped(text: str, start: int, depth: int = 0) -> int:
    """Where the quote or substitution that begins at ``start`` ends; -1 where it does not, or lies too deep."""
    if depth > DEPTH:
        return -1
    char = text[start]
    if char == "'":
        return text.find("'", start + 1) + 1 or -1
    if char == "\\":
        return min(start + 2, len(text))
    if char in '"`':
        return _until(text, start + 1, char, depth)
    if text.startswith("$((", start):
        return _until(text, start + 3, "))", depth)
    if text.startswith(("$(", "<(", ">("), start):
        return _until(text, start + 2, ")", depth)
    if text.startswith("${", start):
        return _until(text, start + 2, "}", depth)
    if char == "(":
        return _until(text, start + 1, ")", depth)
    return start + 1


def _until(text: str, at: int, close: str, depth: int) -> int:
    """Behind the next ``close`` that no quote or substitution holds; -1 where there is none."""
    quoted = close in '"`'
    while at < len(text):
        if text.startswith(close, at):
            return at + len(close)
        char = text[at]
        opens = char in '\\"`' or text.startswith(("$(", "${"), at)
        if quoted:  # in double quotes, a bracket or a single quote is itself
            opens = char == "\\" or text.startswith(("$(", "${"), at) or (close == '"' and char == "`")
        elif char == "'" or (char == "(" and close.startswith(")")):
            opens = True
        elif char == "#" and close == ")" and text[at - 1].isspace():
            line = text.find("\n", at)
            at = len(text) if line < 0 else line
            continue
        at = skipped(text, at, depth + 1) if opens else at + 1
        if at < 0:
            return -1
    return -1


class _Lexer:
    def __init__(self, text: str, where: str) -> None:
        self.text = text.replace("\r\n", "\n").replace("\0", "")
        self.where = where
        self.at = 0
        self.found: list[Token] = []
        self.waiting: list[tuple[int, str, bool]] = []  # redirections << whose lines come next
        self._counted = (0, 1)

    def all(self) -> list[Token]:
        """Every token of the text."""
        while self.at < len(self.text):
            self._next()
        return self.found

    @property
    def line(self) -> int:
        """Number of the line that is read, from 1; only what is new since the last call is counted."""
        at, line = self._counted
        line += self.text.count("\n", at, self.at)
        self._counted = self.at, line
        return line

    def _next(self) -> None:
        text = self.text
        char = text[self.at]
        if char == "\n":
            self._put(";", "operator")
            self.at += 1
            self._bodies()
        elif char in " \t\r":
            self.at += 1
        elif text.startswith("\\\n", self.at) or (char == "\\" and self.at + 1 == len(text)):
            self.at += 2
        elif char == "#":
            end = text.find("\n", self.at)
            self.at = len(text) if end < 0 else end
        elif text.startswith(("<(", ">("), self.at) or _PLACEHOLDER.match(text, self.at):
            self._word()
        elif redirection := _REDIRECTION.match(text, self.at):
            self._put(redirection[1] or redirection[2], "redirection")
            self.at = redirection.end()
        elif text.startswith("((", self.at) and self._begins():
            self._arithmetic()
        elif operator := next((one for one in OPERATORS if text.startswith(one, self.at)), None):
            self._put(operator, "operator")
            self.at += len(operator)
        else:
            self._word()

    def _put(self, text: str, kind: str = "word") -> None:
        self.found.append(Token(text, self.line, kind))

    def _begins(self) -> bool:
        """Whether a command begins here, or the head of a loop."""
        before = self.found[-1] if self.found else None
        return (
            before is None or before.kind == "operator" or before.text in {"for", "if", "while", "until", "then", "!"}
        )

    def _arithmetic(self) -> None:
        end = _until(self.text, self.at + 2, "))", 0)
        if end < 0:
            raise self._open(self.line)
        line = self.line
        self.found.append(Token(self.text[self.at : end], line))
        self.at = end

    def _word(self) -> None:
        start = self.at
        line = self.line
        text = self.text
        at = start
        made = ""
        while at < len(text):
            char = text[at]
            placeholder = _PLACEHOLDER.match(text, at) if char == "<" and made[-1:] in {"", "=", "/"} else None
            if placeholder is not None:
                made += f"${{{re.sub('[^a-zA-Z0-9]+', '_', placeholder[1])}}}"
                at = placeholder.end()
                continue
            if char in " \t\r\n;|&<>)" and not text.startswith(("<(", ">("), at):
                break
            if text.startswith("\\\n", at):
                at += 2
                continue
            if char == "(" and not _ARRAY.fullmatch(made):
                break
            end = skipped(text, at) if char in "'\"`\\(" or text.startswith(("$(", "${", "<(", ">("), at) else at + 1
            if end < 0:
                raise self._open(line)
            made += text[at:end]
            at = end
        if at == start:  # a lone bracket
            at += 1
        self.at = at
        self.found.append(Token(made, line))
        self._heredoc()

    def _heredoc(self) -> None:
        """Of a word behind ``<<``, what ends the lines that come."""
        if len(self.found) < 2 or self.found[-2].text not in {"<<", "<<-"} or self.found[-2].kind != "redirection":
            return
        word = self.found.pop().text
        plain = any(char in word for char in "'\"\\")
        self.waiting.append((len(self.found) - 1, re.sub(r"['\"\\]", "", word), plain))

    def _bodies(self) -> None:
        for index, delimiter, plain in self.waiting:
            body: list[str] = []
            strip = self.found[index].text == "<<-"
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                line = line.lstrip("\t") if strip else line
                self.at = end + 1
                if line.rstrip("\r") == delimiter:
                    break
                body.append(line)
            mark = self.found[index]
            self.found[index] = Token(mark.text, mark.line, mark.kind, "\n".join(body) + "\n", plain)
        self.waiting = []

    def _open(self, line: int) -> ScenarioError:
        return ScenarioError(
            f"{self.where}: ends within a quote, a list or a substitution (line {line}); is a part missing?"
        )
